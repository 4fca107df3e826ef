"""Real-life image files to RGB pixels: any mode Pillow reads, upright, opaque, 8 bits a channel."""

import contextlib
import functools
import hashlib
import io
import math
import os
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from idmm.data import tiff
from idmm.errors import reason

Scale = str | tuple[float, float]  # of grey deeper than 8 bits: AUTO, FULL, or the values that 0 and 255 stand for
AUTO, FULL = "auto", "full"

# No EPS, PDF or WMF (they run other programs), no TGA or PCX (they take nearly any bytes for an image).
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "DIB", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000", "ICO", "AVIF", "QOI")
SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .bmp .dib .gif .tif .tiff .webp .ppm .pgm .pbm .pnm .pfm"
    " .jp2 .j2k .jpx .jpf .ico .avif .qoi".split()
)
_T = Image.Transpose
_UPRIGHT = {  # by EXIF's orientation; ImageOps.exif_transpose would fail on EXIF blocks that it cannot write anew
    2: _T.FLIP_LEFT_RIGHT, 3: _T.ROTATE_180, 4: _T.FLIP_TOP_BOTTOM,
    5: _T.TRANSPOSE, 6: _T.ROTATE_270, 7: _T.TRANSVERSE, 8: _T.ROTATE_90,
}  # fmt: skip
_EXIF_ORIENTATION = 0x0112
_TRIMMED = 1e-4  # share of an image's pixels at either end that its extremes leave out: hot and dead ones
_ICO_PNG = re.compile(rb"\x89PNG\r\n\x1a\n....IHDR(.{8})", re.DOTALL)


class BadImage(ValueError):
    """A file that cannot be used as an image; ``reason`` says why in a few words, without the file's name.

    ``pages`` counts the pictures in it where these are too many.
    """

    def __init__(self, reason: str, pages: int = 1):
        super().__init__(reason)
        self.reason, self.pages = reason, pages


class ScaleUnknown(Exception):
    """Grey deeper than 8 bits is to be scaled by AUTO, but by which range is not known yet."""


class Depth(NamedTuple):
    """What an image of more than 8 bits is; by default it is none."""

    kind: str = ""
    """For people, e.g. 16-bit grey."""
    low: float = np.nan
    """Smallest value of grey but for the 1 in 10,000 most extreme pixels; NaN for colours, which Pillow cuts to 8."""
    high: float = np.nan
    """Largest, likewise."""


class Decoded(NamedTuple):
    """An image."""

    pixels: np.ndarray
    """uint8 [H, W, 3], contiguous."""
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
    """Decodes a file's content, or the file at a path, as :func:`load` does under FULL: uint8 [H, W, 3]."""
    return load(data, max_pixels).pixels


def load(item: bytes | str | os.PathLike | np.ndarray, max_pixels: int, scale: Scale = FULL) -> Decoded:
    """Decodes an item of a split, its first frame if it is animated.

    Transparent pixels come out white, EXIF orientation is applied, grey images have three equal channels.

    Args:
        item: A file's content, its path, or pixels, which stay as they are.
        max_pixels: Images with more pixels than this are refused, by their header (pixels).
        scale: Of grey deeper than 8 bits. FULL: 16-bit grey is scaled by 255/65535; grey of no fixed range (32-bit
            integers, floats) from the range that holds its values: [0, 1] (floats), [0, 255] (floats), [0, 65535],
            else from its smallest value to its largest. A pair: that range, values outside of it are clipped.

    Raises:
        BadImage: No such file, empty, not an image, truncated, too large, or several pages.
        ScaleUnknown: Grey deeper than 8 bits, and ``scale`` is AUTO.
    """
    if isinstance(item, np.ndarray):
        return Decoded(item, Depth(), digest(item.tobytes()))
    content = item if isinstance(item, bytes) else read(item)
    with _opened(content, max_pixels) as image:
        if scale == AUTO and _deep_grey(image):
            raise ScaleUnknown
        depth = _depth_of(image)
        image.load()
        return Decoded(_rgb(_upright(image), scale), depth, digest(content))


def of_pillow(image: Image.Image, max_pixels: int, scale: Scale = FULL) -> Decoded:
    """Makes of an open image what :func:`load` makes of its file; the image stays as it is.

    Raises:
        BadImage: As there, but for what only the file's bytes tell.
    """
    with quiet_pillow():
        try:
            _check_pixels([image.size], max_pixels)
            deep = _depth_of(image)
            image.load()
            pixels = _rgb(_upright(image), scale)
        except (BadImage, MemoryError):
            raise
        except Exception as error:  # a file that turns out to be truncated, a mode that cannot be converted
            raise _unreadable(error) from error
    return Decoded(pixels, deep, digest(pixels.tobytes()))


def depth(item: str | bytes | np.ndarray, max_pixels: int) -> Depth:
    """Returns the depth of an item of a split; of one of 8 bits only the header is read. BadImage: as :func:`load`."""
    if isinstance(item, np.ndarray):
        return Depth()
    with _opened(item, max_pixels) as image:
        return _depth_of(image)


def frames(item: str | bytes | np.ndarray, max_pixels: int) -> int:
    """Returns how many pictures a file holds, of which the first is read; 1 where that cannot be known."""
    if not isinstance(item, np.ndarray):
        with contextlib.suppress(BadImage), _opened(item, max_pixels) as image:
            if image.format != "TIFF":  # whose others are previews
                return getattr(image, "n_frames", None) or 1
    return 1


def probe(data: bytes | str | os.PathLike, max_pixels: int) -> tuple[int, int]:
    """Returns an image's height and width from its header, before EXIF turns it (pixels); else as :func:`decode`."""
    with _opened(data, max_pixels) as image:
        return image.height, image.width


@contextlib.contextmanager
def _opened(data: bytes | str | os.PathLike, max_pixels: int) -> Iterator[Image.Image]:
    """Yields an image whose header was read; whatever goes wrong with it, inside the block too, is a BadImage."""
    data = data if isinstance(data, bytes) else read(data)
    if not data:
        raise BadImage("empty file")
    with quiet_pillow():
        try:
            if data.startswith(b"\0\0\1\0"):  # Pillow decodes an icon as it opens it
                _check_pixels([struct.unpack(">II", match[1]) for match in _ICO_PNG.finditer(data)], max_pixels)
            with Image.open(io.BytesIO(data), formats=_formats()) as image:
                if image.format == "TIFF" and (first := _first_page(data, image.mode)):
                    image.seek(first)
                _check_pixels([image.size], max_pixels)
                yield image
        except (BadImage, MemoryError, ScaleUnknown):  # out of memory is the machine's fault, not the file's
            raise
        except UnidentifiedImageError:
            _first_page(data, None)
            raise BadImage("not an image") from None
        except Exception as error:  # Pillow raises a dozen types on broken files
            raise _unreadable(error) from error


def _unreadable(error: Exception) -> BadImage:
    text = " ".join(str(error).split())[:100] or type(error).__name__
    return BadImage(f"unreadable or truncated ({text})")


class CentreCrop(NamedTuple):
    """How an image is evaluated: its short side is resized to size / crop_pct, then the centre is cut out."""

    size: int
    """Side of the result (pixels)."""
    crop_pct: float
    """Share of the resized short side that the result covers, in (0, 1]."""

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """Returns the centre crop of an image, uint8 [H, W, 3] -> [size, size, 3].

        It is, to the last bit, what timm's ``create_transform(size, crop_pct=crop_pct, interpolation="bicubic")`` makes
        a tensor of: sides are rounded down, and margins of half a pixel to the even number.
        """
        (h, w), size, short = array.shape[:2], self.size, math.floor(self.size / self.crop_pct)
        h, w = (short, int(short * w / h)) if h <= w else (int(short * h / w), short)
        top, left = round((h - size) / 2), round((w - size) / 2)
        image = Image.fromarray(array).resize((w, h), Image.Resampling.BICUBIC)
        return np.array(image.crop((left, top, left + size, top + size)))


Bound = int | CentreCrop | None  # what is kept of an image: a short side up to so many pixels, its centre crop, or all


def fitted(array: np.ndarray, bound: Bound) -> np.ndarray:
    """Returns what is kept of an image, uint8 [H, W, 3]; it is never enlarged.

    A longer short side is shrunk to the bound, bicubic with antialiasing, the aspect kept to the nearest pixel; an
    image of fewer pixels than its centre crop stays as it is.
    """
    size = fitted_size(*array.shape[:2], bound)
    if isinstance(bound, CentreCrop):
        return bound(array) if size == (bound.size, bound.size) else array
    if size == array.shape[:2]:
        return array
    return np.array(Image.fromarray(array).resize(size[::-1], Image.Resampling.BICUBIC))


def fitted_size(h: int, w: int, bound: Bound) -> tuple[int, int]:
    """Returns what :func:`fitted` makes of an image's height and width (pixels)."""
    if isinstance(bound, CentreCrop):
        return (bound.size, bound.size) if h * w >= bound.size**2 else (h, w)
    if bound is None or min(h, w) <= bound:
        return h, w
    return (round(h * bound / w), bound) if w <= h else (bound, round(w * bound / h))


_lock, _depth, _undo = threading.Lock(), 0, contextlib.ExitStack()


@contextlib.contextmanager
def quiet_pillow():
    """Inside, Pillow neither warns nor sets a limit of its own to pixels; outside, its settings are as they were.

    Counted, so that threads may decode side by side: the first in changes the settings, the last out restores them.
    """
    global _depth
    with _lock:
        if not _depth:
            _undo.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"PIL\.")  # broken EXIF and the like
            _undo.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            Image.MAX_IMAGE_PIXELS = None
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                _undo.close()


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # Image.open fails on a format it was built without


def _check_pixels(sizes: list[tuple[int, int]], max_pixels: int) -> None:
    for w, h in sizes:
        if w * h > max_pixels:
            raise BadImage(f"{w} x {h} = {w * h} pixels, more than data.max_pixels {max_pixels}")


def _first_page(data: bytes, mode: str | None) -> int:
    """Returns the number of a TIFF's picture, previews before it counted; BadImage: it has more pages, or odd samples.

    ``mode`` is Pillow's, None where Pillow cannot tell.
    """
    count, first, tags = tiff.pages(data) or (0, 0, None)
    if tags and (why := tiff.fault(count, tags, mode)):
        raise BadImage(why, count)
    return first


def _deep_grey(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or image.mode in ("I", "F")


def _depth_of(image: Image.Image) -> Depth:
    """Reads the pixels of deep grey only, and the header before them, as Pillow forgets how they were stored."""
    kind = _kind(image)
    return Depth(kind, *_extremes(np.asarray(image))) if _deep_grey(image) else Depth(kind)


def _kind(image: Image.Image) -> str:
    """Says what an image of more than 8 bits is, by its header; empty for the others."""
    bits = max(getattr(image, "tag_v2", {}).get(tiff.BITS) or (8,))  # of a TIFF
    tile = getattr(image, "tile", None)  # of a file
    raw = tile[0].args if tile else ""
    raw = str(raw[0] if isinstance(raw, tuple) and raw else raw)
    if _deep_grey(image):
        whole = bits if bits > 8 else 32 if image.mode == "I" and image.format not in ("PNG", "PPM") else 16
        signed = "signed " if image.mode == "I" and bits == 16 else ""
        return "float grey" if image.mode == "F" else f"{signed}{whole}-bit grey"
    return f"{max(bits, 16)}-bit colour" if bits > 8 or ";16" in raw else ""


def _extremes(values: np.ndarray) -> tuple[float, float]:
    """Returns the smallest and the largest of finite values [H, W], less :data:`_TRIMMED` of them at either end."""
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 0.0
    cut = int(len(values) * _TRIMMED)
    ends = (cut, len(values) - 1 - cut)
    low, high = np.partition(values, ends)[list(ends)] if cut else (values.min(), values.max())
    return float(low), float(high)


def _upright(image: Image.Image) -> Image.Image:
    try:
        method = _UPRIGHT.get(image.getexif().get(_EXIF_ORIENTATION))
    except Exception:  # a broken EXIF block does not spoil the pixels
        return image
    return image if method is None else image.transpose(method)


def _rgb(image: Image.Image, scale: Scale) -> np.ndarray:
    """Returns any loaded image as uint8 [H, W, 3]."""
    if _deep_grey(image):
        grey = _grey8(image, scale)  # [H, W]
        return np.repeat(grey[:, :, None], 3, axis=2)  # [H, W, 3]
    palette_alpha = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or palette_alpha or "transparency" in image.info:
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


def _grey8(image: Image.Image, scale: Scale) -> np.ndarray:
    """Scales deep grey to 8 bits: uint8 [H, W]."""
    values = np.asarray(image).astype(np.float64)  # [H, W]
    if scale == FULL:
        values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
        low, high = _full_range(image, values)
    else:
        low, high = scale
        values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    factor = 255.0 / (high - low) if high > low else 0.0
    return np.clip(np.rint((values - low) * factor), 0, 255).astype(np.uint8)


def _full_range(image: Image.Image, values: np.ndarray) -> tuple[float, float]:
    if image.mode.startswith("I;16"):
        bits = getattr(image, "tag_v2", {}).get(tiff.BITS, (16,))[0]
        return 0.0, 4095.0 if bits == 12 else 65535.0
    ceilings = (1.0, 255.0, 65535.0) if image.mode == "F" else (65535.0,)
    fits = [c for c in ceilings if values.min() >= 0 and values.max() <= c]
    return (0.0, fits[0]) if fits else (values.min(), values.max())


def unit(image):
    """Returns an image, a uint8 or uint16 tensor of any shape, as float32 in [0, 1]."""
    return image.float().div_((1 << 8 * image.element_size()) - 1)
