"""What is known of an image file before its pixels are read, and what all its readers share."""

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .bmp .dib .gif .tif .tiff .webp .ppm .pgm .pbm .pnm .pfm"
    " .jp2 .j2k .jpx .jpf .ico .avif .qoi .npy .npz".split()
)
ORIENTATION = 0x0112  # EXIF's tag, which TIFF has, too
PICTURE_CHANNELS = (1, 3)  # of an array


class BadImage(ValueError):
    """A file that cannot be used as an image; ``reason`` says why in a few words, without the file's name.

    ``pages`` counts the pictures in it where these are too many.
    """

    def __init__(self, reason: str, pages: int = 1):
        super().__init__(reason)
        self.reason, self.pages = reason, pages


@dataclass(frozen=True)
class Opened:
    """An image file whose header was read."""

    height: int
    """As stored, before EXIF turns it (pixels)."""
    width: int
    channels: int
    bits: str
    """What its numbers are where they are no 8 bits, for people: 16-bit, float; else empty."""
    values: Callable[[], np.ndarray]
    """Reads the channels, [H, W, C] as stored, in the file's own numbers; those of 8 bits, and bool, are uint8."""
    picture: Callable[[], Image.Image] | None = None
    """Reads a picture of 8 bits; None: it is no such picture."""
    full: tuple[float, float] | None = None
    """All values that its numbers can have; None where that is no range to scale by (floats, 32 bits)."""
    fault: str | None = None
    """Why it is no picture."""
    pages: int = 1
    """Pictures in it, without previews."""
    orientation: Callable[[], int] = lambda: 1
    """Finds EXIF's, after the pixels were read: of a PNG it stands behind them."""
    transparent: Any = None
    """The value, or the colour, that stands for a transparent pixel in ``values``; None: there is none."""
    cmyk: bool = False
    """Its four channels are inks."""
    shape: str = ""
    """Of an array or a stack of pages, for people."""


class NeedsMore(Exception):
    """Raised within :func:`opened` for another reason than the file."""


def unreadable(error: Exception) -> BadImage:
    """Returns what is said of a file on which a reader failed."""
    text = " ".join(str(error).split())[:100] or type(error).__name__
    return BadImage(f"unreadable or truncated ({text})")


def check_pixels(sizes: list[tuple[int, int]], max_pixels: int) -> None:
    """Raises BadImage where one of the sizes (width, height) has too many pixels."""
    for w, h in sizes:
        if w * h > max_pixels:
            raise BadImage(f"{w} x {h} = {w * h} pixels, more than data.max_pixels {max_pixels}")


def as_bands(channels: int) -> str:
    """Returns the flag by which files of so many channels are used as they are; 1 and 3 alone would mean pictures."""
    if channels in PICTURE_CHANNELS:
        return f"--data.bands '{list(range(channels))}'"
    return f"--data.in_chans {channels}"


def channels_first(shape: Sequence[int], wanted: Collection[int]) -> bool:
    """Whether an array of three axes is [C, H, W], not [H, W, C]: by which of the two, the last before the first, has a
    number of channels that is wanted, else which is shorter."""
    shorter = 0 if shape[0] < shape[-1] else 2
    return next((axis for axis in (2, 0) if shape[axis] in wanted), shorter) == 0


def upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """Turns an image [H, W, ...] as EXIF's orientation says."""
    if orientation in (5, 6, 7, 8):
        array = array.swapaxes(0, 1)
    rows, columns = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return array[:: -1 if rows else 1, :: -1 if columns else 1]


_lock, _depth, _undo = threading.Lock(), 0, contextlib.ExitStack()


@contextlib.contextmanager
def quiet_readers():
    """Inside, the readers neither warn nor set a limit of their own to pixels; outside, they are as they were.

    Counted, so that threads may decode side by side: the first in changes the settings, the last out restores them.
    """
    global _depth
    with _lock:
        if not _depth:
            _undo.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"PIL\.")  # broken EXIF and the like
            log = logging.getLogger("tifffile")
            for of, name, value in ((Image, "MAX_IMAGE_PIXELS", None), (log, "disabled", True)):
                _undo.callback(setattr, of, name, getattr(of, name))
                setattr(of, name, value)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                _undo.close()


# ---------------------------------------------------------------------- numbers
def numbers(dtype: np.dtype, bits: int | None = None) -> tuple[str, tuple[float, float] | None]:
    """Returns ``bits`` and ``full`` of :class:`Opened` for numbers of a type, of which the file uses so many bits."""
    if dtype.kind not in "buif":
        raise BadImage(f"holds values of type {dtype}; wanted integers, floats or true and false")
    if dtype.kind == "b" or dtype == np.uint8:
        return "", None
    if dtype.kind == "f":
        return "float", None
    bits = bits or dtype.itemsize * 8
    signed = "signed " if dtype.kind == "i" and bits < 32 else ""
    return f"{signed}{bits}-bit", None if dtype.kind == "i" or bits > 16 else (0.0, 2.0**bits - 1)


def plain(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint8) * 255 if values.dtype == bool else values
