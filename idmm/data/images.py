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
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from idmm.data.formats import PICTURE_CHANNELS, BadImage, Header, Pixels, decode, read_header
from idmm.errors import reason
from idmm.files import AnyPath
from idmm.text import counted

if TYPE_CHECKING:
    from torch import Tensor

RATIO = (3 / 4, 4 / 3)  # aspect ratios of a random crop, as torchvision's RandomResizedCrop
# share of an image's pixels at either end that its smallest and largest value leave out
_TRIMMED = 1e-4
_SHOWN = (1, 99)  # percentiles of a channel that are black and full colour in pictures for people
AUTO = "auto"
# AUTO, smallest and largest value, both for each channel, or None: the full range of 16 bits
ValueRange = str | Sequence[float] | Sequence[Sequence[float]] | None
WHITE = 65535  # stands for 1 in stored images of more than 8 bits
PerChannel = Sequence[float]  # a value of each channel, e.g. their means
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's and torchvision's grey


class RangeUnknown(Exception):
    """An image has more than 8 bits, and their value range is not known yet."""


@dataclass(frozen=True)
class Bands:
    """Channels that are used as they are."""

    count: int | None = None  # that a file must have. None: any number that includes those chosen
    chosen: tuple[int, ...] | None = None  # those that are used, in that order, from 0. None: all

    @property
    def used(self) -> int:
        """Number of channels that are used. 0: it depends on the file."""
        if self.chosen:
            return len(self.chosen)
        return self.count or 0


def bands_of(
    in_chans: int | None, bands: Sequence[int] | None, count: int | None = None
) -> Bands | None:
    """Return the bands of ``data.in_chans`` and ``data.bands`` for files of ``count`` channels.

    None: pictures.
    """
    if bands is not None:
        return Bands(count, tuple(bands))
    if in_chans in (None, *PICTURE_CHANNELS):
        return None
    return Bands(in_chans)


class Decoded(NamedTuple):
    """An image."""

    # uint8 or, of more than 8 bits, uint16 [H, W, C], contiguous. The largest value stands for 1
    pixels: Pixels
    digest: bytes  # BLAKE2b of its file, or of the pixels if it has none


def read(path: AnyPath) -> bytes:
    """Return a file's bytes.

    Raises:
        BadImage: It is gone, no regular file, may not be read, or is empty.
    """
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
Item = bytes | AnyPath | Pixels | Image.Image


def read_image(
    item: Item,
    value_range: ValueRange = None,
    bands: Bands | None = None,
) -> Decoded:
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
    if isinstance(item, str | os.PathLike):
        item = read(item)
    values, opacity = _values(item, bands)
    if values.dtype != np.uint8:
        values = _in_16_bits(values, value_range)
    if opacity is not None and (opacity > 0).any():
        values = _on_white(values, opacity)
    if bands is None and values.shape[2] == 1:
        values = np.repeat(values, 3, axis=2)
    content = item if isinstance(item, bytes) else item.tobytes()
    return Decoded(np.ascontiguousarray(values), digest(content))


def _in_16_bits(values: Pixels, value_range: ValueRange) -> Pixels:
    """Return the numbers of a file [H, W, C] by their range, whose ends become 0 and WHITE."""
    if value_range == AUTO:
        raise RangeUnknown
    if not value_range:
        if values.dtype != np.uint16:
            raise BadImage(
                f"has values of type {values.dtype}, which need a range, expected 8 or 16 bits"
            )
        value_range = (0, WHITE)
    low, high = np.array(value_range, dtype=np.float64).T  # [] or [C]
    factor = np.divide(WHITE, high - low, out=np.zeros_like(high), where=high > low)
    shifted = values.astype(np.float64) - low
    scaled: Pixels = np.rint(shifted * factor)
    return np.clip(scaled, 0, WHITE).astype(np.uint16)


def _on_white(values: Pixels, opacity: Pixels) -> Pixels:
    """Return an image [H, W, C], uint8 or uint16, blended with white.

    ``opacity`` is in the file's numbers, [H, W, 1].
    """
    opaque = 1.0
    if opacity.dtype.kind != "f":
        opaque = np.iinfo(opacity.dtype).max
    if (opacity >= opaque).all():
        return values
    if values.dtype == np.uint8:  # 65152: 255 * 255 + 127, which rounds
        darkness = (255 - values).astype(np.uint16)
        blended = (65152 - darkness * opacity) // 255
        return blended.astype(np.uint8)
    share = np.clip(opacity / opaque, 0, 1)
    deep_darkness = WHITE - values.astype(np.float64)
    return np.rint(WHITE - deep_darkness * share).astype(np.uint16)


def min_max_of(path: AnyPath, bands: Bands | None) -> list[list[float]]:
    """Return smallest and largest value of an image of more than 8 bits. Of 8 bits: [].

    Bands have one pair per channel. The most extreme pixels do not count.
    """
    values, _ = _values(read(path), bands)
    if values.dtype == np.uint8:
        return []
    channels = 1 if bands is None else values.shape[2]
    rows = values.reshape(-1, channels)
    cut = int(len(rows) * _TRIMMED)
    ends = [cut, len(rows) - 1 - cut]
    extremes = np.partition(rows, ends, axis=0)[ends]  # [2, C]
    pairs: list[list[float]] = extremes.T.astype(np.float64).tolist()
    return pairs


def _values(
    item: bytes | Pixels | Image.Image, bands: Bands | None
) -> tuple[Pixels, Pixels | None]:
    """Return the used channels [H, W, C] and the opacity of a picture [H, W, 1].

    Both are in the numbers of the file.
    """
    values = decode(item, picture=bands is None)
    opacity = None
    channels = values.shape[2]
    if bands is not None:
        chosen = list(bands.chosen or range(channels))
        if bands.count not in (None, channels):
            raise BadImage(f"has {counted(channels, 'channel')}, expected {bands.count}")
        if max(chosen) >= channels:
            raise BadImage(
                f"has {counted(channels, 'channel')}, "
                f"and data.bands has {max(chosen)}, counted from 0"
            )
        values = values[:, :, chosen]
    elif channels in (2, 4):
        opacity = values[:, :, -1:]
        values = values[:, :, :-1]
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise BadImage("has values that are not finite (NaN or infinite)")
    return values, opacity


def image_size(item: AnyPath | Pixels) -> tuple[int, int]:
    """Return height and width of an image in upright position (pixels).

    An array is [H, W, C]. BadImage as :func:`read_image`.
    """
    if isinstance(item, np.ndarray):
        return item.shape[:2]
    return image_header(item).size


def image_header(path: AnyPath) -> Header:
    """Return size and orientation of a file's image. BadImage as :func:`read_image`."""
    return read_header(read(path))


# ---------------------------------------------------------------------- values
def unit(image: "Tensor") -> "Tensor":
    """Return an image as float32 in [0, 1], from a tensor uint8, uint16 or such floats."""
    if image.is_floating_point():
        return image
    white = WHITE if image.element_size() == 2 else 255
    return image.float().div_(white)


# ---------------------------------------------------------------------- sizes
def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resize an image, bicubic with antialiasing.

    Args:
        pixels: uint8 or uint16 [H, W, C].

    Returns:
        The same type, [height, width, C].
    """
    bicubic = Image.Resampling.BICUBIC
    if pixels.dtype == np.uint8 and pixels.shape[2] == 3:
        return np.array(Image.fromarray(pixels).resize((width, height), bicubic))
    is_deep = pixels.dtype != np.uint8
    values = pixels.astype(np.float32) if is_deep else pixels
    planes = []
    for channel in range(pixels.shape[2]):
        plane = Image.fromarray(values[:, :, channel])
        planes.append(np.asarray(plane.resize((width, height), bicubic)))
    made = np.stack(planes, axis=2)
    if is_deep:
        made = np.clip(np.rint(made), 0, WHITE)
        made = made.astype(np.uint16)
    return made


class Cut(NamedTuple):
    """How a centre crop is made: the image is resized, then a part is cut out."""

    sides: tuple[int, int]  # height and width that it is resized to (pixels)
    rows: slice
    columns: slice


class CentreCrop(NamedTuple):
    """The image for evaluation: its short side becomes size / crop_pct, its centre is cut out.

    With mode border the long side becomes that, and a border of ``fill`` makes the result square.
    With squash each side becomes that.
    """

    size: int  # side of the result (pixels)
    crop_pct: float  # share of the resized side that the result covers, in (0, 1]
    mode: str = "center"  # timm's crop_mode
    fill: tuple[float, ...] = ()  # of a border, per channel, in [0, 1]

    @classmethod
    def of(cls, size: int, crop_pct: float, mode: str, mean: PerChannel) -> "CentreCrop":
        """Return it with a border, if the mode has one, of the images' mean."""
        return cls(size, crop_pct, mode, tuple(mean) if mode == "border" else ())

    def __call__(self, array: Pixels) -> Pixels:
        """Return the centre crop of an image, uint8 or uint16 [H, W, C] -> [size, size, C].

        For a picture of 8 bits it equals timm's ``create_transform(size, crop_pct=crop_pct,
        crop_mode=mode, mean=fill, interpolation="bicubic")`` to the last bit, before the tensor is
        made.
        """
        cut = self.cut(*array.shape[:2])
        part = resized(array, *cut.sides)[cut.rows, cut.columns]
        if part.shape[:2] == (self.size, self.size):
            return np.ascontiguousarray(part)
        result = np.empty((self.size, self.size, array.shape[2]), array.dtype)
        result[:] = np.rint(np.multiply(self.fill, np.iinfo(array.dtype).max))
        top = (self.size - part.shape[0]) // 2
        left = (self.size - part.shape[1]) // 2
        result[top : top + part.shape[0], left : left + part.shape[1]] = part
        return result

    def cut(self, height: int, width: int) -> Cut:
        """Return how an image of these sides (pixels) is resized and cut.

        As in timm, sides are rounded down, and margins of half a pixel to the even number.
        """
        side = math.floor(self.size / self.crop_pct)
        if self.mode == "squash":
            height = side
            width = side
        elif self.mode == "border":
            ratio = max(height, width) / side
            height = max(1, round(height / ratio))
            width = max(1, round(width / ratio))
        else:
            shortest = min(height, width)
            height = int(side * height / shortest)
            width = int(side * width / shortest)
        return Cut(
            sides=(height, width),
            rows=_middle(height, self.size),
            columns=_middle(width, self.size),
        )


def _middle(side: int, size: int) -> slice:
    start = max(0, round((side - size) / 2))
    return slice(start, start + size)


# What is stored of an image: a short side up to so many pixels, its centre crop, or with None all
# of it
StoredSize = int | CentreCrop | None


def fitted(array: Pixels, stored_size: StoredSize) -> Pixels:
    """Return an image, uint8 or uint16 [H, W, C], at its stored size. It is never enlarged.

    A longer short side is shrunk, bicubic with antialiasing, the aspect kept to the nearest pixel.
    An image of fewer pixels than its centre crop stays as it is.
    """
    height, width = array.shape[:2]
    sides = fitted_size(height, width, stored_size)
    if isinstance(stored_size, CentreCrop) and sides == (stored_size.size, stored_size.size):
        return stored_size(array)
    if sides == (height, width):
        return array
    return resized(array, *sides)


def fitted_size(
    height: int,
    width: int,
    stored_size: StoredSize,
) -> tuple[int, int]:
    """Return height and width (pixels) that :func:`fitted` gives to an image."""
    if isinstance(stored_size, CentreCrop):
        if height * width >= stored_size.size**2:
            return (stored_size.size, stored_size.size)
        return (height, width)
    shortest = min(height, width)
    if stored_size is None or shortest <= stored_size:
        return (height, width)
    return (round(height * stored_size / shortest), round(width * stored_size / shortest))


# ---------------------------------------------------------------------- for people
def composite(image: Pixels) -> NDArray[np.uint8]:
    """Return a picture of an image for people.

    Three channels are its colours, two are red and green, and one is grey. 8-bit RGB and grey stay
    as they are. All else is stretched, each channel between its 1st and 99th percentile.

    Args:
        image: [H, W, C], uint8, uint16 or floats.

    Returns:
        uint8 [H, W, 3]
    """
    channels = image[..., :3]  # [H, W, n]
    if image.dtype != np.uint8 or image.shape[2] not in (1, 3):
        low, high = np.percentile(channels, _SHOWN, axis=(0, 1))  # [n]
        factor = 255 / np.where(high > low, high - low, np.inf)  # a constant channel is black
        stretched = np.rint((channels - low) * factor)  # [H, W, n]
        channels = np.clip(stretched, 0, 255).astype(np.uint8)
    if channels.shape[2] == 2:
        blue = np.zeros_like(channels[..., :1])
        return np.dstack([channels, blue])
    if channels.shape[2] == 3:
        return np.ascontiguousarray(channels)
    return np.repeat(channels, 3, axis=2)
