"""The baseline of every accuracy: logistic regression on the features of :mod:`idmm.models.hog`."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from idmm.batch import Batch
from idmm.evaluation import Floats, Integers, Names
from idmm.evaluation.evaluate import choose_strength, probe_predict
from idmm.evaluation.network import extract_features
from idmm.models.hog import Hog
from idmm.progress import duration, log
from idmm.seeding import numpy_rng

# keys in result.json
BASELINE = "baseline_top1"
BASELINE_SIZE = "baseline_train_size"
MOST = 5000  # most images to fit to, whether or not they are decoded at each use
WEIGHTS = 400_000  # images times classes that a fit takes in seconds
EACH = 5  # images of each class that are always used
MOST_TO_CHOOSE = 500  # images to choose C on
CLASSES_TO_CHOOSE = 50  # most of their classes


def sample(labels: Integers, most: int) -> Integers:
    """Return the numbers of at most ``most`` images that have a label, in order.

    Each class keeps its share of ``labels`` [N], and at least one image if ``most`` allows it.
    """
    labelled = np.flatnonzero(labels >= 0)
    if len(labelled) <= most:
        return labelled
    shuffled = numpy_rng(0, "baseline").permutation(labelled)
    rank = np.empty(len(shuffled))  # among the images of its class, in [0, 1)
    for label in np.unique(labels[shuffled]):
        members = labels[shuffled] == label
        rank[members] = np.arange(members.sum()) / members.sum()
    return np.sort(shuffled[np.argsort(rank, kind="stable")[:most]])


def sample_to_fit(labels: Integers) -> Integers:
    """Return the same for training images with ``labels`` [N], at most :data:`MOST`.

    With many classes, which take longer, it is fewer.
    """
    classes = len(np.unique(labels[labels >= 0]))
    return sample(labels, max(EACH * classes, min(MOST, WEIGHTS // max(1, classes))))


def features(batches: Iterable[Batch], mean: Sequence[float], std: Sequence[float]) -> Floats:
    """Return the features of images in their order, float32 [N, d].

    Args:
        batches: With ``images`` [B, C, H, W], normalised by mean and std, and ``index``.
        mean, std: A number per channel, on pixel values in [0, 1].
    """
    model = Hog(len(mean), num_classes=0)
    model.set_statistics(mean, std)
    return extract_features(model, batches, "cpu").numpy()


def measure(
    train: Floats,
    labels: Integers,
    test: Floats,
    truth: Integers,
    started_at: float | None = None,
    groups: Names | None = None,
) -> float:
    """Fit the regression to training images, and return its accuracy on others (percent).

    C is chosen by cross-validation on at most 500 of the training images, of at most 50 classes.

    Args:
        train, test: Features [N, d] and [M, d].
        labels, truth: Their classes, [N] and [M]. ``labels`` has at least two different ones.
        started_at: Start of the baseline (``time.monotonic()``), for the log. None: no line.
        groups: Name of each training image's group, [N].
    """
    subset = np.arange(len(labels))
    classes = np.unique(labels)
    if len(classes) > CLASSES_TO_CHOOSE:
        chosen = numpy_rng(0, "baseline").permutation(classes)[:CLASSES_TO_CHOOSE]
        subset = np.flatnonzero(np.isin(labels, chosen))
    subset = subset[sample(labels[subset], MOST_TO_CHOOSE)]
    subset_groups = None if groups is None else groups[subset]
    choice = choose_strength(train[subset], labels[subset], groups=subset_groups, one_scale=True)
    strength = choice.strength
    correct = probe_predict(train, labels, test, strength, one_scale=True) == truth
    top1 = 100 * int(correct.sum()) / len(truth)
    if started_at is not None:
        log.info(
            f"the baseline (logistic regression on hand-made features): {top1:.2f} % of "
            f"{len(truth)} test images, fitted to {len(labels)} training images "
            f"with C = {strength:g} in {duration(time.monotonic() - started_at)}"
        )
    return top1


def largest_class(truth: Integers) -> float:
    """Return the accuracy of always predicting the largest class in ``truth`` [M], in percent."""
    count = np.bincount(truth)
    return float(100 * count.max() / count.sum())


def remarks(result: dict[str, Any]) -> list[str]:
    """Return warnings about the top-1 accuracy of a ``result.json``.

    Its 95 % interval reaches down to the largest class, or it is not above the baseline.
    """
    top1 = result["top1"]
    low, high = result["top1_interval"]
    warnings = []
    if low <= result["largest_class"]:
        warnings.append(
            f"top-1 {top1:.1f} % is no better, within its 95 % interval ({low:.1f} to {high:.1f}), "
            f"than always predicting the largest class ({result['largest_class']:.1f} %)"
        )
    if top1 <= result.get(BASELINE, -1):
        warnings.append(
            f"top-1 {top1:.1f} % is no better than logistic regression on hand-made features, "
            f"which takes seconds ({result[BASELINE]:.1f} %, fitted to {result[BASELINE_SIZE]} "
            f"of {result['train_size']} training images)"
        )
    return warnings
