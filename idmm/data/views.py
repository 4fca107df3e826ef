"""Stage 1's views: random crops in groups, then colour, each a function of (seed, epoch, image).

All that is random about a view is drawn first, for a batch at once, into a :class:`ViewPlan`; the pixels follow from
it. Crops are cut and resized one by one (images differ in size), colours run on the whole batch with a factor a view.
"""

from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from idmm.config import CropGroup, Views, colours_of, group_sizes
from idmm.seeding import derive, uniforms

RATIO = (3 / 4, 4 / 3)  # aspect ratios of a crop, as torchvision's RandomResizedCrop
TRIES = 10  # boxes tried until one fits, likewise
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's and torchvision's grey
ORDERS = tuple(permutations(range(4)))  # of brightness, contrast, saturation, hue
SOLARIZE_FROM = 0.5  # values below stay, as those under 128 of 255
DRAWS = 2 * TRIES + 2 + 12  # numbers a view


@dataclass(frozen=True)
class ViewPlan:
    """What was drawn for V views."""

    box: np.ndarray  # top, left, height and width of the crop in the image (pixels), int64 [V, 4]
    flip: np.ndarray  # bool [V]
    jitter: np.ndarray  # bool [V]
    factors: np.ndarray  # brightness, contrast, saturation (factors) and hue (turns), float64 [V, 4]
    order: np.ndarray  # of the four, an index into ORDERS, int64 [V]
    grey: np.ndarray  # bool [V]
    sigma: np.ndarray  # of the blur (pixels), 0 for none, float64 [V]
    solarize: np.ndarray  # bool [V]


def short_side_bound(size: int, smallest_scale: float) -> int:
    """Short side beyond which an image needs not be stored: no crop is up-sampled for it (pixels)."""
    return int(np.ceil(size / np.sqrt(smallest_scale * RATIO[0])))


def draw_boxes(sizes: np.ndarray, scale: tuple[float, float], u: np.ndarray) -> np.ndarray:
    """Draws crops that cover a random share of the area at a random ratio, uniformly placed.

    Args:
        sizes: Height and width of each view's image (pixels), [V, 2].
        scale: Smallest and largest share of the area.
        u: Numbers in [0, 1), [V, 2 * TRIES + 2].

    Returns:
        Top, left, height, width, int64 [V, 4]. Where no try fits, the largest centred box of an allowed ratio.
    """
    height, width = sizes[:, :1].astype(float), sizes[:, 1:].astype(float)  # [V, 1]
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u[:, :TRIES])  # [V, T]
    low, high = np.log(RATIO[0]), np.log(RATIO[1])
    ratio = np.exp(low + (high - low) * u[:, TRIES : 2 * TRIES])  # [V, T]
    w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))  # [V, T]
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits.argmax(1)[:, None]  # [V, 1]
    h, w = np.take_along_axis(h, first, 1), np.take_along_axis(w, first, 1)  # [V, 1]
    top, left = np.floor(u[:, -2:-1] * (height - h + 1)), np.floor(u[:, -1:] * (width - w + 1))
    whole_w = np.minimum(width, np.rint(height * RATIO[1]))
    whole_h = np.minimum(height, np.rint(width / RATIO[0]))
    whole = [(height - whole_h) // 2, (width - whole_w) // 2, whole_h, whole_w]
    box = np.where(fits.any(1)[:, None], np.concatenate([top, left, h, w], 1), np.concatenate(whole, 1))
    return box.astype(np.int64)


def draw_views(config: Views, group: CropGroup, key: int, indices: np.ndarray, sizes: np.ndarray) -> ViewPlan:
    """Draws ``group.count`` views of each image.

    Args:
        group: How many crops, of what scale, and where its colours differ from ``config``'s.
        key: From :func:`idmm.seeding.derive`, another for each epoch and group.
        indices: Image numbers, [B].
        sizes: Height and width of these images (pixels), [B, 2].

    Returns:
        The plan of V = B * count views, those of one image next to each other.
    """
    count, colours = group.count, colours_of(config, group)
    u = uniforms(key, indices, count * DRAWS).reshape(-1, DRAWS)  # [B, count * D] -> [V, D]
    box = draw_boxes(np.repeat(sizes, count, 0), tuple(group.scale), u[:, :-12])
    flip, jitter, order, grey, blur, sigma, *strengths, solarize = u[:, -12:-1].T  # the last is spare
    strength = np.array(colours.jitter)  # [4]
    factors = np.stack(strengths, 1) * 2 - 1  # [V, 4] in [-1, 1)
    factors = factors * strength + np.array([1.0, 1.0, 1.0, 0.0])
    low, high = colours.blur_sigma
    return ViewPlan(
        box=box,
        flip=flip < colours.flip,
        jitter=jitter < colours.jitter_prob,
        factors=np.maximum(factors, [0.0, 0.0, 0.0, -np.inf]),
        order=(order * len(ORDERS)).astype(np.int64),
        grey=grey < colours.grey_prob,
        sigma=np.where(blur < colours.blur_prob, low + (high - low) * sigma, 0.0),
        solarize=solarize < colours.solarize_prob,
    )


def crop_resize(image: Tensor, box, size: int, mode: str = "bicubic") -> Tensor:
    """Cuts a box out of a uint8 image [3, H, W] and resizes it (antialiased) to [3, size, size]."""
    top, left, height, width = (int(n) for n in box)
    crop = image[None, :, top : top + height, left : left + width]  # [1, 3, h, w]
    return F.interpolate(crop, size=(size, size), mode=mode, antialias=True, align_corners=False)[0]


def recolour(images: Tensor, plan: ViewPlan) -> Tensor:
    """Flips, jitters, greys, blurs and solarizes views, as torchvision does one by one: [V, 3, H, W] in [0, 1]."""
    images = torch.where(_mask(plan.flip), images.flip(-1), images)
    factors = torch.from_numpy(plan.factors).to(images)  # [V, 4]
    orders = np.array(ORDERS)[plan.order]  # [V, 4]
    for place in range(4):
        for number in range(4):
            chosen = torch.from_numpy(np.flatnonzero(plan.jitter & (orders[:, place] == number)))
            if len(chosen):
                images[chosen] = _adjust(images[chosen], number, factors[chosen, number, None, None, None])
    images = torch.where(_mask(plan.grey), luma(images), images)
    blurred = torch.from_numpy(np.flatnonzero(plan.sigma > 0))
    if len(blurred):
        images[blurred] = gaussian_blur(images[blurred], torch.from_numpy(plan.sigma).to(images)[blurred])
    if plan.solarize.any():
        images = torch.where(_mask(plan.solarize) & (images >= SOLARIZE_FROM), 1 - images, images)
    return images


def luma(images: Tensor) -> Tensor:
    """Brightness of RGB images, [V, 3, H, W] -> [V, 1, H, W]."""
    return sum(weight * images[:, channel : channel + 1] for channel, weight in enumerate(LUMA))


def gaussian_blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blurs each image [V, C, H, W] with its own sigma (pixels, > 0, [V]), borders mirrored.

    The kernel reaches three of the largest sigma, or as far as mirroring allows.
    """
    count, channels, height, width = images.shape
    reach = min(int(np.ceil(3 * float(sigma.max()))), height - 1, width - 1)
    offsets = torch.arange(-reach, reach + 1, dtype=images.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma[:, None]) ** 2)  # [V, K]
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(channels, 0)  # [V*C, K]
    flat = images.reshape(1, count * channels, height, width)  # every channel a group of its own
    flat = F.conv2d(F.pad(flat, (reach, reach, 0, 0), "reflect"), kernel[:, None, None, :], groups=count * channels)
    flat = F.conv2d(F.pad(flat, (0, 0, reach, reach), "reflect"), kernel[:, None, :, None], groups=count * channels)
    return flat.reshape(images.shape)


def normalise(images: Tensor, mean, std) -> Tensor:
    """Subtracts the mean and divides by std, [V, 3, H, W] -> [V, C, H, W]; one mean means grey."""
    images = luma(images) if len(mean) == 1 else images
    shape = (1, len(mean), 1, 1)
    return (images - torch.tensor(mean).reshape(shape)) / torch.tensor(std).reshape(shape)


def make_views(images, plan: ViewPlan, views_per_image: int, size: int, mode: str) -> Tensor:
    """Turns uint8 images and a plan for them into coloured views in [0, 1], [B, views_per_image, 3, size, size]."""
    crops = [crop_resize(images[v // views_per_image], box, size, mode) for v, box in enumerate(plan.box)]
    views = recolour(torch.stack(crops).float().div_(255), plan)  # [V, 3, S, S]
    return views.clamp_(0, 1).reshape(-1, views_per_image, *views.shape[1:])


class MultiCropTransform:
    """Makes the views of a batch: what the loader of stage 1 calls.

    Args:
        store: Images by number: ``store.image(i)`` -> uint8 [3, H, W], ``store.sizes`` [N, 2],
            ``store.labels`` int64 [N] or None.
        config: Crops and colours.
        mean, std: Of each channel; one value makes the views grey.
        seed: Of the run.
    """

    def __init__(self, store, config: Views, mean, std, seed: int):
        self.store, self.config, self.mean, self.std, self.seed = store, config, mean, std, seed

    def __call__(self, epoch: int, indices: np.ndarray) -> dict:
        """Returns ``views`` (a list of float [B, count, C, S, S], a group each) and what :func:`numbered` adds."""
        images = [self.store.image(i) for i in indices]
        groups, mode = [], self.config.interpolation
        for number, (group, size) in enumerate(zip(self.config.crops, group_sizes(self.config), strict=True)):
            key = derive(self.seed, "views", epoch, number)
            plan = draw_views(self.config, group, key, indices, self.store.sizes[indices])
            views = make_views(images, plan, group.count, size, mode)  # [B, count, 3, S, S]
            groups.append(normalise(views.flatten(0, 1), self.mean, self.std).unflatten(0, views.shape[:2]))
        return numbered({"views": groups}, self.store, indices)


def numbered(batch: dict, store, indices: np.ndarray) -> dict:
    """Adds the images' numbers, ``index``, and with labels ``label`` (int64 [B])."""
    batch["index"] = torch.from_numpy(np.asarray(indices))
    if store.labels is not None:
        batch["label"] = torch.from_numpy(store.labels[indices])
    return batch


def _mask(flags: np.ndarray) -> Tensor:
    return torch.from_numpy(flags)[:, None, None, None]  # [V] -> [V, 1, 1, 1]


def _adjust(images: Tensor, number: int, factor: Tensor) -> Tensor:
    """Changes brightness (0), contrast (1), saturation (2) or hue (3)."""
    if number == 3:
        return _hue(images, factor)
    other = luma(images) if number else 0.0
    other = other.mean((1, 2, 3), keepdim=True) if number == 1 else other
    return (images * factor + other * (1 - factor)).clamp_(0, 1)


def _hue(images: Tensor, turns: Tensor) -> Tensor:
    """Turns the hue by a share of the circle, through HSV and back (Foley and van Dam)."""
    red, green, blue = images.unbind(1)  # [V, H, W]
    high = images.amax(1)
    chroma = high - images.amin(1)
    scale = torch.where(chroma > 0, chroma, 1.0).reciprocal_()
    sector = torch.where(green == high, 2 + (blue - red) * scale, 4 + (red - green) * scale)
    sector = torch.where(red == high, (green - blue) * scale, sector)  # [V, H, W] in [-1, 5]
    sector = sector.add_(6 * turns[:, 0])
    channels = []
    for offset in (5, 3, 1):  # red, green, blue: high - chroma * clamp(min(k, 4 - k), 0, 1), k = offset + sector mod 6
        k = sector + offset
        k = k.sub_(torch.floor(k / 6).mul_(6))  # much faster than %
        channels.append(high - chroma * torch.minimum(k, 4 - k).clamp_(0, 1))
    return torch.stack(channels, 1)
