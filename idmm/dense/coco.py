"""COCO's format: ROOT/annotations/PART.json with the images in ROOT/PART, or COCO's own file names.

Source: https://cocodataset.org/#format-data
"""

import contextlib
import io
import logging
import reprlib
from collections import defaultdict
from pathlib import Path

import numpy as np

from idmm import config
from idmm.config.dense import DENSE_LIBRARIES
from idmm.data.folder import PARTS
from idmm.data.formats import BadImage
from idmm.data.images import image_size
from idmm.data.official import absent
from idmm.data.split import Split, counted
from idmm.dense.checks import as_text, read_each, report_unusable, split_of
from idmm.dense.targets import BoxTarget, rasterised
from idmm.errors import UserError, listed, needed, reason

log = logging.getLogger(__name__)

SLACK = 1.0  # pixels by which a box may cross the edge, from rounding. It is clipped
FAR = 2.0  # coordinates of outlines at most, in long sides of the image. pycocotools needs memory for far ones


def read_coco(
    root: Path, data: config.Data, faults: list[str], progress: bool
) -> tuple[dict[str, tuple[Split, list[BoxTarget]]], dict[int, str]]:
    """Read all parts.

    Returns:
        Images and targets by part, and class names by category number, in the order of these.

    Raises:
        UserError: There is no such layout, or a file is not in COCO's format.
    """
    names = [(part, name) for part in PARTS for name in (part, f"instances_{part}2017")]  # the last one counts
    files = {part: path for part, name in names if (path := root / "annotations" / f"{name}.json").exists()}
    if "train" not in files:
        expected = f"{root}/annotations/train.json with the images in {root}/train, or instances_train2017.json"
        raise UserError(f"data.root: '{root}' has no annotations of objects to train on, expected {expected}")
    needed(f"data.root: '{root}'", DENSE_LIBRARIES["detect"], "dense")
    opened = {part: _opened(path, faults) for part, path in files.items()}
    if faults:
        raise UserError(*faults)
    names = {part: {number: row["name"] for number, row in coco.cats.items()} for part, coco in opened.items()}
    classes = dict(sorted(names["train"].items()))
    for part, others in names.items():
        if odd := [f"{number} '{name}'" for number, name in others.items() if classes.get(number) != name]:
            train = f"'{files['train']}'"
            faults.append(f"data.root: '{files[part]}' has categories that are not in {train}: {listed(odd)}")
    labels = {number: label for label, number in enumerate(classes)}
    parts = {part: _part(root, files[part], coco, labels, data, faults, progress) for part, coco in opened.items()}
    return parts, classes


def _opened(path: Path, faults: list[str]):
    """Return a file as pycocotools' COCO, or None with a fault if it is not in this format."""
    from pycocotools.coco import COCO  # of the extra 'dense'

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints
            coco = COCO(str(path))
        images, _ = coco.dataset["images"], coco.dataset["annotations"]
        if not coco.cats or not images or len(coco.imgs) < len(images):
            raise ValueError("there are no images or no categories, or two images have one id")
        [row["name"].strip() for row in coco.cats.values()]
        for row in images:
            if not (row["height"] > 0 and row["width"] > 0 and row["file_name"].strip()):
                raise ValueError(f"image {row['id']}: expected height and width in pixels")
        return coco
    except OSError as error:
        faults.append(f"data.root: '{path}' cannot be read ({reason(error)})")
    except (ValueError, RecursionError, AssertionError, AttributeError, LookupError, TypeError) as error:
        faults.append(f"data.root: '{path}' is not in COCO's format ({type(error).__name__}: {error})")


def _part(
    root: Path, path: Path, coco, labels: dict[int, int], data: config.Data, faults: list[str], progress: bool
) -> tuple[Split, list[BoxTarget]]:
    """Return the images that exist in the size of the annotation file, and their objects."""
    objects, reasons = defaultdict(list), []
    for row in coco.dataset["annotations"]:
        try:
            objects[row["image_id"]].append(_object(row, coco.imgs.get(row["image_id"]), labels))
        except ValueError as error:
            reasons.append(f"annotation {row['id']}{error}")
    report_unusable(data, faults, path, counted(len(coco.dataset["annotations"]), "annotation"), reasons)

    folder, images = root / path.stem.removeprefix("instances_"), coco.dataset["images"]
    missing = set(absent(folder, [image["file_name"] for image in images]))
    reasons = [f"image '{name}' does not exist (in '{folder}')" for name in sorted(missing)]
    images = [image for image in images if image["file_name"] not in missing]
    split, usable = split_of(root, folder, [image["file_name"] for image in images]), []
    for i, (image, size) in enumerate(zip(images, read_each(split, image_size, data, progress), strict=True)):
        if isinstance(size, BadImage) or size == _size(image):  # bad images are reported when they are loaded
            usable.append(i)
        else:
            reasons.append(f"image '{image['file_name']}' is {as_text(size)}, in this file {as_text(_size(image))}")
    report_unusable(data, faults, path, counted(len(coco.imgs), "image"), reasons)

    outlines = [segment is not None for rows in objects.values() for _, _, segment, crowd in rows if not crowd]
    outlined = bool(outlines) and all(outlines)
    if any(outlines) and not outlined:
        count = f"{outlines.count(False)} of {counted(len(outlines), 'object')}"
        log.warning("data.root: '%s': %s have no outline, so only boxes are used", path, count)
    targets = []
    for image in (images[i] for i in usable):
        boxes, numbers, segments, crowd = zip(*objects[image["id"]], strict=True) if objects[image["id"]] else ([],) * 4
        boxes, crowd = np.array(boxes, dtype=np.float32).reshape(-1, 4), np.array(crowd, dtype=bool)
        segments = list(segments) if outlined else None
        targets.append(BoxTarget(boxes, np.array(numbers, np.int64), segments, crowd, _size(image), image["id"]))
    return split.take(usable), targets


def _object(row: dict, image: dict | None, labels: dict[int, int]) -> tuple[np.ndarray, int, list | dict | None, bool]:
    """Return box, label, outline (None: there is none) and crowd of a row of ``annotations``.

    Raises:
        ValueError: It cannot be used. The text follows its number.
    """
    if image is None or row["category_id"] not in labels:
        raise ValueError(": its image or its category is not in the list")
    size, segment, crowd = _size(image), row.get("segmentation") or None, row.get("iscrowd") == 1
    inside, box = f"in the image ({as_text(size)} pixels)", _box(row.get("bbox"), size)
    if box is None:
        expected = f"expected [x, y, width, height] {inside}"
        raise ValueError(f" of '{image['file_name']}': bbox {reprlib.repr(row.get('bbox'))}, {expected}")
    if not _drawable(segment, size):
        raise ValueError(f" of '{image['file_name']}': segmentation: expected polygons {inside}, or RLE of its size")
    if crowd and segment is None:
        segment = [box[[0, 1, 2, 1, 2, 3, 0, 3]]]
    if isinstance(segment, list):
        segment = [np.array(polygon, dtype=np.float32) for polygon in segment]
    return box, labels[row["category_id"]], segment, crowd


def _box(bbox: object, size: tuple[int, int]) -> np.ndarray | None:
    """Return COCO's [x, y, width, height] as x1, y1, x2, y2, or None if it has no area in an image of ``size``."""
    try:
        x, y, w, h = map(float, bbox)
    except (OverflowError, TypeError, ValueError):
        return None
    corners = np.array([x, y, x + w, y + h])
    box = corners.clip(0, [size[1], size[0], size[1], size[0]])
    return box if (box[2:] > box[:2]).all() and (np.abs(box - corners) <= SLACK).all() else None


def _drawable(segment: list | dict | None, size: tuple[int, int]) -> bool:
    """Return whether an outline is missing or one of COCO's for an image of ``size``: polygons or RLE."""
    try:
        if segment is None or isinstance(segment, list):
            polygons = [np.array(polygon, dtype=float).reshape(-1, 2) for polygon in segment or ()]
            return all(len(points) >= 3 and np.abs(points).max() <= FAR * max(size) for points in polygons)
        complete = isinstance(segment["counts"], str) or sum(segment["counts"]) == size[0] * size[1]
        return tuple(segment["size"]) == size and complete and rasterised(segment, size, size).shape == size
    except Exception:  # pycocotools raises several types on damaged RLE
        return False


def _size(image: dict) -> tuple[int, int]:
    """Return height and width (pixels) of a row of ``images``."""
    return image["height"], image["width"]
