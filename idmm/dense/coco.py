"""Read boxes and outlines in COCO's format, https://cocodataset.org/#format-data.

The layout is ROOT/annotations/PART.json with the images in ROOT/PART, or COCO's own file names.
"""

import itertools
import json
import os
import reprlib
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from idmm.config.parsing import dotted, expected
from idmm.data.folder import PARTS, same_place
from idmm.data.formats import BadImage
from idmm.data.images import read
from idmm.data.split import Split, class_of, split_of
from idmm.dense.faults import as_text, misfits, under, unusable
from idmm.dense.targets import BoxTarget, Floats, Segment, Size
from idmm.errors import Fault, UserError, checked
from idmm.progress import log
from idmm.text import counted, listed

SLACK = 1.0  # pixels by which a box may cross the edge, from rounding. It is clipped
FAR = 2.0  # coordinates of outlines at most, in long sides. pycocotools needs memory for far ones
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

    @property
    def classes(self) -> dict[int, str]:
        """Names by the number of the category."""
        return {row.id: class_of(row.name) for row in self.categories}


@dataclass
class _RunLengths:
    size: Size
    counts: str | list[Annotated[int, Field(ge=0)]]


_FIELDS = set().union(
    *(kind.__annotations__ for kind in (_Image, _Category, _Annotation, _File, _RunLengths))
)
_FILE = TypeAdapter(_File)
_RUN_LENGTHS = TypeAdapter(_RunLengths)
_POLYGONS = TypeAdapter(list[list[float]], config=_STRICT)


def _reason(error: ErrorDetails, *prefix: str) -> str:
    """Return what pydantic found, with its place."""
    parts = [part for part in error["loc"] if isinstance(part, int) or part in _FIELDS]
    key = dotted((*prefix, *parts))
    if error["type"] in ("missing", "json_invalid"):
        return f"{key} {error['msg']}".lower().strip()
    return f"{key or 'it'} is {reprlib.repr(error['input'])}, expected {expected(error)}"


# ---------------------------------------------------------------------- files
def read_coco(root: Path, faults: list[Fault]) -> tuple[dict[str, Split], dict[int, str]]:
    """Read all parts. Faults of their content are added to ``faults``.

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
        raise UserError.of(
            "data.root",
            f"'{root}' has no annotations of objects to train on, "
            f"expected {root}/annotations/train.json with the images in {root}/train, "
            "or instances_train2017.json",
        )
    opened = checked(*(partial(_opened, path) for path in files.values()))
    contents: dict[str, _File] = dict(zip(files, opened, strict=True))
    classes = dict(sorted(contents["train"].classes.items()))
    labels = {str(number): label for label, number in enumerate(classes)}
    for part, content in contents.items():
        others = content.classes.items() - classes.items()
        if others:
            names = [f"{one[0]} '{one[1]}'" for one in content.classes.items() if one in others]
            faults.append(
                Fault(
                    "data.root",
                    f"'{files[part]}' has categories that are not in '{files['train']}': "
                    f"{listed(names)}",
                )
            )
    parts = {}
    for part, content in contents.items():
        parts[part] = _part(root, files[part], content, labels, faults)
    return parts, classes


def _opened(path: Path) -> _File:
    """Return the content of a file. UserError: it is not in COCO's format."""
    try:
        content = read(path)
        file = _FILE.validate_json(content.decode(json.detect_encoding(content)))
    except BadImage as error:
        raise UserError.of("data.root", f"'{path}' cannot be read ({error.reason})") from None
    except ValidationError as error:
        reasons: dict[tuple[int | str, ...], str] = {}
        for details in error.errors(include_url=False):
            reasons.setdefault(details["loc"][:3], _reason(details))  # the first one of a union
        raise UserError(*under(f"'{path}' is not in COCO's format:", [*reasons.values()])) from None
    except UnicodeError as error:
        raise UserError.of("data.root", f"'{path}' is no text in UTF-8 ({error})") from None
    ids = {
        "images": Counter(str(image.id) for image in file.images),
        "categories": Counter(str(category.id) for category in file.categories),
    }
    for kind, counts in ids.items():
        repeated = listed(one for one, count in counts.items() if count > 1)
        if repeated:
            raise UserError.of("data.root", f"'{path}' has several {kind} with the id {repeated}")
    return file


class _Object(NamedTuple):
    """An object of an image."""

    box: Floats  # x1, y1, x2, y2 (pixels)
    label: int
    outline: Segment | None
    crowd: bool


def _part(
    root: Path,
    path: Path,
    file: _File,
    labels: dict[str, int],
    faults: list[Fault],
) -> Split:
    """Return the images that exist in the size of the annotation file, and their objects."""
    images = {str(image.id): image for image in file.images}
    objects = _objects(path, file, images, labels, faults)
    folder = root / path.stem.removeprefix("instances_")
    names = {}  # by the image's id
    reasons = []
    for key, image in images.items():
        try:
            names[key] = _name_in(folder, image.file_name)
        except ValueError as error:
            reasons.append(f"image '{image.file_name}' {error}")
    for name, count in Counter(names.values()).items():
        if count > 1:
            reasons.append(f"image '{name}' is listed {count} times")
    split = split_of(root, [f"{folder.name}/{name}" for name in names.values()])
    sizes = [images[key].size for key in names]
    for key, misfit in zip(names, misfits(path, split, sizes), strict=True):
        if misfit is not None:
            reasons.append(f"image '{images[key].file_name}': {misfit}")
    faults += unusable(path, counted(len(images), "image"), reasons)
    outlined = _have_outlines(path, objects)
    targets = [_target(images[key], objects[key], outlined) for key in names]
    return replace(split, targets=targets)


def _have_outlines(path: Path, objects: dict[str, list[_Object]]) -> bool:
    """Return whether all objects have outlines. Warns if only some have."""
    all_objects = itertools.chain.from_iterable(objects.values())
    outlines = [one.outline for one in all_objects if not one.crowd]
    without = outlines.count(None)
    if 0 < without < len(outlines):
        log.warning(
            f"data.root: '{path}': {without} of {counted(len(outlines), 'object')} have no "
            "outline, so only boxes are used"
        )
    return bool(outlines) and not without


def _target(
    image: _Image,
    objects: list[_Object],
    outlined: bool,
) -> BoxTarget:
    segments = None
    if outlined:
        segments = [one.outline for one in objects if one.outline is not None]
    return BoxTarget(
        boxes=np.array([one.box for one in objects], dtype=np.float32).reshape(-1, 4),
        labels=np.array([one.label for one in objects], dtype=np.int64),
        segments=segments,
        crowd=np.array([one.crowd for one in objects], dtype=bool),
        size=image.size,
        image_id=image.id,
    )


def _objects(
    path: Path,
    file: _File,
    images: dict[str, _Image],
    labels: dict[str, int],
    faults: list[Fault],
) -> dict[str, list[_Object]]:
    """Return the objects that can be used, by the id of their image."""
    objects: dict[str, list[_Object]] = defaultdict(list)
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
        objects[key].append(_Object(box, labels[category], outline, crowd))
    if without_area:
        log.warning(f"data.root: '{path}': left out {counted(without_area, 'object')} without area")
    faults += unusable(path, counted(len(file.annotations), "annotation"), reasons)
    return objects


def _name_in(folder: Path, name: str) -> str:
    """Return an image's path below its folder. A link to a file is in the link's folder.

    ValueError: It has none.
    """
    path = os.path.join(folder, name)  # an absolute name stays
    if not os.path.exists(path):
        path = os.path.join(folder, name.replace("\\", "/"))  # as Windows has it
    if not os.path.exists(path):
        raise ValueError(f"does not exist (in '{folder}')")
    below = os.path.relpath(same_place(path), os.path.realpath(folder))
    if below.split(os.sep)[0] == os.pardir:
        raise ValueError(f"lies outside of '{folder}', expected a path below it")
    return below


# ---------------------------------------------------------------------- objects
def _box(bbox: list[float], size: Size) -> NDArray[np.float64]:
    """Return COCO's [x, y, width, height] as x1, y1, x2, y2, clipped.

    ValueError: It is not in an image of ``size``.
    """
    x, y, w, h = bbox
    corners = np.array([x, y, x + w, y + h])
    box = corners.clip(0, [*size[::-1]] * 2)
    if min(w, h) < 0 or np.abs(box - corners).max() > SLACK:
        raise ValueError(
            f"bbox {bbox} is not in the image ({as_text(size)} pixels), "
            "expected [x, y, width, height], of which none is negative"
        )
    return box


def _outline(segment: Any, size: Size) -> Segment | None:
    """Return COCO's outline: polygons as float32, or RLE as pycocotools itself writes it.

    pycocotools does not check its input and would read memory that is not its own.

    Raises:
        ValueError: It cannot be drawn into an image of ``size``.
    """
    if segment in (None, [], [[]]):
        return None
    try:
        if isinstance(segment, list):
            return _polygons(_POLYGONS.validate_python(segment), size)
        return _run_lengths(_RUN_LENGTHS.validate_python(segment), size)
    except ValidationError as error:
        reason = _reason(error.errors()[-1], "segmentation")
        raise ValueError(f"{reason} (polygons or RLE)") from None


def _polygons(polygons: list[list[float]], size: Size) -> Segment:
    for polygon in polygons:
        far = max(map(abs, polygon), default=0) > FAR * max(size)
        if far or len(polygon) < 6 or len(polygon) % 2:
            raise ValueError(
                f"segmentation has the polygon {reprlib.repr(polygon)}, "
                f"expected x and y of three points or more in the image ({as_text(size)} pixels)"
            )
    return [np.array(polygon, dtype=np.float32) for polygon in polygons]


def _run_lengths(rle: _RunLengths, size: Size) -> Segment:
    from pycocotools import mask as coco  # of the extra 'dense'

    counts = rle.counts
    if isinstance(counts, str):
        counts = _unpacked(counts)
    pixels = size[0] * size[1]
    if rle.size != size or sum(counts) != pixels or min(counts) < 0 or pixels >= LONGEST_RUN:
        raise ValueError(
            f"its RLE of {as_text(rle.size)} pixels has runs of {sum(counts)}, "
            f"expected {as_text(size)}, which is {pixels}"
        )
    segment: Segment = coco.frPyObjects({"size": [*size], "counts": counts}, *size)
    return segment


def _unpacked(text: str) -> list[int]:
    """Return the runs of COCO's compressed RLE: 5 bits per letter.

    From the third on they are differences to the last but one.

    Raises:
        ValueError: It is none.
    """
    runs: list[int] = []
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
        if len(runs) > 2:
            value += runs[-2]
        runs.append(value)
        value = 0
        shift = 0
    else:
        if runs and not shift:
            return runs
    raise ValueError(f"its RLE is broken or cut off ({reprlib.repr(text)})")
