"""Batches of images with boxes or masks on a square canvas: letterboxed, and augmented for training.

An image keeps its aspect and lies in the upper left of its canvas. The rest has the mean colour. Masks ignore it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from idmm.data.image_store import ImageStore
from idmm.data.images import unit
from idmm.data.views import normalise, numbered, resize
from idmm.dense.targets import IGNORED, BoxTarget, nearest, outlined
from idmm.seeding import derive, seeded

# Strengths of SSD (Liu et al., ECCV 2016) without its channel swaps, each with probability 0.5
COLOURS = {"brightness": (0.875, 1.125), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-0.05, 0.05)}
DISTORT = v2.Compose([v2.RandomApply([v2.ColorJitter(**{name: span})]) for name, span in COLOURS.items()])
# removes objects whose boxes have less than a pixel (of the canvas) in the image
SANITIZE = v2.Compose([v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=1.0)])


def letterboxed(size: tuple[int, int], side: int, scale: float = 1.0) -> tuple[int, int]:
    """Return height and width (pixels, at least 1) of an image whose long side becomes ``side`` times ``scale``."""
    factor = side / max(size) * scale
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def resized_to(image: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return an image, uint8 or uint16 [C, H, W], resized to float32 [C, *shape] in [0, 1]."""
    resized = resize(image, list(shape))
    return unit(resized) if resized.dtype == torch.uint8 else resized


def on_canvas(array: Tensor, side: int, fill: int = 0) -> Tensor:
    """Return an array [C, h, w] in the upper left of a canvas, [C, side, side]."""
    height, width = array.shape[1:]
    return torch.nn.functional.pad(array, (0, side - width, 0, side - height), value=fill)


class DenseTransform:
    """Makes a batch of letterboxed images, as a :data:`idmm.data.loaders.BatchFn`.

    With ``augment`` each image has a seed of its own from (key, epoch, image). It is letterboxed times a random scale,
    cropped at random if it is larger than the canvas, flipped and recoloured, by torchvision.

    Args:
        store: Images by number, with targets of one kind.
        size: Side of the canvas (pixels).
        mean, std: One value per channel. A single one makes RGB images grey.
        augment: Has ``scale`` (lowest and highest, of the letterboxed size), ``flip`` (probability) and
            ``photometric`` (whether colours change). None: no augmentation, for evaluation.
        key: From :func:`idmm.seeding.derive`, different per seed and stage.
        only_images: Leave out the targets.
    """

    def __init__(
        self, store: ImageStore, size: int, mean, std, augment: Any = None, key: int = 0, only_images: bool = False
    ):
        self.store, self.size, self.mean, self.std = store, size, mean, std
        self.augment, self.key, self.only_images = augment, key, only_images
        self.outlined = outlined(store.targets)

    def __call__(self, epoch: int, indices: np.ndarray) -> dict:
        """Return a batch of B images as padded tensors.

        It has ``images`` (float32 [B, C, S, S]) and ``index`` (int64 [B]). Detection adds ``boxes`` (float32 [B, M, 4],
        on the canvas, M the most of an image), ``labels`` (int64 [B, M], -1 for padding) and, if the data have
        outlines, ``masks`` (uint8 [B, M, S, S]). Segmentation adds ``mask`` (int64 [B, S, S], 255 ignored).
        """
        samples = [self._sample(epoch, int(i)) for i in indices]
        samples = [{name: value.as_subclass(Tensor) for name, value in sample.items()} for sample in samples]
        images = [normalise(sample["image"][None], self.mean, self.std)[0] for sample in samples]
        batch = {"images": torch.stack([on_canvas(image, self.size) for image in images])}  # padded with the mean
        if "labels" in samples[0]:
            batch["boxes"] = pad_sequence([sample["boxes"] for sample in samples], batch_first=True)
            labels = [sample["labels"] for sample in samples]
            batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=-1)
            if self.outlined:
                masks = [on_canvas(sample["masks"], self.size) for sample in samples]
                batch["masks"] = pad_sequence(masks, batch_first=True)
        elif "masks" in samples[0]:
            masks = [on_canvas(sample["masks"], self.size, IGNORED) for sample in samples]
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
            if (height, width) != (h, w):
                box = (round(top * (h - height)), round(left * (w - width)), height, width)
                sample = _apply(sample, lambda value: F.crop(value, *box))
                sample = SANITIZE(sample) if "boxes" in sample else sample
            if flip < self.augment.flip:
                sample = _apply(sample, F.horizontal_flip)
            if self.augment.photometric:
                sample["image"] = DISTORT(sample["image"])
            return sample

    def _scaled(self, i: int, scale: float) -> dict[str, Tensor]:
        """Return image ``i``, letterboxed times ``scale``, with its target.

        It has ``image`` float32 [C, h, w] in [0, 1]. Detection adds ``boxes`` [n, 4], ``labels`` [n] and, with
        outlines, ``masks`` uint8 [n, h, w]. Segmentation adds ``masks`` uint8 [1, h, w].
        """
        target = self.store.targets[i]
        h, w = letterboxed(target.size, self.size, scale)
        sample = {"image": tv_tensors.Image(resized_to(self.store.image(i), (h, w)))}
        if self.only_images:
            return sample
        if not isinstance(target, BoxTarget):
            return sample | {"masks": tv_tensors.Mask(torch.from_numpy(nearest(target.mask(), (h, w)))[None])}
        boxes, labels = (torch.from_numpy(array[~target.crowd]) for array in (target.boxes, target.labels))
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=target.size)
        sample |= {"boxes": F.resize(boxes, [h, w]), "labels": labels}
        if self.outlined:
            sample["masks"] = tv_tensors.Mask(torch.from_numpy(target.masks(h, w)[~target.crowd]))
        return SANITIZE(sample)


def _apply(sample: dict[str, Tensor], function: Callable) -> dict[str, Tensor]:
    """Apply a function of torchvision to image, boxes and masks."""
    return {name: function(v) if isinstance(v, tv_tensors.TVTensor) else v for name, v in sample.items()}
