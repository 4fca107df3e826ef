"""What methods have beside their loss: heads, momentum encoders, what they embed, localization as an extra term."""

import math

import pytest
import torch
from helpers import run_info
from tiny import SIDE, batch, make
from torch import nn

from idmm import config
from idmm.config import METHODS


# ------------------------------------------------------------------ heads, momentum encoders
def shape(head):
    """Kinds and widths of a head's layers, in short."""
    return [
        f"{type(layer).__name__}{'' if getattr(layer, 'weight', None) is None else tuple(layer.weight.shape)}"
        for layer in head.modules()
        if not list(layer.children()) and not isinstance(layer, nn.Identity)
    ]


def test_heads_are_the_papers():
    mlp = ["Linear(16, 16)", "ReLU", "Linear(256, 16)"]
    for name in ("simclr", "supcon", "mocov2"):
        assert shape(make(name).head) == mlp
        assert all(layer.bias is not None for layer in make(name).head.layers if isinstance(layer, nn.Linear))
    v3 = make("mocov3")
    block = ["Linear(12, 16)", "BatchNorm1d(12,)", "ReLU", "Linear(12, 12)", "BatchNorm1d(12,)", "ReLU"]
    assert shape(v3.head) == [*block, "Linear(6, 12)", "BatchNorm1d"], "the last without scale and shift"
    assert shape(v3.predictor) == ["Linear(12, 6)", "BatchNorm1d(12,)", "ReLU", "Linear(6, 12)", "BatchNorm1d"]
    layers = shape(make("dino").head.layers)
    assert layers == ["Linear(12, 16)", "GELU", "Linear(12, 12)", "GELU", "Linear(6, 12)"]


CONSTANT = [0.9] * 10
RISING = [1 - 0.1 * (math.cos(math.pi * step / 10) + 1) / 2 for step in range(10)]  # 0.9 to 1 after ten steps


@pytest.mark.parametrize(("name", "momenta"), [("mocov2", CONSTANT), ("mocov3", RISING), ("dino", RISING)])
def test_the_momentum_encoder_is_an_average_of_what_it_follows(name, momenta):
    method = make(name, told=run_info(11, steps=10), momentum=0.9)
    followed = [*method.backbone.parameters(), *method.head.parameters()]
    copies = list(method.teacher.parameters())
    assert all(torch.equal(a, b) for a, b in zip(copies, followed, strict=True)), "it starts as a copy"
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.5)
    wanted = [p.detach().clone() for p in copies]
    for step in (0, 1, 5, 9):
        method(batch(2, double=False, seed=step), 0, 0)["loss"].backward()
        optimizer.step()
        method.after_step(step)
        m = momenta[step]
        wanted = [m * w + (1 - m) * p.detach() for w, p in zip(wanted, followed, strict=True)]
        for found, want in zip(copies, wanted, strict=True):
            torch.testing.assert_close(found, want)
    assert not all(torch.allclose(a, b) for a, b in zip(copies, followed, strict=True))


def test_mocov3_leaves_the_patch_projection_as_it_was_drawn():
    method = make("mocov3")
    before = method.backbone.patch_embed.proj.weight.clone()
    method(batch(2, double=False), 0, 0)["loss"].backward()
    trained = [p for p in method.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    torch.optim.SGD(trained, lr=0.5).step()
    assert torch.equal(method.backbone.patch_embed.proj.weight, before)
    assert all(p.requires_grad for name, p in method.backbone.named_parameters() if "patch_embed" not in name)


# ------------------------------------------------------------------ all of them
@pytest.mark.parametrize("name", METHODS)
def test_localization_is_added_to_each_method(name):
    given = batch(2, double=False)
    given["views"] = [views[..., :SIDE, :SIDE] for views in given["views"]]
    plain = make(name)(given, 7, 0)
    method = make(name, drloc=config.DrLoc(weight=0.3, pairs=4))
    both = method(given, 7, 0)
    assert both.keys() - plain.keys() == {"drloc"} and float(both["drloc"]) > 0
    torch.testing.assert_close(both["loss"], plain["loss"] + 0.3 * both["drloc"], rtol=1e-5, atol=1e-5)
    both["loss"].backward()
    assert all(p.grad is not None for p in method.localization.parameters())
