"""The learning rate: end points, warm-up; weight decay and clipping."""

import math

import torch
from pytest import approx

from idmm.config import Train
from idmm.runs.resolve import family_rates
from idmm.training.optim import clip_gradients, create_optimizer
from idmm.training.schedule import learning_rate, warmup_length, weight_decay_schedule


def rates(steps, warmup, lr=0.1):
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr}
    optimizer = torch.optim.SGD([group])
    schedule = learning_rate(optimizer, steps, warmup)
    values = []
    for step in range(steps + 1):
        schedule.step_update(step)
        values.append(optimizer.param_groups[0]["lr"])
    return values


def test_end_points():
    values = rates(100, 10)
    assert values[0] == approx(1e-6)
    assert values[10] == approx(0.1) == max(values)
    assert values[55] == approx(0.05)  # half of the cosine
    assert values[99] == approx(0.05 * (1 + math.cos(math.pi * 89 / 90)))
    assert values[100] == 0


def test_warmup_is_linear_and_none_starts_at_the_peak():
    values = rates(100, 10)
    steps = [b - a for a, b in zip(values[:10], values[1:11], strict=True)]
    assert max(steps) == approx(min(steps))
    assert rates(50, 0)[0] == approx(0.1)
    assert rates(10, 5, lr=1e-7)[0] < 1e-7, "a tiny peak is still warmed up to"


def decays(steps, end):
    """Weight decay of each step: of a layer's weights, and of its biases."""
    optimizer = create_optimizer(torch.nn.Linear(3, 2), {}, Train(weight_decay=0.04), 1e-3)
    update = weight_decay_schedule(optimizer, steps, end)
    values = []
    for step in range(steps + 1):
        update(step)
        by_name = {
            len(group["params"][0].shape): group["weight_decay"] for group in optimizer.param_groups
        }
        values.append((by_name[2], by_name[1]))
    return values


def test_weight_decay_follows_a_cosine_where_there_is_any():
    """DINO: 0.4 + (0.04 - 0.4) (1 + cos(pi t / T)) / 2."""
    values = decays(20, 0.4)
    for step, (weight, bias) in enumerate(values):
        assert weight == approx(0.4 - 0.36 * (1 + math.cos(math.pi * step / 20)) / 2)
        assert bias == 0
    assert values[0][0] == approx(0.04)
    assert values[20][0] == approx(0.4)
    assert decays(5, None) == [(0.04, 0.0)] * 6
    assert decays(4, 0.0)[4] == (0.0, 0.0)
    assert decays(4, 0.0)[2][0] == approx(0.02), "it may fall"


def test_each_tensor_is_clipped_on_its_own():
    """DINO's: g <- g min(1, limit / (|g| + 1e-6)); the norm of all three together would scale
    each."""
    gradients = [
        torch.tensor([3.0, 4.0]),
        torch.tensor([[0.3, 0.4]]),
        torch.tensor([60.0]),
    ]
    tensors = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients] + [
        torch.nn.Parameter(torch.zeros(1))
    ]
    for tensor, grad in zip(tensors, gradients, strict=False):
        tensor.grad = grad.clone()
    clip_gradients(torch.nn.ParameterList(tensors), 3.0, per_tensor=True)
    for tensor, grad in zip(tensors, gradients, strict=False):
        torch.testing.assert_close(tensor.grad, grad * min(1.0, 3 / (float(grad.norm()) + 1e-6)))
    assert tensors[-1].grad is None
    assert torch.equal(tensors[1].grad, gradients[1])


def test_warmup_not_shorter_than_the_run_is_shortened_and_said():
    assert warmup_length(2, 10, 100) == (20, None)
    assert warmup_length(10, 10, 100) == (
        10,
        "warm-up of 100 steps shortened to 10: the run has 100 steps",
    )
    assert warmup_length(2, 1, 1) == (0, "warm-up of 2 steps shortened to 0: the run has 1 step")


def test_recipes_of_the_families():
    assert family_rates("deit_tiny_patch16_224") == (5e-4, 2)
    assert family_rates("pvt_v2_b0") == family_rates("t2t_vit_7") == (1e-3, 10)
