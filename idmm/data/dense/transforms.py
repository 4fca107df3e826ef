"""Batches of images with boxes and masks on a square canvas: scaled, cropped, flipped and recoloured, or letterboxed.

An image lies in the upper left of its canvas, scaled with its aspect kept; the rest is the mean colour and, in masks,
ignored.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from idmm.data.cache import ImageStore
from idmm.data.dense.targets import IGNORED, BoxTarget, Target, nearest
from idmm.data.images import unit
from idmm.data.views import normalise, numbered, resize
from idmm.seeding import derive, seeded

# Strengths of Liu et al., ECCV 2016 (SSD), without its exchange of colours; each with a probability of a half
COLOURS = {"brightness": (0.875, 1.125), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-0.05, 0.05)}
LEAST = 1.0  # sides of a box on the canvas that is kept (pixels)


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
    made = torch.full((len(array), side, side), fill, dtype=array.dtype)
    made[:, : array.shape[1], : array.shape[2]] = array
    return made


def from_canvas(boxes: Tensor, size: tuple[int, int], side: int) -> Tensor:
    """Takes boxes [n, 4] (x1, y1, x2, y2) on a letterboxed canvas back to the pixels of the image, and clips them.

    Args:
        boxes: On the canvas (pixels).
        size: Height and width of the image's file (pixels).
        side: Of the canvas (pixels).
    """
    (h, w), (height, width) = size, letterboxed(size, side)
    factor = boxes.new_tensor([w / width, h / height] * 2)
    limit = boxes.new_tensor([w, h] * 2)
    return (boxes * factor).clamp(min=0).minimum(limit)


def short_side(size: int, largest: float = 1.0) -> int:
    """Returns up to which short side images must be kept (pixels) so that none is enlarged that is not small itself.

    Args:
        size: Side of the canvas (pixels).
        largest: What letterboxed images are scaled by at most.
    """
    return math.ceil(size * largest)


class _Sample(NamedTuple):
    """An image and what belongs to it, of the same height and width."""

    image: tv_tensors.Image  # float32 [C, h, w] in [0, 1]
    boxes: tv_tensors.BoundingBoxes | None  # float32 [n, 4]
    masks: tv_tensors.Mask | None  # uint8 [n, h, w], or of classes [1, h, w]
    labels: Tensor | None  # int64 [n]

    def each(self, change) -> "_Sample":
        """Applies a function of torchvision's to what it knows: image, boxes and masks."""
        return _Sample(*(part if part is None else change(part) for part in self[:3]), self.labels)


class EvalDenseTransform:
    """Makes the letterboxed images of a batch; a :data:`idmm.data.loaders.BatchFn`.

    Args:
        store: Images by number.
        targets: Of each image of the store, all of one kind.
        size: Side of the canvas (pixels).
        mean, std: Of each channel; one value makes RGB images grey.
    """

    def __init__(self, store: ImageStore, targets: Sequence[Target], size: int, mean, std):
        self.store, self.targets, self.size, self.mean, self.std = store, targets, size, mean, std
        self.boxed = isinstance(targets[0], BoxTarget)
        self.outlined = self.boxed and any(target.segments is not None for target in targets)

    def __call__(self, epoch: int, indices: np.ndarray) -> dict:
        """Returns a batch of B images, of tensors that are padded so that they stack.

        ``images`` (float32 [B, C, S, S]) and ``index`` (int64 [B]). Of boxes: ``boxes`` (float32 [B, M, 4], on the
        canvas, M the most of an image), ``labels`` (int64 [B, M], -1 where there is none) and, where the data have
        outlines, ``masks`` (uint8 [B, M, S, S]). Else ``mask`` (int64 [B, S, S], 255 ignored).
        """
        samples = [self._sample(epoch, int(i)) for i in indices]
        batch = {"images": self._images(samples)}
        if self.boxed:
            batch |= self._objects(samples)
        else:
            batch["mask"] = self._canvases([sample.masks for sample in samples], IGNORED)[:, 0].long()
        return numbered(batch, self.store, indices)

    def _sample(self, epoch: int, i: int) -> _Sample:
        return self._scaled(i, 1.0)

    def _scaled(self, i: int, scale: float) -> _Sample:
        """Returns image ``i`` letterboxed, times a scale, and what belongs to it."""
        target = self.targets[i]
        h, w = letterboxed(target.size, self.size, scale)
        image = tv_tensors.Image(resized_to(self.store.image(i), (h, w)))
        if not self.boxed:
            mask = nearest(target.mask(), (h, w))
            return _Sample(image, None, tv_tensors.Mask(torch.from_numpy(mask)[None]), None)
        target = target.take(~target.crowd)
        given = {"format": "XYXY", "canvas_size": target.size}
        boxes = F.resize(tv_tensors.BoundingBoxes(torch.from_numpy(target.boxes), **given), [h, w])
        masks = tv_tensors.Mask(torch.from_numpy(target.masks(h, w))) if self.outlined else None
        return _sane(_Sample(image, boxes, masks, torch.from_numpy(target.labels)))

    def _images(self, samples: list[_Sample]) -> Tensor:
        """Returns the images, normalised, on canvases of zeros: the mean colour, float32 [B, C, S, S]."""
        shown = [normalise(sample.image.as_subclass(Tensor)[None], self.mean, self.std)[0] for sample in samples]
        return self._canvases(shown, 0)

    def _canvases(self, arrays: Sequence[Tensor], fill: int) -> Tensor:
        """Lays arrays [C, h, w] into the upper left of canvases, [B, C, S, S]."""
        return torch.stack([on_canvas(array, self.size, fill) for array in arrays])

    def _objects(self, samples: list[_Sample]) -> dict:
        most = max(len(sample.labels) for sample in samples)
        boxes = torch.zeros(len(samples), most, 4)
        labels = torch.full((len(samples), most), -1)
        shape = (len(samples), most, self.size, self.size)
        masks = torch.zeros(shape, dtype=torch.uint8) if self.outlined else None
        for b, sample in enumerate(samples):
            n = len(sample.labels)
            boxes[b, :n], labels[b, :n] = sample.boxes.as_subclass(Tensor), sample.labels
            if masks is not None:
                h, w = sample.masks.shape[1:]
                masks[b, :n, :h, :w] = sample.masks.as_subclass(Tensor)
        return {"boxes": boxes, "labels": labels} | ({} if masks is None else {"masks": masks})


class DenseTransform(EvalDenseTransform):
    """Makes the augmented images of a batch; a :data:`idmm.data.loaders.BatchFn`.

    Of each image, under a seed of its own from (key, epoch, image): letterboxed times a random scale, cropped at random
    where it is larger than the canvas, flipped, and recoloured, by torchvision.

    Args:
        store, targets, size, mean, std: As of :class:`EvalDenseTransform`.
        augment: Has ``scale`` (least and greatest, of the letterboxed size), ``flip`` (probability) and
            ``photometric`` (whether brightness, contrast, saturation and hue are changed).
        key: From :func:`idmm.seeding.derive`, another for each seed and stage.
    """

    def __init__(self, store: ImageStore, targets: Sequence[Target], augment: Any, size: int, mean, std, key: int):
        super().__init__(store, targets, size, mean, std)
        self.augment, self.key = augment, key
        self.distort = v2.Compose([v2.RandomApply([v2.ColorJitter(**{name: of})]) for name, of in COLOURS.items()])

    def _sample(self, epoch: int, i: int) -> _Sample:
        with seeded(derive(self.key, "augment", epoch, i)):
            scale, top, left, flip = torch.rand(4).tolist()
            low, high = self.augment.scale
            sample = self._scaled(i, low + (high - low) * scale)
            h, w = sample.image.shape[1:]
            height, width = min(h, self.size), min(w, self.size)
            box = (round(top * (h - height)), round(left * (w - width)), height, width)
            if (height, width) != (h, w):
                sample = _sane(sample.each(lambda part: F.crop(part, *box)))
            if flip < self.augment.flip:
                sample = sample.each(F.horizontal_flip)
            if self.augment.photometric:
                sample = sample._replace(image=self.distort(sample.image))
            return sample


def _sane(sample: _Sample) -> _Sample:
    """Leaves out the objects whose boxes have less than a pixel within the image."""
    if sample.boxes is None:
        return sample
    boxes = F.clamp_bounding_boxes(sample.boxes)
    _, kept = F.sanitize_bounding_boxes(boxes, min_size=LEAST)
    masks = None if sample.masks is None else tv_tensors.wrap(sample.masks[kept], like=sample.masks)
    return _Sample(sample.image, tv_tensors.wrap(boxes[kept], like=boxes), masks, sample.labels[kept])
