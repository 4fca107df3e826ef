"""Batches of images with boxes and masks on a square canvas: scaled, cropped, flipped and recoloured, or letterboxed.

An image lies in the upper left of its canvas, scaled with its aspect kept; the rest is the mean colour and, in masks,
ignored.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from idmm.data.cache import ImageStore
from idmm.data.images import unit
from idmm.data.views import normalise, numbered, resize
from idmm.dense.targets import IGNORED, BoxTarget, Target, nearest
from idmm.seeding import derive, seeded

# Strengths of Liu et al., ECCV 2016 (SSD), without its exchange of colours; each with a probability of a half
COLOURS = {"brightness": (0.875, 1.125), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-0.05, 0.05)}
DISTORT = v2.Compose([v2.RandomApply([v2.ColorJitter(**{name: of})]) for name, of in COLOURS.items()])
SANE = v2.Compose([v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=1.0)])  # (pixels of the canvas)


def letterboxed(size: tuple[int, int], side: int, scale: float = 1.0) -> tuple[int, int]:
    """Returns height and width (pixels) of an image whose long side is scaled to ``side``, times ``scale``; one pixel
    at least."""
    factor = side / max(size) * scale
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def resized_to(image: Tensor, shape: tuple[int, int]) -> Tensor:
    """Resizes an image, uint8 or uint16 [C, H, W], to float32 [C, *shape] in [0, 1]."""
    made = resize(image, list(shape))
    return unit(made) if made.dtype == torch.uint8 else made


def on_canvas(array: Tensor, side: int, fill: int = 0) -> Tensor:
    """Lays an array [C, h, w] into the upper left of a canvas, [C, side, side]."""
    height, width = array.shape[1:]
    return torch.nn.functional.pad(array, (0, side - width, 0, side - height), value=fill)


class DenseTransform:
    """Makes a batch of letterboxed images; a :data:`idmm.data.loaders.BatchFn`.

    With ``augment`` each image is changed under a seed of its own from (key, epoch, image): letterboxed times a random
    scale, cropped at random if it is larger than the canvas, flipped, and recoloured, by torchvision.

    Args:
        store: Images by number.
        targets: Of each image of the store, all of one kind.
        size: Side of the canvas (pixels).
        mean, std: Of each channel; one value makes RGB images grey.
        augment: Has ``scale`` (least and greatest, of the letterboxed size), ``flip`` (probability) and
            ``photometric`` (whether brightness, contrast, saturation and hue are changed); None: images to evaluate on.
        key: From :func:`idmm.seeding.derive`, another for each seed and stage.
    """

    def __init__(
        self, store: ImageStore, targets: Sequence[Target], size: int, mean, std, augment: Any = None, key: int = 0
    ):
        self.store, self.targets, self.size, self.mean, self.std = store, targets, size, mean, std
        self.augment, self.key = augment, key
        self.outlined = any(getattr(target, "segments", None) is not None for target in targets)

    def __call__(self, epoch: int, indices: np.ndarray) -> dict:
        """Returns a batch of B images, of tensors that are padded so that they stack.

        ``images`` (float32 [B, C, S, S]) and ``index`` (int64 [B]). Of boxes: ``boxes`` (float32 [B, M, 4], on the
        canvas, M the most of an image), ``labels`` (int64 [B, M], -1 where there is none) and, where the data have
        outlines, ``masks`` (uint8 [B, M, S, S]). Else ``mask`` (int64 [B, S, S], 255 ignored).
        """
        samples = [self._sample(epoch, int(i)) for i in indices]
        shown = [normalise(sample["image"].as_subclass(Tensor)[None], self.mean, self.std)[0] for sample in samples]
        batch = {"images": torch.stack([on_canvas(image, self.size) for image in shown])}  # the rest: the mean colour
        known = {name: [sample[name].as_subclass(Tensor) for sample in samples] for name in samples[0]}
        if "labels" in known:
            batch["boxes"] = pad_sequence(known["boxes"], batch_first=True)
            batch["labels"] = pad_sequence(known["labels"], batch_first=True, padding_value=-1)
            if self.outlined:
                batch["masks"] = torch.zeros(*batch["labels"].shape, self.size, self.size, dtype=torch.uint8)
                for canvases, each in zip(batch["masks"], known["masks"], strict=True):
                    n, h, w = each.shape
                    canvases[:n, :h, :w] = each
        else:
            masks = [on_canvas(mask, self.size, IGNORED) for mask in known["masks"]]
            batch["mask"] = torch.cat(masks).long()
        return numbered(batch, self.store, indices)

    def _sample(self, epoch: int, i: int) -> dict[str, Tensor]:
        if self.augment is None:
            return self._scaled(i, 1.0)
        with seeded(derive(self.key, "augment", epoch, i)):
            scale, top, left, flip = torch.rand(4).tolist()
            low, high = self.augment.scale
            sample = self._scaled(i, low + (high - low) * scale)
            h, w = sample["image"].shape[1:]
            height, width = min(h, self.size), min(w, self.size)
            box = (round(top * (h - height)), round(left * (w - width)), height, width)
            if (height, width) != (h, w):
                sample = _sane(_each(sample, lambda part: F.crop(part, *box)))
            if flip < self.augment.flip:
                sample = _each(sample, F.horizontal_flip)
            if self.augment.photometric:
                sample["image"] = DISTORT(sample["image"])
            return sample

    def _scaled(self, i: int, scale: float) -> dict[str, Tensor]:
        """Returns image ``i`` letterboxed, times a scale, and what belongs to it: ``image`` float32 [C, h, w] in
        [0, 1]; of objects ``boxes`` [n, 4], ``labels`` [n] and, with outlines, ``masks`` uint8 [n, h, w]; or ``masks``
        of classes [1, h, w]."""
        target = self.targets[i]
        h, w = letterboxed(target.size, self.size, scale)
        sample = {"image": tv_tensors.Image(resized_to(self.store.image(i), (h, w)))}
        if not isinstance(target, BoxTarget):
            return sample | {"masks": tv_tensors.Mask(torch.from_numpy(nearest(target.mask(), (h, w)))[None])}
        target = target.take(~target.crowd)
        boxes = tv_tensors.BoundingBoxes(torch.from_numpy(target.boxes), format="XYXY", canvas_size=target.size)
        sample |= {"boxes": F.resize(boxes, [h, w]), "labels": torch.from_numpy(target.labels)}
        if self.outlined:
            sample["masks"] = tv_tensors.Mask(torch.from_numpy(target.masks(h, w)))
        return _sane(sample)


def _each(sample: dict[str, Tensor], change: Callable) -> dict[str, Tensor]:
    """Applies a function of torchvision's to image, boxes and masks."""
    return {name: change(part) if isinstance(part, tv_tensors.TVTensor) else part for name, part in sample.items()}


def _sane(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leaves out the objects whose boxes have less than a pixel within the image."""
    return SANE(sample) if "boxes" in sample else sample
