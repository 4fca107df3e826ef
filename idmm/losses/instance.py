"""Parametric instance discrimination: N images, N classes (Cao, Yu, Wu, ECCV 2022, Eqs. 3 and 17-20)."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits held at a time when the caller names no chunk size: 64 MiB in fp32.
LOGITS_HELD = 2**24


def instance_discrimination_loss(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    mixed_target: Tensor | None = None,
    lam: float | Tensor = 1.0,
    smoothing: float = 0.1,
    chunk_size: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of N-way logits with smoothed, mixed instance labels; the [B, N] target is never built.

    With logits o = features @ weight.T + bias, c = eps/(N-1) and s = 1-eps-c, the loss of one view is

        logsumexp(o) - lam s o_i - (1-lam) s o_i' - c sum_j o_j

    which is Eq. 19's with the target of every j other than i and i' at c. The paper prints lam c there; mixing two
    labels smoothed by Eq. 17 gives c, and only then do the targets sum to one. Smoothing spreads over the other N-1
    instances, not over N as ``torch.nn.CrossEntropyLoss`` does.

    Args:
        features: Pooled features z, [B, d]. Half precision is raised to fp32, whatever the autocast; double stays.
        weight: The N-way layer W, [N, d], N >= 2.
        target: Instance i of each view, int64 [B].
        mixed_target: Instance i' that was mixed in, int64 [B]; None where nothing was.
        lam: Share of instance i, in [0, 1]: a number, or one for each view, [B].
        smoothing: Label smoothing eps, in [0, 1).
        chunk_size: Views whose N logits are held at a time; None holds up to 64 MiB of them. Where torch lacks
            ``linear_cross_entropy`` all are held.
        bias: Bias of the N-way layer, [N].

    Returns:
        Mean over the views, a scalar tensor.

    Raises:
        ValueError: Fewer than two instances, or a smoothing outside [0, 1).
    """
    n = weight.shape[0]
    if n < 2:
        raise ValueError(f"instance discrimination needs at least 2 instances, got {n}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
    dtype = torch.promote_types(torch.promote_types(features.dtype, weight.dtype), torch.float32)
    with torch.autocast(features.device.type, enabled=False):
        z, w = features.to(dtype), weight.to(dtype)  # [B, d], [N, d]
        b = None if bias is None else bias.to(dtype)  # [N]
        c = smoothing / (n - 1)
        s = 1 - smoothing - c
        own = _logit(z, w, b, target)  # [B]
        total = z @ w.sum(0) + (0 if b is None else b.sum())  # sum_j o_j, [B]
        if mixed_target is None:
            rest = (1 - s) * own - c * total
        else:
            other = _logit(z, w, b, mixed_target)  # [B]
            rest = (1 - lam * s) * own - (1 - lam) * s * other - c * total
        return _nll(z, w, b, target, chunk_size) + rest.mean()


def _logit(z: Tensor, w: Tensor, b: Tensor | None, index: Tensor) -> Tensor:
    """The logit of one instance for each view, [B], without the others."""
    o = (z * F.embedding(index, w)).sum(1)  # [B, d] -> [B]
    return o if b is None else o + b[index]


def _nll(z: Tensor, w: Tensor, b: Tensor | None, target: Tensor, chunk_size: int | None) -> Tensor:
    """Mean of logsumexp(o) - o_i, the only part that needs all logits."""
    if chunk_size is None and len(z) * len(w) > LOGITS_HELD:
        chunk_size = max(1, LOGITS_HELD // len(w))
    if chunk_size is None or chunk_size >= len(z) or not hasattr(F, "linear_cross_entropy"):
        return F.cross_entropy(F.linear(z, w, b), target)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_size)
    return F.linear_cross_entropy(z, w, target, linear_bias=b, options=options)
