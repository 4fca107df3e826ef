"""How good is it: accuracy of a classifier, or of frozen features by nearest neighbours and by a linear probe."""

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from idmm import distributed
from idmm.intervals import wilson
from idmm.seeding import numpy_rng

KNN_TEMPERATURE = 0.07  # of the neighbours' votes (Wu et al., CVPR 2018)
NEIGHBOURS = 20
STRENGTHS = tuple(10.0**n for n in range(-4, 3))  # of the probe, scikit-learn's C
USUAL_STRENGTH = 1.0  # where nothing can be held out to choose by, and of equals the nearest to it
HOTTEST = 20.0  # temperature of a fitted classifier, at most: a fold of few images may ask for any
PROBE_STEPS = 2000  # of its fit, at most
FOLDS = 5
ENOUGH = 1000  # held-out images that settle the choice; fewer: more folds are held out in turn


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a module in evaluation mode inside the block, and each of its parts back to its own mode after it."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was


# ---------------------------------------------------------------------- classifiers
@dataclass(frozen=True)
class Predictions:
    """What a classifier says of a split's images, in the split's order; every figure of a result follows from it."""

    truth: np.ndarray  # int64 [N], the true classes
    ranked: np.ndarray  # int64 [N, min(5, K)], the likeliest classes, best first
    num_classes: int  # K
    probability: np.ndarray | None = None  # float32 [N], the softmax's share of the likeliest class; None: not known

    @property
    def predicted(self) -> np.ndarray:
        """The likeliest class of each image, int64 [N]."""
        return self.ranked[:, 0]

    def scores(self) -> dict[str, float]:
        """Returns ``top1``, ``top5`` and ``mean_per_class`` in percent.

        Where there are fewer than five classes, top-5 is 100. The mean over classes is that of their top-1 accuracies;
        a class without an image does not count.
        """
        right = self.ranked == self.truth[:, None]  # [N, min(5, K)]
        images, hits = self.per_class()
        seen = images > 0
        return {
            "top1": float(100 * hits.sum() / len(right)),
            "top5": float(100 * right.any(1).sum() / len(right)),
            "mean_per_class": float(100 * (hits[seen] / images[seen]).mean()),
        }

    def per_class(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the images of each class and those that are named right, int64 [K] each."""
        right = self.truth[self.predicted == self.truth]
        return tuple(np.bincount(of, minlength=self.num_classes) for of in (self.truth, right))

    def confusions(self) -> dict[int, tuple[int, int]]:
        """Returns for each class with errors the one named most often instead, of equals the first, and how often."""
        wrong = self.predicted != self.truth
        pairs, often = np.unique(np.stack([self.truth, self.predicted], 1)[wrong], axis=0, return_counts=True)
        order = np.lexsort((-pairs[:, 1], often))  # the last of a class stays
        return {true: (named, n) for (true, named), n in zip(pairs[order].tolist(), often[order].tolist(), strict=True)}


@torch.no_grad()
def predict(model: nn.Module, batches: Iterable[dict], device, autocast) -> Predictions:
    """Runs a classifier over all processes' batches of ``images``, ``label`` and ``index``; all must call together."""
    parts = []  # each batch's index [B], label [B], likeliest classes [B, min(5, K)] and probability of the first [B]
    classes = 0
    with evaluating(model):
        for batch in batches:
            with autocast():
                logits = model(batch["images"].to(device, non_blocking=True))  # [B, K]
            classes = logits.shape[1]
            logits = logits.float()
            ranked = logits.topk(min(5, classes), dim=1).indices  # [B, min(5, K)]
            share = logits.softmax(1).gather(1, ranked[:, :1])[:, 0]  # [B]
            parts.append((batch["index"].numpy(), batch["label"].numpy(), ranked.cpu().numpy(), share.cpu().numpy()))
    gathered = distributed.gather((classes, parts))
    index, *found = (np.concatenate(of) for of in zip(*(p for _, parts in gathered for p in parts), strict=True))
    truth, ranked, share = (of[np.argsort(index)] for of in found)
    return Predictions(truth, ranked, max(classes for classes, _ in gathered), share)


# ---------------------------------------------------------------------- frozen features
@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Ignores scikit-learn's warnings inside the block: it suspects a regression of few images a class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def knn_predict(train, train_labels, test, k: int = 20) -> np.ndarray:
    """Returns the class of each row of ``test`` [M, d] -> [M], by ``train`` [N, d] and its classes [N]: the weighted
    vote of the k nearest by cosine, N at most (Wu et al., CVPR 2018)."""
    from sklearn.neighbors import KNeighborsClassifier

    def votes(distance):  # cosine distance is 1 - similarity
        return np.exp((1 - distance) / KNN_TEMPERATURE)

    model = KNeighborsClassifier(min(k, len(train)), metric="cosine", weights=votes)
    with _quietly():
        return model.fit(train, train_labels).predict(test)


def knn_accuracy(train, train_labels, test, test_labels, k: int = 20) -> float:
    """Returns the accuracy of :func:`knn_predict` in percent; ``test_labels`` [M] are the true classes."""
    return 100 * float(np.mean(knn_predict(train, train_labels, test, k) == np.asarray(test_labels)))


def probe_predict(train, train_labels, test, strength: float = 1.0) -> np.ndarray:
    """Returns the same by a logistic regression on standardised features; ``strength`` is the inverse of its L2 penalty
    (scikit-learn's C)."""
    with _quietly():
        return _fitted(train, train_labels, strength).predict(test)


def fit_linear(train, labels, classes: int, strength: float = 1.0, class_weight: str | None = None) -> tuple:
    """Returns the same regression as a classifier of raw features: logits = features @ weight.T + bias.

    Args:
        train: Features [N, d].
        labels: Their classes [N], two different ones at least.
        classes: K; one without an image gets weight zero and the bias -inf, so that no image is taken for it.
        strength: As for :func:`probe_predict`.
        class_weight: Of scikit-learn's regression; 'balanced': classes count alike, whatever their size.

    Returns:
        weight [K, d] and bias [K], float64.
    """
    scaler, linear = (step for _, step in _fitted(train, labels, strength, class_weight).steps)
    rows, shift = linear.coef_.astype(np.float64), linear.intercept_.astype(np.float64)
    if len(rows) == 1:  # of two classes there is the difference of the logits alone
        rows, shift = np.concatenate([-rows, rows]) / 2, np.concatenate([-shift, shift]) / 2
    rows = rows / scaler.scale_
    shift = shift - rows @ scaler.mean_
    weight, bias = np.zeros((classes, rows.shape[1])), np.full(classes, -np.inf)
    weight[linear.classes_], bias[linear.classes_] = rows, shift
    return weight, bias


def _fitted(train, labels, strength: float, class_weight: str | None = None):
    """The regression on standardised features, as a scikit-learn pipeline of both."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = LogisticRegression(C=strength, max_iter=PROBE_STEPS, class_weight=class_weight)
    with _quietly():
        return make_pipeline(StandardScaler(), model).fit(train, labels)


def mean_interval(hits, count) -> tuple[float, float]:
    """Returns the 95 % interval of the mean over classes of ``hits`` [K] in ``count`` [K], as shares.

    Each class's Wilson interval, put together by the method of variance estimates recovery (Zou and Donner, Statistics
    in Medicine 27, 2008): distances from the shares to their bounds add up as standard errors do.
    """
    hits, count = np.asarray(hits, dtype=float), np.asarray(count, dtype=float)
    shares, (low, high) = hits / count, wilson(hits, count)
    below, above = (np.sqrt(((shares - bound) ** 2).sum()) / len(shares) for bound in (low, high))
    return float(shares.mean() - below), float(shares.mean() + above)


def score(predicted, truth, metric: str = "top1") -> dict:
    """Returns ``top1`` and ``top1_interval`` in percent; with the metric ``mean_per_class`` that and its interval too.

    Of classes ``predicted`` [M] and the true ones [M]; a class that is not among these does not count in the mean.
    """
    truth = np.asarray(truth)
    right = np.asarray(predicted) == truth
    found = {"top1": (right.mean(), wilson(right.sum(), len(right)))}
    if metric == "mean_per_class":
        count = np.bincount(truth)
        hits, count = np.bincount(truth, right)[count > 0], count[count > 0]
        found[metric] = (hits / count).mean(), mean_interval(hits, count)
    percents = {}
    for name, (share, interval) in found.items():
        percents |= {name: 100 * float(share), f"{name}_interval": [100 * float(bound) for bound in interval]}
    return percents


def class_counts(predicted, truth, classes: int) -> dict[str, list[int]]:
    """Returns the ``images`` of each of K classes and how many of them are ``correct``, [K] each, from classes
    ``predicted`` [M] and the true ones [M]. Folds are added up by these."""
    truth = np.asarray(truth)
    right = truth[np.asarray(predicted) == truth]
    return {name: np.bincount(of, minlength=classes).tolist() for name, of in (("images", truth), ("correct", right))}


def largest_class(truth) -> tuple[int, float]:
    """Returns the class of most images among ``truth`` [M], and its share in percent: what naming it always scores."""
    count = np.bincount(truth)
    return int(count.argmax()), float(100 * count.max() / count.sum())


def remarks(scores: dict, truth, classes: Sequence[str], baseline_top1: float | None = None) -> list[str]:
    """Returns what a top-1 accuracy must not be read without, a line each; nothing where there is no such thing.

    That is, that it is no better than naming the largest class every time (its 95 % interval reaches down to that), or
    no better than ``baseline_top1`` (percent).

    Args:
        scores: With ``top1`` and ``top1_interval`` (percent).
        truth: True classes [M].
        classes: Their names.
        baseline_top1: Accuracy of logistic regression on hand-made features (percent), if it is known.
    """
    top1, (low, high) = scores["top1"], scores["top1_interval"]
    (largest, share), count, lines = largest_class(truth), len(truth), []
    if low <= share:
        line = f"top-1 {top1:.1f} % is no better, within its 95 % interval ({low:.1f} to {high:.1f}), than naming one "
        line += f"class every time: '{classes[largest]}' is {share:.1f} % of the {count} test images"
        lines.append(line)
    if baseline_top1 is not None and top1 <= baseline_top1:
        what = f"logistic regression on hand-made features, which takes seconds ({baseline_top1:.1f} %)"
        lines.append(f"top-1 {top1:.1f} % is no better than {what}")
    return lines


class Choice(NamedTuple):
    """The strength chosen (scikit-learn's C), what it was chosen by, and the held-out accuracy of each (percent)."""

    strength: float
    by: str
    accuracies: dict[float, float]


def choose_strength(train, labels, seed: int = 0, val: tuple | None = None, class_weight: str | None = None) -> Choice:
    """Chooses the probe's strength by accuracy on features and classes ``val``; None: on stratified folds of ``train``
    [N, d], held out in turn until they come to :data:`ENOUGH` images; :data:`USUAL_STRENGTH` where there are none.
    ``class_weight`` is as for :func:`fit_linear`."""
    train, labels = np.asarray(train), np.asarray(labels)
    if val is not None:
        splits, by = [(train, labels, np.asarray(val[0]), np.asarray(val[1]))], "val"
    else:
        fold = folds(labels, seed)
        held = [fold == n for n in range(fold.max() + 1)]
        used = next((n for n in range(1, len(held)) if sum(h.sum() for h in held[:n]) >= ENOUGH), len(held))
        splits = [(train[~h], labels[~h], train[h], labels[h]) for h in held[:used]]
        by = f"{used} of {len(held)} stratified folds of train"
    if not splits:
        return Choice(USUAL_STRENGTH, "nothing: there are too few images to hold any out", {})
    hits = sum(_held_out_hits(*split, class_weight) for split in splits)
    accuracies = 100 * hits / sum(len(split[3]) for split in splits)
    best = [c for c, hit in zip(STRENGTHS, hits, strict=True) if hit == hits.max()]
    strength = min(best, key=lambda c: (abs(np.log(c / USUAL_STRENGTH)), c))
    return Choice(strength, by, dict(zip(STRENGTHS, accuracies.tolist(), strict=True)))


def fit_temperature(
    features, labels, strength: float, *, seed: int = 0, smoothing: float = 0.0, class_weight: str | None = None
) -> float:
    """Returns what to divide the logits of :func:`fit_linear` by for the least cross-entropy on a stratified fold of
    the images, held out from a fit of the same strength; 1 where that is less, or none can be held out.

    (Guo et al., On Calibration of Modern Neural Networks, ICML 2017, section 4.2.)

    Args:
        features, labels: Of the training images [N, d], [N].
        strength, class_weight: As for :func:`fit_linear`.
        seed: Of the folds.
        smoothing: Of the labels in the loss that the classifier will be trained by.
    """
    from scipy.optimize import minimize_scalar
    from sklearn.utils.class_weight import compute_sample_weight

    features, labels = np.asarray(features), np.asarray(labels)
    held = folds(labels, seed) == 0
    if not held.any():
        return 1.0
    weight, bias = fit_linear(features[~held], labels[~held], int(labels.max()) + 1, strength, class_weight)
    logits = torch.from_numpy(features[held] @ weight.T + bias)[:, np.unique(labels)]  # [M, classes that have images]
    truth = torch.from_numpy(np.unique(labels, return_inverse=True)[1][held])
    share = torch.from_numpy(compute_sample_weight(class_weight, labels[held]))

    def loss(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        losses = nn.functional.cross_entropy(scaled, truth, label_smoothing=smoothing, reduction="none")
        return float((losses * share).sum())

    return math.exp(minimize_scalar(loss, bounds=(0, math.log(HOTTEST)), method="bounded").x)


def folds(labels, seed: int = 0) -> np.ndarray:
    """Deals each class's images out to :data:`FOLDS`, or as many as the largest class has images, int64 [N].

    Every fold leaves an image of each class outside: one that is alone in its class is in none (-1).
    """
    labels = np.asarray(labels)
    fold, dealt = np.full(len(labels), -1), 0
    number = min(FOLDS, int(np.bincount(labels).max()))
    for of_class in np.unique(labels):
        members = np.flatnonzero(labels == of_class)
        if len(members) > 1:
            fold[numpy_rng(seed, "folds", of_class).permutation(members)] = (dealt + np.arange(len(members))) % number
            dealt += len(members)  # the next class goes on where this one stopped, so that folds are of one size
    return fold


def _held_out_hits(train, labels, held, truth, class_weight: str | None = None) -> np.ndarray:
    """Right answers on held-out images for each strength, weakest first, each fit started from the one before."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train)
    train, held = scaler.transform(train), scaler.transform(held)
    model = LogisticRegression(max_iter=500, warm_start=True, class_weight=class_weight)
    hits = []
    with _quietly():  # also of fits that did not converge: they are near enough to compare
        for strength in STRENGTHS:
            hits.append((model.set_params(C=strength).fit(train, labels).predict(held) == truth).sum())
    return np.array(hits)


def readouts(
    train, labels, test, truth, *, seed: int = 0, val: tuple | None = None, metric: str = "top1", fold: bool = False
) -> dict:
    """Returns the :func:`score` of both readouts of frozen features, ``knn`` and ``probe``.

    Features are ``train`` [N, d], of two classes at least, and ``test`` [M, d]. ``knn`` has its ``k`` too, ``probe``
    what :func:`choose_strength` says: ``strength``, ``chosen_by`` and the held-out ``accuracies``. In one of several
    folds both have the :func:`class_counts` as ``per_class``.
    """
    choice = choose_strength(train, labels, seed, val)
    neighbours = knn_predict(train, labels, test, NEIGHBOURS)
    linear = probe_predict(train, labels, test, choice.strength)
    accuracies = {f"{c:g}": accuracy for c, accuracy in choice.accuracies.items()}
    chosen = {"strength": choice.strength, "chosen_by": choice.by, "accuracies": accuracies}

    def counts(predicted) -> dict:
        return {"per_class": class_counts(predicted, truth, int(np.max(labels)) + 1)} if fold else {}

    return {
        "knn": {**score(neighbours, truth, metric), **counts(neighbours), "k": min(NEIGHBOURS, len(labels))},
        "probe": {**score(linear, truth, metric), **counts(linear), **chosen},
    }
