"""The images of ``idmm train``: copies left out, some held out, all decoded once."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from idmm.config import Data
from idmm.data import user_lists
from idmm.data.image_store import store_split
from idmm.data.images import digest
from idmm.data.listing import list_images
from idmm.data.split import LabelsMissing, Listing, counted
from idmm.errors import UserError, listed
from idmm.files import write_csv, write_text
from idmm.models.hog import SIDE
from idmm.progress import log
from idmm.stages.train_plan import COPIES, HELD_OUT, LABELS


def chosen_images(data: Data, out: Path) -> tuple[Data, Listing]:
    """Return all images to learn from. A part of the labelled ones is held out if there are none to test on."""
    if data.subset is not None and data.labelled is not None:
        raise UserError("data.labelled: given with data.subset, from which fine-tuning cannot draw. Give one of them")
    data = _without_copies(data, out)
    try:
        list_images(data, labelled=True, unlabelled=True)
    except LabelsMissing:
        if data.val_fraction:
            raise
        data = replace(data, val_fraction=HELD_OUT)
        line = "data.val_fraction: %g of the labelled images are held out, as there are no images to test on"
        log.info(line, HELD_OUT)
    data = _with_list(data, out)
    return data, list_images(data, labelled=True, unlabelled=True)


def _without_copies(data: Data, out: Path) -> Data:
    """Return the data without training images whose file is that of an earlier one or of a test image, with a warning.

    OUT/duplicates.txt names them, for ``data.exclude``. If that is given already, nothing is left out. Copies are found
    before images are held out or drawn, so that no copy is in two splits.
    """
    if data.name != "folder" or data.exclude is not None:
        return data
    everything = replace(data, val_fraction=0.0, subset=None, labelled=None)
    listing = list_images(everything, labelled=True, evaluated=False, unlabelled=True)
    train, seen, copies = listing.train, set(), []
    for split in (listing.val, listing.test):
        seen.update(_file_digest(path) for path in (split.items if split else ()))
    for number in np.argsort(train.labels < 0, kind="stable"):  # a copy with a label is kept
        content = _file_digest(train.items[number])
        if content in seen and content is not None:
            copies.append(number)
        seen.add(content)
    emptied = set(train.labels) - {-1} - set(np.delete(train.labels, copies))
    if emptied:
        classes = listed(train.classes[label] for label in sorted(emptied))
        log.warning("data: all training images of %s are copies of other images. They are used all the same", classes)
    copies = [number for number in sorted(copies) if train.labels[number] not in emptied]
    if not copies:
        return data
    write_text(out / COPIES, "".join(f"{user_lists.exclude_line(train.names[number])}\n" for number in copies))
    line = "data: %s left out, the same as another training image or a test image (%s)"
    log.warning(line, counted(len(copies), "training image"), out / COPIES)
    return replace(data, exclude=str(out / COPIES))


def _file_digest(path: str) -> bytes | None:
    """Return a digest of a file's bytes, or None if it cannot be read. The check of all images names it."""
    try:
        return digest(Path(path).read_bytes())
    except OSError:
        return None


def _with_list(data: Data, out: Path) -> Data:
    """Return the data with a list of classes and splits, OUT/labels.csv, if pretraining would not see the classes.

    Without it, pretraining would train on the images that are held out, and could not draw a subset by class."""
    everything = replace(data, subset=None, labelled=None)
    if data.name != "folder" or not (data.val_fraction or data.subset):
        return data
    unsplit = list_images(replace(everything, val_fraction=0.0), labelled=False, unlabelled=False)
    if unsplit.train.labels is not None:
        return data
    write_csv(out / LABELS, user_lists.class_rows(list_images(everything, labelled=True).parts))
    return replace(data, labels=str(out / LABELS), val_fraction=0.0)


def check_images(data: Data, listing: Listing) -> bool:
    """Decode every image once. Return whether there are images of more than 8 bits.

    Raises UserError with the bad images of all splits."""
    faults, deep = [], False
    for part, split in listing.parts.items():
        try:
            store = store_split(split, stored_size=SIDE, data=replace(data, cache="off"), part=part)
            deep = deep or store.high_bit > 0
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(*faults)
    return deep


def names_digest(listing: Listing) -> str:
    """Return a digest of the names of all images and their splits."""
    lines = "\n".join(f"{part} {name}" for part, split in listing.parts.items() for name in split.names)
    return digest(lines.encode("utf-8", "surrogateescape")).hex()
