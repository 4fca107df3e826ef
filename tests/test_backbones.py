"""Every backbone of both papers: a few steps of both methods, with drloc, at two image sizes.

Then models whose features are not ``num_features`` wide, and those that cannot serve.
"""

import math

import pytest
import timm
import torch
from contract import load
from helpers import call, inside, run_info, weights

from idmm import config
from idmm.config import DrLoc
from idmm.methods.drloc import Localization
from idmm.methods.finetune import Finetune
from idmm.methods.idmm import IDMM
from idmm.models import create_backbone
from idmm.models.weights import save_model
from idmm.training.optim import create_optimizer

# Parameters with 1,000 classes: published (millions), exact here. Tables that are not trained do
# not count.
VIT = {"patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 2}
SMALL = {  # one of each class, small enough for two cores; the forward pass stays
    "deit_tiny_patch16_224": VIT,
    "pvt_v2_b0": {
        "embed_dims": [16, 24, 32, 48],
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 2, 4],
    },
    "swin_tiny_patch4_window7_224": {"window_size": 2, "embed_dim": 24, "depths": [1, 1, 1, 1]},
    "resnet50": {"layers": (1, 1, 1, 1)},
    "t2t_vit_7": {"depth": 2, "token_drop_rate": 0.0},
    "cvt_13": {"depths": (1, 1, 2)},
}
ONE_EPOCH = {
    "data__subset": {"total": 24}, "model__kwargs": {}, "model__drop_path": 0.0, "train__epochs": 1,
    "train__batch_size": 8, "train__save_minutes": 60, "train__warmup_epochs": 0,
}  # fmt: skip


def losses(method, batch, steps=8):
    """Losses of a few steps on one batch, nothing mixed."""
    torch.manual_seed(1)
    others = {name: (child, 1.0) for name, child in method.named_children() if name != "backbone"}
    optimizer = create_optimizer(
        method.backbone, others, config.FinetuneTrain(weight_decay=0.0), lr=1e-4
    )
    found = []
    method.train()
    for _ in range(steps):
        loss = method(batch, 7, 0)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def built(name, size, classes):
    torch.manual_seed(0)
    return create_backbone(name, size, drop_path=0.0, num_classes=classes, **SMALL[name])


@pytest.mark.parametrize("name", SMALL)
def test_both_methods_learn_a_batch_and_weights_move_to_another_size(name):
    generator = torch.Generator().manual_seed(3)
    views = [torch.randn(4, 2, 3, 64, 64, generator=generator)]
    backbone = built(name, 64, 0)
    extra = Localization(backbone, DrLoc(weight=0.1, pairs=16), 64, 3)
    method = IDMM(backbone, run_info(9), config.METHODS["idmm"](cutmix_alpha=0))
    method.localization = extra
    found = losses(method, {"views": views, "index": torch.arange(4)})
    assert found[-1] < found[0] and all(map(math.isfinite, found)), found

    larger = built(name, 96, 3)
    report = load(larger, backbone.state_dict(), 64)
    assert all("head" in key or "fc" in key for key in report.fresh), report.fresh
    extra = Localization(larger, DrLoc(weight=0.1, pairs=16), 96, 3)
    method = Finetune(larger, config.Augment(mixup_alpha=0, cutmix_alpha=0))
    method.localization = extra
    images = torch.randn(4, 3, 96, 96, generator=generator)
    found = losses(method, {"images": images, "label": torch.tensor([0, 1, 2, 0])})
    assert found[-1] < found[0], found


def pretrain(out, name, method="idmm", **changes):
    """A pretraining of one epoch through the command line; returns the exit code."""
    ours = dict.fromkeys(("classifier", "classifier_init", "classifier_lr_scale"))
    given = {f"method__{key}": value for key, value in ours.items()} if method != "idmm" else {}
    given |= {
        "views__crops": [{"count": 2, "scale": [0.3, 1.0]}],
        "views__size": 32,
        "train__accumulate": 1,
    }
    return inside(
        "pretrain",
        out,
        **{**ONE_EPOCH, **given, "model__name": name, "method__name": method, **changes},
    )


@pytest.mark.parametrize("size", [32, 64])
def test_a_last_batch_of_one_image_passes_batch_norms(tmp_path, size):
    """17 images in batches of 8; at 32 pixels the last map is 1x1, of which batch norm in training
    has no variance."""
    changes = {"data__subset": {"total": 17}, "stages": [{"size": size}], "train__ema": None}
    assert (
        inside("finetune", tmp_path, **{**ONE_EPOCH, **changes, "model__name": "test_resnet"}) == 0
    )
    counts = {
        int(value)
        for key, value in weights(tmp_path).items()
        if key.endswith("num_batches_tracked")
    }
    # those of one value sat out the third batch alone
    assert counts == ({2, 3} if size == 32 else {3})


def test_runs_of_a_model_with_layers_after_its_pooling(tmp_path, capsys):
    """Pretrained, probed, and under a classifier, where no weight gets lost."""
    name = "mobilenetv3_small_050"
    first = tmp_path / "a"
    second = tmp_path / "b"
    assert pretrain(first, name) == 0
    assert (
        call(
            [
                "probe",
                "--init",
                first,
                "--size",
                32,
                "--data.subset",
                "{total: 40}",
                "--data.workers",
                0,
            ]
        )
        == 0
    )
    changes = {
        "init": str(first),
        "stages": [{"size": 32}],
        "model__freeze": True,
        "train__ema": None,
    }
    assert inside("finetune", second, **{**ONE_EPOCH, **changes, "model__name": name}) == 0
    reports = [line for line in capsys.readouterr().err.splitlines() if "weights loaded" in line]
    assert "0 resized, 0 dropped, 2 fresh" in reports[-1]
    before = weights(first)
    after = weights(second)
    kept = [key for key in before if key.startswith("backbone/")]
    # its classifier alone was trained
    assert kept
    assert all(torch.equal(after[key], before[key]) for key in kept)
    added = {key for key in after if key.startswith("model/")} - {
        key.replace("backbone/", "model/") for key in before
    }
    assert added == {"model/classifier.weight", "model/classifier.bias"}


def test_models_that_cannot_serve_are_told_before_there_is_a_folder(tmp_path, capsys):
    name = "vit_tiny_patch16_224"
    kwargs = {**VIT, "global_pool": ""}
    out = tmp_path / "run"
    with torch.device("meta"):
        state = timm.create_model(name, img_size=32, num_classes=0, **kwargs).state_dict()
    save = dict(
        name=name,
        kwargs={**kwargs, "img_size": 32, "num_classes": 0},
        mean=[0.5] * 3,
        std=[0.2] * 3,
    )
    save_model(
        tmp_path / "init",
        "backbone",
        {key: torch.zeros(t.shape) for key, t in state.items()},
        **save,
    )

    def told(code):
        line = capsys.readouterr().err.splitlines()[-1]
        assert code == 2 and not out.exists(), line
        return line

    why = f"model.name: {name!r} with its model.kwargs returns [1, 5, 48] for an image, expected pooled features, [1, d]"
    assert told(pretrain(out, name, model__kwargs=kwargs)) == why
    init = {"init": str(tmp_path / "init"), "model__name": None, "model__kwargs": None}
    assert told(inside("finetune", out, **init, stages=[{"size": 32}])) == why
    assert told(call(["probe", "--init", init["init"], "--data.workers", 0])) == why
    line = told(call(["probe", "--init", init["init"], "--size", 20]))
    assert line.startswith(f"size: image size 20x20: {name} does not accept it: ")
