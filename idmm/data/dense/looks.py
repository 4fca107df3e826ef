"""Sizes of images and values of masks, found by looking at each file once and remembered with the decoded images."""

import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from idmm import config
from idmm.data.dense.targets import mask_values, short_digest
from idmm.data.depth import in_order
from idmm.data.disk import CacheEntry
from idmm.data.formats import opened
from idmm.data.images import read
from idmm.data.raw import BadImage
from idmm.data.split import Split
from idmm.errors import RunError, UserError
from idmm.files import replacing, write_text

log = logging.getLogger(__name__)

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


def look_at(split: Split, part: str, kind: str, data: config.Data, progress: bool) -> Looks:
    """Looks at each file, or finds that done on the disk.

    Args:
        split: The files.
        part: Which part of the dataset they are of: train, val or test.
        kind: ``images`` or ``masks``.
        data: The config's section: ``max_pixels``, and whether and where things are kept.
        progress: Show a bar on standard error if this takes longer than a second.
    """
    split = replace(split, drawn=f"looked at as {kind}")  # which tells it from decoded images
    entry = CacheEntry(split, part, None, data) if data.cache in ("auto", "disk") else None
    if entry is not None and (found := _found(entry)) is not None:
        return found
    work = {"images": _image, "masks": _mask}[kind]
    found = _gathered(split, work, data.max_pixels, f"looking at {kind}", progress)
    if entry is not None:
        with contextlib.suppress(UserError, RunError, OSError):  # then they are looked at again
            _remember(entry, found)
    return found


def _gathered(split: Split, work: Callable, max_pixels: int, label: str, progress: bool) -> Looks:
    sizes, values = np.zeros((len(split), 2), dtype=np.int64), np.zeros((len(split), VALUES), dtype=bool)
    digests, reasons = [], []
    with contextlib.closing(
        in_order(lambda i: work(split.items[i], max_pixels), len(split), split.place, label, progress)
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


def _found(entry: CacheEntry) -> Looks | None:
    try:
        with np.load(entry.path / "index.npz", allow_pickle=False) as arrays:
            content = {name: arrays[name] for name in arrays.files}
        return Looks(**content) if str(content.pop("signature")) == entry.signature else None
    except Exception as error:  # not there, or torn: numpy and zipfile raise a dozen types
        log.debug("%s: %s", entry.path, error)
        return None


def _remember(entry: CacheEntry, found: Looks) -> None:
    with entry.locked():
        about = {**entry.about, "images": len(found.sizes), "bytes": found.values.nbytes, "made": round(time.time())}
        write_text(entry.path / "about.json", json.dumps(about) + "\n")
        with replacing(entry.path / "index.npz") as file:
            np.savez_compressed(file, signature=np.array(entry.signature), **vars(found))
