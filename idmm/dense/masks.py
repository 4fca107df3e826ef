"""Folders of images with a mask each: ROOT/images/PART over ROOT/masks/PART, or ADE20K's own.

Source of the latter: http://sceneparsing.csail.mit.edu
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from idmm import config
from idmm.data.formats import BadImage
from idmm.data.images import read
from idmm.data.readers.folder import PARTS, images_under
from idmm.data.readers.layout import absent, lines
from idmm.data.split import Split, counted
from idmm.dense.checks import image_size, look_at, pixels, split_of, unusable
from idmm.dense.targets import IGNORED, MaskTarget, mask_values, short_digest
from idmm.errors import UserError, listed

ADE_FOLDERS = {"train": "training", "val": "validation"}


class Layout(NamedTuple):
    """Where images and masks lie."""

    masks: str  # folder beside ``images``
    folders: dict[str, str]  # of each part
    names: str  # file with the names of the classes
    first: int  # value of class 0 in a mask


def read_masks(
    root: Path, data: config.Data, faults: list[str], progress: bool
) -> tuple[dict[str, tuple[Split, list[MaskTarget]]], dict[int, str]]:
    """Reads all parts that there are.

    Returns:
        The images and their targets by part, and the classes' names by their values in the masks.

    Raises:
        UserError: There is no such layout.
    """
    layout = mask_layout(root)
    if layout is None:
        expected = f"{root}/images/train and {root}/masks/train, or ADE20K's images/training and annotations/training"
        raise UserError(f"data.root: '{root}' has no images with masks to train on; expected {expected}")
    splits, looks = {}, {}

    def look(path: str, max_pixels: int) -> MaskTarget:
        content = read(path)
        values = mask_values(content, max_pixels)
        return MaskTarget(path, values.shape, layout.first, short_digest(content), np.unique(values).tolist())

    for part, folder in layout.folders.items():
        top, below = root / "images" / folder, root / layout.masks / folder
        if top.is_dir() and below.is_dir():
            names = images_under(str(top))
            masks = {name: f"{os.path.splitext(name)[0]}.png" for name in names}
            gone = set(absent(below, list(masks.values())))
            bare = [f"'{name}' has no mask; expected '{below}/{mask}'" for name, mask in masks.items() if mask in gone]
            unusable(data, faults, top, counted(len(names), "image"), bare)
            names = [name for name in names if masks[name] not in gone]
            splits[part] = split_of(root, top, names), split_of(root, below, [masks[name] for name in names])
            looks[part] = look_at(splits[part][1], look, data, progress)
    classes = _classes(root, layout, looks["train"], faults)
    found = {}
    for part, (images, masks) in splits.items():
        sizes = look_at(images, image_size, data, progress)
        why = [_fault(target, size, len(classes)) for target, size in zip(looks[part], sizes, strict=True)]
        wrong = [f"'{path}': {fault}" for path, fault in zip(masks.items, why, strict=True) if fault]
        unusable(data, faults, root / layout.masks, counted(len(masks), "mask"), wrong)
        good = [i for i, fault in enumerate(why) if not fault]
        found[part] = images.take(good), [looks[part][i] for i in good]
    return found, dict(enumerate(classes, start=layout.first))


def mask_layout(root: Path) -> Layout | None:
    """Returns how a folder of masks is laid out; None: it is none."""
    layouts = (
        Layout("annotations", ADE_FOLDERS, "objectInfo150.txt", 1),
        Layout("masks", {part: part for part in PARTS}, "classes.txt", 0),
    )
    for layout in layouts:
        if all((root / kind / layout.folders["train"]).is_dir() for kind in ("images", layout.masks)):
            return layout
    return None


def _classes(root: Path, layout: Layout, train: list[MaskTarget | BadImage], faults: list[str]) -> list[str]:
    """Returns the names of the classes; numbers if there are none."""
    path = root / layout.names
    if path.exists():
        found = lines(path)
        if layout.first:  # ADE20K's: a row of columns each, below their heads
            found = [line.split("\t")[-1].strip() for line in found if line[0].isdigit()]
    else:
        values = [v for look in train if not isinstance(look, BadImage) for v in look.values if v != IGNORED]
        found = [str(number) for number in range(layout.first, max(values, default=0) + 1)]
    if not 2 <= len(found) <= IGNORED:
        where = path if path.exists() else root / layout.masks
        faults.append(f"data.root: '{where}' has {len(found)} as number of classes; expected 2 to {IGNORED}")
    return found


def _fault(target: MaskTarget | BadImage, size: tuple[int, int] | BadImage, classes: int) -> str | None:
    """Returns what is wrong with the mask of an image of a size."""
    if isinstance(target, BadImage):
        return target.reason
    if not isinstance(size, BadImage) and target.size != size:
        return f"{pixels(target.size)} pixels, its image {pixels(size)}"
    if odd := [value for value in target.values if value >= target.first + classes and value != IGNORED]:
        expected = f"expected {target.first} to {target.first + classes - 1}, and {IGNORED} for what is ignored"
        return f"values without a class: {listed(map(str, odd))}; {expected}"
    return None
