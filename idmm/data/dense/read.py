"""From the ``data`` section of a config to images with boxes or masks: checked, held out, drawn from."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from idmm import config
from idmm.data.datasets import draw_subset, hold_out, narrowed
from idmm.data.dense.coco import read_coco
from idmm.data.dense.faults import Faults
from idmm.data.dense.masks import read_masks
from idmm.data.dense.targets import BoxTarget, DenseSplits, Target
from idmm.data.formats import PICTURE_CHANNELS
from idmm.data.readers.layout import root_folder
from idmm.data.split import LabelsMissing, Split, Splits, arranged
from idmm.errors import UserError, listed

log = logging.getLogger(__name__)

_ONE_CLASS = ["image"]  # what draws that go by classes take all images for
_NOTHING_TO_EVALUATE_ON = (
    "data.root: '{}' has no part 'val' or 'test' to evaluate on; add one, or hold out a share of train with "
    "--data.val_fraction, e.g. 0.2"
)


def read_detection(data: config.Data, progress: bool = False) -> DenseSplits:
    """Reads the images of a folder in COCO's format and their objects.

    Images of ``data.exclude`` are left out; ``data.val_fraction`` is held out and ``data.subset`` drawn.

    Args:
        data: The ``data`` section of a config; ``on_error`` 'skip' leaves out images and objects that cannot be used.
        progress: Show a bar on standard error if this takes longer than a second.

    Raises:
        UserError: All that is wrong with the files; keys of ``data`` that have no meaning here; no object to train on.
        LabelsMissing: Nothing to evaluate on.
        BadList: ``data.exclude`` or ``data.groups`` is bad.
    """
    return _read(read_coco, data, progress)


def read_segmentation(data: config.Data, progress: bool = False) -> DenseSplits:
    """Reads images and the masks beside them, in ADE20K's layout too; else as :func:`read_detection`."""
    return _read(read_masks, data, progress)


def _read(reader: Callable, data: config.Data, progress: bool) -> DenseSplits:
    faults = Faults(lenient=data.on_error == "skip")
    found = _found(reader, data, faults, progress)
    if faults.left_out:
        log.warning("left out:\n%s", "\n".join(faults.left_out))
    if found.splits.test is None:
        raise LabelsMissing(_NOTHING_TO_EVALUATE_ON.format(data.root))
    return found


def _found(reader: Callable, data: config.Data, faults: Faults, progress: bool) -> DenseSplits:
    _refuse_keys(data)
    data = replace(data, name="folder")
    root = root_folder(data)
    found, classes = reader(root, data, faults, progress)
    faults.refuse()
    if empty := [part for part, (split, _) in found.items() if not len(split)]:
        raise UserError(f"data.root: '{root}' has no image of {listed(empty)} that can be used; wanted one at least")
    parts = {part: dict.fromkeys(split.names) for part, (split, _) in found.items()}
    for one, other in itertools.combinations(parts, 2):
        if both := [name for name in parts[other] if name in parts[one]]:
            raise UserError(
                f"data.root: '{root}' has images in both {one} and {other}: {listed(both)}; wanted each in one"
            )
    splits = _drawn(arranged({part: split for part, (split, _) in found.items()}), data)
    known = {name: of for split, each in found.values() for name, of in zip(split.names, each, strict=True)}
    targets = {part: [known[name] for name in of.names] for part, of in splits.parts.items()}
    for part, each in targets.items():
        if isinstance(each[0], BoxTarget) and not any(len(target.boxes) for target in each):
            raise UserError(f"data.root: '{root}' has no image with a box in {part}; wanted one at least")
    names = list(classes.values())
    _warn_of_empty_classes(targets["train"], names)
    return DenseSplits(splits, targets, names, list(classes))


def _refuse_keys(data: config.Data) -> None:
    """Raises UserError where keys are given that are of class labels, or of bands."""
    faults = []
    for key in ("labels", "labelled", "folds"):
        if (value := getattr(data, key)) is not None:
            faults.append(f"data.{key}: got {value}, which is for class labels; leave it out for boxes and masks")
    if data.subset is not None and data.subset.per_class is not None:
        faults.append(
            "data.subset.per_class: images with boxes or masks have several classes; wanted total or fraction"
        )
    if data.bands is not None or data.in_chans not in (None, *PICTURE_CHANNELS):
        key = "in_chans" if data.bands is None else "bands"
        what = f"got {getattr(data, key)}; boxes and masks are learnt from pictures alone, read as RGB"
        faults.append(f"data.{key}: {what}; leave it out")
    if faults:
        raise UserError(*faults)


def _drawn(splits: Splits, data: config.Data) -> Splits:
    """Leaves out, holds out and draws as for class labels, with all images of one class."""
    splits = _labelled(splits, lambda part: replace(part, labels=np.zeros(len(part), int), classes=_ONE_CLASS))
    splits = hold_out(narrowed(splits, data, labelled=True), data.val_fraction)
    if data.subset is not None:
        splits = replace(splits, train=draw_subset(splits.train, data.subset))
    return _labelled(splits, lambda part: replace(part, labels=None, classes=None))


def _labelled(splits: Splits, change: Callable[[Split], Split]) -> Splits:
    return replace(splits, **{name: change(part) for name, part in splits.parts.items()})


def _warn_of_empty_classes(train: list[Target], classes: list[str]) -> None:
    seen: set[int] = set()
    for target in train:
        seen.update(target.labels[~target.crowd].tolist() if isinstance(target, BoxTarget) else target.present)
    if empty := [name for label, name in enumerate(classes) if label not in seen]:
        what = f"{len(empty)} of {len(classes)} classes have no example to train on: {listed(empty)}"
        log.warning("data.root: %s", what)
