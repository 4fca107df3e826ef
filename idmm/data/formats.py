"""Image files: their headers, and their channels in the file's own numbers.

Pillow reads pictures of 8 bits. TIFF is read by tifffile, ``.npy`` and ``.npz`` by numpy (never a pickle), 16-bit PNG
and JPEG 2000 by imagecodecs, 16-bit PPM by OpenCV.
"""

import contextlib
import ctypes
import functools
import io
import logging
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from idmm.data.values import RangeUnknown

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .bmp .dib .gif .tif .tiff .webp .ppm .pgm .pbm .pnm .pfm"
    " .jp2 .j2k .jpx .jpf .ico .avif .qoi .npy .npz".split()
)
# No EPS, PDF or WMF (they run other programs), no TGA or PCX (they take nearly any bytes for an image).
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "DIB", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000", "ICO", "AVIF", "QOI")
PICTURE_CHANNELS = (1, 3)  # of an array
_ORIENTATION = 0x0112  # EXIF's tag, which TIFF has, too
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
_NUMPY, _ZIP, _PNG = b"\x93NUMPY", b"PK\3\4", b"\x89PNG\r\n\x1a\n"
_NOT_PIXELS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")  # chunks of a PNG
_ORIENTED = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0")  # keywords of texts that may hold the orientation
_J2K = re.compile(rb"\xff\x4f\xff\x51.{38}(.)", re.DOTALL)  # the bits of the first component, less one
_COLOURS = ("MINISBLACK", "MINISWHITE", "RGB", "YCBCR")  # of TIFF, that tifffile reads as grey or RGB

warnings.filterwarnings("ignore", module=r"PIL\.")  # broken EXIF and the like does not spoil the pixels
for _name in ("tifffile", "PIL"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # errors are raised, too
with contextlib.suppress(OSError, AttributeError):  # libtiff prints the same. Some builds hide its functions
    _libtiff = ctypes.CDLL(Image.core.__file__)
    _libtiff.TIFFSetErrorHandler(None), _libtiff.TIFFSetWarningHandler(None)


class BadImage(ValueError):
    """A file that cannot be used as an image. ``reason`` is a short phrase without the file's name."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class ImageFile:
    """An image whose header was read.

    Attributes:
        height, width: As stored, before EXIF's orientation is applied (pixels).
        channels, dtype: Of :meth:`values`.
        fault: Why it cannot be read as a picture. None: it can.
        has_alpha: Whether the last of two or four channels of a picture is its opacity.
        premultiplied: Whether the other channels are multiplied by the opacity.
    """

    has_alpha, premultiplied = True, False

    def __init__(self, height: int, width: int, channels: int, dtype: np.dtype | None, fault: str | None = None):
        if dtype is None or dtype.kind not in "buif":
            raise BadImage(f"holds values of type {dtype}, expected integers, floats or true and false")
        self.height, self.width, self.channels, self.dtype, self.fault = height, width, channels, dtype, fault

    @property
    def high_bit(self) -> bool:
        """Whether it has more than 8 bits, signed numbers or floats."""
        return self.dtype not in (np.uint8, bool)

    def values(self) -> np.ndarray:
        """Read the channels as stored, [H, W, C], in the file's own numbers. 8 bits and bool are uint8."""
        raise NotImplementedError

    def picture(self) -> np.ndarray | None:
        """Read a picture of 8 bits, upright RGB or RGBA, uint8 [H, W, C]. None: :meth:`values` are all there is."""
        return None

    def orientation(self) -> int:
        """Return EXIF's orientation of ``values``. Read these first: a PNG may have it behind them."""
        return 1


def open_image(
    item: bytes | np.ndarray | Image.Image, max_pixels: int, channels: Collection[int] = PICTURE_CHANNELS
) -> ImageFile:
    """Read an image's header. Call it inside :func:`reporting`.

    Args:
        item: Content of the file, an array [H, W] or [H, W, C], or an open image of Pillow's, which stays as it is.
        max_pixels: Images with more pixels are refused.
        channels: Numbers of channels that tell an array's axes apart: [H, W, C] if the last axis has one of them, else
            [C, H, W] if the first has. Empty: the shorter of both axes is that of channels.
    """
    if isinstance(item, np.ndarray):
        file = _Array(item)
    elif isinstance(item, Image.Image):
        file = _PillowFile(item)
    elif not item:
        raise BadImage("empty file")
    elif item.startswith((_NUMPY, _ZIP)):
        file = _NumpyFile(item, channels)
    elif item.startswith(_TIFF):
        file = _open_tiff(item, max_pixels)
    else:
        file = _open_by_pillow(_without_texts(item) if item.startswith(_PNG) else item, max_pixels)
    check_pixels(file.width, file.height, max_pixels)
    return file


@contextlib.contextmanager
def reporting(max_pixels: int) -> Iterator[None]:
    """Raise any fault of an image file inside the block as a BadImage. Out of memory stays the machine's fault."""
    try:
        yield
    except (BadImage, MemoryError, RangeUnknown):
        raise
    except UnidentifiedImageError:
        raise BadImage("not an image") from None
    except Image.DecompressionBombError:
        raise BadImage(f"has more pixels than data.max_pixels {max_pixels}") from None
    except Exception as error:  # the readers raise a dozen types on broken files
        raise unreadable(error) from error


def unreadable(error: Exception) -> BadImage:
    """Return the BadImage of a file on which a reader failed."""
    text = " ".join(str(error).split())[:100] or type(error).__name__
    return BadImage(f"unreadable or truncated ({text})")


def check_pixels(width: int, height: int, max_pixels: float) -> None:
    """Raise BadImage if an image has too many pixels."""
    if width * height > max_pixels:
        raise BadImage(f"{width} x {height} = {width * height} pixels, more than data.max_pixels {max_pixels}")


def as_bands(channels: int) -> str:
    """Return the flag that uses all of a file's channels as they are. Without ``bands``, 1 and 3 mean pictures."""
    if channels in PICTURE_CHANNELS:
        return f"--data.bands '{list(range(channels))}'"
    return f"--data.in_chans {channels}"


def upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """Turn an image [H, W, ...] by EXIF's orientation."""
    if orientation in (5, 6, 7, 8):
        array = array.swapaxes(0, 1)
    rows, columns = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return array[:: -1 if rows else 1, :: -1 if columns else 1]


def _as_uint8(values: np.ndarray) -> np.ndarray:
    """Return bool as uint8, all else as it is."""
    return values.astype(np.uint8) * 255 if values.dtype == bool else values


def _three_axes(array: np.ndarray) -> np.ndarray:
    return array[:, :, None] if array.ndim == 2 else array


# ---------------------------------------------------------------------- arrays
class _Array(ImageFile):
    def __init__(self, array: np.ndarray):
        self._array = _three_axes(array)
        super().__init__(*self._array.shape, array.dtype)

    def values(self):
        return _as_uint8(self._array)


class _NumpyFile(ImageFile):
    """A .npy file, or a .npz file of one array."""

    def __init__(self, content: bytes, expected: Collection[int]):
        self._file: Any = io.BytesIO(content)
        if content.startswith(_ZIP):
            names = (archive := zipfile.ZipFile(self._file)).namelist()
            if len(names) != 1 or not names[0].endswith(".npy"):
                raise BadImage(f"a .npz of {len(names)} arrays, expected one")
            self._file = archive.open(names[0])
        form = np.lib.format
        version = form.read_magic(self._file)
        read_header = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, _, dtype = read_header(self._file)
        if len(shape) not in (2, 3) or min(shape) < 1:
            raise BadImage(f"an array of shape {list(shape)}, expected [H, W], [H, W, C] or [C, H, W]")
        self._channels_first = len(shape) == 3 and _channels_first(shape, expected)
        h, w, channels = (*shape, 1) if len(shape) == 2 else (*shape[1:], shape[0]) if self._channels_first else shape
        fault = None
        if channels not in PICTURE_CHANNELS:
            fault = f"an array of shape {list(shape)}, expected [H, W] or [H, W, 3], or {as_bands(channels)}"
        super().__init__(h, w, channels, dtype, fault)

    def values(self):
        self._file.seek(0)
        array = np.lib.format.read_array(self._file)  # no pickles. ValueError: cut short
        array = np.moveaxis(array, 0, 2) if self._channels_first else _three_axes(array)  # [H, W, C]
        return _as_uint8(array.astype(self.dtype.newbyteorder("="), copy=False))


def _channels_first(shape: Sequence[int], expected: Collection[int]) -> bool:
    """Return whether an array of three axes is [C, H, W]: the last axis, else the first, has an expected number of
    channels, else the shorter one of both are the channels."""
    shorter = 0 if shape[0] < shape[-1] else 2
    return next((axis for axis in (2, 0) if shape[axis] in expected), shorter) == 0


# ---------------------------------------------------------------------- Pillow
class _PillowFile(ImageFile):
    """An image that Pillow has opened or made. Pillow turns a TIFF upright itself and drops its tag."""

    def __init__(self, image: Image.Image):
        mode, dtype = image.mode, np.dtype(np.uint8)
        if mode.startswith("I") or mode == "F":
            dtype = np.dtype({"I": np.int32, "F": np.float32}.get(mode, np.uint16))
        elif mode not in ("L", "LA", "RGB", "RGBA", "CMYK"):
            mode = "L" if mode == "1" else "RGBA" if image.has_transparency_data else "RGB"
        self._image, self._mode = image, mode
        super().__init__(image.height, image.width, Image.getmodebands(mode), dtype)

    def values(self):
        same = self._image.mode == self._mode
        return _three_axes(np.asarray(self._image if same else self._image.convert(self._mode)))

    def picture(self):
        return None if self.high_bit else _rgb(self._image)

    def orientation(self):
        return _exif_orientation(self._image)


class _HighBitFile(ImageFile):
    """A file of 16 bits whose header Pillow reads, and its pixels another decoder."""

    def __init__(self, image: Image.Image, channels: int, content: bytes, decode: Callable[[bytes], np.ndarray]):
        super().__init__(image.height, image.width, channels, np.dtype(np.uint16))
        self._image, self._content, self._decode = image, content, decode

    def values(self):
        return _three_axes(self._decode(self._content))

    def orientation(self):
        return _exif_orientation(self._image)


def _open_by_pillow(content: bytes, max_pixels: int) -> ImageFile:
    image = _pillow_image(content, max_pixels)
    args, channels = image.tile[0].args if getattr(image, "tile", None) else "", len(image.getbands())
    if image.format == "PNG" and ";16" in args:
        return _HighBitFile(image, 2 if args.startswith("LA") else channels, content, imagecodecs.png_decode)
    if image.format == "PPM" and (image.mode == "I" or (isinstance(args, tuple) and args[-1] > 255)):
        return _HighBitFile(image, channels, content, _decode_ppm)
    if image.format == "JPEG2000" and (header := _J2K.search(content)) and header[1][0] & 0x7F > 7:
        return _HighBitFile(image, channels, content, imagecodecs.jpeg2k_decode)
    return _PillowFile(image)


def _pillow_image(content: bytes, max_pixels: int) -> Image.Image:
    if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own limit must not be lower
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    image = Image.open(io.BytesIO(content), formats=_formats())
    check_pixels(*image.size, max_pixels)
    return image


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # Image.open fails on a format it was built without


def _rgb(image: Image.Image) -> np.ndarray:
    converted = image.convert("RGBA" if image.has_transparency_data else "RGB")
    return upright(np.array(converted), _exif_orientation(image))


def _exif_orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION) or 1
    except Exception:  # a broken EXIF block does not spoil the pixels
        return 1


def _without_texts(content: bytes) -> bytes:
    """Return a PNG without colour profile and texts, which Pillow refuses if they are large.

    A short text that may hold the orientation stays.
    """
    chunks, place = [_PNG], len(_PNG)
    while place < len(content):
        end = place + 12 + int.from_bytes(content[place : place + 4], "big")
        kind = content[place + 4 : place + 8]
        if kind not in _NOT_PIXELS or _orients(kind, content[place + 8 : end - 4]):
            chunks.append(content[place:end])
        place = end
    return b"".join(chunks)


def _orients(kind: bytes, body: bytes) -> bool:
    """Return whether a chunk of a PNG may hold the orientation and is short, also when decompressed."""
    if not body.startswith(_ORIENTED) or len(body) > PngImagePlugin.MAX_TEXT_CHUNK:
        return False
    text, unpacker = body.split(b"\0", 4 if kind == b"iTXt" else 2)[-1], zlib.decompressobj()
    try:
        unpacker.decompress(text, PngImagePlugin.MAX_TEXT_CHUNK)
    except zlib.error:  # not compressed
        return True
    return not unpacker.unconsumed_tail


def _decode_ppm(content: bytes) -> np.ndarray:
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # the BadImage below is the message
    array = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)  # [H, W], or [H, W, 3], blue first
    if array is None:
        raise BadImage("unreadable or truncated (16-bit PPM)")
    return array if array.ndim == 2 else array[:, :, ::-1]


# ---------------------------------------------------------------------- TIFF
class _TiffFile(ImageFile):
    """A TIFF. The samples of all its pages are channels. Pillow reads one page of 8 bits as a picture."""

    def __init__(self, pages: list[tifffile.TiffPage], picture: Image.Image | None):
        self._pages, self._picture, page = pages, picture, pages[0]
        samples, colours = page.samplesperpixel, getattr(page.photometric, "name", page.photometric)
        extra = {int(kind) for kind in page.extrasamples}
        no_alpha, channels, fault = not extra & {1, 2}, samples * len(pages), None
        unknown = colours not in _COLOURS or (no_alpha and samples == 4 and colours != "RGB")
        if len(pages) > 1 or samples > 4 or (no_alpha and samples == 2) or (picture is None and unknown):
            fault = f"a TIFF of {channels} channels ({colours}), expected a page of grey, RGB or RGBA"
            fault += f", or {as_bands(channels)}"
        super().__init__(page.imagelength, page.imagewidth, channels, page.dtype, fault)
        self.has_alpha = picture is not None or not no_alpha
        self.premultiplied = picture is None and 1 in extra

    def values(self):
        channels = []
        for page in self._pages:
            planes, depth, height, width, samples = page.shaped
            if depth != 1 or page.shaped != self._pages[0].shaped or page.dtype != self.dtype:
                raise BadImage("a TIFF whose pages are of different sizes, samples or types")
            # one thread: several images are read at the same time
            values = page.asarray(squeeze=False, maxworkers=1).reshape(planes, height, width, samples)
            channels.append(_as_uint8(values.transpose(1, 2, 0, 3).reshape(height, width, -1)))  # [H, W, S]
        return np.concatenate(channels, axis=2) if len(channels) > 1 else channels[0]

    def picture(self):
        return None if self._picture is None else _rgb(self._picture)

    def orientation(self):
        return self._pages[0].tags.valueof(_ORIENTATION, 1)


def _open_tiff(content: bytes, max_pixels: int) -> ImageFile:
    tif = tifffile.TiffFile(io.BytesIO(content))
    every_page = [tif.pages[n] for n in range(len(tif.pages))]  # their count ends a chain that leads back
    # smaller copies and masks are no pages
    pages = [page for page in every_page if not (page.is_reduced or page.is_mask)] or every_page[:1]
    for page in pages:
        check_pixels(page.imagewidth, page.imagelength, max_pixels)
        check_pixels(page.tilewidth, page.tilelength * page.tiledepth, max_pixels)
    page, picture = pages[0], None
    if page.dtype in (np.uint8, bool) and len(pages) == 1:
        with contextlib.suppress(UnidentifiedImageError):
            picture = _pillow_image(content, max_pixels)
            picture.seek(page.index)
            if page.bitspersample != 8 or page.photometric == tifffile.PHOTOMETRIC.PALETTE:
                return _PillowFile(picture)
    return _TiffFile(pages, picture)
