"""Accuracy of a classifier, and of frozen features by kNN and a linear probe."""

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idmm import distributed
from idmm.batch import Batch
from idmm.data.stratify import stratified_folds
from idmm.errors import RunError
from idmm.evaluation import Floats, Integers, Names
from idmm.evaluation.regression import STRENGTHS, fitted, held_out_hits, threads
from idmm.models.build import to_faster_format
from idmm.report.stats import group_interval, wilson_interval

KNN_TEMPERATURE = 0.07  # of the neighbours' votes (Wu et al., CVPR 2018)
NEIGHBOURS = 20
USUAL_STRENGTH = 1.0  # with few images. Of equally good strengths the nearest to it is chosen
# images per class, under which a choice is more noise than gain (benchmarks/results/minutes.md)
FEW = 10
HOTTEST = 20.0  # highest temperature of a fitted classifier: a fold of few images may fit any
# held-out images that settle the choice of a strength. With fewer, more folds are used
ENOUGH = 1000


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside the block.

    After it each submodule is back in its own mode.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


# ---------------------------------------------------------------------- scores
class Hits(TypedDict):
    """The images of each class or group, and how many are correct."""

    images: list[int]
    correct: list[int]


class Scores(TypedDict, total=False):
    """Entries of ``result.json`` about predictions. Accuracies are in percent."""

    top1: float
    top1_interval: list[float]  # 95 %
    mean_per_class: float
    top5: float  # of a classifier
    per_class: Hits  # scores of several folds are computed from these
    per_group: Hits
    k: int  # of kNN
    strength: float  # of a probe, with the rest of its :class:`Choice`
    chosen_by: str
    accuracies: dict[str, float]


def score(predicted: Integers, truth: Integers, groups: Names | None = None) -> Scores:
    """Return ``top1``, ``top1_interval`` and ``mean_per_class``.

    Args:
        predicted, truth: Classes of M images, [M]. A class without an image does not count in
            the mean.
        groups: Name of each image's group, [M]. The interval is then over groups.
    """
    correct = predicted == truth
    count = int(correct.sum())
    if groups is None:
        interval = wilson_interval(count, len(truth))
    else:
        interval = group_interval(**_group_hits(groups, correct))
    images = np.bincount(truth)
    tested = images > 0
    shares = np.bincount(truth, correct)[tested] / images[tested]
    return {
        "top1": 100 * count / len(truth),
        "top1_interval": interval,
        "mean_per_class": 100 * float(shares.mean()),
    }


def hit_counts(
    predicted: Integers,
    truth: Integers,
    classes: int,
    groups: Names | None = None,
) -> Scores:
    """Return ``per_class`` and, with groups, ``per_group``.

    Arguments are those of :func:`score`, and the least number of classes.
    """
    correct = predicted == truth
    counts: Scores = {"per_class": _hits(truth, correct, classes)}
    if groups is not None:
        counts["per_group"] = _group_hits(groups, correct)
    return counts


def _group_hits(groups: Names, correct: NDArray[np.bool_]) -> Hits:
    return _hits(np.unique(groups, return_inverse=True)[1], correct, 0)


def _hits(units: Integers, correct: NDArray[np.bool_], least: int) -> Hits:
    """Return the counts of each unit of M images, [M]. ``least``: number of units."""
    images = np.bincount(units, minlength=least)
    hits = np.bincount(units, correct, len(images)).astype(int)
    return {"images": images.tolist(), "correct": hits.tolist()}


# ---------------------------------------------------------------------- classifiers
@dataclass(frozen=True)
class Predictions:
    """A classifier's predictions for a split's images, in the split's order."""

    truth: Integers  # [N], the true classes
    ranked: Integers  # [N, min(5, K)], the likeliest classes, best first
    probability: NDArray[np.float32]  # [N], of the likeliest class

    @property
    def predicted(self) -> Integers:
        """The likeliest class of each image, [N]."""
        return self.ranked[:, 0]

    def scores(self, groups: Names | None = None) -> Scores:
        """Return all scores, see :func:`score`. With fewer than five classes, top-5 is 100."""
        hits = self.ranked == self.truth[:, None]  # [N, min(5, K)]
        scores = score(self.predicted, self.truth, groups)
        scores["top5"] = float(100 * hits.any(1).sum() / len(hits))
        return scores

    def confusion(self, classes: int) -> Integers:
        """Return the number of images by true class (rows) and predicted class, [K, K]."""
        from sklearn.metrics import confusion_matrix

        counts: Integers = confusion_matrix(self.truth, self.predicted, labels=range(classes))
        return counts


def predict(model: nn.Module, batches: Iterable[Batch], device: str) -> Predictions:
    """Run a classifier over all processes' batches of ``images``, ``label`` and ``index``.

    All must call together. It is in fp32 whatever the precision of training, as the exported
    classifier is.

    Raises:
        RunError: A probability is not a number.
    """

    def predictions(batch: Batch) -> list[Tensor]:
        logits = model(batch["images"].to(device, non_blocking=True)).float()  # [B, K]
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices  # [B, min(5, K)]
        probability = logits.softmax(1).gather(1, ranked[:, :1])[:, 0]  # [B]
        return [batch["label"], ranked, probability]

    truth, ranked, probability = outputs_in_order(model, batches, predictions)
    if np.isnan(probability).any():
        raise RunError(
            "the network's outputs are not finite: "
            "lower --train.lr or set --train.clip_grad 1, in a new --out",
            shared=True,
        )
    return Predictions(truth, ranked, probability)


@torch.no_grad()
def outputs_in_order(
    model: nn.Module,
    batches: Iterable[Batch],
    forward: Callable[[Batch], list[Tensor]],
    local: bool = False,
) -> list[NDArray[Any]]:
    """Return what ``forward`` returns for a batch, [B, ...] each, for all images in their order.

    The images are those of all processes, or with ``local`` only those of this process. Without any
    it is [].
    """
    results = []
    to_faster_format(model)
    with evaluating(model):
        for batch in batches:
            columns = [batch["index"], *forward(batch)]
            results.append([column.cpu().numpy() for column in columns])
    parts = [results] if local else distributed.gather(results)
    joined = list(itertools.chain.from_iterable(parts))
    if not joined:
        return []
    index, *outputs = map(np.concatenate, zip(*joined, strict=True))
    order = np.argsort(index)
    return [output[order] for output in outputs]


LinearHead = tuple[Floats, Floats]  # weight [K, d] and bias [K] of a classifier


# ---------------------------------------------------------------------- frozen features
def knn_predict(train: Floats, labels: Integers, test: Floats) -> Integers:
    """Return the class of each row of ``test`` [M, d] by ``train`` [N, d] and its classes [N].

    It is the weighted vote of the :data:`NEIGHBOURS` nearest by cosine (Wu et al., CVPR 2018).
    """
    from sklearn.neighbors import KNeighborsClassifier

    def votes(distance: Floats) -> Floats:  # cosine distance is 1 - similarity
        votes: Floats = np.exp((1 - distance) / KNN_TEMPERATURE)
        return votes

    k = min(NEIGHBOURS, len(train))
    model = KNeighborsClassifier(k, metric="cosine", weights=votes)
    with warnings.catch_warnings(action="ignore"):  # scikit-learn suspects few images per class
        classes: Integers = model.fit(train, labels).predict(test)
        return classes


def probe_predict(
    train: Floats,
    labels: Integers,
    test: Floats,
    strength: float = USUAL_STRENGTH,
    one_scale: bool = False,
) -> Integers:
    """Return the same by logistic regression on standardised features.

    Args:
        train, labels, test: As for :func:`knn_predict`.
        strength: scikit-learn's C.
        one_scale: Divide all features by one number, the root of their mean variance. It suits
            features that are comparable, such as those of :mod:`idmm.models.hog`.
    """
    weight, bias, classes = fitted(train, labels, strength, one_scale=one_scale)
    predicted: Integers = classes[(test @ weight.T + bias).argmax(axis=1)]
    return predicted


def fit_linear(
    train: Floats,
    labels: Integers,
    classes: int,
    strength: float,
    class_weight: str | None = None,
    one_scale: bool = False,
    sample_weight: Floats | None = None,
) -> LinearHead:
    """Return the regression as a classifier of raw features: logits = features @ weight.T + bias.

    Args:
        train: Features [N, d].
        labels: Their classes [N], at least two different ones.
        classes: K. A class without an image gets weight zero and bias -inf, so that it is never
            predicted.
        strength, one_scale: As for :func:`probe_predict`.
        class_weight: Of scikit-learn's regression. With 'balanced' all classes count the same,
            whatever their size.
        sample_weight: Of each image, [N]. None: all count the same.

    Returns:
        weight [K, d] and bias [K], float64.
    """
    rows, shift, present = fitted(train, labels, strength, class_weight, one_scale, sample_weight)
    weight = np.zeros((classes, rows.shape[1]))
    bias = np.full(classes, -np.inf)
    weight[present] = rows
    bias[present] = shift
    return weight, bias


# ---------------------------------------------------------------------- the probe's strength
class Choice(NamedTuple):
    """A strength of the probe, scikit-learn's C."""

    strength: float
    by: str  # how it was chosen
    accuracies: dict[float, float]  # of each strength on held-out images (percent)


def choose_strength(
    train: Floats,
    labels: Integers,
    seed: int = 0,
    val: tuple[Floats, Integers] | None = None,
    class_weight: str | None = None,
    *,
    groups: Names | None = None,
    classes: Sequence[str] | None = None,
    one_scale: bool = False,
) -> Choice:
    """Choose the probe's strength by its accuracy on held-out images.

    Args:
        train, labels: Features [N, d] and classes [N].
        seed: Of the folds.
        val: Features [M, d] and classes [M] to choose by. None: stratified folds of ``train``,
            each held out once, until they add up to :data:`ENOUGH` images. With under :data:`FEW`
            images per class it is :data:`USUAL_STRENGTH`.
        class_weight: As for :func:`fit_linear`.
        groups, classes: As for :func:`idmm.data.stratify.stratified_folds`.
        one_scale: As for :func:`probe_predict`.
    """
    hits = np.zeros(len(STRENGTHS), dtype=np.int64)
    tested = 0  # images
    with threads(train):
        if val is not None:
            by = "val"
            tested = len(val[1])
            hits += held_out_hits(train, labels, *val, class_weight, one_scale)
        else:
            folds = stratified_folds(labels, groups, seed, classes)
            used = 0
            while tested < ENOUGH and used < len(folds):
                rest, held = folds[used]
                held_out = (train[held], labels[held])
                hits += held_out_hits(train[rest], labels[rest], *held_out, class_weight, one_scale)
                tested += len(held)
                used += 1
            by = f"{used} of {len(folds)} stratified folds of train"
    accuracies = dict(zip(STRENGTHS, (100 * hits / tested).tolist(), strict=True)) if tested else {}
    strength = USUAL_STRENGTH
    if val is None and len(labels) < FEW * len(np.unique(labels)):
        by = f"default, as there are under {FEW} images per class"
    elif not tested:
        by = "default, as no group can be held out"
    else:
        strength = max(
            STRENGTHS, key=lambda c: (accuracies[c], -abs(np.log(c / USUAL_STRENGTH)), -c)
        )
    return Choice(strength, by, accuracies)


def fit_temperature(
    features: Floats,
    labels: Integers,
    strength: float,
    *,
    seed: int = 0,
    smoothing: float = 0.0,
    class_weight: str | None = None,
    groups: Names | None = None,
    one_scale: bool = False,
) -> float:
    """Return the divisor of :func:`fit_linear`'s logits with the least loss on a held-out fold.

    The loss is cross-entropy, the fold is stratified. The divisor is at least 1, and 1 if no image
    can be held out (Guo et al., ICML 2017, section 4.2).

    Args:
        features, labels: Of the training images [N, d], [N].
        strength, class_weight, one_scale: As for :func:`fit_linear`.
        seed: Of the folds.
        smoothing: Label smoothing of the loss that the classifier will be trained by.
        groups: As for :func:`idmm.data.stratify.stratified_folds`.
    """
    from scipy.optimize import minimize_scalar
    from sklearn.utils.class_weight import compute_sample_weight

    folds = stratified_folds(labels, groups, seed)
    if not folds:
        return 1.0
    train, held = folds[0]
    weight, bias = fit_linear(
        features[train], labels[train], int(labels.max()) + 1, strength, class_weight, one_scale
    )
    present, position = np.unique(labels, return_inverse=True)
    logits = torch.from_numpy(features[held] @ weight.T + bias)[:, present]  # [M, present classes]
    truth = torch.from_numpy(position[held])
    weights = torch.from_numpy(compute_sample_weight(class_weight, labels[held]))

    def loss(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        losses = nn.functional.cross_entropy(
            scaled, truth, label_smoothing=smoothing, reduction="none"
        )
        return float((losses * weights).sum())

    best = minimize_scalar(loss, bounds=(0, math.log(HOTTEST)), method="bounded")
    return math.exp(best.x)


# ---------------------------------------------------------------------- readouts
def readouts(
    train: Floats,
    labels: Integers,
    test: Floats,
    truth: Integers,
    *,
    seed: int = 0,
    val: tuple[Floats, Integers] | None = None,
    metric: str = "top1",
    groups: Names | None = None,
    test_groups: Names | None = None,
    classes: Sequence[str] | None = None,
    counted: bool = False,
    one_scale: bool = False,
) -> dict[str, Scores]:
    """Measure frozen features by kNN and by a linear probe with the chosen strength.

    Args:
        train, labels: Features [N, d] and their classes [N], at least two different ones.
        test, truth: Features [M, d] and their classes [M].
        seed, val, groups, classes: As for :func:`choose_strength`.
        metric: The one that the dataset's literature reports, ``top1`` or ``mean_per_class``.
        test_groups: Name of each test image's group, [M].
        one_scale: As for :func:`probe_predict`.
        counted: Whether hits are counted, as each of several folds needs. Then ``classes`` is
            needed.

    Returns:
        ``knn`` and ``probe``. ``mean_per_class`` is there if the literature reports it, those of
        :func:`hit_counts` if hits are counted.
    """

    def readout(predicted: Integers) -> Scores:
        scores = score(predicted, truth, test_groups)
        if metric != "mean_per_class":
            del scores["mean_per_class"]
        if counted:
            scores |= hit_counts(predicted, truth, len(classes or ()), test_groups)
        return scores

    knn = readout(knn_predict(train, labels, test))
    knn["k"] = min(NEIGHBOURS, len(labels))
    choice = choose_strength(
        train, labels, seed, val, groups=groups, classes=classes, one_scale=one_scale
    )
    probe = readout(probe_predict(train, labels, test, choice.strength, one_scale))
    probe["strength"] = choice.strength
    probe["chosen_by"] = choice.by
    probe["accuracies"] = {f"{c:g}": accuracy for c, accuracy in choice.accuracies.items()}
    return {"knn": knn, "probe": probe}
