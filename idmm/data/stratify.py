"""Folds of labelled images: each has its share of every class, and no group is divided.

All estimates on held-out training images use them: the strength of a linear classifier, its
temperature, probes, the trial of ``idmm train``, and ``data.folds``.
"""

import logging
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from idmm.data.split import Groups, Labels
from idmm.seeding import derive
from idmm.text import listed

log = logging.getLogger(__name__)

FOLDS = 5


class Fold(NamedTuple):
    """Numbers of images to train on and of those held out, in order, int64 [N] and [M]."""

    train: Labels
    held_out: Labels


def units_of(labels: Labels, groups: Groups | None) -> Labels:
    """Return the number of each image's group, int64 [N]. Without groups each image is its own."""
    if groups is None:
        return np.arange(len(labels))
    return np.unique(groups, return_inverse=True)[1]


def units_per_class(labels: Labels, groups: Groups | None, classes: int = 0) -> Labels:
    """Return the number of groups of each of K classes, int64 [K], or of as many as there are.

    Without groups it is the number of images.
    """
    pairs = np.unique([labels, units_of(labels, groups)], axis=1)
    return np.bincount(pairs[0], minlength=classes)


def divide(labels: Labels, groups: Groups | None, number: int, seed: int = 0) -> list[Fold]:
    """Divide images into folds by scikit-learn, with its StratifiedKFold or StratifiedGroupKFold.

    Each image is held out once. Other arguments are those of :func:`stratified_folds`.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    folds = kind(number, shuffle=True, random_state=derive(seed, "folds") % 2**32)
    with warnings.catch_warnings(action="ignore"):  # of classes with few images
        return [Fold(*numbers) for numbers in folds.split(labels, labels, groups)]


def stratified_folds(
    labels: Labels, groups: Groups | None, seed: int = 0, classes: Sequence[str] | None = None
) -> list[Fold]:
    """Divide images into :data:`FOLDS` folds, or as many as the second largest class has groups.

    A class with fewer groups than folds is held out in no fold. Images that share a group with one
    that is held out are not trained on.

    Args:
        labels: Class of each image, int64 [N].
        groups: Name of each image's group, [N]. None: images are independent.
        seed: Of the draw.
        classes: Names of classes, for a warning that names those left out. None: no warning.

    Returns:
        Folds that can be estimated on. Training images are of two classes at least. Without any
        fold it is [].
    """
    units = units_of(labels, groups)
    counts = units_per_class(labels, groups)
    number = min(FOLDS, *sorted(counts.tolist())[-2:])
    if number < 2 or len(counts) < 2:
        return []
    is_small = (counts > 0) & (counts < number)
    folds = []
    for _, held_out in divide(labels, groups, number, seed):
        held_out = held_out[~is_small[labels[held_out]]]
        train = np.flatnonzero(~np.isin(units, units[held_out]))
        held_out = held_out[np.isin(labels[held_out], labels[train])]
        if len(held_out) and len(np.unique(labels[train])) > 1:
            folds.append(Fold(train, held_out))
    if classes is not None and is_small.any():
        small = np.flatnonzero(is_small).tolist()
        unit = "images" if groups is None else "groups"
        names = listed(f"'{classes[label]}' ({counts[label]})" for label in small)
        log.warning(
            f"classes with fewer {unit} than the {number} folds are left out of the estimate on "
            f"held-out training images: {names}"
        )
    return folds
