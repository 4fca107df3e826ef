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
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
import tifffile
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image, ImageFile, PngImagePlugin, UnidentifiedImageError, _imaging

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .bmp .dib .gif .tif .tiff .webp .ppm .pgm .pbm .pnm .pfm"
    " .jp2 .j2k .jpx .jpf .ico .avif .heic .heif .hif .qoi .npy".split()
)
# No EPS, PDF or WMF (they run other programs), no TGA or PCX (they take nearly any bytes for an
# image).
FORMATS = "JPEG PNG BMP DIB GIF TIFF WEBP PPM JPEG2000 ICO AVIF QOI".split()
PICTURE_CHANNELS = (1, 3)  # of an array
MAX_PIXELS = 2**28  # larger images are refused by their header, as they may be decompression bombs
_ORIENTATION = 0x0112  # EXIF's tag, which TIFF has, too
_ON_THE_SIDE = (5, 6, 7, 8)  # orientations whose rows are stored as columns
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
_HEIC = re.compile(rb".{4}ftyp(?!.{,40}avif)(he|mif|msf)", re.DOTALL)
_NUMPY = b"\x93NUMPY"
# more than 8 bits of the first component: the last byte has their number less one, and a sign
_DEEP_J2K = re.compile(rb"\xff\x4f\xff\x51.{38}[\x08-\x7f\x88-\xff]", re.DOTALL)
# kinds of a TIFF that tifffile reads as grey or RGB
_COLOURS = ("MINISBLACK", "MINISWHITE", "RGB", "YCBCR")
_one_large_image = threading.RLock()

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
    _libtiff = ctypes.CDLL(_imaging.__file__)
    _libtiff.TIFFSetErrorHandler(None)
    _libtiff.TIFFSetWarningHandler(None)

Pixels = NDArray[Any]  # numbers of any type


class BadImage(ValueError):
    """A file that cannot be used as an image.

    Attributes:
        reason: A short phrase without the file's name.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class NoPicture(BadImage):
    """An image of ``channels`` that are neither grey nor RGB. It can be used by its channels."""

    def __init__(self, problem: str, channels: int):
        super().__init__(f"{problem}, or {channels_flag(channels)}")
        self.problem = problem
        self.channels = channels


def channels_flag(channels: int) -> str:
    """Return the flag that uses all of a file's channels as they are.

    Without ``bands``, 1 and 3 mean pictures.
    """
    if channels in PICTURE_CHANNELS:
        return f"--data.bands '{list(range(channels))}'"
    return f"--data.in_chans {channels}"


def decode(item: bytes | Pixels | Image.Image, picture: bool) -> Pixels:
    """Return an image's values in the file's own numbers, [H, W, C].

    They are upright by EXIF's orientation. Of true and false they are uint8.

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
        if isinstance(item, np.ndarray):
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
            return Header(_npy_shape(content)[:2], 1)
        if content.startswith(_TIFF):
            page = _tiff_pages(content)[0]
            size = (page.imagelength, page.imagewidth)
            orientation = page.tags.valueof(_ORIENTATION, 1)
        else:
            image = pillow_image(content)
            size = (image.height, image.width)
            orientation = exif_orientation(image)
        if orientation not in range(1, 9):
            orientation = 1
        if orientation in _ON_THE_SIDE:
            size = size[::-1]
        return Header(size, orientation)


@contextmanager
def reporting() -> Iterator[None]:
    """Raise any fault of an image file inside the block as a BadImage.

    Out of memory stays the machine's fault.
    """
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadImage("not an image") from None
    except Image.DecompressionBombError:
        raise BadImage(f"has more than {MAX_PIXELS} pixels, expected smaller tiles") from None
    except Exception as error:  # the readers raise a dozen types on broken files
        words = str(error).split()
        text = " ".join(words)[:100] or type(error).__name__
        raise BadImage(f"unreadable or truncated ({text})") from error


def check_pixels(width: int, height: int) -> None:
    """Raise BadImage if an image has too many pixels. Pillow raises an error of its own."""
    if width * height > MAX_PIXELS:
        raise BadImage(
            f"{width} x {height} pixels are more than {MAX_PIXELS}, expected smaller tiles"
        )
    if width * height > MAX_PIXELS // 8 and _thread.held is not None:
        _thread.held.enter_context(_one_large_image)


class _Thread(threading.local):
    """What a thread holds while it reads an image inside :func:`large_one_by_one`."""

    held: ExitStack | None = None


_thread = _Thread()


@contextmanager
def large_one_by_one() -> Iterator[None]:
    """Inside the block a large image waits until no other thread has one: it may take gigabytes."""
    with ExitStack() as _thread.held:
        yield


def _upright(array: Pixels, orientation: int) -> Pixels:
    """Turn an image [H, W, ...] by EXIF's orientation."""
    if orientation in _ON_THE_SIDE:
        array = array.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    return array


# ---------------------------------------------------------------------- arrays
def _from_npy(content: bytes, picture: bool) -> Pixels:
    height, _, channels = _npy_shape(content)
    if picture and channels not in PICTURE_CHANNELS:
        raise NoPicture(f"an array of {channels} channels, expected [H, W] or [H, W, 3]", channels)
    array: Pixels = npy.read_array(io.BytesIO(content))  # no pickles. ValueError: cut short
    if len(array) != height:
        return np.moveaxis(array, 0, 2)
    return array


def _npy_shape(content: bytes) -> tuple[int, int, int]:
    """Return height, width and channels of a .npy file. The channels are its shorter end."""
    file = io.BytesIO(content)
    if npy.read_magic(file) == (1, 0):
        shape, *_ = npy.read_array_header_1_0(file)
    else:
        shape, *_ = npy.read_array_header_2_0(file)
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise BadImage(f"an array of shape {list(shape)}, expected [H, W], [H, W, C] or [C, H, W]")
    height, width, channels = (*shape, 1)[:3]
    if height < channels:
        channels, height, width = shape
    check_pixels(width, height)
    return height, width, channels


# ---------------------------------------------------------------------- Pillow
def _from_picture_file(content: bytes, picture: bool) -> Pixels:
    image = pillow_image(content)
    layout = str(image.tile[:1])
    if image.format == "PNG" and ";16" in layout:
        values = imagecodecs.png_decode(content)
    elif image.format == "JPEG2000" and _DEEP_J2K.search(content):
        values = imagecodecs.jpeg2k_decode(content)
    else:
        return _from_pillow(image, picture)
    return _upright(values, exif_orientation(image))


def pillow_image(content: bytes) -> ImageFile.ImageFile:
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
        formats = [*FORMATS, "HEIF"]
    image = Image.open(io.BytesIO(content), formats=formats)
    check_pixels(*image.size)
    return image


def _from_pillow(image: Image.Image, picture: bool) -> Pixels:
    """Read an image that Pillow has opened or made.

    Pillow turns a TIFF upright itself and drops its tag.
    """
    mode = image.mode
    if mode.startswith("I") or mode == "F":
        values = np.asarray(image)
        if (image.format, mode) == ("PPM", "I"):  # Pillow reads 16 bits of a PGM as 32
            values = values.astype(np.uint16)
    elif picture or mode not in ("L", "LA", "RGB", "RGBA", "CMYK", "1"):
        mode = "RGBA" if image.has_transparency_data else "RGB"
        values = np.array(image.convert(mode))
    elif mode == "1":
        values = np.asarray(image.convert("L"))
    else:
        values = np.asarray(image)
    return _upright(values, exif_orientation(image))


def exif_orientation(image: Image.Image) -> int:
    """Return the orientation of an open image, 1 if it has none."""
    try:
        return image.getexif().get(_ORIENTATION) or 1
    except Exception:  # a broken EXIF block does not spoil the pixels
        return 1


# ---------------------------------------------------------------------- TIFF
def _from_tiff(content: bytes, picture: bool) -> Pixels:
    """Read a TIFF. The samples of all its pages are channels.

    Pillow reads one page of 8 bits as a picture.
    """
    pages = _tiff_pages(content)
    page = pages[0]
    samples = page.samplesperpixel
    colours = getattr(page.photometric, "name", page.photometric)  # a number is not standard
    has_opacity = not {1, 2}.isdisjoint(page.extrasamples)
    if page.dtype in (np.uint8, bool) and len(pages) == 1:
        is_packed = page.bitspersample != 8 or colours == "PALETTE"
        if is_packed or (picture and samples <= 4 and (has_opacity or samples != 2)):
            with suppress(UnidentifiedImageError):  # of Pillow, which knows fewer kinds
                image = pillow_image(content)
                image.seek(page.index)
                return _from_pillow(image, picture)
    picture_samples = (1, 2, 3, 4) if has_opacity else (1, 3)
    is_picture = colours in _COLOURS and samples in picture_samples
    if picture and not (is_picture and len(pages) == 1):
        channels = samples * len(pages)
        raise NoPicture(
            f"a TIFF of {channels} channels ({colours}), expected a page of grey, RGB or RGBA",
            channels,
        )
    values = np.concatenate([_page_values(one) for one in pages], axis=2)
    # as Pillow does with 8 bits
    if picture and colours == "MINISWHITE" and values.dtype.kind == "u":
        white = values.dtype.type(2**page.bitspersample - 1)
        values[:, :, 0] = white - values[:, :, 0]
    return _upright(values, page.tags.valueof(_ORIENTATION, 1))


def _tiff_pages(content: bytes) -> list[tifffile.TiffPage]:
    """Return the pages of a TIFF without smaller copies and masks."""
    tif = tifffile.TiffFile(io.BytesIO(content))
    every_page = [page.aspage() for page in tif.pages]
    pages = [page for page in every_page if not (page.is_reduced or page.is_mask)]
    if not pages:
        pages = every_page[:1]
    for page in pages:
        check_pixels(page.imagewidth, page.imagelength)
    return pages


def _page_values(page: tifffile.TiffPage) -> Pixels:
    """Return the samples of a page, [H, W, S]."""
    planes, _, height, width, samples = page.shaped
    # one thread: several images are read at the same time
    values = page.asarray(squeeze=False, maxworkers=1)
    values = values.reshape(planes, height, width, samples)
    return values.transpose(1, 2, 0, 3).reshape(height, width, -1)
