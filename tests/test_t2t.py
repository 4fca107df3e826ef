"""T2T-ViT and CvT: the contract of both, performers and positions, convolutional projections and
drop path."""

import pytest
import torch
from contract import Contract, load

from idmm.models import create_backbone, read_checkpoint


class TestT2T(Contract):
    name = "t2t_vit_7"
    kwargs = {
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "token_dim": 16,
        "token_drop_rate": 0.0,
    }
    dim = 32
    resized = ["pos_embed"]
    layers = ["cls_token", "blocks.0.", "blocks.1.", "head."]
    official = {  # of both sizes; the positions are the public code's own
        "t2t_vit_7": (
            [0.35596, -0.18962, 0.51601, 0.10589, 0.45958, -0.2189, 0.01722, -0.57],
            264.08688,
        ),
        "t2t_vit_14": (
            [0.24853, 0.05627, 0.27634, -0.22709, -0.33049, -0.04573, -0.57052, 0.07796],
            249.2973,
        ),
    }

    def grid_size(self, model):
        assert model.pos_embed.shape[1] == 1 + model.patch_embed.num_patches
        return model.patch_embed.grid_size


def tiny(size=64, **kwargs):
    return create_backbone("t2t_vit_7", size, **{**TestT2T.kwargs, **kwargs})


def test_random_features_are_orthogonal_saved_and_never_trained():
    model = tiny(num_classes=2)
    other = tiny()
    w = model.patch_embed.performer1.w
    torch.testing.assert_close(w @ w.T, 8 * torch.eye(8))  # rows of length sqrt(m)
    names = {n for n, _ in model.named_buffers()}
    assert names == {"patch_embed.performer1.w", "patch_embed.performer2.w", "pos_embed"}
    assert names <= set(load(other, model.state_dict()).loaded)
    assert torch.equal(other.patch_embed.performer1.w, w)


def interpolated(table, side):
    """As the release does: bicubic, not antialiased."""
    old = round((table.shape[1] - 1) ** 0.5)
    grid = table[:, 1:].mT.unflatten(2, (old, old))  # [1, D, h, w]
    grid = torch.nn.functional.interpolate(
        grid, size=(side, side), mode="bicubic", align_corners=False
    )
    return torch.cat([table[:, :1], grid.flatten(2).mT], dim=1)


def test_the_releases_table_is_loaded(tmp_path):
    small = tiny(112)
    large = tiny(224)
    released = {"module." + k: v for k, v in large.state_dict().items()} | {
        "module.pos_embed": torch.randn(1, 197, 32)
    }
    torch.save({"state_dict_ema": released}, tmp_path / "a.pth")
    table = released["module.pos_embed"]
    report = read_checkpoint(tmp_path / "a.pth").load_into(small)
    assert report.resized == ["pos_embed"]
    assert torch.equal(small.pos_embed, interpolated(table, 7))


class TestCvt(Contract):
    name = "cvt_13"
    kwargs = {
        "embed_dims": [8, 16, 24],
        "depths": [1, 1, 2],
        "num_heads": [1, 2, 3],
    }
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
        "cvt_13": (
            [-0.13377, -0.20497, 0.00169, -0.12841, -0.03388, 0.02445, 0.08403, -0.07035],
            262.79828,
        )
    }

    def grid_size(self, model):
        return model.grid_size


def tiny_cvt(size=64, **kwargs):
    return create_backbone("cvt_13", size, **{**TestCvt.kwargs, **kwargs})


def test_only_the_last_stage_drops_paths():
    model = tiny_cvt(drop_path=0.2, depths=[1, 2, 2])
    rates = [[block.drop_path1.drop_prob for block in stage.blocks] for stage in model.stages]
    assert rates == [
        [0],
        [0, 0],
        [0, pytest.approx(0.2)],
    ]
