"""Folds of labelled images: each has its share of every class, and no group is divided.

All estimates on held-out training images use them: the strength of a linear classifier, its
temperature, probes, the trial of ``idmm train``, and ``data.folds``.
"""

import logging
import warnings
from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from idmm.seeding import derive
from idmm.text import listed

log = logging.getLogger(__name__)

FOLDS = 5


Fold = tuple[ndarray, ndarray]
"""Numbers of images to train on and of those held out, in order."""


def _units(labels: ndarray, groups: ndarray | None) -> ndarray:
    """Return the number of each image's group, [N]. Without groups each image is its own."""
    if groups is None:
        return np.arange(len(labels))
    return np.unique(groups, return_inverse=True)[1]


def units_per_class(labels: ndarray, groups: ndarray | None, classes: int = 0) -> ndarray:
    """Return the number of groups of each of K classes, [K], or of as many as there are labels.

    Without groups it is the number of images.
    """
    return np.bincount(np.unique([labels, _units(labels, groups)], axis=1)[0], minlength=classes)


def divide(labels: ndarray, groups: ndarray | None, number: int, seed: int = 0) -> list[Fold]:
    """Divide images into folds by scikit-learn's StratifiedKFold, or groups by its
    StratifiedGroupKFold.

    Each image is held out once. Other arguments are those of :func:`stratified_folds`.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    folds = kind(number, shuffle=True, random_state=derive(seed, "folds") % 2**32)
    with warnings.catch_warnings(action="ignore"):  # of classes with few images
        return list(folds.split(labels, labels, groups))


def stratified_folds(
    labels: ndarray, groups: ndarray | None, seed: int = 0, classes: Sequence[str] | None = None
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
    labels, units, folds = np.asarray(labels), _units(labels, groups), []
    count = units_per_class(labels, groups)
    number = min(FOLDS, *sorted(count.tolist())[-2:])
    if number < 2 or len(count) < 2:
        return []
    is_small = (count > 0) & (count < number)
    for _, held_out in divide(labels, groups, number, seed):
        held_out = held_out[~is_small[labels[held_out]]]
        train = np.flatnonzero(~np.isin(units, units[held_out]))
        held_out = held_out[np.isin(labels[held_out], labels[train])]
        if len(held_out) and len(np.unique(labels[train])) > 1:
            folds.append((train, held_out))
    if classes is not None and is_small.any():
        line = "classes with fewer %s than the %d folds are left out of the estimate on held-out training images: %s"
        small = listed(f"'{classes[label]}' ({count[label]})" for label in np.flatnonzero(is_small))
        log.warning(line, "images" if groups is None else "groups", number, small)
    return folds
