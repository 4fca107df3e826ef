"""Images with a mask each: ROOT/images/PART with ROOT/masks/PART, or ADE20K's layout.

Source of the latter: http://sceneparsing.csail.mit.edu
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from idmm import config
from idmm.data.folder import PARTS, images_under
from idmm.data.formats import BadImage
from idmm.data.images import image_size, read
from idmm.data.official import absent, lines
from idmm.data.split import Split, counted
from idmm.dense.checks import as_text, read_each, report_unusable, split_of
from idmm.dense.targets import IGNORED, MaskTarget, mask_values, short_digest
from idmm.errors import UserError, listed


class Layout(NamedTuple):
    """Names of a layout's folders and files."""

    masks: str  # folder next to ``images``
    folders: dict[str, str]  # by part
    names: str  # file with the class names
    first: int  # mask value of class 0


LAYOUTS = (
    Layout("annotations", {"train": "training", "val": "validation"}, "objectInfo150.txt", 1),  # ADE20K
    Layout("masks", {part: part for part in PARTS}, "classes.txt", 0),
)


def read_masks(
    root: Path, data: config.Data, faults: list[str], progress: bool
) -> tuple[dict[str, tuple[Split, list[MaskTarget]]], dict[int, str]]:
    """Read all parts.

    Returns:
        Images and targets by part, and class names by mask value.

    Raises:
        UserError: There is no such layout.
    """
    for layout in LAYOUTS:
        if all((root / kind / layout.folders["train"]).is_dir() for kind in ("images", layout.masks)):
            break
    else:
        expected = f"{root}/images/train and {root}/masks/train, or ADE20K's images/training and annotations/training"
        raise UserError(f"data.root: '{root}' has no images with masks to train on, expected {expected}")

    def read_mask(path: str, max_pixels: int) -> MaskTarget:
        content = read(path)
        values = mask_values(content, max_pixels)
        return MaskTarget(path, values.shape, layout.first, short_digest(content), np.unique(values).tolist())

    splits = {}
    for part, name in layout.folders.items():
        image_folder, mask_folder = root / "images" / name, root / layout.masks / name
        if image_folder.is_dir() and mask_folder.is_dir():
            pairs = {name: f"{os.path.splitext(name)[0]}.png" for name in images_under(str(image_folder))}
            missing = set(absent(mask_folder, list(pairs.values())))
            bare = [name for name, mask in pairs.items() if mask in missing]
            reasons = [f"'{name}' has no mask, expected '{mask_folder}/{pairs[name]}'" for name in bare]
            report_unusable(data, faults, image_folder, counted(len(pairs), "image"), reasons)
            names = [name for name in pairs if name not in bare]
            masks = split_of(root, mask_folder, [pairs[name] for name in names])
            splits[part] = split_of(root, image_folder, names), masks, read_each(masks, read_mask, data, progress)
    classes = _classes(root, layout, splits["train"][2], faults)
    parts = {}
    for part, (images, masks, targets) in splits.items():
        sizes = read_each(images, image_size, data, progress)
        reasons = [_fault(target, size, len(classes)) for target, size in zip(targets, sizes, strict=True)]
        wrong = [f"'{path}': {fault}" for path, fault in zip(masks.items, reasons, strict=True) if fault]
        report_unusable(data, faults, root / layout.masks, counted(len(masks), "mask"), wrong)
        usable = [i for i, fault in enumerate(reasons) if not fault]
        parts[part] = images.take(usable), [targets[i] for i in usable]
    return parts, dict(enumerate(classes, start=layout.first))


def _classes(root: Path, layout: Layout, train: list[MaskTarget | BadImage], faults: list[str]) -> list[str]:
    """Return the class names, or numbers if there is no file of names."""
    path = root / layout.names
    if path.exists():
        classes = lines(path)
        if layout.first:  # ADE20K's file is a table with a header
            classes = [line.split("\t")[-1].strip() for line in classes if line[0].isdigit()]
    else:
        path = root / layout.masks
        values = [v for target in train if isinstance(target, MaskTarget) for v in target.values if v != IGNORED]
        classes = [str(number) for number in range(layout.first, max(values, default=0) + 1)]
    if not 2 <= len(classes) <= IGNORED:
        faults.append(f"data.root: '{path}' has {len(classes)} as number of classes, expected 2 to {IGNORED}")
    return classes


def _fault(target: MaskTarget | BadImage, size: tuple[int, int] | BadImage, classes: int) -> str | None:
    """Return the fault of a mask, given the size of its image."""
    if isinstance(target, BadImage):
        return target.reason
    if not isinstance(size, BadImage) and target.size != size:
        return f"{as_text(target.size)} pixels, its image {as_text(size)}"
    if odd := [value for value in target.values if value >= target.first + classes and value != IGNORED]:
        expected = f"expected {target.first} to {target.first + classes - 1}, and {IGNORED} for ignored pixels"
        return f"values without a class: {listed(map(str, odd))}, {expected}"
    return None
