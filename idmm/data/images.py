"""Image files to pixels: pictures as RGB, other images as the channels that they have; 8 bits, or 16 of deeper ones."""

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from idmm.data.formats import of_image, opened
from idmm.data.raw import (
    PICTURE_CHANNELS,
    BadImage,
    NeedsMore,
    Opened,
    check_pixels,
    numbers,
    plain,
    quiet_readers,
    unreadable,
    upright,
)
from idmm.errors import reason

Range = tuple[float, float]
# What deeper values are scaled by: AUTO, FULL, the values that 0 and 1 stand for, or those of each channel
Scale = str | Range | tuple[Range, ...]
AUTO, FULL = "auto", "full"
TOP = 65535  # of what is kept of deeper images
_TRIMMED = 1e-4  # share of an image's pixels at either end that its extremes leave out: hot and dead ones
_SAMPLE = 1000  # values of an image that are counted
_ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")


class ScaleUnknown(NeedsMore):
    """An image is deeper than 8 bits and to be scaled by AUTO, but by which range is not known yet."""


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


class Depth(NamedTuple):
    """What an image of more than 8 bits is; by default it is none."""

    kind: str = ""
    """For people, e.g. 16-bit grey."""
    ends: tuple[Range, ...] = ()
    """Smallest and largest value but for the 1 in 10,000 most extreme pixels: of a picture's colours together, of bands
    each."""
    edges: tuple[tuple[float, ...], ...] = ()
    """Likewise: share of the pixels at the smallest value, the least value above it; share at the largest, the greatest
    value below it; how many values of a sample lie between."""


class Decoded(NamedTuple):
    """An image."""

    pixels: np.ndarray
    """uint8 or, of an image of more than 8 bits, uint16 [H, W, C], contiguous; 0 and the largest value are 0 and 1."""
    depth: Depth
    digest: bytes
    """Of its file, or of the pixels where it has none."""


def read(path: str | os.PathLike) -> bytes:
    """Returns a file's bytes; BadImage where it is gone, may not be read, or is empty."""
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


def decode(data: bytes | str | os.PathLike, max_pixels: int) -> np.ndarray:
    """Decodes a file's content, or the file at a path, as :func:`load` does a picture under FULL: [H, W, 3]."""
    return load(data, max_pixels).pixels


def load(
    item: bytes | str | os.PathLike | np.ndarray,
    max_pixels: int,
    scale: Scale = FULL,
    bands: Bands | None = None,
    measure: bool = True,
) -> Decoded:
    """Decodes an item of a split, its first frame if it is animated.

    As a picture it has three channels: transparent pixels come out white, EXIF orientation is applied, those of grey
    are equal. As bands it has those of the file, which is turned upright, too; of a palette those of its colours.

    Args:
        item: A file's content, its path, or pixels, uint8 [H, W, 3], which stay as they are.
        max_pixels: Images with more pixels than this are refused, by their header (pixels).
        scale: Of images deeper than 8 bits. FULL: all values of whole numbers of up to 16 bits; others (32 bits,
            signed, floats) by the range that holds the image's: [0, 1] (floats), [0, 255] (floats), [0, 65535], else
            from the smallest value to the largest. Ranges: values outside of them are clipped.
        bands: Which channels are wanted; None: a picture.
        measure: Whether the depth is wanted, too, which takes longer than the pixels; else it is that of 8 bits.

    Raises:
        BadImage: No such file, empty, not an image, truncated, too large, other channels than are wanted, as a picture
            several pages, as bands values that are not finite.
        ScaleUnknown: It is deeper than 8 bits, and ``scale`` is AUTO.
    """
    if isinstance(item, np.ndarray) and bands is None:
        return Decoded(item, Depth(), digest(item.tobytes()))
    content = item if isinstance(item, bytes | np.ndarray) else read(item)
    with _opened(content, max_pixels, bands) as image:
        pixels, depth = _pixels(image, scale, bands, measure)
    return Decoded(pixels, depth, digest(content if isinstance(content, bytes) else content.tobytes()))


def of_pillow(image: Image.Image, max_pixels: int, scale: Scale = FULL, bands: Bands | None = None) -> Decoded:
    """Makes of an open image what :func:`load` makes of its file; the image stays as it is.

    Of colours Pillow has 8 bits only. Raises BadImage as there, but for what only the file's bytes tell.
    """
    with quiet_readers():
        try:
            check_pixels([image.size], max_pixels)
            image.load()
            pixels, depth = _pixels(of_image(image), scale, bands)
        except (BadImage, MemoryError):
            raise
        except Exception as error:  # a file that turns out to be truncated, a mode that cannot be converted
            raise unreadable(error) from error
    return Decoded(pixels, depth, digest(pixels.tobytes()))


def of_array(array: np.ndarray, max_pixels: int, scale: Scale = FULL, bands: Bands | None = None) -> Decoded:
    """Makes of an array [H, W] or [H, W, C] what :func:`load` makes of a file of these numbers; BadImage as there."""
    array = array if array.ndim == 3 else array[:, :, None]
    check_pixels([array.shape[1::-1]], max_pixels)
    with _opened(array, max_pixels) as image:
        pixels, depth = _pixels(image, scale, bands)
    return Decoded(pixels, depth, digest(array.tobytes()))


def depth(item: str | bytes | np.ndarray, max_pixels: int, bands: Bands | None = None) -> Depth:
    """Returns the depth of an item of a split; of one of 8 bits only the header is read. BadImage: as :func:`load`."""
    with _opened(item, max_pixels, bands) as image:
        if not image.bits:
            return Depth()
        values, opacity = _values(image, bands)
        return _depth(image, values, bands)


class Header(NamedTuple):
    """What a file's header says."""

    channels: int
    bits: str
    """Of its numbers where they are no 8 bits, for people; else empty."""
    fault: str | None
    """Why it is no picture."""


def header(item: str | bytes | np.ndarray, max_pixels: int) -> Header:
    """Reads the header of an item of a split; BadImage: as :func:`load`."""
    with _opened(item, max_pixels, Bands()) as image:
        return Header(image.channels, image.bits, image.fault)


def frames(item: str | bytes | np.ndarray, max_pixels: int) -> int:
    """Returns how many pictures a file holds, of which the first is read; 1 where that cannot be known."""
    with contextlib.suppress(BadImage), _opened(item, max_pixels) as image:
        return 1 if image.fault else image.pages
    return 1


def probe(
    item: str | bytes | os.PathLike | np.ndarray, max_pixels: int, bands: Bands | None = None
) -> tuple[int, int, int]:
    """Returns an image's height and width by its header, before EXIF turns it (pixels), and the bytes that a pixel of
    it takes when it is decoded; else as :func:`load`."""
    with _opened(item, max_pixels, bands) as image:
        return image.height, image.width, (bands.used if bands else 3) * (2 if image.bits else 1)


@contextlib.contextmanager
def _opened(item: Any, max_pixels: int, bands: Bands | None = None) -> Iterator[Opened]:
    if isinstance(item, np.ndarray):
        (bits, full), (h, w, channels) = numbers(item.dtype), item.shape
        eight = not bits and channels <= 4  # which Pillow has
        picture = (lambda: Image.fromarray(plain(item.squeeze(2) if channels == 1 else item))) if eight else None
        yield Opened(h, w, channels, bits, lambda: plain(item), picture, full)
        return
    wanted = {} if bands is None else {"wanted": [] if bands.count is None else [bands.count]}
    with opened(item if isinstance(item, bytes) else read(item), max_pixels, **wanted) as image:
        yield image


# ---------------------------------------------------------------------- channels
def _pixels(image: Opened, scale: Scale, bands: Bands | None, measure: bool = True) -> tuple[np.ndarray, Depth]:
    """Reads an image, uint8 or uint16 [H, W, C]."""
    if scale == AUTO and image.bits:
        raise ScaleUnknown
    if bands is None and image.fault is None and image.picture is not None:
        return np.ascontiguousarray(upright(_rgb(image.picture()), image.orientation())), Depth()
    values, opacity = _values(image, bands)
    found = Depth()
    if image.bits:
        found = _depth(image, values, bands) if measure else found
        values = scaled(values, image.full or _own_range(values) if scale == FULL else scale)
    if opacity is not None:  # on white
        top = np.iinfo(values.dtype).max
        values = np.rint(top - (top - values.astype(np.float64)) * opacity).astype(values.dtype)
    if bands is None and values.shape[2] == 1:
        values = np.repeat(values, 3, axis=2)
    return np.ascontiguousarray(values), found


def _values(image: Opened, bands: Bands | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Reads the channels that are used, [H, W, C] in the file's own numbers, and of a picture with transparent pixels
    the opacity, [H, W, 1] in [0, 1]; upright."""
    if bands is None:
        if image.fault:
            raise BadImage(image.fault, image.pages)
        return _colours(image, upright(image.values(), image.orientation()))
    what = f"{image.channels} channel{'s' if image.channels > 1 else ''}{f' ({image.shape})' if image.shape else ''}"
    if bands.count not in (None, image.channels):
        raise BadImage(f"{what}; wanted {bands.count}")
    chosen = bands.chosen or range(image.channels)
    if max(chosen) >= image.channels:
        raise BadImage(f"{what}; data.bands asks for channel {max(chosen)}, counted from 0")
    values = upright(image.values(), image.orientation())[:, :, list(chosen)]
    for channel, plane in zip(chosen, np.moveaxis(values, 2, 0), strict=True):
        if values.dtype.kind == "f" and (odd := int(plane.size - np.isfinite(plane).sum())):
            share = f"{odd} of {plane.size}"
            raise BadImage(f"channel {channel} has values that are no finite numbers (NaN or infinite), {share}")
    return values, None


def _colours(image: Opened, values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Parts a deep picture [H, W, 1 to 4] into grey or RGB and its opacity."""
    top = image.full[1] if image.full else 1.0 if values.dtype.kind == "f" else np.iinfo(values.dtype).max
    if image.cmyk:
        inks = values.astype(np.float64) / top
        return (1 - inks[:, :, :3]) * (1 - inks[:, :, 3:]) * top, None
    if values.shape[2] in (2, 4):
        return values[:, :, :-1], np.clip(values[:, :, -1:] / top, 0, 1)
    if image.transparent is not None:
        return values, (values != np.array(image.transparent)).any(axis=2, keepdims=True).astype(np.float64)
    return values, None


def _depth(image: Opened, values: np.ndarray, bands: Bands | None) -> Depth:
    if bands is not None:
        ends, edges = zip(*map(_ends, np.moveaxis(values, 2, 0)), strict=True)
        return Depth(f"{image.bits} with {image.channels} channel{'s' if image.channels > 1 else ''}", ends, edges)
    kind = f"{image.bits} {'grey' if values.shape[2] == 1 else 'colour'}"
    if not np.isfinite(values).all():
        kind += " with NaN or infinite values, which become the lowest (of +inf the highest)"
    ends, edges = _ends(values)
    return Depth(kind, (ends,), (edges,))


def _ends(values: np.ndarray) -> tuple[Range, tuple[float, ...]]:
    """Returns ``ends`` and ``edges`` of a :class:`Depth`."""
    values = values[np.isfinite(values)]
    low, high = _extremes(values)
    inner = values[(values > low) & (values < high)]
    above, below = _extremes(inner) if len(inner) else (high, low) if low < high else (np.inf, -np.inf)
    levels = len(np.unique(inner[:: max(1, len(inner) // _SAMPLE)]))
    size = max(1, len(values))
    return (low, high), ((values <= low).sum() / size, above, (values >= high).sum() / size, below, levels)


def _extremes(values: np.ndarray) -> Range:
    """Returns the smallest and the largest of finite values [M], less :data:`_TRIMMED` of them at either end."""
    if not len(values):
        return 0.0, 0.0
    cut = int(len(values) * _TRIMMED)
    ends = (cut, len(values) - 1 - cut)
    low, high = np.partition(values, ends)[list(ends)] if cut else (values.min(), values.max())
    return float(low), float(high)


def scaled(values: np.ndarray, scale: Range | tuple[Range, ...]) -> np.ndarray:
    """Scales values [H, W, C] by one range or one for each channel, uint16 [H, W, C]; those outside are clipped."""
    low, high = np.array(scale, dtype=np.float64).T  # [] or [C]
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        values = np.where(np.isposinf(values), high, np.where(np.isfinite(values), values, low))
    factor = np.divide(TOP, high - low, out=np.zeros_like(high), where=high > low)
    return np.clip(np.rint((values - low) * factor), 0, TOP).astype(np.uint16)


def _own_range(values: np.ndarray) -> Range:
    """Returns the range of FULL for values that have no fixed one."""
    values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    ceilings = (1.0, 255.0, 65535.0) if values.dtype.kind == "f" else (65535.0,)
    fits = [c for c in ceilings if low >= 0 and high <= c]
    return (0.0, fits[0]) if fits else (low, high)


def _rgb(image: Image.Image) -> np.ndarray:
    """Returns a picture of 8 bits as uint8 [H, W, 3]."""
    palette_alpha = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    if image.mode in _ALPHA or palette_alpha or "transparency" in image.info:
        image = _on_white(image)
    return np.array(image.convert("RGB"))


def _on_white(image: Image.Image) -> Image.Image:
    colour = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(colour, tuple) and max(colour) > 255:  # 16 bits, though the pixels have 8
        image = image.copy()  # it may be the caller's
        image.info["transparency"] = tuple(c >> 8 for c in colour)
    if image.mode == "La":
        image = image.convert("LA")  # Pillow has no shorter way
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


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
