"""Read the images of the ``data`` section with their boxes or masks: check, hold out, draw a subset."""

from dataclasses import replace

import numpy as np

from idmm import config
from idmm.data.folder import root_folder
from idmm.data.listing import draw_subset, hold_out, narrowed
from idmm.data.split import LabelsMissing, Split, arranged
from idmm.dense.coco import read_coco
from idmm.dense.masks import read_masks
from idmm.dense.targets import IGNORED, DenseListing
from idmm.errors import UserError, listed
from idmm.progress import log


def read_images(task: str, data: config.Data) -> DenseListing:
    """Return the images of a folder with their boxes (``task`` detect) or masks (segment), by the ``data`` section.

    ``data.exclude`` removes images, ``data.val_fraction`` holds some out and ``data.subset`` draws some. Logs a warning
    about classes without a box or pixel in a split.

    Raises:
        UserError: All faults of the files, or there is nothing to train on.
        LabelsMissing: There is nothing to evaluate on.
    """
    root, faults = root_folder(data), []
    parts, classes = (read_coco if task == "detect" else read_masks)(root, faults)
    if faults:
        raise UserError(*faults)
    # as for class labels, with all images in one class
    labelled = {p: replace(split, labels=np.zeros(len(split), int), classes=["image"]) for p, split in parts.items()}
    listing = hold_out(narrowed(arranged(labelled), data, labelled=True), data.val_fraction)
    names = list(classes.values())
    splits = {part: replace(split, classes=names, labels=None) for part, split in listing.parts.items()}
    listing = DenseListing(**{**vars(listing), **splits}, categories=list(classes))
    if data.subset is not None:
        listing = replace(listing, train=draw_subset(listing.train, data.subset))
    if listing.test is None:
        raise LabelsMissing(
            f"data.root: '{root}' has no part 'val' or 'test' to evaluate on. "
            "Add one, or hold out a share of train with --data.val_fraction, e.g. 0.2"
        )
    if task == "detect":
        _check_classes(listing, "box", least=1)
    else:
        _check_classes(listing, "pixel", least=2)
    return listing


def _check_classes(listing: DenseListing, unit: str, least: int) -> None:
    """Warn of classes without a box or pixel. UserError: fewer than ``least`` have one in training."""
    for part, split in listing.parts.items():
        present = split_classes(split)
        missing = [name for label, name in enumerate(split.classes) if label not in present]
        if part == "train" and len(present) < least:
            what = f"only '{split.classes[present.pop()]}'" if present else "no class"
            fault = f"data.root: the training images have a {unit} of {what}, expected {least} classes or more"
            if unit == "pixel":
                fault += (
                    f". {IGNORED} means no class: if your masks are 0 and {IGNORED}, write 1 instead of {IGNORED}, "
                )
                fault += "e.g. with the script of docs/detect-segment.md"
            raise UserError(fault)
        if missing:
            line = "data.root: no %s image has a %s of %s. Scores of these classes are undefined"
            log.warning(line, part, unit, "any class" if not present else listed(f"'{name}'" for name in missing))


def split_classes(split: Split) -> set[int]:
    """Return the classes that have a box or pixel in a split."""
    return set().union(*(target.classes for target in split.targets))
