"""Every backbone of both papers: a few steps of both methods, with drloc, at two image sizes.

Then models whose features are not ``num_features`` wide, and those that cannot serve.
"""

import math

import pytest
import timm
import torch
from contract import load
from frozen import a_run
from helpers import call, call_ok, inside, inside_ok, run_info, weights

from idmm import config
from idmm.config import DrLoc
from idmm.methods.drloc import Localization
from idmm.methods.finetune import Finetune
from idmm.methods.idmm import IDMM
from idmm.models import create_backbone
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
    "swin_tiny_patch4_window7_224": {
        "window_size": 2,
        "embed_dim": 24,
        "depths": [1, 1, 1, 1],
    },
    "resnet50": {"layers": (1, 1, 1, 1)},
    "t2t_vit_7": {"depth": 2, "token_drop_rate": 0.0},
    "cvt_13": {"depths": (1, 1, 2)},
}
ONE_EPOCH = {
    "data__subset": {"total": 24},
    "model__kwargs": {},
    "model__drop_path": 0.0,
    "train__epochs": 1,
    "train__batch_size": 8,
    "train__save_minutes": 60,
    "train__warmup_epochs": 0,
}


def losses(method, batch, steps=8):
    """Losses of a few steps on one batch, nothing mixed."""
    torch.manual_seed(1)
    others = {name: (child, 1.0) for name, child in method.named_children() if name != "backbone"}
    optimizer = create_optimizer(
        method.backbone,
        others,
        config.FinetuneTrain(weight_decay=0.0),
        lr=1e-4,
    )
    values = []
    method.train()
    for _ in range(steps):
        loss = method(batch, 7, 0)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(loss.detach()))
    return values


def built(name, size, classes):
    torch.manual_seed(0)
    return create_backbone(name, size, drop_path=0.0, num_classes=classes, **SMALL[name])


@pytest.mark.parametrize("name", SMALL)
def test_both_methods_learn_and_weights_move_to_another_size(name):
    generator = torch.Generator().manual_seed(3)
    views = [torch.randn(4, 2, 3, 64, 64, generator=generator)]
    backbone = built(name, 64, 0)
    extra = Localization(backbone, DrLoc(weight=0.1, pairs=16), 64, 3)
    method = IDMM(backbone, run_info(9), config.METHODS["idmm"](cutmix_alpha=0))
    method.localization = extra
    values = losses(method, {"views": views, "index": torch.arange(4)})
    assert values[-1] < values[0] and all(map(math.isfinite, values)), values

    larger = built(name, 96, 3)
    report = load(larger, backbone.state_dict(), 64)
    assert all("head" in key or "fc" in key for key in report.fresh), report.fresh
    extra = Localization(larger, DrLoc(weight=0.1, pairs=16), 96, 3)
    method = Finetune(larger, config.Augment(mixup_alpha=0, cutmix_alpha=0))
    method.localization = extra
    images = torch.randn(4, 3, 96, 96, generator=generator)
    values = losses(method, {"images": images, "label": torch.tensor([0, 1, 2, 0])})
    assert values[-1] < values[0], values


def pretrain(out, name, **changes):
    """A pretraining of one epoch through the command line; returns the exit code."""
    views = {
        "views__crops": [{"count": 2, "scale": [0.3, 1.0]}],
        "views__size": 32,
    }
    run = {
        **ONE_EPOCH,
        **views,
        "train__accumulate": 1,
        "model__name": name,
        **changes,
    }
    return inside("pretrain", out, **run)


@pytest.mark.parametrize("size", [32, 64])
def test_a_last_batch_of_one_image_passes_batch_norms(tmp_path, size):
    """17 images in batches of 8; at 32 pixels the last map is 1x1, of which batch norm in training
    has no variance."""
    changes = {
        "data__subset": {"total": 17},
        "stages": [{"size": size}],
        "train__ema": None,
    }
    inside_ok(
        "finetune",
        tmp_path,
        **{**ONE_EPOCH, **changes, "model__name": "test_resnet"},
    )
    tensors = weights(tmp_path)
    counts = {int(tensors[key]) for key in tensors if key.endswith("num_batches_tracked")}
    # those of one value sat out the third batch alone
    assert counts == ({2, 3} if size == 32 else {3})


def test_runs_of_a_model_with_layers_after_its_pooling(tmp_path, capsys):
    """Pretrained, probed, and under a classifier, where no weight gets lost."""
    name = "mobilenetv3_small_050"
    first = tmp_path / "a"
    second = tmp_path / "b"
    assert pretrain(first, name) == 0
    few = "--data.subset '{total: 40}' --data.workers 0"
    call_ok(f"probe --init {first} --size 32 {few}")
    changes = {
        "init": first,
        "stages": [{"size": 32}],
        "model__freeze": True,
        "train__ema": None,
    }
    inside_ok("finetune", second, **{**ONE_EPOCH, **changes, "model__name": name})
    reports = [line for line in capsys.readouterr().err.splitlines() if "weights loaded" in line]
    assert "0 resized, 0 dropped, 2 fresh" in reports[-1]
    before = weights(first)
    after = weights(second)
    # only its classifier was trained
    for key, tensor in before.items():
        assert torch.equal(after.pop(key), tensor)
        after.pop(key.replace("backbone/", "model/"))
    assert set(after) == {"model/classifier.weight", "model/classifier.bias"}


def test_models_that_cannot_serve_are_refused(tmp_path, capsys):
    name = "vit_tiny_patch16_224"
    kwargs = {**VIT, "global_pool": ""}
    out = tmp_path / "run"
    kwargs |= {"img_size": 32, "num_classes": 0}
    init = a_run(
        tmp_path / "init",
        model=timm.create_model(name, **kwargs),
        kwargs=kwargs,
    )

    def fault(code):
        line = capsys.readouterr().err.splitlines()[-1]
        assert code == 2, line
        assert not out.exists()
        return line

    why = "returns [1, 5, 48] for an image, expected pooled features, [1, d]"
    line = f"model.name: {name!r} with its model.kwargs {why}"
    assert fault(pretrain(out, name, model__kwargs={**VIT, "global_pool": ""})) == line
    tuning = {
        "init": init,
        "model__name": None,
        "model__kwargs": None,
        "stages": [{"size": 32}],
    }
    assert fault(inside("finetune", out, **tuning)) == line
    assert fault(call(f"probe --init {init} --data.workers 0")) == line
    line = fault(call(f"probe --init {init} --size 20"))
    assert line.startswith(f"size: image size 20x20: {name} does not accept it: ")
