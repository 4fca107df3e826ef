"""CvT: its convolutional projections, its batch norms and its numbers against the public code's."""

import pytest
import timm
import torch
from contract import Contract

from idmm.models import create_backbone
from idmm.models.cvt import ConvProjection


class TestContract(Contract):
    name = "cvt_13"
    kwargs = {"embed_dims": [8, 16, 24], "depths": [1, 1, 2], "num_heads": [1, 2, 3]}
    dim = 24
    levels = 3
    layers = [
        "stages.0.patch_embed.",
        "stages.0.blocks.",
        ("stages.1.patch_embed.", "stages.1.blocks."),
        ("stages.2.patch_embed.", "stages.2.cls_token", "stages.2.blocks.0."),
        "stages.2.blocks.1.",
        "head.",
    ]
    official = {
        "cvt_13": ([-0.13377, -0.20497, 0.00169, -0.12841, -0.03388, 0.02445, 0.08403, -0.07035], 262.79828),
    }

    def grid_size(self, model):
        return model.grid_size

    def isolate(self, model):
        for stage in model.stages:
            for block in stage.blocks:
                torch.nn.init.zeros_(block.attn.proj.weight)


def tiny(size=64, **kwargs):
    return create_backbone("cvt_13", size, **{**TestContract.kwargs, **kwargs})


def naive_projection(layer, x, stride):
    """3x3 windows of each channel, zeros outside, then batch norm over images and places, a number at a time."""
    kernel, (count, chans, height, width) = layer.conv.weight, x.shape
    rows, columns = range(0, height, stride), range(0, width, stride)
    out = []
    for b in range(count):
        for i in rows:
            for j in columns:
                total = torch.zeros(chans, dtype=x.dtype)
                for di in (-1, 0, 1):
                    for dj in (-1, 0, 1):
                        if 0 <= i + di < height and 0 <= j + dj < width:
                            total = total + kernel[:, 0, di + 1, dj + 1] * x[b, :, i + di, j + dj]
                out.append(total)
    out = torch.stack(out).view(count, len(rows) * len(columns), chans)
    mean, variance = out.mean((0, 1)), out.var((0, 1), correction=0)
    return (out - mean) / torch.sqrt(variance + 1e-5) * layer.bn.weight + layer.bn.bias


@pytest.mark.parametrize(("stride", "places"), [(1, 20), (2, 6)])
def test_projection_is_a_convolution_of_each_channel(stride, places):
    layer = ConvProjection(3, stride).double().train()
    torch.nn.init.normal_(layer.bn.weight)
    torch.nn.init.normal_(layer.bn.bias)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    got, wanted = layer(x), naive_projection(layer, x, stride)
    assert got.shape == (2, places, 3)
    torch.testing.assert_close(got, wanted)
    weight = torch.randn_like(got)
    grads = [torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()]) for y in (got, wanted)]
    assert all(torch.allclose(a, b) and a.abs().max() > 1e-6 for a, b in zip(*grads, strict=True))


def test_only_the_last_stage_drops_paths():
    model = tiny(drop_path=0.2, depths=[1, 2, 2])
    rates = [[block.drop_path1.drop_prob for block in stage.blocks] for stage in model.stages]
    assert rates == [[0], [0, 0], [0, 0.2]]


def test_arguments_that_it_refuses():
    with pytest.raises(ValueError, match=r"depths is \(1, 2\); wanted are 3, one a stage"):
        timm.create_model("cvt_13", depths=(1, 2))
    with pytest.raises(ValueError, match="num_heads is 3, by which the width 8 is not divisible"):
        timm.create_model("cvt_13", embed_dims=(8, 16, 24), num_heads=(3, 2, 3))
