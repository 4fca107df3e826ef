"""Boxes or masks on image files by a finished run of ``idmm detect`` or ``idmm segment``, at the
files' size.

Images are prepared as in the run's own evaluation. The network runs in fp32.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from idmm.config.commands import PredictConfig
from idmm.data.images import fitted
from idmm.data.views import normalise
from idmm.dense.evaluate import Objects, classes_on_file, on_file, segmented
from idmm.dense.network import saved_network
from idmm.dense.targets import Size
from idmm.dense.transforms import canvas_of, letterboxed, on_canvas, resized_to
from idmm.evaluation.inputs import report_unreadable
from idmm.evaluation.network import Network
from idmm.files import filling, write_json
from idmm.models.weights import Checkpoint, read_checkpoint
from idmm.progress import counting, log
from idmm.text import counted
from idmm.training.device import pick_device

BATCH = 4
MIN_SCORE = 0.5  # of boxes


def predict_dense(config: PredictConfig, out: Path, paths: list[str]) -> str:
    """Write the boxes or masks of images to the folder ``out``, and return a summary.

    There is ``predictions.json`` in COCO's format (boxes) or ``masks/`` (a PNG of class numbers for
    each image).

    Raises:
        UserError: No readable images.
        RunError: Memory ran out, or the disk is full.
    """
    saved = read_checkpoint(config.init, "init", "model")
    unreadable = {}
    if config.min_score is None:
        min_score = MIN_SCORE
    else:
        min_score = config.min_score
    is_segmentation = saved.extra["task"] == "segment"
    numbers = saved.extra["categories"]
    names, stems = _names(paths)
    categories = [
        {"id": n, "name": name} for n, name in zip(numbers, saved.extra["classes"], strict=True)
    ]
    dataset = {"images": [], "annotations": [], "categories": categories}  # COCO's format
    with filling(out) as folder:
        for path, (height, width), prediction in _predictions(
            config, saved, paths, min_score, unreadable
        ):
            image_id = len(dataset["images"]) + 1
            dataset["images"].append(
                {"id": image_id, "file_name": names[path], "width": width, "height": height}
            )
            if is_segmentation:
                file = folder / "masks" / f"{stems[path]}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(prediction + np.uint8(numbers[0])).save(file)
            else:
                for result in prediction.results(image_id, numbers):
                    area = result["bbox"][2] * result["bbox"][3]
                    annotations = dataset["annotations"]
                    annotations.append(
                        {"id": len(annotations) + 1, **result, "area": area, "iscrowd": 0}
                    )
        report_unreadable(unreadable, len(paths))
        if not is_segmentation:
            write_json(folder / "predictions.json", dataset)
    summary = f"{out}: {counted(len(dataset['images']), 'image')}"
    if is_segmentation:
        return summary
    boxes = len(dataset["annotations"])
    if not boxes:
        log.warning("min_score: no box has a score of %g or more", min_score)
    return f"{summary}, {boxes} {'box' if boxes == 1 else 'boxes'}"


@torch.no_grad()
def _predictions(
    config: PredictConfig,
    saved: Checkpoint,
    paths: list[str],
    min_score: float,
    unreadable: dict[str, str],
) -> Iterator[tuple[str, Size, Objects | np.ndarray]]:
    """Yield path, height and width (pixels, upright) and prediction of each image, and draw the
    progress.

    The prediction of a detector is the objects, of a segmentation the class of each pixel, uint8
    [H, W]. Images that cannot be read are added to ``unreadable``: path -> reason.
    """
    device = pick_device(config.device)
    model = saved_network(saved).to(device)
    side = saved.extra["side"]
    short = saved.extra["short_side"]
    # else their shapes differ
    if short is None:
        batch_size = config.batch_size or BATCH
    else:
        batch_size = 1
    network = Network.around(saved, model, saved.size, device, batch_size)
    sizes = {}

    def prepare(number: int, pixels: np.ndarray) -> Tensor:
        sizes[number] = pixels.shape[:2]
        # as in the run's store
        stored = torch.from_numpy(fitted(pixels, short or side)).permute(2, 0, 1)
        shape = letterboxed(sizes[number], side, short=short)
        image = resized_to(stored, shape)
        canvas = canvas_of([shape], side, short)
        return on_canvas(normalise(image[None], network.mean, network.std)[0], canvas)

    batches = network.file_batches(paths, paths, unreadable, prepare)
    with network.enough_memory():
        for batch in counting(batches, len(paths), "predicting"):
            inputs = batch["images"].to(device)
            if saved.extra["task"] == "segment":
                outputs = segmented(model, inputs)
            else:
                outputs = model(inputs)
            for number, output in zip(batch["index"].tolist(), outputs, strict=True):
                size = sizes.pop(number)
                if isinstance(output, Tensor):
                    prediction = classes_on_file(output, size, side).numpy().astype(np.uint8)
                else:
                    confident = output["scores"] >= min_score
                    output = {name: value[confident] for name, value in output.items()}
                    prediction = on_file(output, size, side, short)
                yield paths[number], size, prediction


def _names(paths: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return each image's path below the common folder, and that without its ending. Images that
    differ only in the ending keep it."""
    top = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = {path: os.path.relpath(path, top).replace(os.sep, "/") for path in paths}
    stems = {path: os.path.splitext(name)[0] for path, name in names.items()}
    counts = Counter(stem.casefold() for stem in stems.values())
    return names, {
        path: stem if counts[stem.casefold()] == 1 else names[path] for path, stem in stems.items()
    }
