"""Boxes or masks on image files by a run of ``idmm detect`` or ``idmm segment``.

They are of the files' size. Images are prepared as in the run's own evaluation.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from idmm.config.commands import PredictConfig
from idmm.data.images import fitted
from idmm.data.views import normalise
from idmm.dense.evaluate import classes_on_file, on_file, segmented
from idmm.dense.network import Detector, Segmenter, saved_network
from idmm.dense.targets import Size
from idmm.dense.transforms import canvas_of, letterboxed, on_canvas, resized_to
from idmm.evaluation.inputs import report_unreadable
from idmm.evaluation.network import Network
from idmm.files import filling, write_json
from idmm.models.weights import read_checkpoint
from idmm.progress import counting, log
from idmm.text import counted
from idmm.training.device import pick_device

BATCH = 4
MIN_SCORE = 0.5  # of boxes


Output = TypeVar("Output")


@torch.no_grad()
def predict_dense(config: PredictConfig, out: Path, paths: list[str]) -> str:
    """Write the boxes or masks of images to the folder ``out``, and return a summary.

    There is ``predictions.json`` in COCO's format (boxes) or ``masks/`` (a PNG of class numbers for
    each image).

    Raises:
        UserError: No readable images.
        RunError: Memory ran out, or the disk is full.
    """
    saved = read_checkpoint(config.init, "init", "model")
    device = pick_device(config.device)
    model = saved_network(saved).to(device)
    batch_size = config.batch_size or BATCH
    if saved.extra["short_side"] is not None:  # the shapes differ
        batch_size = 1
    size: Any = saved.size  # one number: a square's side
    network = Network.around(saved, model, size, device, batch_size).in_precision(config.precision)
    files = _Files(network, saved.extra, paths)
    with filling(out) as folder, network.enough_memory():
        if isinstance(model, Segmenter):
            summary = _write_masks(folder, files, model)
        else:
            min_score = MIN_SCORE if config.min_score is None else config.min_score
            summary = _write_boxes(folder, files, model, min_score)
        report_unreadable(files.unreadable, len(paths))
    return f"{out}: {summary}"


class _Files:
    """The images, and how they are prepared.

    Attributes:
        extra: JSON of the run's weights.
        names: Path of each below their common folder.
        unreadable: Path -> reason.
    """

    def __init__(self, network: Network, extra: dict[str, Any], paths: list[str]):
        self.network = network
        self.extra = extra
        self.side: int = extra["side"]
        self.short: int | None = extra["short_side"]
        self.paths = paths
        self.names = _names(paths)
        self.unreadable: dict[str, str] = {}
        self._sizes: dict[int, Size] = {}

    def outputs(self, model: Callable[[Tensor], Iterable[Output]]) -> "Iterator[_OnFile[Output]]":
        """Yield a model's outputs for the readable images, and draw the progress."""
        network = self.network
        batches = network.file_batches(self.paths, self.paths, self.unreadable, self._prepare)
        for batch in counting(batches, len(self.paths), "predicting"):
            with network.autocast():
                outputs = model(batch["images"].to(network.device))
            numbers = batch["index"].tolist()
            for number, output in zip(numbers, outputs, strict=True):
                name = self.names[number]
                size = self._sizes.pop(number)
                yield _OnFile(name, size, output)

    def _prepare(self, number: int, pixels: NDArray[np.uint8]) -> Tensor:
        """Return an image [H, W, C] on its canvas, [C, H, W]."""
        height, width, _ = pixels.shape
        size = (height, width)
        self._sizes[number] = size
        # as in the run's store
        stored = torch.from_numpy(fitted(pixels, self.short or self.side))
        shape = letterboxed(size, self.side, short=self.short)
        image = resized_to(stored.permute(2, 0, 1), shape)
        normal = normalise(image[None], self.network.mean, self.network.std)
        canvas = canvas_of([shape], self.side, self.short)
        return on_canvas(normal[0], canvas)


class _OnFile(NamedTuple, Generic[Output]):
    """A network's output for an image."""

    name: str
    size: Size  # height and width of the file (pixels, upright)
    output: Output  # on the network's canvas


def _write_masks(folder: Path, files: _Files, model: Segmenter) -> str:
    """Write the masks, and return a summary."""
    stems = Counter(map(_stem, files.names))
    first = np.uint8(files.extra["categories"][0])
    images = 0
    for image in files.outputs(partial(segmented, model)):
        images += 1
        name = image.name
        if stems[_stem(name)] == 1:  # images that differ only in the ending keep it
            name = os.path.splitext(name)[0]
        file = folder / "masks" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        classes = classes_on_file(image.output, image.size, files.side)
        mask = classes.numpy().astype(np.uint8) + first
        Image.fromarray(mask).save(file)
    return counted(images, "image")


def _write_boxes(folder: Path, files: _Files, model: Detector, min_score: float) -> str:
    """Write the boxes in COCO's format, and return a summary."""
    numbers = files.extra["categories"]
    classes = files.extra["classes"]
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, image in enumerate(files.outputs(model), start=1):
        height, width = image.size
        images.append({"id": image_id, "file_name": image.name, "width": width, "height": height})
        confident = image.output["scores"] >= min_score
        output = {name: value[confident] for name, value in image.output.items()}
        objects = on_file(output, image.size, files.side, files.short)
        for result in objects.results(image_id, numbers):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    **result,
                    "area": result["bbox"][2] * result["bbox"][3],
                    "iscrowd": 0,
                }
            )
    dataset = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": n, "name": name} for n, name in zip(numbers, classes, strict=True)],
    }
    write_json(folder / "predictions.json", dataset)
    if not annotations:
        log.warning(f"min_score: no box has a score of {min_score:g} or more")
    boxes = "1 box" if len(annotations) == 1 else f"{len(annotations)} boxes"
    return f"{counted(len(images), 'image')}, {boxes}"


def _names(paths: list[str]) -> list[str]:
    """Return each image's path below the common folder."""
    top = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    return [os.path.relpath(path, top).replace(os.sep, "/") for path in paths]


def _stem(name: str) -> str:
    """Return a name without its ending, in lower case."""
    return os.path.splitext(name)[0].casefold()
