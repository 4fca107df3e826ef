"""Read masks: ROOT/images/PART with ROOT/masks/PART, or ADE20K's layout
(http://sceneparsing.csail.mit.edu)."""

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from idmm.data.folder import PARTS, images_under
from idmm.data.formats import BadImage
from idmm.data.images import read
from idmm.data.official import absent
from idmm.data.split import Split, class_of, split_of
from idmm.dense.faults import misfits, read_each, unusable
from idmm.dense.targets import IGNORED, MaskTarget, read_mask
from idmm.errors import UserError
from idmm.text import counted, listed


class Layout(NamedTuple):
    """Names of a layout's folders and files."""

    masks: str  # folder next to ``images``
    folders: dict[str, str]  # by part
    names: str  # file with the class names
    first: int  # mask value of class 0


LAYOUTS = (
    # ADE20K
    Layout("annotations", {"train": "training", "val": "validation"}, "objectInfo150.txt", 1),
    Layout("masks", {part: part for part in PARTS}, "classes.txt", 0),
)


def read_masks(root: Path, faults: list[str]) -> tuple[dict[str, Split], dict[int, str]]:
    """Read all parts.

    Returns:
        Images with targets by part, and class names by mask value.

    Raises:
        UserError: There is no such layout.
    """
    for layout in LAYOUTS:
        if all(
            (root / kind / layout.folders["train"]).is_dir() for kind in ("images", layout.masks)
        ):
            break
    else:
        expected = f"{root}/images/train and {root}/masks/train, or ADE20K's images/training and annotations/training"
        raise UserError(
            f"data.root: '{root}' has no images with masks to train on, expected {expected}"
        )

    def target_of(path: str) -> MaskTarget:
        values, digest = read_mask(path)
        return MaskTarget(path, values.shape, layout.first, digest, np.unique(values).tolist())

    splits = {}
    for part, folder in layout.folders.items():
        image_folder = root / "images" / folder
        mask_folder = root / layout.masks / folder
        if image_folder.is_dir() and mask_folder.is_dir():
            pairs = {
                name: f"{os.path.splitext(name)[0]}.png" for name in images_under(str(image_folder))
            }
            missing = set(absent(mask_folder, list(pairs.values())))
            bare = [name for name, mask in pairs.items() if mask in missing]
            reasons = [
                f"'{name}' has no mask, expected '{mask_folder}/{pairs[name]}'" for name in bare
            ]
            faults += unusable(image_folder, counted(len(pairs), "image"), reasons)
            names = [name for name in pairs if name not in bare]
            masks = split_of(root, [f"{layout.masks}/{folder}/{pairs[name]}" for name in names])
            images = split_of(root, [f"images/{folder}/{name}" for name in names])
            splits[part] = images, masks, read_each(masks, target_of)
    classes = _classes(root, layout, splits["train"][2], faults)
    parts = {}
    for part, (images, masks, targets) in splits.items():
        # None: a BadImage
        found = misfits(root, images, [getattr(target, "size", None) for target in targets])
        wrong = []
        for path, target, misfit in zip(masks.items, targets, found, strict=True):
            if fault := misfit or _fault(target, len(classes)):
                wrong.append(f"'{path}': {fault}")
        faults += unusable(root / layout.masks, counted(len(masks), "mask"), wrong)
        parts[part] = replace(images, targets=targets)
    return parts, dict(enumerate(classes, start=layout.first))


def _classes(
    root: Path, layout: Layout, train: list[MaskTarget | BadImage], faults: list[str]
) -> list[str]:
    """Return the class names, or numbers if there is no file of names."""
    path = root / layout.names
    if not path.exists():
        values = {layout.first}.union(
            *(target.values for target in train if isinstance(target, MaskTarget))
        )
        numbers = range(layout.first, max(values - {IGNORED}) + 1)
        if gaps := sorted({*numbers} - values):
            line = f"has the values {listed(map(str, sorted(values)))}, but not {listed(map(str, gaps))}"
            advice = f"Number the classes without gaps, or name all of them in '{path}'"
            faults.append(f"data.root: '{root / layout.masks}' {line}. {advice}")
        return [str(number) for number in numbers]
    try:
        lines = read(path).decode("utf-8-sig", "surrogateescape").rstrip().splitlines()
    except BadImage as error:
        raise UserError(f"data.root: '{path}' cannot be read ({error.reason})") from None
    if layout.first:  # ADE20K's file is a table with a header
        lines = [line.split("\t")[-1] for line in lines if line[:1].isdigit()]
    classes = [class_of(line) for line in lines]
    if not all(classes):
        faults.append(
            f"data.root: '{path}' has an empty line, expected the name of class {classes.index('')}"
        )
    if not 2 <= len(classes) <= IGNORED:
        faults.append(
            f"data.root: '{path}' has {len(classes)} as number of classes, expected 2 to {IGNORED}"
        )
    return classes


def _fault(target: MaskTarget | BadImage, classes: int) -> str | None:
    """Return the fault of a mask by itself."""
    if isinstance(target, BadImage):
        return target.reason
    if odd := [
        value for value in target.values if value >= target.first + classes and value != IGNORED
    ]:
        expected = f"expected {target.first} to {target.first + classes - 1}, and {IGNORED} for ignored pixels"
        return f"values without a class: {listed(map(str, odd))}, {expected}"
    return None
