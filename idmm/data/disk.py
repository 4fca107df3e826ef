"""Decoded images on a disk, for later runs: a folder each for a dataset's split at a bound.

A folder holds ``pixels-SIGNATURE`` (all images end to end) and ``index.npz``, which names the signature of the files
that they were decoded from and is written last. So whatever a kill leaves, an index only ever goes with its own pixels.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import torch

from idmm import config
from idmm.data.split import LazyFiles, Split
from idmm.errors import RunError, UserError
from idmm.files import replacing, sweep, write_text
from idmm.locks import Lock

log = logging.getLogger(__name__)

_FORMAT = "1"  # of these files and of what is done to the pixels
_NAME = re.compile(r".+-(train|val|test)-(full|[0-9]+)-[0-9a-f]{10}")  # of a shelf
_FILE = re.compile(r"\.?(pixels-|about\.json|index\.npz)")  # in one


@dataclass(frozen=True)
class Index:
    """What is known of decoded images beside their pixels.

    Attributes:
        sizes: Height and width of each good image, int64 [G, 2] (pixels).
        digests: BLAKE2b of each good image's file, uint8 [G, 16].
        good: Their numbers in the split, int64 [G].
        bad: Numbers of the others, int64 [B].
        reasons: What is wrong with those, text [B].
    """

    sizes: np.ndarray
    digests: np.ndarray
    good: np.ndarray
    bad: np.ndarray
    reasons: np.ndarray

    @property
    def count(self) -> int:
        """Bytes of the pixels."""
        return int(self.sizes.prod(axis=1).sum()) * 3


def cache_folder(given: str | None) -> Path:
    """Returns ``data.cache_dir``, else $IDMM_CACHE, else the user's cache folder.

    Raises:
        UserError: It is under '~', but this user has no home.
    """
    usual = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "idmm")
    folder = Path(given or os.environ.get("IDMM_CACHE") or usual)
    try:
        return folder.expanduser()
    except RuntimeError:
        raise UserError(f"data.cache_dir: '{folder}' has no place, as there is no home folder; name another") from None


class Shelf:
    """The place of one split at one bound.

    Args:
        split: Its images.
        part: ``train``, ``val`` or ``test``.
        bound: Longest short side kept (pixels), or None.
        data: The config's section: ``cache_dir``, and which dataset it is.
    """

    def __init__(self, split: Split, part: str, bound: int | None, data: config.Data):
        self.folder_of_all = cache_folder(data.cache_dir)
        root = os.path.realpath(os.path.expanduser(data.root)) if data.root else None
        key = repr((data.name, root, part, bound, split.drawn))
        name = "".join(c if c.isalnum() else "-" for c in data.name)[-40:]
        self.path = self.folder_of_all / f"{name}-{part}-{bound or 'full'}-{_hash(key)[:10]}"
        self.signature = _signature(split, bound, data.max_pixels)
        self.about = {"dataset": data.name, "root": root, "split": part, "bound": bound}

    @property
    def pixels(self) -> Path:
        """The file of pixels."""
        return self.path / f"pixels-{self.signature}"

    def read(self) -> Index | None:
        """Returns the index if the images are all here and their files unchanged."""
        try:
            (self.path / "about.json").stat()
            with open(self.path / "index.npz", "rb") as file, np.load(file, allow_pickle=False) as arrays:
                content = {name: arrays[name] for name in arrays.files}
            if str(content.pop("signature")) != self.signature:
                return None
            index = Index(**content)
            return index if self.pixels.stat().st_size == index.count else None
        except Exception as error:  # not there, or torn: numpy and zipfile raise a dozen types
            log.debug("%s: %s", self.path, error)
            return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the others wait. What a kill left is removed.

        Raises:
            UserError: The folder cannot be written.
        """

        def waiting(owner: dict) -> None:
            log.info("cache: waiting for another process that fills '%s'", self.path)

        with contextlib.closing(Lock(self.path)) as lock:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock.acquire("always", waiting)
                sweep(self.path)
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                raise UserError(
                    f"data.cache_dir: cannot write to '{self.folder_of_all}' ({why}); name another folder, or"
                    " --data.cache ram"
                ) from None
            yield

    def write(self, fill: Callable[[Callable[[np.ndarray], None]], Index]) -> Index:
        """Fills the shelf, in the place of what was there; to be called under the lock.

        Args:
            fill: Called with a function that appends an image's pixels; returns the index.

        Raises:
            RunError: The disk is full or cannot be written; the line names the file.
        """

        with replacing(self.pixels) as file:

            def append(pixels: np.ndarray) -> None:
                file.write(np.ascontiguousarray(pixels).data)

            index = fill(append)
        about = {**self.about, "images": len(index.good), "bytes": index.count, "made": round(time.time())}
        write_text(self.path / "about.json", json.dumps(about) + "\n")
        with replacing(self.path / "index.npz") as file:
            np.savez(file, signature=np.array(self.signature), **vars(index))
        for old in self.path.glob("pixels-*"):
            if old != self.pixels:
                old.unlink(missing_ok=True)
        return index

    def free(self) -> int:
        """Bytes free on its disk."""
        folder = self.path
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free


def mapped(path: Path, count: int) -> torch.Tensor:
    """Opens a file of pixels, uint8 [count], to be read as it is used, by all processes of the machine together.

    Raises:
        RunError: It is gone or cut short.
    """
    try:
        with open(path, "rb") as file:  # a map that may be written to would have to fit into memory
            pages = mmap.mmap(file.fileno(), count, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: cut short
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{path}: decoded images cannot be read ({why}); the next run decodes them again") from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(pages, dtype=torch.uint8)


def shelves(folder: Path) -> list[dict]:
    """Returns what lies in a cache folder: ``dataset root split bound images bytes path`` each; None where unknown."""
    found = []
    for path in sorted(p for p in folder.glob("*") if _is_shelf(p)):
        about = dict.fromkeys(("dataset", "root", "split", "bound", "images"))
        with contextlib.suppress(OSError, ValueError, TypeError):
            about |= json.loads((path / "about.json").read_text())
        size = 0
        with contextlib.suppress(OSError):  # being removed
            for file in path.iterdir():
                size += file.stat().st_size
        found.append({**about, "bytes": size, "path": path})
    return found


def clear(folder: Path) -> tuple[int, list[Path]]:
    """Removes all shelves but those being filled now; running programs keep what they have opened.

    Returns:
        Bytes that were freed, and the shelves that were left.

    Raises:
        RunError: One cannot be removed.
    """
    freed, left = 0, []
    for shelf in shelves(folder):
        path = shelf["path"]
        lock = Lock(path)
        try:
            if not lock.acquire():
                left.append(path)
                continue
            with contextlib.suppress(FileNotFoundError):  # somebody else cleared it
                shutil.rmtree(path)
        except OSError as error:
            raise RunError(f"{error.filename or path}: cannot be removed ({error.strerror})") from None
        finally:
            lock.release()
        freed += shelf["bytes"]
    return freed, left


def _is_shelf(path: Path) -> bool:
    """Nothing else in the folder is ours to remove."""
    if not (_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()):
        return False
    return (path / "index.npz").exists() or all(_FILE.match(file.name) for file in path.iterdir())


def _signature(split: Split, bound: int | None, max_pixels: int) -> str:
    """Another one if any file was added, removed, renamed or written to, or would be decoded differently."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((_FORMAT, PIL.__version__, bound, max_pixels, len(split))).encode())
    digest.update("\0".join(split.names).encode("utf-8", "surrogateescape"))  # paths differ with how root is written
    if isinstance(split.items, LazyFiles):
        digest.update(split.items.version.encode())
    elif isinstance(split.items, np.ndarray):
        digest.update(repr(split.items.shape).encode())
        digest.update(np.ascontiguousarray(split.items).data)
    else:
        for path in split.items:
            digest.update(_state(path))
    return digest.hexdigest()


def _state(path: str) -> bytes:
    try:
        state = os.stat(path)
    except OSError as error:
        return repr(error.errno).encode()
    return repr((state.st_size, state.st_mtime_ns, state.st_ctime_ns)).encode()  # ctime cannot be set back


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
