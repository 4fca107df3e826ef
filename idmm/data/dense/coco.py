"""COCO's format: ROOT/annotations/PART.json over the images of ROOT/PART, COCO's own names of files, or Roboflow's.

Source: https://cocodataset.org/#format-data
"""

import json
import logging
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idmm import config
from idmm.data.dense.faults import Faults
from idmm.data.dense.looks import look_at
from idmm.data.dense.targets import BoxTarget, run_lengths
from idmm.data.readers.folder import PARTS
from idmm.data.readers.layout import absent
from idmm.data.split import Split, counted
from idmm.errors import UserError, listed, reason

log = logging.getLogger(__name__)

SLACK = 1.0  # by which a box may reach over the edge, as rounding makes it (pixels); it is cut off
FAR = 2.0  # times the image's long side: where an outline may be, at most; drawing what is further takes its memory
_UNFIT = re.compile(r"[\0-\x1f\ud800-\udfff]")  # in names: what no line and no file has
_LEAVES = re.compile(rf"^/|(^|/)\.\.(/|$)|{_UNFIT.pattern}")  # names of no file below a folder
BESIDE = "_annotations.coco.json"  # as Roboflow writes it, in the folder of a part's images
_LISTS = ("images", "annotations", "categories")


class _Image(NamedTuple):
    """A row of ``images``."""

    id: int | str
    name: str
    size: tuple[int, int]  # height and width (pixels)


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
        others = [str(file.relative_to(root)) for file in (*root.glob("*.json"), *root.glob("*/*.json"))]
        more = f"; there {'is' if len(others) == 1 else 'are'} {listed(sorted(others))}" if others else ""
        more += "; its masks are for 'idmm segment'" if (root / "masks").is_dir() else ""
        raise UserError(f"data.root: '{root}' has no annotations of objects to train on; wanted {wanted}{more}")
    found = {part: _File(path, part) for part, path in files.items()}
    for file in found.values():
        file.load(faults)
    faults.refuse()
    classes = _agreed({part: file.categories(faults) for part, file in found.items()}, found, faults)
    images = {part: file.images(faults) for part, file in found.items()}
    faults.refuse()
    numbers = {number: label for label, number in enumerate(classes)}
    objects = {part: file.objects(images[part], numbers, faults) for part, file in found.items()}
    outlined = {part: _outlined(part, of) for part, of in objects.items()}
    read = {}
    for part, file in found.items():
        split, kept = file.split(root, images[part], data, faults, progress)
        read[part] = split, [_target(image, objects[part][image.id], outlined[part]) for image in kept]
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


class _File:
    """The annotations of a part, checked step by step.

    Args:
        path: The JSON file.
        part: train, val or test.
    """

    def __init__(self, path: Path, part: str):
        self.path, self.part, self.content = path, part, {}

    def load(self, faults: Faults) -> None:
        """Reads the file; a fault where it is no JSON of this form."""
        try:
            content = json.loads(self.path.read_bytes())
        except OSError as error:
            return faults.add(f"data.root: '{self.path}' cannot be read ({reason(error)})")
        except (ValueError, RecursionError) as error:
            return faults.add(f"data.root: '{self.path}' is not JSON ({error}); wanted COCO's annotations")
        rows = [content.get(name) if isinstance(content, dict) else None for name in _LISTS]
        right = [isinstance(of, list) and all(isinstance(row, dict) for row in of) for of in rows]
        if not all(right):
            lacking = listed(name for name, good in zip(_LISTS, right, strict=True) if not good)
            return faults.add(f"data.root: '{self.path}' is not in COCO's format: it has no list {lacking}")
        self.content = content
        return None

    def categories(self, faults: Faults) -> dict[int, str]:
        """Returns names by number, in the order of the numbers."""
        found, wrong = {}, []
        for row in self.content["categories"]:
            number, name = row.get("id"), row.get("name")
            if not _is_whole(number) or not isinstance(name, str) or not name or _UNFIT.search(name):
                wrong.append(f"{_short(row)}: wanted an id, which is a whole number, and a name")
            elif number in found:
                wrong.append(f"category {number} is there twice, as '{found[number]}' and '{name}'")
            elif name in found.values():
                wrong.append(f"category '{name}' is there twice; wanted each name once")
            else:
                found[number] = name
        if wrong:
            faults.add(f"data.root: '{self.path}' has categories that are wrong", wrong)
        elif not found:
            faults.add(f"data.root: '{self.path}' has no categories; wanted one at least")
        return dict(sorted(found.items()))

    def images(self, faults: Faults) -> list[_Image]:
        """Returns the images in the order of the file."""
        found, names, wrong = {}, set(), []
        for row in self.content["images"]:
            number, name, size = row.get("id"), row.get("file_name"), (row.get("height"), row.get("width"))
            if not _is_id(number) or not isinstance(name, str) or not name:
                wrong.append(f"{_short(row)}: wanted an id and a file_name")
            elif _LEAVES.search(name):
                wrong.append(f"image {_short(name)}: wanted a path below the folder of images")
            elif not all(_is_whole(side) and 0 < side < 2**31 for side in size):
                wrong.append(f"image '{name}' has height and width {_short(size)}; wanted pixels")
            elif number in found:
                wrong.append(f"image {number} is there twice, as '{found[number].name}' and '{name}'")
            elif name in names:
                wrong.append(f"image '{name}' is there twice; wanted each once")
            else:
                found[number] = _Image(number, name, size)
                names.add(name)
        if wrong:
            faults.add(f"data.root: '{self.path}' has images that are wrong", wrong)
        elif not found:
            faults.add(f"data.root: '{self.path}' has no images; wanted one at least")
        return list(found.values())

    def objects(self, images: list[_Image], labels: dict[int, int], faults: Faults) -> dict[Any, list[_Object]]:
        """Returns the objects by the number of their image."""
        known, found, wrong = {image.id: image for image in images}, {image.id: [] for image in images}, []
        rows = self.content["annotations"]
        for place, row in enumerate(rows, start=1):
            number = row.get("image_id")
            image = known.get(number) if _is_id(number) else None
            why = _fault(row, image, labels)
            if why is None:
                found[image.id].append(_object(row, image, labels))
            else:
                of = "" if image is None else f" of '{image.name}'"
                wrong.append(
                    f"annotation {_short(row['id']) if 'id' in row else f'number {place} of the list'}{of}: {why}"
                )
        faults.unusable(str(self.path), counted(len(rows), "annotation"), wrong)
        return found

    def split(
        self, root: Path, images: list[_Image], data: config.Data, faults: Faults, progress: bool
    ) -> tuple[Split, list[_Image]]:
        """Returns the images that are there and of the size that the file says."""
        name, names = self.path.stem.removeprefix("instances_"), [image.name for image in images]
        bases = [root / name, root / "images" / name, root / self.part, root / "images" / self.part, root / "images"]
        there = [(len(absent(base, names)), base) for base in [*bases, self.path.parent, root] if base.is_dir()]
        base = min(there, key=lambda found: found[0])[1]
        gone = set(absent(base, names))
        kept = [image for image in images if image.name not in gone]
        paths = [os.path.join(base, *image.name.split("/")) for image in kept]
        below = [os.path.relpath(path, root).replace(os.sep, "/") for path in paths]
        split = Split(paths, below, None, None)
        looks = look_at(split, "images", data.max_pixels, progress)
        wrong = [f"image '{name}' is not there (under '{base}')" for name in names if name in gone]
        good = []
        for i, (image, size, bad) in enumerate(zip(kept, looks.sizes.tolist(), looks.reasons, strict=True)):
            if bad or tuple(size) == image.size:  # what is bad is told, or left out, where images are loaded
                good.append(i)
            else:
                turned = " as it is shown" if tuple(size[::-1]) == image.size else ""
                wrong.append(f"image '{image.name}' is {_pixels(size)}{turned}, by this file {_pixels(image.size)}")
        faults.unusable(str(self.path), counted(len(images), "image"), wrong)
        return split.take(good), [kept[i] for i in good]


def _agreed(found: dict[str, dict], files: dict[str, _File], faults: Faults) -> dict[int, str]:
    """Returns the categories of train; those of other parts must be among them."""
    classes = found["train"]
    for part, others in found.items():
        if odd := [f"{number} '{name}'" for number, name in others.items() if classes.get(number) != name]:
            of = f"'{files['train'].path}'"
            faults.add(f"data.root: '{files[part].path}' has categories that are not those of {of}: {listed(odd)}")
    return classes


def _outlined(part: str, objects: dict[Any, list[_Object]]) -> bool:
    """Returns whether all objects of a part, crowds aside, have outlines; says so where only some have."""
    each = [bool(one.segment) for those in objects.values() for one in those if not one.crowd]
    if any(each) and not all(each):
        what = f"{each.count(False)} of {counted(len(each), 'object')} of {part} have no outline"
        log.warning("data.root: %s, so boxes alone are used there", what)
    return bool(each) and all(each)


def _fault(row: dict, image: _Image | None, labels: dict[int, int]) -> str | None:
    """Returns what is wrong with an annotation."""
    if image is None:
        return f"of an image {_short(row.get('image_id'))} that is not in the list"
    number, box = row.get("category_id"), row.get("bbox")
    if not _is_whole(number) or number not in labels:
        return f"of a category {_short(number)} that is not in the list"
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
        return f"bbox {_short(box)}; wanted [x, y, width, height] in pixels"
    (x, y, w, h), (height, width) = box, image.size
    if not (w > 0 and h > 0):
        return f"bbox {_short(box)} has no area"
    if min(x, y) < -SLACK or x + w > width + SLACK or y + h > height + SLACK:
        return f"bbox {_short(box)} reaches outside of the image ({_pixels(image.size)})"
    if not (min(x + w, width) > max(x, 0) and min(y + h, height) > max(y, 0)):
        return f"bbox {_short(box)} has no area within the image ({_pixels(image.size)})"
    return _outline_fault(row.get("segmentation"), image.size)


def _outline_fault(segment: Any, size: tuple[int, int]) -> str | None:
    if not segment:
        return None
    if isinstance(segment, list):
        if not all(isinstance(p, list) and len(p) >= 6 and not len(p) % 2 and all(map(_is_number, p)) for p in segment):
            return "segmentation: wanted polygons of six numbers or more, x and y in turns"
        far = max(abs(value) for polygon in segment for value in polygon) > FAR * max(size)
        return f"segmentation: its polygons reach far outside of the image ({_pixels(size)})" if far else None
    if not isinstance(segment, dict) or segment.get("size") != list(size):
        found = segment.get("size") if isinstance(segment, dict) else segment
        return f"segmentation: wanted polygons, or RLE of size {list(size)}, got {_short(found)}"
    counts = segment.get("counts")
    counts = run_lengths(counts) if isinstance(counts, str) else counts
    right = isinstance(counts, list) and all(_is_whole(n) and n >= 0 for n in counts) and sum(counts) == math.prod(size)
    return None if right else "segmentation: its RLE is damaged, or of an image of another size"


def _object(row: dict, image: _Image, labels: dict[int, int]) -> _Object:
    (x, y, w, h), (height, width) = row["bbox"], image.size
    box = [max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)]
    segment = row.get("segmentation") or None
    if isinstance(segment, list):
        segment = [np.array(polygon, dtype=np.float32) for polygon in segment]
    return _Object(box, labels[row["category_id"]], segment, row.get("iscrowd") == 1)


def _target(image: _Image, objects: list[_Object], outlined: bool) -> BoxTarget:
    return BoxTarget(
        boxes=np.array([one.box for one in objects], dtype=np.float32).reshape(-1, 4),
        labels=np.array([one.label for one in objects], dtype=np.int64),
        segments=[one.segment or [_corners(one.box)] for one in objects] if outlined else None,
        crowd=np.array([one.crowd for one in objects], dtype=bool),
        size=image.size,
        image_id=image.id,
    )


def _corners(box: list[float]) -> np.ndarray:
    """Returns a box as a polygon: the outline of a crowd that has none."""
    x1, y1, x2, y2 = box
    return np.array([x1, y1, x2, y1, x2, y2, x1, y2], dtype=np.float32)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _pixels(size: tuple[int, int]) -> str:
    """Returns a height and width as people write them."""
    return f"{size[1]} x {size[0]}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
