"""From the ``data`` section of a config to images with boxes or masks: checked, held out, drawn from."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from idmm import config
from idmm.data.datasets import draw_subset, hold_out, narrowed
from idmm.data.readers.layout import root_folder
from idmm.data.split import LabelsMissing, Split, Splits, arranged
from idmm.dense.coco import read_coco
from idmm.dense.masks import read_masks
from idmm.dense.targets import DenseSplits
from idmm.errors import UserError, listed

_ONE_CLASS = ["image"]  # what draws that go by classes take all images for


def read_detection(data: config.Data, progress: bool = False) -> DenseSplits:
    """Reads the images of a folder in COCO's format and their objects.

    Images of ``data.exclude`` are left out; ``data.val_fraction`` is held out and ``data.subset`` drawn.

    Args:
        data: The ``data`` section of a config; ``on_error`` 'skip' leaves out images and objects that cannot be used.
        progress: Show a bar on standard error if this takes longer than a second.

    Raises:
        UserError: All that is wrong with the files; no image to train on.
        LabelsMissing: Nothing to evaluate on.
        BadList: ``data.exclude`` or ``data.groups`` is bad.
    """
    return _read(read_coco, data, progress)


def read_segmentation(data: config.Data, progress: bool = False) -> DenseSplits:
    """Reads images and the masks beside them, in ADE20K's layout too; else as :func:`read_detection`."""
    return _read(read_masks, data, progress)


def _read(reader: Callable, data: config.Data, progress: bool) -> DenseSplits:
    root, faults = root_folder(data), []
    found, classes = reader(root, data, faults, progress)
    if faults:
        raise UserError(*faults)
    if empty := [part for part, (split, _) in found.items() if not len(split)]:
        raise UserError(f"data.root: '{root}' has no image of {listed(empty)} that can be used; expected one at least")
    splits = _drawn(arranged({part: split for part, (split, _) in found.items()}), data)
    if splits.test is None:
        what = f"data.root: '{root}' has no part 'val' or 'test' to evaluate on"
        raise LabelsMissing(f"{what}; add one, or hold out a share of train with --data.val_fraction, e.g. 0.2")
    known = {name: of for split, each in found.values() for name, of in zip(split.names, each, strict=True)}
    targets = {part: [known[name] for name in of.names] for part, of in splits.parts.items()}
    return DenseSplits(splits, targets, list(classes.values()), list(classes))


def _drawn(splits: Splits, data: config.Data) -> Splits:
    """Leaves out, holds out and draws as for class labels, with all images of one class."""
    splits = _labelled(splits, lambda part: replace(part, labels=np.zeros(len(part), int), classes=_ONE_CLASS))
    splits = hold_out(narrowed(splits, data, labelled=True), data.val_fraction)
    if data.subset is not None:
        splits = replace(splits, train=draw_subset(splits.train, data.subset))
    return _labelled(splits, lambda part: replace(part, labels=None, classes=None))


def _labelled(splits: Splits, change: Callable[[Split], Split]) -> Splits:
    return replace(splits, **{name: change(part) for name, part in splits.parts.items()})
