"""``idmm predict`` by a run of ``idmm detect`` or ``idmm segment``: boxes or masks on images, and pictures of them."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from idmm.commands.inputs import inputs, network_options, say_unreadable
from idmm.config.dense import DENSE_LIBRARIES
from idmm.config.usage import PredictConfig
from idmm.data.split import counted
from idmm.errors import UserError, needed
from idmm.files import filling, saved_info, write_json
from idmm.progress import log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from idmm.inference_dense import Found, Predictor

SHOWN = 1280  # long side of a picture at most (pixels)


def predict_dense(given: PredictConfig) -> str:
    """Writes what is found in images to the folder ``given.out``, and returns a line on it.

    ``predictions.json`` in COCO's format (boxes) or ``masks/`` (a PNG of class numbers for each image), and
    ``pictures/``, the images with it drawn upon them.

    Raises:
        UserError: A key of classes of images was given, no images, none that can be read, or ``out`` cannot be written.
        RunError: Memory ran out, or the disk is full.
    """
    task = saved_info(given.init, "model")["task"]
    libraries = DENSE_LIBRARIES[task]
    more = [lambda: _check(given, task), lambda: needed(given.init, libraries, "dense")]
    out, images = inputs(given, "model", None, *more)
    from idmm.inference_dense import MIN_SCORE, load_predictor  # torch takes seconds, a mistake is told at once
    from idmm.pictures import save

    predictor, unreadable = load_predictor(given.init, **network_options(given)), {}
    paths = [image.path for image in images]
    least = MIN_SCORE if given.min_score is None else given.min_score
    names = dict(zip(paths, _names(paths), strict=True))
    stems = _stems(names)
    dataset = _Dataset(predictor.classes, predictor.categories)
    with filling(out) as folder:
        for kind in ("pictures", "masks") if task == "segment" else ("pictures",):
            for stem in stems.values():
                (folder / kind / stem).parent.mkdir(parents=True, exist_ok=True)
        for found in predictor.each(paths, unreadable, least, "predicting"):
            stem = stems[found.path]
            figure, dpi = _drawn(predictor, found)
            save(figure, folder / "pictures" / f"{stem}.jpg", dpi)
            if found.mask is not None:
                Image.fromarray(found.mask + np.uint8(predictor.categories[0])).save(folder / "masks" / f"{stem}.png")
            dataset.add(names[found.path], found)
        say_unreadable(unreadable, len(images))
        if task == "detect":
            write_json(folder / "predictions.json", dataset.content)
    if task == "detect" and not dataset.content["annotations"] and dataset.content["images"]:
        log.warning("min_score: no box of a score of %g or more", least)
    boxes = len(dataset.content["annotations"])
    more = f", {boxes} box{'' if boxes == 1 else 'es'}" if task == "detect" else ""
    return f"{out}: {counted(len(dataset.content['images']), 'image')}{more}"


def _check(given: PredictConfig, task: str) -> None:
    faults = []
    if given.out is None:
        faults.append(f"out: missing; the run is of idmm {task}: wanted a folder, new or empty")
    if given.top_k != 1:
        faults.append(f"top_k: got {given.top_k}, which is of classes of images; leave it out for a run of idmm {task}")
    if given.min_score is not None and task == "segment":
        faults.append(f"min_score: got {given.min_score:g}, which is of boxes; leave it out for a run of idmm segment")
    if faults:
        raise UserError(*faults)


class _Dataset:
    """What was found, as a dataset in COCO's format, which tools for labelling read; each box has its ``score``."""

    def __init__(self, classes: Sequence[str], categories: Sequence[int]):
        named = [{"id": number, "name": name} for number, name in zip(categories, classes, strict=True)]
        self.categories, self.content = categories, {"images": [], "annotations": [], "categories": named}

    def add(self, name: str, found: "Found") -> None:
        images, annotations = self.content["images"], self.content["annotations"]
        height, width = found.size
        images.append({"id": len(images) + 1, "file_name": name, "width": width, "height": height})
        for entry in found.objects.results(len(images), self.categories) if found.objects else ():
            _, _, w, h = entry["bbox"]
            annotations.append({"id": len(annotations) + 1, **entry, "area": w * h, "iscrowd": 0})


def _drawn(predictor: "Predictor", found: "Found") -> "tuple[Figure, float]":
    """Returns a figure of an image and what was found in it, and its dots an inch."""
    from idmm.data.dense.targets import nearest, rasterised
    from idmm.stages.dense_pictures import Drawn, marked_figure

    image = predictor.picture(found.path, SHOWN)
    shape = image.shape[:2]
    if found.mask is not None:
        return marked_figure(image, nearest(found.mask, shape), predictor.classes)
    of = found.objects
    boxes = of.boxes * np.tile(np.divide(shape, found.size)[::-1], 2)
    masks = None if of.segments is None else [rasterised(one, found.size, shape).astype(bool) for one in of.segments]
    return marked_figure(image, Drawn(boxes, of.labels, of.scores, masks), predictor.classes)


def _names(paths: Sequence[str]) -> list[str]:
    """Returns what files are called below the folder that holds all of them, with slashes."""
    whole = [os.path.abspath(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(path) for path in whole])
    return [Path(os.path.relpath(path, folder)).as_posix() for path in whole]


def _stems(names: dict[str, str]) -> dict[str, str]:
    """Returns names without their endings, but of files that differ in these alone."""
    count = Counter(os.path.splitext(name)[0].casefold() for name in names.values())
    return {
        path: stem if count[(stem := os.path.splitext(name)[0]).casefold()] == 1 else name
        for path, name in names.items()
    }
