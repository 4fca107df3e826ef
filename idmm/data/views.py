"""Random views of images: crops, then colours, each a function of (seed, epoch, image). Stage 1 has
groups of them.

All random numbers of a batch are drawn first, into a :class:`ViewPlan`. The pixels follow from it,
one view after the other, so that a view stays in the processor's cache from its crop to its
normalised channels.

Images have any number of channels, of 8 or 16 bits. Three are RGB. RGB of 8 bits is resized as
bytes, all other images as floats. Hue, saturation and grey apply to RGB only.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from idmm.config import Augment, CropGroup, Views
from idmm.config.data import COLOURS, colours_of
from idmm.data.images import LUMA, RATIO, unit
from idmm.errors import UserError
from idmm.seeding import derive, reseed, seeded, uniforms

TRIES = 10  # boxes tried until one fits, as torchvision
ORDERS = tuple(permutations(range(4)))  # of brightness, contrast, saturation, hue
BLUR_SIGMA = 0.1, 2.0  # pixels
SOLARIZE_FROM = 0.5  # values below stay, as those under 128 of 255
DRAWS = 2 * TRIES + 2 + 12  # numbers per view

# loader workers are the parallel part, and OpenCV's own threads do not survive a fork
cv2.setNumThreads(0)


@dataclass(frozen=True)
class ViewPlan:
    """The random numbers of V views."""

    box: ndarray  # top, left, height and width of the crop in the image (pixels), int64 [V, 4]
    flip: ndarray  # bool [V]
    jitter: ndarray  # bool [V]
    factors: ndarray  # brightness, contrast, saturation (factors) and hue (turns), float64 [V, 4]
    order: ndarray  # of the four, an index into ORDERS, int64 [V]
    grey: ndarray  # bool [V]
    sigma: ndarray  # of the blur (pixels), 0 for none, float64 [V]
    solarize: ndarray  # bool [V]
    vflip: ndarray  # bool [V]
    turns: ndarray  # by 90 degrees, counter-clockwise, 0 to 3, int64 [V]


def draw_boxes(sizes: ndarray, scale: tuple[float, float], u: ndarray) -> ndarray:
    """Draw crops that cover a random share of the area at a random ratio, uniformly placed.

    Args:
        sizes: Height and width of each view's image (pixels), [V, 2].
        scale: Smallest and largest share of the area.
        u: Numbers in [0, 1), [V, 2 * TRIES + 2].

    Returns:
        Top, left, height, width, int64 [V, 4]. If no try fits, the largest centred box of an
        allowed ratio.
    """
    limits = sizes.T[..., None].astype(float)  # of rows, of columns, [2, V, 1]
    area = limits.prod(0) * (scale[0] + (scale[1] - scale[0]) * u[:, :TRIES])  # [V, T]
    low, high = np.log(RATIO)
    ratio = np.exp(low + (high - low) * u[:, TRIES : 2 * TRIES])  # [V, T]
    sides = np.rint(np.sqrt([area / ratio, area * ratio]))  # [2, V, T]
    fits = ((sides > 0) & (sides <= limits)).all(0)
    sides = np.take_along_axis(sides, fits.argmax(1)[None, :, None], 2)  # [2, V, 1]
    corner = np.floor(u.T[-2:, :, None] * (limits - sides + 1))
    largest = np.minimum(limits, np.rint(limits[::-1] * RATIO[1]))
    # [2, 2, V, 1]
    box = np.where(fits.any(1)[:, None], [corner, sides], [(limits - largest) // 2, largest])
    return box.reshape(4, -1).T.astype(np.int64)


def draw_views(
    config: Views, group: CropGroup, key: int, indices: ndarray, sizes: ndarray
) -> ViewPlan:
    """Draw ``group.count`` views of each image.

    Args:
        group: Number and scale of the crops, and colours that replace those of ``config``.
        key: From :func:`idmm.seeding.derive`, another for each epoch and group.
        indices: Image numbers, [B].
        sizes: Height and width of these images (pixels), [B, 2].

    Returns:
        The plan of V = B * count views. Those of one image are neighbours.
    """
    count = group.count
    colours = colours_of(group, config)
    u = uniforms(key, indices, count * DRAWS).reshape(-1, DRAWS)  # [B, count * D] -> [V, D]
    box = draw_boxes(np.repeat(sizes, count, 0), tuple(group.scale), u[:, :-12])
    # the last is spare
    flip, jitter, order, grey, blur, sigma, *strengths, solarize = u[:, -12:-1].T
    factors = np.stack(strengths, 1) * 2 - 1  # [V, 4] in [-1, 1)
    factors = factors * colours.jitter + [1.0, 1.0, 1.0, 0.0]
    low, high = BLUR_SIGMA
    vflip, turns = uniforms(derive(key, "channels"), indices, count * 2).reshape(-1, 2).T  # [V]
    return ViewPlan(
        box=box,
        flip=flip < colours.flip,
        jitter=jitter < colours.jitter_prob,
        factors=np.maximum(factors, [0.0, 0.0, 0.0, -np.inf]),
        order=(order * len(ORDERS)).astype(np.int64),
        grey=grey < colours.grey_prob,
        sigma=np.where(blur < colours.blur_prob, low + (high - low) * sigma, 0.0),
        solarize=solarize < colours.solarize_prob,
        vflip=vflip < colours.vflip,
        turns=(turns * 4).astype(np.int64) * colours.rotate90,
    )


def resize(image: Tensor, shape: list[int]) -> Tensor:
    """Resize an image (bicubic, antialiased): uint8 [3, H, W] stays uint8, others become float32 in
    [0, 1]."""
    how = {"size": shape, "mode": "bicubic", "antialias": True, "align_corners": False}
    if is_rgb8(image):
        return F.interpolate(image[None], **how)[0]
    return F.interpolate(unit(image)[None], **how)[0].clamp_(0, 1)  # bicubic overshoots


def is_rgb8(image: Tensor) -> bool:
    """Return whether an image is RGB of 8 bits."""
    return len(image) == 3 and image.dtype == torch.uint8


def recolour(view: ndarray, plan: ViewPlan, v: int) -> ndarray:
    """Flip, jitter, grey, blur and solarize view ``v`` of a plan, RGB as torchvision does.

    Channels that are no colours have no saturation, hue and grey. All have the same factors of
    brightness and contrast.

    Args:
        view: float32 in [0, 1], which may be overwritten: RGB [H, W, 3], other channels [C, H, W].

    Returns:
        The same shape and range.
    """
    rgb = view.shape[2] == 3
    sigma = float(plan.sigma[v])
    if plan.flip[v]:
        if rgb:
            view = cv2.flip(view, 1)
        else:
            view = np.ascontiguousarray(view[:, :, ::-1])
    if plan.jitter[v]:
        for number in ORDERS[plan.order[v]]:
            view = _adjust(view, number, float(plan.factors[v, number]))
    if plan.grey[v] and rgb:
        view = _grey(view)
    if sigma:
        side = 2 * math.ceil(3 * sigma) + 1  # it reaches three sigma
        blur = functools.partial(
            cv2.GaussianBlur, ksize=(side, side), sigmaX=sigma, borderType=cv2.BORDER_REFLECT_101
        )
        if rgb:
            view = blur(view)
        else:
            view = np.stack([blur(plane) for plane in view])
    if plan.solarize[v]:
        view = np.where(view >= SOLARIZE_FROM, 1 - view, view)
    return view


def grey(images: Tensor) -> Tensor:
    """Return the brightness of RGB images [V, 3, H, W] by :data:`LUMA`, [V, 1, H, W]."""
    return sum(weight * images[:, channel : channel + 1] for channel, weight in enumerate(LUMA))


def normalise(images: Tensor, mean, std) -> Tensor:
    """Subtract mean and divide by std, [V, C, H, W] of the same shape. One mean makes RGB grey, [V,
    1, H, W].

    ``mean`` and ``std`` are sequences, or tensors on the images' device.
    """
    if len(mean) == 1 and images.shape[1] == 3:
        images = grey(images)
    shape = (1, len(mean), 1, 1)
    return (images - torch.as_tensor(mean).reshape(shape)) / torch.as_tensor(std).reshape(shape)


# (view float32 [S, S, 3] in [0, 1], its number) -> another
Extra = Callable[[ndarray, int], ndarray]


def make_views(images, plan: ViewPlan, size: int, mean, std, extra: Extra | None = None) -> Tensor:
    """Make normalised views of images, uint8 or uint16 [C, H, W], by a plan with the same number
    for each.

    Args:
        mean, std: Of each channel. One value makes the views of RGB images grey.
        extra: Called with views of RGB images after their colours.

    Returns:
        float32 [B, views of an image, len(mean), size, size].
    """
    count = len(plan.box) // len(images)
    views = np.empty((len(plan.box), len(mean), size, size), dtype=np.float32)
    for v, out in enumerate(views):
        top, left, height, width = plan.box[v].tolist()
        # [C, S, S]
        crop = resize(images[v // count][:, top : top + height, left : left + width], [size, size])
        rgb = len(crop) == 3
        view = crop.numpy()
        axes = (1, 2)
        if rgb:
            scale = np.float32(1 / 255 if crop.dtype == torch.uint8 else 1)
            axes = (0, 1)
            view = np.multiply(crop.permute(1, 2, 0).numpy(), scale, order="C")  # [S, S, 3]
        view = recolour(view, plan, v)
        view = extra(view, v) if extra is not None and rgb else view
        if plan.vflip[v] or plan.turns[v]:
            view = np.rot90(np.flip(view, axes[0]) if plan.vflip[v] else view, plan.turns[v], axes)
            view = np.ascontiguousarray(view)
        if not rgb:
            out[:] = normalise(torch.from_numpy(view)[None], mean, std)[0]
            continue
        # [S, S, len(mean)], of one channel [S, S]
        view = cv2.transform(view, _affine(tuple(mean), tuple(std)))
        for channel, plane in enumerate(out):
            cv2.extractChannel(view, channel, dst=plane)
    return torch.from_numpy(views).unflatten(0, (-1, count))


@functools.cache
def _affine(mean: tuple, std: tuple) -> ndarray:
    """Return :func:`normalise` as a matrix for pixels (red, green, blue, 1), float32 [C, 4]."""
    # [C, 3]
    if len(mean) == 1:
        channels = np.array([LUMA])
    else:
        channels = np.eye(3)
    scale = 1 / np.array(std)[:, None]
    return np.hstack([channels * scale, -np.array(mean)[:, None] * scale]).astype(np.float32)


class RandomViews:
    """Makes random views of a batch, a :data:`idmm.data.loaders.BatchFn`. Subclasses draw them and
    name the batch.

    Args:
        store: Images by number: ``store.image(i)`` -> uint8 or uint16 [C, H, W], ``store.sizes``
            [N, 2], ``store.labels`` int64 [N] or None.
        size: Side of the views (pixels).
        mean, std: Of each channel. One value makes the views of RGB images grey.

    Attributes:
        needs_workers: Whether a view has operations that no plan has.
    """

    needs_workers = False

    def __init__(self, store, size: int, mean, std):
        self.store = store
        self.size = size
        self.mean = mean
        self.std = std

    def plans(self, epoch: int, indices: ndarray) -> list[ViewPlan]:
        """Draw the views of images, group by group."""

    def batch(self, views: list[Tensor], indices: ndarray) -> dict:
        """Return a batch of the views of each group, float [B, count, C, size, size]."""


class MultiCropTransform(RandomViews):
    """Makes the views of stage 1.

    Args:
        store, mean, std: See :class:`RandomViews`.
        config: Crops and colours.
        seed: Of the run.
    """

    def __init__(self, store, config: Views, mean, std, seed: int):
        super().__init__(store, config.size, mean, std)
        self.config = config
        self.seed = seed

    def plans(self, epoch: int, indices: ndarray) -> list[ViewPlan]:
        """Draw the views of each group of crops."""
        plans = []
        for number, group in enumerate(self.config.crops):
            key = derive(self.seed, "views", epoch, number)
            plans.append(draw_views(self.config, group, key, indices, self.store.sizes[indices]))
        return plans

    def batch(self, views: list[Tensor], indices: ndarray) -> dict:
        """Return ``views`` (a list of float [B, count, C, S, S], one per group), ``index`` and
        ``label``."""
        return numbered({"views": views}, self.store, indices)

    def __call__(self, epoch: int, indices: ndarray) -> dict:
        """Return :meth:`batch` of images in an epoch."""
        images = [self.store.image(i) for i in indices]
        plans = self.plans(epoch, indices)
        return self.batch(
            [make_views(images, plan, self.size, self.mean, self.std) for plan in plans], indices
        )


class TrainTransform(RandomViews):
    """Makes the augmented images of stage 2.

    Random resized crop, flip, colour jitter and grey are those of stage 1. Then comes timm's
    RandAugment for RGB images of 8 bits, then turns. timm's RandomErasing is last. Both have seeds
    of their own from (seed, stage, epoch, image).

    Args:
        store, size, mean, std: See :class:`RandomViews`.
        config: Strengths and probabilities.
        key: From :func:`idmm.seeding.derive`, another for each seed and stage.
    """

    def __init__(self, store, config: Augment, size: int, mean, std, key: int):
        super().__init__(store, size, mean, std)
        self.key = key
        if config.randaugment:
            self.randaugment = _randaugment(config.randaugment, size, mean)
        else:
            self.randaugment = None
        shared = {name: getattr(config, name) for name in COLOURS if hasattr(config, name)}
        self.crop = CropGroup(
            count=1, scale=config.scale, blur_prob=0.0, solarize_prob=0.0, **shared
        )
        self.erasing = RandomErasing(config.random_erasing, mode="pixel", device="cpu")
        self.needs_workers = bool(config.randaugment or config.random_erasing)

    def plans(self, epoch: int, indices: ndarray) -> list[ViewPlan]:
        """Draw a view of each image."""
        key = derive(self.key, "views", epoch)
        return [draw_views(Views(), self.crop, key, indices, self.store.sizes[indices])]

    def batch(self, views: list[Tensor], indices: ndarray) -> dict:
        """Return ``images`` (float [B, C, size, size]), ``index`` and ``label``."""
        return numbered({"images": views[0][:, 0]}, self.store, indices)

    def __call__(self, epoch: int, indices: ndarray) -> dict:
        """Return :meth:`batch` of images in an epoch, after RandAugment and RandomErasing."""
        images = [self.store.image(i) for i in indices]
        (plan,) = self.plans(epoch, indices)

        def randomly(view: ndarray, v: int) -> ndarray:
            if not is_rgb8(images[v]):
                return view
            reseed(derive(self.key, "augment", epoch, indices[v]))
            made = self.randaugment(Image.fromarray(np.uint8(np.rint(255 * view))))
            return np.asarray(made, dtype=np.float32) / 255

        extra = randomly if self.randaugment else None
        # restores the caller's generators, once per batch because saving them takes time
        with seeded(self.key):
            # [B, 1, C, S, S]
            views = make_views(images, plan, self.size, self.mean, self.std, extra)
            if self.erasing.probability:
                for view, index in zip(views[:, 0], indices, strict=True):
                    key = derive(self.key, "erasing", epoch, index)
                    reseed(key)  # the rectangle
                    torch.default_generator.manual_seed(key)  # the noise
                    self.erasing(view)
        return self.batch([views], indices)


def numbered(batch: dict, store, indices: ndarray) -> dict:
    """Add the images' numbers, ``index``, and if there are labels ``label`` (int64 [B])."""
    batch["index"] = torch.from_numpy(np.asarray(indices))
    if store.labels is not None:
        batch["label"] = torch.from_numpy(store.labels[indices])
    return batch


def _adjust(view: ndarray, number: int, factor: float) -> ndarray:
    """Change brightness (0), contrast (1), saturation (2) or hue (3, by a share of the circle).

    Channels that are no colours have contrast about their own means, and no saturation and hue.
    """
    if view.shape[2] != 3:
        if number > 1 or factor == 1:
            return view
        # [C, 1, 1]
        if number:
            mean = view.mean((1, 2), keepdims=True)
        else:
            mean = 0.0
        view *= np.float32(factor)
        view += np.float32(1 - factor) * mean
    elif number == 3:
        hsv = cv2.cvtColor(view, cv2.COLOR_RGB2HSV)
        hsv[..., 0] += 360 * (factor % 1)  # degrees. Any number of turns is the same hue
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    elif number == 2:
        view = cv2.addWeighted(view, factor, _grey(view), 1 - factor, 0)
    else:
        if number:
            mean = cv2.mean(cv2.cvtColor(view, cv2.COLOR_RGB2GRAY))[0]
        else:
            mean = 0.0
        view = cv2.addWeighted(view, factor, view, 0, mean * (1 - factor))
    return np.clip(view, 0, 1, out=view)


def _grey(view: ndarray) -> ndarray:
    """Return three equal channels by :data:`LUMA`, [H, W, 3]."""
    return cv2.cvtColor(cv2.cvtColor(view, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def _randaugment(text: str, size: int, mean):
    """Return timm's RandAugment. Its strongest posterize keeps 0 bits, which Pillow 13 refuses: 1
    is the least."""
    fill = tuple(round(255 * m) for m in (mean * 3)[:3])  # pixels moved in from outside the image
    try:
        transform = rand_augment_transform(
            text, {"translate_const": int(size * 0.45), "img_mean": fill}
        )
    except (AssertionError, ValueError, KeyError, IndexError):
        raise UserError(
            f"augment.randaugment: '{text}' is unknown, expected timm's form, e.g. rand-m9-mstd0.5-inc1, or null"
        ) from None
    for op in transform.ops:
        if op.name.startswith("Posterize"):
            op.level_fn = functools.partial(_at_least_one_bit, op.level_fn)
    return transform


def _at_least_one_bit(level_fn, level, hparams):
    return (max(1, level_fn(level, hparams)[0]),)
