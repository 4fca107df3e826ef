"""Similarity of rows: neighbours, near-duplicates, and labels that neighbours do not share.

There is a row of features per image. Products are computed in blocks, so that a hundred
thousand rows need little memory. Measurements of these scores: benchmarks/results/explore.md.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike

from idmm.evaluation import Floats, Integers, Names

LOCAL = 10  # neighbours that measure how crowded it is around a row
VOTERS = 10  # neighbours that vote on an image's label
TEMPERATURE = 0.2  # votes are weighted by exp(cosine / temperature)
ALPHA = 0.9  # share of the neighbours in a row's label
CLOSE = 1e-6  # relative change of each share at which the labels have converged
ABOVE = 5.0  # see likely_duplicates
LIKELY = 0.5  # margin of the vote above which a label is likely wrong
_BLOCK = 1 << 24  # products in memory at a time: 64 MiB


@dataclass(frozen=True)
class Neighbours:
    """The nearest other rows of each row, nearest first."""

    index: Integers  # [N, k]
    value: Floats  # float32 [N, k]: the product, larger is nearer


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows that may be the same, the likeliest first."""

    index: Integers  # [P, 2], the earlier row first
    score: Floats  # float64 [P]
    threshold: float  # scores above it are likely


def unit_rows(rows: ArrayLike) -> Floats:
    """Return rows less their mean and of unit length, float32 [N, d].

    Rows equal to the mean stay zero.
    """
    values = torch.as_tensor(np.asarray(rows, dtype=np.float32))
    return F.normalize(values - values.mean(0), dim=1).numpy()


def nearest(rows: Floats, k: int, groups: Names | None = None) -> Neighbours:
    """Return the ``k`` others (N - 1 at most) with the largest product for each row.

    The rows are float32 [N, d]. Of equal ones the earlier comes first. Rows of one of ``groups``
    [N] are no neighbours: if there are too few others, the rest has the value -inf.
    """
    others = torch.as_tensor(rows)
    count = len(rows)
    k = min(k, count - 1)
    units = np.arange(count)
    if groups is not None:
        units = np.unique(groups, return_inverse=True)[1]
    index = np.empty((count, k), dtype=np.int64)
    value = np.empty((count, k), dtype=np.float32)
    step = max(1, _BLOCK // max(1, count))
    for start in range(0, count, step):
        block = slice(start, min(start + step, count))
        products = others[block] @ others.T  # [R, N]
        products[torch.from_numpy(units[block, None] == units)] = -torch.inf
        best = products.topk(k, dim=1)
        values = best.values.numpy()
        columns = best.indices.numpy()
        order = np.lexsort((columns, -values), axis=1)
        index[block] = np.take_along_axis(columns, order, 1)
        value[block] = np.take_along_axis(values, order, 1)
    return Neighbours(index, value)


def likely_duplicates(rows: Floats) -> Pairs:
    """Return pairs of rows that are nearer to each other than to their neighbourhoods.

    The rows are float32 [N, d]. A pair's score is its product less the mean of both rows' products
    with their next 10 neighbours (CSLS of Conneau et al., Word translation without parallel data,
    ICLR 2018). So a near row means little in a class of similar images. The threshold needs no
    examples. With q and m the first quartile and the median of the images' best scores, it is m +
    ``ABOVE`` * (m - q).
    """
    near = nearest(rows, LOCAL + 1)
    crowd = np.zeros(len(rows))
    if near.value.shape[1] > 1:
        crowd = near.value[:, 1:].mean(axis=1)  # without the nearest
    first = np.repeat(np.arange(len(rows)), near.index.shape[1])
    second = near.index.ravel()
    score = near.value.ravel().astype(np.float64) - (crowd[first] + crowd[second]) / 2
    best = score.reshape(near.index.shape).max(axis=1)
    quartile, median = np.percentile(best, [25, 50])
    pairs = np.sort(np.stack([first, second], axis=1), axis=1)
    order = np.lexsort((*pairs.T[::-1], -score))
    _, unique = np.unique(pairs[order], axis=0, return_index=True)
    order = order[np.sort(unique)]  # each pair once
    return Pairs(pairs[order], score[order], float(median + ABOVE * (median - quartile)))


def label_margins(near: Neighbours, labels: Integers) -> tuple[Floats, Integers]:
    """Compare each label with the vote of the image's neighbours by cosine.

    The first ``VOTERS`` neighbours with a label vote, weighted as in
    :func:`idmm.evaluation.evaluate.knn_predict`.

    Args:
        near: The neighbours.
        labels: int64 [N], -1 for images without a label.

    Returns:
        The votes' share for the best other class less that for the image's own, in [-1, 1], float64
        [N], and that other class, int64 [N], -1 if there is none. Both are -1 for images without a
        label or without labelled neighbours.
    """
    neighbours = labels[near.index]  # [N, k]
    votes = (neighbours >= 0) & (np.cumsum(neighbours >= 0, axis=1) <= VOTERS)
    weight = np.exp((near.value.astype(np.float64) - 1) / TEMPERATURE) * votes  # [N, k]
    same = (weight * (neighbours == labels[:, None])).sum(axis=1)
    most = np.zeros(len(labels))
    other = np.full(len(labels), -1)
    for column in range(neighbours.shape[1]):
        total = (weight * (neighbours == neighbours[:, column, None])).sum(axis=1)
        better = votes[:, column] & (neighbours[:, column] != labels) & (total > most)
        most = np.where(better, total, most)
        other = np.where(better, neighbours[:, column], other)
    total = weight.sum(axis=1)
    comparable = (labels >= 0) & (total > 0)
    margin = (most - same) / np.where(comparable, total, 1)
    return np.where(comparable, margin, -1.0), np.where(comparable, other, -1)


def spread_labels(near: Neighbours, labels: Integers, classes: int) -> Floats:
    """Return each row's share of each of K classes, float64 [N, K].

    It comes from the labels of some rows, [N] (-1: none), over the graph of neighbours by cosine.
    Rows sum to 1, or are zero if no label reaches them.

    F = (I - a S)^-1 Y (Zhou et al., Learning with local and global consistency, NIPS 2003, equation
    4) with S = D^-1/2 W D^-1/2, W = A + A^T and A_ij = max(cos_ij, 0)^3 for the neighbours j of i
    (Iscen et al., Label propagation for deep semi-supervised learning, CVPR 2019, equations 8 to
    10). Columns are divided by their sums before rows are, so that no class wins by the number of
    its labels (class mass normalisation of Zhu et al., ICML 2003, for equal classes).
    """
    from scipy.sparse import csr_array, diags_array

    count, k = near.index.shape
    weight = np.maximum(near.value, 0).astype(np.float64).ravel() ** 3
    one_way = csr_array(
        (weight, near.index.ravel(), np.arange(0, count * k + 1, k)), shape=(count, count)
    )
    symmetric = one_way + one_way.T
    degree = symmetric.sum(axis=1)
    scale = diags_array(np.divide(1, np.sqrt(degree), out=np.zeros(count), where=degree > 0))
    smooth = ALPHA * (scale @ symmetric @ scale)
    initial: Floats = (labels[:, None] == np.arange(classes)).astype(np.float64)  # [N, K]
    shares = initial
    converged = False
    while not converged:  # relative to each entry: rows many hops from a label have tiny ones
        before = shares
        shares = smooth @ shares + initial
        converged = bool((np.abs(shares - before) <= CLOSE * before).all())
    for axis in (0, 1):
        total = shares.sum(axis=axis, keepdims=True)
        shares = np.divide(shares, total, out=np.zeros_like(shares), where=total > 0)
    return shares
