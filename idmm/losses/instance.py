"""Parametric instance discrimination (Cao, Yu, Wu, ECCV 2022, Eqs. 3 and 17-20)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_HELD = 2**21  # of a batch that is computed without tiles, at most
GPU_HELD = 2**26  # on a GPU, whose time is that of the operations' starts
FEW_VIEWS = 256  # smaller batches count as so many
# more are computed in tiles of so many logits per CPU thread (its cache) or GPU, and of so many
# views
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
    """Return the cross-entropy of N-way logits with smoothed, mixed instance labels.

    [B, N] targets are not built. With logits o = features @ weight.T + bias, c = eps/(N-1) and s =
    1-eps-c, the loss of one view is

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
        ones = features.new_ones(len(features), 1)
        features = torch.cat([features, ones], dim=1)
        weight = torch.cat([weight, bias[:, None]], dim=1)
    if fits(features, len(weight), chunk_size):
        return _held_loss(features, weight, target, mixed_target, lam, smoothing)
    losses = instance_losses(features, weight, target, mixed_target, lam, smoothing, chunk_size)
    return losses.mean()


def _held_loss(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    mixed_target: Tensor | None,
    lam: float | Tensor,
    smoothing: float,
) -> Tensor:
    """Return :func:`instance_discrimination_loss` with all logits at once."""
    s, c = _shares(len(weight), smoothing)
    dtype = _dtype(features, weight)
    if isinstance(lam, Tensor):
        lam = lam.to(dtype)
    with torch.autocast(features.device.type, enabled=False):
        # [B, d], [N, d]
        z = features.to(dtype)
        w = weight.to(dtype)
        target_logit = _logit(z, w, target)  # [B]
        total = z @ w.sum(0)  # sum_j o_j, [B]
        if mixed_target is None:
            rest = (1 - s) * target_logit - c * total
        else:
            mixed_logit = _logit(z, w, mixed_target)  # [B]
            rest = (1 - lam * s) * target_logit - (1 - lam) * s * mixed_logit - c * total
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
    most = GPU_HELD if features.is_cuda else LOGITS_HELD
    return max(views, FEW_VIEWS) * instances <= most


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
    """Return the loss of each view, [B]. Logits are computed in tiles, and again backwards.

    Args:
        features, weight, target, mixed_target, lam, smoothing, chunk_size: See
            :func:`instance_discrimination_loss`.
        cosine: Normalise the rows of W, without a copy of W.
    """
    s, c = _shares(len(weight), smoothing)
    dtype = _dtype(features, weight)
    if isinstance(lam, Tensor):
        lam = lam.to(dtype)
    index = target[:, None]  # [B, T]
    if mixed_target is not None:
        index = torch.stack([target, mixed_target], dim=1)
    with torch.autocast(features.device.type, enabled=False):
        z = features.to(dtype)
        w = weight.to(dtype)
        tile = _tile(z, len(w), chunk_size)
        # [B], [B, T], [B]
        sums: tuple[Tensor, Tensor, Tensor] = _Logits.apply(z, w, index, tile, cosine)
        log_sum, picked, total = sums
        own = picked[:, 0]
        if mixed_target is None:
            return log_sum - s * own - c * total
        other = picked[:, 1]
        return log_sum - lam * s * own - (1 - lam) * s * other - c * total


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


class _Tile(NamedTuple):
    """Views and rows of a tile of logits, and how many logits are stored for the backward pass."""

    views: int
    rows: int
    stored: int


def _tile(z: Tensor, rows: int, chunk_size: int | None) -> _Tile:
    """Return the tile for views z [V, d] and a number of rows."""
    views = max(1, min(len(z), TILE_VIEWS))
    if chunk_size is not None:
        return _Tile(views, max(1, chunk_size * rows // views), 0)
    if z.device.type == "cpu":
        logits = CPU_TILE * max(2, torch.get_num_threads())
        return _Tile(views, logits // views // 64 * 64, CPU_STORED)
    return _Tile(views, GPU_TILE // views, GPU_STORED)


def row_tiles(rows: int, size: int) -> Iterator[slice]:
    """Return slices of a size that cover ``rows`` rows."""
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class _Logits(torch.autograd.Function):
    """Logsumexp [V] of the logits o = z w^T, [V, n], with some of them and their sum.

    Those of instances ``index`` are [V, T], the sum is [V]. Logits are computed in tiles. The
    gradients recompute tiles that are not stored.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        w: Tensor,
        index: Tensor,
        tile: _Tile,
        cosine: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
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
                if storable >= 0:
                    o = z[v] @ part.T  # [views, rows]
                else:
                    o = _tile_logits(z[v], part, buffer)
                new_top = torch.maximum(top[v], o.amax(1))
                o.sub_(new_top[:, None]).exp_()
                earlier = exps[v] * (top[v] - new_top).exp()
                exps[v] = earlier + o.sum(1)
                top[v] = new_top
                if storable >= 0:
                    ctx.stored[r.start, v.start] = o, new_top
        log_sum = top + exps.log()
        own, _ = _rows(w[index], cosine)
        picked = torch.einsum("vd,vtd->vt", z, own)
        ctx.save_for_backward(z, w, index, log_sum, column)
        return log_sum, picked, z @ column

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_log_sum: Tensor,
        d_picked: Tensor,
        d_total: Tensor,
    ) -> tuple[Tensor, Tensor, None, None, None]:
        z, w, index, log_sum, column = ctx.saved_tensors
        with torch.autocast(z.device.type, enabled=False):
            dz = torch.zeros_like(z)
            dw = torch.zeros_like(w)
            picked = (d_picked[:, :, None] * z[:, None]).flatten(0, 1)  # [V T, d]
            dw.index_put_((index.flatten(),), picked, accumulate=True)
            weighted = d_log_sum[:, None] * z  # [V, d]
            constant = d_total @ z  # [d]
            buffer = z.new_empty(ctx.views[0].stop * ctx.rows)
            for r in row_tiles(len(w), ctx.rows):
                part, length = _rows(w[r], ctx.cosine)
                for v in ctx.views:
                    stored = ctx.stored.pop((r.start, v.start), None)
                    if stored is not None:
                        exps, top = stored
                        p = exps.mul_((top - log_sum[v]).exp()[:, None])
                    else:
                        o = _tile_logits(z[v], part, buffer)
                        p = o.sub_(log_sum[v, None]).exp_()
                    dz[v].addmm_(p, part)
                    dw[r].addmm_(p.T, weighted[v])
                dw[r] += constant
                if ctx.cosine:
                    along = (part * dw[r]).sum(1, keepdim=True)
                    dw[r] = (dw[r] - part * along) / length
            dz = dz * d_log_sum[:, None] + d_total[:, None] * column
            own, _ = _rows(w[index], ctx.cosine)
            dz += torch.einsum("vt,vtd->vd", d_picked, own)
        return dz, dw, None, None, None


def _rows(w: Tensor, cosine: bool) -> tuple[Tensor, Tensor | float]:
    """Return rows [..., d] for the logits, normalised for cosines, and their lengths before."""
    if not cosine:
        return w, 1.0
    length = w.norm(dim=-1, keepdim=True).clamp_min(EPS)
    return w / length, length


def _tile_logits(z: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    """Return the logits of views z [v, d] and rows w [r, d], [v, r], in the buffer."""
    out = buffer[: len(z) * len(w)].view(len(z), len(w))
    return torch.mm(z, w.T, out=out)
