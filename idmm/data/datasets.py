"""Which images there are: each dataset's splits as paths (or pixels), names and labels. Nothing is decoded here.

A dataset is a row of :data:`DATASETS`; its ``read`` function does whatever its layout needs.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from idmm import config
from idmm.data import folder
from idmm.data.split import Split, Splits
from idmm.errors import UserError, nearest
from idmm.seeding import numpy_rng

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spec:
    """A dataset.

    Args:
        name: Value of ``data.name``.
        num_classes, train_size, test_size: Its protocol's figures; None where they come from the data.
        read: Called with the config's ``data`` section and whether labels are wanted; returns all that the dataset
            has, before ``val_fraction`` and ``subset``. Raises UserError.
    """

    name: str
    num_classes: int | None
    train_size: int | None
    test_size: int | None
    read: Callable[[config.Data, bool], Splits]


def open_splits(data: config.Data, labelled: bool) -> Splits:
    """Lists a dataset's images, holds out ``data.val_fraction`` and draws ``data.subset`` from the training images.

    Args:
        data: The ``data`` section of a config.
        labelled: True: every split has labels. False (pretraining): any images will do; labels, val and test come
            along where the dataset happens to have them.

    Returns:
        ``train``, and ``val`` and ``test`` or None. A single evaluation split is ``test``.

    Raises:
        UserError: Unknown dataset, missing folder, classes that do not agree, nothing to evaluate on, or a subset that
            cannot be drawn; all faults of a folder in one.
    """
    if data.name not in DATASETS:
        known = ", ".join(DATASETS)
        raise UserError(f"data.name: '{data.name}' is not known; wanted one of {known}{nearest(data.name, DATASETS)}")
    splits = _hold_out(DATASETS[data.name].read(data, labelled), data.val_fraction)
    if labelled and splits.test is None:
        where = f"data.root: '{data.root}' has no 'val' or 'test' folder to evaluate on"
        raise UserError(f"{where}; add one, or hold out a share of train with --data.val_fraction, e.g. 0.2")
    if data.subset is not None:
        splits = replace(splits, train=draw_subset(splits.train, data.subset))
    return splits


def draw_subset(split: Split, subset: config.Subset) -> Split:
    """Draws a part of a split, in its original order; with one seed, a smaller subset is part of a larger one.

    Raises:
        UserError: More than there is, or per_class without labels.
    """
    if subset.per_class is not None and split.labels is None:
        raise UserError("data.subset.per_class: these images have no labels; wanted total or fraction")
    if subset.total is not None and subset.total > len(split):
        raise UserError(f"data.subset.total: {subset.total} is more than the {len(split)} training images")
    whole = subset.total is not None or split.labels is None
    groups = [np.arange(len(split))] if whole else _by_class(split)
    if subset.per_class is not None:
        faults = [
            f"data.subset.per_class: {subset.per_class} is more than the {len(group)} training images of class '{name}'"
            for name, group in zip(split.classes, groups, strict=True)
            if len(group) < subset.per_class
        ]
        if faults:
            raise UserError(*faults)
    counts = [subset.total or subset.per_class or max(1, _share(subset.fraction, len(g))) for g in groups]
    return split.take(_draw(groups, counts, numpy_rng(subset.seed, "subset")))


def _hold_out(splits: Splits, fraction: float) -> Splits:
    """Moves a share of each class from train to the evaluation split that is missing."""
    if not fraction:
        return splits
    if splits.val is not None:
        log.warning("data.val_fraction: %g is not used, as the dataset has a 'val' split of its own", fraction)
        return splits
    if splits.train.labels is None:
        log.warning("data.val_fraction: %g is not used, as the images have no labels to evaluate with", fraction)
        return splits
    groups = _by_class(splits.train)
    # a class keeps one image for training; one with a single image gives none
    counts = [min(len(g) - 1, max(1, _share(fraction, len(g)))) if len(g) > 1 else 0 for g in groups]
    held = _draw(groups, counts, numpy_rng(0, "val_fraction"))
    if not len(held):
        raise UserError(f"data.val_fraction: {fraction:g} holds out no image, as every class has one only")
    kept = np.setdiff1d(np.arange(len(splits.train)), held)
    train, held = splits.train.take(kept), splits.train.take(held)
    return Splits(train, None, held) if splits.test is None else Splits(train, held, splits.test)


def _share(fraction: float, n: int) -> int:
    return int(fraction * n + 0.5)


def _by_class(split: Split) -> list[np.ndarray]:
    order = np.argsort(split.labels, kind="stable")
    ends = np.cumsum(np.bincount(split.labels, minlength=len(split.classes)))
    return np.split(order, ends[:-1])


def _draw(groups: Sequence[np.ndarray], counts: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    drawn = [rng.permutation(group)[:count] for group, count in zip(groups, counts, strict=True)]
    return np.sort(np.concatenate(drawn))


def _read_digits(data: config.Data, labelled: bool) -> Splits:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], from 0..16
    everything = Split(
        items=np.repeat(grey[..., None], 3, axis=3),  # [1797, 8, 8, 3]
        names=[f"digits/{i:05d}" for i in range(len(grey))],
        labels=digits.target.astype(np.int64),
        classes=[str(c) for c in digits.target_names],
    )
    indices = np.arange(len(grey))
    train, test = train_test_split(indices, test_size=360, stratify=digits.target, random_state=0)
    return Splits(everything.take(np.sort(train)), None, everything.take(np.sort(test)))


def _read_folder(data: config.Data, labelled: bool) -> Splits:
    if data.root is None:
        raise UserError(f"data.root: not given; data.name '{data.name}' wants a folder of images")
    root = os.path.expanduser(data.root)
    if not os.path.isdir(root):
        fault = "is not a folder" if os.path.exists(root) else "does not exist"
        raise UserError(f"data.root: '{data.root}' {fault}; wanted a folder of images")
    return folder.read_labelled(root) if labelled else folder.read_any(root)


DATASETS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("digits", 10, 1437, 360, _read_digits),
        Spec("folder", None, None, None, _read_folder),
    )
}
