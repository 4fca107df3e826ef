"""Images as pixels: pictures as RGB, other images as the channels that they have; 8 bits, or 16 of deeper ones.

0 and 1 of images of more than 8 bits stand for one range of values. It is given by ``data.range`` or goes from the
smallest to the largest value of all training images, in bands of each channel. Each image's 1 in 10,000 most extreme
pixels at either end are left out, so that hot and dead pixels of a sensor do not set it.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from idmm.data.formats import PICTURE_CHANNELS, BadImage, Opened, Range, RangeUnknown, opened, upright
from idmm.data.split import counted
from idmm.errors import reason

# What deeper values are scaled by: AUTO, the values that 0 and 1 stand for, or those of each channel; None: those of
# 16 bits
Scale = str | Range | tuple[Range, ...] | None
AUTO = "auto"
TOP = 65535  # of what is kept of deeper images
_TRIMMED = 1e-4  # share of an image's pixels at either end that its extremes leave out


class Bands(NamedTuple):
    """Of images whose channels are used as they are."""

    count: int | None = None
    """Channels that a file must have; None: any that has those chosen."""
    chosen: tuple[int, ...] | None = None
    """Those that are used, in that order, from 0; None: all."""

    @property
    def used(self) -> int:
        """Channels that are used."""
        return len(self.chosen) if self.chosen else self.count


def bands_of(in_chans: int | None, bands: Sequence[int] | None, count: int | None = None) -> Bands | None:
    """Returns what ``data.in_chans`` and ``data.bands`` ask for, of files of ``count`` channels; None: pictures."""
    if bands is not None:
        return Bands(count, tuple(bands))
    return None if in_chans in (None, *PICTURE_CHANNELS) else Bands(in_chans)


class Decoded(NamedTuple):
    """An image."""

    pixels: np.ndarray
    """uint8 or, of an image of more than 8 bits, uint16 [H, W, C], contiguous; 0 and the largest value are 0 and 1."""
    ends: tuple[Range, ...]
    """Smallest and largest value of an image of more than 8 bits, of bands each channel's; else empty."""
    digest: bytes
    """Of its file, or of the pixels if it has none."""
    transparent: bool
    """Whether the opacity is 0 everywhere, so that the colours are shown as if there were none."""


def read(path: str | os.PathLike) -> bytes:
    """Returns a file's bytes; BadImage if it is gone, may not be read, or is empty."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise BadImage(reason(error)) from error
    if not data:
        raise BadImage("empty file")
    return data


def digest(content: bytes) -> bytes:
    """Returns the BLAKE2b of a file's bytes or an image's pixels, 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()


def read_image(
    item: bytes | str | os.PathLike | np.ndarray | Image.Image,
    max_pixels: int,
    scale: Scale = None,
    bands: Bands | None = None,
    measure: bool = True,
) -> Decoded:
    """Decodes an image, its first frame if it is animated.

    A picture has three channels: transparent pixels are white (unless all are), EXIF orientation is applied, those of
    grey are equal.
    Bands are the channels of the file, upright too; those of a palette are its colours'.

    Args:
        item: A file's content, its path, numbers as files have them, [H, W] or [H, W, C], or an open image of Pillow's,
            which has 8 bits of colours only.
        max_pixels: Images with more pixels than this are refused, by their header (pixels).
        scale: Of images deeper than 8 bits. Values outside of ranges are clipped.
        bands: Which channels are used; None: a picture.
        measure: Whether ``ends`` are wanted, which takes longer than the pixels; else they are empty.

    Raises:
        BadImage: No such file, empty, not an image, truncated, too large, other channels than expected, as a picture
            several pages, values that are not finite or without a range.
        RangeUnknown: It is deeper than 8 bits, and ``scale`` is AUTO.
    """
    content = read(item) if isinstance(item, (str, os.PathLike)) else item
    with opened(content, max_pixels, _expected(bands)) as image:
        pixels, ends, transparent = _pixels(image, scale, bands, measure)
    return Decoded(pixels, ends, digest(content if isinstance(content, bytes) else content.tobytes()), transparent)


def header(item: bytes | str | os.PathLike | np.ndarray, max_pixels: int, bands: Bands | None = None) -> Opened:
    """Returns what is known of an item of a split before its pixels are read; BadImage as :func:`read_image`."""
    content = read(item) if isinstance(item, (str, os.PathLike)) else item
    with opened(content, max_pixels, _expected(bands)) as image:
        return image


def _expected(bands: Bands | None) -> Sequence[int]:
    """Numbers of channels that arrays have."""
    return PICTURE_CHANNELS if bands is None else [] if bands.count is None else [bands.count]


# ---------------------------------------------------------------------- channels
def _pixels(
    image: Opened, scale: Scale, bands: Bands | None, measure: bool
) -> tuple[np.ndarray, tuple[Range, ...], bool]:
    """Reads an image, uint8 or uint16 [H, W, C], its ends, and whether it is transparent."""
    if scale == AUTO and image.deep:
        raise RangeUnknown
    if bands is None and image.fault:
        raise BadImage(image.fault)
    chosen = None if bands is None else _chosen(image, bands)
    picture = image.picture if bands is None else None
    values = picture() if picture else upright(image.values(), image.orientation())
    alpha, ends, transparent = None, (), False
    if bands is not None:
        values = values[:, :, chosen]
    elif values.shape[2] in (2, 4):
        values, alpha = values[:, :, :-1], values[:, :, -1:]
        transparent = image.opacity and not (alpha > 0).any()
        if not image.opacity or transparent or (alpha >= _top(alpha.dtype)).all():
            alpha = None
        elif image.premultiplied:
            values = _straight(values, alpha)
    if image.deep:
        if not np.isfinite(values).all():
            raise BadImage("has values that are not finite (NaN or infinite)")
        scale = scale or ((0.0, 65535.0) if values.dtype == np.uint16 else None)
        if scale is None:
            raise BadImage(f"has values of type {values.dtype}, which need a range; expected 8 or 16 bits")
        ends = _ends(values, bands) if measure else ()
        values = scaled(values, scale)
    if alpha is not None:
        values = _on_white(values, alpha)
    if bands is None and values.shape[2] == 1:
        values = np.repeat(values, 3, axis=2)
    return np.ascontiguousarray(values), ends, transparent


def _top(dtype: np.dtype) -> float:
    """Returns the opacity of opaque pixels."""
    return 1.0 if dtype.kind == "f" else np.iinfo(dtype).max


def _straight(values: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Divides colours by the opacity that they were multiplied by."""
    top = _top(alpha.dtype)
    colours = np.divide(values * float(top), alpha, out=np.zeros(values.shape), where=alpha > 0)
    return (colours if values.dtype.kind == "f" else np.clip(np.rint(colours), 0, top)).astype(values.dtype)


def _on_white(values: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Blends colours, uint8 or uint16 [H, W, C], with white by an opacity of any type, [H, W, 1]; rounded."""
    if alpha.dtype == np.uint8:
        return ((65152 - (255 - values).astype(np.uint16) * alpha) // 255).astype(np.uint8)  # 65152: 255 * 255 + 127
    opacity = np.clip(alpha / _top(alpha.dtype), 0, 1)
    return np.rint(TOP - (TOP - values.astype(np.float64)) * opacity).astype(np.uint16)


def _chosen(image: Opened, bands: Bands) -> list[int]:
    """Returns the numbers of the channels that are used; BadImage if the file has others than expected."""
    if bands.count not in (None, image.channels):
        raise BadImage(f"has {counted(image.channels, 'channel')}; expected {bands.count}")
    chosen = list(bands.chosen or range(image.channels))
    if max(chosen) >= image.channels:
        raise BadImage(f"has {counted(image.channels, 'channel')}; data.bands has {max(chosen)}, counted from 0")
    return chosen


def _ends(values: np.ndarray, bands: Bands | None) -> tuple[Range, ...]:
    """Returns the smallest and the largest value of an image, of bands each channel's, without the most extreme."""
    planes = values.reshape(1, -1) if bands is None else np.moveaxis(values, 2, 0).reshape(values.shape[2], -1)
    cut = int(planes.shape[1] * _TRIMMED)
    ends = [cut, planes.shape[1] - 1 - cut]
    return tuple(map(tuple, np.partition(planes, ends, axis=1)[:, ends].astype(np.float64).tolist()))


def scaled(values: np.ndarray, scale: Range | tuple[Range, ...]) -> np.ndarray:
    """Scales values [H, W, C] by one range or one for each channel, uint16 [H, W, C]; those outside are clipped."""
    low, high = np.array(scale, dtype=np.float64).T  # [] or [C]
    factor = np.divide(TOP, high - low, out=np.zeros_like(high), where=high > low)
    return np.clip(np.rint((values.astype(np.float64) - low) * factor), 0, TOP).astype(np.uint16)


# ---------------------------------------------------------------------- sizes
def resized(
    pixels: np.ndarray, height: int, width: int, how: Image.Resampling = Image.Resampling.BICUBIC, box: Any = None
) -> np.ndarray:
    """Resizes an image with antialiasing, uint8 or uint16 [H, W, C] -> [height, width, C]; 16 bits as floats, rounded.

    ``box``: left, top, right, bottom of the part that is taken (pixels); None: all.
    """
    if pixels.dtype == np.uint8 and pixels.shape[2] == 3:
        return np.array(Image.fromarray(pixels).resize((width, height), how, box))
    planes = pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32)
    planes = [Image.fromarray(planes[:, :, c]).resize((width, height), how, box) for c in range(pixels.shape[2])]
    made = np.stack([np.asarray(plane) for plane in planes], axis=2)  # [height, width, C]
    return made if pixels.dtype == np.uint8 else np.clip(np.rint(made), 0, TOP).astype(pixels.dtype)


class CentreCrop(NamedTuple):
    """How an image is evaluated: its short side is resized to size / crop_pct, then the centre is cut out."""

    size: int
    """Side of the result (pixels)."""
    crop_pct: float
    """Share of the resized short side that the result covers, in (0, 1]."""

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """Returns the centre crop of an image, uint8 or uint16 [H, W, C] -> [size, size, C].

        Of a picture of 8 bits it is, to the last bit, what timm's ``create_transform(size, crop_pct=crop_pct,
        interpolation="bicubic")`` makes a tensor of.
        """
        (h, w), (rows, columns) = self.place(*array.shape[:2])
        return np.ascontiguousarray(resized(array, h, w)[rows, columns])

    def place(self, h: int, w: int) -> tuple[tuple[int, int], tuple[slice, slice]]:
        """Returns the sides (pixels) that an image of ``h`` x ``w`` is resized to, and the rows and columns of these
        that are kept, as timm has them: sides are rounded down, and margins of half a pixel to the even number."""
        size, short = self.size, math.floor(self.size / self.crop_pct)
        h, w = (short, int(short * w / h)) if h <= w else (int(short * h / w), short)
        top, left = round((h - size) / 2), round((w - size) / 2)
        return (h, w), (slice(top, top + size), slice(left, left + size))


Bound = int | CentreCrop | None  # what is kept of an image: a short side up to so many pixels, its centre crop, or all


def fitted(array: np.ndarray, bound: Bound) -> np.ndarray:
    """Returns what is kept of an image, uint8 or uint16 [H, W, C]; it is never enlarged.

    A longer short side is shrunk to the bound, bicubic with antialiasing, the aspect kept to the nearest pixel; an
    image of fewer pixels than its centre crop stays as it is.
    """
    size = fitted_size(*array.shape[:2], bound)
    if isinstance(bound, CentreCrop):
        return bound(array) if size == (bound.size, bound.size) else array
    return array if size == array.shape[:2] else resized(array, *size)


def fitted_size(h: int, w: int, bound: Bound) -> tuple[int, int]:
    """Returns what :func:`fitted` makes of an image's height and width (pixels)."""
    if isinstance(bound, CentreCrop):
        return (bound.size, bound.size) if h * w >= bound.size**2 else (h, w)
    if bound is None or min(h, w) <= bound:
        return h, w
    return (round(h * bound / w), bound) if w <= h else (bound, round(w * bound / h))


# ---------------------------------------------------------------------- for networks and for people
def unit(image):
    """Returns an image as float32 in [0, 1], a tensor uint8 or uint16 of any shape."""
    return image.float().div_(TOP if image.element_size() == 2 else 255)
