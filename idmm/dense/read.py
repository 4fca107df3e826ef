"""Read the images of the ``data`` section with their boxes or masks: check, hold out, draw a subset.

COCO's format: ROOT/annotations/PART.json with the images in ROOT/PART, or COCO's own file names
(https://cocodataset.org/#format-data). Masks: ROOT/images/PART with ROOT/masks/PART, or ADE20K's layout
(http://sceneparsing.csail.mit.edu).
"""

import contextlib
import io
import os
import posixpath
import reprlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from idmm import config
from idmm.data.folder import PARTS, images_under, root_folder
from idmm.data.formats import BadImage
from idmm.data.images import digest, image_size, read
from idmm.data.listing import draw_subset, hold_out, narrowed
from idmm.data.official import absent
from idmm.data.parallel import parallel_map
from idmm.data.split import LabelsMissing, Split, arranged, counted, split_of
from idmm.dense.targets import IGNORED, BoxTarget, DenseListing, MaskTarget, mask_values, rasterised
from idmm.errors import UserError, capped, checked, listed, reason
from idmm.progress import log

SLACK = 1.0  # pixels by which a box may cross the edge, from rounding. It is clipped
FAR = 2.0  # coordinates of outlines at most, in long sides of the image. pycocotools needs memory for far ones


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


def read_images(task: str, data: config.Data) -> DenseListing:
    """Return the images of a folder with their boxes (``task`` detect) or masks (segment), by the ``data`` section.

    ``data.exclude`` removes images, ``data.val_fraction`` holds some out and ``data.subset`` draws some.

    Raises:
        UserError: All faults of the files, or there is no training image.
        LabelsMissing: There is nothing to evaluate on.
    """
    root, faults = root_folder(data), []
    parts, classes = (read_coco if task == "detect" else read_masks)(root, faults)
    if faults:
        raise UserError(*faults)
    # as for class labels, with all images in one class
    labelled = {p: replace(split, labels=np.zeros(len(split), int), classes=["image"]) for p, split in parts.items()}
    listing = hold_out(narrowed(arranged(labelled), data, labelled=True), data.val_fraction)
    names = list(classes.values())
    splits = {part: replace(split, classes=names, labels=None) for part, split in listing.parts.items()}
    listing = DenseListing(**{**vars(listing), **splits}, categories=list(classes))
    if data.subset is not None:
        listing = replace(listing, train=draw_subset(listing.train, data.subset))
    if listing.test is None:
        raise LabelsMissing(
            f"data.root: '{root}' has no part 'val' or 'test' to evaluate on. "
            "Add one, or hold out a share of train with --data.val_fraction, e.g. 0.2"
        )
    return listing


# ---------------------------------------------------------------------- both
def unusable(source: Path, total: str, reasons: Sequence[str]) -> list[str]:
    """Return the faults of a file or folder: the objects or images (of ``total``) that cannot be used, by reason."""
    line = f"data.root: '{source}': {len(reasons)} of {total} cannot be used:"
    return [line, *capped([f"  {reason}" for reason in reasons])] if reasons else []


def read_each(split: Split, read_one: Callable) -> list:
    """Return ``read_one(path)`` of each file, or a BadImage if it cannot be used."""
    return list(parallel_map(lambda i: read_one(split.items[i]), len(split), split.place, "reading sizes"))


def as_text(size: tuple[int, int]) -> str:
    """Return a (height, width) as width x height."""
    return f"{size[1]} x {size[0]}"


# ---------------------------------------------------------------------- boxes
def read_coco(root: Path, faults: list[str]) -> tuple[dict[str, Split], dict[int, str]]:
    """Read all parts.

    Returns:
        Images with targets by part, and class names by category number, in the order of these.

    Raises:
        UserError: There is no such layout, or a file is not in COCO's format.
    """
    names = [(part, name) for part in PARTS for name in (part, f"instances_{part}2017")]  # the last one counts
    files = {part: path for part, name in names if (path := root / "annotations" / f"{name}.json").exists()}
    if "train" not in files:
        expected = f"{root}/annotations/train.json with the images in {root}/train, or instances_train2017.json"
        raise UserError(f"data.root: '{root}' has no annotations of objects to train on, expected {expected}")
    opened = dict(zip(files, checked(*(partial(_opened, path) for path in files.values())), strict=True))
    names = {part: {number: row["name"] for number, row in coco.cats.items()} for part, coco in opened.items()}
    classes = dict(sorted(names["train"].items()))
    for part, others in names.items():
        if odd := [f"{number} '{name}'" for number, name in others.items() if classes.get(number) != name]:
            train = f"'{files['train']}'"
            faults.append(f"data.root: '{files[part]}' has categories that are not in {train}: {listed(odd)}")
    labels = {number: label for label, number in enumerate(classes)}
    parts = {part: _part(root, files[part], coco, labels, faults) for part, coco in opened.items()}
    return parts, classes


def _opened(path: Path):
    """Return a file as pycocotools' COCO. UserError: it is not in this format."""
    from pycocotools.coco import COCO  # of the extra 'dense'

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints
            coco = COCO(str(path))
        images, _ = coco.dataset["images"], coco.dataset["annotations"]
        [row["name"].strip() for row in coco.cats.values()]
        [(row["height"] > 0, row["width"] > 0, row["file_name"].strip()) for row in images]
        sorted(coco.cats)  # an error: numbers and texts
        if not coco.cats or not images:
            raise ValueError("there are no images or no categories")
        if len(images) > min(len(coco.imgs), len({row["file_name"] for row in images})):
            raise ValueError("two images have the same id or file_name")
        return coco
    except OSError as error:
        raise UserError(f"data.root: '{path}' cannot be read ({reason(error)})") from None
    except (ValueError, RecursionError, AssertionError, AttributeError, LookupError, TypeError) as error:
        what = f"is not in COCO's format ({type(error).__name__}: {error})"
        raise UserError(f"data.root: '{path}' {what}") from None


def _part(root: Path, path: Path, coco, labels: dict[int, int], faults: list[str]) -> Split:
    """Return the images that exist in the size of the annotation file, and their objects."""
    objects, reasons, without_area = defaultdict(list), [], 0
    for row in coco.dataset["annotations"]:
        image, crowd = coco.imgs.get(row["image_id"]), row.get("iscrowd") == 1
        if image is None or row["category_id"] not in labels:
            reasons.append(f"annotation {row['id']}: its image or its category is not in the list")
            continue
        try:
            box, outline = _box(row["bbox"], _size(image)), _outline(row.get("segmentation"), _size(image))
        except Exception:  # of any type: pycocotools decodes RLE
            what = f"bbox {reprlib.repr(row.get('bbox'))} or its segmentation is not in the image"
            expected = f"({as_text(_size(image))} pixels), expected [x, y, width, height], and polygons or RLE"
            reasons.append(f"annotation {row['id']} of '{image['file_name']}': {what} {expected}")
            continue
        if not (box[2:] > box[:2]).all():  # COCO itself has some
            without_area += 1
            continue
        if crowd and outline is None:
            outline = [box[[0, 1, 2, 1, 2, 3, 0, 3]]]
        objects[row["image_id"]].append((box, labels[row["category_id"]], outline, crowd))
    if without_area:
        log.warning("data.root: '%s': left out %s without area", path, counted(without_area, "object"))
    faults += unusable(path, counted(len(coco.dataset["annotations"]), "annotation"), reasons)

    folder, images = root / path.stem.removeprefix("instances_"), coco.dataset["images"]
    missing = set(absent(folder, [image["file_name"] for image in images]))
    reasons = [f"image '{name}' does not exist (in '{folder}')" for name in sorted(missing)]
    images = [image for image in images if image["file_name"] not in missing]
    split = split_of(root, [posixpath.normpath(f"{folder.name}/{image['file_name']}") for image in images])
    for image, size in zip(images, read_each(split, image_size), strict=True):
        if not isinstance(size, BadImage) and size != _size(image):  # bad images are reported when they are loaded
            reasons.append(f"image '{image['file_name']}' is {as_text(size)}, in this file {as_text(_size(image))}")
    faults += unusable(path, counted(len(coco.imgs), "image"), reasons)

    outlines = [segment is not None for rows in objects.values() for _, _, segment, crowd in rows if not crowd]
    outlined = bool(outlines) and all(outlines)
    if any(outlines) and not outlined:
        count = f"{outlines.count(False)} of {counted(len(outlines), 'object')}"
        log.warning("data.root: '%s': %s have no outline, so only boxes are used", path, count)
    targets = []
    for image in images:
        boxes, numbers, segments, crowd = ([row[n] for row in objects[image["id"]]] for n in range(4))
        boxes, crowd = np.array(boxes, dtype=np.float32).reshape(-1, 4), np.array(crowd, dtype=bool)
        segments = segments if outlined else None
        targets.append(BoxTarget(boxes, np.array(numbers, np.int64), segments, crowd, _size(image), image["id"]))
    return replace(split, targets=targets)


def _box(bbox: list, size: tuple[int, int]) -> np.ndarray:
    """Return COCO's [x, y, width, height] as x1, y1, x2, y2, clipped. An error: it is not in an image of ``size``."""
    x, y, w, h = map(float, bbox)
    corners = np.array([x, y, x + w, y + h])
    box = corners.clip(0, [size[1], size[0], size[1], size[0]])
    if not (np.abs(box - corners) <= SLACK).all():
        raise ValueError
    return box


def _outline(segment: list | dict | None, size: tuple[int, int]) -> list | dict | None:
    """Return COCO's outline, polygons as float32. An error: it cannot be drawn into an image of ``size``."""
    if not segment:
        return None
    if isinstance(segment, list):
        polygons = [np.array(polygon, dtype=np.float32) for polygon in segment]
        drawable = all(len(p.reshape(-1, 2)) >= 3 and np.abs(p).max() <= FAR * max(size) for p in polygons)
    else:
        complete = isinstance(segment["counts"], str) or sum(segment["counts"]) == size[0] * size[1]
        drawable = tuple(segment["size"]) == size and complete and rasterised(segment, size, size).shape == size
    if not drawable:
        raise ValueError
    return segment if isinstance(segment, dict) else polygons


def _size(image: dict) -> tuple[int, int]:
    """Return height and width (pixels) of a row of ``images``."""
    return image["height"], image["width"]


# ---------------------------------------------------------------------- masks
def read_masks(root: Path, faults: list[str]) -> tuple[dict[str, Split], dict[int, str]]:
    """Read all parts.

    Returns:
        Images with targets by part, and class names by mask value.

    Raises:
        UserError: There is no such layout.
    """
    for layout in LAYOUTS:
        if all((root / kind / layout.folders["train"]).is_dir() for kind in ("images", layout.masks)):
            break
    else:
        expected = f"{root}/images/train and {root}/masks/train, or ADE20K's images/training and annotations/training"
        raise UserError(f"data.root: '{root}' has no images with masks to train on, expected {expected}")

    def read_mask(path: str) -> MaskTarget:
        content = read(path)
        values = mask_values(content)
        return MaskTarget(path, values.shape, layout.first, digest(content)[:8].hex(), np.unique(values).tolist())

    splits = {}
    for part, folder in layout.folders.items():
        image_folder, mask_folder = root / "images" / folder, root / layout.masks / folder
        if image_folder.is_dir() and mask_folder.is_dir():
            pairs = {name: f"{os.path.splitext(name)[0]}.png" for name in images_under(str(image_folder))}
            missing = set(absent(mask_folder, list(pairs.values())))
            bare = [name for name, mask in pairs.items() if mask in missing]
            reasons = [f"'{name}' has no mask, expected '{mask_folder}/{pairs[name]}'" for name in bare]
            faults += unusable(image_folder, counted(len(pairs), "image"), reasons)
            names = [name for name in pairs if name not in bare]
            masks = split_of(root, [f"{layout.masks}/{folder}/{pairs[name]}" for name in names])
            images = split_of(root, [f"images/{folder}/{name}" for name in names])
            splits[part] = images, masks, read_each(masks, read_mask)
    classes = _classes(root, layout, splits["train"][2], faults)
    parts = {}
    for part, (images, masks, targets) in splits.items():
        sizes = read_each(images, image_size)
        reasons = [_fault(target, size, len(classes)) for target, size in zip(targets, sizes, strict=True)]
        wrong = [f"'{path}': {fault}" for path, fault in zip(masks.items, reasons, strict=True) if fault]
        faults += unusable(root / layout.masks, counted(len(masks), "mask"), wrong)
        parts[part] = replace(images, targets=targets)
    return parts, dict(enumerate(classes, start=layout.first))


def _classes(root: Path, layout: Layout, train: list[MaskTarget | BadImage], faults: list[str]) -> list[str]:
    """Return the class names, or numbers if there is no file of names."""
    path = root / layout.names
    if path.exists():
        classes = path.read_text(encoding="utf-8-sig", errors="surrogateescape").rstrip().splitlines()
        if layout.first:  # ADE20K's file is a table with a header
            classes = [line.split("\t")[-1] for line in classes if line[:1].isdigit()]
        classes = [name.strip() for name in classes]
        if not all(classes):
            faults.append(f"data.root: '{path}' has an empty line, expected the name of class {classes.index('')}")
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
