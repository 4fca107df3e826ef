"""Read the images of the ``data`` section with their boxes or masks."""

from dataclasses import replace
from typing import Any

import numpy as np

from idmm import config
from idmm.data.folder import root_folder
from idmm.data.listing import draw_subset, hold_out, narrowed
from idmm.data.split import LabelsMissing, Split, arranged
from idmm.dense.coco import read_coco
from idmm.dense.masks import read_masks
from idmm.dense.targets import IGNORED, DenseListing
from idmm.errors import Fault, UserError
from idmm.progress import log
from idmm.text import listed

BINARY = (
    f"{IGNORED} means no class. If it is your object, write 1, "
    "e.g. with the script of docs/detect-segment.md"
)


def read_images(task: str, data: config.Data) -> DenseListing:
    """Return the images of a folder with their boxes (``task`` detect) or masks (segment).

    ``data.exclude`` removes images, ``data.val_fraction`` holds some out and ``data.subset`` draws
    some. Logs a warning about classes without a box or pixel in a split.

    Raises:
        UserError: All faults of the files, or there is nothing to train on.
        LabelsMissing: There is nothing to evaluate on.
    """
    root = root_folder(data)
    faults: list[Fault] = []
    if task == "detect":
        unit = "box"
        parts, classes = read_coco(root, faults)
    else:
        unit = "pixel"
        parts, classes = read_masks(root, faults)
    if faults:
        raise UserError(*faults)
    listing = _arranged(parts, classes, data)
    if listing.test is None:
        raise LabelsMissing.of(
            "data.root",
            f"'{root}' has no part 'val' or 'test' to evaluate on",
            "Add one, or hold out a share of train with --data.val_fraction, e.g. 0.2",
        )
    _check_classes(listing, unit)
    return listing


def _arranged(
    parts: dict[str, Split],
    classes: dict[int, str],
    data: config.Data,
) -> DenseListing:
    """Return the images by the ``data`` section. They are divided as if all had one label."""
    for part, split in parts.items():
        parts[part] = replace(split, labels=np.zeros(len(split), int), classes=["image"])
    listing = hold_out(narrowed(arranged(parts), data, labelled=True), data.val_fraction)
    splits: dict[str, Any] = {}
    for part, split in listing.parts.items():
        splits[part] = replace(split, labels=None, classes=list(classes.values()))
    if data.subset is not None:
        splits["train"] = draw_subset(splits["train"], data.subset)
    return DenseListing(**splits, excluded=listing.excluded, categories=list(classes))


def _check_classes(listing: DenseListing, unit: str) -> None:
    """Raise UserError if too few classes can be trained. Warn of classes that a split lacks."""
    trained = len(split_classes(listing.train))
    least = 1
    hint = ""
    if unit == "pixel":
        least = 2
        hint = BINARY
    if trained < least:
        fault = f"classes with a {unit} in the training images: {trained}, expected {least} or more"
        raise UserError.of("data.root", fault, hint)
    for part, split in listing.parts.items():
        present = split_classes(split)
        names = enumerate(split.class_names)
        missing = [f"'{name}'" for label, name in names if label not in present]
        if missing:
            log.warning(
                f"data.root: no {part} image has a {unit} of {listed(missing)}. Scores of these "
                "classes are undefined"
            )


def split_classes(split: Split) -> set[int]:
    """Return the classes that have a box or pixel in a split."""
    return set[int]().union(*(target.classes for target in split.targets or ()))
