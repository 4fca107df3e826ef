"""Dense relative localization against a naive loop written from the paper's supplement."""

import math

import numpy as np
import pytest
import torch

from idmm.losses import DenseRelativeLocalization
from idmm.losses.drloc import MODES
from idmm.seeding import derive, numpy_rng

ONE = [mode for mode in MODES if mode != "l1_all"]


def naive_pool(grid, most):
    """Adaptive average pooling cell by cell: cell i of n covers rows floor(i h/n) to ceil((i+1) h/n)."""
    h, w = grid.shape[1:]
    n, m = min(h, most), min(w, most)
    cells = [
        [
            grid[:, i * h // n : -(-(i + 1) * h // n), j * w // m : -(-(j + 1) * w // m)].flatten(1).sum(1)
            / ((-(-(i + 1) * h // n) - i * h // n) * (-(-(j + 1) * w // m) - j * w // m))
            for j in range(m)
        ]
        for i in range(n)
    ]
    return cells, n, m


def naive(head, grid, positions, mode, grid_size, alpha=0.001):
    """The pseudocode of Fig. 2 and Eqs. 3-6 of the supplement, image by image and pair by pair."""
    (w1, b1), (w2, b2), (w3, b3) = [(layer.weight, layer.bias) for layer in head if hasattr(layer, "weight")]
    terms = []
    for image, pairs in zip(grid, positions, strict=True):
        cells, *k = naive_pool(image, grid_size)
        for *p, i, j in pairs.tolist():
            pair = torch.cat([cells[p[0]][p[1]], cells[i][j]])
            out = w3 @ torch.relu(w2 @ torch.relu(w1 @ pair + b1) + b2) + b3
            for axis, delta in enumerate((p[0] - i, p[1] - j)):  # u: rows, v: columns
                if mode in ("l1", "l1_all", "l1_signed"):
                    target = delta / k[axis]
                    terms.append(abs(out[axis] - (target if mode == "l1_signed" else abs(target))) / 2)
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
    dims = dims if mode == "l1_all" else [dims]
    grids = [torch.randn(3, d, *s, dtype=torch.float64, requires_grad=True) for d, s in zip(dims, shapes, strict=True)]
    return module, grids


def plain(mode, dim, *args, **rest):
    """A module in single precision, and what makes its input of one grid: for l1_all a list with one head."""
    torch.manual_seed(1)
    if mode == "l1_all":
        return DenseRelativeLocalization([dim], mode, *args, **rest), lambda grid: [grid]
    return DenseRelativeLocalization(dim, mode, *args, **rest), lambda grid: grid


def assert_close(got, wanted, parts, rtol=1e-12):
    """Two losses and their gradients are the same."""
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=1e-12)
    for a, b in zip(torch.autograd.grad(got, parts), torch.autograd.grad(wanted, parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pairs", [3, 16])  # either way through the first layer, fewer pairs than tokens and more
@pytest.mark.parametrize("shape", [(4, 4), (2, 4), (8, 8), (7, 3), (4, 9)])
@pytest.mark.parametrize("mode", ONE)
def test_value_and_gradients_are_the_papers(mode, shape, pairs):
    module, (grid,) = build(mode, [shape], pairs, alpha=0.3)
    (positions,) = module.draw(grid, rng(1))
    ours = module(grid, positions=positions)
    assert ours.dtype == torch.float64 and ours.shape == ()
    wanted = naive(module.heads[0], grid, positions, mode, 4, alpha=0.3)
    assert_close(ours, wanted, [grid, *module.parameters()])


def test_every_block_has_its_own_head_and_the_losses_are_added():
    module, grids = build("l1_all", [(8, 6), (4, 4), (2, 3)])
    positions = module.draw(grids, rng(2))
    each = zip(module.heads, grids, positions, strict=True)
    wanted = sum(naive(head, grid, pairs, "l1_all", 4) for head, grid, pairs in each)
    assert_close(module(grids, positions=positions), wanted, [*grids, *module.parameters()])


def all_pairs(k):
    axes = [torch.arange(k)] * 4
    return torch.cartesian_prod(*axes).unsqueeze(0)  # [1, k^4, 4]


def test_known_values_of_a_head_of_zeros():
    """k = 7 over all 49 x 49 pairs: E|i - j| = (k^2 - 1)/3k, E(i - j)^2 = (k^2 - 1)/6; 15 even classes: var 56/3."""
    grid, k = torch.randn(1, 5, 7, 7), 7
    mean, square, var = (k * k - 1) / (3 * k), (k * k - 1) / 6, 56 / 3
    known = {
        "l1": mean / k,  # 0.3265
        "l1_signed": mean / k,
        "ce": 2 * math.log(15),
        "reg": 2 * (square / var + 0.001 * math.log(math.sqrt(var))),
    }
    for mode, wanted in known.items():
        module = DenseRelativeLocalization(5, mode).requires_grad_(False)
        for weight in module.parameters():
            weight.zero_()
        assert float(module(grid, positions=all_pairs(k))) == pytest.approx(wanted, rel=1e-6), mode
        assert mode == "reg" or float(module(grid, rng(3))) == pytest.approx(wanted, rel=0.2)  # 64 random ones
    assert known["l1"] == pytest.approx(0.3265, abs=5e-5)


@pytest.mark.parametrize("signed", [False, True])
def test_axis_0_is_rows_and_axis_1_columns(signed):
    """Channel 0 holds the row, channel 1 the column; a head that subtracts them has no error, in that order alone."""
    height, width = 3, 5
    rows = torch.arange(height).float()[:, None].expand(height, width)
    columns = torch.arange(width).float().expand(height, width)
    module = DenseRelativeLocalization(2, "l1_signed" if signed else "l1", hidden_dim=4).requires_grad_(False)
    first, _, second, _, last = module.heads[0]
    for weight in module.parameters():
        weight.zero_()
    difference = torch.tensor([[1.0, 0, -1, 0], [0, 1, 0, -1]])  # of [p's row, p's column, q's row, q's column]
    first.weight.copy_(torch.cat([difference, -difference]))
    second.weight.copy_(torch.eye(4))
    last.weight.copy_(torch.cat([torch.eye(2), -torch.eye(2) if signed else torch.eye(2)], 1))
    planted = torch.stack([rows / height, columns / width]).unsqueeze(0)  # [1, 2, 3, 5]
    assert float(module(planted, rng(4))) == pytest.approx(0, abs=1e-7)
    assert float(module(planted.flip(1), rng(4))) > 0.1
    if signed:  # p - q, not q - p
        assert float(module(-planted, rng(4))) > 0.3


@pytest.mark.parametrize("mode", MODES)
def test_a_head_learns_the_offsets_of_a_fixed_grid(mode):
    torch.manual_seed(0)
    many = mode == "l1_all"
    module = DenseRelativeLocalization([16, 16] if many else 16, mode, 64, 64, grid_size=5)
    grid = torch.randn(1, 16, 5, 5).expand(4, -1, -1, -1)
    grid = [grid, grid.flip(2)] if many else grid
    optimizer = torch.optim.Adam(module.parameters(), 5e-3)
    losses = []
    for step in range(200):
        loss = module(grid, rng(5, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    zero = {"l1": 0.32, "l1_signed": 0.32, "ce": 2 * math.log(11), "reg": 0.8, "l1_all": 0.64}[mode]
    assert losses[0] > 0.7 * zero
    assert np.mean(losses[-20:]) < 0.25 * zero


def test_pairs_are_uniform_and_the_ends_independent():
    module = DenseRelativeLocalization(1, num_pairs=500)
    (positions,) = module.draw(torch.zeros(60, 1, 2, 3), rng(6))
    assert positions.dtype == torch.int64 and positions.shape == (60, 500, 4)
    cell = np.ravel_multi_index(positions.flatten(0, 1).T.numpy(), (2, 3, 2, 3))  # one of 36 pairs, p = q among them
    seen, expected = np.bincount(cell, minlength=36), 60 * 500 / 36
    chi_square = ((seen - expected) ** 2 / expected).sum()  # 35 degrees of freedom: 35 +- 8.4
    assert 5 < chi_square < 90


def test_pairs_are_a_function_of_the_seed_and_differ_between_images_and_steps():
    module, grid = DenseRelativeLocalization(4), torch.randn(3, 4, 7, 7)

    def drawn(generator=None):
        return module.draw(grid, generator)[0]

    key = derive(0, "step", 1)
    for make in (lambda k: numpy_rng(k, "drloc"), lambda k: torch.Generator().manual_seed(k)):
        pairs = drawn(make(key))
        assert torch.equal(drawn(make(key)), pairs)
        assert not torch.equal(drawn(make(derive(0, "step", 2))), pairs)
        assert not torch.equal(pairs[0], pairs[1])
        generator = make(key)
        assert not torch.equal(drawn(generator), drawn(generator))  # one generator, two draws
        assert module(grid, make(key)) == module(grid, positions=pairs) != module(grid, make(key + 1))
    torch.manual_seed(7)
    first, second = drawn(), drawn()
    torch.manual_seed(7)
    assert torch.equal(drawn(), first) and not torch.equal(first, second)
    torch.manual_seed(7)
    assert module(grid) == module(grid, positions=first)


@pytest.mark.parametrize("pairs", [3, 20])
@pytest.mark.parametrize("mode", ONE)
def test_order_of_images_does_not_matter(mode, pairs):
    module, (grid,) = build(mode, [(4, 3)], pairs)
    (positions,) = module.draw(grid, rng(8))
    order = torch.tensor([2, 0, 1])
    loss = module(grid, positions=positions)
    torch.testing.assert_close(module(grid[order], positions=positions[order]), loss, rtol=1e-12, atol=0)
    assert not torch.isclose(module(grid[order], positions=positions), loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", [4, 9])  # as it is, and pooled
def test_half_inputs_are_raised(dtype, side):
    module = DenseRelativeLocalization(16, "reg", grid_size=4)
    grid = torch.randn(2, 16, side, side).to(dtype)
    loss = module(grid, rng(9))
    assert loss.dtype == torch.float32
    exact = module.double()(grid.double(), rng(9))
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pairs", [8, 64])
@pytest.mark.parametrize("mode", MODES)
def test_autocast_changes_little(mode, pairs):
    module, given = plain(mode, 32, pairs, 64)
    grid = torch.randn(8, 32, 14, 14, requires_grad=True)
    exact = module(given(grid), rng(10))
    (wanted,) = torch.autograd.grad(exact, grid)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(given(grid), rng(10))
        from_half = module(given(grid.bfloat16()), rng(10))
    (got,) = torch.autograd.grad(loss, grid)
    assert loss.dtype == from_half.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=5e-3, atol=1e-4)
    torch.testing.assert_close(from_half, exact, rtol=5e-3, atol=1e-4)
    assert torch.nn.functional.cosine_similarity(got.flatten(), wanted.flatten(), 0) > 0.97
    assert loss != exact  # the head did run in bf16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [0, 1, 300])  # of the last layer: even classes, random ones, one-hot ones
def test_gradients_are_finite(mode, scale):
    module, given = plain(mode, 6, 100, 16)
    with torch.no_grad():
        module.heads[0][-1].weight.mul_(scale)
        module.heads[0][-1].bias.mul_(scale)
    grid = (20 * torch.randn(4, 6, 7, 7)).requires_grad_()
    loss = module(given(grid), rng(11))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(x.grad).all() for x in (grid, *module.parameters()))


def test_variance_has_a_floor():
    """All mass on one class, and every pair one class away from it: the error over the floor on each axis."""
    module = DenseRelativeLocalization(3, "reg", grid_size=2, hidden_dim=4).requires_grad_(False)
    for weight in module.parameters():
        weight.zero_()
    module.heads[0][-1].bias.view(2, 5)[:, 2] = 1000.0  # class 0: mu = 0, sigma^2 = 0
    apart = torch.tensor([[[1, 1, 0, 0]]])
    wanted = 2 * (1 / 1e-6 + 0.001 * math.log(math.sqrt(1e-6)))
    assert float(module(torch.randn(1, 3, 2, 2), positions=apart)) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("mode, pairs", [("l1", 20), ("reg", 3)])  # each way through the first layer
def test_compiled_whole_gives_the_same(mode, pairs):
    """Traced whole, forward and backward; without inductor, whose cold start takes longer than all other tests here."""
    module, (grid,) = build(mode, [(8, 4)], pairs)
    (positions,) = module.draw(grid, rng(13))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    loss, wanted = compiled(grid, positions=positions), module(grid, positions=positions)
    assert_close(loss, wanted, [grid, *module.parameters()], rtol=1e-10)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mode": "l2"}, "mode must be one of l1, l1_signed, ce, reg, l1_all, got 'l2'"),
        ({"num_pairs": 0}, "num_pairs must be a whole number of at least 1, got 0"),
        ({"alpha": -0.1}, "alpha must be at least 0, got -0.1"),
        ({"in_dim": [4, 5]}, r"in_dim must be one width in mode l1, got \[4, 5\]"),
        ({"mode": "l1_all"}, "in_dim must be a list of widths, one for each block in mode l1_all, got 4"),
        ({"mode": "l1_all", "in_dim": []}, r"in_dim must be a list .* in mode l1_all, got \[\]"),
        ({"mode": "l1_all", "in_dim": [4, 0]}, "in_dim must be a whole number of at least 1, got 0"),
    ],
)
def test_arguments_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        DenseRelativeLocalization(**{"in_dim": 4, **change})


def test_inputs_that_cannot_be():
    one, many = DenseRelativeLocalization(4, grid_size=3), DenseRelativeLocalization([4, 5], "l1_all")
    grid, inside = torch.zeros(2, 4, 6, 6), torch.zeros(2, 7, 4, dtype=torch.int64)
    for module, given, positions, message in [
        (one, torch.zeros(2, 36, 4), None, r"expected a grid \[B, 4, k_h, k_w\], got \[2, 36, 4\]"),
        (one, [grid], None, "mode l1 takes one grid, got list"),
        (many, grid, None, "mode l1_all takes a sequence of grids, got Tensor"),
        (many, [grid], None, "expected 2 grids, one for each block, got 1"),
        (many, [grid, grid], None, r"expected a grid \[B, 5, k_h, k_w\], got \[2, 4, 6, 6\]"),
        (many, [grid, torch.zeros(2, 5, 3, 3)], inside, "expected positions of 2 grids, got 1"),
        (one, grid, inside[:1], r"expected positions \[2, m, 4\], got \[1, 7, 4\]"),
        (one, grid, inside.float(), "expected positions of dtype int64, got torch.float32"),
        (one, grid, inside + 3, r"expected positions inside a grid of 3 x 3 \(after pooling\)"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}$"):
            module(given, positions=positions)
