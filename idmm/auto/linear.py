"""A step of ``idmm train``: a linear classifier on the features of all training images.

Images without a label get guessed ones, which count less than given ones.
"""

import numpy as np
from numpy.typing import NDArray

from idmm.auto.configs import FAST
from idmm.auto.features import Features
from idmm.config import FinetuneConfig
from idmm.config.reading import recipe
from idmm.evaluation import Floats, Integers
from idmm.evaluation.evaluate import (
    LinearHead,
    fit_linear,
    fit_temperature,
)
from idmm.evaluation.similarity import Neighbours, nearest, spread_labels, unit_rows
from idmm.progress import log

NEIGHBOURS = 10  # nearest images that each image is joined to
# scikit-learn's C on features of length 1, of fits to given labels and to guessed ones as well, and
# the largest weight of an image whose label is guessed (benchmarks/results/features.md)
STRENGTH = 100.0
GUESSED_STRENGTH = 10.0
GUESSED = 0.3
AGREEMENT = 0.65  # of similar images, without which guesses did harm (the same record)


def fit_head(features: Features, seed: int) -> LinearHead:
    """Return a linear classifier, fitted to given labels and to those guessed from them.

    Its logits are divided by a temperature, so that a network that learns next to it need not
    correct them.

    Args:
        features: Of the training images. Some have a label, of each class at least one.
        seed: Of the folds.
    """
    given = features.labelled()
    labels = given.train.known_labels
    groups = given.train.groups
    classes = len(given.train.class_names)
    # with one scale, rows have the length of the root of their number of features
    strength = STRENGTH / given.rows.shape[1]
    head = fit_linear(given.rows, labels, classes, strength, one_scale=True)
    log.info("linear classifier: fitted to %d labelled images", len(labels))
    guessed = None
    if len(given.rows) < len(features.rows):
        guessed = _fit_to_guesses(features, head)
    if guessed is not None:
        return guessed
    temperature = fit_temperature(
        given.rows,
        labels,
        strength,
        seed=seed,
        smoothing=recipe(FinetuneConfig, FAST)["augment"]["label_smoothing"],
        groups=groups,
        one_scale=True,
    )
    weight, bias = head
    return weight / temperature, bias / temperature


def _fit_to_guesses(features: Features, head: LinearHead) -> LinearHead | None:
    """Return a classifier that is also fitted to guessed labels.

    Labels spread to similar images. A guess weighs as much as it is sure, times the square of how
    often similar images agree on the class that ``head`` predicts. None: they rarely agree.
    """
    rows = features.rows
    labels = features.train.known_labels
    _, bias = head
    classes = len(bias)
    units = unit_rows(rows)
    near = nearest(units, NEIGHBOURS)
    apart = near
    if features.train.groups is not None:
        apart = nearest(units, NEIGHBOURS, features.train.groups)
    predicted = predict(head, rows)
    agreement = agreement_of(apart, predicted)
    if agreement < AGREEMENT:
        log.info(
            "images without a label get no guessed one: similar images agree on %.0f %% of "
            "classes, corrected for chance, less than %.0f",
            100 * agreement,
            100 * AGREEMENT,
        )
        return None
    log.info(
        "%d images without a label get a guessed one. Similar images agree on %.0f %% of classes, "
        "corrected for chance",
        (labels < 0).sum(),
        100 * agreement,
    )
    shares = spread_labels(near, labels, classes)  # [N, K]
    entropy = -(shares * np.log(np.maximum(shares, 1e-12))).sum(axis=1)
    is_reached = shares.any(axis=1)
    sure = np.where(is_reached, 1 - entropy / np.log(classes), 0.0)
    weights = GUESSED * agreement**2 * sure.clip(0, 1)
    guessed = np.where(labels < 0, shares.argmax(axis=1), labels)
    weights = np.where(labels < 0, weights, 1.0)
    used = weights > 0
    strength = GUESSED_STRENGTH / rows.shape[1]
    return fit_linear(
        rows[used],
        guessed[used],
        classes,
        strength,
        one_scale=True,
        sample_weight=weights[used],
    )


def agreement_of(near: Neighbours, predicted: Integers) -> float:
    """Return how often images have the class of a near one, with chance at 0, at most 1.

    Args:
        near: The nearest images of each, of other groups. Those with the value -inf do not count.
        predicted: Classes, [N].
    """
    share = np.bincount(predicted) / len(predicted)
    chance = float(share @ share)
    agrees = predicted[near.index] == predicted[:, None]  # [N, k]
    counts = np.isfinite(near.value)
    agreed = agrees[counts].sum() / max(1, counts.sum())
    return max(0.0, float(agreed - chance) / max(1 - chance, 1e-9))


def predict(head: LinearHead, rows: Floats) -> Integers:
    """Return the classes that a classifier predicts for features [N, d], [N]."""
    weight, bias = head
    predicted: Integers = (rows @ weight.T + bias).argmax(axis=1)
    return predicted


def correct(head: LinearHead, features: Features) -> NDArray[np.bool_]:
    """Return which images a classifier gets right, [N]."""
    matches: NDArray[np.bool_] = predict(head, features.rows) == features.train.known_labels
    return matches
