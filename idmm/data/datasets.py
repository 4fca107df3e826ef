"""Which images a config means: a dataset's splits, checked against its protocol, held out, and drawn from.

Nothing is decoded here. The datasets themselves are rows of :data:`idmm.data.registry.DATASETS`.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from idmm import config
from idmm.data.download import fetch
from idmm.data.readers.layout import FilesMissing
from idmm.data.registry import Spec, resolve_name, spec_of
from idmm.data.split import LabelsMissing, Split, Splits
from idmm.errors import UserError, listed
from idmm.seeding import numpy_rng

log = logging.getLogger(__name__)


def open_splits(data: config.Data, labelled: bool, evaluated: bool = True) -> Splits:
    """Lists a dataset's images, holds out ``data.val_fraction`` and draws ``data.subset`` from the training images.

    Args:
        data: The ``data`` section of a config.
        labelled: True: every split has labels. False (pretraining): any images will do; labels, val and test come
            along where the dataset happens to have them.
        evaluated: Whether labelled images to evaluate on are needed, too.

    Returns:
        ``train``, and ``val`` and ``test`` or None. A single evaluation split is ``test``.

    Raises:
        UserError: Unknown dataset, missing or damaged files, sizes that are not the protocol's (unless
            ``data.allow_size_mismatch``), classes that do not agree, nothing to evaluate on, or a subset that cannot
            be drawn; all faults of a folder in one.
        RunError: ``data.download`` was asked for and failed.
    """
    data = resolve_name(data)[0]
    spec = spec_of(data.name)
    splits = _compared(spec, _read(spec, data, labelled), data.allow_size_mismatch)
    splits = _hold_out(splits, data.val_fraction)
    if labelled and splits.train.labels is None:
        raise LabelsMissing(f"data.name: '{data.name}' has no labels; fine-tuning needs them")
    if labelled and evaluated and splits.test is None:
        where = f"data.root: '{data.root}' has no 'val' or 'test' folder to evaluate on"
        if data.name != "folder":
            where = f"data.name: '{data.name}' has no split to evaluate on"
        raise LabelsMissing(f"{where}; add one, or hold out a share of train with --data.val_fraction, e.g. 0.2")
    if data.subset is not None:
        splits = replace(splits, train=draw_subset(splits.train, data.subset))
        if labelled:
            _warn_of_empty_classes(splits.train)
    return splits


def _read(spec: Spec, data: config.Data, labelled: bool) -> Splits:
    try:
        return spec.read(data, labelled)
    except FilesMissing as error:
        if data.download and spec.archives and data.root is not None:
            log.info("%s: fetching %s", error.faults[0], spec.name)
            fetch(spec, data.root)
            return spec.read(data, labelled)
        how = []
        if spec.archives:
            get = f"'idmm data download {spec.name} --root {data.root or 'DIR'}' fetches {spec.name}"
            how = [f"data.download: {get}"]
        elif spec.manual:
            how = [f"data.root: {spec.name} cannot be downloaded: {spec.manual}"]
        raise UserError(*error.faults, *how) from None


def _compared(spec: Spec, splits: Splits, allowed: bool) -> Splits:
    """Returns the splits with what is not as the dataset's protocol has it, if that is allowed."""
    figures = {
        "train": [len(splits.train), spec.train_size],
        "test": [len(splits.test or ()), spec.test_size],
        "classes": [len(splits.train.classes or ()), spec.num_classes],
    }
    mismatch = {key: [found, wanted] for key, (found, wanted) in figures.items() if wanted not in (None, found)}
    lines = []
    for key, (found, wanted) in mismatch.items():
        what = f"has {found} classes" if key == "classes" else f"the split '{key}' has {found} images"
        lines.append(f"data.root: {spec.name}: {what}, its protocol {wanted}")
    if lines and not allowed:
        raise UserError(*lines, "data.allow_size_mismatch: true goes on all the same, and result.json says so")
    for line in lines:
        log.warning("%s", line)
    return replace(splits, size_mismatch=mismatch)


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
    drawn = split.take(_draw(groups, counts, numpy_rng(subset.seed, "subset")))
    return replace(drawn, drawn=f"{split.drawn} {subset!r}")


def _warn_of_empty_classes(train: Split) -> None:
    left = np.bincount(train.labels, minlength=len(train.classes))
    if empty := [name for name, count in zip(train.classes, left, strict=True) if not count]:
        what = f"{len(empty)} of {len(train.classes)} classes have no training image in it: {listed(empty)}"
        log.warning("data.subset: %s; per_class or fraction draws from each", what)


def _hold_out(splits: Splits, fraction: float) -> Splits:
    """Moves a share of each class from train to the evaluation split that is missing."""
    if not fraction:
        return splits
    if splits.val is not None or splits.train.labels is None:
        own = "the dataset has a 'val' split of its own"
        why = "the images have no labels to evaluate with" if splits.val is None else own
        log.warning("data.val_fraction: %g is not used, as %s", fraction, why)
        return splits
    groups = _by_class(splits.train)
    # a class keeps one image for training; one with a single image gives none
    counts = [min(len(g) - 1, max(1, _share(fraction, len(g)))) if len(g) > 1 else 0 for g in groups]
    held = _draw(groups, counts, numpy_rng(0, "val_fraction"))
    if not len(held):
        raise UserError(f"data.val_fraction: {fraction:g} holds out no image, as every class has one only")
    kept = np.setdiff1d(np.arange(len(splits.train)), held)
    train = replace(splits.train.take(kept), drawn=f"but {fraction!r}")
    held = replace(splits.train.take(held), drawn=f"{fraction!r} of train")
    return replace(splits, train=train, **{"test" if splits.test is None else "val": held})


def _share(fraction: float, n: int) -> int:
    return int(fraction * n + 0.5)


def _by_class(split: Split) -> list[np.ndarray]:
    order = np.argsort(split.labels, kind="stable")
    ends = np.cumsum(np.bincount(split.labels, minlength=len(split.classes)))
    return np.split(order, ends[:-1])


def _draw(groups: Sequence[np.ndarray], counts: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    drawn = [rng.permutation(group)[:count] for group, count in zip(groups, counts, strict=True)]
    return np.sort(np.concatenate(drawn))
