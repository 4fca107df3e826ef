"""Image files: what their headers hold, and their channels in the file's own numbers.

Pictures of 8 bits are Pillow's. TIFF is read by tifffile, ``.npy`` and ``.npz`` by numpy (never a pickle), 16-bit PNG
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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from PIL import Image, PngImagePlugin, UnidentifiedImageError

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

warnings.filterwarnings("ignore", module=r"PIL\.")  # broken EXIF and the like, which does not spoil the pixels
for _name in ("tifffile", "PIL"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # what spoils them is raised, too
with contextlib.suppress(OSError, AttributeError):  # libtiff prints the same; builds that hide its functions go on so
    _libtiff = ctypes.CDLL(Image.core.__file__)
    _libtiff.TIFFSetErrorHandler(None), _libtiff.TIFFSetWarningHandler(None)


class BadImage(ValueError):
    """A file that cannot be used as an image; ``reason`` is a short phrase without the file's name."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class RangeUnknown(Exception):
    """An image has more than 8 bits, and the range of values that 0 and 1 stand for is not known yet."""


@dataclass(frozen=True)
class Opened:
    """An image whose header was read."""

    height: int
    """As stored, before EXIF turns it (pixels)."""
    width: int
    channels: int
    dtype: np.dtype
    """Of ``values``."""
    values: Callable[[], np.ndarray]
    """Reads the channels, [H, W, C] as stored, in the file's own numbers; 8 bits and bool are uint8."""
    picture: Callable[[], np.ndarray] | None = None
    """Reads a picture of 8 bits by Pillow: RGB or RGBA, uint8 [H, W, C], upright; None: no such."""
    fault: str | None = None
    """Why it is no picture."""
    orientation: Callable[[], int] = lambda: 1
    """Returns EXIF's for ``values``, after these were read: in a PNG it stands behind them."""
    opacity: bool = True
    """Whether the last of two or four ``values`` of a pixel is its opacity, if the image is a picture."""
    premultiplied: bool = False
    """Whether the other ``values`` were multiplied by it."""

    def __post_init__(self):
        if self.dtype is None or self.dtype.kind not in "buif":
            raise BadImage(f"holds values of type {self.dtype}; expected integers, floats or true and false")

    @property
    def high_bit(self) -> bool:
        """Whether it has more than 8 bits, signed numbers or floats."""
        return self.dtype not in (np.uint8, bool)


@contextlib.contextmanager
def opened(
    item: bytes | np.ndarray | Image.Image, max_pixels: int, expected: Collection[int] = PICTURE_CHANNELS
) -> Iterator[Opened]:
    """Yields an image whose header was read; any fault of the file, inside the block too, is a BadImage.

    Args:
        item: Content of the file, an array [H, W] or [H, W, C], or an open image of Pillow's, which stays as it is.
        max_pixels: Images with more pixels than this are refused, by their header (pixels).
        expected: Numbers of channels that tell an array's axes apart: [H, W, C] if the last axis is one of them, else
            [C, H, W] if the first is. Empty: any, the shorter one of both axes is that of channels.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(item, np.ndarray):
                values = item[:, :, None] if item.ndim == 2 else item
                image = Opened(*values.shape, values.dtype, lambda: _whole(values))
            elif isinstance(item, Image.Image):
                image = _of_image(item)
            elif not item:
                raise BadImage("empty file")
            elif item.startswith((_NUMPY, _ZIP)):
                image = _array(stack, item, expected)
            elif item.startswith(_TIFF):
                image = _tiff(stack, item, max_pixels)
            else:
                item = _bare(item) if item.startswith(_PNG) else item
                image = _by_pillow(_pillow_image(stack, item, max_pixels), item)
            check_pixels(image.width, image.height, max_pixels)
            yield image
        except (BadImage, MemoryError, RangeUnknown):  # out of memory is the machine's fault, not the file's
            raise
        except UnidentifiedImageError:
            raise BadImage("not an image") from None
        except Image.DecompressionBombError:
            raise BadImage(f"has more pixels than data.max_pixels {max_pixels}") from None
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


def _channels_first(shape: Sequence[int], expected: Collection[int]) -> bool:
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


def _whole(values: np.ndarray) -> np.ndarray:
    """Returns true and false as uint8, all else as it is."""
    return values.astype(np.uint8) * 255 if values.dtype == bool else values


def _planes(array: np.ndarray) -> np.ndarray:
    return array[:, :, None] if array.ndim == 2 else array


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
    shape, _, dtype = (form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0)(file)
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise BadImage(f"an array of shape {list(shape)}; expected [H, W], [H, W, C] or [C, H, W]")
    first = len(shape) == 3 and _channels_first(shape, expected)

    def values() -> np.ndarray:
        file.seek(0)
        array = form.read_array(file)  # no pickles; ValueError: cut short
        array = np.moveaxis(array, 0, 2) if first else _planes(array)
        return _whole(array.astype(dtype.newbyteorder("="), copy=False))  # [H, W, C]

    h, w, channels = (*shape, 1) if len(shape) == 2 else (*shape[1:], shape[0]) if first else shape
    fault = None
    if channels not in PICTURE_CHANNELS:
        fault = f"an array of shape {list(shape)}; expected [H, W] or [H, W, 3], or {as_bands(channels)}"
    return Opened(h, w, channels, dtype, values, fault=fault)


# ---------------------------------------------------------------------- Pillow's
def _pillow_image(stack: contextlib.ExitStack, content: bytes, max_pixels: int) -> Image.Image:
    if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own limit must not be lower
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    image = stack.enter_context(Image.open(io.BytesIO(content), formats=_formats()))
    check_pixels(*image.size, max_pixels)
    return image


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # Image.open fails on a format it was built without


def _bare(content: bytes) -> bytes:
    """Returns a PNG without colour profile and texts, which Pillow refuses if they are large. A short text that may
    hold the orientation stays."""
    chunks, place = [_PNG], len(_PNG)
    while place < len(content):
        end = place + 12 + int.from_bytes(content[place : place + 4], "big")
        kind = content[place + 4 : place + 8]
        if kind not in _NOT_PIXELS or _orients(kind, content[place + 8 : end - 4]):
            chunks.append(content[place:end])
        place = end
    return b"".join(chunks)


def _orients(kind: bytes, body: bytes) -> bool:
    """Whether a chunk of a PNG is a text that may hold the orientation, and is short, as it is or decompressed."""
    if not body.startswith(_ORIENTED) or len(body) > PngImagePlugin.MAX_TEXT_CHUNK:
        return False
    text, unpacker = body.split(b"\0", 4 if kind == b"iTXt" else 2)[-1], zlib.decompressobj()
    try:
        unpacker.decompress(text, PngImagePlugin.MAX_TEXT_CHUNK)
    except zlib.error:  # not compressed
        return True
    return not unpacker.unconsumed_tail


def _by_pillow(image: Image.Image, content: bytes) -> Opened:
    """An image that Pillow opened; more than 8 bits are read by another reader."""
    args = image.tile[0].args if getattr(image, "tile", None) else ""
    channels, decode = len(image.getbands()), None
    if image.format == "PNG" and ";16" in args:
        channels = 2 if args.startswith("LA") else channels
        decode = imagecodecs.png_decode
    elif image.format == "PPM" and (image.mode == "I" or (isinstance(args, tuple) and args[-1] > 255)):
        decode = _ppm
    elif image.format == "JPEG2000" and (header := _J2K.search(content)) and header[1][0] & 0x7F > 7:
        decode = imagecodecs.jpeg2k_decode
    if decode is None:
        return _of_image(image)
    values = lambda: _planes(decode(content))  # noqa: E731
    orientation = partial(_exif_orientation, image)
    return Opened(image.height, image.width, channels, np.dtype(np.uint16), values, orientation=orientation)


def _of_image(image: Image.Image) -> Opened:
    """An image that Pillow has opened or made."""
    mode, dtype, picture = image.mode, np.dtype(np.uint8), partial(_rgb, image)
    if mode.startswith("I") or mode == "F":
        dtype, picture = np.dtype({"I": np.int32, "F": np.float32}.get(mode, np.uint16)), None
    elif mode not in ("L", "LA", "RGB", "RGBA", "CMYK"):
        mode = "L" if mode == "1" else "RGBA" if image.has_transparency_data else "RGB"
    values = lambda: _planes(np.asarray(image if image.mode == mode else image.convert(mode)))  # noqa: E731
    orientation = partial(_exif_orientation, image)
    return Opened(image.height, image.width, Image.getmodebands(mode), dtype, values, picture, orientation=orientation)


def _rgb(image: Image.Image) -> np.ndarray:
    """Returns a picture of 8 bits as :class:`Opened` has it. Pillow has turned a TIFF upright and dropped its tag."""
    made = image.convert("RGBA" if image.has_transparency_data else "RGB")
    return upright(np.array(made), _exif_orientation(image))


def _exif_orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION) or 1
    except Exception:  # a broken EXIF block does not spoil the pixels
        return 1


def _ppm(content: bytes) -> np.ndarray:
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # the BadImage below is the message
    array = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)  # [H, W], or [H, W, 3], blue first
    if array is None:
        raise BadImage("unreadable or truncated (16-bit PPM)")
    return array if array.ndim == 2 else array[:, :, ::-1]


# ---------------------------------------------------------------------- TIFF
def _tiff(stack: contextlib.ExitStack, content: bytes, max_pixels: int) -> Opened:
    """A TIFF, its pages and samples are channels. Smaller copies and masks are no pages.

    One page of 8 bits is a picture of Pillow's, which turns it upright by itself.
    """
    tif = stack.enter_context(tifffile.TiffFile(io.BytesIO(content)))
    every = [tif.pages[n] for n in range(len(tif.pages))]  # their count ends a chain that leads back
    pages = [page for page in every if not (page.is_reduced or page.is_mask)] or every[:1]
    for each in pages:
        check_pixels(each.imagewidth, each.imagelength, max_pixels)
        check_pixels(each.tilewidth, each.tilelength * each.tiledepth, max_pixels)
    page, picture = pages[0], None
    if page.dtype in (np.uint8, bool) and len(pages) == 1:
        with contextlib.suppress(UnidentifiedImageError):
            picture = _pillow_image(stack, content, max_pixels)
            picture.seek(page.index)
            if page.bitspersample != 8 or page.photometric == tifffile.PHOTOMETRIC.PALETTE:
                return replace(_of_image(picture), orientation=lambda: 1)
    samples, colours = page.samplesperpixel, getattr(page.photometric, "name", page.photometric)
    channels, fault = samples * len(pages), None
    extra = {int(kind) for kind in page.extrasamples}
    opaque = not extra & {1, 2}
    unknown = colours not in _COLOURS or (opaque and samples == 4 and colours != "RGB")
    if len(pages) > 1 or samples > 4 or (opaque and samples == 2) or (picture is None and unknown):
        fault = f"a TIFF of {channels} channels ({colours}); expected a page of grey, RGB or RGBA"
        fault += f", or {as_bands(channels)}"
    return Opened(
        page.imagelength,
        page.imagewidth,
        channels,
        page.dtype,
        partial(_pages, pages),
        None if picture is None else partial(_rgb, picture),
        fault,
        lambda: page.tags.valueof(_ORIENTATION, 1),
        opacity=picture is not None or not opaque,
        premultiplied=picture is None and 1 in extra,
    )


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
        read.append(_whole(values))
    return np.concatenate(read, axis=2) if len(read) > 1 else read[0]
