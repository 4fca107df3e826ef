"""Files and arrays to pixels, in the file's own numbers.

Pillow reads pictures of 8 bits, HEIC by pillow-heif. TIFF is read by tifffile, ``.npy`` by numpy
(never a pickle), PNG and JPEG 2000 of 16 bits by imagecodecs.
"""

import ctypes
import io
import logging
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import imagecodecs
import numpy as np
import tifffile
from numpy import ndarray
from PIL import Image, PngImagePlugin, UnidentifiedImageError

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .bmp .dib .gif .tif .tiff .webp .ppm .pgm .pbm .pnm .pfm"
    " .jp2 .j2k .jpx .jpf .ico .avif .heic .heif .hif .qoi .npy".split()
)
# No EPS, PDF or WMF (they run other programs), no TGA or PCX (they take nearly any bytes for an
# image).
FORMATS = (
    "JPEG",
    "PNG",
    "BMP",
    "DIB",
    "GIF",
    "TIFF",
    "WEBP",
    "PPM",
    "JPEG2000",
    "ICO",
    "AVIF",
    "QOI",
)
PICTURE_CHANNELS = (1, 3)  # of an array
MAX_PIXELS = 2**28  # larger images are refused by their header, as they may be decompression bombs
_ORIENTATION = 0x0112  # EXIF's tag, which TIFF has, too
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
_HEIC = re.compile(rb".{4}ftyp(?!.{,40}avif)(he|mif|msf)", re.DOTALL)
_NUMPY = b"\x93NUMPY"
# the bits of the first component, less one
_J2K = re.compile(rb"\xff\x4f\xff\x51.{38}(.)", re.DOTALL)
_large = threading.RLock()
_thread = threading.local()
# of TIFF, that tifffile reads as grey or RGB
_COLOURS = ("MINISBLACK", "MINISWHITE", "RGB", "YCBCR")

Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow refuses more than twice as many
# Pillow refuses a PNG whose texts or colour profile are longer (bytes). Image editors write more
# than its default.
PngImagePlugin.MAX_TEXT_CHUNK = 2**24
PngImagePlugin.MAX_TEXT_MEMORY = 2**28
# broken EXIF and the like does not spoil the pixels
warnings.filterwarnings("ignore", module=r"PIL\.")
for _name in ("tifffile", "PIL"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # errors are raised, too
with suppress(OSError, AttributeError):  # libtiff prints the same. Some builds hide its functions
    _libtiff = ctypes.CDLL(Image.core.__file__)
    _libtiff.TIFFSetErrorHandler(None), _libtiff.TIFFSetWarningHandler(None)


class BadImage(ValueError):
    """A file that cannot be used as an image. ``reason`` is a short phrase without the file's
    name."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class NoPicture(BadImage):
    """An image of ``channels`` that are neither grey nor RGB. It can be used by its channels."""

    def __init__(self, reason: str, channels: int):
        super().__init__(f"{reason}, or {channels_flag(channels)}")
        self.channels = channels


def channels_flag(channels: int) -> str:
    """Return the flag that uses all of a file's channels as they are. Without ``bands``, 1 and 3
    mean pictures."""
    if channels in PICTURE_CHANNELS:
        return f"--data.bands '{list(range(channels))}'"
    return f"--data.in_chans {channels}"


def decode(item: bytes | ndarray | Image.Image, picture: bool) -> ndarray:
    """Return an image's values, upright by EXIF's orientation, [H, W, C], in the file's own
    numbers. Bool is uint8.

    Args:
        item: Content of the file, an array [H, W] or [H, W, C], or an open image of Pillow's, which
            stays as it is.
        picture: Return grey or RGB (0 is black), with a last channel for the opacity if there is
            one. Else the channels as stored. Those of a palette are its colours'.

    Raises:
        BadImage: Not an image, truncated, too large or not of numbers. NoPicture: ``picture``
            cannot be met.
    """
    with reporting():
        if isinstance(item, ndarray):
            values = item
        elif isinstance(item, Image.Image):
            values = _from_pillow(item, picture)
        elif item.startswith(_NUMPY):
            values = _from_npy(item, picture)
        elif item.startswith(_TIFF):
            values = _from_tiff(item, picture)
        else:
            values = _from_picture_file(item, picture)
        if values.dtype.kind not in "buif":
            raise BadImage(
                f"holds values of type {values.dtype}, expected integers, floats or true and false"
            )
        if values.dtype == bool:
            values = values.astype(np.uint8) * 255
        else:
            values = values
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        if values.ndim == 2:
            return values[:, :, None]
        return values


class Header(NamedTuple):
    """What a file's header says about its image."""

    size: tuple[int, int]  # height and width in upright position (pixels)
    orientation: int  # EXIF's, from 1 to 8. 1: stored as it is shown


def read_header(content: bytes) -> Header:
    """Return size and orientation of a file's image by its header. BadImage as :func:`decode`."""
    with reporting():
        if content.startswith(_NUMPY):
            return Header(_npy_header(content)[:2], 1)
        if content.startswith(_TIFF):
            page = _tiff_pages(content)[0]
            size = page.imagelength, page.imagewidth
            orientation = page.tags.valueof(_ORIENTATION, 1)
        else:
            image = pillow_image(content)
            size = image.height, image.width
            orientation = exif_orientation(image)
        if orientation in (5, 6, 7, 8):
            return Header(size[::-1], orientation)
        return Header(size, orientation if orientation in (2, 3, 4) else 1)


@contextmanager
def reporting() -> Iterator[None]:
    """Raise any fault of an image file inside the block as a BadImage. Out of memory stays the
    machine's fault."""
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadImage("not an image") from None
    except Image.DecompressionBombError:
        raise BadImage(f"has more than {MAX_PIXELS} pixels, expected smaller tiles") from None
    except Exception as error:  # the readers raise a dozen types on broken files
        text = " ".join(str(error).split())[:100] or type(error).__name__
        raise BadImage(f"unreadable or truncated ({text})") from error


def check_pixels(width: int, height: int) -> None:
    """Raise BadImage if an image has too many pixels. Pillow raises an error of its own."""
    if width * height > MAX_PIXELS:
        raise BadImage(
            f"{width} x {height} pixels are more than {MAX_PIXELS}, expected smaller tiles"
        )
    if width * height > MAX_PIXELS // 8 and hasattr(_thread, "images"):
        _thread.images.enter_context(_large)


@contextmanager
def large_one_by_one() -> Iterator[None]:
    """Inside the block a large image waits until no other thread has one: it may take gigabytes."""
    with ExitStack() as _thread.images:
        yield


def _upright(array: ndarray, orientation: int) -> ndarray:
    """Turn an image [H, W, ...] by EXIF's orientation."""
    if orientation in (5, 6, 7, 8):
        array = array.swapaxes(0, 1)
    rows = orientation in (3, 4, 7, 8)
    columns = orientation in (2, 3, 6, 7)
    return array[:: -1 if rows else 1, :: -1 if columns else 1]


# ---------------------------------------------------------------------- arrays
def _from_npy(content: bytes, picture: bool) -> ndarray:
    _, _, channels, first = _npy_header(content)
    if picture and channels not in PICTURE_CHANNELS:
        raise NoPicture(f"an array of {channels} channels, expected [H, W] or [H, W, 3]", channels)
    array = np.lib.format.read_array(io.BytesIO(content))  # no pickles. ValueError: cut short
    if first:
        return np.moveaxis(array, 0, 2)
    return array


def _npy_header(content: bytes) -> tuple[int, int, int, bool]:
    """Return height, width and channels of a .npy file, and if the channels come first: they are
    the shorter end."""
    file = io.BytesIO(content)
    form = np.lib.format
    if form.read_magic(file) == (1, 0):
        read_header = form.read_array_header_1_0
    else:
        read_header = form.read_array_header_2_0
    shape = read_header(file)[0]
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise BadImage(f"an array of shape {list(shape)}, expected [H, W], [H, W, C] or [C, H, W]")
    shape = (*shape, 1)[:3]
    first = shape[0] < shape[2]
    height, width, channels = (*shape[1:], shape[0]) if first else shape
    check_pixels(width, height)
    return height, width, channels, first


# ---------------------------------------------------------------------- Pillow
def _from_picture_file(content: bytes, picture: bool) -> ndarray:
    image = pillow_image(content)
    args = image.tile[0].args if getattr(image, "tile", None) else ""
    if image.format == "PNG" and ";16" in args:
        values = imagecodecs.png_decode(content)
    elif (
        image.format == "JPEG2000" and (header := _J2K.search(content)) and header[1][0] & 0x7F > 7
    ):
        values = imagecodecs.jpeg2k_decode(content)
    else:
        return _from_pillow(image, picture)
    return _upright(values, exif_orientation(image))


def pillow_image(content: bytes) -> Image.Image:
    """Open a file's content by one of :data:`FORMATS`, which run no other programs, or as HEIC."""
    formats = FORMATS
    if _HEIC.match(content):
        try:
            from pillow_heif import register_heif_opener  # an extra
        except ImportError:
            raise BadImage(
                "HEIC, which needs pillow-heif. Install it with: pip install -e '.[heic]'"
            ) from None
        register_heif_opener()
        formats += ("HEIF",)
    image = Image.open(io.BytesIO(content), formats=formats)
    check_pixels(*image.size)
    return image


def _from_pillow(image: Image.Image, picture: bool) -> ndarray:
    """Read an image that Pillow has opened or made. Pillow turns a TIFF upright itself and drops
    its tag."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)  # Pillow reads 16 bits of a PGM as 32
        if (image.format, image.mode) == ("PPM", "I"):
            values = values.astype(np.uint16)
        else:
            values = values
    elif picture or image.mode not in ("L", "LA", "RGB", "RGBA", "CMYK", "1"):
        values = np.array(image.convert("RGBA" if image.has_transparency_data else "RGB"))
    else:
        values = np.asarray(image.convert("L") if image.mode == "1" else image)
    return _upright(values, exif_orientation(image))


def exif_orientation(image: Image.Image) -> int:
    """Return the orientation of an open image, 1 if it has none."""
    try:
        return image.getexif().get(_ORIENTATION) or 1
    except Exception:  # a broken EXIF block does not spoil the pixels
        return 1


# ---------------------------------------------------------------------- TIFF
def _from_tiff(content: bytes, picture: bool) -> ndarray:
    """Read a TIFF. The samples of all its pages are channels. Pillow reads one page of 8 bits as a
    picture."""
    pages = _tiff_pages(content)
    page = pages[0]
    samples = pages[0].samplesperpixel
    colours = getattr(page.photometric, "name", page.photometric)
    alpha = {1, 2}.intersection(page.extrasamples)
    if page.dtype in (np.uint8, bool) and len(pages) == 1:
        packed = page.bitspersample != 8 or colours == "PALETTE"
        if packed or (picture and samples <= 4 and (alpha or samples != 2)):
            with suppress(UnidentifiedImageError):  # of Pillow, which knows fewer kinds
                image = pillow_image(content)
                image.seek(page.index)
                return _from_pillow(image, picture)
    is_picture = (
        len(pages) == 1 and colours in _COLOURS and samples in ((1, 2, 3, 4) if alpha else (1, 3))
    )
    if picture and not is_picture:
        channels = samples * len(pages)
        raise NoPicture(
            f"a TIFF of {channels} channels ({colours}), expected a page of grey, RGB or RGBA",
            channels,
        )
    values = np.concatenate([_page_values(one) for one in pages], axis=2)
    # as Pillow does with 8 bits
    if picture and colours == "MINISWHITE" and values.dtype.kind == "u":
        values[:, :, 0] = values.dtype.type(2**page.bitspersample - 1) - values[:, :, 0]
    return _upright(values, page.tags.valueof(_ORIENTATION, 1))


def _tiff_pages(content: bytes) -> list[tifffile.TiffPage]:
    tif = tifffile.TiffFile(io.BytesIO(content))
    every_page = list(tif.pages)
    # smaller copies and masks are no pages
    pages = [page for page in every_page if not (page.is_reduced or page.is_mask)] or every_page[:1]
    for page in pages:
        check_pixels(page.imagewidth, page.imagelength)
    return pages


def _page_values(page: tifffile.TiffPage) -> ndarray:
    """Return the samples of a page, [H, W, S]."""
    planes, _, height, width, samples = page.shaped
    # one thread: several images are read at the same time
    values = page.asarray(squeeze=False, maxworkers=1).reshape(planes, height, width, samples)
    return values.transpose(1, 2, 0, 3).reshape(height, width, -1)
