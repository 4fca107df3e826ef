"""Read the images of the ``data`` section with their boxes or masks: check, hold out, draw a
subset."""

from dataclasses import replace

import numpy as np

from idmm import config
from idmm.data.folder import root_folder
from idmm.data.listing import draw_subset, hold_out, narrowed
from idmm.data.split import LabelsMissing, Split, arranged
from idmm.dense.coco import read_coco
from idmm.dense.masks import read_masks
from idmm.dense.targets import IGNORED, DenseListing
from idmm.errors import UserError
from idmm.progress import log
from idmm.text import listed

BINARY = f". {IGNORED} means no class. If it is your object, write 1, e.g. with the script of docs/detect-segment.md"


def read_images(task: str, data: config.Data) -> DenseListing:
    """Return the images of a folder with their boxes (``task`` detect) or masks (segment), by the
    ``data`` section.

    ``data.exclude`` removes images, ``data.val_fraction`` holds some out and ``data.subset`` draws
    some. Logs a warning about classes without a box or pixel in a split.

    Raises:
        UserError: All faults of the files, or there is nothing to train on.
        LabelsMissing: There is nothing to evaluate on.
    """
    root = root_folder(data)
    faults = []
    parts, classes = (read_coco if task == "detect" else read_masks)(root, faults)
    if faults:
        raise UserError(*faults)
    # as for class labels, with all images in one class
    labelled = {
        p: replace(split, labels=np.zeros(len(split), int), classes=["image"])
        for p, split in parts.items()
    }
    listing = hold_out(narrowed(arranged(labelled), data, labelled=True), data.val_fraction)
    names = list(classes.values())
    splits = {
        part: replace(split, classes=names, labels=None) for part, split in listing.parts.items()
    }
    listing = DenseListing(**{**vars(listing), **splits}, categories=list(classes))
    if data.subset is not None:
        listing = replace(listing, train=draw_subset(listing.train, data.subset))
    if listing.test is None:
        raise LabelsMissing(
            f"data.root: '{root}' has no part 'val' or 'test' to evaluate on. "
            "Add one, or hold out a share of train with --data.val_fraction, e.g. 0.2"
        )
    unit, least, advice = ("box", 1, "") if task == "detect" else ("pixel", 2, BINARY)
    if len(trained := split_classes(listing.train)) < least:
        fault = f"data.root: classes with a {unit} in the training images: {len(trained)}, expected {least} or more"
        raise UserError(f"{fault}{advice}")
    for part, split in listing.parts.items():
        present = split_classes(split)
        if missing := [f"'{name}'" for label, name in enumerate(names) if label not in present]:
            line = "data.root: no %s image has a %s of %s. Scores of these classes are undefined"
            log.warning(line, part, unit, listed(missing))
    return listing


def split_classes(split: Split) -> set[int]:
    """Return the classes that have a box or pixel in a split."""
    return set().union(*(target.classes for target in split.targets))
