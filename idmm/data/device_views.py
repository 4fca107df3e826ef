"""Random views made on the network's device: each operation runs on many views at once, with
parameters per view.

The images lie there as bytes. The draws are those of :mod:`idmm.data.views`, and so are the views,
up to rounding.
"""

import logging
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from tqdm import tqdm

from idmm import distributed
from idmm.data.images import WHITE
from idmm.data.views import ORDERS, SOLARIZE_FROM, RandomViews, ViewPlan, grey, normalise

log = logging.getLogger(__name__)

WORKING_BYTES = 2**29  # of the views that are made at once, beside those that are finished
COPIES = 12  # of a view that its colours take, at most
SIDE_STEP = 32  # padded sides of windows are multiples of it, so that freed memory is used again
# numbers of adjustments
CONTRAST = 1
SATURATION = 2
HUE = 3
DEVICE = "device"
LOADER = "loader"
NO_MEMORY = "views: the device ran out of memory. Loader workers make them from now on"


def free_memory(device) -> int:
    """Return the free memory of a GPU (bytes), and 0 for other devices."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return 0


def send(values: ndarray | Tensor, device) -> Tensor:
    """Return values as a tensor on the device, without waiting for what that has still to do."""
    values = torch.as_tensor(values)
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


# ---------------------------------------------------------------------- who makes the views
def place_views(views: Callable, device, decided: str | None, workers: int | None) -> Callable:
    """Return the :class:`DeviceViews` of ``views`` if the device makes them, else ``views``. The
    log states which.

    It is the device if there is a GPU, half of its free memory holds all images, and each operation
    has a plan. All processes must call together.

    Args:
        views: A :data:`idmm.data.loaders.BatchFn`.
        device: Of the network.
        decided: DEVICE or LOADER in a run that has decided.
        workers: ``data.workers``.
    """
    if decided == LOADER:
        return views
    free = free_memory(device)
    obstacle = None if decided == DEVICE else _obstacle(views, free)
    if distributed.largest(obstacle is not None)[0]:
        if free:
            log.info(
                "views: made by loader workers, because %s",
                obstacle or "another GPU lacks the memory",
            )
        return views
    try:
        made = DeviceViews(views, device, workers)
    except torch.OutOfMemoryError:
        log.warning(NO_MEMORY)
        return views
    size = tqdm.format_sizeof(made.images.pixels.nbytes, "B")
    log.info("views: made on %s, which holds the images (%s)", device, size)
    return made


def _obstacle(views: Callable, free: int) -> str | None:
    """Return why a device with that much free memory (bytes) cannot make the views, None if it
    can."""
    if not isinstance(views, RandomViews):
        return "boxes and masks move with them"
    if views.needs_workers:
        return "RandAugment or RandomErasing runs there"
    store = views.store
    if store.decodes:
        return "images are decoded at each use"
    if store.high_bit % len(store.sizes):
        return "images have 8 or 16 bits"
    if (store.sizes.prod(axis=1) * store.pixel_bytes).sum() > free // 2:
        return "the images take more than half of the GPU's free memory"
    return None


def place_of(views: Callable) -> str:
    """Return DEVICE or LOADER, whichever makes the views."""
    if isinstance(views, DeviceViews) and views.images is not None:
        return DEVICE
    return LOADER


# ---------------------------------------------------------------------- the images
class DeviceImages:
    """All images of a store on a device.

    Args:
        store: Images by number, see :class:`idmm.data.image_store.ImageStore`.
        device: Of the images and of the views.

    Attributes:
        dtype: Of the arithmetic of crops: float16 for RGB of 8 bits on a GPU, else float32.

    Raises:
        torch.OutOfMemoryError: They do not fit.
    """

    def __init__(self, store, device):
        self.device = device
        self.sizes = store.sizes
        counts = store.sizes.prod(axis=1)
        self.starts = np.cumsum(counts) - counts
        is_rgb8 = store.pixel_bytes[0] == store.channels == 3
        self.is_rounded = bool(is_rgb8)  # such images are resized as bytes
        # few operations know uint16
        if store.high_bit:
            bits = torch.int16
        else:
            bits = torch.uint8
        self.pixels = torch.empty(store.channels, counts.sum(), dtype=bits, device=device)  # [C, P]
        for i, (start, count) in enumerate(zip(self.starts, counts, strict=True)):
            pixels = store.image(i).permute(1, 2, 0).flatten(0, 1)  # [H W, C]
            self.pixels[:, start : start + count] = pixels.view(bits).to(device).T
        self.dtype = torch.float32
        if is_rgb8 and self.pixels.is_cuda:
            self.dtype = torch.float16

    def crops(self, plan: ViewPlan, numbers: ndarray, size: int) -> Tensor:
        """Return the crops of a plan, resized and turned, without colours.

        Args:
            plan: Of V views.
            numbers: The image of each view, int64 [V].
            size: Side of the crops (pixels).

        Returns:
            float32 in [0, 1], [V, C, size, size].
        """
        channels = len(self.pixels)
        out = torch.empty(len(numbers), channels, size, size, device=self.device)
        sides = plan.box[:, 2:].max(axis=1)
        order = np.argsort(-sides, kind="stable")  # windows of a part are alike
        while len(order):
            side = -(-int(sides[order[0]]) // SIDE_STEP) * SIDE_STEP
            # places of 8 bytes, values as bytes and twice as floats, matrices of weights, and
            # between the products
            each = side * (side * (8 + 9 * channels) + 4 * size * (4 + 3 * channels))
            count = max(1, WORKING_BYTES // each)
            part = order[:count]
            out[send(part, self.device)] = self._crop(plan, part, numbers[part], side, size)
            order = order[count:]
        is_turned = plan.turns % 2 == 1
        if is_turned.any():
            out = torch.where(_column(is_turned, out), out.mT, out)
        return out

    def _crop(
        self, plan: ViewPlan, part: ndarray, numbers: ndarray, side: int, size: int
    ) -> Tensor:
        """Return the views of a part of a plan, before transpositions, [v, C, size, size]. Windows
        are padded to ``side``."""
        low, lengths = plan.box[part].T.reshape(2, 2, -1)  # of rows, of columns, [2, v]
        turns = plan.turns[part]  # each is a transposition and a flip
        flips = plan.vflip[part] ^ (turns > 1), plan.flip[part] ^ (turns % 3 > 0)
        steps = np.stack([self.sizes[numbers, 1], np.ones_like(numbers)])
        start = self.starts[numbers] + (np.where(flips, low + lengths - 1, low) * steps).sum(axis=0)
        steps = np.where(flips, -steps, steps)
        table = send(np.stack([start, *steps, *lengths]), self.device)
        rows, columns = resize_weights(table[3:], size, side, self.dtype)  # [v, S, W] each
        start, row_step, column_step, height, width = table[:, :, None, None]  # [v, 1, 1] each
        j = torch.arange(side, device=self.device)
        i = j[:, None]
        place = start + torch.minimum(i, height - 1) * row_step
        place = place + torch.minimum(j, width - 1) * column_step  # [v, H, W]
        window = self.pixels[:, place].permute(1, 2, 0, 3)  # [C, v, H, W] -> [v, H, C, W]
        if window.dtype == torch.int16:
            window = (window.int() & WHITE).float() * (255 / WHITE)
        window = window.to(self.dtype, memory_format=torch.contiguous_format).contiguous()
        narrow = self._rounded(window.flatten(1, 2) @ columns.mT)  # [v, H C, S]
        small = self._rounded(rows @ narrow.view(len(part), side, -1))  # [v, S, C S]
        small = small.view(len(part), size, -1, size).transpose(1, 2)  # [v, C, S, S]
        return small.float().clamp_(0, 255).div_(255)

    def _rounded(self, values: Tensor) -> Tensor:
        if self.is_rounded:
            return values.round_().clamp_(0, 255)
        return values


def resize_weights(length: Tensor, size: int, padded: int, dtype: torch.dtype) -> Tensor:
    """Return the weights that resize a side by antialiased bicubic interpolation, as
    ``F.interpolate`` has them.

    Args:
        length: Side of each window (pixels), int64 [...].
        size: Of the result (pixels).
        padded: Side of all windows, with zeros (pixels).
        dtype: Of the result.

    Returns:
        A matrix for each window, [..., size, padded]. Its rows add up to 1.
    """
    length = length[..., None, None]
    scale = length.double() / size
    stretch = scale.clamp(min=1)
    centre = scale * (torch.arange(size, device=length.device)[:, None] + 0.5)  # [..., S, 1]
    taps = min(padded, 2 + math.ceil(4 * max(1, padded / size)))  # others have no weight
    first = (centre - 2 * stretch + 0.5).long().clamp(0, padded - taps)
    place = first + torch.arange(taps, device=length.device)  # [..., S, taps]
    distance = ((place + 0.5 - centre) / stretch).abs()
    near = (1 - distance).clamp(min=0)
    far = (2 - distance).clamp(min=0)
    # the cubic kernel with a = -0.5
    weight = far.square() * (far - 1) / 2 + near.square() * (1 - 2 * near)
    weight *= place < length
    weight /= weight.sum(-1, keepdim=True)
    matrix = torch.zeros(*weight.shape[:-1], padded, dtype=dtype, device=weight.device)
    return matrix.scatter_(-1, place, weight.to(dtype))


# ---------------------------------------------------------------------- the colours
def blend(views: Tensor, factor: Tensor, is_contrast: Tensor, is_saturation: Tensor) -> Tensor:
    """Return views [V, C, S, S] times their factors plus the rest of black, of their mean or of
    their grey.

    Channels that are no colours have their own means.
    """
    if views.shape[1] == 3:
        brightness = grey(views)
        other = is_saturation * brightness + is_contrast * brightness.mean((2, 3), keepdim=True)
    else:
        other = is_contrast * views.mean((2, 3), keepdim=True)
    return torch.lerp(other, views, factor).clamp_(0, 1)


def turn_hue(views: Tensor, turns: Tensor) -> Tensor:
    """Return RGB views [V, 3, S, S] with their hues moved by shares of the circle [V, 1, 1, 1]."""
    red, green, blue = views.unbind(1)
    value = views.amax(1)
    chroma = value - views.amin(1)
    divisor = chroma.clamp(min=1e-12)
    hue = torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    hue = torch.where(value == red, (green - blue) / divisor, hue)  # in sixths of the circle
    offset = torch.arange(5, 0, -2, device=views.device)[:, None, None]  # of red, green, blue
    place = torch.remainder(hue[:, None] + (6 * turns + offset), 6)
    return value[:, None] - chroma[:, None] * torch.minimum(place, 4 - place).clamp_(0, 1)


KERNELS = blend, turn_hue


def recolour(views: Tensor, plan: ViewPlan, kernels: tuple[Callable, Callable] = KERNELS) -> Tensor:
    """Jitter, grey, blur and solarize V views, each by its own parameters, as
    :func:`idmm.data.views.recolour` does.

    Args:
        views: float32 in [0, 1], [V, C, S, S], which may be overwritten.
        plan: Of these views. Their flips and turns are done.
        kernels: :data:`KERNELS`, or the same compiled.
    """
    is_rgb = views.shape[1] == 3
    if plan.jitter.any():
        views = _jitter(views, plan, *kernels)
    if is_rgb and plan.grey.any():
        views = torch.where(_column(plan.grey, views), grey(views), views)
    blurred = np.flatnonzero(plan.sigma)
    if len(blurred):
        rows = send(blurred, views.device)
        weights = blur_weights(send(plan.sigma[blurred], views.device), views.shape[-1]).float()[
            :, None
        ]
        views[rows] = weights @ views[rows] @ weights.mT
    if plan.solarize.any():
        is_inverted = _column(plan.solarize, views) & (views >= SOLARIZE_FROM)
        views = torch.where(is_inverted, 1 - views, views)
    return views


def _jitter(views: Tensor, plan: ViewPlan, blend: Callable, turn_hue: Callable) -> Tensor:
    """Change brightness, contrast, saturation and hue of each view in its own order."""
    # the first that is no blend with another image
    if views.shape[1] == 3:
        last = HUE
    else:
        last = SATURATION
    for number in np.array(ORDERS)[plan.order].T:  # [V], of each view its adjustment of this step
        factor = plan.factors[np.arange(len(number)), number]
        is_blend = plan.jitter & (number < last)
        table = np.stack([np.where(is_blend, factor, 1), number == CONTRAST, number == SATURATION])
        if is_blend.any():
            views = blend(views, *_column(table.astype(np.float32), views))
        turned = np.flatnonzero(plan.jitter & (number == HUE) & (factor % 1 != 0))
        if len(turned) and last == HUE:
            rows = send(turned, views.device)
            views[rows] = turn_hue(views[rows], _column(factor[turned].astype(np.float32), views))
    return views


def _column(values: ndarray, views: Tensor) -> Tensor:
    """Send values [..., V] of views to their device, [..., V, 1, 1, 1]."""
    return send(values, views.device)[..., None, None, None]


def blur_weights(sigma: Tensor, size: int) -> Tensor:
    """Return the matrices of Gaussian blurs that reach three sigma, borders reflected, [v, size,
    size].

    Args:
        sigma: Of each view (pixels), [v]. At most a third of ``size`` - 1.
        size: Side of the views (pixels).
    """
    sigma = sigma[:, None]
    distance = torch.arange(2 * size, device=sigma.device)
    # [v, 2 S]
    taps = torch.exp(-0.5 * (distance / sigma).square()) * (distance <= (3 * sigma).ceil())
    taps /= 2 * taps.sum(1, keepdim=True) - taps[:, :1]
    j = distance[:size]
    i = j[:, None]
    reflected = taps[:, i + j] * (j > 0) + taps[:, 2 * (size - 1) - i - j] * (j < size - 1)
    return taps[:, (i - j).abs()] + reflected


# ---------------------------------------------------------------------- the batches
class DeviceViews:
    """The batches of :class:`idmm.data.views.RandomViews`, made on a device.

    Args:
        views: Draws the plans.
        device: Of the images and of the batches.
        workers: ``data.workers``, if loader workers have to continue.

    Attributes:
        images: All images on the device. None after :meth:`leave`.
    """

    def __init__(self, views: RandomViews, device, workers: int | None = None):
        self.views = views
        self.device = device
        self.workers = workers
        self.images: DeviceImages | None = DeviceImages(views.store, device)
        self.kernels = KERNELS
        self.mean = torch.tensor(views.mean).to(device)
        self.std = torch.tensor(views.std).to(device)

    @torch.no_grad()
    def __call__(self, epoch: int, indices: ndarray) -> dict:
        """Return the batch of images in an epoch, see :meth:`RandomViews.batch`.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        made = [self._made(plan, indices) for plan in self.views.plans(epoch, indices)]
        batch = self.views.batch(made, indices)
        for name in ("index", "label"):
            if name in batch:
                batch[name] = send(batch[name], self.device)
        return batch

    def compile(self) -> None:
        """Compile what most of the time of colours goes to."""
        self.kernels = tuple(torch.compile(kernel, dynamic=True) for kernel in KERNELS)

    def leave(self) -> None:
        """Free the images, because memory ran out, and log a warning."""
        self.images = None
        log.warning(NO_MEMORY)

    def _made(self, plan: ViewPlan, indices: ndarray) -> Tensor:
        """Return normalised views, float32 [B, count, len(mean), S, S]."""
        numbers = np.repeat(indices, len(plan.box) // len(indices))
        crops = self.images.crops(plan, numbers, self.views.size)  # [V, C, S, S]
        at_once = max(1, WORKING_BYTES // (COPIES * crops[0].nbytes))
        out = crops[:, : len(self.mean)]
        for first in range(0, len(crops), at_once):
            part = slice(first, first + at_once)
            some = ViewPlan(**{name: values[part] for name, values in vars(plan).items()})
            out[part] = normalise(recolour(crops[part], some, self.kernels), self.mean, self.std)
        return out.unflatten(0, (len(indices), -1))
