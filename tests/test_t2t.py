"""T2T-ViT: its performers, its positions and its numbers against the public code's."""

import safetensors.torch
import timm
import torch
from contract import NORM, Contract, load
from folders import tree
from helpers import inside, same

from idmm.errors import Interrupted
from idmm.models import create_backbone, read_checkpoint, save_model
from idmm.models.base import sinusoids
from idmm.models.build import export_kwargs
from idmm.training import loop


class TestContract(Contract):
    name = "t2t_vit_7"
    kwargs = {"embed_dim": 32, "depth": 2, "num_heads": 2, "token_dim": 16, "token_drop_rate": 0.0}
    dim = 32
    resized = ["pos_embed"]
    levels = 2
    layers = ["cls_token", "blocks.0.", "blocks.1.", "head."]
    official = {  # of both sizes; the positions are the public code's own
        "t2t_vit_7": ([0.35596, -0.18962, 0.51601, 0.10589, 0.45958, -0.2189, 0.01722, -0.57], 264.08688),
        "t2t_vit_14": ([0.24853, 0.05627, 0.27634, -0.22709, -0.33049, -0.04573, -0.57052, 0.07796], 249.2973),
    }

    def grid_size(self, model):
        assert model.pos_embed.shape[1] == 1 + model.patch_embed.num_patches
        return model.patch_embed.grid_size

    def isolate(self, model):
        for module in (model.patch_embed.performer1, model.patch_embed.performer2, *(b.attn for b in model.blocks)):
            torch.nn.init.zeros_(module.proj.weight)


def tiny(size=64, **kwargs):
    return create_backbone("t2t_vit_7", size, **{**TestContract.kwargs, **kwargs})


def test_random_features_are_orthogonal_saved_and_never_trained():
    model, other = tiny(num_classes=2), tiny()
    w = model.patch_embed.performer1.w
    torch.testing.assert_close(w @ w.T, 8 * torch.eye(8))  # rows of length sqrt(m)
    names = {n for n, _ in model.named_buffers()}
    assert names == {"patch_embed.performer1.w", "patch_embed.performer2.w", "pos_embed"}
    assert names <= set(load(other, model.state_dict()).loaded) and torch.equal(other.patch_embed.performer1.w, w)


def saved(folder, state, size, name="t2t_vit_7", kwargs=TestContract.kwargs):
    save_model(folder, "backbone", state, name=name, kwargs=export_kwargs(name, kwargs, size), **NORM)
    return folder


def two_lines(folder):
    """The model as README has it loaded: timm's name and arguments, then a strict state dict."""
    read = read_checkpoint(folder)
    model = timm.create_model(read.name, **read.kwargs)
    model.load_state_dict(safetensors.torch.load_file(folder / "backbone.safetensors"), strict=True)
    return model.eval()


def interpolated(table, side):
    """As the release does: bicubic, not antialiased."""
    old = round((table.shape[1] - 1) ** 0.5)
    grid = table[:, 1:].mT.unflatten(2, (old, old))  # [1, D, h, w]
    grid = torch.nn.functional.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat([table[:, :1], grid.flatten(2).mT], dim=1)


def test_the_releases_table_is_loaded(tmp_path):
    small, large = tiny(112), tiny(224)
    released = {"module." + k: v for k, v in large.state_dict().items()} | {"module.pos_embed": torch.randn(1, 197, 32)}
    torch.save({"state_dict_ema": released}, tmp_path / "a.pth")
    table = released["module.pos_embed"]
    report = read_checkpoint(tmp_path / "a.pth").load_into(small)
    assert report.resized == ["pos_embed"] and torch.equal(small.pos_embed, interpolated(table, 7))


def test_stages_hand_the_table_on(tmp_path, monkeypatch, capsys):
    """Pretrained at 32 pixels, tuned at 48 and 64: whole, and interrupted in the last stage."""

    def stop(loop, *position):
        original(loop, *position)
        if loop.plan.number == 2:
            raise Interrupted("stopped by the test")

    few = {"model__name": "t2t_vit_7", "model__kwargs": {**TestContract.kwargs, "depth": 1}, "train__epochs": 1}
    few |= {"data__subset": None, "model__drop_path": 0.0, "train__batch_size": 10, "data__name": "folder"}
    few["data__root"] = str(tree(tmp_path / "images", train={"a": 10, "b": 10}, val={"a": 2, "b": 2}))
    first, original = tmp_path / "pretrain", loop.Loop._save
    assert inside("pretrain", first, views__size=32, **few) == 0
    tune = {**few, "stages": [{"size": 48}, {"size": 64}], "train__classifier_init": "random"}
    table = interpolated(interpolated(sinusoids(5, 32), 3), 4)
    assert inside("finetune", tmp_path / "whole", init=str(first), **tune) == 0
    assert torch.equal(two_lines(tmp_path / "whole").pos_embed, table)
    assert capsys.readouterr().err.count("resized: pos_embed") == 2

    cut = tmp_path / "cut"
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_save", stop)
        assert inside("finetune", cut, init=str(first), **tune) == 130
    assert inside("finetune", cut, init=str(first), **tune) == 0 and same(cut, tmp_path / "whole")
