"""Which rows of a matrix are alike: neighbours, near-duplicates, clusters, labels that neighbours share or do not.

The rows are one an image: of the N-way layer, or features. Products are taken in blocks, so that the memory for a
hundred thousand rows stays small. What was measured of these scores: benchmarks/results/explore.md.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

LOCAL = 10  # neighbours that tell how crowded it is around a row
VOTERS, TEMPERATURE = 10, 0.2  # neighbours that vote on an image's label, by exp(cosine / temperature)
ALPHA = 0.9  # of what a row is labelled by, the part that its neighbours have
CLOSE = 1e-6  # relative change of each share at which the labels have settled
ABOVE = 5.0  # a duplicate's score is so many times as far above the median image's as the first quartile is below it
LIKELY = 0.5  # margin of the vote from which on a label is likely wrong
MOST_CLUSTERS = 30
_BLOCK = 1 << 24  # products that are held at a time: 64 MiB


@dataclass(frozen=True)
class Neighbours:
    """The nearest other rows of each row, nearest first."""

    index: np.ndarray  # int64 [N, k]
    value: np.ndarray  # float32 [N, k]: what was compared, larger is nearer


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows that may be the same, the likeliest first."""

    index: np.ndarray  # int64 [P, 2], the earlier row first
    score: np.ndarray  # float64 [P]
    threshold: float  # scores above it are likely


def unit_rows(rows) -> np.ndarray:
    """Returns rows [N, d] less their mean and of unit length; those that are the mean stay zero: float32 [N, d]."""
    rows = torch.as_tensor(np.asarray(rows, dtype=np.float32))
    return F.normalize(rows - rows.mean(0), dim=1).numpy()


def nearest(rows: np.ndarray, k: int) -> Neighbours:
    """Returns for each row, float32 [N, d], the ``k`` others, N - 1 at most, of the largest product; of equal ones the
    earlier first."""
    others = torch.as_tensor(rows)
    count, k = len(rows), min(k, len(rows) - 1)
    index, value = np.empty((count, k), dtype=np.int64), np.empty((count, k), dtype=np.float32)
    step = max(1, _BLOCK // max(1, count))
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        found = others[part] @ others.T  # [R, N]
        own = torch.arange(part.start, part.stop)
        found[own - start, own] = -torch.inf
        values, columns = (of.numpy() for of in found.topk(k, dim=1))
        order = np.lexsort((columns, -values), axis=1)
        index[part], value[part] = (np.take_along_axis(of, order, 1) for of in (columns, values))
    return Neighbours(index, value)


def likely_duplicates(rows: np.ndarray) -> Pairs:
    """Returns pairs of rows, float32 [N, d], that are nearer to each other than their neighbourhoods are crowded.

    A pair's score is its product less the mean of both rows' with their next 10 neighbours (CSLS of Conneau et al.,
    Word translation without parallel data, ICLR 2018): in a class of much alike images, near is nothing special. The
    threshold needs no examples: of the images' best scores, it lies as far above the median as ``ABOVE`` times the
    first quartile below it.
    """
    near = nearest(rows, LOCAL + 1)
    crowd = near.value[:, 1:].mean(axis=1) if near.value.shape[1] > 1 else np.zeros(len(rows))  # without the nearest
    first = np.repeat(np.arange(len(rows)), near.index.shape[1])
    second = near.index.ravel()
    score = near.value.ravel().astype(np.float64) - (crowd[first] + crowd[second]) / 2
    best = score.reshape(near.index.shape).max(axis=1)
    quartile, median = np.percentile(best, [25, 50])
    order = np.lexsort((np.maximum(first, second), np.minimum(first, second), -score))
    pairs = np.sort(np.stack([first, second], axis=1)[order], axis=1)
    _, once = np.unique(pairs, axis=0, return_index=True)
    once.sort()
    return Pairs(pairs[once], score[order][once], float(median + ABOVE * (median - quartile)))


def label_margins(near: Neighbours, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compares each label with the vote of the image's neighbours by cosine, weighted as in
    :func:`idmm.evaluation.evaluate.knn_predict`, of the first ``VOTERS`` that have a label (``labels``: int64 [N], -1:
    none).

    Returns:
        The votes' share for the best other class less that for the image's own, in [-1, 1], float64 [N], and that other
        class, int64 [N], -1 where the neighbours have none. Images without a label, or whose neighbours have none, have
        -1 and -1.
    """
    theirs = labels[near.index]  # [N, k]
    seen = (theirs >= 0) & (np.cumsum(theirs >= 0, axis=1) <= VOTERS)
    weight = np.exp((near.value.astype(np.float64) - 1) / TEMPERATURE) * seen  # [N, k]
    own = (weight * (theirs == labels[:, None])).sum(axis=1)
    most, other = np.zeros(len(labels)), np.full(len(labels), -1)
    for column in range(theirs.shape[1]):
        votes = (weight * (theirs == theirs[:, column, None])).sum(axis=1)
        better = seen[:, column] & (theirs[:, column] != labels) & (votes > most)
        most, other = np.where(better, votes, most), np.where(better, theirs[:, column], other)
    total = weight.sum(axis=1)
    known = (labels >= 0) & (total > 0)
    margin = (most - own) / np.where(known, total, 1)
    return np.where(known, margin, -1.0), np.where(known, other, -1)


def spread_labels(near: Neighbours, labels: np.ndarray, classes: int) -> np.ndarray:
    """Returns each row's share of each of K classes, from the labels of some rows (int64 [N], -1: none) over the graph
    of neighbours by cosine, float64 [N, K]: rows sum to 1, those that no label reaches are zero.

    F = (I - a S)^-1 Y (Zhou et al., Learning with local and global consistency, NIPS 2003, equation 4) with S =
    D^-1/2 W D^-1/2, W = A + A^T and A_ij = max(cos_ij, 0)^3 for the neighbours j of i (Iscen et al., Label propagation
    for deep semi-supervised learning, CVPR 2019, equations 8 to 10). Columns are divided by their sums before rows are:
    no class wins by the number of its labels (class mass normalisation of Zhu et al., ICML 2003, for equal classes).
    """
    from scipy.sparse import csr_array, diags_array

    count, k = near.index.shape
    weight = np.maximum(near.value, 0).astype(np.float64).ravel() ** 3
    one_way = csr_array((weight, near.index.ravel(), np.arange(0, count * k + 1, k)), shape=(count, count))
    both = one_way + one_way.T
    degree = both.sum(axis=1)
    scale = diags_array(np.divide(1, np.sqrt(degree), out=np.zeros(count), where=degree > 0))
    smooth = ALPHA * (scale @ both @ scale)
    given = (labels[:, None] == np.arange(classes)).astype(np.float64)  # [N, K]
    shares, settled = given, False
    while not settled:  # relative to each entry: those of rows many hops from a label are tiny
        before, shares = shares, smooth @ shares + given
        settled = bool((np.abs(shares - before) <= CLOSE * before).all())
    for axis in (0, 1):
        total = shares.sum(axis=axis, keepdims=True)
        shares = np.divide(shares, total, out=np.zeros_like(shares), where=total > 0)
    return shares


def clusters(unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups rows of unit length, float32 [N, d], by k-means with the square root of N / 2 clusters, 30 at most.

    Returns:
        Each row's cluster, numbered from 0 by size, int64 [N], and its cosine with the cluster's centre, float32 [N].
    """
    from sklearn.cluster import MiniBatchKMeans

    number = min(MOST_CLUSTERS, max(2, round((len(unit) / 2) ** 0.5)))
    found = MiniBatchKMeans(number, batch_size=2048, n_init=5, random_state=0).fit(unit)
    order = np.argsort(-np.bincount(found.labels_, minlength=found.n_clusters), kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    centres = F.normalize(torch.as_tensor(found.cluster_centers_.astype(np.float32)), dim=1).numpy()
    return rank[found.labels_].astype(np.int64), (unit * centres[found.labels_]).sum(axis=1)
