"""The baseline that a network has to beat: logistic regression on hand-made features (:mod:`idmm.models.hog`)."""

import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from idmm.evaluation.evaluate import choose_strength, probe_predict
from idmm.evaluation.network import extract_features
from idmm.models import create_backbone
from idmm.progress import duration
from idmm.seeding import numpy_rng

log = logging.getLogger("idmm")
NAME = "the baseline (logistic regression on hand-made features)"
MOST = 5000  # images to train on, and as many to test on, at most
DECODED = 500  # the same if images are decoded at each use
WEIGHTS = 400_000  # images times classes that a fit takes in seconds
EACH = 5  # images of each class that it takes in any case
CHOSEN, CLASSES = 500, 50  # images, and their classes, that C is chosen on at most


class Baseline(NamedTuple):
    """What the baseline reaches."""

    top1: float
    """Accuracy (percent)."""
    train: int
    """Images that it was fitted to."""
    test: int
    """Images that it was tested on."""


def drawn(labels: np.ndarray, most: int) -> np.ndarray:
    """Returns the numbers of at most so many images that have a label, in order, by the classes' shares of ``labels``
    [N]; a class has one at least if there are so many."""
    labelled = np.flatnonzero(labels >= 0)
    if len(labelled) <= most:
        return labelled
    shuffled = numpy_rng(0, "baseline").permutation(labelled)
    place = np.empty(len(shuffled))  # among the images of its class, in [0, 1)
    for label in np.unique(labels[shuffled]):
        of_class = labels[shuffled] == label
        place[of_class] = np.arange(of_class.sum()) / of_class.sum()
    return np.sort(shuffled[np.argsort(place, kind="stable")[:most]])


def drawn_to_fit(labels: np.ndarray, most: int) -> np.ndarray:
    """Returns the same of training images: fewer if there are many classes, whose fit takes longer."""
    classes = len(np.unique(labels[labels >= 0]))
    return drawn(labels, max(EACH * classes, min(most, WEIGHTS // max(1, classes))))


def features(batches: Iterable[dict], mean: Sequence[float], std: Sequence[float], alone: bool = False) -> np.ndarray:
    """Returns the features of all processes' images (``alone``: of this one's) in their order, float32 [N, d].

    Args:
        batches: With ``images`` [B, C, H, W], normalised by mean and std, and ``index``.
        mean, std: A number per channel, on pixel values in [0, 1].
        alone: See :func:`idmm.evaluation.network.extract_features`.
    """
    model = create_backbone("hog", in_chans=len(mean))
    model.set_statistics(mean, std)
    return extract_features(model, batches, "cpu", contextlib.nullcontext, alone=alone).numpy()


def measured(train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, began: float) -> Baseline:
    """Fits the regression to features and classes of training images and tests it on others.

    C is chosen by cross-validation on at most 500 of the training images, of at most 50 classes.

    Args:
        train, test: Features [N, d] and [M, d].
        labels, truth: Their classes, two different ones at least to train on.
        began: When the baseline began (``time.monotonic()``), for the log.
    """
    some = np.arange(len(labels))
    if len(classes := np.unique(labels)) > CLASSES:
        some = np.flatnonzero(np.isin(labels, numpy_rng(0, "baseline").permutation(classes)[:CLASSES]))
    some = some[drawn(labels[some], CHOSEN)]
    strength = choose_strength(train[some], labels[some]).strength
    right = probe_predict(train, labels, test, strength) == truth
    found = Baseline(100 * float(right.mean()), len(labels), len(truth))
    line = "%s: %.2f %% of %d test images, fitted to %d training images with C = %g in %s"
    log.info(line, NAME, found.top1, found.test, found.train, strength, duration(time.monotonic() - began))
    return found
