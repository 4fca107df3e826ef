"""Patches left out in training: what a model then sees, what it exports, and what cannot be had."""

import json

import pytest
import torch
from folders import faults
from helpers import inside, same
from test_resume import stop_at
from tiny import VIT, make

from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config.parsing import build
from idmm.errors import UserError
from idmm.models import create_backbone
from idmm.seeding import seeded

HALF = dict(model__patch_drop=0.5, views__size=32, train__epochs=2)


def test_patches_are_left_out_in_training_alone():
    with seeded(0):
        model, plain = (create_backbone("vit_tiny_patch16_224", 32, patch_drop=p, **VIT) for p in (0.25, 0.0))
    plain.load_state_dict(model.state_dict(), strict=True)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    images = torch.randn(2, 3, 32, 32)
    one, other = model.train()(images), model(images)
    assert seen == [1 + 12, 1 + 12] and not torch.equal(one, other), "16 patches, and the class token stays"
    assert torch.equal(model.eval()(images), plain.eval()(images)) and seen[-1] == 1 + 16


def test_momentum_encoders_see_all_patches():
    with seeded(0):
        model = create_backbone("vit_tiny_patch16_224", 16, patch_drop=0.5, **VIT)
    method = make("dino", of=model)
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(method.teacher(images), method.teacher(images))
    assert not torch.equal(method.backbone(images), method.backbone(images))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("half") / "run"
    assert inside("pretrain", out, **HALF) == 0
    return out


def test_a_run_that_was_stopped_ends_as_one_that_was_not(run, tmp_path, monkeypatch):
    stop_at(monkeypatch, 1, 1, 2)
    assert inside("pretrain", tmp_path / "cut", **HALF) == 130
    monkeypatch.undo()
    assert inside("pretrain", tmp_path / "cut", **HALF) == 0
    assert same(run, tmp_path / "cut")


def test_fine_tuning_sees_all_patches_unless_asked(run, tmp_path):
    about = json.loads((run / "backbone.json").read_text())
    assert not any("patch_drop" in key for key in about["kwargs"])
    few = dict(stages=None, train__size=32, train__epochs=1, init=str(run), model__name=None, model__kwargs=None)
    for share in (0.0, 0.5):
        assert inside("finetune", tmp_path / str(share), **few, model__patch_drop=share) == 0
    assert not same(tmp_path / "0.0", tmp_path / "0.5")


@pytest.mark.parametrize("name", ["resnet10t", "swin_tiny_patch4_window7_224", "t2t_vit_7"])
def test_a_model_that_cannot_leave_out_patches_is_refused(name, tmp_path, capsys):
    with pytest.raises(
        UserError, match=f"^model.patch_drop: 0.5, but {name} cannot leave out patches; wanted 0 for it"
    ):
        create_backbone(name, patch_drop=0.5)
    if name == "resnet10t":
        assert inside("pretrain", tmp_path / "a", model__name=name, model__kwargs=None, **HALF) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("model.patch_drop: 0.5, but resnet10t cannot")
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("config", [PretrainConfig, FinetuneConfig])
def test_drloc_wants_the_whole_grid(config):
    (line,) = faults(build, config, {"model": {"patch_drop": 0.5}, "drloc": {"weight": 0.1}})
    assert "drloc.weight wants the whole grid and model.patch_drop leaves patches out; give one of them" in line
