"""Accuracy of a classifier, and of frozen features by nearest neighbours (kNN) and a linear
probe."""

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from threadpoolctl import threadpool_limits
from torch import nn

from idmm import distributed
from idmm.data.stratify import stratified_folds
from idmm.errors import RunError
from idmm.report.stats import group_interval, wilson_interval

KNN_TEMPERATURE = 0.07  # of the neighbours' votes (Wu et al., CVPR 2018)
NEIGHBOURS = 20
STRENGTHS = tuple(10.0**n for n in range(-4, 3))  # of the probe: scikit-learn's C
USUAL_STRENGTH = 1.0  # with few images. Of equally good strengths the nearest to it is chosen
# images per class, under which a choice is more noise than gain (benchmarks/results/minutes.md)
FEW = 10
HOTTEST = 20.0  # highest temperature of a fitted classifier: a fold of few images may fit any
PROBE_STEPS = 2000  # most steps of the probe's fit
ONE_THREAD = 20_000_000  # most numbers in the features of a fit for which one thread is the fastest
# held-out images that settle the choice of a strength. With fewer, more folds are used
ENOUGH = 1000


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside the block, and each submodule back to its own mode
    after it."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


# ---------------------------------------------------------------------- classifiers
@dataclass(frozen=True)
class Predictions:
    """A classifier's predictions for a split's images, in the split's order."""

    truth: ndarray  # int64 [N], the true classes
    ranked: ndarray  # int64 [N, min(5, K)], the likeliest classes, best first
    probability: ndarray  # float32 [N], of the likeliest class

    @property
    def predicted(self) -> ndarray:
        """The likeliest class of each image, int64 [N]."""
        return self.ranked[:, 0]

    def scores(self, groups: ndarray | None = None) -> dict[str, float]:
        """Return ``top1``, its interval, ``top5`` and ``mean_per_class`` in percent, see
        :func:`score`.

        With fewer than five classes, top-5 is 100.
        """
        hits = self.ranked == self.truth[:, None]  # [N, min(5, K)]
        return score(self.predicted, self.truth, groups) | {
            "top5": float(100 * hits.any(1).sum() / len(hits))
        }

    def confusion(self, classes: int) -> ndarray:
        """Return the number of images by true class (rows) and predicted class, int64 [K, K] of K
        ``classes``."""
        from sklearn.metrics import confusion_matrix

        return confusion_matrix(self.truth, self.predicted, labels=range(classes))


@torch.no_grad()
def predict(model: nn.Module, batches: Iterable[dict], device) -> Predictions:
    """Run a classifier over all processes' batches of ``images``, ``label`` and ``index``. All must
    call together.

    It is in fp32 whatever the precision of training, as the exported classifier is.

    Raises:
        RunError: A probability is not a number.
    """
    # per batch: index [B], label [B], likeliest classes [B, min(5, K)], probability of the first
    # [B]
    results = []
    with evaluating(model):
        for batch in batches:
            logits = model(batch["images"].to(device, non_blocking=True)).float()  # [B, K]
            ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices  # [B, min(5, K)]
            probability = logits.softmax(1).gather(1, ranked[:, :1])[:, 0]  # [B]
            numbers = batch["index"].numpy()
            labels = batch["label"].numpy()
            results.append((numbers, labels, ranked.cpu().numpy(), probability.cpu().numpy()))
    columns = zip(*(result for part in distributed.gather(results) for result in part), strict=True)
    index, *values = (np.concatenate(column) for column in columns)
    if np.isnan(values[-1]).any():
        line = "the network's outputs are not finite: lower --train.lr or set --train.clip_grad 1, in a new --out"
        raise RunError(line, shared=True)
    return Predictions(*(value[np.argsort(index)] for value in values))


# ---------------------------------------------------------------------- frozen features
def knn_predict(train, train_labels, test, k: int = NEIGHBOURS) -> ndarray:
    """Return the class of each row of ``test`` [M, d] by ``train`` [N, d] and its classes [N],
    int64 [M].

    It is the weighted vote of the k nearest by cosine, of N at most (Wu et al., CVPR 2018).
    """
    from sklearn.neighbors import KNeighborsClassifier

    def votes(distance):  # cosine distance is 1 - similarity
        return np.exp((1 - distance) / KNN_TEMPERATURE)

    model = KNeighborsClassifier(min(k, len(train)), metric="cosine", weights=votes)
    with warnings.catch_warnings(action="ignore"):  # scikit-learn suspects few images per class
        return model.fit(train, train_labels).predict(test)


def probe_predict(train, train_labels, test, strength: float = USUAL_STRENGTH) -> ndarray:
    """Return the same by logistic regression on standardised features. ``strength`` is
    scikit-learn's C."""
    return _fitted(train, train_labels, strength).predict(test)


def fit_linear(
    train, labels, classes: int, strength: float = USUAL_STRENGTH, class_weight: str | None = None
) -> tuple[ndarray, ndarray]:
    """Return the regression as a classifier of raw features: logits = features @ weight.T + bias.

    Args:
        train: Features [N, d].
        labels: Their classes [N], at least two different ones.
        classes: K. A class without an image gets weight zero and bias -inf, so that it is never
            predicted.
        strength: As for :func:`probe_predict`.
        class_weight: Of scikit-learn's regression. With 'balanced' all classes count the same,
            whatever their size.

    Returns:
        weight [K, d] and bias [K], float64.
    """
    scaler, linear = (step for _, step in _fitted(train, labels, strength, class_weight).steps)
    rows = linear.coef_.astype(np.float64)
    shift = linear.intercept_.astype(np.float64)
    if len(rows) == 1:  # with two classes scikit-learn has only the difference of the logits
        rows = np.concatenate([-rows, rows]) / 2
        shift = np.concatenate([-shift, shift]) / 2
    rows = rows / scaler.scale_
    shift = shift - rows @ scaler.mean_
    weight = np.zeros((classes, rows.shape[1]))
    bias = np.full(classes, -np.inf)
    weight[linear.classes_], bias[linear.classes_] = rows, shift
    return weight, bias


def _fitted(train, labels, strength: float, class_weight: str | None = None):
    """Return the regression on standardised features, a scikit-learn pipeline of both steps."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = LogisticRegression(C=strength, max_iter=PROBE_STEPS, class_weight=class_weight)
    # scikit-learn suspects few images per class
    with _threads(train), warnings.catch_warnings(action="ignore"):
        return make_pipeline(StandardScaler(), model).fit(train, labels)


def _threads(train: ndarray) -> threadpool_limits:
    """Return a block with one thread for a small fit: many short products wait for threads longer
    than they take."""
    return threadpool_limits(1 if train.size <= ONE_THREAD else None)


# ---------------------------------------------------------------------- scores
def score(predicted, truth, groups: ndarray | None = None) -> dict[str, Any]:
    """Return ``top1``, ``top1_interval`` and ``mean_per_class`` in percent.

    Args:
        predicted, truth: Classes of M images. Those without an image do not count in the mean.
        groups: Name of each image's group, [M]. The interval is then over groups.
    """
    counts = hit_counts(predicted, truth, 0, groups)
    images, hits = (np.array(counts["per_class"][name]) for name in ("images", "correct"))
    interval = wilson_interval(hits.sum(), images.sum())
    if groups is not None:
        interval = group_interval(**counts["per_group"])
    return {
        "top1": float(100 * hits.sum() / images.sum()),
        "top1_interval": interval,
        "mean_per_class": 100 * float((hits[images > 0] / images[images > 0]).mean()),
    }


def hit_counts(
    predicted, truth, classes: int, groups: ndarray | None = None
) -> dict[str, dict[str, list[int]]]:
    """Return ``per_class`` and, with groups, ``per_group``: the ``images`` of each and how many are
    ``correct``.

    Folds are added up by these counts. Arguments are those of :func:`score`, and the least number
    of classes.
    """
    correct = np.asarray(predicted) == np.asarray(truth)
    units = {"per_class": np.asarray(truth)}
    if groups is not None:
        units["per_group"] = np.unique(groups, return_inverse=True)[1]
    counts = {}
    for name, of in units.items():
        images = np.bincount(of, minlength=classes if name == "per_class" else 0)
        hits = np.bincount(of, correct, len(images)).astype(int)
        counts[name] = {"images": images.tolist(), "correct": hits.tolist()}
    return counts


# ---------------------------------------------------------------------- the probe's strength
class Choice(NamedTuple):
    """The chosen strength (scikit-learn's C), what it was chosen by, and the held-out accuracy of
    each (percent)."""

    strength: float
    by: str
    accuracies: dict[float, float]


def choose_strength(
    train,
    labels,
    seed: int = 0,
    val: tuple | None = None,
    class_weight: str | None = None,
    *,
    groups: ndarray | None = None,
    classes: Sequence[str] | None = None,
) -> Choice:
    """Choose the probe's strength by its accuracy on held-out images.

    Args:
        train, labels: Features [N, d] and classes [N].
        seed: Of the folds.
        val: Features and classes to choose by. None: stratified folds of ``train``, each held out
            once, until they add up to :data:`ENOUGH` images. With under :data:`FEW` images per
            class it is :data:`USUAL_STRENGTH`.
        class_weight: As for :func:`fit_linear`.
        groups, classes: As for :func:`idmm.data.stratify.stratified_folds`.
    """
    train = np.asarray(train)
    labels = np.asarray(labels)
    if val is not None:
        splits = [(train, labels, *val)]
        by = "val"
    else:
        folds = stratified_folds(labels, groups, seed, classes)
        sizes = [len(held) for _, held in folds]
        used = min(len(folds), 1 + int((np.cumsum(sizes) < ENOUGH).sum()))
        splits = [
            (train[one], labels[one], train[held], labels[held]) for one, held in folds[:used]
        ]
        by = f"{used} of {len(folds)} stratified folds of train"
    accuracies = {}
    if splits:
        with _threads(train):
            hits = sum(_held_out_hits(*split, class_weight) for split in splits)
        shares = 100 * hits / sum(len(split[3]) for split in splits)
        accuracies = dict(zip(STRENGTHS, shares.tolist(), strict=True))
    if val is None and len(labels) < FEW * len(np.unique(labels)):
        return Choice(
            USUAL_STRENGTH, f"default, as there are under {FEW} images per class", accuracies
        )
    if not accuracies:
        return Choice(USUAL_STRENGTH, "default, as no group can be held out", accuracies)
    best = [c for c, accuracy in accuracies.items() if accuracy == max(accuracies.values())]
    return Choice(min(best, key=lambda c: (abs(np.log(c / USUAL_STRENGTH)), c)), by, accuracies)


def fit_temperature(
    features,
    labels,
    strength: float,
    *,
    seed: int = 0,
    smoothing: float = 0.0,
    class_weight: str | None = None,
    groups: ndarray | None = None,
) -> float:
    """Return the divisor of :func:`fit_linear`'s logits with the least cross-entropy on a held-out
    stratified fold.

    It is at least 1, and 1 if no image can be held out (Guo et al., ICML 2017, section 4.2).

    Args:
        features, labels: Of the training images [N, d], [N].
        strength, class_weight: As for :func:`fit_linear`.
        seed: Of the folds.
        smoothing: Label smoothing of the loss that the classifier will be trained by.
        groups: As for :func:`idmm.data.stratify.stratified_folds`.
    """
    from scipy.optimize import minimize_scalar
    from sklearn.utils.class_weight import compute_sample_weight

    features = np.asarray(features)
    labels = np.asarray(labels)
    folds = stratified_folds(labels, groups, seed)
    if not folds:
        return 1.0
    train, held = folds[0]
    weight, bias = fit_linear(
        features[train], labels[train], int(labels.max()) + 1, strength, class_weight
    )
    # [M, classes with images]
    logits = torch.from_numpy(features[held] @ weight.T + bias)[:, np.unique(labels)]
    truth = torch.from_numpy(np.unique(labels, return_inverse=True)[1][held])
    weights = torch.from_numpy(compute_sample_weight(class_weight, labels[held]))

    def loss(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        losses = nn.functional.cross_entropy(
            scaled, truth, label_smoothing=smoothing, reduction="none"
        )
        return float((losses * weights).sum())

    return math.exp(minimize_scalar(loss, bounds=(0, math.log(HOTTEST)), method="bounded").x)


def _held_out_hits(train, labels, held_out, truth, class_weight: str | None) -> ndarray:
    """Return the correct predictions on held-out images for each strength. Each fit starts from the
    one before."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train)
    train = scaler.transform(train)
    held_out = scaler.transform(held_out)
    # in the rows' space the solution is the same, and fits are several times faster
    if train.shape[1] > len(train):
        axes = np.linalg.svd(train, full_matrices=False)[2].T
        train = train @ axes
        held_out = held_out @ axes
    model = LogisticRegression(max_iter=500, warm_start=True, class_weight=class_weight)
    hits = []
    # also of fits that did not converge, which are near enough
    with warnings.catch_warnings(action="ignore"):
        for strength in STRENGTHS:
            hits.append(
                (model.set_params(C=strength).fit(train, labels).predict(held_out) == truth).sum()
            )
    return np.array(hits)


# ---------------------------------------------------------------------- readouts
def readouts(
    train,
    labels,
    test,
    truth,
    *,
    seed: int = 0,
    val: tuple | None = None,
    metric: str = "top1",
    groups: ndarray | None = None,
    test_groups: ndarray | None = None,
    classes: Sequence[str] | None = None,
    counted: bool = False,
) -> dict[str, dict[str, Any]]:
    """Measure frozen features by kNN and by a linear probe whose strength :func:`choose_strength`
    chooses.

    Args:
        train, labels: Features [N, d] and their classes [N], at least two different ones.
        test, truth: Features [M, d] and their classes [M].
        seed, val, groups, classes: As for :func:`choose_strength`.
        metric: The one that the dataset's literature reports, ``top1`` or ``mean_per_class``.
        test_groups: Name of each test image's group, [M].
        counted: Whether hits are counted, as each of several folds needs. Then ``classes`` is
            needed.

    Returns:
        ``knn`` and ``probe`` as ``result.json`` has them: ``top1``, ``top1_interval`` and, if the
        literature reports it, ``mean_per_class`` in percent. Of a fold those of :func:`hit_counts`.
        Of kNN ``k``, of the probe ``strength``, ``chosen_by`` and ``accuracies``, see
        :class:`Choice`.
    """
    choice = choose_strength(train, labels, seed, val, groups=groups, classes=classes)
    accuracies = {f"{c:g}": accuracy for c, accuracy in choice.accuracies.items()}
    chosen = {"strength": choice.strength, "chosen_by": choice.by, "accuracies": accuracies}

    def scores(predicted: ndarray) -> dict[str, Any]:
        values = score(predicted, truth, test_groups)
        if metric != "mean_per_class":
            del values["mean_per_class"]
        return values | (hit_counts(predicted, truth, len(classes), test_groups) if counted else {})

    return {
        "knn": scores(knn_predict(train, labels, test)) | {"k": min(NEIGHBOURS, len(labels))},
        "probe": scores(probe_predict(train, labels, test, choice.strength)) | chosen,
    }
