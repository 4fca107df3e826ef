"""Views made on the device, a whole batch at once, from images that lie there: the same draws as on loader workers.

Loader workers draw the numbers alone (:class:`ViewDraws`); :class:`DeviceViews` makes the pixels that
:func:`idmm.data.views.make_view` makes one view after the other, to rounding. Nothing here waits for the device: what
shapes and lists depend on is known where the numbers were drawn.

A crop, its antialiased resize and its flips are two matrix products, as ``interpolate(antialias=True)`` weighs the
pixels of a box by its columns, then by its rows. A blur is two products as well.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from idmm.data.device_images import DeviceImages, pixel_starts
from idmm.data.views import LUMA, ORDERS, SOLARIZE_FROM, ViewPlan, numbered

WORKING = 2**30  # bytes at most, about, beside the views themselves
# Columns of what is drawn for each view; after these brightness, contrast and dropping of each channel.
_BOX, _FLIPS, _SLOTS, _HUE, _SIGMA, _GREY, _SOLARIZE, _TURNS, _CHANNELS = 0, 2, 4, 16, 17, 18, 19, 20, 21


# ---------------------------------------------------------------------- what is drawn
@dataclass(frozen=True)
class Chunk:
    """Views whose boxes are padded to the same height and width (pixels)."""

    views: slice
    height: int
    width: int
    pixel_bytes: int


@dataclass(frozen=True)
class Part:
    """Views that are coloured together; rows are counted from the part's first view."""

    views: slice
    chunks: tuple[Chunk, ...]
    hue: tuple[slice, ...]  # of the lists of rows, for each of the four steps of the jitter
    blur: slice  # likewise


@dataclass(frozen=True)
class Layout:
    """What is known of drawn views without a look at the device."""

    side: int  # pixels
    groups: tuple[tuple[int, int], ...]  # number and views of each group of this side
    parts: tuple[Part, ...]
    reach: int  # of the widest blur's kernel to either side (pixels)
    jitter: bool  # whether there is any; likewise:
    grey: bool
    solarize: bool
    turns: bool
    channels: bool


class ViewDraws:
    """Draws the views of a batch and leaves the pixels to :class:`DeviceViews`; a
    :data:`idmm.data.loaders.BatchFn`.

    Args:
        transform: Says what is drawn: :class:`idmm.data.views.MultiCropTransform` or one like it.
    """

    def __init__(self, transform):
        self.transform, self.store = transform, transform.store
        self.starts = pixel_starts(self.store)

    def __call__(self, epoch: int, indices: np.ndarray) -> dict:
        """Returns ``drawn``, a mapping for each side of crops, and what :func:`idmm.data.views.numbered` adds.

        Each has ``numbers`` (float32 [V, 21 + 3 C]), ``places`` (first pixel, width of the image, place among the
        groups' views; int64 [V, 3]), ``rows`` (int64 [L]) and their :class:`Layout`, all V sorted by size.
        """
        plans = self.transform.plans(epoch, indices, self.store.channels)
        sides = dict.fromkeys(side for _, side in plans)
        drawn = [self._of_side(side, {n: p for n, (p, s) in enumerate(plans) if s == side}, indices) for side in sides]
        return numbered({"drawn": drawn}, self.store, indices)

    def _of_side(self, side: int, plans: dict[int, ViewPlan], indices: np.ndarray) -> dict:
        channels = self.store.channels
        boxes = np.concatenate([plan.box for plan in plans.values()])  # [V, 4]
        images = np.concatenate([np.repeat(indices, len(plan.box) // len(indices)) for plan in plans.values()])
        numbers, hue = (np.concatenate(x) for x in zip(*(_numbers(p, channels) for p in plans.values()), strict=True))
        each, width = self.store.pixel_bytes[images], self.store.sizes[images, 1]
        order = np.lexsort((boxes[:, 2] * boxes[:, 3], each))
        corner = self.starts[images] + boxes[:, 0] * width + boxes[:, 1]
        rows: list[np.ndarray] = []
        numbers, hue = numbers[order], hue[order]
        sigma = numbers[:, _SIGMA]
        parts = []
        for views in _slices(len(order), max(1, WORKING // (24 * channels * side**2))):
            chunks = tuple(_chunks(views, boxes[order, 2:], each[order], channels, side))
            listed = [_listed(rows, mask) for mask in (*hue[views].T, sigma[views] > 0)]
            parts.append(Part(views, chunks, tuple(listed[:4]), listed[4]))
        several = {"grey": _GREY, "solarize": _SOLARIZE, "turns": _TURNS}
        layout = Layout(
            side=side,
            groups=tuple((number, len(plan.box)) for number, plan in plans.items()),
            parts=tuple(parts),
            reach=math.ceil(3 * sigma.max()),
            jitter=any(plan.jitter.any() for plan in plans.values()),
            channels=any(plan.channels is not None for plan in plans.values()),
            **{name: bool(numbers[:, column].any()) for name, column in several.items()},
        )
        return {
            "numbers": torch.from_numpy(numbers.astype(np.float32)),
            "places": torch.from_numpy(np.stack([corner[order], width[order], order], 1)),
            "rows": torch.from_numpy(np.concatenate(rows)),
            "layout": layout,
        }


def _numbers(plan: ViewPlan, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the columns of V views, float64 [V, 21 + 3 C], and which have their hue changed in which step,
    bool [V, 4].

    A step of the jitter but for hue is factor * x + a * luma + b * mean, clipped: three columns each.
    """
    views, own = len(plan.box), plan.channels
    kinds = np.array(ORDERS)[plan.order]  # [V, 4], of each step
    drawn = np.take_along_axis(plan.factors, kinds, 1)
    changed = plan.jitter[:, None] & (kinds < (3 if channels == 3 else 2))
    factor = np.where(changed, drawn, 1.0)
    slots = np.stack([factor, (1 - factor) * (kinds == 2), (1 - factor) * (kinds == 1)], 2)  # [V, 4, 3]
    still = np.zeros((views, 3))
    turned = still if own is None else np.stack([own.vflip, own.turns, still[:, 0]], 1)
    strengths = np.ones((views, channels, 2)) if own is None or own.factors is None else own.factors
    dropped = np.zeros((views, channels)) if own is None else own.dropped
    columns = [plan.box[:, 2:], turned[:, :1], plan.flip, slots.reshape(views, -1), plan.factors[:, 3], plan.sigma]
    columns += [plan.grey & (channels == 3), plan.solarize, turned[:, 1], strengths.reshape(views, -1), dropped]
    hue = plan.jitter[:, None] & (kinds == 3) & (channels == 3)
    return np.concatenate([column.reshape(views, -1) for column in columns], 1).astype(np.float64), hue


def _slices(count: int, most: int) -> list[slice]:
    """Splits so many views into parts of about the same length, at most so long."""
    ends = np.linspace(0, count, -(-count // most) + 1).astype(int).tolist()
    return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def _chunks(views: slice, boxes: np.ndarray, each: np.ndarray, channels: int, side: int):
    """Yields chunks of a part's views, sorted by area, whose boxes differ at most twofold in it, within the memory."""
    first = views.start
    while first < views.stop:
        height = np.maximum.accumulate(boxes[first : views.stop, 0])
        width = np.maximum.accumulate(boxes[first : views.stop, 1])
        area = boxes[first : views.stop].prod(1)
        pixel = 8 + 2 * each[first] + 8 * channels  # index, bytes, values
        view = height * width * pixel + side * (height + width) * 16 + 8 * channels * side * height
        fits = (view * np.arange(1, len(view) + 1) <= WORKING) & (area <= 2 * area[0])
        fits &= each[first : views.stop] == each[first]
        count = max(1, int(fits.argmin()) if not fits.all() else len(fits))
        yield Chunk(slice(first, first + count), int(height[count - 1]), int(width[count - 1]), int(each[first]))
        first += count


def _listed(rows: list[np.ndarray], mask: np.ndarray) -> slice:
    """Adds the rows of a mask to the lists, and returns where they are."""
    start = sum(map(len, rows))
    rows.append(np.flatnonzero(mask))
    return slice(start, start + len(rows[-1]))


# ---------------------------------------------------------------------- pixels
class DeviceViews:
    """Makes the views of a batch that :class:`ViewDraws` drew and that was sent to the images' device.

    Args:
        transform: As there; its ``mean``, ``std`` and ``mode`` are used.
        images: Of the transform's store.
    """

    def __init__(self, transform, images: DeviceImages):
        self.transform, self.images, self.device = transform, images, images.device
        self.colours = images.store.channels == 3
        mean, std = (torch.tensor(list(x), dtype=torch.float32).view(-1, 1, 1) for x in (transform.mean, transform.std))
        self.fill = mean.to(self.device)
        self.scale, self.shift = (1 / std).to(self.device), (-mean / std).to(self.device)

    @torch.no_grad()
    def __call__(self, batch: dict) -> dict:
        """Returns the batch as the transform makes it, the views of groups float32 [B, count, C, S, S]."""
        made: dict[int, Tensor] = {}
        for drawn in batch["drawn"]:
            views = self._views(drawn)
            for part, (number, count) in zip(
                views.split([count for _, count in drawn["layout"].groups]), drawn["layout"].groups, strict=True
            ):
                made[number] = part.unflatten(0, (len(batch["index"]), count // len(batch["index"])))
        rest = {name: value for name, value in batch.items() if name != "drawn"}
        return {**self.transform.batch([made[number] for number in sorted(made)]), **rest}

    def _views(self, drawn: dict) -> Tensor:  # [V, C, S, S]
        layout, numbers, places = drawn["layout"], drawn["numbers"], drawn["places"]
        out = torch.empty(len(numbers), len(self.scale), layout.side, layout.side, device=self.device)
        for part in layout.parts:
            x = torch.cat([self._crops(chunk, numbers, places, layout.side) for chunk in part.chunks])
            x = self._coloured(x, numbers[part.views], drawn["rows"], part, layout)
            if self.colours and len(self.scale) == 1:
                x = _luma(x)
            out.index_copy_(0, places[part.views, 2], torch.addcmul(self.shift, x, self.scale))
        return out

    def _crops(self, chunk: Chunk, numbers: Tensor, places: Tensor, side: int) -> Tensor:
        """Cuts the boxes of a chunk out, resizes and flips them: [v, C, S, S] in [0, 1]."""
        flat, channels = self.images.pixels[chunk.pixel_bytes], self.images.store.channels
        box, flips = numbers[chunk.views, _BOX:_FLIPS], numbers[chunk.views, _FLIPS:_SLOTS] > 0
        corner, stride = places[chunk.views, 0, None], places[chunk.views, 1, None]
        y, x = (torch.arange(n, device=self.device) for n in (chunk.height, chunk.width))
        lines = (corner + y * stride).clamp_(max=len(flat) - chunk.width)  # [v, H]; those below a box count nothing
        pixels = flat[lines[..., None] + x]  # [v, H, W, bytes]
        deep = chunk.pixel_bytes > channels
        if deep:
            pixels = pixels.view(torch.int16).int().bitwise_and_(0xFFFF)  # not every device knows uint16
        planes = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)  # [v, C, H, W]
        rounded = self.colours and not deep  # as bytes are resized
        weights = interpolation_weights(box, flips, side, max(chunk.height, chunk.width), self.transform.mode)
        down, across = weights[:, 0, :, : chunk.height], weights[:, 1, :, : chunk.width]  # [v, S, H], [v, S, W]
        resized = planes.flatten(1, 2) @ across.mT  # [v, C * H, S]
        resized = resized.round_().clamp_(0, 255) if rounded else resized
        resized = down[:, None] @ resized.unflatten(1, (channels, -1))  # [v, C, S, S]
        top = 65535 if deep else 255
        return (resized.round_() if rounded else resized).clamp_(0, top).mul_(1 / top)

    def _coloured(self, x: Tensor, numbers: Tensor, rows: Tensor, part: Part, layout: Layout) -> Tensor:
        """Does what :func:`idmm.data.views.recolour` and :func:`idmm.data.views.change_channels` do; may change x."""
        for step in range(4) if layout.jitter else ():
            x = self._jittered(x, numbers[:, _SLOTS + 3 * step : _SLOTS + 3 * step + 3])
            chosen = rows[part.hue[step]]
            if len(chosen):
                x.index_copy_(0, chosen, turn_hue(x[chosen], numbers[chosen, _HUE]))
        if layout.grey:
            x = torch.where(_each(numbers, _GREY) > 0, _luma(x), x)
        chosen = rows[part.blur]
        if len(chosen):
            x.index_copy_(0, chosen, blurred(x[chosen], numbers[chosen, _SIGMA], layout.reach))
        if layout.solarize:
            x = torch.where((_each(numbers, _SOLARIZE) > 0) & (x >= SOLARIZE_FROM), 1 - x, x)
        if layout.turns:
            turns = _each(numbers, _TURNS)
            x = torch.where(turns % 2 == 1, x.mT, x)
            x = torch.where((turns == 1) | (turns == 2), x.flip(2), x)
            x = torch.where(turns >= 2, x.flip(3), x)
        return self._single_channels(x, numbers[:, _CHANNELS:]) if layout.channels else x

    def _jittered(self, x: Tensor, step: Tensor) -> Tensor:
        factor, of_luma, of_mean = (part[:, None, None, None] for part in step.unbind(1))
        if not self.colours:
            return torch.addcmul(x.mean((2, 3), keepdim=True) * of_mean, x, factor).clamp_(0, 1)
        grey = _luma(x)  # [v, 1, S, S]
        around = torch.addcmul(grey.mean((2, 3), keepdim=True) * of_mean, grey, of_luma)
        return torch.addcmul(around, x, factor).clamp_(0, 1)

    def _single_channels(self, x: Tensor, numbers: Tensor) -> Tensor:
        channels = x.shape[1]
        factors, dropped = numbers[:, : 2 * channels].view(-1, channels, 2, 1, 1), numbers[:, 2 * channels :]
        x = (x * factors[:, :, 0]).clamp_(0, 1)
        x = torch.lerp(x.mean((2, 3), keepdim=True), x, factors[:, :, 1]).clamp_(0, 1)
        return torch.where(dropped[..., None, None] > 0, self.fill, x)


def _luma(x: Tensor) -> Tensor:
    """:func:`idmm.data.views.luma` in as few passes as can be."""
    return (x[:, :1] * LUMA[0]).add_(x[:, 1:2], alpha=LUMA[1]).add_(x[:, 2:], alpha=LUMA[2])


def _each(numbers: Tensor, column: int) -> Tensor:
    return numbers[:, column, None, None, None]


def interpolation_weights(box: Tensor, flips: Tensor, size: int, padded: int, mode: str) -> Tensor:
    """Returns the weights of the pixels along a side by which ``interpolate(antialias=True)`` resizes boxes.

    Args:
        box: Pixels of each side, float [...].
        flips: Whether the result is turned round, bool [...].
        size: Pixels of the result.
        padded: Pixels that sides are padded to; those beyond ``box`` weigh nothing.
        mode: bicubic (a = -0.5) or bilinear.

    Returns:
        [..., size, padded], rows of sum 1.
    """
    radius = 2 if mode == "bicubic" else 1
    taps = math.ceil(2 * radius * max(1, padded / size)) + 1
    i, scale = torch.arange(size, device=box.device), box[..., None] / size  # [S], [..., 1]
    wide = scale.clamp(min=1)
    centre = scale * (torch.where(flips[..., None], size - 1 - i, i) + 0.5)  # [..., S]
    first = (centre - radius * wide + 0.5).floor_().clamp_(min=0)
    j = first[..., None] + torch.arange(taps, device=box.device)  # [..., S, T]
    x = ((j + 0.5 - centre[..., None]) / wide[..., None]).abs_().clamp_(max=radius)
    if mode == "bicubic":
        x = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2)
    else:
        x = 1 - x
    x = x * (j < box[..., None, None])
    weights = torch.zeros(*box.shape, size, padded + taps, device=box.device)
    return weights.scatter_(-1, j.long(), x.div_(x.sum(-1, keepdim=True)))[..., :padded]


def turn_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Turns the hue of RGB images in [0, 1], [V, 3, H, W], by parts of the circle, [V], through HSV."""
    red, green, blue = x.unbind(1)  # [V, H, W]
    value, spread = x.amax(1), x.amax(1) - x.amin(1)
    per = 1 / (spread + torch.finfo(x.dtype).eps)
    blues = torch.where(value == green, (blue - red) * per + 2, (red - green) * per + 4)
    sixths = torch.where(value == red, (green - blue) * per, blues) + 6 * turns[:, None, None]
    corners = torch.arange(5, 0, -2, device=x.device)[:, None, None]  # of red, green and blue: 5, 3, 1
    k = (sixths[:, None] + corners) % 6  # [V, 3, H, W]
    return value[:, None] - spread[:, None] * torch.minimum(k, 4 - k).clamp_(0, 1)


def blurred(x: Tensor, sigma: Tensor, reach: int) -> Tensor:
    """Blurs as :func:`idmm.data.views.gaussian_blur`, [V, C, S, S] by sigmas (pixels) [V], whose kernels reach at most
    so far to either side."""
    offsets = torch.arange(-reach, reach + 1, device=x.device)
    taps = torch.exp(-0.5 * (offsets / sigma[:, None]) ** 2) * (offsets.abs() <= torch.ceil(3 * sigma[:, None]))
    taps = taps / taps.sum(1, keepdim=True)  # [V, T]
    side = x.shape[-1]
    band = (taps @ _mirrored(side, reach, x.device)).view(-1, side, side)  # [V, S, S]
    rows = x.flatten(1, 2) @ band.mT  # [V, C * S, S]
    return band[:, None] @ rows.view_as(x)


@functools.lru_cache(maxsize=16)
def _mirrored(side: int, reach: int, device: torch.device) -> Tensor:
    """Returns which pixel stands how far from which, borders mirrored without doubling them: 0 and 1,
    float32 [2 * reach + 1, side * side]."""
    period, pixels = max(1, 2 * (side - 1)), torch.arange(side, device=device)
    found = (pixels + torch.arange(-reach, reach + 1, device=device)[:, None]) % period  # [T, S]
    return (torch.minimum(found, period - found)[..., None] == pixels).float().flatten(1)
