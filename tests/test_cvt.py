"""CvT: its convolutional projections, its batch norms and its numbers against the public code's."""

import pytest
import timm
import torch
from contract import Contract

from idmm.models import create_backbone


class TestContract(Contract):
    name = "cvt_13"
    kwargs = {"embed_dims": [8, 16, 24], "depths": [1, 1, 2], "num_heads": [1, 2, 3]}
    dim = 24
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


def test_only_the_last_stage_drops_paths():
    model = tiny(drop_path=0.2, depths=[1, 2, 2])
    rates = [[block.drop_path1.drop_prob for block in stage.blocks] for stage in model.stages]
    assert rates == [[0], [0, 0], [0, 0.2]]


def test_arguments_that_it_refuses():
    with pytest.raises(ValueError, match=r"depths is \(1, 2\), expected 3 values, one per stage"):
        timm.create_model("cvt_13", depths=(1, 2))
    with pytest.raises(ValueError, match="num_heads is 3, which does not divide the width 8"):
        timm.create_model("cvt_13", embed_dims=(8, 16, 24), num_heads=(3, 2, 3))
