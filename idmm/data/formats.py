"""Image files of any format, opened: what the header says, and the channels as they are in the file.

Pictures of 8 bits are Pillow's; TIFF is read by tifffile, ``.npy`` and ``.npz`` by numpy (never a pickle), 16-bit PNG
and JPEG 2000 by imagecodecs, 16-bit PPM by OpenCV.
"""

import contextlib
import functools
import io
import math
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import imagecodecs
import numpy as np
from PIL import Image, UnidentifiedImageError

from idmm.data.raw import (
    ORIENTATION,
    PICTURE_CHANNELS,
    BadImage,
    NeedsMore,
    Opened,
    as_bands,
    channels_first,
    check_pixels,
    numbers,
    plain,
    quiet_readers,
    unreadable,
)
from idmm.data.tiff import opened_tiff

# No EPS, PDF or WMF (they run other programs), no TGA or PCX (they take nearly any bytes for an image).
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "DIB", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000", "ICO", "AVIF", "QOI")
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
_NUMPY, _ZIP = b"\x93NUMPY", b"PK\3\4"
_ICO_PNG = re.compile(rb"\x89PNG\r\n\x1a\n....IHDR(.{8})", re.DOTALL)
_J2K = re.compile(rb"\xff\x4f\xff\x51.{38}(.)", re.DOTALL)  # the bits of the first component, less one
_PLAIN = {"1": "L", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB"}


@contextlib.contextmanager
def opened(content: bytes, max_pixels: int, wanted: Collection[int] = PICTURE_CHANNELS) -> Iterator[Opened]:
    """Yields an image whose header was read; whatever goes wrong with it, inside the block too, is a BadImage.

    Args:
        content: Of the file.
        max_pixels: Images with more pixels than this are refused, by their header (pixels).
        wanted: Numbers of channels by which an array's axes are told: [H, W], or [H, W, C] where its last axis is one
            of them, else [C, H, W] where its first is. Empty: any, the shorter one of both axes is that of channels.
    """
    if not content:
        raise BadImage("empty file")
    with quiet_readers(), contextlib.ExitStack() as stack:
        try:
            found = None
            if content.startswith((_NUMPY, _ZIP)):
                found = _array(stack, content, wanted)
            elif content.startswith(_TIFF):
                pillow = partial(_pillow_image, stack, content, max_pixels)
                found = opened_tiff(stack, content, max_pixels, pillow, partial(_of_pillow, content=content))
            found = found or _pillow(stack, content, max_pixels)
            check_pixels([(found.width, found.height)], max_pixels)
            yield found
        except (BadImage, MemoryError, NeedsMore):  # out of memory is the machine's fault, not the file's
            raise
        except UnidentifiedImageError:
            raise BadImage("not an image") from None
        except Exception as error:  # the readers raise a dozen types on broken files
            raise unreadable(error) from error


# ---------------------------------------------------------------------- arrays
def _array(stack: contextlib.ExitStack, content: bytes, wanted: Collection[int]) -> Opened:
    """A .npy file, or a .npz file of one array."""
    file: Any = io.BytesIO(content)
    if content.startswith(_ZIP):
        names = (archive := stack.enter_context(zipfile.ZipFile(file))).namelist()
        if len(names) != 1 or not names[0].endswith(".npy"):
            raise BadImage(f"a .npz of {len(names)} arrays; wanted one")
        file = stack.enter_context(archive.open(names[0]))
    form = np.lib.format
    version = form.read_magic(file)
    shape, fortran, dtype = (form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0)(file)
    if dtype.hasobject:
        raise BadImage("an array of Python objects, which is a pickle and may run anything; wanted an array of numbers")
    bits, full = numbers(dtype)
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise BadImage(f"an array of shape {list(shape)}; wanted [H, W], [H, W, C] or [C, H, W]")
    first = len(shape) == 3 and channels_first(shape, wanted)

    def values() -> np.ndarray:
        data = file.read(math.prod(shape) * dtype.itemsize)
        array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")  # ValueError: cut short
        array = array[:, :, None] if len(shape) == 2 else np.moveaxis(array, 0, 2) if first else array
        return plain(array.astype(dtype.newbyteorder("="), copy=False))  # [H, W, C]

    h, w, channels = (*shape, 1) if len(shape) == 2 else (*shape[1:], shape[0]) if first else shape
    fault = None
    if channels not in PICTURE_CHANNELS:
        fault = f"an array of shape {list(shape)}; wanted [H, W] or [H, W, 3], or {as_bands(channels)}"
    picture = None if bits or fault else lambda: Image.fromarray(values().reshape((h, w, 3)[: 2 + (channels > 1)]))
    return Opened(h, w, channels, bits, values, picture, full, fault, shape=f"an array of shape {list(shape)}")


# ---------------------------------------------------------------------- Pillow's
def _pillow(stack: contextlib.ExitStack, content: bytes, max_pixels: int) -> Opened:
    return _of_pillow(_pillow_image(stack, content, max_pixels), content)


def _pillow_image(stack: contextlib.ExitStack, content: bytes, max_pixels: int) -> Image.Image:
    if content.startswith(b"\0\0\1\0"):  # Pillow decodes an icon as it opens it
        check_pixels([struct.unpack(">II", match[1]) for match in _ICO_PNG.finditer(content)], max_pixels)
    image = stack.enter_context(Image.open(io.BytesIO(content), formats=_formats()))
    check_pixels([image.size], max_pixels)
    return image


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # Image.open fails on a format it was built without


def _of_pillow(image: Image.Image, content: bytes) -> Opened:
    """An image that Pillow opened; more than 8 bits of colours are read by another reader."""
    pages = 1 if image.format == "TIFF" else getattr(image, "n_frames", None) or 1  # a TIFF's others are previews
    about = {"pages": pages, "orientation": partial(_exif_orientation, image)}
    clear = image.info.get("transparency")
    if reader := _deep_reader(image, content):
        channels, values = reader
        return Opened(
            image.height, image.width, channels, "16-bit", values, None, (0.0, 65535.0), transparent=clear, **about
        )
    return of_image(image, **about)


def of_image(image: Image.Image, **about) -> Opened:
    """Returns what :func:`opened` yields for an image that Pillow has opened or made; it stays as it is."""
    if not about:
        about = {"orientation": partial(_exif_orientation, image)}
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        bits, full = numbers(np.dtype({"I": np.int32, "F": np.float32}.get(image.mode, np.uint16)))
        if image.mode == "I" and image.format in ("PNG", "PPM"):
            bits = "16-bit"
        return Opened(image.height, image.width, 1, bits, lambda: np.asarray(image)[:, :, None], None, full, **about)
    mode = _PLAIN.get(image.mode, image.mode)
    if mode == "P":
        clear = "transparency" in image.info or (image.palette is not None and image.palette.mode.endswith("A"))
        mode = "RGBA" if clear else "RGB"

    def values() -> np.ndarray:
        array = np.asarray(image.convert(mode))
        return array[:, :, None] if array.ndim == 2 else array

    return Opened(image.height, image.width, Image.getmodebands(mode), "", values, lambda: image, **about)


def _exif_orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ORIENTATION) or 1
    except Exception:  # a broken EXIF block does not spoil the pixels
        return 1


def _deep_reader(image: Image.Image, content: bytes) -> tuple[int, Callable[[], np.ndarray]] | None:
    """Returns the number of channels and what reads them, of a file of 16-bit samples that Pillow would cut to 8."""
    args = image.tile[0].args if getattr(image, "tile", None) else ""
    raw = str(args[0] if isinstance(args, tuple) and args else args)
    bands = len(image.getbands())
    if image.format == "PNG" and ";16" in raw:
        channels = 1 if raw.startswith("I") else 2 if raw.startswith("LA") else bands
        return channels, partial(_decoded, imagecodecs.png_decode, content)
    if image.format == "PPM" and image.mode == "RGB" and isinstance(args, tuple) and args[-1] > 255:
        return 3, partial(_ppm, content, args[-1])
    if image.format == "JPEG2000" and (found := _J2K.search(content)) and (found[1][0] & 0x7F) > 7:
        if not image.mode.startswith("I"):
            return bands, partial(_jpeg_2000, content, found[1][0])
    return None


def _decoded(decode: Callable, content: bytes) -> np.ndarray:
    array = np.asarray(decode(content))
    return array[:, :, None] if array.ndim == 2 else array


def _jpeg_2000(content: bytes, kind: int) -> np.ndarray:
    """Reads whole numbers of any size as of 16 bits, as Pillow does those of grey; ``kind``: their bits less one, and
    128 where they are signed."""
    bits = (kind & 0x7F) + 1
    values = _decoded(imagecodecs.jpeg2k_decode, content) + (2.0 ** (bits - 1) if kind > 127 else 0.0)
    return (values * 2.0 ** (16 - bits)).astype(np.uint16)


def _ppm(content: bytes, top: int) -> np.ndarray:
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # what is wrong with a file is said below
    array = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)  # [H, W, 3], blue first
    if array is None:
        raise BadImage("unreadable or truncated (16-bit PPM)")
    return np.rint(array[:, :, ::-1] * (65535.0 / top)).astype(np.uint16)
