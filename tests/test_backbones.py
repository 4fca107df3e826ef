"""Every backbone of both papers: its size, and a few steps of both methods, with drloc, at two image sizes."""

import math

import pytest
import timm
import torch
from helpers import run_info

from idmm import config
from idmm.config import DrLoc
from idmm.methods.drloc import Localization
from idmm.methods.finetune import Finetune
from idmm.methods.idmm import IDMM
from idmm.models import create_backbone, load_weights, logits_and_grid
from idmm.optim import create_optimizer

# Parameters with 1,000 classes: published (millions), exact here. Tables that are not trained do not count.
SIZES = {
    "deit_tiny_patch16_224": (5.7, 5_717_416),
    "deit_base_patch16_224": (86.6, 86_567_656),
    "vit_base_patch16_224": (86.6, 86_567_656),
    "pvt_v2_b0": (3.7, 3_666_760),
    "pvt_v2_b3": (45.2, 45_238_696),
    "swin_tiny_patch4_window7_224": (28.3, 28_288_354),
    "resnet50": (25.6, 25_557_032),
    "t2t_vit_7": (4.3, 4_255_694),
    "t2t_vit_14": (21.5, 21_465_806),
    "cvt_13": (20.0, 19_997_480),
}
VIT = {"patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 2}
PVT = {"embed_dims": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 4]}
SMALL = {  # what makes them small enough for two cores; the class and its forward pass stay
    "deit_tiny_patch16_224": VIT,
    "deit_base_patch16_224": VIT,
    "vit_base_patch16_224": VIT,
    "pvt_v2_b0": {},
    "pvt_v2_b3": PVT,
    "swin_tiny_patch4_window7_224": {"window_size": 2, "embed_dim": 24, "depths": [1, 1, 1, 1]},
    "resnet50": {"layers": (1, 1, 1, 1)},
    "t2t_vit_7": {"depth": 3},
    "t2t_vit_14": {"depth": 2},
    "cvt_13": {"depths": (1, 1, 2)},
}


@pytest.mark.parametrize("name", SIZES)
def test_parameters(name):
    published, exact = SIZES[name]
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=1000)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count == pytest.approx(published * 1e6, rel=0.02)
    assert count == exact


def losses(method, batch, steps=8):
    """Losses of a few steps on one batch, nothing mixed."""
    torch.manual_seed(1)
    others = {name: (child, 1.0) for name, child in method.named_children() if name != "backbone"}
    optimizer = create_optimizer(method.backbone, others, config.FinetuneTrain(weight_decay=0.0), lr=1e-4)
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
    return create_backbone(name, size, num_classes=classes, **SMALL[name])


@pytest.mark.parametrize("name", SIZES)
def test_both_methods_learn_a_batch_and_weights_move_to_another_size(name):
    generator = torch.Generator().manual_seed(3)
    views = [torch.randn(4, 2, 3, 64, 64, generator=generator)]
    backbone = built(name, 64, 0)
    extra = Localization(backbone, DrLoc(weight=0.1, pairs=16), 64, 3, epochs=1)
    method = IDMM(backbone, run_info(9), config.Method(cutmix_alpha=0), extra)
    found = losses(method, {"views": views, "index": torch.arange(4)})
    assert found[-1] < found[0] and all(map(math.isfinite, found)), found

    larger = built(name, 96, 3)
    report = load_weights(larger, backbone.state_dict(), source="stage 1", img_size=64)
    assert all("head" in key or "fc" in key for key in report.fresh), report.fresh
    extra = Localization(larger, DrLoc(weight=0.1, pairs=16), 96, 3, epochs=1)
    method = Finetune(larger, config.Augment(mixup_alpha=0, cutmix_alpha=0), localization=extra)
    images = torch.randn(4, 3, 96, 96, generator=generator)
    found = losses(method, {"images": images, "label": torch.tensor([0, 1, 2, 0])})
    assert found[-1] < found[0], found


@pytest.mark.parametrize("name", SIZES)
def test_bf16_and_compiling_change_little(name):
    model = built(name, 64, 3).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    wanted = logits_and_grid(model, images)
    gradient = torch.autograd.grad(wanted[1].square().mean(), model.parameters(), allow_unused=True)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for half, exact in zip(logits_and_grid(model, images), wanted, strict=True):
            assert 0 < (half - exact).norm() / exact.norm() < 0.03

    model.forward_features = torch.compile(model.forward_features, fullgraph=True, backend="aot_eager")  # as the engine
    compiled = logits_and_grid(model, images)
    torch.testing.assert_close(compiled, wanted, rtol=1e-4, atol=1e-5)
    after = torch.autograd.grad(compiled[1].square().mean(), model.parameters(), allow_unused=True)
    for one, other in zip(after, gradient, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
