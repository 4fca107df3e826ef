"""drloc as an extra term of both methods: its weight, its head's place, one forward pass, and whole runs with it."""

import pytest
import torch
from helpers import inside, metrics, state, weights

from idmm import config
from idmm.config import DrLoc
from idmm.errors import UserError
from idmm.methods.drloc import Localization
from idmm.methods.finetune import Finetune
from idmm.models import create_backbone
from idmm.models.grid import logits_and_grid
from idmm.seeding import numpy_rng

KWARGS = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def model(classes=3, name="vit_tiny_patch16_224"):
    torch.manual_seed(0)
    return create_backbone(name, 32, num_classes=classes, **KWARGS)


def batch():
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {"images": images, "label": torch.tensor([0, 1, 2, 0]), "index": torch.arange(4)}


def tuned(backbone, extra=None, **augment):
    method = Finetune(backbone, config.Augment(**augment))
    method.localization = extra
    return method


def test_the_loss_is_the_sum_and_the_log_holds_drloc():
    backbone = model()
    augment = dict(mixup_alpha=0, cutmix_alpha=0)
    extra = Localization(backbone, DrLoc(weight=0.3, pairs=8), 32, 3)
    plain = tuned(backbone, **augment)(batch(), 7, 0)
    both = tuned(backbone, extra, **augment)(batch(), 7, 0)
    logits, grid = logits_and_grid(backbone, batch()["images"])
    wanted = extra.loss(grid, numpy_rng(7, "drloc"))
    torch.testing.assert_close(both["drloc"], wanted.detach())
    torch.testing.assert_close(both["loss"], plain["loss"] + 0.3 * wanted)
    other = tuned(backbone, extra, **augment)(batch(), 8, 0)
    assert other["drloc"] != both["drloc"], "another step draws other pairs"


def test_one_forward_pass_serves_logits_and_grid():
    backbone = model()
    calls = []
    backbone.patch_embed.register_forward_hook(lambda *_: calls.append(1))
    extra = Localization(backbone, DrLoc(weight=1.0, mode="l1_all"), 32, 3)
    calls.clear()
    tuned(backbone, extra)(batch(), 7, 0)["loss"].backward()
    assert len(calls) == 1
    heads = [p.grad for p in extra.parameters()]
    assert len(extra.loss.heads) == 2 and all(grad is not None for grad in heads), "each block has a head of its own"


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_run_with_drloc_logs_it_and_exports_no_head(stage, tmp_path):
    assert inside(stage, tmp_path, drloc__weight=0.5, drloc__pairs=8, train__epochs=1) == 0
    assert not [key for key in weights(tmp_path) if "localization" in key or "heads" in key]
    assert all(0 < record["drloc"] < 1 for record in metrics(tmp_path))
    assert [key for key in state(tmp_path)["method"] if key.startswith("localization.")]


def test_a_frozen_backbone_is_refused(tmp_path, capsys):
    assert inside("finetune", tmp_path / "a", drloc__weight=1, model__freeze=True) == 2
    assert "drloc.weight: got 1, but model.freeze is true" in capsys.readouterr().err


def test_a_grid_of_one_place_is_refused():
    small = create_backbone("vit_tiny_patch16_224", 16, **{**KWARGS, "patch_size": 16})
    with pytest.raises(UserError) as raised:
        Localization(small, DrLoc(weight=1.0), 16, 3)
    assert str(raised.value).startswith("drloc.weight: at 16 px the final grid is 1x1, nothing is apart. ")


def test_mode_l1_all_names_itself_where_there_are_no_blocks():
    with pytest.raises(UserError, match="^drloc.mode: l1_all: resnet18 has no transformer blocks"):
        Localization(create_backbone("resnet18"), DrLoc(weight=1.0, mode="l1_all"), 64, 3)
