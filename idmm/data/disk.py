"""Decoded images in the cache folder, for later runs too: a folder for each split of a dataset at a bound.

A folder holds ``pixels-SIGNATURE`` (all images end to end) and ``index.npz``, which names the signature of the files
that they were decoded from and is written last. So whatever a kill leaves, an index only ever goes with its own pixels.
"""

import contextlib
import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import tifffile
import torch

from idmm import config
from idmm.data.images import Bands, Bound, CentreCrop, Scale, digest
from idmm.data.split import Split
from idmm.errors import RunError, reason
from idmm.files import Lock, replacing, sweep

log = logging.getLogger(__name__)

_FORMAT = "7"  # of these files and of what is done to the pixels


@dataclass(frozen=True)
class Index:
    """What is known of decoded images beside their pixels."""

    sizes: np.ndarray  # height and width of each good image, int64 [G, 2] (pixels)
    digests: np.ndarray  # BLAKE2b of each good image's file, uint8 [G, 16]
    good: np.ndarray  # their numbers in the split, int64 [G]
    bad: np.ndarray  # numbers of the others, int64 [B]
    reasons: np.ndarray  # what is wrong with those, text [B]
    range: np.ndarray  # what auto gives to images of more than 8 bits, float64 [1, 2], of bands [C, 2]; none: [0, 2]
    pixel_bytes: np.ndarray  # bytes of a pixel of each good image, of all its channels, int64 [G]
    channels: int = 3  # of the pixels
    file_channels: int = 0  # of the files, of which these are used; 0: pictures

    @property
    def ends(self) -> np.ndarray:
        """Where the pixels of each good image end, int64 [G] (bytes)."""
        return np.cumsum(self.sizes.prod(axis=1) * self.pixel_bytes)


def cache_folder(given: str | None) -> Path:
    """Returns ``data.cache_dir``, else $IDMM_CACHE, else the user's cache folder; RunError: no home to expand '~'."""
    usual = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "idmm")
    folder = Path(given or os.environ.get("IDMM_CACHE") or usual)
    try:
        return folder.expanduser()
    except RuntimeError:
        raise RunError(f"data.cache_dir: '{folder}' has no place, as there is no home folder") from None


class CacheEntry:
    """The place on the disk of one split (``part``: train, val or test) at one bound: the folder ``path``.

    Args:
        bound: What is kept of each image, as for :func:`idmm.data.cache.load_split`.
        data: The config's section: ``cache_dir``, and which dataset it is.
        scale: Of images deeper than 8 bits; AUTO: the range of these images.
        bands: Which channels there are; None: pictures.

    Raises:
        RunError: There is no place for it, see :func:`cache_folder`.
    """

    def __init__(self, split: Split, part: str, bound: Bound, data: config.Data, scale: Scale, bands: Bands | None):
        root = os.path.realpath(os.path.expanduser(data.root)) if data.root else None
        key = repr((data.name, root, part, bound, split.drawn, scale, bands)).encode("utf-8", "surrogateescape")
        pixels = bound.size if isinstance(bound, CentreCrop) else bound or "full"
        name = "".join(c if c.isalnum() else "-" for c in data.name)[-40:]
        self.path = cache_folder(data.cache_dir) / f"{name}-{part}-{pixels}-{digest(key).hex()[:10]}"
        self.signature = _signature(split, bound, data.max_pixels)
        self.pixels = self.path / f"pixels-{self.signature}"  # of all images end to end

    def read(self) -> Index | None:
        """Returns the index if the images are all here and their files unchanged."""
        try:
            with open(self.path / "index.npz", "rb") as file, np.load(file, allow_pickle=False) as arrays:
                content = {name: arrays[name] for name in arrays.files}
            if str(content.pop("signature")) != self.signature:
                return None
            index = Index(**{name: int(value) if value.ndim == 0 else value for name, value in content.items()})
            return index if self.pixels.stat().st_size == index.ends[-1:].sum() else None
        except Exception as error:  # not there, or torn: numpy and zipfile raise a dozen types
            log.debug("%s: %s", self.path, error)
            return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the others wait. What a kill left is removed. RunError: it cannot be written."""
        line = "cache: waiting for another process that fills '%s'"
        with contextlib.closing(Lock(self.path.with_name(f"{self.path.name}.lock"))) as lock:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock.acquire(lambda: log.info(line, self.path))
                sweep(self.path)
            except OSError as error:
                raise RunError(f"cannot write to '{self.path.parent}' ({reason(error)})") from None
            yield

    def write(self, decode: Callable[[Callable[[np.ndarray], None]], Index]) -> Index:
        """Writes the entry, in the place of what was there; to be called under the lock.

        ``decode`` gets a function that appends an image's pixels, and returns the index.

        Raises:
            RunError: The disk is full or cannot be written; the line names the file.
        """
        with replacing(self.pixels) as file:
            index = decode(lambda pixels: file.write(np.ascontiguousarray(pixels).data))
        with replacing(self.path / "index.npz") as file:
            np.savez(file, signature=np.array(self.signature), **vars(index))
        for old in self.path.glob("pixels-*"):
            if old != self.pixels:
                old.unlink(missing_ok=True)
        return index


def mapped(path: Path, count: int) -> torch.Tensor:
    """Opens a file of pixels, uint8 [count], to be read as it is used, by all processes of the machine together.

    Raises:
        RunError: It is gone or cut short.
    """
    try:
        pages = np.memmap(path, mode="r", shape=count)  # a map that may be written to would have to fit into memory
    except (OSError, ValueError) as error:  # ValueError: cut short
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{path}: decoded images cannot be read ({why}); the next run decodes them again") from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(pages)


def _signature(split: Split, bound: Bound, max_pixels: int) -> str:
    """Another one if any file was added, removed, renamed or written to, or would be decoded differently."""
    hashed = hashlib.blake2b(digest_size=16)
    versions = (PIL.__version__, tifffile.__version__)
    hashed.update(repr((_FORMAT, *versions, bound, max_pixels, len(split))).encode())
    hashed.update("\0".join(split.names).encode("utf-8", "surrogateescape"))  # paths differ with how root is written
    for path in split.items:
        try:
            found = os.stat(path)
            state = (found.st_size, found.st_mtime_ns, found.st_ctime_ns)  # ctime cannot be set back
        except OSError as error:
            state = error.errno
        hashed.update(repr(state).encode())
    return hashed.hexdigest()
