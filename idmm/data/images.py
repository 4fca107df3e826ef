"""Images as pixels, 8 or 16 bits: pictures as RGB, other images as the channels that they have.

0 and 1 of images of more than 8 bits stand for one range of values. ``data.range`` gives it, or it
goes from the smallest to the largest value of all training images, for bands of each channel. Each
image's 1 in 10,000 most extreme pixels at either end are left out, so that hot and dead pixels of a
sensor do not set it.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from PIL import Image

from idmm.data.formats import PICTURE_CHANNELS, BadImage, Header, decode, read_header
from idmm.errors import reason
from idmm.files import AnyPath
from idmm.text import counted

RATIO = (3 / 4, 4 / 3)  # aspect ratios of a random crop, as torchvision's RandomResizedCrop
# share of an image's pixels at either end that its smallest and largest value leave out
_TRIMMED = 1e-4
_SHOWN = (1, 99)  # percentiles of a channel that are black and full colour in pictures for people
AUTO = "auto"
# AUTO, smallest and largest value, both for each channel, or None: the full range of 16 bits
ValueRange = str | list[float] | list[list[float]] | None
WHITE = 65535  # stands for 1 in stored images of more than 8 bits
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's and torchvision's grey


class RangeUnknown(Exception):
    """An image has more than 8 bits, and their value range is not known yet."""


class Bands(NamedTuple):
    """Channels that are used as they are."""

    count: int | None = None  # that a file must have. None: any number that includes those chosen
    chosen: tuple[int, ...] | None = None  # those that are used, in that order, from 0. None: all

    @property
    def used(self) -> int:
        """Number of channels that are used."""
        if self.chosen:
            return len(self.chosen)
        return self.count


def bands_of(
    in_chans: int | None, bands: Sequence[int] | None, count: int | None = None
) -> Bands | None:
    """Return the bands of ``data.in_chans`` and ``data.bands`` for files of ``count`` channels.
    None: pictures."""
    if bands is not None:
        return Bands(count, tuple(bands))
    if in_chans in (None, *PICTURE_CHANNELS):
        return None
    return Bands(in_chans)


class Decoded(NamedTuple):
    """An image."""

    # uint8 or, of more than 8 bits, uint16 [H, W, C], contiguous. The largest value stands for 1
    pixels: ndarray
    digest: bytes  # BLAKE2b of its file, or of the pixels if it has none


def read(path: AnyPath) -> bytes:
    """Return a file's bytes. BadImage if it is gone, no regular file, may not be read, or is
    empty."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise BadImage("not a regular file")
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise BadImage(reason(error)) from error
    if not content:
        raise BadImage("empty file")
    return content


def digest(content: bytes) -> bytes:
    """Return the BLAKE2b of a file's bytes or an image's pixels, 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()


# a file's content or path, numbers, or an open image
Item = bytes | AnyPath | ndarray | Image.Image


def read_image(item: Item, value_range: ValueRange = None, bands: Bands | None = None) -> Decoded:
    """Decode an image, upright by EXIF's orientation. Of an animation the first frame counts.

    A picture has three channels, which are equal if it is grey. Its transparent pixels are white.
    If all are, its colours are used as if it had no opacity. Bands are the channels of the file.
    Those of a palette are its colours'.

    Args:
        item: A file's path or content, numbers as files have them ([H, W] or [H, W, C]), or an open
            image of Pillow's, which has 8 bits of colours only.
        value_range: Of images of more than 8 bits. Values outside are clipped.
        bands: Channels that are used. None: a picture.

    Raises:
        BadImage: No such file, empty, not an image, truncated, too large, other channels than
            expected, as a picture several pages, values that are not finite or without a range.
        RangeUnknown: It has more than 8 bits, and ``value_range`` is AUTO.
    """
    content = read(item) if isinstance(item, AnyPath) else item
    values, alpha = _values(content, bands)
    if values.dtype != np.uint8:
        if value_range == AUTO:
            raise RangeUnknown
        value_range = value_range or ([0, WHITE] if values.dtype == np.uint16 else None)
        if value_range is None:
            raise BadImage(
                f"has values of type {values.dtype}, which need a range, expected 8 or 16 bits"
            )
        low, high = np.array(value_range, dtype=np.float64).T  # [] or [C]
        factor = np.divide(WHITE, high - low, out=np.zeros_like(high), where=high > low)
        values = np.clip(np.rint((values.astype(np.float64) - low) * factor), 0, WHITE).astype(
            np.uint16
        )
    if alpha is not None and (alpha > 0).any():
        values = _on_white(values, alpha)
    if bands is None and values.shape[2] == 1:
        values = np.repeat(values, 3, axis=2)
    pixels = np.ascontiguousarray(values)
    return Decoded(pixels, digest(content if isinstance(content, bytes) else content.tobytes()))


def _on_white(values: ndarray, alpha: ndarray) -> ndarray:
    """Return an image, uint8 or uint16 [H, W, C], blended with white by its opacity in the file's
    numbers [H, W, 1]."""
    if alpha.dtype.kind == "f":
        opaque = 1.0
    else:
        opaque = np.iinfo(alpha.dtype).max
    if (alpha >= opaque).all():
        return values
    if values.dtype == np.uint8:  # 65152: 255 * 255 + 127, which rounds
        return ((65152 - (255 - values).astype(np.uint16) * alpha) // 255).astype(np.uint8)
    opacity = np.clip(alpha / opaque, 0, 1)
    return np.rint(WHITE - (WHITE - values.astype(np.float64)) * opacity).astype(np.uint16)


def min_max_of(path: Item, bands: Bands | None) -> list[list[float]]:
    """Return smallest and largest value of an image of more than 8 bits, of bands one pair per
    channel. Else [].

    The most extreme pixels do not count.
    """
    values, _ = _values(read(path), bands)
    if values.dtype == np.uint8:
        return []
    if bands is None:
        channels = values.reshape(1, -1)
    else:
        channels = np.moveaxis(values, 2, 0).reshape(values.shape[2], -1)
    cut = int(channels.shape[1] * _TRIMMED)
    ends = [cut, channels.shape[1] - 1 - cut]
    return np.partition(channels, ends, axis=1)[:, ends].astype(np.float64).tolist()


def _values(
    content: bytes | ndarray | Image.Image, bands: Bands | None
) -> tuple[ndarray, ndarray | None]:
    """Return the used channels [H, W, C] in the numbers of the file, and the opacity of a picture
    [H, W, 1]."""
    values = decode(content, picture=bands is None)
    alpha = None
    if bands is not None:
        channels = values.shape[2]
        chosen = list(bands.chosen or range(values.shape[2]))
        if bands.count not in (None, channels):
            raise BadImage(f"has {counted(channels, 'channel')}, expected {bands.count}")
        if max(chosen) >= channels:
            raise BadImage(
                f"has {counted(channels, 'channel')}, and data.bands has {max(chosen)}, counted from 0"
            )
        values = values[:, :, chosen]
    elif values.shape[2] in (2, 4):
        values, alpha = values[:, :, :-1], values[:, :, -1:]
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise BadImage("has values that are not finite (NaN or infinite)")
    return values, alpha


def image_size(item: Item) -> tuple[int, int]:
    """Return height and width of an image in upright position (pixels). BadImage as
    :func:`read_image`."""
    if isinstance(item, ndarray):
        return item.shape[:2]
    return image_header(item).size


def image_header(path: AnyPath) -> Header:
    """Return size and orientation of a file's image. BadImage as :func:`read_image`."""
    return read_header(read(path))


# ---------------------------------------------------------------------- values
def unit(image):
    """Return an image as float32 in [0, 1], from a tensor uint8 or uint16 of any shape."""
    return image.float().div_(WHITE if image.element_size() == 2 else 255)


# ---------------------------------------------------------------------- sizes
def resized(pixels: ndarray, height: int, width: int) -> ndarray:
    """Resize an image, bicubic with antialiasing, uint8 or uint16 [H, W, C] -> [height, width,
    C]."""
    bicubic = Image.Resampling.BICUBIC
    if pixels.dtype == np.uint8 and pixels.shape[2] == 3:
        return np.array(Image.fromarray(pixels).resize((width, height), bicubic))
    if pixels.dtype == np.uint8:
        planes = pixels
    else:
        planes = pixels.astype(np.float32)
    planes = [
        Image.fromarray(planes[:, :, c]).resize((width, height), bicubic)
        for c in range(pixels.shape[2])
    ]
    made = np.stack([np.asarray(plane) for plane in planes], axis=2)  # [height, width, C]
    if pixels.dtype == np.uint8:
        return made
    return np.clip(np.rint(made), 0, WHITE).astype(pixels.dtype)


class CentreCrop(NamedTuple):
    """The image for evaluation: its short side is resized to size / crop_pct, then the centre is
    cut out."""

    size: int  # side of the result (pixels)
    crop_pct: float  # share of the resized short side that the result covers, in (0, 1]

    def __call__(self, array: ndarray) -> ndarray:
        """Return the centre crop of an image, uint8 or uint16 [H, W, C] -> [size, size, C].

        For a picture of 8 bits it equals timm's ``create_transform(size, crop_pct=crop_pct,
        interpolation="bicubic")`` to the last bit, before the tensor is made.
        """
        (h, w), (rows, columns) = self.place(*array.shape[:2])
        return np.ascontiguousarray(resized(array, h, w)[rows, columns])

    def place(self, h: int, w: int) -> tuple[tuple[int, int], tuple[slice, slice]]:
        """Return the sides (pixels) that an image of ``h`` x ``w`` is resized to, and the rows and
        columns of the crop.

        As in timm, sides are rounded down, and margins of half a pixel to the even number.
        """
        size = self.size
        short = math.floor(self.size / self.crop_pct)
        h, w = (short, int(short * w / h)) if h <= w else (int(short * h / w), short)
        top = round((h - size) / 2)
        left = round((w - size) / 2)
        return (h, w), (slice(top, top + size), slice(left, left + size))


# What is stored of an image: a short side up to so many pixels, its centre crop, or with None all
# of it
StoredSize = int | CentreCrop | None


def short_side_bound(size: int, smallest_scale: float) -> int:
    """Return the longest short side (pixels) worth storing: no random crop is up-sampled for it."""
    return int(np.ceil(size / np.sqrt(smallest_scale * RATIO[0])))


def fitted(array: ndarray, stored_size: StoredSize) -> ndarray:
    """Return an image, uint8 or uint16 [H, W, C], at its stored size. It is never enlarged.

    A longer short side is shrunk, bicubic with antialiasing, the aspect kept to the nearest pixel.
    An image of fewer pixels than its centre crop stays as it is.
    """
    size = fitted_size(*array.shape[:2], stored_size)
    if isinstance(stored_size, CentreCrop):
        if size == (stored_size.size, stored_size.size):
            return stored_size(array)
        return array
    if size == array.shape[:2]:
        return array
    return resized(array, *size)


def fitted_size(h: int, w: int, stored_size: StoredSize) -> tuple[int, int]:
    """Return height and width (pixels) that :func:`fitted` gives to an image."""
    if isinstance(stored_size, CentreCrop):
        if h * w >= stored_size.size**2:
            return (stored_size.size, stored_size.size)
        return (h, w)
    if stored_size is None or min(h, w) <= stored_size:
        return h, w
    if w <= h:
        return (round(h * stored_size / w), stored_size)
    return (stored_size, round(w * stored_size / h))


# ---------------------------------------------------------------------- for people
def composite(image: ndarray) -> ndarray:
    """Return a picture of an image for people: three channels as colours, two as red and green, one
    as grey.

    8-bit RGB and grey stay as they are. All else is stretched, each channel between its 1st and
    99th percentile.

    Args:
        image: [H, W, C], uint8, uint16 or floats.

    Returns:
        uint8 [H, W, 3]
    """
    channels = image[..., :3]  # [H, W, n]
    if image.dtype != np.uint8 or image.shape[2] not in (1, 3):
        low, high = np.percentile(channels, _SHOWN, axis=(0, 1))  # [n]
        factor = 255 / np.where(high > low, high - low, np.inf)  # a constant channel is black
        channels = np.clip(np.rint((channels - low) * factor), 0, 255).astype(np.uint8)  # [H, W, n]
    if channels.shape[2] == 2:
        return np.dstack([channels, np.zeros_like(channels[..., :1])])
    if channels.shape[2] == 3:
        return np.ascontiguousarray(channels)
    return np.repeat(channels, 3, axis=2)
