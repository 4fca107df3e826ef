"""The instance discrimination loss against a naive loop written from Eqs. 17-20 of the paper."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from idmm.losses import instance, instance_discrimination_loss

close = partial(assert_close, rtol=1e-12, atol=1e-12)
close_gradient = partial(assert_close, rtol=1e-10, atol=1e-12)


def naive(z, w, target, mixed, lam, smoothing, bias=None):
    """Eqs. 17-19 view by view and class by class, with the corrected C of every other class."""
    n = len(w)
    total = 0.0
    for view in range(len(z)):
        logits = [sum(w[j, k] * z[view, k] for k in range(w.shape[1])) for j in range(n)]
        if bias is not None:
            logits = [o + bias[j] for j, o in enumerate(logits)]
        norm = torch.logsumexp(torch.stack(logits), 0)
        share = float(lam[view]) if isinstance(lam, torch.Tensor) else lam
        i = int(target[view])
        other = int(mixed[view])
        for j in range(n):
            # Eq. 17 for each of the two instances
            target_share = 1 - smoothing if j == i else smoothing / (n - 1)
            mixed_share = 1 - smoothing if j == other else smoothing / (n - 1)
            total = total - (share * target_share + (1 - share) * mixed_share) * (logits[j] - norm)
    return total / len(z)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(
        9,
        5,
        generator=generator,
        dtype=torch.float64,
        requires_grad=True,
    )
    w = torch.randn(
        7,
        5,
        generator=generator,
        dtype=torch.float64,
        requires_grad=True,
    )
    bias = torch.randn(
        7,
        generator=generator,
        dtype=torch.float64,
        requires_grad=True,
    )
    target = torch.randint(7, (9,), generator=generator)
    mixed = torch.randint(7, (9,), generator=generator)
    mixed[0] = target[0]  # an image mixed with itself
    return z, w, bias, target, mixed


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("lam", [1.0, 0.7, "each"])
def test_value_and_gradients_are_the_papers(inputs, with_bias, chunk_size, smoothing, lam):
    z, w, bias, target, mixed = inputs
    bias = bias if with_bias else None
    lam = torch.linspace(0.1, 1, len(z), dtype=torch.float64) if lam == "each" else lam
    parts = [z, w] + ([bias] if with_bias else [])
    ours = instance_discrimination_loss(z, w, target, mixed, lam, smoothing, chunk_size, bias)
    reference = naive(z, w, target, mixed, lam, smoothing, bias)
    assert ours.dtype == torch.float64
    close(ours, reference)
    for actual, expected in zip(
        torch.autograd.grad(ours, parts), torch.autograd.grad(reference, parts), strict=True
    ):
        close_gradient(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_raised_whatever_the_autocast(dtype):
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(6, 8, generator=generator).to(dtype)
    w = torch.randn(20, 8, generator=generator).to(dtype)
    target = torch.arange(6)
    exact = instance_discrimination_loss(z.double(), w.double(), target)
    with torch.autocast("cpu", torch.bfloat16):
        loss = instance_discrimination_loss(z, w, target)
    assert loss.dtype == torch.float32
    assert_close(
        loss.double(),
        exact,
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("cached", [0, 13, 1000])
@pytest.mark.parametrize(
    "tile",
    [
        (9, 7),
        (4, 3),
        (2, 1),
    ],
)
def test_tiles_of_logits_are_all_of_them(inputs, tile, cached, cosine, monkeypatch):
    """Of so many views and rows, some of them kept for the gradients: the loss of each view,
    weighed by itself."""
    z, w, _, target, mixed = inputs
    rows = torch.nn.functional.normalize(w, dim=1) if cosine else w
    # what is downstream may have any sign
    weights = torch.linspace(-1, 2, len(z), dtype=torch.float64)
    each = [
        naive(z[v, None], rows, target[v, None], mixed[v, None], 0.7, 0.1) for v in range(len(z))
    ]
    monkeypatch.setattr(instance, "_tile", lambda *_: (*tile, cached))
    ours = instance.instance_losses(z, w, target, mixed, 0.7, cosine=cosine)
    close(ours, torch.stack(each))
    actual, expected = (
        torch.autograd.grad((part * weights).sum(), [z, w]) for part in (ours, torch.stack(each))
    )
    for one, other in zip(actual, expected, strict=True):
        close_gradient(one, other)


def test_tiles_stand_large_logits_and_rows_of_no_length():
    """In fp32: exp of the logits themselves would be infinite, and a row of zeros has no
    direction."""
    z = 100 * torch.eye(3, 4)
    w = 100 * torch.eye(6, 4)
    z = z.requires_grad_()
    w = w.requires_grad_()
    target = torch.tensor([0, 1, 5])
    loss = instance.instance_losses(z, w, target, smoothing=0.0, chunk_size=1)
    assert_close(loss, torch.tensor([0.0, 0.0, 1e4]))
    cosine = instance.instance_losses(z, w, target, cosine=True)
    for of in (loss, cosine):
        for g in torch.autograd.grad(of.sum(), (z, w)):
            assert bool(torch.isfinite(g).all())


def test_what_cannot_be():
    z = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="at least 2 instances, got 1"):
        instance_discrimination_loss(z, torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\), got 1.0"):
        instance_discrimination_loss(z, torch.zeros(2, 2), torch.tensor([0]), smoothing=1.0)
