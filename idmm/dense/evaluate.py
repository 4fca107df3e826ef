"""Metrics: COCO's average precision of boxes and masks, intersection over union of pixels."""

import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torchvision.ops import clip_boxes_to_image

from idmm.config.dense import tested_sides
from idmm.dense.network import Segmenter
from idmm.dense.targets import BoxTarget, Floats, Integers, RunLengths, Segment, Size
from idmm.dense.transforms import letterboxed
from idmm.models.base import Tensors, resized

Scores = dict[str, float | None]  # in percent. None: undefined
PerClass = dict[str, NDArray[np.float64]]  # the same of each class, [K]. NaN: undefined
# of COCO's 0.50, 0.55 ... 0.95
THRESHOLDS = {"ap": slice(None), "ap50": slice(0, 1), "ap75": slice(5, 6)}


# ---------------------------------------------------------------------- boxes
@dataclass(frozen=True)
class Objects:
    """The n objects that a detector finds in an image, by falling score."""

    boxes: Floats  # float32 [n, 4]: x1, y1, x2, y2 (pixels of the file)
    labels: Integers  # [n], from 0
    scores: Floats  # float32 [n], from 0 to 1
    segments: Sequence[Segment] | None  # outlines at the file's size. None: no masks were predicted

    def results(self, image_id: int | str, categories: Sequence[int]) -> list[dict[str, Any]]:
        """Return one entry per object in COCO's result format.

        Args:
            image_id: Of the image.
            categories: COCO's number of each class.
        """
        boxes = self.boxes.astype(float)
        boxes[:, 2:] -= boxes[:, :2]  # width and height
        results = []
        for number, box in enumerate(boxes.tolist()):
            result = {
                "image_id": image_id,
                "category_id": categories[self.labels[number]],
                "bbox": box,
                "score": float(self.scores[number]),
            }
            if self.segments is not None:
                result["segmentation"] = self.segments[number]
            results.append(result)
        return results


def on_file(
    output: Tensors,
    size: Size,
    side: int,
    short: float | None = None,
) -> Objects:
    """Return a detector's output for a letterboxed canvas in pixels of the image's file.

    Masks are drawn at the file's size directly. torchvision's RoIAlign is not aligned, so it trains
    masks half a pixel of the canvas too far to the upper left. This is corrected here. Its own
    drawing is coarser.

    Args:
        output: Of one image, see :meth:`idmm.dense.network.Detector.forward`.
        size: Height and width of the file (pixels).
        side, short: Of the canvas (pixels), see :func:`idmm.dense.transforms.letterboxed`.
    """
    height, width = letterboxed(size, side, short=short)
    factor = torch.tensor([size[1] / width, size[0] / height] * 2)
    canvas_boxes = output["boxes"].float().cpu()
    boxes = clip_boxes_to_image(canvas_boxes * factor, size)
    inside = (boxes[:, 2:] > boxes[:, :2]).all(1)  # others lie in the padding
    segments = None
    if "masks" in output:
        masks = output["masks"].float().cpu()[inside]
        unclipped = ((canvas_boxes + 0.5) * factor)[inside].tolist()
        segments = [
            _run_lengths(mask, box, size) for mask, box in zip(masks, unclipped, strict=True)
        ]
    return Objects(
        boxes[inside].numpy(),
        output["labels"].cpu()[inside].numpy(),
        output["scores"].float().cpu()[inside].numpy(),
        segments,
    )


def _run_lengths(
    mask: Tensor,
    box: list[float],
    size: Size,
) -> RunLengths:
    """Return a mask [1, 28, 28] (probabilities within a box), drawn into an image of ``size``."""
    from pycocotools import mask as coco

    x1, y1, x2, y2 = box
    rows, y = _pixels(y1, y2, size[0])
    columns, x = _pixels(x1, x2, size[1])
    points = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)  # [rows, columns, 2]
    drawn = F.grid_sample(mask[None], points[None], align_corners=False)[0, 0] >= 0.5
    canvas = np.zeros(size, dtype=np.uint8, order="F")
    canvas[rows, columns] = drawn.numpy()
    return {"size": list(size), "counts": coco.encode(canvas)["counts"].decode()}


def _pixels(
    low: float,
    high: float,
    count: int,
) -> tuple[slice, Tensor]:
    """Return the pixels of ``count`` from ``low`` to ``high``, and their positions from -1 to 1."""
    start = max(0, int(low))
    stop = min(count, math.ceil(high))
    positions = (torch.tensor(range(start, stop)) + 0.5 - low) / (high - low) * 2 - 1
    return slice(start, stop), positions


def detection_scores(
    predictions: Sequence[Objects],
    truth: Sequence[BoxTarget],
    classes: Sequence[str],
) -> tuple[Scores, PerClass]:
    """Return COCO's average precisions, by pycocotools.

    Up to 100 predictions per image count. Crowds neither help nor hurt. Means skip classes without
    a true object.

    Returns:
        In percent ``ap`` (mean over intersections over union of 0.50 to 0.95), ``ap50`` and
        ``ap75``. If predictions and truth have outlines, also ``mask_ap``, ``mask_ap50`` and
        ``mask_ap75``. All are None if there is no true object. Then the same per class, NaN if it
        has no true object.
    """
    from pycocotools.cocoeval import COCOeval

    same = []
    crowd: list[bool] = []
    for target in truth:
        certain = np.ones(len(target.boxes))
        same.append(Objects(target.boxes, target.labels, certain, target.segments))
        crowd += target.crowd.tolist()
    sizes = [target.size for target in truth]
    true = _coco(same, sizes, len(classes))
    predicted = _coco(predictions, sizes, len(classes))
    for annotation, is_crowd in zip(true.dataset["annotations"], crowd, strict=True):
        annotation["iscrowd"] = int(is_crowd)
    outlined = [target.segments is not None or not len(target.boxes) for target in truth]
    outlined += [objects.segments is not None for objects in predictions]
    prefixes = {"bbox": ""}
    if all(outlined):
        prefixes["segm"] = "mask_"
    per_class = {}
    for kind, prefix in prefixes.items():
        with contextlib.redirect_stdout(io.StringIO()):  # it prints
            evaluation = COCOeval(true, predicted, kind)
            evaluation.evaluate()
            evaluation.accumulate()
        # by threshold, recall (0 to 1) and class, for objects of all sizes and up to 100
        # predictions. -1: no object
        precision = evaluation.eval["precision"][:, :, :, 0, -1]  # [10, 101, K]
        for name, thresholds in THRESHOLDS.items():
            values = precision[thresholds].reshape(-1, len(classes))
            per_class[prefix + name] = np.where((values < 0).any(0), np.nan, 100 * values.mean(0))
    return {name: defined_mean(values) for name, values in per_class.items()}, per_class


def defined_mean(values: NDArray[np.float64]) -> float | None:
    """Return the mean of the values that are not NaN, None if there are none."""
    values = values[~np.isnan(values)]
    if values.size:
        return float(values.mean())
    return None


def _coco(objects: Sequence[Objects], sizes: list[Size], classes: int) -> Any:
    """Return the objects of images as pycocotools has them, in its class COCO."""
    from pycocotools.coco import COCO

    rows: list[dict[str, Any]] = []
    for image_id, one in enumerate(objects):
        rows += one.results(image_id, range(classes))
    for number, row in enumerate(rows, start=1):
        row.update(id=number, area=0, iscrowd=0)
    images = [{"id": number, "height": h, "width": w} for number, (h, w) in enumerate(sizes)]
    categories = [{"id": number, "name": str(number)} for number in range(classes)]
    coco = COCO()
    coco.dataset = {"images": images, "categories": categories, "annotations": rows}
    coco.createIndex()
    return coco


# ---------------------------------------------------------------------- classes of pixels
def segmented(
    network: Segmenter,
    images: Tensor,
    scales: Sequence[float] = (1.0,),
) -> Tensor:
    """Return each pixel's class probabilities, the mean over scales, float32 [B, K, S, S].

    Args:
        network: In evaluation mode. Its backbone accepts images of all
            :func:`idmm.config.dense.tested_sides`.
        images: [B, C, S, S].
        scales: Of S.
    """
    size = images.shape[-1]
    total = torch.zeros((), device=images.device)
    for side in tested_sides(size, scales):
        logits = network(resized(images, side)).float()  # [B, K, side, side]
        total = total + resized(logits.softmax(1), size)  # in turn: each needs gigabytes
    return total / len(scales)


def classes_on_file(
    logits: Tensor,
    size: Size,
    side: int,
) -> Tensor:
    """Return the class of each pixel of an image's file, int64 [H, W] on the CPU.

    The logits [K, S, S] are those of its canvas. Classes are compared in turn. All of them at the
    size of a photograph would need gigabytes.
    """
    h, w = letterboxed(size, side)
    best = torch.full(size, -torch.inf, device=logits.device)
    classes = torch.zeros(size, dtype=torch.int64, device=logits.device)
    for number, plane in enumerate(logits[:, None, None, :h, :w].float()):
        enlarged = F.interpolate(plane, size, mode="bilinear", align_corners=False)[0, 0]
        classes[enlarged > best] = number
        best = torch.maximum(best, enlarged)
    return classes.cpu()


def segmentation_scores(confusion: Integers) -> tuple[Scores, PerClass]:
    """Return mean intersection over union, mean accuracy of classes, and accuracy of all pixels.

    The accuracy of a class is the share of its pixels that are right.

    Args:
        confusion: Pixels by true class (rows) and predicted class, int64 [K, K].

    Returns:
        In percent ``miou`` over classes in truth or predictions, ``macc`` over classes in truth,
        and ``pixel_accuracy``. All are None if no pixel has a class. Then ``iou`` and ``accuracy``
        per class, NaN if a class occurs in neither of both, or not in truth.
    """
    counts = confusion.astype(np.float64)
    right = counts.diagonal()
    true = counts.sum(1)
    union = true + counts.sum(0) - right
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        iou = 100 * (right / union)
        accuracy = 100 * (right / true)
        pixel_accuracy = 100 * right.sum() / counts.sum()
    scores = {
        "miou": defined_mean(iou),
        "macc": defined_mean(accuracy),
        "pixel_accuracy": defined_mean(pixel_accuracy),
    }
    return scores, {"iou": iou, "accuracy": accuracy}
