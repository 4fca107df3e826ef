"""Read boxes and outlines in COCO's format, https://cocodataset.org/#format-data.

The layout is ROOT/annotations/PART.json with the images in ROOT/PART, or COCO's own file names.
"""

import json
import os
import reprlib
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from idmm.config.parsing import dotted, expected
from idmm.data.folder import PARTS, same_place
from idmm.data.formats import BadImage
from idmm.data.images import read
from idmm.data.split import Split, class_of, split_of
from idmm.dense.faults import as_text, misfits, unusable
from idmm.dense.targets import BoxTarget, Size
from idmm.errors import UserError, checked
from idmm.progress import log
from idmm.text import capped, counted, listed

SLACK = 1.0  # pixels by which a box may cross the edge, from rounding. It is clipped
# coordinates of outlines at most, in long sides of the image. pycocotools needs memory for far ones
FAR = 2.0
LONGEST_RUN = 2**32  # of an RLE (pixels), in pycocotools


# ---------------------------------------------------------------------- the format
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # true and "3" are no numbers
Identifier = int | str  # 3 and "3" are the same
Length = Annotated[float, Field(gt=0)]


@dataclass(config=_STRICT)
class _Image:
    id: Identifier
    file_name: str
    height: Length
    width: Length

    @property
    def size(self) -> Size:
        return int(self.height), int(self.width)


@dataclass(config=_STRICT)
class _Category:
    id: int
    name: Annotated[str, Field(pattern=r"\S")]


@dataclass(config=_STRICT)
class _Annotation:
    image_id: Identifier
    category_id: Identifier
    bbox: Annotated[list[float], Field(min_length=4, max_length=4)]
    segmentation: Any = None
    iscrowd: Literal[0, 1, "0", "1", None] = 0
    id: Any = None


@dataclass
class _File:
    images: Annotated[list[_Image], Field(min_length=1)]
    annotations: list[_Annotation]
    categories: Annotated[list[_Category], Field(min_length=1)]


@dataclass
class _RunLengths:
    size: Size
    counts: str | list[Annotated[int, Field(ge=0)]]


_FIELDS = {
    name
    for kind in (_Image, _Category, _Annotation, _File, _RunLengths)
    for name in kind.__annotations__
}
_FILE, _RUN_LENGTHS = map(TypeAdapter, (_File, _RunLengths))
_POLYGONS = TypeAdapter(list[list[float]], config=_STRICT)


def _fault(error: dict, prefix: tuple = ()) -> str:
    """Return a fault that pydantic found, with its place."""
    place = [*prefix, *(part for part in error["loc"] if isinstance(part, int) or part in _FIELDS)]
    if error["type"] in ("missing", "json_invalid"):
        return f"{dotted(place)} {error['msg']}".lower().strip()
    return f"{dotted(place) or 'it'} is {reprlib.repr(error['input'])}, expected {expected(error)}"


# ---------------------------------------------------------------------- files
def read_coco(root: Path, faults: list[str]) -> tuple[dict[str, Split], dict[int, str]]:
    """Read all parts.

    Returns:
        Images with targets by part, and class names by category number, in the order of these.

    Raises:
        UserError: There is no such layout, or a file is not in COCO's format.
    """
    files = {}
    for part in PARTS:
        for name in (part, f"instances_{part}2017"):  # the last one counts
            path = root / "annotations" / f"{name}.json"
            if path.exists():
                files[part] = path
    if "train" not in files:
        layout = f"{root}/annotations/train.json with the images in {root}/train, or instances_train2017.json"
        raise UserError(
            f"data.root: '{root}' has no annotations of objects to train on, expected {layout}"
        )
    opened = dict(
        zip(files, checked(*(partial(_opened, path) for path in files.values())), strict=True)
    )
    names = {
        part: {row.id: class_of(row.name) for row in file.categories}
        for part, file in opened.items()
    }
    classes = dict(sorted(names["train"].items()))
    for part, others in names.items():
        if odd := [
            f"{number} '{name}'" for number, name in others.items() if classes.get(number) != name
        ]:
            train = f"'{files['train']}'"
            faults.append(
                f"data.root: '{files[part]}' has categories that are not in {train}: {listed(odd)}"
            )
    labels = {str(number): label for label, number in enumerate(classes)}
    parts = {part: _part(root, files[part], file, labels, faults) for part, file in opened.items()}
    return parts, classes


def _opened(path: Path) -> _File:
    """Return the content of a file. UserError: it is not in COCO's format."""
    try:
        content = read(path)
        file = _FILE.validate_json(content.decode(json.detect_encoding(content)))
    except BadImage as error:
        raise UserError(f"data.root: '{path}' cannot be read ({error.reason})") from None
    except ValidationError as error:
        lines = {}
        for fault in error.errors(include_url=False):
            lines.setdefault(fault["loc"][:3], f"  {_fault(fault)}")  # the first one of a union
        raise UserError(
            f"data.root: '{path}' is not in COCO's format:", *capped([*lines.values()])
        ) from None
    except UnicodeError as error:
        raise UserError(f"data.root: '{path}' is no text in UTF-8 ({error})") from None
    for what, rows in (("images", file.images), ("categories", file.categories)):
        if repeated := [
            number for number, count in Counter(str(row.id) for row in rows).items() if count > 1
        ]:
            raise UserError(
                f"data.root: '{path}' has several {what} with the id {listed(repeated)}"
            )
    return file


def _part(root: Path, path: Path, file: _File, labels: dict[str, int], faults: list[str]) -> Split:
    """Return the images that exist in the size of the annotation file, and their objects."""
    images = {str(image.id): image for image in file.images}
    objects = _objects(path, file, images, labels, faults)
    folder = root / path.stem.removeprefix("instances_")
    places = {}
    reasons = []
    for key, image in images.items():
        try:
            places[key] = _place(image.file_name, folder)
        except ValueError as error:
            reasons.append(f"image '{image.file_name}' {error}")
    for place, count in Counter(places.values()).items():
        if count > 1:
            reasons.append(f"image '{place}' is listed {count} times")
    split = split_of(root, [f"{folder.name}/{place}" for place in places.values()])
    found = misfits(path, split, [images[key].size for key in places])
    for key, fault in zip(places, found, strict=True):
        if fault is not None:
            reasons.append(f"image '{images[key].file_name}': {fault}")
    faults += unusable(path, counted(len(images), "image"), reasons)

    outlines = [
        segment is not None
        for rows in objects.values()
        for _, _, segment, crowd in rows
        if not crowd
    ]
    outlined = bool(outlines) and all(outlines)
    if any(outlines) and not outlined:
        count = f"{outlines.count(False)} of {counted(len(outlines), 'object')}"
        log.warning("data.root: '%s': %s have no outline, so only boxes are used", path, count)
    targets = []
    for key in places:
        image = images[key]
        boxes, numbers, segments, crowd = ([row[n] for row in objects[key]] for n in range(4))
        boxes = np.array(boxes, dtype=np.float32).reshape(-1, 4)
        crowd = np.array(crowd, dtype=bool)
        segments = segments if outlined else None
        targets.append(
            BoxTarget(boxes, np.array(numbers, np.int64), segments, crowd, image.size, image.id)
        )
    return replace(split, targets=targets)


def _objects(
    path: Path, file: _File, images: dict[str, _Image], labels: dict[str, int], faults: list[str]
) -> dict[str, list[tuple]]:
    """Return box, label, outline and whether it is a crowd of each object, by the id of its
    image."""
    objects = defaultdict(list)
    reasons = []
    without_area = 0
    for row in file.annotations:
        key = str(row.image_id)
        category = str(row.category_id)
        if key not in images or category not in labels:
            reasons.append(
                f"annotation {row.id}: image_id {key} or category_id {category} is not in the list"
            )
            continue
        image = images[key]
        try:
            box = _box(row.bbox, image.size)
            outline = _outline(row.segmentation, image.size)
        except ValueError as error:
            reasons.append(f"annotation {row.id} of '{image.file_name}': {error}")
            continue
        if not (box[2:] > box[:2]).all():  # COCO itself has some
            without_area += 1
            continue
        crowd = row.iscrowd in (1, "1")
        if crowd and outline is None:
            outline = [box[[0, 1, 2, 1, 2, 3, 0, 3]]]
        objects[key].append((box, labels[category], outline, crowd))
    if without_area:
        log.warning(
            "data.root: '%s': left out %s without area", path, counted(without_area, "object")
        )
    faults += unusable(path, counted(len(file.annotations), "annotation"), reasons)
    return objects


def _place(name: str, folder: Path) -> str:
    """Return an image's path below its folder. ValueError: it has none. A link to a file is in the
    link's folder."""
    path = os.path.join(folder, name)  # an absolute name stays
    if not os.path.exists(path):
        path = os.path.join(folder, name.replace("\\", "/"))  # as Windows has it
    if not os.path.exists(path):
        raise ValueError(f"does not exist (in '{folder}')")
    place = os.path.relpath(same_place(path), os.path.realpath(folder))
    if place.split(os.sep)[0] == os.pardir:
        raise ValueError(f"lies outside of '{folder}', expected a path below it")
    return place


# ---------------------------------------------------------------------- objects
def _box(bbox: list[float], size: Size) -> np.ndarray:
    """Return COCO's [x, y, width, height] as x1, y1, x2, y2, clipped. ValueError: it is not in an
    image of ``size``."""
    x, y, w, h = bbox
    corners = np.array([x, y, x + w, y + h])
    box = corners.clip(0, [*size[::-1]] * 2)
    if min(w, h) < 0 or np.abs(box - corners).max() > SLACK:
        where = f"bbox {bbox} is not in the image ({as_text(size)} pixels)"
        raise ValueError(f"{where}, expected [x, y, width, height], of which none is negative")
    return box


def _outline(segment: Any, size: Size) -> list[np.ndarray] | dict | None:
    """Return COCO's outline: polygons as float32, or RLE as pycocotools itself writes it.

    pycocotools does not check its input and would read memory that is not its own.

    Raises:
        ValueError: It cannot be drawn into an image of ``size``.
    """
    from pycocotools import mask as coco  # of the extra 'dense'

    if segment in (None, [], [[]]):
        return None
    try:
        kind = _POLYGONS if isinstance(segment, list) else _RUN_LENGTHS
        outline = kind.validate_python(segment)
    except ValidationError as error:
        raise ValueError(
            f"{_fault(error.errors()[-1], ('segmentation',))} (polygons or RLE)"
        ) from None
    if isinstance(outline, list):
        for polygon in outline:
            far = max(map(abs, polygon), default=0) > FAR * max(size)
            if far or len(polygon) < 6 or len(polygon) % 2:
                expected = f"x and y of three points or more in the image ({as_text(size)} pixels)"
                raise ValueError(
                    f"segmentation has the polygon {reprlib.repr(polygon)}, expected {expected}"
                )
        return [np.array(polygon, dtype=np.float32) for polygon in outline]
    if isinstance(outline.counts, str):
        counts = _unpacked(outline.counts)
    else:
        counts = outline.counts
    pixels = size[0] * size[1]
    if outline.size != size or sum(counts) != pixels or min(counts) < 0 or pixels >= LONGEST_RUN:
        has = f"its RLE of {as_text(outline.size)} pixels has runs of {sum(counts)}"
        raise ValueError(f"{has}, expected {as_text(size)}, which is {pixels}")
    return coco.frPyObjects({"size": [*size], "counts": counts}, *size)


def _unpacked(text: str) -> list[int]:
    """Return the runs of COCO's compressed RLE: 5 bits per letter, from the third on differences to
    the last but one.

    ValueError: It is none.
    """
    runs = []
    value = 0
    shift = 0
    for letter in text:
        digit = ord(letter) - 48
        if not 0 <= digit < 64 or shift > 30:
            break
        value |= (digit & 31) << shift
        shift += 5
        if digit & 32:  # the next letter belongs to this run
            continue
        if digit & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = 0
        shift = 0
    else:
        if runs and not shift:
            return runs
    raise ValueError(f"its RLE is broken or cut off ({reprlib.repr(text)})")
