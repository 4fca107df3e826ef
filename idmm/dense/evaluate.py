"""How good are boxes and masks: COCO's average precision, and intersection over union of a segmentation."""

import contextlib
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm import distributed
from idmm.config.dense import tested_sides
from idmm.dense import BoxTarget, letterboxed
from idmm.dense.network import Segmenter
from idmm.evaluation.evaluate import evaluating


# ---------------------------------------------------------------------- boxes
@dataclass(frozen=True)
class Objects:
    """What a detector finds in an image: n objects, the likeliest first."""

    boxes: np.ndarray  # float32 [n, 4]: x1, y1, x2, y2 (pixels of the file)
    labels: np.ndarray  # int64 [n], from 0
    scores: np.ndarray  # float32 [n], from 0 to 1
    segments: list[dict] | None  # of each its mask as COCO's RLE, of the file's size; None: no masks were predicted

    def results(self, image_id: int | str, categories: Sequence[int]) -> list[dict]:
        """Returns them as COCO's result format has them, an entry an object.

        Args:
            image_id: Of the image.
            categories: COCO's number of each class.
        """
        x1, y1, x2, y2 = self.boxes.astype(float).T
        boxes = np.stack([x1, y1, x2 - x1, y2 - y1], axis=1).tolist()
        outlines = [{}] * len(boxes) if self.segments is None else [{"segmentation": one} for one in self.segments]
        return [
            {"image_id": image_id, "category_id": categories[label], "bbox": box, "score": float(score), **outline}
            for box, label, score, outline in zip(boxes, self.labels, self.scores, outlines, strict=True)
        ]


@torch.no_grad()
def detect_objects(
    network: nn.Module, batches: Iterable[dict], targets: Sequence[BoxTarget], device, autocast
) -> dict[int, Objects]:
    """Runs a detector over all processes' batches of letterboxed ``images`` and ``index``; all must call together.

    Args:
        network: :class:`idmm.dense.network.Detector`.
        batches: Of :class:`idmm.dense.DenseTransform`.
        targets: Of all images, by their numbers; only the files' sizes are used.
        device: Where the network is.
        autocast: Makes the context of a forward pass.

    Returns:
        What was found in each image, by its number.
    """
    found: dict[int, Objects] = {}
    with evaluating(network):
        for batch in batches:
            images = batch["images"].to(device, non_blocking=True)
            with autocast():
                outputs = network(images)
            for number, output in zip(batch["index"].tolist(), outputs, strict=True):
                found[number] = on_file(output, targets[number].size, images.shape[-1])
    together = {number: one for part in distributed.gather(found) for number, one in part.items()}
    return dict(sorted(together.items()))


def on_file(output: dict[str, Tensor], size: tuple[int, int], side: int) -> Objects:
    """Takes what a detector found on a letterboxed canvas back to the image's file.

    Masks are drawn at the file's size at once, not on the canvas. In training torchvision samples them half a pixel of
    the canvas too far to the upper left (its RoIAlign is not aligned), which is put right here; its own way to draw
    them is coarser still (tests/test_evaluate_dense.py compares).

    Args:
        output: Of one image, see :meth:`idmm.dense.network.Detector.forward`.
        size: Height and width of the file (pixels).
        side: Of the canvas (pixels).
    """
    output = {name: value.float().cpu() if value.is_floating_point() else value.cpu() for name, value in output.items()}
    (h, w), (height, width) = size, letterboxed(size, side)
    factor = torch.tensor([w / width, h / height] * 2)
    boxes = (output["boxes"] * factor).clamp(min=0).minimum(torch.tensor([w, h] * 2))
    there = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(1)  # else all of it is in the padding
    segments = None
    if "masks" in output:
        whole = (output["boxes"][there] + 0.5) * factor  # not clipped
        segments = [_run_lengths(m, box, size) for m, box in zip(output["masks"][there], whole.tolist(), strict=True)]
    return Objects(boxes[there].numpy(), output["labels"][there].numpy(), output["scores"][there].numpy(), segments)


def _run_lengths(mask: Tensor, box: list[float], size: tuple[int, int]) -> dict:
    """Draws a mask [1, 28, 28] (shares within a box) into an image of ``size``; returns it as COCO's RLE."""
    from pycocotools import mask as coco

    (x1, y1, x2, y2), (h, w) = box, size
    rows, columns = (range(max(0, int(a)), min(n, math.ceil(b))) for a, b, n in ((y1, y2, h), (x1, x2, w)))
    y, x = ((torch.tensor(r) + 0.5 - a) / (b - a) * 2 - 1 for r, a, b in ((rows, y1, y2), (columns, x1, x2)))
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)  # [rows, columns, 2], -1 to 1 within the box
    drawn = np.zeros(size, dtype=np.uint8, order="F")
    inside = F.grid_sample(mask[None], places[None], align_corners=False)[0, 0] >= 0.5
    drawn[rows.start : rows.stop, columns.start : columns.stop] = inside.numpy()
    return {"size": list(size), "counts": coco.encode(drawn)["counts"].decode()}


def detection_scores(
    predictions: Sequence[Objects], truth: Sequence[BoxTarget], classes: Sequence[str]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Returns COCO's average precisions, by pycocotools, of images' predictions and their true objects.

    Up to 100 predictions an image count; objects of a crowd neither help nor hurt. A class without a true object does
    not count in the means.

    Returns:
        In percent ``ap`` (the mean over intersections over union of 0.50 to 0.95), ``ap50`` and ``ap75``, and where
        predictions and truth have outlines ``mask_ap``, ``mask_ap50`` and ``mask_ap75``; all 0 where there is no true
        object. Then the same of each class, float64 [K] each, NaN where it has no true object.
    """
    outlined = [target.segments is not None or not len(target.boxes) for target in truth]
    outlined += [objects.segments is not None for objects in predictions]
    kinds = {"bbox": "", "segm": "mask_"} if all(outlined) else {"bbox": ""}
    each: dict[str, np.ndarray] = {}
    for kind, prefix in kinds.items():
        precision = _precision(kind, predictions, truth, len(classes))  # [10, 101, K]
        for name, thresholds in {"ap": slice(None), "ap50": slice(0, 1), "ap75": slice(5, 6)}.items():
            part = precision[thresholds].reshape(-1, len(classes))
            each[prefix + name] = np.where((part < 0).any(0), np.nan, 100 * part.mean(0))
    seen = ~np.isnan(each["ap"])
    return {name: float(values[seen].mean()) if seen.any() else 0.0 for name, values in each.items()}, each


def _precision(kind: str, predictions: Sequence[Objects], truth: Sequence[BoxTarget], classes: int) -> np.ndarray:
    """Returns the precision by IoU threshold (0.50, 0.55 ... 0.95), recall (0, 0.01 ... 1) and class, -1 where there is
    no true object; of all sizes, so that areas do not matter."""
    from pycocotools.cocoeval import COCOeval

    true, found = [], []
    for number, (target, objects) in enumerate(zip(truth, predictions, strict=True)):
        outlines = target.segments if kind == "segm" else [None] * len(target.boxes)
        for (x1, y1, x2, y2), label, crowd, outline in zip(
            target.boxes, target.labels, target.crowd, outlines, strict=True
        ):
            entry = {"image_id": number, "category_id": int(label), "bbox": [x1, y1, x2 - x1, y2 - y1]}
            true.append({**entry, "area": 0, "iscrowd": int(crowd), "segmentation": outline})
        found += [{**entry, "area": 0, "iscrowd": 0} for entry in objects.results(number, range(classes))]
    sizes = [target.size for target in truth]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        judge = COCOeval(_coco(true, sizes, classes), _coco(found, sizes, classes), kind)
        judge.evaluate()
        judge.accumulate()
    return judge.eval["precision"][:, :, :, 0, -1]  # of objects of all sizes, up to 100 predictions


def _coco(annotations: list[dict], sizes: list[tuple[int, int]], classes: int):
    from pycocotools.coco import COCO

    made = COCO()
    made.dataset = {
        "images": [{"id": number, "height": h, "width": w} for number, (h, w) in enumerate(sizes)],
        "categories": [{"id": number, "name": str(number)} for number in range(classes)],
        "annotations": [{**entry, "id": number} for number, entry in enumerate(annotations, start=1)],
    }
    made.createIndex()
    return made


# ---------------------------------------------------------------------- classes of pixels
def segmented(network: Segmenter, images: Tensor, scales: Sequence[float] = (1.0,)) -> Tensor:
    """Returns the probability of each class at each pixel, the mean over scales.

    Args:
        network: In evaluation mode; its backbone takes images of all :func:`idmm.config.dense.tested_sides`.
        images: [B, C, S, S].
        scales: Of S.

    Returns:
        float32 [B, K, S, S].
    """
    size, total, sides = images.shape[-1], 0.0, tested_sides(images.shape[-1], scales)
    for side in sides:
        seen = images if side == size else _scaled(images, side)
        shares = network(seen).float().softmax(1)  # [B, K, side, side]
        total = total + (shares if side == size else _scaled(shares, size))  # one by one: each takes gigabytes
    return total / len(sides)


def classes_on_file(logits: Tensor, size: tuple[int, int], side: int) -> Tensor:
    """Returns the likeliest class of each pixel of an image's file, int64 [H, W] on the CPU, of logits [K, S, S] on its
    canvas; class after class, as all of them at the size of a photograph would want gigabytes."""
    h, w = letterboxed(size, side)
    best = torch.full(size, -torch.inf, device=logits.device)
    found = torch.zeros(size, dtype=torch.int64, device=logits.device)
    for number, plane in enumerate(logits[:, :h, :w].float()):
        enlarged = F.interpolate(plane[None, None], size=size, mode="bilinear", align_corners=False)[0, 0]
        found[enlarged > best] = number
        best = torch.maximum(best, enlarged)
    return found.cpu()


def _scaled(images: Tensor, side: int) -> Tensor:
    return F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False, antialias=True)


def class_scores(confusion) -> tuple[np.ndarray, np.ndarray]:
    """Returns of each class the intersection over union and the accuracy (share of its pixels that are named right) in
    percent, float64 [K] each; NaN where it occurs neither in truth nor prediction, or not in truth.

    Args:
        confusion: Pixels by true class (rows) and predicted class, int64 [K, K].
    """
    counts = np.asarray(confusion).astype(np.float64)
    right, true = counts.diagonal(), counts.sum(1)
    union = true + counts.sum(0) - right
    return tuple(100 * np.divide(right, of, out=np.full_like(right, np.nan), where=of > 0) for of in (union, true))


def segmentation_scores(confusion) -> dict[str, float]:
    """Returns ``miou``, ``macc`` and ``pixel_accuracy`` in percent, 0 where no pixel has a class.

    As is usual a class counts in the mean IoU where it occurs in truth or prediction, in the mean accuracy where it
    occurs in truth.

    Args:
        confusion: As for :func:`class_scores`.
    """
    counts = np.asarray(confusion)
    if not counts.sum():
        return dict.fromkeys(("miou", "macc", "pixel_accuracy"), 0.0)
    iou, accuracy = class_scores(counts)
    pixels = 100 * counts.trace() / counts.sum()
    return {"miou": float(np.nanmean(iou)), "macc": float(np.nanmean(accuracy)), "pixel_accuracy": float(pixels)}
