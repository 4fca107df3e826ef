"""Folders of images with a mask each: ROOT/images/PART over ROOT/masks/PART, both without parts, or ADE20K's own.

Source of the latter: http://sceneparsing.csail.mit.edu
"""

import logging
import os
from pathlib import Path
from typing import NamedTuple

from idmm import config
from idmm.data.dense.faults import Faults
from idmm.data.dense.looks import MaskLook, image_size, look_at, look_at_mask
from idmm.data.dense.targets import IGNORED, MaskTarget
from idmm.data.formats import BadImage
from idmm.data.readers.folder import PARTS, images_under
from idmm.data.readers.layout import lines
from idmm.data.split import Split, counted
from idmm.errors import UserError, listed

log = logging.getLogger(__name__)

ADE_FOLDERS = {"train": "training", "val": "validation"}
ADE_NAMES, ADE_CLASSES = "objectInfo150.txt", 150


class Layout(NamedTuple):
    """Where images and masks lie."""

    root: Path
    masks: str  # folder beside ``images``
    folders: dict[str, str]  # of each part
    first: int  # value of class 0 in a mask


class _Pair(NamedTuple):
    """The images of a part that have a mask, and the masks, in one order."""

    split: Split
    masks: list[str]  # paths
    looks: list[MaskLook | BadImage]
    shown: list[tuple[int, int] | BadImage]  # sizes of the images


def read_masks(
    root: Path, data: config.Data, faults: Faults, progress: bool
) -> tuple[dict[str, tuple], dict[int, str]]:
    """Reads all parts that there are.

    Returns:
        The images and their targets by part, and the classes' names by their values in the masks.

    Raises:
        UserError: There is no such layout, or no image in a folder.
    """
    layout = mask_layout(root)
    if layout is None:
        wanted = f"{root}/images/train and {root}/masks/train, or ADE20K's images/training and annotations/training"
        raise UserError(f"data.root: '{root}' has no images with masks to train on; wanted {wanted}")
    pairs = {}
    for part, folder in layout.folders.items():
        top, below = layout.root / "images" / folder, layout.root / layout.masks / folder
        if below.is_dir():
            pairs[part] = _pair(root, top, below, part, data, faults, progress)
        elif top.is_dir():  # a test set whose masks are kept by others
            log.warning("data.root: '%s' is not used, as there are no masks of it ('%s')", top, below)
    classes = _classes(layout, pairs["train"].looks, faults)
    found = {part: _targets(layout, part, pair, len(classes), faults) for part, pair in pairs.items()}
    return found, dict(enumerate(classes, start=layout.first))


def mask_layout(root: Path) -> Layout | None:
    """Returns how a folder of masks is laid out; None: it is none."""
    for base in (root, root / "ADEChallengeData2016"):
        if all((base / kind / "training").is_dir() for kind in ("images", "annotations")):
            return Layout(base, "annotations", ADE_FOLDERS, 1)
    if all((root / kind / "train").is_dir() for kind in ("images", "masks")):
        return Layout(root, "masks", {part: part for part in PARTS}, 0)
    kinds = [root / kind for kind in ("images", "masks")]
    if all(kind.is_dir() for kind in kinds) and not any((kind / part).is_dir() for kind in kinds for part in PARTS):
        return Layout(root, "masks", {"train": ""}, 0)
    return None


def _pair(root: Path, top: Path, below: Path, part: str, data: config.Data, faults: Faults, progress: bool) -> _Pair:
    """Finds the mask, in the folder ``below``, of each image in ``top``: the PNG of the same name."""
    images = _by_stem(top, images_under(str(top)), faults) if top.is_dir() else {}
    names = [name for name in images_under(str(below)) if name.lower().endswith(".png")]
    masks = _by_stem(below, names, faults)
    bare = [f"'{name}' has no mask; wanted '{below}/{stem}.png'" for stem, name in images.items() if stem not in masks]
    faults.unusable(str(top), counted(len(images), "image"), bare)
    lone = [f"'{name}' is of no image" for stem, name in masks.items() if stem not in images]
    faults.unusable(str(below), counted(len(masks), "mask"), lone)
    both = [stem for stem in images if stem in masks]
    split = _split(root, top, [images[stem] for stem in both])
    of_masks = _split(root, below, [masks[stem] for stem in both])
    looks = look_at(of_masks, look_at_mask, data.max_pixels, progress)
    return _Pair(split, of_masks.items, looks, look_at(split, image_size, data.max_pixels, progress))


def _split(root: Path, folder: Path, names: list[str]) -> Split:
    items = [os.path.join(folder, *name.split("/")) for name in names]
    return Split(items, [os.path.relpath(item, root).replace(os.sep, "/") for item in items], None, None)


def _by_stem(folder: Path, names: list[str], faults: Faults) -> dict[str, str]:
    """Returns names of files by what they are without their ending."""
    found, twice = {}, []
    for name in names:
        if found.setdefault(os.path.splitext(name)[0], name) != name:
            twice.append(name)
    if twice:
        faults.add(
            f"data.root: '{folder}' has images whose names differ in the ending alone; wanted one of each", twice
        )
    return found


def _classes(layout: Layout, train: list[MaskLook | BadImage], faults: Faults) -> list[str]:
    """Returns the names of the classes; numbers where there are none."""
    path = layout.root / (ADE_NAMES if layout.first else "classes.txt")
    if path.exists():
        found = lines(path)
        if layout.first:  # a row of columns each, below their heads
            found = [line.split("\t")[-1].strip() for line in found if line[0].isdigit()]
    elif layout.first:
        found = [str(number) for number in range(1, ADE_CLASSES + 1)]
    else:
        values = [v for look in train if not isinstance(look, BadImage) for v in look.values if v != IGNORED]
        found = [str(number) for number in range(max(values, default=0) + 1)]
    if not 2 <= len(found) <= IGNORED:
        where = path if path.exists() else layout.root / layout.masks
        faults.add(f"data.root: '{where}' has {len(found)} as number of classes; wanted 2 to {IGNORED}")
    return found


def _targets(layout: Layout, part: str, pair: _Pair, classes: int, faults: Faults) -> tuple[Split, list[MaskTarget]]:
    """Returns the images whose masks can be used, and these."""
    folder = layout.root / layout.masks / layout.folders[part]
    known = range(layout.first, layout.first + classes)
    good, targets, wrong = [], [], []
    for i, (path, look, shown) in enumerate(zip(pair.masks, pair.looks, pair.shown, strict=True)):
        name = os.path.relpath(path, folder)
        if isinstance(look, BadImage):
            wrong.append(f"'{name}': {look.reason}")
        elif not isinstance(shown, BadImage) and look.size != shown:
            wrong.append(f"'{name}' is {look.size[1]} x {look.size[0]}, its image {shown[1]} x {shown[0]}")
        elif odd := [value for value in look.values if value not in (*range(layout.first), *known, IGNORED)]:
            wanted = f"wanted {known[0]} to {known[-1]}, and {IGNORED} for what is ignored"
            wrong.append(f"'{name}' has values without a class: {listed(map(str, odd))}; {wanted}")
        else:
            present = tuple(value - layout.first for value in look.values if value in known)
            good.append(i)
            targets.append(MaskTarget(path, look.size, layout.first, look.digest, present))
    faults.unusable(str(folder), counted(len(pair.masks), "mask"), wrong)
    return pair.split.take(good), targets
