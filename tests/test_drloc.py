"""Dense relative localization against a naive loop written from the paper's supplement; in methods
and runs."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import inside_ok, metrics, state, weights

from idmm import config
from idmm.config import DrLoc
from idmm.errors import UserError
from idmm.losses import DenseRelativeLocalization
from idmm.losses.drloc import MODES
from idmm.methods.drloc import Localization
from idmm.methods.finetune import Finetune
from idmm.models import create_backbone, token_grid
from idmm.seeding import derive, numpy_rng

ONE = [mode for mode in MODES if mode != "l1_all"]


def naive_pool(grid, most):
    """Adaptive average pooling cell by cell: cell i of n covers rows floor(i h/n) to ceil((i+1)
    h/n)."""
    h, w = grid.shape[1:]
    n = min(h, most)
    m = min(w, most)
    cells = {}
    for i in range(n):
        rows = slice(i * h // n, -(-(i + 1) * h // n))
        for j in range(m):
            columns = slice(j * w // m, -(-(j + 1) * w // m))
            cells[i, j] = grid[:, rows, columns].flatten(1).mean(1)
    return cells, n, m


def naive(head, grid, positions, mode, grid_size, alpha=0.001):
    """The pseudocode of Fig. 2 and Eqs. 3-6 of the supplement, image by image and pair by pair."""
    w1, b1, w2, b2, w3, b3 = head.parameters()
    terms = []
    for image, pairs in zip(grid, positions, strict=True):
        cells, *k = naive_pool(image, grid_size)
        for *p, i, j in pairs.tolist():
            pair = torch.cat([cells[tuple(p)], cells[i, j]])
            out = w3 @ torch.relu(w2 @ torch.relu(w1 @ pair + b1) + b2) + b3
            for axis, delta in enumerate((p[0] - i, p[1] - j)):  # u: rows, v: columns
                if mode in ("l1", "l1_all", "l1_signed"):
                    target = delta / k[axis]
                    if mode != "l1_signed":
                        target = abs(target)
                    terms.append(abs(out[axis] - target) / 2)
                    continue
                n = 2 * grid_size + 1
                exps = torch.exp(out[axis * n : axis * n + n])
                prob = exps / exps.sum()
                if mode == "ce":
                    terms.append(-torch.log(prob[delta + grid_size]))
                    continue
                mu = sum(prob[c] * (c - grid_size) for c in range(n))
                var = sum(prob[c] * (c - grid_size - mu) ** 2 for c in range(n))
                terms.append((delta - mu) ** 2 / var + alpha * torch.log(torch.sqrt(var)))
    return sum(terms) / (len(grid) * positions.shape[1])


def rng(*numbers):
    return numpy_rng(0, "test", *numbers)


def build(mode, shapes, pairs=9, grid_size=4, dim=5, **rest):
    """A module in double precision and grids of the given heights and widths for it."""
    torch.manual_seed(0)
    dims = [dim + i for i in range(len(shapes))] if mode == "l1_all" else dim
    module = DenseRelativeLocalization(dims, mode, pairs, 8, grid_size, **rest).double()
    grids = []
    for number, shape in enumerate(shapes):
        grid = torch.randn(3, dim + number, *shape, dtype=torch.float64)
        grids.append(grid.requires_grad_())
    return module, grids


def plain(mode, dim, *args, **rest):
    """A module in single precision, and what makes its input of one grid: for l1_all a list with
    one head."""
    torch.manual_seed(1)
    if mode == "l1_all":
        return DenseRelativeLocalization([dim], mode, *args, **rest), lambda grid: [grid]
    return DenseRelativeLocalization(dim, mode, *args, **rest), lambda grid: grid


def assert_close(loss, expected, parts, rtol=1e-12):
    """Two losses and their gradients are the same."""
    torch.testing.assert_close(loss, expected, rtol=rtol, atol=1e-12)
    gradients = [torch.autograd.grad(one, parts) for one in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


# either way through the first layer, fewer pairs than tokens and more
@pytest.mark.parametrize("pairs", [3, 16])
@pytest.mark.parametrize("shape", [(4, 4), (2, 4), (8, 8), (7, 3), (4, 9)])
@pytest.mark.parametrize("mode", ONE)
def test_value_and_gradients_are_the_papers(mode, shape, pairs, monkeypatch):
    monkeypatch.setattr("idmm.losses.drloc.ALPHA", 0.3)
    module, (grid,) = build(mode, [shape], pairs)
    (positions,) = module.draw(grid, rng(1))
    ours = module(grid, positions=positions)
    assert ours.dtype == torch.float64
    assert ours.shape == ()
    expected = naive(module.heads[0], grid, positions, mode, 4, alpha=0.3)
    assert_close(ours, expected, [grid, *module.parameters()])


def test_every_block_has_its_own_head_and_the_losses_are_added():
    module, grids = build("l1_all", [(8, 6), (4, 4), (2, 3)])
    positions = module.draw(grids, rng(2))
    each = zip(module.heads, grids, positions, strict=True)
    expected = sum(naive(head, grid, pairs, "l1_all", 4) for head, grid, pairs in each)
    assert_close(
        module(grids, positions=positions),
        expected,
        [*grids, *module.parameters()],
    )


def test_pairs_are_uniform_and_the_ends_independent():
    module = DenseRelativeLocalization(1, num_pairs=500)
    (positions,) = module.draw(torch.zeros(60, 1, 2, 3), rng(6))
    assert positions.dtype == torch.int64
    assert positions.shape == (60, 500, 4)
    # one of 36 pairs, p = q among them
    cell = np.ravel_multi_index(positions.flatten(0, 1).T.numpy(), (2, 3, 2, 3))
    seen = np.bincount(cell, minlength=36)
    expected = 60 * 500 / 36
    chi_square = ((seen - expected) ** 2 / expected).sum()  # 35 degrees of freedom: 35 +- 8.4
    assert 5 < chi_square < 90


def test_pairs_are_a_function_of_seed_image_and_step():
    module = DenseRelativeLocalization(4)
    grid = torch.randn(3, 4, 7, 7)

    def drawn(generator=None):
        return module.draw(grid, generator)[0]

    key = derive(0, "step", 1)
    pairs = drawn(numpy_rng(key, "drloc"))
    assert torch.equal(drawn(numpy_rng(key, "drloc")), pairs)
    assert not torch.equal(pairs[0], pairs[1])
    assert not torch.equal(drawn(numpy_rng(derive(0, "step", 2), "drloc")), pairs)
    assert module(grid, numpy_rng(key, "drloc")) == module(grid, positions=pairs)
    torch.manual_seed(7)
    first = drawn()
    assert not torch.equal(drawn(), first)
    torch.manual_seed(7)
    assert torch.equal(drawn(), first)


@pytest.mark.parametrize("pairs", [8, 64])
@pytest.mark.parametrize("mode", MODES)
def test_autocast_changes_little(mode, pairs):
    module, as_input = plain(mode, 32, pairs, 64)
    grid = torch.randn(8, 32, 14, 14, requires_grad=True)
    exact = module(as_input(grid), rng(10))
    (expected,) = torch.autograd.grad(exact, grid)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(as_input(grid), rng(10))
        from_half = module(as_input(grid.bfloat16()), rng(10))
    (gradient,) = torch.autograd.grad(loss, grid)
    assert loss.dtype == from_half.dtype == torch.float32
    for other in (loss, from_half):
        torch.testing.assert_close(other, exact, rtol=5e-3, atol=1e-4)
    assert F.cosine_similarity(gradient.flatten(), expected.flatten(), 0) > 0.97
    assert loss != exact  # the head did run in bf16


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_finite(mode):
    """Also of probabilities that are zero and one."""
    module, as_input = plain(mode, 6, 100, 16)
    with torch.no_grad():
        module.heads[0][-1].weight.mul_(300)
    grid = (20 * torch.randn(4, 6, 7, 7)).requires_grad_()
    loss = module(as_input(grid), rng(11))
    loss.backward()
    for x in (loss, grid.grad, *(p.grad for p in module.parameters())):
        assert torch.isfinite(x).all()


def test_variance_has_a_floor():
    """All mass on one class, and every pair one class away from it: the error over the floor on
    each axis."""
    module = DenseRelativeLocalization(3, "reg", grid_size=2, hidden_dim=4).requires_grad_(False)
    for weight in module.parameters():
        weight.zero_()
    module.heads[0][-1].bias.view(2, 5)[:, 2] = 1000.0  # class 0: mu = 0, sigma^2 = 0
    apart = torch.tensor([[[1, 1, 0, 0]]])
    expected = 2 * (1 / 1e-6 + 0.001 * math.log(math.sqrt(1e-6)))
    loss = float(module(torch.randn(1, 3, 2, 2), positions=apart))
    assert loss == pytest.approx(expected, rel=1e-6)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="is shorter than"):
        DenseRelativeLocalization([4, 5], "l1_all")([torch.zeros(2, 4, 6, 6)])
    for width, mode, message in (
        (
            4,
            "l2",
            "mode must be one of l1, l1_signed, ce, reg, l1_all, got 'l2'",
        ),
        ([4, 5], "l1", "in_dim must be one width in mode l1, got [4, 5]"),
        (
            [],
            "l1_all",
            "in_dim must be one width for each block in mode l1_all, got []",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            DenseRelativeLocalization(width, mode)


KWARGS = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def model(classes=3, name="vit_tiny_patch16_224"):
    torch.manual_seed(0)
    return create_backbone(name, 32, num_classes=classes, **KWARGS)


def labelled_batch():
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {
        "images": images,
        "label": torch.tensor([0, 1, 2, 0]),
        "index": torch.arange(4),
    }


def tuned(backbone, extra=None, **augment):
    method = Finetune(backbone, config.Augment(**augment))
    method.localization = extra
    return method


def test_the_loss_is_the_sum_and_the_log_holds_drloc():
    backbone = model()
    augment = dict(mixup_alpha=0, cutmix_alpha=0)
    extra = Localization(backbone, DrLoc(weight=0.3, pairs=8), 32, 3)
    plain = tuned(backbone, **augment)(labelled_batch(), 7, 0)
    both = tuned(backbone, extra, **augment)(labelled_batch(), 7, 0)
    expected = extra.loss(
        token_grid(backbone, labelled_batch()["images"]),
        numpy_rng(7, "drloc"),
    )
    torch.testing.assert_close(both["drloc"], expected.detach())
    torch.testing.assert_close(both["loss"], plain["loss"] + 0.3 * expected)
    other = tuned(backbone, extra, **augment)(labelled_batch(), 8, 0)
    assert other["drloc"] != both["drloc"], "another step draws other pairs"


def test_one_forward_pass_serves_logits_and_grid():
    backbone = model()
    calls = []
    backbone.patch_embed.register_forward_hook(lambda *_: calls.append(1))
    extra = Localization(backbone, DrLoc(weight=1.0, mode="l1_all"), 32, 3)
    calls.clear()
    tuned(backbone, extra)(labelled_batch(), 7, 0)["loss"].backward()
    assert len(calls) == 1
    assert len(extra.loss.heads) == 2, "each block has a head of its own"
    assert all(p.grad is not None for p in extra.parameters())


def test_grid_size_keeps_finer_grids():
    """A vision transformer's grid of 16 x 16, whole or pooled to 7 x 7."""
    torch.manual_seed(0)
    backbone = create_backbone(
        "vit_tiny_patch16_224",
        64,
        num_classes=3,
        **{**KWARGS, "patch_size": 4},
    )
    images = torch.randn(2, 3, 64, 64)
    grid = token_grid(backbone, images)
    for size in (7, 16):
        settings = DrLoc(weight=1.0, pairs=8, grid_size=size)
        extra = Localization(backbone, settings, 64, 3)
        pooled = F.adaptive_avg_pool2d(grid, size)
        expected = extra.loss(pooled, numpy_rng(7, "drloc"))
        torch.testing.assert_close(extra(backbone, images, 7)[1], expected)


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_run_with_drloc_logs_it_and_exports_no_head(stage, tmp_path):
    inside_ok(stage, tmp_path, drloc__weight=0.5, drloc__pairs=8, train__epochs=1)
    assert not [key for key in weights(tmp_path) if "localization" in key or "heads" in key]
    assert all(0 < record["drloc"] < 1 for record in metrics(tmp_path))
    assert [key for key in state(tmp_path)["method"] if key.startswith("localization.")]


def test_a_grid_of_one_place_is_refused():
    small = create_backbone("vit_tiny_patch16_224", 16, **{**KWARGS, "patch_size": 16})
    with pytest.raises(
        UserError,
        match="^drloc.weight: at 16 px the final grid is 1x1, nothing is",
    ):
        Localization(small, DrLoc(weight=1.0), 16, 3)


def test_mode_l1_all_names_itself_where_there_are_no_blocks():
    with pytest.raises(
        UserError,
        match="^drloc.mode: l1_all: resnet18 has no transformer blocks",
    ):
        Localization(
            create_backbone("resnet18"),
            DrLoc(weight=1.0, mode="l1_all"),
            64,
            3,
        )
