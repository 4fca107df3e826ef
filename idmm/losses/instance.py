"""Parametric instance discrimination: N images, N classes (Cao, Yu, Wu, ECCV 2022, Eqs. 3 and 17-20)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# In one process, so many logits of a layer of so few rows are all held at once, with what cross-entropy makes of them.
LOGITS_HELD, FEW_VIEWS = 2**21, 256
# Beyond that they are made a tile at a time: of so many logits for a thread of a CPU, which its cache holds, or for a
# GPU; of this many views at most. Tiles are kept for the backward pass up to so many logits (64 MiB, 1 GiB), and others
# are made again.
CPU_TILE, GPU_TILE, TILE_VIEWS = 2**19, 2**23, 1024
CPU_KEPT, GPU_KEPT = 2**24, 2**28
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
        chunk_size: No more logits are held at a time than so many views have; None: what is fastest in bounded memory.
        bias: Bias of the N-way layer, [N].

    Returns:
        Mean over the views, a scalar tensor.

    Raises:
        ValueError: Fewer than two instances, or a smoothing outside [0, 1).
    """
    if bias is not None:  # the weight of one more feature, which is 1
        features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
        weight = torch.cat([weight, bias[:, None]], dim=1)
    n = weight.shape[0]
    if not fits(len(features), n, chunk_size):
        return instance_losses(features, weight, target, mixed_target, lam, smoothing, chunk_size).mean()
    s, c = _shares(n, smoothing)
    dtype = _dtype(features, weight)
    with torch.autocast(features.device.type, enabled=False):
        z, w = features.to(dtype), weight.to(dtype)  # [B, d], [N, d]
        own = _logit(z, w, target)  # [B]
        total = z @ w.sum(0)  # sum_j o_j, [B]
        if mixed_target is None:
            rest = (1 - s) * own - c * total
        else:
            other = _logit(z, w, mixed_target)  # [B]
            rest = (1 - lam * s) * own - (1 - lam) * s * other - c * total
        return F.cross_entropy(F.linear(z, w), target) + rest.mean()  # mean of logsumexp(o) - o_i, and the rest


def fits(views: int, instances: int, chunk_size: int | None = None) -> bool:
    """Whether all logits of so many views may be held at once; beside few of them the gradients of W are what is large,
    and without tiles it has one for each term of the loss."""
    return max(views, FEW_VIEWS) * instances <= LOGITS_HELD if chunk_size is None else views <= chunk_size


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
    """The loss above of each view, [B], with its logits made a tile at a time and once more in the backward pass.

    Args:
        features, weight, target, mixed_target, lam, smoothing, chunk_size: As above.
        cosine: Brings the rows of W to unit length; no copy of W is made.
    """
    s, c = _shares(len(weight), smoothing)
    dtype = _dtype(features, weight)
    if isinstance(lam, Tensor):
        lam = lam.to(dtype)
    index = target[:, None] if mixed_target is None else torch.stack([target, mixed_target], dim=1)  # [B, T]
    with torch.autocast(features.device.type, enabled=False):
        z, w = features.to(dtype), weight.to(dtype)
        norm, picked, total = _Logits.apply(z, w, index, _tile(z, len(w), chunk_size), cosine)
        if mixed_target is None:
            return norm - s * picked[:, 0] - c * total
        return norm - lam * s * picked[:, 0] - (1 - lam) * s * picked[:, 1] - c * total


def _shares(n: int, smoothing: float) -> tuple[float, float]:
    """Returns s and c for n instances."""
    if n < 2:
        raise ValueError(f"instance discrimination needs at least 2 instances, got {n}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
    c = smoothing / (n - 1)
    return 1 - smoothing - c, c


def _dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(features.dtype, weight.dtype), torch.float32)


def _logit(z: Tensor, w: Tensor, index: Tensor) -> Tensor:
    """The logit of one instance for each view, [B], without the others."""
    return (z * F.embedding(index, w)).sum(1)  # [B, d] -> [B]


def _tile(z: Tensor, rows: int, chunk_size: int | None) -> tuple[int, int, int]:
    """Returns the views and the rows of a tile of logits, and how many logits may be kept for the backward pass."""
    views = max(1, min(len(z), TILE_VIEWS))
    if chunk_size is not None:
        return views, max(1, chunk_size * rows // views), 0
    if z.device.type == "cpu":
        return views, CPU_TILE * max(2, torch.get_num_threads()) // views // 64 * 64, CPU_KEPT
    return views, GPU_TILE // views, GPU_KEPT


def row_tiles(rows: int, size: int) -> Iterator[slice]:
    """Yields so many rows as slices of a size."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _Logits(torch.autograd.Function):
    """Of the logits o = z w^T, [V, n]: their logsumexp [V], those of instances ``index`` [V, T] and the sum [V].

    The logits are made by tiles (views, rows, how many logits to keep); what is not kept is made again for the
    gradients.
    """

    @staticmethod
    def forward(ctx, z, w, index, tile, cosine):
        views, rows, keep = tile
        ctx.views, ctx.rows, ctx.cosine = list(row_tiles(len(z), views)), rows, cosine
        top, exps = z.new_full((len(z),), -torch.inf), z.new_zeros(len(z))  # largest logit and sum of exp(o - top), [V]
        column, ctx.kept = z.new_zeros(z.shape[1]), {}  # the rows' sum, [d]
        buffer = z.new_empty(views * rows)
        for r in row_tiles(len(w), rows):
            part, _ = _rows(w[r], cosine)
            column += part.sum(0)
            for v in ctx.views:
                keep -= (v.stop - v.start) * len(part)
                o = _tile_logits(z[v], part, None if keep >= 0 else buffer)  # [views, rows]
                now = torch.maximum(top[v], o.amax(1))
                exps[v] = exps[v] * (top[v] - now).exp() + o.sub_(now[:, None]).exp_().sum(1)
                top[v] = now
                if keep >= 0:
                    ctx.kept[r.start, v.start] = o, now
        norm = top + exps.log()
        picked = torch.einsum("vd,vtd->vt", z, _rows(w[index], cosine)[0])
        ctx.save_for_backward(z, w, index, norm, column)
        return norm, picked, z @ column

    @staticmethod
    @once_differentiable
    def backward(ctx, d_norm, d_picked, d_total):
        z, w, index, norm, column = ctx.saved_tensors
        with torch.autocast(z.device.type, enabled=False):
            dz, dw = torch.zeros_like(z), torch.zeros_like(w)
            each = (d_picked[:, :, None] * z[:, None]).flatten(0, 1)  # first the few logits by themselves, [V T, d]
            dw.index_put_((index.flatten(),), each, accumulate=True)
            weighted, constant = d_norm[:, None] * z, d_total @ z  # [V, d], [d]
            buffer = z.new_empty(ctx.views[0].stop * ctx.rows)
            for r in row_tiles(len(w), ctx.rows):
                part, length = _rows(w[r], ctx.cosine)
                for v in ctx.views:
                    if kept := ctx.kept.pop((r.start, v.start), None):
                        p = kept[0].mul_((kept[1] - norm[v]).exp()[:, None])
                    else:
                        p = _tile_logits(z[v], part, buffer).sub_(norm[v, None]).exp_()
                    dz[v].addmm_(p, part)
                    dw[r].addmm_(p.T, weighted[v])
                dw[r] += constant
                if ctx.cosine:
                    dw[r] = (dw[r] - part * (part * dw[r]).sum(1, keepdim=True)) / length
            dz = dz * d_norm[:, None] + d_total[:, None] * column
            dz += torch.einsum("vt,vtd->vd", d_picked, _rows(w[index], ctx.cosine)[0])
        return dz, dw, None, None, None


def _rows(w: Tensor, cosine: bool) -> tuple[Tensor, Tensor | None]:
    """Returns rows [..., d] as the logits see them, and the lengths that they had for cosines."""
    if not cosine:
        return w, None
    length = w.norm(dim=-1, keepdim=True).clamp_min(EPS)
    return w / length, length


def _tile_logits(z: Tensor, w: Tensor, buffer: Tensor | None) -> Tensor:
    """The logits of views z [v, d] and rows w [r, d], [v, r], in the buffer where there is one."""
    out = None if buffer is None else buffer[: len(z) * len(w)].view(len(z), len(w))
    return torch.mm(z, w.T, out=out)
