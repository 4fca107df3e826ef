"""Parametric instance discrimination: N images, N classes (Cao, Yu, Wu, ECCV 2022, Eqs. 3 and
17-20)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_HELD = 2**21  # of a batch that is computed without tiles, at most
GPU_HELD = 2**26  # on a GPU, whose time is that of the operations' starts
FEW_VIEWS = 256  # smaller batches count as so many
# Otherwise they are computed in tiles of so many logits per CPU thread (its cache) or GPU, and of
# so many views
CPU_TILE = 2**19
GPU_TILE = 2**23
TILE_VIEWS = 1024
# logits stored for the backward pass (64 MiB, 1 GiB). Others are recomputed
CPU_STORED = 2**24
GPU_STORED = 2**28
EPS = 1e-12  # as F.normalize


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
    """Return the cross-entropy of N-way logits with smoothed, mixed instance labels, without
    building [B, N] targets.

    With logits o = features @ weight.T + bias, c = eps/(N-1) and s = 1-eps-c, the loss of one view
    is

        logsumexp(o) - lam s o_i - (1-lam) s o_i' - c sum_j o_j

    This is Eq. 19 with target c for every j other than i and i'. The paper prints lam c. But mixing
    two labels smoothed by Eq. 17 results in c, and only then do the targets sum to one. Smoothing
    spreads over the other N-1 instances, not over N as in ``torch.nn.CrossEntropyLoss``.

    Args:
        features: Pooled features z, [B, d]. Half precision is raised to fp32 despite autocast.
            Double stays.
        weight: The N-way layer W, [N, d], N >= 2.
        target: Instance i of each view, int64 [B].
        mixed_target: Instance i' that was mixed in, int64 [B]. None: no mixing.
        lam: Share of instance i, in [0, 1]: a number, or one per view, [B].
        smoothing: Label smoothing eps, in [0, 1).
        chunk_size: Views whose logits are held at a time, at most. None: the fastest choice in
            bounded memory.
        bias: Bias of the N-way layer, [N].

    Returns:
        Mean over the views, a scalar tensor.

    Raises:
        ValueError: Fewer than two instances, or a smoothing outside [0, 1).
    """
    if bias is not None:  # as the weight of one more feature, 1
        features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
        weight = torch.cat([weight, bias[:, None]], dim=1)
    n = weight.shape[0]
    if not fits(features, n, chunk_size):
        return instance_losses(
            features, weight, target, mixed_target, lam, smoothing, chunk_size
        ).mean()
    s, c = _shares(n, smoothing)
    dtype = _dtype(features, weight)
    lam = lam.to(dtype) if isinstance(lam, Tensor) else lam
    with torch.autocast(features.device.type, enabled=False):
        # [B, d], [N, d]
        z = features.to(dtype)
        w = weight.to(dtype)
        target_logit = _logit(z, w, target)  # [B]
        total = z @ w.sum(0)  # sum_j o_j, [B]
        if mixed_target is None:
            rest = (1 - s) * target_logit - c * total
        else:
            rest = (
                (1 - lam * s) * target_logit
                - (1 - lam) * s * _logit(z, w, mixed_target)
                - c * total
            )
        # mean of logsumexp(o) - o_i, and the rest
        return F.cross_entropy(F.linear(z, w), target) + rest.mean()


def fits(features: Tensor, instances: int, chunk_size: int | None = None) -> bool:
    """Whether all logits of features [B, d] may be held at once.

    For few views, the gradients of W dominate the memory. Without tiles there is one per term of
    the loss.
    """
    views = len(features)
    if chunk_size is not None:
        return views <= chunk_size
    held = GPU_HELD if features.is_cuda else LOGITS_HELD
    return max(views, FEW_VIEWS) * instances <= held


def instance_losses(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    mixed_target: Tensor | None = None,
    lam: float | Tensor = 1.0,
    smoothing: float = 0.1,
    chunk_size: int | None = None,
    cosine: bool = False,
) -> Tensor:
    """Return the loss of each view, [B]. Logits are computed in tiles, and again in the backward
    pass.

    Args:
        features, weight, target, mixed_target, lam, smoothing, chunk_size: See
            :func:`instance_discrimination_loss`.
        cosine: Normalise the rows of W, without a copy of W.
    """
    s, c = _shares(len(weight), smoothing)
    dtype = _dtype(features, weight)
    lam = lam.to(dtype) if isinstance(lam, Tensor) else lam
    # [B, T]
    if mixed_target is None:
        index = target[:, None]
    else:
        index = torch.stack([target, mixed_target], dim=1)
    with torch.autocast(features.device.type, enabled=False):
        z = features.to(dtype)
        w = weight.to(dtype)
        log_sum, picked, total = _Logits.apply(z, w, index, _tile(z, len(w), chunk_size), cosine)
        if mixed_target is None:
            return log_sum - s * picked[:, 0] - c * total
        return log_sum - lam * s * picked[:, 0] - (1 - lam) * s * picked[:, 1] - c * total


def _shares(n: int, smoothing: float) -> tuple[float, float]:
    """Return s and c for n instances."""
    if n < 2:
        raise ValueError(f"instance discrimination needs at least 2 instances, got {n}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
    c = smoothing / (n - 1)
    return 1 - smoothing - c, c


def _dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(features.dtype, weight.dtype), torch.float32)


def _logit(z: Tensor, w: Tensor, index: Tensor) -> Tensor:
    """Return the logit of one instance per view, [B], without the others."""
    return (z * F.embedding(index, w)).sum(1)  # [B, d] -> [B]


def _tile(z: Tensor, rows: int, chunk_size: int | None) -> tuple[int, int, int]:
    """Return views and rows of a tile of logits, and the number of logits to store for the backward
    pass."""
    views = max(1, min(len(z), TILE_VIEWS))
    if chunk_size is not None:
        return views, max(1, chunk_size * rows // views), 0
    if z.device.type == "cpu":
        return views, CPU_TILE * max(2, torch.get_num_threads()) // views // 64 * 64, CPU_STORED
    return views, GPU_TILE // views, GPU_STORED


def row_tiles(rows: int, size: int) -> Iterator[slice]:
    """Return slices of a size that cover ``rows`` rows."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _Logits(torch.autograd.Function):
    """Logsumexp [V] of the logits o = z w^T, [V, n], those of instances ``index`` [V, T], and their
    sum [V].

    Logits are computed in tiles (views, rows, logits to store). The gradients recompute tiles that
    are not stored.
    """

    @staticmethod
    def forward(ctx, z, w, index, tile, cosine):
        views, rows, storable = tile
        ctx.views = list(row_tiles(len(z), views))
        ctx.rows = rows
        ctx.cosine = cosine
        # largest logit and sum of exp(o - top), [V]
        top = z.new_full((len(z),), -torch.inf)
        exps = z.new_zeros(len(z))
        # the rows' sum, [d]
        column = z.new_zeros(z.shape[1])
        ctx.stored = {}
        buffer = z.new_empty(views * rows)
        for r in row_tiles(len(w), rows):
            part, _ = _rows(w[r], cosine)
            column += part.sum(0)
            for v in ctx.views:
                storable -= (v.stop - v.start) * len(part)
                o = _tile_logits(z[v], part, None if storable >= 0 else buffer)  # [views, rows]
                new_top = torch.maximum(top[v], o.amax(1))
                exps[v] = exps[v] * (top[v] - new_top).exp() + o.sub_(new_top[:, None]).exp_().sum(
                    1
                )
                top[v] = new_top
                if storable >= 0:
                    ctx.stored[r.start, v.start] = o, new_top
        log_sum = top + exps.log()
        picked = torch.einsum("vd,vtd->vt", z, _rows(w[index], cosine)[0])
        ctx.save_for_backward(z, w, index, log_sum, column)
        return log_sum, picked, z @ column

    @staticmethod
    @once_differentiable
    def backward(ctx, d_log_sum, d_picked, d_total):
        z, w, index, log_sum, column = ctx.saved_tensors
        with torch.autocast(z.device.type, enabled=False):
            dz = torch.zeros_like(z)
            dw = torch.zeros_like(w)
            # of the picked logits, [V T, d]
            picked = (d_picked[:, :, None] * z[:, None]).flatten(0, 1)
            dw.index_put_((index.flatten(),), picked, accumulate=True)
            # [V, d], [d]
            weighted = d_log_sum[:, None] * z
            constant = d_total @ z
            buffer = z.new_empty(ctx.views[0].stop * ctx.rows)
            for r in row_tiles(len(w), ctx.rows):
                part, length = _rows(w[r], ctx.cosine)
                for v in ctx.views:
                    if stored := ctx.stored.pop((r.start, v.start), None):
                        p = stored[0].mul_((stored[1] - log_sum[v]).exp()[:, None])
                    else:
                        p = _tile_logits(z[v], part, buffer).sub_(log_sum[v, None]).exp_()
                    dz[v].addmm_(p, part)
                    dw[r].addmm_(p.T, weighted[v])
                dw[r] += constant
                if ctx.cosine:
                    dw[r] = (dw[r] - part * (part * dw[r]).sum(1, keepdim=True)) / length
            dz = dz * d_log_sum[:, None] + d_total[:, None] * column
            dz += torch.einsum("vt,vtd->vd", d_picked, _rows(w[index], ctx.cosine)[0])
        return dz, dw, None, None, None


def _rows(w: Tensor, cosine: bool) -> tuple[Tensor, Tensor | None]:
    """Return rows [..., d] for the logits, normalised for cosines, and their lengths before."""
    if not cosine:
        return w, None
    length = w.norm(dim=-1, keepdim=True).clamp_min(EPS)
    return w / length, length


def _tile_logits(z: Tensor, w: Tensor, buffer: Tensor | None) -> Tensor:
    """Return the logits of views z [v, d] and rows w [r, d], [v, r], in the buffer if there is
    one."""
    if buffer is None:
        out = None
    else:
        out = buffer[: len(z) * len(w)].view(len(z), len(w))
    return torch.mm(z, w.T, out=out)
