"""Read the images of the ``data`` section with their boxes or masks: check, hold out, draw a subset."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from idmm import config
from idmm.data.folder import root_folder
from idmm.data.listing import draw_subset, hold_out, narrowed
from idmm.data.split import LabelsMissing, Split, arranged
from idmm.dense.coco import read_coco
from idmm.dense.masks import read_masks
from idmm.dense.targets import DenseSplits, Target
from idmm.errors import UserError, listed

log = logging.getLogger("idmm")
Reader = Callable[[Path, config.Data, list[str], bool], tuple[dict[str, tuple[Split, list[Target]]], dict[int, str]]]


def read_detection(data: config.Data, masks: bool = True, progress: bool = False) -> DenseSplits:
    """Return the images of a folder in COCO's format with their objects.

    ``data.exclude`` removes images, ``data.val_fraction`` holds some out and ``data.subset`` draws some.

    Args:
        data: The ``data`` section of a config. ``on_error`` skip removes images and objects that cannot be used.
        masks: Keep the outlines, if all training objects have one. Others need no drawing.
        progress: Whether to draw a bar on standard error after a second, and to log the number of objects.

    Raises:
        UserError: All faults of the files, or there is no training image.
        LabelsMissing: There is nothing to evaluate on.
        BadList: ``data.exclude`` or ``data.groups`` is invalid.
    """
    splits = _read(read_coco, data, progress)
    if not (masks and splits.outlined):
        bare = {part: [replace(t, segments=None) for t in targets] for part, targets in splits.targets.items()}
        splits = replace(splits, targets=bare)
    if progress:
        labels = np.concatenate([target.labels[~target.crowd] for target in splits.targets["train"]])
        counts = np.bincount(labels, minlength=len(splits.classes))
        numbers = [f"{name} {count}" for name, count in zip(splits.classes, counts, strict=True)]
        kind = "boxes and masks" if splits.outlined else "boxes"
        log.info("%s: %d to train on (%s)", kind, len(labels), listed(numbers, 12))
    return splits


def read_segmentation(data: config.Data, progress: bool = False) -> DenseSplits:
    """Return images with a mask each, as :func:`read_detection` does. ADE20K's layout is accepted, too."""
    return _read(read_masks, data, progress)


def _read(reader: Reader, data: config.Data, progress: bool) -> DenseSplits:
    root, faults = root_folder(data), []
    parts, classes = reader(root, data, faults, progress)
    if faults:
        raise UserError(*faults)
    if empty := [part for part, (split, _) in parts.items() if not len(split)]:
        raise UserError(f"data.root: '{root}' has no usable image of {listed(empty)}, expected at least one")
    # as for class labels, with all images in one class
    splits = arranged({part: _with_labels(split, ["image"]) for part, (split, _) in parts.items()})
    splits = hold_out(narrowed(splits, data, labelled=True), data.val_fraction)
    splits = replace(splits, **{part: _with_labels(split, None) for part, split in splits.parts.items()})
    if data.subset is not None:
        splits = replace(splits, train=draw_subset(splits.train, data.subset))
    if splits.test is None:
        raise LabelsMissing(
            f"data.root: '{root}' has no part 'val' or 'test' to evaluate on. "
            "Add one, or hold out a share of train with --data.val_fraction, e.g. 0.2"
        )
    by_name = {name: t for split, targets in parts.values() for name, t in zip(split.names, targets, strict=True)}
    targets = {part: [by_name[name] for name in split.names] for part, split in splits.parts.items()}
    return DenseSplits(splits, targets, list(classes.values()), list(classes))


def _with_labels(split: Split, classes: list[str] | None) -> Split:
    return replace(split, classes=classes, labels=None if classes is None else np.zeros(len(split), int))
