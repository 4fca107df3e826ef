"""COCO's format: ROOT/annotations/PART.json over the images of ROOT/PART, or COCO's own names of files.

Source: https://cocodataset.org/#format-data
"""

import contextlib
import io
import logging
import re
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from idmm import config
from idmm.config.dense import DENSE_LIBRARIES
from idmm.data.formats import BadImage
from idmm.data.readers.folder import PARTS
from idmm.data.readers.layout import absent
from idmm.data.split import Split, counted
from idmm.dense.checks import image_size, look_at, pixels, split_of, unusable
from idmm.dense.targets import BoxTarget, rasterised
from idmm.errors import UserError, listed, needed, reason

if TYPE_CHECKING:
    from pycocotools.coco import COCO

log = logging.getLogger(__name__)

SLACK = 1.0  # by which a box may reach over the edge, as rounding makes it (pixels); it is cut off
FAR = 2.0  # times the image's long side: where an outline may be, at most; drawing what is further takes its memory


class _Object(NamedTuple):
    """A row of ``annotations``."""

    box: np.ndarray  # x1, y1, x2, y2
    label: int
    segment: list | dict | None
    crowd: bool


def read_coco(
    root: Path, data: config.Data, faults: list[str], progress: bool
) -> tuple[dict[str, tuple[Split, list[BoxTarget]]], dict[int, str]]:
    """Reads all parts that there are.

    Returns:
        The images and their targets by part, and the classes' names by their numbers, in the order of these.

    Raises:
        UserError: There is no such layout, or a file is not in COCO's format.
    """
    files = annotation_files(root)
    if "train" not in files:
        expected = f"{root}/annotations/train.json over the images of {root}/train, or instances_train2017.json"
        raise UserError(f"data.root: '{root}' has no annotations of objects to train on; expected {expected}")
    needed(f"data.root: '{root}'", DENSE_LIBRARIES["detect"], "dense")
    opened = {part: _opened(path, faults) for part, path in files.items()}
    if faults:
        raise UserError(*faults)
    named = {part: {number: row["name"] for number, row in file.cats.items()} for part, file in opened.items()}
    classes = dict(sorted(named["train"].items()))
    for part, others in named.items():
        if odd := [f"{number} '{name}'" for number, name in others.items() if classes.get(number) != name]:
            of = f"'{files['train']}'"
            faults.append(f"data.root: '{files[part]}' has categories that are not those of {of}: {listed(odd)}")
    labels = {number: label for label, number in enumerate(classes)}
    read = {part: _part(root, files[part], file, labels, data, faults, progress) for part, file in opened.items()}
    return read, classes


def annotation_files(root: Path) -> dict[str, Path]:
    """Returns the file of each part that has one: ``annotations/train.json`` or ``instances_train2017.json``.

    Raises:
        UserError: A part has several.
    """
    files = {}
    for part in PARTS:
        found = sorted((root / "annotations").glob(f"*{part}*.json"))
        named = [path for path in found if re.fullmatch(rf"(instances_)?{part}\d*", path.stem)]
        if len(named) > 1:
            both = listed(f"'{path}'" for path in named)
            raise UserError(f"data.root: '{root}' has several files of {part}: {both}; expected one")
        files |= {part: named[0]} if named else {}
    return files


def _opened(path: Path, faults: list[str]) -> "COCO | None":
    """Returns the annotations of a file; None with a fault if it is not in COCO's format."""
    from pycocotools.coco import COCO  # of the extra 'dense'

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints
            found = COCO(str(path))
        images, _ = found.dataset["images"], found.dataset["annotations"]
        if not found.cats or not images or len(found.imgs) < len(images):
            raise ValueError("there are no images or no categories, or the id of an image is there twice")
        [row["name"].strip() for row in found.cats.values()]
        for row in images:
            if not (row["height"] > 0 and row["width"] > 0 and row["file_name"].strip()):
                raise ValueError(f"image {row['id']}: expected height and width in pixels")
        return found
    except OSError as error:
        faults.append(f"data.root: '{path}' cannot be read ({reason(error)})")
    except (ValueError, RecursionError, AssertionError, AttributeError, LookupError, TypeError) as error:
        faults.append(f"data.root: '{path}' is not in COCO's format ({type(error).__name__}: {error})")


def _part(
    root: Path, path: Path, file: "COCO", labels: dict[int, int], data: config.Data, faults: list[str], progress: bool
) -> tuple[Split, list[BoxTarget]]:
    """Returns the images that are there and of the size that the annotations' file has, and their objects."""
    rows, folder = file.dataset["annotations"], root / path.stem.removeprefix("instances_")
    objects, wrong = {number: [] for number in file.imgs}, []
    for row in rows:
        image = file.imgs.get(row["image_id"])
        if image is None or row["category_id"] not in labels:
            wrong.append(f"annotation {row['id']}: its image or its category is not in the list")
        elif (box := _box(row.get("bbox"), _size(image))) is None:
            expected = f"expected [x, y, width, height] in the image ({pixels(_size(image))} pixels)"
            bbox = reprlib.repr(row.get("bbox"))
            wrong.append(f"annotation {row['id']} of '{image['file_name']}': bbox {bbox}; {expected}")
        elif not _drawable(segment := row.get("segmentation") or None, _size(image)):
            expected = f"expected polygons in the image ({pixels(_size(image))} pixels), or RLE of its size"
            wrong.append(f"annotation {row['id']} of '{image['file_name']}': segmentation: {expected}")
        else:
            if isinstance(segment, list):
                segment = [np.array(polygon, dtype=np.float32) for polygon in segment]
            objects[image["id"]].append(_Object(box, labels[row["category_id"]], segment, row.get("iscrowd") == 1))
    unusable(data, faults, path, counted(len(rows), "annotation"), wrong)

    images = file.dataset["images"]
    gone = set(absent(folder, [image["file_name"] for image in images]))
    wrong = [f"image '{name}' is not there (under '{folder}')" for name in sorted(gone)]
    images = [image for image in images if image["file_name"] not in gone]
    split, good = split_of(root, folder, [image["file_name"] for image in images]), []
    for i, (image, size) in enumerate(zip(images, look_at(split, image_size, data, progress), strict=True)):
        if isinstance(size, BadImage) or size == _size(image):  # a bad one is a fault when images are loaded
            good.append(i)
        else:
            wrong.append(f"image '{image['file_name']}' is {pixels(size)}, by this file {pixels(_size(image))}")
    unusable(data, faults, path, counted(len(file.imgs), "image"), wrong)

    each = [bool(one.segment) for of in objects.values() for one in of if not one.crowd]
    outlined = bool(each) and all(each)
    if any(each) and not outlined:
        what = f"{each.count(False)} of {counted(len(each), 'object')} have no outline"
        log.warning("data.root: '%s': %s, so only boxes are used", path, what)
    return split.take(good), [_target(images[i], objects[images[i]["id"]], outlined) for i in good]


def _box(bbox: object, size: tuple[int, int]) -> np.ndarray | None:
    """Returns COCO's [x, y, width, height] as x1, y1, x2, y2; None if it has no area in an image of that size."""
    try:
        x, y, w, h = map(float, bbox)
    except (OverflowError, TypeError, ValueError):
        return None
    corners = np.array([x, y, x + w, y + h])
    box = corners.clip(0, [size[1], size[0], size[1], size[0]])
    return box if (box[2:] > box[:2]).all() and (np.abs(box - corners) <= SLACK).all() else None


def _drawable(segment: list | dict | None, size: tuple[int, int]) -> bool:
    """Returns whether an outline of an image of that size is one of COCO's: polygons or RLE; or none."""
    try:
        if segment is None or isinstance(segment, list):
            outline = [np.array(polygon, dtype=float).reshape(-1, 2) for polygon in segment or ()]
            return all(len(points) >= 3 and np.abs(points).max() <= FAR * max(size) for points in outline)
        counts = segment["counts"]
        right = tuple(segment["size"]) == size and (isinstance(counts, str) or sum(counts) == size[0] * size[1])
        return right and rasterised(segment, size, size).shape == size
    except Exception:  # pycocotools raises several types on damaged RLE
        return False


def _target(image: dict, objects: list[_Object], outlined: bool) -> BoxTarget:
    # the outline of a crowd that has none is its box
    segments = [one.segment or [one.box[[0, 1, 2, 1, 2, 3, 0, 3]].astype(np.float32)] for one in objects]
    return BoxTarget(
        boxes=np.array([one.box for one in objects], dtype=np.float32).reshape(-1, 4),
        labels=np.array([one.label for one in objects], dtype=np.int64),
        segments=segments if outlined else None,
        crowd=np.array([one.crowd for one in objects], dtype=bool),
        size=_size(image),
        image_id=image["id"],
    )


def _size(image: dict) -> tuple[int, int]:
    """Returns height and width (pixels) of a row of ``images``."""
    return image["height"], image["width"]
