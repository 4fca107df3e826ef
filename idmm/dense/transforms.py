"""Batches of images with boxes or masks on a canvas: letterboxed, and augmented for training.

An image keeps its aspect and lies in the upper left of its canvas. The rest has the mean colour.
Masks ignore it. The canvas is a square, or with a short side the smallest that holds the images of
the batch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from idmm.batch import Batch
from idmm.config.dense import STEP, DenseAugment, DetectAugment
from idmm.data.image_store import ImageStore
from idmm.data.images import unit
from idmm.data.views import normalise, resize, with_labels
from idmm.dense.targets import IGNORED, BoxTarget, Integers, Size, nearest, outlined
from idmm.models.base import Tensors
from idmm.seeding import derive, seeded

# Strengths of SSD (Liu et al., ECCV 2016) without its channel swaps, each with probability 0.5
COLOURS = {
    "brightness": (0.875, 1.125),
    "contrast": (0.5, 1.5),
    "saturation": (0.5, 1.5),
    "hue": (-0.05, 0.05),
}
DISTORT = v2.Compose(
    [v2.RandomApply([v2.ColorJitter(**{name: span})]) for name, span in COLOURS.items()]
)
SANITIZE = v2.Compose([v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=1.0)])
"""Removes objects whose boxes have less than a pixel of the canvas in the image."""


def letterboxed(
    size: Size,
    side: int,
    scale: float = 1.0,
    short: float | None = None,
) -> Size:
    """Return the size of an image whose long side becomes ``side`` times ``scale``, at least 1.

    With ``short`` the short side becomes ``short``, unless the long side would be more than
    ``side``.
    """
    factor = side / max(size)
    if short is None:
        factor *= scale
    else:
        factor = min(short / min(size), factor)
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def resized_to(image: Tensor, shape: Size) -> Tensor:
    """Return an image, uint8 or uint16 [C, H, W], resized to float32 [C, *shape] in [0, 1]."""
    resized = resize(image, list(shape))
    if resized.dtype == torch.uint8:
        return unit(resized)
    return resized


def canvas_of(
    shapes: Iterable[Sequence[int]],
    side: int,
    short: float | None,
) -> Size:
    """Return the size of the canvas for images of these sizes."""
    if short is None:
        return side, side
    heights, widths = zip(*shapes, strict=True)
    return STEP * math.ceil(max(heights) / STEP), STEP * math.ceil(max(widths) / STEP)


def on_canvas(
    array: Tensor,
    canvas: Size,
    fill: int = 0,
) -> Tensor:
    """Return an array [C, h, w] in the upper left of a canvas, [C, H, W]."""
    height, width = array.shape[1:]
    return torch.nn.functional.pad(array, (0, canvas[1] - width, 0, canvas[0] - height), value=fill)


@dataclass(eq=False)
class DenseTransform:
    """Makes a batch of letterboxed images, as a :data:`idmm.batch.BatchFn`.

    With ``augment`` each image has a seed of its own from (key, epoch, image). It is letterboxed
    times a random scale, cropped at random if it is larger than the canvas, flipped and recoloured,
    by torchvision.

    Args:
        store: Images by number, with targets of one kind.
        size: Side of the canvas, or with ``short`` the longest side of an image (pixels).
        mean, std: One value per channel. A single one makes RGB images grey.
        augment: Has ``scale`` (lowest and highest, of the letterboxed size), ``flip`` (probability)
            and ``photometric`` (whether colours change). Boxes have ``short_side`` (its range, or
            None). None: no augmentation, for evaluation.
        key: From :func:`idmm.seeding.derive`, different per seed and stage.
        only_images: Leave out the targets.
        short: Short side of images for evaluation (pixels). None: the canvas is a square.
    """

    store: ImageStore
    size: int
    mean: Sequence[float]
    std: Sequence[float]
    augment: DenseAugment | None = None
    key: int = 0
    only_images: bool = False
    short: float | None = None

    def __post_init__(self) -> None:
        self.short_range: list[float] | None = None
        if isinstance(self.augment, DetectAugment) and self.augment.short_side:
            self.short_range = self.augment.short_side
            self.short = self.short_range[1]
        self.targets = self.store.targets or []
        self.outlined = outlined(self.targets)

    def __call__(self, epoch: int, indices: Integers) -> Batch:
        """Return a batch of B images as padded tensors.

        Canvases have height H and width W. The batch has ``images`` (float32 [B, C, H, W]) and
        ``index`` (int64 [B]). Detection adds ``boxes`` (float32 [B, M, 4], on the canvas, M the
        most of an image), ``labels`` (int64 [B, M], -1 for padding) and, if the data have outlines,
        ``masks`` (uint8 [B, M, H, W]). Segmentation adds ``mask`` (int64 [B, H, W], 255 ignored).
        """
        samples = [self._sample(epoch, int(i)) for i in indices]

        def column(name: str) -> list[Tensor]:
            return [sample[name].as_subclass(Tensor) for sample in samples]

        images = [normalise(image[None], self.mean, self.std)[0] for image in column("image")]
        canvas = canvas_of([image.shape[1:] for image in images], self.size, self.short)
        # padded with the mean
        batch: Batch = {"images": torch.stack([on_canvas(image, canvas) for image in images])}
        if "boxes" in samples[0]:
            batch["boxes"] = pad_sequence(column("boxes"), batch_first=True)
            batch["labels"] = pad_sequence(column("labels"), batch_first=True, padding_value=-1)
            if self.outlined:
                masks = [on_canvas(mask, canvas) for mask in column("masks")]
                batch["masks"] = pad_sequence(masks, batch_first=True)
        elif "masks" in samples[0]:
            masks = [on_canvas(mask, canvas, IGNORED) for mask in column("masks")]
            batch["mask"] = torch.cat(masks).long()
        return with_labels(batch, self.store, indices)

    def _sample(self, epoch: int, i: int) -> Tensors:
        if self.augment is None:
            return self._scaled(i, 1.0, self.short)
        with seeded(derive(self.key, "augment", epoch, i)):
            position, top, left, flip = torch.rand(4).tolist()
            low, high = self.short_range or self.augment.scale
            drawn = low + (high - low) * position
            short = drawn if self.short_range else None
            sample = self._scaled(i, drawn, short)
            h, w = sample["image"].shape[1:]
            height = min(h, self.size)
            width = min(w, self.size)
            if (height, width) != (h, w):
                corner = (round(top * (h - height)), round(left * (w - width)))
                sample = _apply(sample, lambda value: F.crop(value, *corner, height, width))
                if "boxes" in sample:
                    sample = SANITIZE(sample)
            if flip < self.augment.flip:
                sample = _apply(sample, F.horizontal_flip)
            if self.augment.photometric:
                sample["image"] = DISTORT(sample["image"])
            return sample

    def _scaled(
        self,
        i: int,
        scale: float,
        short: float | None = None,
    ) -> Tensors:
        """Return image ``i``, letterboxed times ``scale``, or to the short side, with its target.

        It has ``image`` float32 [C, h, w] in [0, 1]. Detection adds ``boxes`` [n, 4], ``labels``
        [n] and, with outlines, ``masks`` uint8 [n, h, w]. Segmentation adds ``masks`` uint8
        [1, h, w].
        """
        target = self.targets[i]
        h, w = letterboxed(target.size, self.size, scale, short)
        sample: Tensors = {"image": tv_tensors.Image(resized_to(self.store.image(i), (h, w)))}
        if self.only_images:
            return sample
        if not isinstance(target, BoxTarget):
            mask = torch.from_numpy(nearest(target.mask(), (h, w)))
            sample["masks"] = tv_tensors.Mask(mask[None])
            return sample
        single = ~target.crowd
        boxes = tv_tensors.BoundingBoxes(
            torch.from_numpy(target.boxes[single]), format="XYXY", canvas_size=target.size
        )
        sample["boxes"] = F.resize(boxes, [h, w])
        sample["labels"] = torch.from_numpy(target.labels[single])
        if self.outlined:
            masks = torch.from_numpy(target.masks(h, w)[single])
            sample["masks"] = tv_tensors.Mask(masks)
        outputs: Tensors = SANITIZE(sample)
        return outputs


def _apply(sample: Tensors, function: Callable[[Any], Tensor]) -> Tensors:
    """Apply a function of torchvision to image, boxes and masks."""
    changed = dict(sample)
    for name, value in sample.items():
        if isinstance(value, tv_tensors.TVTensor):
            changed[name] = function(value)
    return changed
