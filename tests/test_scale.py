"""The model behind docs/scale.md: gradients, samplers and Adam against plain loops, formulas against real tensors."""

import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import scale_model as model  # noqa: E402
import scale_sampling as sampling  # noqa: E402


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    rows, views, own = torch.randn(60, 5), torch.randn(4, 5), torch.tensor([3, 1, 40, 59])
    return sampling.State("some", rows, views, own)


def test_exact_gradients(state):
    """Those of cross-entropy by autograd, summed over the views."""
    rows, views = state.rows.clone().requires_grad_(), state.views.clone().requires_grad_()
    F.cross_entropy(views @ rows.T, state.own, reduction="sum").backward()
    true = sampling.exact(state)
    torch.testing.assert_close(true.of_views, views.grad)
    torch.testing.assert_close((true.squared * true.cross).sum(), rows.grad.square().sum())


@pytest.mark.parametrize("kind", sampling.SAMPLERS)
def test_all_rows_drawn_are_exact(state, kind):
    cells, lists = torch.arange(60) % 7, torch.arange(60).expand(4, 60)[:, :30]
    rows = sampling.strata(state, kind, 56, cells, lists)
    if len(rows.hard):  # half of the draws at most are of these
        rows = sampling.Strata(rows.hard[:28], torch.cat([rows.hard[28:], rows.others]))
    assert sum(map(len, rows)) == 56
    found = sampling.errors(state, sampling.exact(state), rows, 56, 2, True)
    assert all(abs(found[name]) < 1e-3 for name in ("z error", "own error", "W error", "loss bias"))
    assert all(found[name] > 0.9999 for name in ("z cosine", "own cosine", "W cosine"))


def test_errors_are_those_of_whole_matrices(state):
    """Of one draw: the sampled gradients by autograd over the drawn rows with their log weights, against the true."""
    true = sampling.exact(state)
    strata = sampling.strata(state, "cells, corrected", 10, torch.arange(60) % 7, torch.empty(4, 0))
    torch.manual_seed(1)
    found = sampling.errors(state, true, strata, 10, 1, True)
    torch.manual_seed(1)
    numbers, log_weight = sampling.drawn(strata, 10, True)
    rows, views = state.rows.clone().requires_grad_(), state.views.clone().requires_grad_()
    chosen = torch.cat([state.own, numbers])
    logits = views @ rows[chosen].T + torch.cat([torch.zeros(4), log_weight])
    F.cross_entropy(logits, torch.arange(4), reduction="sum").backward()
    exact = state.rows.clone().requires_grad_()
    F.cross_entropy(state.views @ exact.T, state.own, reduction="sum").backward()
    error = (views.grad - true.of_views).norm(dim=1) / true.of_views.norm(dim=1)
    assert found["z error"] == pytest.approx(float(error.median()), rel=1e-3)
    assert found["W error"] == pytest.approx(float((rows.grad - exact.grad).norm() / exact.grad.norm()), rel=1e-3)


def test_the_corrected_sum_has_the_right_mean(state):
    others = sampling.strata(state, "uniform, corrected", 9, torch.empty(0), torch.empty(4, 0))
    true = state.views[0] @ state.rows[others.others].T
    draws = [sampling.drawn(others, 9, True) for _ in range(4000)]
    sums = torch.stack([((state.views[0] @ state.rows[n].T) + w).exp().sum() for n, w in draws])
    assert float(sums.mean()) == pytest.approx(float(true.exp().sum()), rel=0.1)


@pytest.mark.parametrize("every", [1, 20])
def test_adam_between_touches(every):
    steps = sampling.adam_moves(every, 40, by_torch=True)["dense"]
    assert sampling.adam_moves(every, 40)["dense"] == pytest.approx(steps, rel=0.06)


def test_memory_and_arithmetic_of_a_step():
    """Against the tensors of a real one."""
    n, d, images = 50, 6, 4
    weight = torch.randn(n, d, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    F.cross_entropy(torch.randn(images * 6, d) @ weight.T, torch.zeros(images * 6, dtype=torch.int64)).backward()
    optimizer.step()
    state = optimizer.state[weight]
    held = sum(t.nbytes for t in (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]))
    step = model.Step(n, d, images)
    assert step.states(False) == held
    assert model.Step(n, d, images, ranks=5).states(True) == held / 5
    from torch.utils.flop_counter import FlopCounterMode

    z = torch.randn(images * 6, d, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        (z @ weight.T).sum().backward()
    assert step.layer_flops() == counter.get_total_flops()


def test_where_a_network_bounds():
    """At the N that is found, all-reduce and the rest take equally long."""
    step, assumed, rate = model.Step(1, images=2048, ranks=8), model.Assumed(layer="bf16"), 12.5e9
    n = model.network_bound(step, assumed, rate)
    parts = model.replace(step, n=n).seconds(assumed, rate, False)
    assert 10_000 < n < 10**7
    assert parts.pop("network") == pytest.approx(sum(parts.values()), rel=0.02)


def test_flops_of_published_backbones():
    """DeiT-Tiny has 1.26 G multiplications and additions at 224 px, PVTv2-B0 0.57 (their papers say 1.3 and 0.6)."""
    assert model.counted(model.TINY, 224).flops == pytest.approx(2 * 1.26e9, rel=0.02)
    assert model.counted(model.B0, 224).flops == pytest.approx(2 * 0.57e9, rel=0.02)


def test_runs_of_the_paper():
    runs = model.paper()
    assert {run.table for run in runs} == set("23456789")
    assert sum(run.images for run in runs if run.table == "5" and run.what.startswith("fine")) == 22 * model.ALL7
    one = model.Run("2", "", model.TINY, 2040, 800, 112, "idmm", 2040)
    passes = 2040 * 800 * 6 * (3 * model.counted(model.TINY, 112).flops + 6 * 2040 * 192)
    assert one.flops() == pytest.approx(passes)
