"""Random views made on the network's device.

Each operation runs on many views at once, with parameters per view. The images lie there as they
are stored, in 8 or 16 bits. The draws are those of :mod:`idmm.data.view_plan`. The views are those
of :mod:`idmm.data.views`, up to rounding.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from idmm import distributed
from idmm.batch import Batch, BatchFn
from idmm.data.image_store import ImageStore
from idmm.data.images import WHITE
from idmm.data.view_plan import CONTRAST, HUE, ORDERS, SATURATION, Integers, ViewPlan
from idmm.data.views import SOLARIZE_FROM, RandomViews, grey, normalise

log = logging.getLogger(__name__)

WORKING_BYTES = 2**29  # of the views that are made at once, beside those that are finished
COPIES = 12  # of a view that its colours take, at most
SIDE_STEP = 32  # padded sides of windows are multiples of it, so that freed memory is used again
DEVICE = "device"
LOADER = "loader"
NO_MEMORY = "views: the device ran out of memory. Loader workers make them from now on"

Device = torch.device | str


def free_memory(device: Device) -> int:
    """Return the free memory of a GPU (bytes), and 0 for other devices."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return 0


def send(values: NDArray[Any] | Tensor, device: Device) -> Tensor:
    """Return values as a tensor on the device, without waiting for what that has still to do."""
    tensor = torch.as_tensor(values)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# ---------------------------------------------------------------------- who makes the views
def place_views(
    views: BatchFn,
    device: Device,
    decided: str | None,
    workers: int | None,
) -> BatchFn:
    """Return the :class:`DeviceViews` of ``views`` if the device makes them, else ``views``.

    It is the device if there is a GPU, half of its free memory holds all images, and each operation
    has a plan. The log states which. All processes must call together.

    Args:
        device: Of the network.
        decided: DEVICE or LOADER in a run that has decided.
        workers: ``data.workers``.
    """
    if decided == LOADER:
        return views
    free = free_memory(device)
    obstacle = None
    if decided is None:
        obstacle = _obstacle(views, free)
    if not isinstance(views, RandomViews) or distributed.largest(obstacle is not None)[0]:
        if free:
            obstacle = obstacle or "another GPU lacks the memory"
            log.info(f"views: made by loader workers, because {obstacle}")
        return views
    try:
        on_device = DeviceViews(views, device, workers)
    except torch.OutOfMemoryError:
        log.warning(NO_MEMORY)
        return views
    size = tqdm.format_sizeof(on_device.images.pixels.nbytes, "B")
    log.info(f"views: made on {device}, which holds the images ({size})")
    return on_device


def _obstacle(views: BatchFn, free: int) -> str | None:
    """Return why a device with that much free memory (bytes) cannot make the views.

    None: it can.
    """
    if not isinstance(views, RandomViews):
        return "boxes and masks move with them"
    if views.needs_workers:
        return "RandAugment or RandomErasing runs there"
    store = views.store
    if store.decodes:
        return "images are decoded at each use"
    if store.high_bit % len(store.sizes):
        return "images have 8 or 16 bits"
    image_bytes = store.sizes.prod(axis=1) * store.pixel_bytes
    if image_bytes.sum() > free // 2:
        return "the images take more than half of the GPU's free memory"
    return None


def place_of(views: BatchFn) -> str:
    """Return DEVICE or LOADER, whichever makes the views."""
    if isinstance(views, DeviceViews):
        return views.place
    return LOADER


# ---------------------------------------------------------------------- the images
class DeviceImages:
    """All images of a store on a device.

    Args:
        device: Of the images and of the views.

    Attributes:
        pixels: All images end to end, uint8 or int16 [C, pixels].
        dtype: Of the arithmetic of crops: float16 for RGB of 8 bits on a GPU, else float32.

    Raises:
        torch.OutOfMemoryError: They do not fit.
    """

    def __init__(self, store: ImageStore, device: Device):
        self.device = device
        self.sizes = store.sizes
        counts = store.sizes.prod(axis=1)
        self.starts = np.cumsum(counts) - counts
        self.is_rgb8 = bool(store.pixel_bytes[0] == store.channels == 3)
        bits = torch.int16 if store.high_bit else torch.uint8  # few operations know uint16
        self.pixels = torch.empty(store.channels, counts.sum(), dtype=bits, device=device)
        for i, start in enumerate(self.starts):
            pixels = store.image(i).permute(1, 2, 0).flatten(0, 1)  # [H W, C]
            end = start + len(pixels)
            self.pixels[:, start:end] = pixels.view(bits).to(device).T
        self.dtype = torch.float32
        if self.is_rgb8 and self.pixels.is_cuda:
            self.dtype = torch.float16

    def crops(self, plan: ViewPlan, numbers: Integers, size: int) -> Tensor:
        """Return the crops of a plan, resized and turned, without colours.

        Args:
            plan: Of V views.
            numbers: The image of each view, [V].
            size: Side of the crops (pixels).

        Returns:
            float32 in [0, 1], [V, C, size, size].
        """
        channels = len(self.pixels)
        out = torch.empty(len(numbers), channels, size, size, device=self.device)
        sides = plan.box[:, 2:].max(axis=1)
        remaining = np.argsort(-sides, kind="stable")  # windows of a part are alike
        while len(remaining):
            side = -(-int(sides[remaining[0]]) // SIDE_STEP) * SIDE_STEP
            # places of 8 bytes, values as bytes and twice as floats, matrices of weights, and
            # between the products
            window_bytes = side * side * (8 + 9 * channels)
            product_bytes = side * size * (16 + 12 * channels)
            count = max(1, WORKING_BYTES // (window_bytes + product_bytes))
            part = remaining[:count]
            crops = self._crop(plan, part, numbers[part], side, size)
            out[send(part, self.device)] = crops
            remaining = remaining[count:]
        is_turned = plan.turns % 2 == 1
        if is_turned.any():
            out = torch.where(_column(is_turned, out), out.mT, out)
        return out

    def _crop(
        self,
        plan: ViewPlan,
        part: Integers,
        numbers: Integers,
        side: int,
        size: int,
    ) -> Tensor:
        """Return the views ``part`` [v] of a plan before transpositions, [v, C, size, size].

        Windows are padded to ``side``.
        """
        first, lengths = plan.box[part].T.reshape(2, 2, -1)  # of rows, of columns, [2, v]
        turns = plan.turns[part]  # each is a transposition and a flip
        flips = [
            plan.vflip[part] ^ (turns > 1),
            plan.flip[part] ^ (turns % 3 > 0),
        ]
        widths = self.sizes[numbers, 1]
        steps = np.stack([widths, np.ones_like(widths)])
        corner = np.where(flips, first + lengths - 1, first)
        start = self.starts[numbers] + (corner * steps).sum(axis=0)
        steps = np.where(flips, -steps, steps)
        table = send(np.stack([start, *steps, *lengths]), self.device)  # [5, v]
        rows, columns = resize_weights(table[3:], size, side, self.dtype)  # [v, S, W] each
        window = self._windows(table, side)
        narrow = self._rounded(window.flatten(1, 2) @ columns.mT)  # [v, H C, S]
        narrow = narrow.view(len(part), side, -1)  # [v, H, C S]
        small = self._rounded(rows @ narrow)  # [v, S, C S]
        small = small.view(len(part), size, -1, size).transpose(1, 2)  # [v, C, S, S]
        return small.float().clamp_(0, 255).div_(255)

    def _windows(self, table: Tensor, side: int) -> Tensor:
        """Return the pixels of windows in [0, 255], [v, side, C, side].

        Args:
            table: First pixel, steps between rows and columns, height and width, [5, v].
        """
        start, row_step, column_step, height, width = table[:, :, None, None]  # [v, 1, 1] each
        column = torch.arange(side, device=self.device)
        row = column[:, None]
        pixel = start + torch.minimum(row, height - 1) * row_step
        pixel = pixel + torch.minimum(column, width - 1) * column_step  # [v, H, W]
        window = self.pixels[:, pixel].permute(1, 2, 0, 3)  # [C, v, H, W] -> [v, H, C, W]
        if window.dtype == torch.int16:
            window = (window.int() & WHITE).float() * (255 / WHITE)
        return window.to(self.dtype, memory_format=torch.contiguous_format).contiguous()

    def _rounded(self, values: Tensor) -> Tensor:
        if self.is_rgb8:  # such images are resized as bytes
            return values.round_().clamp_(0, 255)
        return values


def resize_weights(
    length: Tensor,
    size: int,
    padded: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weights by which ``F.interpolate`` resizes a side, bicubic and antialiased.

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
    pixels = torch.arange(size, device=length.device)[:, None]  # of the result
    centre = scale * (pixels + 0.5)  # [..., S, 1]
    reach = 4 * max(1, padded / size)  # pixels farther away have no weight
    taps = min(padded, 2 + math.ceil(reach))
    first = (centre - 2 * stretch + 0.5).long().clamp(0, padded - taps)
    pixel = first + torch.arange(taps, device=length.device)  # [..., S, taps]
    distance = ((pixel + 0.5 - centre) / stretch).abs()
    near = (1 - distance).clamp(min=0)
    far = (2 - distance).clamp(min=0)
    # the cubic kernel with a = -0.5
    weight = far.square() * (far - 1) / 2 + near.square() * (1 - 2 * near)
    weight *= pixel < length
    weight /= weight.sum(-1, keepdim=True)
    shape = (*weight.shape[:-1], padded)
    matrix = torch.zeros(shape, dtype=dtype, device=weight.device)
    return matrix.scatter_(-1, pixel, weight.to(dtype))


# ---------------------------------------------------------------------- the colours
def blend(views: Tensor, factor: Tensor, is_contrast: Tensor, is_saturation: Tensor) -> Tensor:
    """Return views [V, C, S, S] times their factors plus the rest of another image.

    That is black, for contrast their mean, for saturation their grey. Channels that are no colours
    have their own means. ``factor`` and the others are floats [V, 1, 1, 1].
    """
    if views.shape[1] == 3:
        brightness = grey(views)
        mean = brightness.mean((2, 3), keepdim=True)
        other = is_saturation * brightness + is_contrast * mean
    else:
        other = is_contrast * views.mean((2, 3), keepdim=True)
    return torch.lerp(other, views, factor).clamp_(0, 1)


def turn_hue(views: Tensor, turns: Tensor) -> Tensor:
    """Return RGB views [V, 3, S, S] with their hues moved by shares of the circle [V, 1, 1, 1]."""
    red, green, blue = views.unbind(1)
    value = views.amax(1)
    chroma = value - views.amin(1)
    divisor = chroma.clamp(min=1e-12)
    # in sixths of the circle
    of_red = (green - blue) / divisor
    of_green = 2 + (blue - red) / divisor
    of_blue = 4 + (red - green) / divisor
    hue = torch.where(value == green, of_green, of_blue)
    hue = torch.where(value == red, of_red, hue)[:, None]
    offset = torch.arange(5, 0, -2, device=views.device)[:, None, None]  # of red, green, blue
    sixth = torch.remainder(hue + (6 * turns + offset), 6)
    share = torch.minimum(sixth, 4 - sixth).clamp_(0, 1)
    return value[:, None] - chroma[:, None] * share


KERNELS = (blend, turn_hue)  # what most of the time of colours goes to
Kernels = Sequence[Callable[..., Tensor]]


def recolour(views: Tensor, plan: ViewPlan, kernels: Kernels = KERNELS) -> Tensor:
    """Jitter, grey, blur and solarize V views, each by its own parameters.

    Each view is that of :func:`idmm.data.views.colour_rgb` or ``colour_bands``.

    Args:
        views: float32 in [0, 1], [V, C, S, S], which may be overwritten.
        plan: Of these views. Their flips and turns are done.
        kernels: :data:`KERNELS`, or the same compiled.
    """
    if plan.jitter.any():
        views = _jitter(views, plan, kernels)
    if views.shape[1] == 3 and plan.grey.any():
        views = torch.where(_column(plan.grey, views), grey(views), views)
    blurred = np.flatnonzero(plan.sigma)
    if len(blurred):
        rows = send(blurred, views.device)
        sigma = send(plan.sigma[blurred], views.device)
        weights = blur_weights(sigma, views.shape[-1])
        weights = weights.float()[:, None]
        views[rows] = weights @ views[rows] @ weights.mT
    if plan.solarize.any():
        is_inverted = _column(plan.solarize, views) & (views >= SOLARIZE_FROM)
        views = torch.where(is_inverted, 1 - views, views)
    return views


def _jitter(views: Tensor, plan: ViewPlan, kernels: Kernels) -> Tensor:
    """Change brightness, contrast, saturation and hue of each view in its own order."""
    blend, turn_hue = kernels
    is_rgb = views.shape[1] == 3
    last_blend = SATURATION if is_rgb else CONTRAST
    # [V], the adjustment of each view in this step
    for number in np.array(ORDERS)[plan.order].T:
        factor = plan.factors[np.arange(len(number)), number]
        is_blend = plan.jitter & (number <= last_blend)
        if is_blend.any():
            factors = np.where(is_blend, factor, 1)
            table = np.stack([factors, number == CONTRAST, number == SATURATION])
            views = blend(views, *_column(table.astype(np.float32), views))
        is_turned = plan.jitter & (number == HUE) & (factor % 1 != 0)
        turned = np.flatnonzero(is_turned)
        if is_rgb and len(turned):
            rows = send(turned, views.device)
            turns = _column(factor[turned].astype(np.float32), views)
            views[rows] = turn_hue(views[rows], turns)
    return views


def _column(values: NDArray[Any], views: Tensor) -> Tensor:
    """Send values [..., V] of views to their device, [..., V, 1, 1, 1]."""
    return send(values, views.device)[..., None, None, None]


def blur_weights(sigma: Tensor, size: int) -> Tensor:
    """Return the matrices of Gaussian blurs that reach three sigma, [v, size, size].

    Borders are reflected.

    Args:
        sigma: Of each view (pixels), [v]. At most a third of ``size`` - 1.
        size: Side of the views (pixels).
    """
    sigma = sigma[:, None]
    distance = torch.arange(2 * size, device=sigma.device)
    is_reached = distance <= (3 * sigma).ceil()
    taps = torch.exp(-0.5 * (distance / sigma).square()) * is_reached  # [v, 2 S]
    taps /= 2 * taps.sum(1, keepdim=True) - taps[:, :1]
    j = distance[:size]
    i = j[:, None]
    before = taps[:, i + j] * (j > 0)
    after = taps[:, 2 * (size - 1) - i - j] * (j < size - 1)
    return taps[:, (i - j).abs()] + (before + after)  # with both borders reflected


# ---------------------------------------------------------------------- the batches
class DeviceViews:
    """The batches of :class:`idmm.data.views.RandomViews`, made on a device.

    Args:
        views: Draws the plans.
        device: Of the images and of the batches.
        workers: ``data.workers``, if loader workers have to continue.

    Attributes:
        images: All images on the device, until :meth:`leave`.
        place: DEVICE, after :meth:`leave` LOADER.
    """

    def __init__(
        self,
        views: RandomViews,
        device: Device,
        workers: int | None = None,
    ):
        self.views = views
        self.device = device
        self.workers = workers
        self.images = DeviceImages(views.store, device)
        self.place = DEVICE
        self.kernels: Kernels = KERNELS
        self.mean = torch.tensor(views.mean).to(device)
        self.std = torch.tensor(views.std).to(device)

    @torch.no_grad()
    def __call__(self, epoch: int, indices: Integers) -> Batch:
        """Return the batch of images [B] in an epoch, see :meth:`RandomViews.batch`.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        views = [self._made(plan, indices) for plan in self.views.plans(epoch, indices)]
        batch = self.views.batch(views, indices)
        batch["index"] = send(batch["index"], self.device)
        if "label" in batch:
            batch["label"] = send(batch["label"], self.device)
        return batch

    def compile(self) -> None:
        """Compile what most of the time of colours goes to."""
        self.kernels = [torch.compile(kernel, dynamic=True) for kernel in KERNELS]

    def leave(self) -> None:
        """Free the images, because memory ran out, and log a warning."""
        del self.images
        self.place = LOADER
        log.warning(NO_MEMORY)

    def _made(self, plan: ViewPlan, indices: Integers) -> Tensor:
        """Return normalised views, float32 [B, count, len(mean), S, S]."""
        numbers = np.repeat(indices, len(plan.box) // len(indices))
        crops = self.images.crops(plan, numbers, self.views.size)  # [V, C, S, S]
        at_once = max(1, WORKING_BYTES // (COPIES * crops[0].nbytes))
        out = crops[:, : len(self.mean)]
        for first in range(0, len(crops), at_once):
            part = slice(first, first + at_once)
            coloured = recolour(crops[part], plan.part(part), self.kernels)
            out[part] = normalise(coloured, self.mean, self.std)
        return out.reshape(len(indices), -1, *out.shape[1:])
