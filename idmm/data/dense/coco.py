"""COCO's format: ROOT/annotations/PART.json over the images of ROOT/PART, COCO's own names of files, or Roboflow's.

Source: https://cocodataset.org/#format-data
"""

import contextlib
import io
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from idmm import config
from idmm.config.dense import DENSE_LIBRARIES
from idmm.data.dense.faults import Faults
from idmm.data.dense.looks import image_size, look_at
from idmm.data.dense.targets import BoxTarget, rasterised
from idmm.data.formats import BadImage
from idmm.data.readers.folder import PARTS
from idmm.data.readers.layout import absent
from idmm.data.split import Split, counted
from idmm.errors import UserError, listed, needed, reason

if TYPE_CHECKING:
    from pycocotools.coco import COCO

log = logging.getLogger(__name__)

SLACK = 1.0  # by which a box may reach over the edge, as rounding makes it (pixels); it is cut off
FAR = 2.0  # times the image's long side: where an outline may be, at most; drawing what is further takes its memory
_LEAVES = re.compile(r"^/|(^|/)\.\.(/|$)|[\0-\x1f\ud800-\udfff]")  # names of no file below a folder
BESIDE = "_annotations.coco.json"  # as Roboflow writes it, in the folder of a part's images


class _Object(NamedTuple):
    """A row of ``annotations``."""

    box: list[float]  # x1, y1, x2, y2
    label: int
    segment: list | dict | None
    crowd: bool


def read_coco(root: Path, data: config.Data, faults: Faults, progress: bool) -> tuple[dict[str, tuple], dict[int, str]]:
    """Reads all parts that there are.

    Returns:
        The images and their targets by part, and the classes' names by their numbers, in the order of these.

    Raises:
        UserError: There is no such layout, or a file that is none of COCO's.
    """
    files = annotation_files(root)
    if "train" not in files:
        wanted = (
            f"{root}/annotations/train.json over the images of {root}/train, or COCO's own instances_train2017.json"
        )
        raise UserError(f"data.root: '{root}' has no annotations of objects to train on; wanted {wanted}")
    needed(f"data.root: '{root}'", DENSE_LIBRARIES["detect"], "dense")
    found = {part: _opened(path, faults) for part, path in files.items()}
    faults.refuse()
    named = {part: {row["id"]: row["name"] for row in file.dataset["categories"]} for part, file in found.items()}
    classes = dict(sorted(named["train"].items()))
    for part, others in named.items():
        if odd := [f"{number} '{name}'" for number, name in others.items() if classes.get(number) != name]:
            of = f"'{files['train']}'"
            faults.add(f"data.root: '{files[part]}' has categories that are not those of {of}: {listed(odd)}")
    numbers = {number: label for label, number in enumerate(classes)}
    objects = {part: _objects(files[part], file, numbers, faults) for part, file in found.items()}
    outlined = {part: _outlined(part, of) for part, of in objects.items()}
    read = {}
    for part, file in found.items():
        split, kept = _split(root, files[part], part, file.dataset["images"], data, faults, progress)
        read[part] = split, [_target(image, objects[part][image["id"]], outlined[part]) for image in kept]
    return read, classes


def annotation_files(root: Path) -> dict[str, Path]:
    """Returns the file of each part that has one: ``annotations/train.json`` or ``instances_train2017.json`` there, or
    ``train/_annotations.coco.json`` (val may be called valid).

    Raises:
        UserError: A part has several.
    """
    folder, found = root / "annotations", {}
    files = sorted(folder.glob("*.json"))
    for part in PARTS:
        named = [file for file in files if re.fullmatch(rf"(instances_)?{part}\d*", file.stem)]
        beside = [root / name / BESIDE for name in (part, "valid")[: 1 + (part == "val")]]
        named = named or [file for file in beside if file.is_file()]
        if len(named) > 1:
            both = listed(f"'{file.relative_to(root)}'" for file in named)
            raise UserError(f"data.root: '{root}' has several files of {part}: {both}; wanted one")
        found |= {part: named[0]} if named else {}
    return found


def _opened(path: Path, faults: Faults) -> "COCO | None":
    """Returns the annotations of a file; None with a fault if it is not in COCO's format."""
    from pycocotools.coco import COCO  # of the extra 'dense'

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints
            found = COCO(str(path))
        _check(found)
        return found
    except OSError as error:
        return faults.add(f"data.root: '{path}' cannot be read ({reason(error)})")
    except (ValueError, RecursionError, AssertionError, AttributeError, LookupError, TypeError) as error:
        return faults.add(f"data.root: '{path}' is not in COCO's format ({type(error).__name__}: {_short(error)})")


def _check(found: "COCO") -> None:
    """Raises an error if images or categories are not as the format has them."""
    images, categories = found.dataset["images"], found.dataset["categories"]
    for kind, rows, known, name in (
        ("images", images, found.imgs, "file_name"),
        ("categories", categories, found.cats, "name"),
    ):
        if not rows or len(known) < len(rows) or len({row[name] for row in rows}) < len(rows):
            raise ValueError(f"{kind}: there are none, or an id or {name} is there twice")
    for row in categories:
        if not isinstance(row["id"], int) or not isinstance(row["name"], str) or not row["name"]:
            raise ValueError(f"category {row}: wanted an id, which is a whole number, and a name")
    for row in images:
        if not all(isinstance(row[side], int) and 0 < row[side] < 2**31 for side in ("height", "width")):
            raise ValueError(f"image {row['id']}: wanted height and width in pixels")
        if _LEAVES.search(row["file_name"]):
            raise ValueError(f"image {row['id']}: wanted a file_name that is a path below the folder of images")
    len(found.dataset["annotations"])


def _objects(path: Path, found: "COCO", labels: dict[int, int], faults: Faults) -> dict[Any, list[_Object]]:
    """Returns the objects by the number of their image."""
    objects, wrong, rows = {number: [] for number in found.imgs}, [], found.dataset["annotations"]
    for row in rows:
        image = found.imgs.get(row["image_id"])
        if why := _fault(row, image, labels):
            of = "" if image is None else f" of '{image['file_name']}'"
            wrong.append(f"annotation {_short(row['id'])}{of}: {why}")
        else:
            objects[image["id"]].append(_object(row, image, labels))
    faults.unusable(str(path), counted(len(rows), "annotation"), wrong)
    return objects


def _split(
    root: Path, path: Path, part: str, images: list[dict], data: config.Data, faults: Faults, progress: bool
) -> tuple[Split, list[dict]]:
    """Returns the images that are there and of the size that the annotations' file has."""
    name, names = path.stem.removeprefix("instances_"), [image["file_name"] for image in images]
    bases = [root / name, root / "images" / name, root / part, root / "images" / part, root / "images"]
    there = [(len(absent(base, names)), base) for base in [*bases, path.parent, root] if base.is_dir()]
    base = min(there, key=lambda found: found[0])[1]
    gone = set(absent(base, names))
    kept = [image for image in images if image["file_name"] not in gone]
    paths = [os.path.join(base, *image["file_name"].split("/")) for image in kept]
    below = [os.path.relpath(path, root).replace(os.sep, "/") for path in paths]
    split = Split(paths, below, None, None)
    wrong = [f"image '{name}' is not there (under '{base}')" for name in names if name in gone]
    good = []
    for i, (image, size) in enumerate(zip(kept, look_at(split, image_size, data.max_pixels, progress), strict=True)):
        if isinstance(size, BadImage) or size == _size(image):  # a bad one is a fault where images are loaded
            good.append(i)
        else:
            wrong.append(f"image '{image['file_name']}' is {_pixels(size)}, by this file {_pixels(_size(image))}")
    faults.unusable(str(path), counted(len(images), "image"), wrong)
    return split.take(good), [kept[i] for i in good]


def _outlined(part: str, objects: dict[Any, list[_Object]]) -> bool:
    """Returns whether all objects of a part, crowds aside, have outlines; logs where only some have."""
    each = [bool(one.segment) for those in objects.values() for one in those if not one.crowd]
    if any(each) and not all(each):
        what = f"{each.count(False)} of {counted(len(each), 'object')} of {part} have no outline"
        log.warning("data.root: %s, so boxes alone are used there", what)
    return bool(each) and all(each)


def _fault(row: dict, image: dict | None, labels: dict[int, int]) -> str | None:
    """Returns what is wrong with an annotation."""
    if image is None:
        return f"of an image {_short(row['image_id'])} that is not in the list"
    number = row.get("category_id")
    if not isinstance(number, int) or number not in labels:
        return f"of a category {_short(number)} that is not in the list"
    try:
        x, y, w, h = (float(value) for value in row["bbox"])
    except (LookupError, OverflowError, TypeError, ValueError):
        return f"bbox {_short(row.get('bbox'))}; wanted [x, y, width, height] in pixels"
    height, width = _size(image)
    if not (w > 0 and h > 0):
        return f"bbox {_short(row['bbox'])} has no area"
    over = min(x, y) < -SLACK or x + w > width + SLACK or y + h > height + SLACK
    if over or not (min(x + w, width) > max(x, 0) and min(y + h, height) > max(y, 0)):
        return f"bbox {_short(row['bbox'])} reaches outside of the image ({_pixels((height, width))})"
    return _outline_fault(row.get("segmentation"), (height, width))


def _outline_fault(segment: Any, size: tuple[int, int]) -> str | None:
    if not segment:
        return None
    try:
        if isinstance(segment, list):
            outline = [np.array(polygon, dtype=float) for polygon in segment]
            right = all(p.ndim == 1 and len(p) >= 6 and not len(p) % 2 for p in outline)
            right = right and all(np.abs(polygon).max() <= FAR * max(size) for polygon in outline)
        else:
            counts = segment["counts"]
            right = tuple(segment["size"]) == size and (isinstance(counts, str) or sum(counts) == size[0] * size[1])
            right = right and rasterised(segment, size, size).shape == size
    except Exception:  # pycocotools raises several types on damaged RLE
        right = False
    return None if right else f"segmentation: wanted polygons in the image ({_pixels(size)}), or RLE of its size"


def _object(row: dict, image: dict, labels: dict[int, int]) -> _Object:
    (x, y, w, h), (height, width) = map(float, row["bbox"]), _size(image)
    box = [max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)]
    segment = row.get("segmentation") or None
    if isinstance(segment, list):
        segment = [np.array(polygon, dtype=np.float32) for polygon in segment]
    return _Object(box, labels[row["category_id"]], segment, row.get("iscrowd") == 1)


def _target(image: dict, objects: list[_Object], outlined: bool) -> BoxTarget:
    return BoxTarget(
        boxes=np.array([one.box for one in objects], dtype=np.float32).reshape(-1, 4),
        labels=np.array([one.label for one in objects], dtype=np.int64),
        segments=[one.segment or [_corners(one.box)] for one in objects] if outlined else None,
        crowd=np.array([one.crowd for one in objects], dtype=bool),
        size=_size(image),
        image_id=image["id"],
    )


def _corners(box: list[float]) -> np.ndarray:
    """Returns a box as a polygon: the outline of a crowd that has none."""
    x1, y1, x2, y2 = box
    return np.array([x1, y1, x2, y1, x2, y2, x1, y2], dtype=np.float32)


def _size(image: dict) -> tuple[int, int]:
    """Returns height and width (pixels) of a row of ``images``."""
    return image["height"], image["width"]


def _pixels(size: tuple[int, int]) -> str:
    """Returns a height and width as people write them."""
    return f"{size[1]} x {size[0]}"


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, Exception) else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
