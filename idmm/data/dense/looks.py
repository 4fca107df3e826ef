"""Sizes of images and values of masks, found by looking at each file once."""

import contextlib
from dataclasses import dataclass

import numpy as np

from idmm.data.dense.targets import mask_values, short_digest
from idmm.data.formats import BadImage, opened
from idmm.data.images import read
from idmm.data.parallel import in_order
from idmm.data.split import Split

VALUES = 256  # that a mask may have


@dataclass(frozen=True)
class Looks:
    """What is known of N files."""

    sizes: np.ndarray  # height and width, upright, int64 [N, 2] (pixels); 0 of a file that cannot be used
    values: np.ndarray  # of masks: whether it has pixels of a value, bool [N, 256]
    digests: np.ndarray  # of masks: of the file's bytes, text [N]
    reasons: np.ndarray  # why it cannot be used, else empty, text [N]


@dataclass(frozen=True)
class _Look:
    size: tuple[int, int]
    values: np.ndarray  # those that there are
    digest: str = ""


def look_at(split: Split, kind: str, max_pixels: int, progress: bool) -> Looks:
    """Looks at each file.

    Args:
        split: The files.
        kind: ``images`` or ``masks``.
        max_pixels: Images with more pixels are refused (pixels).
        progress: Show a bar on standard error if this takes longer than a second.
    """
    work = {"images": _image, "masks": _mask}[kind]
    sizes, values = np.zeros((len(split), 2), dtype=np.int64), np.zeros((len(split), VALUES), dtype=bool)
    digests, reasons = [], []
    with contextlib.closing(
        in_order(lambda i: work(split.items[i], max_pixels), len(split), split.place, f"looking at {kind}", progress)
    ) as results:
        for i, look in enumerate(results):
            bad = isinstance(look, BadImage)
            reasons.append(look.reason if bad else "")
            digests.append("" if bad else look.digest)
            if not bad:
                sizes[i], values[i, look.values] = look.size, True
    return Looks(sizes, values, np.array(digests, dtype=np.str_), np.array(reasons, dtype=np.str_))


def _image(path: str, max_pixels: int) -> _Look:
    with opened(read(path), max_pixels) as image:
        turned = image.orientation() in (5, 6, 7, 8)
        size = (image.width, image.height) if turned else (image.height, image.width)
    return _Look(size, np.zeros(0, dtype=np.int64))


def _mask(path: str, max_pixels: int) -> _Look:
    content = read(path)
    values = mask_values(content, max_pixels)
    found = np.flatnonzero(np.bincount(values.ravel()))
    if found[-1] >= VALUES:
        raise BadImage(f"has the value {found[-1]}; wanted classes up to 254, and 255 for what is ignored")
    return _Look(values.shape, found, short_digest(content))
