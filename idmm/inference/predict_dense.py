"""``idmm predict`` by a run of ``idmm detect`` or ``idmm segment``: boxes or masks on images, and pictures of them."""

import os
from collections import Counter

import numpy as np
from PIL import Image

from idmm.config.dense import DENSE_LIBRARIES
from idmm.config.usage import PredictConfig
from idmm.data.split import counted
from idmm.errors import UserError, needed
from idmm.evaluation.inputs import inputs, network_options, say_unreadable
from idmm.files import filling, saved_info, write_json
from idmm.progress import log

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
    more = [lambda: _check(given, task), lambda: needed(given.init, DENSE_LIBRARIES[task], "dense")]
    out, images = inputs(given, "model", None, *more)
    from idmm.dense.pictures import painted
    from idmm.dense.predictor import MIN_SCORE, load_predictor  # torch takes seconds, a mistake is told at once

    predictor, unreadable = load_predictor(given.init, **network_options(given)), {}
    least = MIN_SCORE if given.min_score is None else given.min_score
    paths = [image.path for image in images]
    top = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = {path: os.path.relpath(path, top).replace(os.sep, "/") for path in paths}
    stems = Counter(os.path.splitext(name)[0].casefold() for name in names.values())
    named = [{"id": n, "name": name} for n, name in zip(predictor.categories, predictor.classes, strict=True)]
    dataset = {"images": [], "annotations": [], "categories": named}  # COCO's, which tools for labelling read
    with filling(out) as folder:
        for found in predictor.each(paths, unreadable, least, "predicting"):
            name, (height, width) = names[found.path], found.size
            dataset["images"].append(
                {"id": len(dataset["images"]) + 1, "file_name": name, "width": width, "height": height}
            )
            stem = os.path.splitext(name)[0]
            stem = stem if stems[stem.casefold()] == 1 else name  # of files that differ in the ending
            for kind in ("pictures", "masks") if task == "segment" else ("pictures",):
                (folder / kind / stem).parent.mkdir(parents=True, exist_ok=True)
            of = found.objects if found.mask is None else found.mask
            drawn = painted(predictor.picture(found.path, SHOWN), of, found.size, predictor.classes)
            Image.fromarray(drawn).save(folder / "pictures" / f"{stem}.jpg")
            if found.mask is not None:
                Image.fromarray(found.mask + np.uint8(predictor.categories[0])).save(folder / "masks" / f"{stem}.png")
                continue
            for entry in found.objects.results(len(dataset["images"]), predictor.categories):
                area = entry["bbox"][2] * entry["bbox"][3]
                number = len(dataset["annotations"]) + 1
                dataset["annotations"].append({"id": number, **entry, "area": area, "iscrowd": 0})
        say_unreadable(unreadable, len(images))
        if task == "detect":
            write_json(folder / "predictions.json", dataset)
    boxes = len(dataset["annotations"])
    if task == "detect" and not boxes:
        log.warning("min_score: no box of a score of %g or more", least)
    more = f", {boxes} box{'' if boxes == 1 else 'es'}" if task == "detect" else ""
    return f"{out}: {counted(len(dataset['images']), 'image')}{more}"


def _check(given: PredictConfig, task: str) -> None:
    faults = []
    if given.out is None:
        faults.append(f"out: missing; the run is of idmm {task}: expected a folder, new or empty")
    scored = given.min_score is not None and task == "segment"
    for key, wrong in {"top_k": given.top_k != 1, "min_score": scored}.items():
        faults += [f"{key}: has no meaning for a run of idmm {task}; leave it out"] if wrong else []
    if faults:
        raise UserError(*faults)
