"""Read masks: ROOT/images/PART with ROOT/masks/PART, or ADE20K's layout.

ADE20K: http://sceneparsing.csail.mit.edu
"""

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
from idmm.dense.targets import IGNORED, MaskTarget, Size, read_mask
from idmm.errors import Fault, UserError
from idmm.text import counted, listed


class Layout(NamedTuple):
    """Names of a layout's folders and files."""

    masks: str  # folder next to ``images``
    folders: dict[str, str]  # by part
    names: str  # file with the class names
    first: int  # mask value of class 0

    def has(self, root: Path, folder: str) -> bool:
        """Return whether there are a folder of images and one of masks for a part."""
        return all((root / kind / folder).is_dir() for kind in ("images", self.masks))


LAYOUTS = (
    # ADE20K
    Layout("annotations", {"train": "training", "val": "validation"}, "objectInfo150.txt", 1),
    Layout("masks", {part: part for part in PARTS}, "classes.txt", 0),
)


class Part(NamedTuple):
    """The images of a part that have a mask."""

    images: Split
    masks: Split
    targets: list[MaskTarget | BadImage]


def read_masks(root: Path, faults: list[Fault]) -> tuple[dict[str, Split], dict[int, str]]:
    """Read all parts. Faults of their content are added to ``faults``.

    Returns:
        Images with targets by part, and class names by mask value.

    Raises:
        UserError: There is no such layout.
    """
    layout = _layout(root)
    parts = {}
    for name, folder in layout.folders.items():
        if layout.has(root, folder):
            parts[name] = _part(root, layout, folder, faults)
    classes = _classes(root, layout, parts["train"].targets, faults)
    splits = {}
    for name, part in parts.items():
        sizes: list[Size | None] = []
        for target in part.targets:
            size = None if isinstance(target, BadImage) else target.size
            sizes.append(size)
        reasons = []
        for path, target, misfit in zip(
            part.masks.items, part.targets, misfits(root, part.images, sizes), strict=True
        ):
            reason = misfit or _reason(target, len(classes))
            if reason:
                reasons.append(f"'{path}': {reason}")
        faults += unusable(root / layout.masks, counted(len(part.masks), "mask"), reasons)
        splits[name] = replace(part.images, targets=part.targets)
    return splits, dict(enumerate(classes, start=layout.first))


def _layout(root: Path) -> Layout:
    for layout in LAYOUTS:
        if layout.has(root, layout.folders["train"]):
            return layout
    raise UserError.of(
        "data.root",
        f"'{root}' has no images with masks to train on, "
        f"expected {root}/images/train and {root}/masks/train, "
        "or ADE20K's images/training and annotations/training",
    )


def _part(
    root: Path,
    layout: Layout,
    folder: str,
    faults: list[Fault],
) -> Part:
    """Read a part's masks. Images without one are added to ``faults``."""
    image_folder = root / "images" / folder
    mask_folder = root / layout.masks / folder
    masks = {name: f"{os.path.splitext(name)[0]}.png" for name in images_under(str(image_folder))}
    missing = set(absent(mask_folder, list(masks.values())))
    names = []
    reasons = []
    for name, mask in masks.items():
        if mask in missing:
            reasons.append(f"'{name}' has no mask, expected '{mask_folder}/{mask}'")
        else:
            names.append(name)
    faults += unusable(image_folder, counted(len(masks), "image"), reasons)
    split = split_of(root, [f"{layout.masks}/{folder}/{masks[name]}" for name in names])

    def target_of(path: str) -> MaskTarget:
        values, digest = read_mask(path)
        height, width = values.shape
        present = np.unique(values).tolist()
        return MaskTarget(path, (height, width), layout.first, digest, present)

    images = split_of(root, [f"images/{folder}/{name}" for name in names])
    return Part(images, split, read_each(split, target_of))


def _classes(
    root: Path,
    layout: Layout,
    train: list[MaskTarget | BadImage],
    faults: list[Fault],
) -> list[str]:
    """Return the class names, or numbers if there is no file of names."""
    path = root / layout.names
    if not path.exists():
        values = {layout.first}
        for target in train:
            if isinstance(target, MaskTarget):
                values.update(target.values)
        numbers = range(layout.first, max(values - {IGNORED}) + 1)
        gaps = sorted({*numbers} - values)
        if gaps:
            present = listed(map(str, sorted(values)))
            absent_values = listed(map(str, gaps))
            fault = f"'{root / layout.masks}' has the values {present}, but not {absent_values}"
            hint = f"Number the classes without gaps, or name all of them in '{path}'"
            faults.append(Fault("data.root", fault, hint))
        return [str(number) for number in numbers]
    try:
        lines = read(path).decode("utf-8-sig", "surrogateescape").rstrip().splitlines()
    except BadImage as error:
        raise UserError.of("data.root", f"'{path}' cannot be read ({error.reason})") from None
    if layout.first:  # ADE20K's file is a table with a header
        lines = [line.split("\t")[-1] for line in filter(_is_row, lines)]
    classes = [class_of(line) for line in lines]
    if not all(classes):
        fault = f"'{path}' has an empty line, expected the name of class {classes.index('')}"
        faults.append(Fault("data.root", fault))
    if not 2 <= len(classes) <= IGNORED:
        fault = f"'{path}' has {len(classes)} as number of classes, expected 2 to {IGNORED}"
        faults.append(Fault("data.root", fault))
    return classes


def _is_row(line: str) -> bool:
    return line[:1].isdigit()


def _reason(target: MaskTarget | BadImage, classes: int) -> str | None:
    """Return what is wrong with a mask by itself."""
    if isinstance(target, BadImage):
        return target.reason
    last = target.first + classes - 1
    odd = [str(value) for value in target.values if last < value != IGNORED]
    if not odd:
        return None
    return (
        f"values without a class: {listed(odd)}, "
        f"expected {target.first} to {last}, and {IGNORED} for ignored pixels"
    )
