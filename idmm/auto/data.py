"""The images of ``idmm train``: copies left out, some held out, all decoded once and counted."""

import contextlib
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from idmm.auto.plan import HELD_OUT, Counts, TrainState
from idmm.config import PATHS, RESUME_IGNORED, Data
from idmm.config.commands import TrainCommand
from idmm.data import user_lists
from idmm.data.decoding import BadImages
from idmm.data.fingerprint import digests
from idmm.data.formats import BadImage
from idmm.data.image_store import store_split
from idmm.data.images import image_size
from idmm.data.list_file import decoded
from idmm.data.listing import list_images
from idmm.data.split import LabelsMissing, Listing
from idmm.data.stratify import stratified_folds
from idmm.data.user_lists import SPLIT
from idmm.errors import UserError
from idmm.files import expand_home, write_csv, write_text
from idmm.models.hog import SIDE
from idmm.progress import log
from idmm.text import counted, listed

EXCLUDE = "exclude.txt"
SKIPPED = "skipped.csv"
MOST_SKIPPED = 0.05  # share of the images that may be broken


def chosen_images(data: Data, out: Path) -> tuple[Data, Listing]:
    """Return all images to learn from. A part of the labelled ones is held out if there are none to
    test on."""
    if data.subset is not None and data.labelled is not None:
        raise UserError(
            "data.labelled: given with data.subset, from which fine-tuning cannot draw. Give one of them"
        )
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


def all_images(data: Data) -> Listing:
    """List all images that a command may use, before some are held out or drawn."""
    everything = replace(data, val_fraction=0.0, subset=None, labelled=None)
    return list_images(everything, labelled=True, evaluated=False, unlabelled=True)


def _without_copies(data: Data, out: Path) -> Data:
    """Return the data without training images whose file is that of an earlier one or of a test
    image, with a warning.

    If ``data.exclude`` is given, nothing is left out. Copies are found
    before images are held out or drawn, so that no copy is in two splits.
    """
    if data.name != "folder" or data.exclude is not None:
        return data
    listing = all_images(data)
    train = listing.train
    held_out = {
        content for split in (listing.val, listing.test) if split for content in digests(split)
    }
    contents = digests(train)
    kept = {}
    for number in np.argsort(train.labels < 0, kind="stable"):  # a copy with a label is kept
        kept.setdefault(contents[number], number)
    copies = [i for i, content in enumerate(contents) if content in held_out or kept[content] != i]
    emptied = set(train.labels) - {-1} - set(np.delete(train.labels, copies))
    if emptied:
        classes = listed(train.classes[label] for label in sorted(emptied))
        log.warning(
            "data: all training images of %s are copies of other images. They are used all the same",
            classes,
        )
    copies = [number for number in copies if train.labels[number] not in emptied]
    if not copies:
        return data
    line = "data: %s left out, the same as another training image or a test image (%s)"
    log.warning(line, counted(len(copies), "training image"), out / EXCLUDE)
    return _leave_out(data, [train.names[number] for number in copies], out)


def _with_list(data: Data, out: Path) -> Data:
    """Write OUT/split.csv, and return the data with that list if pretraining would not see the
    classes.

    Without it, pretraining would train on the images that are held out, and could not draw a subset
    by class."""
    everything = replace(data, subset=None, labelled=None)
    write_csv(out / SPLIT, user_lists.class_rows(list_images(everything, labelled=True).parts))
    if data.name != "folder" or not (data.val_fraction or data.subset):
        return data
    unsplit = list_images(replace(everything, val_fraction=0.0), labelled=False, unlabelled=False)
    if unsplit.train.labels is not None:
        return data
    return replace(data, labels=str(out / SPLIT), val_fraction=0.0)


def readable_images(data: Data, out: Path) -> tuple[Data, Listing, bool]:
    """Return what :func:`chosen_images` does, without broken images, and whether there are images
    of more than 8 bits.

    OUT/skipped.csv lists the broken ones. Each image is decoded once. UserError: more than
    ``MOST_SKIPPED`` are broken.
    """
    skipped = {}
    while True:
        chosen, listing = chosen_images(data, out)
        if data.name != "folder":
            return chosen, listing, False
        is_deep = False
        broken = {}
        faults = []
        for part, split in listing.parts.items():
            try:
                store = store_split(
                    split, stored_size=SIDE, data=replace(chosen, cache="off"), part=part
                )
                is_deep |= store.high_bit > 0
            except BadImages as error:
                broken |= error.reasons
                faults += error.faults
        total = len(skipped) + sum(map(len, listing.parts.values()))
        skipped |= broken
        if len(skipped) > MOST_SKIPPED * total:
            line = f"data.root: {len(skipped)} of {total} images are broken"
            raise UserError(*faults, f"{line}. idmm train skips at most {100 * MOST_SKIPPED:g} %")
        if not broken:
            break
        # a draw may have others then
        data = _leave_out(replace(data, exclude=chosen.exclude), broken, out)
    if skipped:
        write_csv(out / SKIPPED, [("path", "reason"), *skipped.items()])
        log.warning("data: skipped %s (%s)", counted(len(skipped), "broken image"), out / SKIPPED)
    return chosen, listing, is_deep


def _leave_out(data: Data, names: Iterable[str], out: Path) -> Data:
    """Return the data without some images. OUT/exclude.txt names them, after the lines of
    ``data.exclude``."""
    lines = [user_lists.exclude_line(name) for name in names]
    if data.exclude is not None:
        before = decoded(expand_home(data.exclude).read_bytes())
        lines = [*before.split("\n"), *lines]
    write_text(out / EXCLUDE, "\n".join([*lines, ""]))
    return replace(data, exclude=str(out / EXCLUDE))


def count(splits: Listing, data: Data, foreign: bool) -> Counts:
    """Count the images and labels to learn from. ``foreign``: see :class:`Counts`."""
    train = splits.train
    sides = []
    labelled = list_images(labelled_part(data), labelled=True).train
    without = len(train.classes) - len(np.unique(labelled.labels[labelled.labels >= 0]))
    for item in train.sample():
        with contextlib.suppress(BadImage):  # which the first stage names
            sides.append(min(image_size(item)))
    folds = stratified_folds(labelled.labels, labelled.groups)
    divisible = bool(folds) and set(labelled.labels[folds[0][0]]) == set(labelled.labels)
    side = int(statistics.median(sides or [0]))
    return Counts(len(train), len(labelled), len(train.classes), side, without, divisible, foreign)


# ---------------------------------------------------------------------- the images of a stage
def data_of(command: TrainCommand, state: TrainState) -> Data:
    """Return the images, with paths and all that does not change results as this command has
    them."""
    names = [
        key.removeprefix("data.") for key in (*RESUME_IGNORED, *PATHS) if key.startswith("data.")
    ]
    data = replace(Data(**state.data), **{name: getattr(command.data, name) for name in names})
    for name, file in (("labels", SPLIT), ("exclude", EXCLUDE)):
        if state.data[name] != state.command["data"][name]:  # the file that this command wrote
            data = replace(data, **{name: str(Path(command.out) / file)})
    return data


def labelled_part(data: Data) -> Data:
    """Return the images with labels, which ``data.labelled`` may limit."""
    return replace(data, subset=data.labelled or data.subset, labelled=None)


def trial_split(data: Data) -> Listing:
    """Return the labelled training images, with a fold of them as ``test``. There is one, see
    ``Counts.divisible``."""
    train = list_images(labelled_part(data), labelled=True).train
    folds = stratified_folds(train.labels, train.groups, classes=train.classes)
    remaining, held_out = map(train.take, folds[0])
    return Listing(remaining, test=held_out)


def by_list(data: Data, file: Path) -> Data:
    """Return the images that a list of this command names, which has classes, splits and groups."""
    return replace(
        data, labels=str(file), subset=None, labelled=None, groups=None, val_fraction=0.0
    )
