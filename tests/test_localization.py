"""drloc as an extra term of both methods: its weight, its head's place, one forward pass, and whole runs with it."""

import json
import logging
import math

import pytest
import torch
from helpers import inside, run_info
from safetensors.torch import load_file

from idmm import config
from idmm.config import DrLoc
from idmm.errors import UserError
from idmm.methods.drloc import Localization
from idmm.methods.finetune import Finetune
from idmm.methods.idmm import IDMM
from idmm.models import create_backbone
from idmm.models.grid import logits_and_grid
from idmm.seeding import numpy_rng

KWARGS = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def model(classes=3, name="vit_tiny_patch16_224"):
    torch.manual_seed(0)
    return create_backbone(name, 32, num_classes=classes, **KWARGS)


def batch(size=32):
    images = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(1))
    return {"images": images, "label": torch.tensor([0, 1, 2, 0]), "index": torch.arange(4)}


def test_the_loss_is_the_sum_and_the_log_holds_drloc():
    backbone = model()
    augment = config.Augment(mixup_alpha=0, cutmix_alpha=0)
    extra = Localization(backbone, DrLoc(weight=0.3, pairs=8), 32, 3, epochs=5)
    plain = Finetune(backbone, augment)(batch(), 7, 0)
    both = Finetune(backbone, augment, localization=extra)(batch(), 7, 0)
    logits, grid = logits_and_grid(backbone, batch()["images"])
    wanted = extra.loss(grid, numpy_rng(7, "drloc"))
    torch.testing.assert_close(both["drloc"], wanted.detach())
    torch.testing.assert_close(both["loss"], plain["loss"] + 0.3 * wanted)
    other = Finetune(backbone, augment, localization=extra)(batch(), 8, 0)
    assert other["drloc"] != both["drloc"], "another step draws other pairs"


def test_one_forward_pass_serves_logits_and_grid():
    backbone = model()
    calls = []
    backbone.patch_embed.register_forward_hook(lambda *_: calls.append(1))
    extra = Localization(backbone, DrLoc(weight=1.0, mode="l1_all"), 32, 3, epochs=5)
    calls.clear()
    Finetune(backbone, config.Augment(), localization=extra)(batch(), 7, 0)["loss"].backward()
    assert len(calls) == 1
    heads = [p.grad for p in extra.parameters()]
    assert len(extra.loss.heads) == 2 and all(grad is not None for grad in heads), "each block has a head of its own"


def test_gradients_reach_the_backbone_through_the_grid_alone():
    backbone = model()
    extra = Localization(backbone, DrLoc(weight=1.0), 32, 3, epochs=5)
    extra(backbone, batch()["images"], 7, 0)[1].backward()
    assert backbone.patch_embed.proj.weight.grad.abs().sum() > 0 and backbone.head.weight.grad is None


def test_a_pretraining_step_with_drloc():
    backbone = model(classes=0)
    extra = Localization(backbone, DrLoc(weight=0.5, mode="ce"), 32, 3, epochs=5)
    views = [torch.randn(4, 2, 3, 32, 32), torch.randn(4, 3, 3, 32, 32)]
    given = {"views": views, "index": torch.arange(4)}
    method = config.Method(cutmix_alpha=0)
    torch.manual_seed(1)
    with_it = IDMM(backbone, run_info(9), method, extra)
    without = IDMM(backbone, run_info(9), method)
    without.classifier.load_state_dict(with_it.classifier.state_dict())
    one, two = with_it(given, 7, 0), without(given, 7, 0)
    torch.testing.assert_close(one["loss"], two["loss"] + 0.5 * one["drloc"])
    assert "drloc" not in two


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_the_weights_schedule(decay):
    extra = Localization(model(), DrLoc(weight=2.0, warmup_epochs=3, decay=decay), 32, 3, epochs=11)
    weights = [extra.weight(epoch) for epoch in range(11)]
    assert weights[:3] == pytest.approx([0.5, 1.0, 1.5])
    share = [i / 8 for i in range(8)]
    falls = {"none": [2.0] * 8, "linear": [2 - 2 * s for s in share]}
    falls["cosine"] = [1 + math.cos(math.pi * s) for s in share]
    assert weights[3:] == pytest.approx(falls[decay])
    assert all(w >= 0 for w in weights)


FLAGS = {"drloc__weight": 0.5, "drloc__pairs": 8}


def test_a_run_with_drloc_exports_no_head(tmp_path):
    assert inside("finetune", tmp_path / "a", **FLAGS) == 0
    keys = set(load_file(tmp_path / "a/model.safetensors")) | set(load_file(tmp_path / "a/backbone.safetensors"))
    assert not [key for key in keys if "localization" in key or "heads" in key]
    records = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert all(0 < record["drloc"] < 1 for record in records)
    state = torch.load(tmp_path / "a/last/state.pt", weights_only=True)
    assert [key for key in state["method"] if key.startswith("localization.")]


def test_a_pretraining_run_with_drloc(tmp_path):
    assert inside("pretrain", tmp_path / "a", **FLAGS) == 0
    records = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert all("drloc" in record and record["drloc_weight"] == 0.5 for record in records)


def test_a_frozen_backbone_is_refused(tmp_path, capsys):
    assert inside("finetune", tmp_path / "a", drloc__weight=1, model__freeze=True) == 2
    assert "drloc.weight trains the backbone and model.freeze forbids it" in capsys.readouterr().err


def test_settings_without_a_weight_are_said_to_do_nothing(tmp_path, capsys):
    assert inside("finetune", tmp_path / "a", drloc__mode="ce", drloc__pairs=8) == 0
    line = "drloc: off, its weight is 0: drloc.mode, drloc.pairs without effect"
    assert capsys.readouterr().err.count(line) == 1
    assert inside("finetune", tmp_path / "b", drloc__mode="ce", drloc__weight=0.1) == 0
    assert "drloc: off" not in capsys.readouterr().err
    given = dict(drloc__weight=0.1, drloc__warmup_epochs=1, train__epochs=2)
    assert inside("finetune", tmp_path / "c", **given) == 0
    assert "drloc.warmup_epochs" not in capsys.readouterr().err, "the run is longer than that"


def test_a_grid_of_one_place_is_refused():
    small = create_backbone("vit_tiny_patch16_224", 16, **{**KWARGS, "patch_size": 16})
    with pytest.raises(UserError) as raised:
        Localization(small, DrLoc(weight=1.0), 16, 3, epochs=5)
    assert str(raised.value).startswith("drloc.weight: at 16 px the final grid is 1x1, nothing is apart; ")


def test_mode_l1_all_names_itself_where_there_are_no_blocks():
    with pytest.raises(UserError, match="^drloc.mode: l1_all: resnet18 has no transformer blocks"):
        Localization(create_backbone("resnet18"), DrLoc(weight=1.0, mode="l1_all"), 64, 3, epochs=5)


def test_a_warmup_as_long_as_the_stage_is_said(caplog):
    caplog.set_level(logging.WARNING, "idmm")
    Localization(model(), DrLoc(weight=1.0, warmup_epochs=5), 32, 3, epochs=5)
    assert "drloc.warmup_epochs: 5, but the stage has 5 epochs" in caplog.text
