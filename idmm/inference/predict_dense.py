"""``idmm predict`` by a run of ``idmm detect`` or ``idmm segment``: boxes or masks on images."""

import os
from collections import Counter

import numpy as np
from PIL import Image

from idmm.config.commands import PredictConfig
from idmm.config.dense import DENSE_LIBRARIES
from idmm.data.split import counted
from idmm.errors import UserError, needed
from idmm.evaluation.inputs import inputs, report_unreadable
from idmm.files import filling, saved_info, write_json
from idmm.progress import log


def predict_dense(config: PredictConfig) -> str:
    """Write the boxes or masks of images to the folder ``config.out``, and return a summary.

    There is ``predictions.json`` in COCO's format (boxes) or ``masks/`` (a PNG of class numbers for each image).

    Raises:
        UserError: No readable images, or ``out`` cannot be written.
        RunError: Memory ran out, or the disk is full.
    """
    task = saved_info(config.init, "model")["task"]
    if config.out is None:
        raise UserError(f"out: missing. For a run of idmm {task} name a folder, new or empty")
    out, paths = inputs(config, "model", None, lambda: needed(config.init, DENSE_LIBRARIES[task], "dense"))
    from idmm.dense.predictor import BATCH, MIN_SCORE, predict_files  # torch takes seconds
    from idmm.models.weights import read_checkpoint

    saved, unreadable = read_checkpoint(config.init, "init", "model"), {}
    min_score = MIN_SCORE if config.min_score is None else config.min_score
    names, stems = _names(paths)
    classes = zip(saved.extra["categories"], saved.extra["classes"], strict=True)
    categories = [{"id": number, "name": name} for number, name in classes]
    dataset: dict[str, list] = {"images": [], "annotations": [], "categories": categories}  # COCO's format
    with filling(out) as folder:
        predictions = predict_files(saved, paths, min_score, unreadable, config.device, config.batch_size or BATCH)
        for path, (height, width), prediction in predictions:
            number = len(dataset["images"]) + 1
            dataset["images"].append({"id": number, "file_name": names[path], "width": width, "height": height})
            if task == "segment":
                file = folder / "masks" / f"{stems[path]}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(prediction + np.uint8(saved.extra["categories"][0])).save(file)
            else:
                for result in prediction.results(number, saved.extra["categories"]):
                    area, annotations = result["bbox"][2] * result["bbox"][3], dataset["annotations"]
                    annotations.append({"id": len(annotations) + 1, **result, "area": area, "iscrowd": 0})
        report_unreadable(unreadable, len(paths))
        if task == "detect":
            write_json(folder / "predictions.json", dataset)
    summary = f"{out}: {counted(len(dataset['images']), 'image')}"
    if task == "segment":
        return summary
    boxes = len(dataset["annotations"])
    if not boxes:
        log.warning("min_score: no box has a score of %g or more", min_score)
    return f"{summary}, {boxes} {'box' if boxes == 1 else 'boxes'}"


def _names(paths: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return each image's path below the common folder, and that without its ending. Images that differ only in the
    ending keep it."""
    top = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = {path: os.path.relpath(path, top).replace(os.sep, "/") for path in paths}
    stems = {path: os.path.splitext(name)[0] for path, name in names.items()}
    counts = Counter(stem.casefold() for stem in stems.values())
    return names, {path: stem if counts[stem.casefold()] == 1 else names[path] for path, stem in stems.items()}
