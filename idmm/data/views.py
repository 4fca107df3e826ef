"""Random views of images: crops, then colours, by a plan of :mod:`idmm.data.view_plan`.

One view is made after the other, so that it stays in the processor's cache from its crop to its
normalised channels. Images have any number of channels, of 8 or 16 bits. Three are RGB. RGB of 8
bits is resized as bytes, all other images as floats. Hue, saturation and grey apply to RGB only.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from timm.data.auto_augment import RandAugment, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from idmm.batch import Batch
from idmm.config import Augment, Views
from idmm.config.data import Colours, colours_of
from idmm.data.image_store import ImageStore
from idmm.data.images import LUMA, PerChannel, unit
from idmm.data.view_plan import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    ORDERS,
    SATURATION,
    Integers,
    ViewPlan,
    draw_views,
)
from idmm.errors import UserError
from idmm.seeding import derive, reseed, seeded

SOLARIZE_FROM = 0.5  # values below stay, as those under 128 of 255

Planes = NDArray[Any]  # float32 values of an image. OpenCV declares any numbers
Extra = Callable[[Planes, int], Planes]  # (view [S, S, 3] in [0, 1], its number) -> another

# loader workers are the parallel part, and OpenCV's own threads do not survive a fork
cv2.setNumThreads(0)


def resize(image: Tensor, shape: Sequence[int]) -> Tensor:
    """Resize an image [C, H, W] to [C, *shape], bicubic and antialiased.

    RGB of 8 bits stays uint8. Others become float32 in [0, 1].
    """
    is_rgb8 = len(image) == 3 and image.dtype == torch.uint8
    values = image if is_rgb8 else unit(image)
    resized = F.interpolate(
        values[None],
        list(shape),
        mode="bicubic",
        antialias=True,
    )[0]
    if is_rgb8:
        return resized
    return resized.clamp_(0, 1)  # bicubic overshoots


def grey(images: Tensor) -> Tensor:
    """Return the brightness of RGB images [V, 3, H, W] by :data:`LUMA`, [V, 1, H, W]."""
    red, green, blue = images.unbind(1)
    brightness = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    return brightness[:, None]


def normalise(
    images: Tensor,
    mean: PerChannel | Tensor,
    std: PerChannel | Tensor,
) -> Tensor:
    """Subtract mean and divide by std, [V, C, H, W] of the same shape.

    One mean makes RGB grey, [V, 1, H, W]. Tensors ``mean`` and ``std`` lie on the images' device.
    """
    if len(mean) == 1 and images.shape[1] == 3:
        images = grey(images)
    shape = (1, len(mean), 1, 1)
    means = torch.as_tensor(mean).reshape(shape)
    stds = torch.as_tensor(std).reshape(shape)
    return (images - means) / stds


# ---------------------------------------------------------------------- the pixels of a view
def make_views(
    images: Sequence[Tensor],
    plan: ViewPlan,
    size: int,
    mean: PerChannel,
    std: PerChannel,
    extra: Extra | None = None,
) -> Tensor:
    """Make normalised views of images by a plan that has as many views of each image.

    Args:
        images: uint8 or uint16 [C, H, W].
        mean, std: Of each channel. One value makes the views of RGB images grey.
        extra: Called with views of 8-bit RGB images after their colours.

    Returns:
        float32 [B, views of an image, len(mean), size, size].
    """
    count = len(plan.box) // len(images)
    views = np.empty((len(plan.box), len(mean), size, size), dtype=np.float32)
    for v, out in enumerate(views):
        top, left, height, width = plan.box[v].tolist()
        window = images[v // count][:, top : top + height, left : left + width]
        crop = resize(window, (size, size))  # [C, S, S]
        if len(crop) == 3:
            view = _rgb_view(crop, plan, v, extra)
            # [S, S, len(mean)], of one channel [S, S]
            channels = cv2.transform(view, _affine(tuple(mean), tuple(std)))
            for number, plane in enumerate(out):
                cv2.extractChannel(channels, number, dst=plane)
        else:
            view = colour_bands(crop.numpy(), plan, v)
            view = _turned(view, plan, v, axes=(1, 2))
            batch = torch.from_numpy(view)[None]
            out[:] = normalise(batch, mean, std)[0]
    return torch.from_numpy(views).reshape(len(images), count, *views.shape[1:])


def _rgb_view(
    crop: Tensor,
    plan: ViewPlan,
    v: int,
    extra: Extra | None,
) -> Planes:
    """Return view ``v`` of a plan in [0, 1], [S, S, 3].

    Args:
        crop: uint8, or floats in [0, 1], [3, S, S].
    """
    is_rgb8 = crop.dtype == torch.uint8
    scale = np.float32(1 / 255 if is_rgb8 else 1)
    view = np.multiply(crop.permute(1, 2, 0).numpy(), scale, order="C")
    view = colour_rgb(view, plan, v)
    if is_rgb8 and extra is not None:
        view = extra(view, v)
    return _turned(view, plan, v, axes=(0, 1))


def colour_rgb(view: Planes, plan: ViewPlan, v: int) -> Planes:
    """Flip, jitter, grey, blur and solarize view ``v`` of a plan, as torchvision does.

    Args:
        view: RGB in [0, 1], [H, W, 3]. It may be overwritten.
    """
    if plan.flip[v]:
        view = cv2.flip(view, 1)
    if plan.jitter[v]:
        for number in ORDERS[plan.order[v]]:
            view = _adjust_rgb(view, number, float(plan.factors[v, number]))
    if plan.grey[v]:
        view = _equal_channels(view)
    if plan.sigma[v]:
        view = _blurred(view, float(plan.sigma[v]))
    if plan.solarize[v]:
        view = _solarized(view)
    return view


def colour_bands(view: Planes, plan: ViewPlan, v: int) -> Planes:
    """Flip, jitter, blur and solarize view ``v`` of a plan, whose channels are no colours.

    All channels have the same factors of brightness and contrast.

    Args:
        view: In [0, 1], [C, H, W]. It may be overwritten.
    """
    if plan.flip[v]:
        view = np.ascontiguousarray(view[:, :, ::-1])
    if plan.jitter[v]:
        for number in ORDERS[plan.order[v]]:
            if number in (BRIGHTNESS, CONTRAST):
                view = _adjust_bands(view, number, float(plan.factors[v, number]))
    if plan.sigma[v]:
        sigma = float(plan.sigma[v])
        view = np.stack([_blurred(plane, sigma) for plane in view])
    if plan.solarize[v]:
        view = _solarized(view)
    return view


def _adjust_rgb(view: Planes, number: int, factor: float) -> Planes:
    """Change brightness, contrast, saturation, or hue (by a share of the circle), [H, W, 3]."""
    if number == HUE:
        hsv: Planes = cv2.cvtColor(view, cv2.COLOR_RGB2HSV)
        hsv[..., 0] += 360 * (factor % 1)  # degrees. Any number of turns is the same hue
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    other = view
    share = 0.0  # of the other image
    offset = 0.0
    if number == SATURATION:
        other = _equal_channels(view)
        share = 1 - factor
    elif number == CONTRAST:
        brightness = cv2.cvtColor(view, cv2.COLOR_RGB2GRAY)
        offset = cv2.mean(brightness)[0] * (1 - factor)
    view = cv2.addWeighted(view, factor, other, share, offset)
    return np.clip(view, 0, 1, out=view)


def _adjust_bands(view: Planes, number: int, factor: float) -> Planes:
    """Change brightness, or contrast about each channel's own mean, [C, H, W]."""
    rest = np.float32(0)
    if number == CONTRAST:
        means = view.mean((1, 2), keepdims=True)  # [C, 1, 1]
        rest = np.float32(1 - factor) * means
    view *= np.float32(factor)
    view += rest
    return np.clip(view, 0, 1, out=view)


def _equal_channels(view: Planes) -> Planes:
    """Return three equal channels by :data:`LUMA`, [H, W, 3]."""
    return cv2.cvtColor(cv2.cvtColor(view, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def _blurred(view: Planes, sigma: float) -> Planes:
    """Blur [H, W] or [H, W, 3] by a Gaussian kernel that reaches three sigma (pixels)."""
    side = 2 * math.ceil(3 * sigma) + 1
    return cv2.GaussianBlur(view, (side, side), sigma, borderType=cv2.BORDER_REFLECT_101)


def _solarized(view: Planes) -> Planes:
    return np.where(view >= SOLARIZE_FROM, 1 - view, view)


def _turned(
    view: Planes,
    plan: ViewPlan,
    v: int,
    axes: tuple[int, int],
) -> Planes:
    """Flip a view upside down and turn it. ``axes`` are its rows and columns."""
    if plan.vflip[v]:
        view = np.flip(view, axes[0])
    if plan.turns[v]:
        view = np.rot90(view, plan.turns[v], axes)
    return np.ascontiguousarray(view)


@functools.cache
def _affine(mean: tuple[float, ...], std: tuple[float, ...]) -> Planes:
    """Return :func:`normalise` as a matrix for pixels (red, green, blue, 1), [C, 4]."""
    channels = np.eye(3)  # [C, 3]
    if len(mean) == 1:
        channels = np.array([LUMA])
    scale = 1 / np.array(std)[:, None]
    offset = -np.array(mean)[:, None] * scale
    return np.hstack([channels * scale, offset]).astype(np.float32)


# ---------------------------------------------------------------------- batches
class RandomViews(ABC):
    """Makes random views of a batch, a :data:`idmm.batch.BatchFn`.

    Subclasses draw them and name the batch.
    """

    store: ImageStore
    size: int  # side of the views (pixels)
    mean: PerChannel  # of each channel. One value makes the views of RGB images grey
    std: PerChannel
    needs_workers = False  # whether a view has operations that no plan has

    @abstractmethod
    def plans(self, epoch: int, indices: Integers) -> Iterator[ViewPlan]:
        """Draw the views of images [B], group by group."""

    @abstractmethod
    def batch(self, views: list[Tensor], indices: Integers) -> Batch:
        """Return a batch of the views of each group, float32 [B, count, C, size, size]."""

    def __call__(self, epoch: int, indices: Integers) -> Batch:
        """Return :meth:`batch` of images [B] in an epoch."""
        return self.batch(self.made(epoch, indices), indices)

    def made(
        self,
        epoch: int,
        indices: Integers,
        extra: Extra | None = None,
    ) -> list[Tensor]:
        """Return the views of each group, see :func:`make_views`."""
        images = [self.store.image(i) for i in indices]
        plans = self.plans(epoch, indices)
        return [make_views(images, plan, self.size, self.mean, self.std, extra) for plan in plans]


@dataclass(eq=False)
class MultiCropTransform(RandomViews):
    """Makes the views of pretraining.

    Args:
        store, mean, std: See :class:`RandomViews`.
        config: Crops and colours.
        seed: Of the run.
    """

    store: ImageStore
    config: Views
    mean: PerChannel
    std: PerChannel
    seed: int

    def __post_init__(self) -> None:
        self.size = self.config.size

    def plans(self, epoch: int, indices: Integers) -> Iterator[ViewPlan]:
        """Draw the views of each group of crops."""
        sizes = self.store.sizes[indices]
        for number, group in enumerate(self.config.crops or ()):
            colours = colours_of(group, self.config)
            key = derive(self.seed, "views", epoch, number)
            yield draw_views(colours, group.scale, group.count, key, indices, sizes)

    def batch(self, views: list[Tensor], indices: Integers) -> Batch:
        """Return ``views`` (float32 [B, count, C, S, S] per group), ``index`` and ``label``."""
        return with_labels({"views": views}, self.store, indices)


@dataclass(eq=False)
class TrainTransform(RandomViews):
    """Makes the augmented images of fine-tuning.

    Random resized crop, flip, colour jitter and grey are those of pretraining. Then comes timm's
    RandAugment for RGB images of 8 bits, then turns. timm's RandomErasing is last. Both have seeds
    of their own from (seed, stage, epoch, image).

    Args:
        store, size, mean, std: See :class:`RandomViews`.
        config: Strengths and probabilities.
        key: From :func:`idmm.seeding.derive`, another for each seed and stage.
    """

    store: ImageStore
    config: Augment
    size: int
    mean: PerChannel
    std: PerChannel
    key: int

    def __post_init__(self) -> None:
        config = self.config
        self.colours = Colours(
            flip=config.flip,
            jitter=config.jitter,
            jitter_prob=config.jitter_prob,
            grey_prob=config.grey_prob,
            blur_prob=0.0,
            solarize_prob=0.0,
            vflip=config.vflip,
            rotate90=config.rotate90,
        )
        self.randaugment: RandAugment | None = None
        if config.randaugment:
            self.randaugment = _randaugment(config.randaugment, self.size, self.mean)
        self.erasing = RandomErasing(config.random_erasing, mode="pixel", device="cpu")
        self.needs_workers = bool(config.randaugment or config.random_erasing)

    def plans(self, epoch: int, indices: Integers) -> Iterator[ViewPlan]:
        """Draw a view of each image."""
        key = derive(self.key, "views", epoch)
        sizes = self.store.sizes[indices]
        yield draw_views(self.colours, self.config.scale, 1, key, indices, sizes)

    def batch(self, views: list[Tensor], indices: Integers) -> Batch:
        """Return ``images`` (float32 [B, C, size, size]), ``index`` and ``label``."""
        return with_labels({"images": views[0][:, 0]}, self.store, indices)

    def __call__(self, epoch: int, indices: Integers) -> Batch:
        """Return :meth:`batch` of images [B] in an epoch, after RandAugment and RandomErasing."""
        if not self.needs_workers:
            return super().__call__(epoch, indices)
        # restores the caller's generators, once per batch because saving them takes time
        with seeded(self.key):
            views = self.made(epoch, indices, self._augmenter(epoch, indices))
            if self.erasing.probability:
                for image, index in zip(views[0][:, 0], indices, strict=True):
                    key = derive(self.key, "erasing", epoch, index)
                    reseed(key)  # the rectangle
                    torch.default_generator.manual_seed(key)  # the noise
                    self.erasing(image)
        return self.batch(views, indices)

    def _augmenter(self, epoch: int, indices: Integers) -> Extra | None:
        """Return what applies RandAugment to the views of a batch, if there is one."""
        randaugment = self.randaugment
        if randaugment is None:
            return None

        def augment(view: Planes, v: int) -> Planes:
            reseed(derive(self.key, "augment", epoch, indices[v]))
            pixels = np.uint8(np.rint(255 * view))
            image = randaugment(Image.fromarray(pixels))
            return np.asarray(image, dtype=np.float32) / 255

        return augment


def with_labels(batch: Batch, store: ImageStore, indices: Integers) -> Batch:
    """Add the images' numbers ``index``, and if there are labels ``label``, int64 [B] each."""
    batch["index"] = torch.from_numpy(indices)
    if store.labels is not None:
        batch["label"] = torch.from_numpy(store.labels[indices])
    return batch


def _randaugment(text: str, size: int, mean: PerChannel) -> RandAugment:
    """Return timm's RandAugment.

    Its strongest posterize keeps 0 bits, which Pillow 13 refuses: 1 is the least.
    """
    fill = [round(255 * value) for value in mean]  # pixels moved in from outside the image
    options = {
        "translate_const": int(size * 0.45),
        "img_mean": tuple(fill * 3)[:3],
    }
    try:
        transform: RandAugment = rand_augment_transform(text, options)
    except (AssertionError, ValueError, KeyError, IndexError):
        raise UserError.of(
            "augment.randaugment",
            f"'{text}' is unknown, expected timm's form, e.g. rand-m9-mstd0.5-inc1, or null",
        ) from None
    for op in transform.ops:
        if op.name.startswith("Posterize"):
            op.level_fn = functools.partial(_at_least_one_bit, op.level_fn)
    return transform


def _at_least_one_bit(level_fn: Callable[..., tuple[int]], *options: Any) -> tuple[int]:
    (bits,) = level_fn(*options)
    return (max(1, bits),)
