"""Image files: what their headers hold, and their channels in the file's own numbers.

Pictures of 8 bits are Pillow's. TIFF is read by tifffile, ``.npy`` and ``.npz`` by numpy (never a pickle), 16-bit PNG
and JPEG 2000 by imagecodecs, 16-bit PPM by OpenCV.
"""

import contextlib
import functools
import io
import logging
import math
import re
import struct
import threading
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from PIL import Image, UnidentifiedImageError

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .bmp .dib .gif .tif .tiff .webp .ppm .pgm .pbm .pnm .pfm"
    " .jp2 .j2k .jpx .jpf .ico .avif .qoi .npy .npz".split()
)
# No EPS, PDF or WMF (they run other programs), no TGA or PCX (they take nearly any bytes for an image).
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "DIB", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000", "ICO", "AVIF", "QOI")
PICTURE_CHANNELS = (1, 3)  # of an array
_ORIENTATION = 0x0112  # EXIF's tag, which TIFF has, too
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
_NUMPY, _ZIP = b"\x93NUMPY", b"PK\3\4"
_ICO_PNG = re.compile(rb"\x89PNG\r\n\x1a\n....IHDR(.{8})", re.DOTALL)
_J2K = re.compile(rb"\xff\x4f\xff\x51.{38}(.)", re.DOTALL)  # the bits of the first component, less one
_PLAIN = {"1": "L", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB"}
_ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")
_COLOURS = ("MINISBLACK", "MINISWHITE", "RGB", "YCBCR")  # of TIFF, that tifffile reads as grey or RGB

Range = tuple[float, float]


class BadImage(ValueError):
    """A file that cannot be used as an image; ``reason`` is a short phrase without the file's name."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class RangeUnknown(Exception):
    """An image has more than 8 bits, and the range of values that 0 and 1 stand for is not known yet."""


@dataclass(frozen=True)
class Opened:
    """An image file whose header was read."""

    height: int
    """As stored, before EXIF turns it (pixels)."""
    width: int
    channels: int
    values: Callable[[], np.ndarray]
    """Reads the channels, [H, W, C] as stored, in the file's own numbers; 8 bits and bool are uint8."""
    deep: bool = False
    """More than 8 bits, signed numbers or floats."""
    full: Range | None = None
    """All values that deep numbers can have; None: not known (signed, floats, 32 bits)."""
    picture: Callable[[], np.ndarray] | None = None
    """Reads a picture of 8 bits by Pillow: RGB, uint8 [H, W, 3], upright, transparent pixels white; None: no such."""
    fault: str | None = None
    """Why it is no picture."""
    orientation: Callable[[], int] = lambda: 1
    """Returns EXIF's for ``values``, after these were read: in a PNG it stands behind them."""
    transparent: Any = None
    """The value, or the colour, that stands for a transparent pixel in ``values``; None: there is none."""


@contextlib.contextmanager
def opened(content: bytes, max_pixels: int, expected: Collection[int] = PICTURE_CHANNELS) -> Iterator[Opened]:
    """Yields an image whose header was read; any fault of the file, inside the block too, is a BadImage.

    Args:
        content: Of the file.
        max_pixels: Images with more pixels than this are refused, by their header (pixels).
        expected: Numbers of channels that tell an array's axes apart: [H, W, C] if the last axis is one of them, else
            [C, H, W] if the first is. Empty: any, the shorter one of both axes is that of channels.
    """
    if not content:
        raise BadImage("empty file")
    with quiet_readers(), contextlib.ExitStack() as stack:
        try:
            if content.startswith((_NUMPY, _ZIP)):
                image = _array(stack, content, expected)
            else:
                image = content.startswith(_TIFF) and _tiff(stack, content, max_pixels)
                image = image or _by_pillow(_pillow_image(stack, content, max_pixels), content)
            check_pixels(image.width, image.height, max_pixels)
            yield image
        except (BadImage, MemoryError, RangeUnknown):  # out of memory is the machine's fault, not the file's
            raise
        except UnidentifiedImageError:
            raise BadImage("not an image") from None
        except Exception as error:  # the readers raise a dozen types on broken files
            raise unreadable(error) from error


def unreadable(error: Exception) -> BadImage:
    """Returns what is said of a file on which a reader failed."""
    text = " ".join(str(error).split())[:100] or type(error).__name__
    return BadImage(f"unreadable or truncated ({text})")


def check_pixels(width: int, height: int, max_pixels: float) -> None:
    """Raises BadImage if an image has too many pixels."""
    if width * height > max_pixels:
        raise BadImage(f"{width} x {height} = {width * height} pixels, more than data.max_pixels {max_pixels}")


def as_bands(channels: int) -> str:
    """Returns the flag by which files of so many channels are used as they are; 1 and 3 alone would mean pictures."""
    if channels in PICTURE_CHANNELS:
        return f"--data.bands '{list(range(channels))}'"
    return f"--data.in_chans {channels}"


def channels_first(shape: Sequence[int], expected: Collection[int]) -> bool:
    """Whether an array of three axes is [C, H, W], not [H, W, C]: by which of the two, the last before the first, has
    an expected number of channels, else which is shorter."""
    shorter = 0 if shape[0] < shape[-1] else 2
    return next((axis for axis in (2, 0) if shape[axis] in expected), shorter) == 0


def upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """Turns an image [H, W, ...] as EXIF's orientation says."""
    if orientation in (5, 6, 7, 8):
        array = array.swapaxes(0, 1)
    rows, columns = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return array[:: -1 if rows else 1, :: -1 if columns else 1]


_lock, _users, _undo = threading.Lock(), 0, contextlib.ExitStack()


@contextlib.contextmanager
def quiet_readers():
    """Inside, the readers neither warn nor set a limit of their own to pixels; outside, they are as they were.

    Counted, so that threads may decode side by side: the first in changes the settings, the last out restores them.
    """
    global _users
    with _lock:
        if not _users:
            _undo.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"PIL\.")  # broken EXIF and the like
            log = logging.getLogger("tifffile")
            for of, name, value in ((Image, "MAX_IMAGE_PIXELS", None), (log, "disabled", True)):
                _undo.callback(setattr, of, name, getattr(of, name))
                setattr(of, name, value)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _undo.close()


# ---------------------------------------------------------------------- numbers
def of_numbers(array: np.ndarray) -> Opened:
    """Returns an array of numbers [H, W, C] as an opened image; BadImage if it holds anything else."""
    return Opened(*array.shape, lambda: _whole(array), *_depth(array.dtype))


def _depth(dtype: np.dtype, bits: int | None = None) -> tuple[bool, Range | None]:
    """Returns ``deep`` and ``full`` of :class:`Opened` for numbers of a type, of which the file uses so many bits."""
    if dtype.kind not in "buif":
        raise BadImage(f"holds values of type {dtype}; expected integers, floats or true and false")
    bits = bits or 8 * dtype.itemsize
    return dtype.kind != "b" and dtype != np.uint8, (0.0, 2.0**bits - 1) if dtype.kind == "u" and bits <= 16 else None


def _whole(values: np.ndarray) -> np.ndarray:
    """Returns true and false as uint8, all else as it is."""
    return values.astype(np.uint8) * 255 if values.dtype == bool else values


def _array(stack: contextlib.ExitStack, content: bytes, expected: Collection[int]) -> Opened:
    """A .npy file, or a .npz file of one array."""
    file: Any = io.BytesIO(content)
    if content.startswith(_ZIP):
        names = (archive := stack.enter_context(zipfile.ZipFile(file))).namelist()
        if len(names) != 1 or not names[0].endswith(".npy"):
            raise BadImage(f"a .npz of {len(names)} arrays; expected one")
        file = stack.enter_context(archive.open(names[0]))
    form = np.lib.format
    version = form.read_magic(file)
    shape, fortran, dtype = (form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0)(file)
    if dtype.hasobject:
        raise BadImage("an array of Python objects, a pickle that may run anything; expected an array of numbers")
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise BadImage(f"an array of shape {list(shape)}; expected [H, W], [H, W, C] or [C, H, W]")
    first = len(shape) == 3 and channels_first(shape, expected)

    def values() -> np.ndarray:
        data = file.read(math.prod(shape) * dtype.itemsize)
        array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")  # ValueError: cut short
        array = array[:, :, None] if len(shape) == 2 else np.moveaxis(array, 0, 2) if first else array
        return _whole(array.astype(dtype.newbyteorder("="), copy=False))  # [H, W, C]

    h, w, channels = (*shape, 1) if len(shape) == 2 else (*shape[1:], shape[0]) if first else shape
    fault = None
    if channels not in PICTURE_CHANNELS:
        fault = f"an array of shape {list(shape)}; expected [H, W] or [H, W, 3], or {as_bands(channels)}"
    return Opened(h, w, channels, values, *_depth(dtype), fault=fault)


# ---------------------------------------------------------------------- Pillow's
def _pillow_image(stack: contextlib.ExitStack, content: bytes, max_pixels: int) -> Image.Image:
    if content.startswith(b"\0\0\1\0"):  # Pillow decodes an icon as it opens it
        for match in _ICO_PNG.finditer(content):
            check_pixels(*struct.unpack(">II", match[1]), max_pixels)
    image = stack.enter_context(Image.open(io.BytesIO(content), formats=_formats()))
    check_pixels(*image.size, max_pixels)
    return image


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # Image.open fails on a format it was built without


def _by_pillow(image: Image.Image, content: bytes) -> Opened:
    """An image that Pillow opened; more than 8 bits of colours are read by another reader."""
    found = of_image(image)
    args = image.tile[0].args if getattr(image, "tile", None) else ""
    raw = str(args[0] if isinstance(args, tuple) and args else args)
    channels, decode = len(image.getbands()), None
    if image.format == "PNG" and ";16" in raw:
        channels = 1 if raw.startswith("I") else 2 if raw.startswith("LA") else channels
        decode = imagecodecs.png_decode
    elif image.format == "PPM" and image.mode == "RGB" and isinstance(args, tuple) and args[-1] > 255:
        decode = partial(_ppm, top=args[-1])
    elif image.format == "JPEG2000" and not image.mode.startswith("I"):
        bits = ((header[1][0] & 0x7F) + 1) if (header := _J2K.search(content)) else 8
        decode = partial(_jpeg_2000, bits=bits) if bits > 8 else None
    if decode is None:
        return found
    about = {"channels": channels, "deep": True, "full": (0.0, 65535.0), "picture": None}
    clear = image.info.get("transparency")
    return replace(found, **about, values=lambda: _planes(decode(content)), transparent=clear)


def of_image(image: Image.Image) -> Opened:
    """Returns what :func:`opened` yields for an image that Pillow has opened or made; it stays as it is."""
    about = {"orientation": partial(_exif_orientation, image)}
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        kind = np.dtype({"I": np.int32, "F": np.float32}.get(image.mode, np.uint16))
        deep, full = _depth(kind)
        full = (0.0, 65535.0) if image.mode == "I" and image.format in ("PNG", "PPM") else full
        return Opened(image.height, image.width, 1, lambda: _planes(np.asarray(image)), deep, full, **about)
    mode = _PLAIN.get(image.mode, image.mode)
    if mode == "P":
        clear = "transparency" in image.info or (image.palette is not None and image.palette.mode.endswith("A"))
        mode = "RGBA" if clear else "RGB"
    values = lambda: _planes(np.asarray(image.convert(mode)))  # noqa: E731
    return Opened(image.height, image.width, Image.getmodebands(mode), values, picture=partial(_rgb, image), **about)


def _rgb(image: Image.Image) -> np.ndarray:
    """Returns a picture of 8 bits as :class:`Opened` has it. Pillow has turned a TIFF upright and dropped its tag."""
    made = image
    palette_alpha = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    if image.mode in _ALPHA or palette_alpha or "transparency" in image.info:
        made = _on_white(image)
    return upright(np.array(made.convert("RGB")), _exif_orientation(image))


def _on_white(image: Image.Image) -> Image.Image:
    colour = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(colour, tuple) and max(colour) > 255:  # 16 bits, though the pixels have 8
        image = image.copy()  # it may be the caller's
        image.info["transparency"] = tuple(c >> 8 for c in colour)
    if image.mode == "La":
        image = image.convert("LA")  # Pillow has no shorter way
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def _exif_orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION) or 1
    except Exception:  # a broken EXIF block does not spoil the pixels
        return 1


def _planes(array: np.ndarray) -> np.ndarray:
    return array[:, :, None] if array.ndim == 2 else array


def _jpeg_2000(content: bytes, bits: int) -> np.ndarray:
    """Reads whole numbers of any size as of 16 bits, as Pillow reads grey."""
    return (imagecodecs.jpeg2k_decode(content) * 2.0 ** (16 - bits)).astype(np.uint16)


def _ppm(content: bytes, top: int) -> np.ndarray:
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # the BadImage below is the message
    array = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)  # [H, W, 3], blue first
    if array is None:
        raise BadImage("unreadable or truncated (16-bit PPM)")
    return np.rint(array[:, :, ::-1] * (65535.0 / top)).astype(np.uint16)


# ---------------------------------------------------------------------- TIFF
def _tiff(stack: contextlib.ExitStack, content: bytes, max_pixels: int) -> Opened | None:
    """A TIFF, its pages and samples are channels; None: tifffile cannot open it. Smaller copies and masks are no pages.

    One page of 8 bits is a picture of Pillow's, which turns it upright by itself.
    """
    try:
        tif = stack.enter_context(tifffile.TiffFile(io.BytesIO(content)))
        every = []
        for page in tif.pages:
            if page.offset in {other.offset for other in every}:  # a broken chain may lead back
                break
            every.append(page)
        pages = [page for page in every if not (page.is_reduced or page.is_mask)] or every[:1]
    except Exception:  # Pillow reads it or says what is wrong with it
        return None
    page, picture = pages[0], None
    for each in pages:
        check_pixels(each.imagewidth, each.imagelength, max_pixels)
        check_pixels(each.tilewidth, each.tilelength * each.tiledepth, max_pixels)
    bits = max(np.atleast_1d(page.bitspersample).tolist())
    if bits <= 8 and page.sampleformat in (1, 4) and len(pages) == 1:
        with contextlib.suppress(UnidentifiedImageError):
            picture = _pillow_image(stack, content, max_pixels)
            picture.seek(every.index(page))
            if bits < 8 or page.photometric == tifffile.PHOTOMETRIC.PALETTE:
                return replace(of_image(picture), orientation=lambda: 1)
    if page.dtype is None:
        raise BadImage(f"a TIFF of {bits}-bit values of an unknown kind; expected integers or floats")
    return Opened(
        page.imagelength,
        page.imagewidth,
        page.samplesperpixel * len(pages),
        partial(_pages, pages),
        *_depth(page.dtype, bits if bits > 8 else None),
        None if picture is None else partial(_rgb, picture),
        _no_picture(len(pages), page, readable=picture is not None),
        lambda: page.tags.valueof(_ORIENTATION, 1),
    )


def _no_picture(count: int, page: tifffile.TiffPage, readable: bool) -> str | None:
    """Returns why a TIFF of so many pages is no picture; ``readable``: by Pillow."""
    samples = page.samplesperpixel
    if count > 1:
        return f"a TIFF of {count} pages; expected one picture a file, or {as_bands(count * samples)}"
    opaque = samples == 2 and not any(int(kind) in (1, 2) for kind in page.extrasamples)
    if samples > 4 or opaque:
        expected = f"expected 1 (grey), 3 (RGB) or 4 (RGBA), or {as_bands(samples)}"
        return f"a TIFF of {samples} samples per pixel; {expected}"
    if not readable and (colours := getattr(page.photometric, "name", page.photometric)) not in _COLOURS:
        return f"a TIFF of the colour space {colours}; expected grey, RGB or RGBA"
    return None


def _pages(pages: list[tifffile.TiffPage]) -> np.ndarray:
    """Reads the samples of all pages, [H, W, C]."""
    read = []
    for page in pages:
        planes, depth, height, width, samples = page.shaped
        if depth != 1 or page.shaped != pages[0].shaped or page.dtype != pages[0].dtype:
            raise BadImage("a TIFF whose pages are of different sizes, samples or types")
        # one thread: images side by side are the parallel part
        values = page.asarray(squeeze=False, maxworkers=1).reshape(planes, height, width, samples)
        values = values.transpose(1, 2, 0, 3).reshape(height, width, -1)  # [H, W, S]
        if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE and values.dtype in (bool, np.uint8):
            values = ~values
        read.append(_whole(values))
    return np.concatenate(read, axis=2) if len(read) > 1 else read[0]
