"""What sampled rows cost in gradient error, and Adam in rows that are seldom touched: the simulations of scale.py.

The loss of a view is logsumexp(o) - o_own over N logits o = W z. The smoothing of labels adds c sum_j o_j, which needs
no logits (the sum of W's rows is enough, and can be kept up to date), so it is left out; CutMix adds a second own row.
Sampled, the logsumexp runs over some rows S only, each with a weight:

    uniform             the batch's own rows and M others drawn evenly, weight 1: a smaller softmax
    uniform, corrected  the same rows; those that were drawn weigh N'/M, N' being all that could have been: exp of the
                        log-q correction (Bengio and Senecal, 2008; Jean et al., ACL 2015), so that the sum of
                        exponentials has the right mean
    cells, corrected    half of the M from the cells that the batch's own rows lie in, half from all others, each half
                        weighed by its own share. A cell is the rows nearest to one of 1,000 rows taken at random, a
                        clustering that costs one pass over W
    neighbours, corrected   up to half of the M are the rows nearest to each of the batch's own rows, weight 1, the rest
                        from all others. The lists are out of date: of own rows that have cosine 0.9 with those now

The states are synthetic. Where it is a trained one, rows and views are noisy copies of image vectors, which lie in
1,000 clusters of 100 groups of 10 at N = 10^6: unit vectors whose cosine is 0.7 in a group and 0.4 in a cluster, so
that hard negatives exist; a row has cosine 0.95 with its image, a view 0.85.
"""

import math
import statistics
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLERS = ("uniform", "uniform, corrected", "cells, corrected", "neighbours, corrected")
CLUSTER, GROUP = 1000, 10  # images of each
SHARES = (0.4, 0.3, 0.3)  # of an image vector's squared length: its cluster's, its group's, its own
ROW, VIEW = 0.95, 0.85  # cosines with the image vector
CELLS = 1000
LISTED, OUTDATED = 100, 0.9  # neighbours of a row that are listed; cosine of a row with itself when they were
SLICE = 100_000  # rows worked on at a time


class State(NamedTuple):
    """Rows and views, as they enter the product; of a cosine layer the scale is in the views."""

    name: str
    rows: Tensor  # W, [N, d]
    views: Tensor  # z, [B, d]
    own: Tensor  # the row of each view, int64 [B]


def noisy(vectors: Tensor, cosine: float) -> Tensor:
    """Returns unit vectors [N, d] whose cosine with unit vectors is about the one given; in place, slice by slice."""
    for part in vectors.split(SLICE):
        noise = torch.randn_like(part).mul_(math.sqrt((1 - cosine**2) / part.shape[1]))
        part.mul_(cosine).add_(noise).div_(part.norm(dim=1, keepdim=True))
    return vectors


def image_vectors(n: int, d: int) -> Tensor:
    """Returns unit vectors in clusters of groups, [N, d]."""
    outer = zip((CLUSTER, GROUP), SHARES[:2], strict=True)
    parts = [torch.randn(-(-n // size), d).mul_(math.sqrt(share / d)) for size, share in outer]
    vectors = torch.randn(n, d).mul_(math.sqrt(SHARES[2] / d))
    for first in range(0, n, SLICE):
        numbers = torch.arange(first, min(n, first + SLICE))
        piece = vectors[first : first + SLICE]
        for part, size in zip(parts, (CLUSTER, GROUP), strict=True):
            piece += part[numbers // size]
        piece /= piece.norm(dim=1, keepdim=True)
    return vectors


def scale_for(products: Tensor, own: Tensor, share: float) -> float:
    """Returns the factor of logits [B, N] at which the own row's part of the softmax has a median of ``share``."""
    low, high = 1.0, 200.0
    for _ in range(14):
        middle = (low + high) / 2
        took = [float((row * middle).softmax(0)[i]) for row, i in zip(products, own, strict=True)]
        low, high = (middle, high) if statistics.median(took) < share else (low, middle)
    return high


def states(n: int, d: int, views: int):
    """Yields the states one after the other; rows are made anew in the same memory."""
    own = torch.randperm(n)[:views]
    common = torch.randn(1, d)  # features of an untrained network are nearly all alike
    start = math.sqrt(0.8) * common + math.sqrt(0.2) * torch.randn(views, d)
    rows = torch.empty(n, d).uniform_(-(d**-0.5), d**-0.5)  # as nn.Linear
    yield State("start, linear", rows, F.layer_norm(start, (d,)), own)
    for part in rows.normal_().split(SLICE):
        part /= part.norm(dim=1, keepdim=True)
    yield State("start, cosine x 16", rows, 16 * F.normalize(start, dim=1), own)
    del rows
    rows = image_vectors(n, d)
    unit = noisy(rows[own].clone(), VIEW)
    noisy(rows, ROW)
    yield State("trained, cosine x 16", rows, 16 * unit, own)
    lengths = torch.empty(n, 1).normal_(std=0.1).exp_()  # of a linear layer's rows
    rows *= lengths
    products = unit @ rows.T
    scales = [scale_for(products, own, share) for share in (0.5, 0.9)]
    del products
    for scale, share in zip(scales, ("half", "90 %"), strict=True):
        yield State(f"trained, linear, own row has {share}", rows, scale * unit, own)


def cells(rows: Tensor) -> Tensor:
    """Returns the cell of each row: the nearest by cosine of :data:`CELLS` rows taken at random, int64 [N]."""
    anchors = F.normalize(rows[torch.randperm(len(rows))[:CELLS]], dim=1)
    return torch.cat([(part @ anchors.T).argmax(1) for part in rows.split(SLICE // 4)])


def neighbours(state: State) -> Tensor:
    """Returns the rows nearest to a former version of each view's own row, nearest first, int64 [B, LISTED]."""
    former = noisy(F.normalize(state.rows[state.own], dim=1), OUTDATED)
    best = (former @ state.rows.T).topk(LISTED + 1, dim=1).indices
    return torch.stack([row[row != i][:LISTED] for row, i in zip(best, state.own, strict=True)])


class Strata(NamedTuple):
    """Rows to draw from, without the batch's own: those that are likely hard, and all others."""

    hard: Tensor
    others: Tensor


def strata(state: State, kind: str, m: int, of_row: Tensor, lists: Tensor) -> Strata:
    """Parts the rows for a sampler."""
    taken = torch.zeros(len(state.rows), dtype=torch.bool)
    taken[state.own] = True
    hard = torch.zeros_like(taken)
    if kind.startswith("cells"):
        hard = torch.isin(of_row, of_row[state.own])
    elif kind.startswith("neighbours"):
        hard[lists[:, : max(1, m // 2 // len(lists))].flatten()] = True
    hard &= ~taken
    return Strata(hard.nonzero()[:, 0], (~taken & ~hard).nonzero()[:, 0])


def drawn(rows: Strata, m: int, corrected: bool) -> tuple[Tensor, Tensor]:
    """Draws M rows; returns their numbers, int64 [M], and log weights [M]."""
    near, numbers, weights = min(len(rows.hard), m // 2), [], []
    for stratum, count in zip(rows, (near, m - near), strict=True):
        numbers.append(stratum[torch.randperm(len(stratum))[:count]])
        weights.append(torch.full((count,), math.log(len(stratum) / count) if corrected and count else 0.0))
    return torch.cat(numbers), torch.cat(weights)


class Exact(NamedTuple):
    """All logits of a state and its gradients."""

    logits: Tensor  # [B, N]
    share: Tensor  # softmax less 1 at the own row: the gradient of the logits, [B, N]
    total: Tensor  # logsumexp, [B]
    of_views: Tensor  # gradient by z, [B, d]
    squared: Tensor  # share @ share.T, [B, B]
    cross: Tensor  # z @ z.T, [B, B]


def less_one(share: Tensor, own: Tensor) -> Tensor:
    """Takes 1 from the own row's part of a softmax [B, ...], without losing digits where that is nearly 1; in place."""
    at = torch.arange(len(share)), own
    share[at] = 0
    share[at] = -share.sum(1)
    return share


def exact(state: State) -> Exact:
    """Computes them; 2 [B, N] tensors are held."""
    logits = state.views @ state.rows.T
    total = logits.logsumexp(1)
    share = less_one((logits - total[:, None]).exp_(), state.own)
    return Exact(logits, share, total, share @ state.rows, share @ share.T, state.views @ state.views.T)


def errors(state: State, true: Exact, rows_of: Strata, m: int, draws: int, corrected: bool) -> dict[str, float]:
    """Returns errors of sampled gradients over draws of M rows.

    ``z error``: root of the mean over draws of the squared distance from the true gradient, over its length, the median
    of the views; split into ``z bias`` (of the mean over draws, less what its own spread adds) and ``z spread``;
    ``z cosine``. ``own error`` and ``own cosine``: of the own rows' gradients. ``W error``, ``W cosine``: of the whole
    gradient [N, d] of W, which is zero in rows that were not drawn. ``loss bias``: in nats.
    """
    b, own = len(state.own), state.own
    found, own_error, own_cosine, w_error, w_cosine, loss = [], [], [], [], [], []
    true_own, true_norm = true.share[:, own].T @ state.views, float((true.squared * true.cross).sum())
    for _ in range(draws):
        numbers, log_weight = drawn(rows_of, m, corrected)
        rows = torch.cat([own, numbers])
        logits = true.logits[:, rows]
        logits[:, b:] += log_weight
        total = logits.logsumexp(1)
        share = less_one(logits.sub_(total[:, None]).exp_(), torch.arange(b))  # [B, B + M]
        found.append(share @ state.rows[rows])
        loss.append(float((total - true.total).mean()))
        gradient = share[:, :b].T @ state.views
        own_error.append(float(((gradient - true_own).norm(dim=1) / true_own.norm(dim=1)).median()))
        own_cosine.append(float(F.cosine_similarity(gradient, true_own, dim=1).median()))
        inner = float((share @ true.share[:, rows].T * true.cross).sum())
        norm = float((share @ share.T * true.cross).sum())
        w_error.append((norm - 2 * inner + true_norm) / true_norm)
        w_cosine.append(inner / math.sqrt(norm * true_norm))
    each = torch.stack(found)  # [T, B, d]
    length = true.of_views.norm(dim=1)
    spread = each.var(0, correction=min(1, draws - 1)).sum(1)  # [B]
    off = ((each.mean(0) - true.of_views).square().sum(1) - spread / draws).clamp(min=0)
    squared = (each - true.of_views).square().sum(2).mean(0)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        "z error": float((squared.sqrt() / length).median()),
        "z bias": float((off.sqrt() / length).median()),
        "z spread": float((spread.sqrt() / length).median()),
        "z cosine": float(F.cosine_similarity(each, true.of_views, dim=2).mean(0).median()),
        "own error": mean(own_error),
        "own cosine": mean(own_cosine),
        "W error": math.sqrt(max(0.0, mean(w_error))),
        "W cosine": mean(w_cosine),
        "loss bias": mean(loss),
    }


@torch.no_grad()
def simulate(n: int, d: int, views: int, sampled: list[int], draws: int, say=print) -> list[dict]:
    """Returns an entry for each state, sampler and M, with the state's own row's share and :func:`errors`."""
    torch.manual_seed(0)
    results, of_row, began = [], torch.empty(0), time.monotonic()
    for state in states(n, d, views):
        if not state.name.startswith("trained, linear, own row has 90"):  # the same rows as the one before
            of_row = cells(state.rows)
        true, lists = exact(state), neighbours(state)
        own_share = float(1 + true.share[torch.arange(views), state.own].median())
        for m in sampled:
            for kind in SAMPLERS:
                rows_of = strata(state, kind, m, of_row, lists)
                found = errors(state, true, rows_of, m, draws, kind.endswith("corrected"))
                results.append({"state": state.name, "own share": own_share, "sampler": kind, "M": m, **found})
        say(f"{state.name}: {time.monotonic() - began:.0f} s")
        del true
    return results


# ---------------------------------------------------------------------- Adam
def _torch_moves(every: int, touches: int, noise: Tensor, betas: tuple[float, float]) -> float:
    """The last half's mean move of a row a touch over the lr, by torch.optim.AdamW, stepping through all the zeros."""
    lr = 1e-3
    row = torch.zeros(len(noise[0]), dtype=torch.float64, requires_grad=True)
    optimizer, at = torch.optim.AdamW([row], lr=lr, betas=betas, weight_decay=0.0, eps=1e-12), []
    for touch in range(touches):
        at.append(row.detach().clone())
        for step in range(every):
            row.grad = -noise[touch] if step == 0 else torch.zeros_like(row)
            optimizer.step()
    moved = at[-1] - at[touches // 2]
    return float(moved.mean()) / lr / (touches - 1 - touches // 2)


def adam_moves(every: int, touches: int = 200, betas: tuple[float, float] = (0.9, 0.999), by_torch=False) -> dict:
    """How far a row goes a touch, in units of the learning rate, if its gradient is zero but every so many steps.

    The gradients have mean 1 and standard deviation 1. ``dense``: Adam's moments decay at every step and go on moving
    the row. ``lazy`` (torch.optim.SparseAdam): rows and moments stand still until they are touched. Between touches k
    steps apart Adam is summed in closed form, where epsilon and the bias correction of late steps count for nothing:
    sum over j < k of beta1^j m / sqrt(beta2^j v). ``by_torch``: the dense one by torch.optim.AdamW, step by step.
    """
    b1, b2 = betas
    noise = 1 + torch.randn(touches, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if by_torch:
        return {"dense": _torch_moves(every, touches, noise, betas)}
    moved = {}
    for kind, gap in (("dense", every), ("lazy", 1)):
        m, v = torch.zeros_like(noise[0]), torch.zeros_like(noise[0])
        ratio, steps, path = b1 / math.sqrt(b2), 0, []
        for g in noise:
            m, v, steps = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g, steps + 1
            corrected = math.sqrt(1 - b2**steps) / (1 - b1**steps)
            path.append(corrected * m / v.sqrt() * (1 - ratio**gap) / (1 - ratio))
            m, v, steps = m * b1 ** (gap - 1), v * b2 ** (gap - 1), steps + gap - 1
        late = torch.stack(path[touches // 2 :])
        moved[kind] = float(late.mean())
        moved[f"{kind} spread"] = float(late.std(0).mean())
    return moved
