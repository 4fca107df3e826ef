"""The images of ``idmm train``: copies left out, some held out, all decoded once and counted."""

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
from idmm.data.fingerprint import copies
from idmm.data.image_store import choose_crop_mode, sampled_sizes, store_split
from idmm.data.list_file import decoded
from idmm.data.listing import divided, drawn, list_images
from idmm.data.split import Listing, Split, names_of, with_unlabelled
from idmm.data.user_lists import SPLIT
from idmm.errors import Fault, UserError
from idmm.files import Json, expand_home, write_csv, write_text
from idmm.models.hog import SIDE
from idmm.progress import log
from idmm.text import counted, listed

EXCLUDE = "exclude.txt"
SKIPPED = "skipped.csv"
MOST_SKIPPED = 0.05  # share of the images that may be broken


def all_images(data: Data) -> Listing:
    """List all images that a command may use, before some are held out or drawn.

    ``unlabelled`` is not in ``train`` yet. Classes without a training image are left out.
    """
    everything = replace(data, val_fraction=0.0, subset=None, labelled=None)
    listing = list_images(
        everything,
        labelled=True,
        evaluated=False,
        unlabelled=True,
        joined=False,
        least_classes=2,
    )
    return listing.trained()


def chosen_images(data: Data, out: Path, images: Listing) -> tuple[Data, Listing]:
    """Choose the images to learn from, of all ``images``.

    A part of the labelled ones is held out if there are none to test on. If classes are left out,
    OUT/split.csv becomes the list of images and labels, so that no step finds these classes.
    """
    if data.subset is not None and data.labelled is not None:
        raise UserError(
            Fault(
                "data.labelled",
                "given with data.subset, from which fine-tuning cannot draw",
                "Give one of them",
            )
        )
    if names := _copies(data, out, images):
        data = _leave_out(data, names, out)
        images = all_images(data)
    if images.test is None and not data.val_fraction:
        data = replace(data, val_fraction=HELD_OUT)
        log.info(
            "data.val_fraction: %g of the labelled images are held out, as there are no images to "
            "test on",
            HELD_OUT,
        )
        if images.aside:
            log.warning(
                "data.labels: %s to test on: no class is filled in. Accuracy on images that idmm "
                "suggest chose is no estimate",
                counted(len(images.aside), "image"),
            )
    splits = divided(images, data, labelled=True, is_tested=True)
    is_folder = data.name == "folder"
    train = drawn(splits.train, data, labelled=not is_folder)
    listing = with_unlabelled(replace(splits, train=train))
    if is_folder:
        listing = listing.trained()
    if listing.untrained:
        every = [*names_of(images.parts.values()), *images.aside]
        unused = set(every).difference(names_of(listing.parts.values()))
        write_csv(out / SPLIT, user_lists.class_rows(listing.parts, sorted(unused)))
        data = by_list(data, out / SPLIT)
        again = list_images(data, labelled=True, unlabelled=True)
        return data, replace(again, untrained=listing.untrained)
    parts = replace(splits, unlabelled=None).parts
    write_csv(out / SPLIT, user_lists.class_rows(parts, images.aside))
    if _is_list_needed(data):
        data = replace(data, labels=str(out / SPLIT), val_fraction=0.0)
        return data, list_images(data, labelled=True, unlabelled=True)
    return data, listing


def _copies(data: Data, out: Path, images: Listing) -> list[str]:
    """Return training images with the file of an earlier one or of a test image, with a warning.

    If ``data.exclude`` is given, nothing is left out. Copies are found before images are held out
    or drawn, so that no copy is in two splits.
    """
    if data.name != "folder" or data.exclude is not None:
        return []
    train = with_unlabelled(images).train
    labels = train.known_labels
    is_copy = copies(train, images.evaluated)
    emptied = set(labels.tolist()) - {-1} - set(labels[~is_copy].tolist())
    if emptied:
        log.warning(
            "data: all training images of %s are copies of other images. "
            "They are used all the same",
            listed(train.class_names[label] for label in sorted(emptied)),
        )
    unused = np.flatnonzero(is_copy & ~np.isin(labels, list(emptied)))
    if len(unused):
        log.warning(
            "data: %s left out, the same as another training image or a test image (%s)",
            counted(len(unused), "training image"),
            out / EXCLUDE,
        )
    return train.take(unused).names


def _is_list_needed(data: Data) -> bool:
    """Return whether pretraining would not see the classes that images are held out or drawn by.

    Then it would train on images that are held out, and could not draw a subset by class.
    """
    if data.name != "folder" or not (data.val_fraction or data.subset):
        return False
    everything = replace(data, subset=None, labelled=None, val_fraction=0.0)
    return list_images(everything, labelled=False, unlabelled=False).train.labels is None


def readable_images(data: Data, out: Path, images: Listing) -> tuple[Data, Listing, bool]:
    """Choose the images to learn from, see :func:`chosen_images`, without broken ones.

    OUT/skipped.csv lists the broken ones. Each image is decoded once.

    Returns:
        The data, the images, and whether there are some of more than 8 bits.

    Raises:
        UserError: More than :data:`MOST_SKIPPED` are broken.
    """
    skipped: dict[str, str] = {}
    while True:
        chosen, listing = chosen_images(data, out, images)
        if data.name != "folder":
            return chosen, listing, False
        is_deep = False
        broken: dict[str, str] = {}
        faults: list[Fault] = []
        unstored = replace(chosen, cache="off")
        for part, split in listing.parts.items():
            try:
                store = store_split(split, stored_size=SIDE, data=unstored, part=part)
                is_deep |= store.high_bit > 0
            except BadImages as error:
                broken |= error.reasons
                faults += error.faults
        total = len(skipped) + sum(map(len, listing.parts.values()))
        skipped |= broken
        if len(skipped) > MOST_SKIPPED * total:
            too_many = Fault(
                "data.root",
                f"{len(skipped)} of {total} images are broken",
                f"idmm train skips at most {100 * MOST_SKIPPED:g} %",
            )
            raise UserError(*faults, too_many)
        if not broken:
            break
        # a draw may have others then
        data = _leave_out(replace(data, exclude=chosen.exclude), broken, out)
        images = all_images(data)
    if skipped:
        write_csv(out / SKIPPED, [("path", "reason"), *skipped.items()])
        log.warning("data: skipped %s (%s)", counted(len(skipped), "broken image"), out / SKIPPED)
    return chosen, listing, is_deep


def _leave_out(data: Data, names: Iterable[str], out: Path) -> Data:
    """Return the data without some images.

    OUT/exclude.txt names them, after the lines of ``data.exclude``.
    """
    lines = [user_lists.exclude_line(name) for name in names]
    if data.exclude is not None:
        before = decoded(expand_home(data.exclude).read_bytes())
        lines = [*before.split("\n"), *lines]
    write_text(out / EXCLUDE, "\n".join([*lines, ""]))
    return replace(data, exclude=str(out / EXCLUDE))


def count(listing: Listing) -> Counts:
    """Count the images and labels to learn from."""
    train = listing.train
    labelled = labelled_images(train)
    sides = [min(size) for size in sampled_sizes(train)]
    side = int(statistics.median(sides or [0]))
    classes = len(train.class_names)
    untrained = list(listing.untrained)
    return Counts(
        len(train),
        len(labelled),
        classes,
        side,
        untrained,
        choose_crop_mode(train),
    )


def labelled_images(train: Split) -> Split:
    """Return the training images that have a label."""
    return train.take(np.flatnonzero(train.known_labels >= 0))


# ---------------------------------------------------------------------- the images of a step
def data_of(command: TrainCommand, state: TrainState) -> Data:
    """Return the images as the state has them.

    Paths and all that does not change results are those of this command.
    """
    data = Data(**state.data)
    changes: Json = {}
    for key in (*RESUME_IGNORED, *PATHS):
        section, _, name = key.partition(".")
        if section == "data":
            changes[name] = getattr(command.data, name)
    for name, file in (("labels", SPLIT), ("exclude", EXCLUDE)):
        if state.data[name] != state.command["data"][name]:  # the file that this command wrote
            changes[name] = str(Path(command.out) / file)
    return replace(data, **changes)


def labelled_part(data: Data) -> Data:
    """Return the images with labels, which ``data.labelled`` may limit."""
    return replace(data, subset=data.labelled or data.subset, labelled=None)


def by_list(data: Data, file: Path) -> Data:
    """Return the images that a list of this command names, which has classes, splits and groups."""
    return replace(
        data, labels=str(file), subset=None, labelled=None, groups=None, val_fraction=0.0
    )
