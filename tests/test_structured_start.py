"""Structured fresh weights (model.start): attention, positions and patch embedding by loops, and
runs."""

import itertools
import math

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from helpers import column, inside, inside_ok, logged, same
from test_resume import stop_at
from torch.testing import assert_close

from idmm.models import create_backbone
from idmm.models.vit_init import init_vit
from idmm.seeding import derive, seeded

STRUCTURED = dict(model__start="structured", train__epochs=2)


def batches(count=40, side=16, channels=3, parts=2):
    images = (
        2
        + torch.randn(
            count, channels, side, side, generator=torch.Generator().manual_seed(0)
        ).cumsum(3)
        / 4
    )
    return [{"images": part} for part in images.chunk(parts)]


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_look_at_like_patches_and_take_off_what_they_find(heads):
    """W_q' W_k is the nearest matrix of a head's rank to 0.7 Z + 0.7 I, W_proj W_v is 0.4 Z - 0.4
    I."""
    model = tiny.backbone(num_heads=heads, depth=2)
    init_vit(model, batches(), seed=3)
    draw = torch.Generator().manual_seed(derive(3, "start"))
    width = 16
    for block in model.blocks:
        query, key, value = block.attn.qkv.weight.detach().reshape(3, width, width)
        for head in range(heads):
            z = torch.randn(width, width, generator=draw) / math.sqrt(width)
            u, s, v = np.linalg.svd((0.7 * z + 0.7 * torch.eye(width)).numpy())
            rank = width // heads
            expected = sum(s[r] * np.outer(u[:, r], v[r]) for r in range(rank))
            rows = slice(head * rank, (head + 1) * rank)
            np.testing.assert_allclose((query[rows].T @ key[rows]).numpy(), expected, atol=1e-5)
        z = torch.randn(width, width, generator=draw) / math.sqrt(width)
        product = block.attn.proj.weight.detach() @ value
        assert_close(
            product,
            0.4 * z - 0.4 * torch.eye(width),
            atol=1e-5,
            rtol=0,
        )


@pytest.mark.parametrize("token", [True, False])
def test_positions_are_sines_and_cosines_of_row_and_column(token):
    kwargs = {} if token else dict(class_token=False, global_pool="avg")
    model = create_backbone("vit_tiny_patch16_224", [16, 24], **{**tiny.VIT, **kwargs})
    before = model.pos_embed.detach().clone()
    init_vit(model, [{"images": torch.randn(4, 3, 16, 24)}], seed=0)
    positions = model.pos_embed.detach()[0, token:]
    waves = [10000 ** (-k / 4) for k in range(4)]
    for number, place in enumerate(itertools.product(range(2), range(3))):
        values = []
        for function, at in itertools.product((math.sin, math.cos), place):
            values += [function(at * wave) for wave in waves]
        assert_close(positions[number], torch.tensor(values), atol=1e-5, rtol=0)
    assert torch.equal(model.pos_embed[:, :token], before[:, :token]), "the class token's stays"


@pytest.mark.parametrize(
    "channels, patch, side",
    [
        (3, 8, 16),
        (1, 2, 8),
    ],
)
def test_the_patch_embedding_whitens(channels, patch, side):
    """Outputs have mean 0, no correlation, and a mean variance of 1; of small patches there are
    fewer than outputs."""
    kwargs = {
        **tiny.VIT,
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": 16,
    }
    with seeded(0):
        model = create_backbone("vit_tiny_patch16_224", side, **kwargs)
    layer = model.patch_embed.proj
    before = model.patch_embed.proj.weight.detach().clone()
    parts = batches(channels=channels, side=side)
    init_vit(model, parts, seed=0)
    images = torch.cat(column(parts, "images"))
    patches = F.unfold(images, patch, stride=patch // 2).transpose(1, 2).flatten(0, 1)
    count = min(16, patches.shape[1])
    outputs = (patches @ layer.weight[:count].flatten(1).T + layer.bias[:count]).detach().double()
    assert_close(
        outputs.mean(0),
        torch.zeros(count).double(),
        atol=1e-3,
        rtol=0,
    )
    covariance = outputs.T @ outputs / len(outputs)
    off = covariance - covariance.diag().diag()
    assert float(off.abs().max()) < 1e-2
    assert float(covariance.diag().mean()) == pytest.approx(1, abs=0.01)
    assert torch.equal(layer.weight[count:], before[count:])


def test_runs(tmp_path, monkeypatch):
    """They end otherwise than without, and a stopped one as one that was not."""
    whole, cut, plain = (tmp_path / name for name in ("whole", "cut", "plain"))
    inside_ok("pretrain", whole, **STRUCTURED)
    inside_ok("pretrain", plain, **{**STRUCTURED, "model__start": "timm"})
    with monkeypatch.context() as patch:
        stop_at(patch, 1, 0, 2)
        assert inside("pretrain", cut, **STRUCTURED) == 130
    inside_ok("pretrain", cut, **STRUCTURED)
    assert same(whole, cut)
    assert not same(whole, plain)
    assert (
        logged(cut).count(
            "model.start: attention, positions and the patch embedding of vit_tiny_patch16_224"
        )
        == 1
    )


def test_weights_to_start_from_and_other_models_stay_as_they_are(tmp_path, capsys):
    few = dict(
        stages=[{"size": 16, "epochs": 1}], train__lr=1e-12, train__weight_decay=0, train__ema=None
    )
    inside_ok("pretrain", tmp_path / "a", train__epochs=1)
    start = dict(
        **few,
        model__name=None,
        model__kwargs=None,
        init=str(tmp_path / "a"),
    )
    inside_ok("finetune", tmp_path / "b", **start, model__start="structured")
    inside_ok("finetune", tmp_path / "c", **start)
    assert same(tmp_path / "b", tmp_path / "c")
    net = dict(model__name="resnet10t", model__kwargs={"channels": [8, 8, 8, 16]})
    assert (
        inside(
            "finetune",
            tmp_path / "d",
            **few,
            **net,
            model__start="structured",
        )
        == 2
    )
    line = (
        "model.start: structured, but resnet10t is not one of timm's vision transformers "
        "with learned positions"
    )
    assert line in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
