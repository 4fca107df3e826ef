"""Every image read once: checked, hashed, bounded in size, and kept as pixels in memory or on a disk."""

import hashlib
import logging
import os
import shlex
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import torch

from idmm import config
from idmm.data.disk import Index, Shelf, mapped
from idmm.data.images import BadImage, bound_short_side, bounded_size, decode, probe, read
from idmm.data.memory import available_memory
from idmm.data.parallel import in_order
from idmm.data.split import LazyFiles, Split, counted
from idmm.errors import RunError, UserError, listed
from idmm.progress import size as size_of

log = logging.getLogger(__name__)

_MOST_LISTED = 20  # bad images named one by one
_PROBED = 64  # images whose headers the size of a cache is estimated from


class ImageStore:
    """The images of a split as uint8 tensors, in the split's order; made by :func:`load_split`.

    Holds flat buffers only, which forked loader workers share.

    Attributes:
        sizes: Height and width after bounding, int64 [N, 2] (pixels).
        labels: int64 [N], or None.
        classes: Name of each label, or None.
        names: A name for each image that stays the same wherever the dataset lies.
        cache: Where the decoded pixels are: ``ram``, ``disk``, or ``off``: nowhere.
    """

    def __init__(
        self, split: Split, index: Index, pixels: np.ndarray | Path | None, bound: int | None, max_pixels: int
    ):
        self.names, self.labels, self.classes, self.sizes = split.names, split.labels, split.classes, index.sizes
        self.cache = "off" if pixels is None else "disk" if isinstance(pixels, Path) else "ram"
        self._digests = index.digests  # uint8 [N, 16]
        self._ends = np.cumsum(index.sizes.prod(axis=1) * 3)  # [N]
        self._source, self._pixels = pixels, None  # uint8 [sum of H*W*3], or its file
        self._bound, self._max_pixels = bound, max_pixels
        self._items = _packed(split.items) if pixels is None else None
        self._open()

    def _open(self) -> None:
        if self.cache == "disk":
            self._pixels = mapped(self._source, int(self._ends[-1]))
        elif self.cache == "ram":
            self._pixels = torch.from_numpy(self._source)

    def __getstate__(self) -> dict:
        return {**vars(self), "_pixels": None}  # a process of its own maps the file by itself

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def digests(self) -> list[str]:
        """BLAKE2b of each file's bytes, 32 hexadecimal digits."""
        return [bytes(row).hex() for row in self._digests]

    def image(self, i: int) -> torch.Tensor:
        """Returns image ``i``, uint8 [3, H, W]: a view of [H, W, 3] that must not be written to.

        Raises:
            RunError: Its file is gone or was changed since it was loaded (only where pixels are not kept).
        """
        i = range(len(self))[i]  # wraps -1, raises IndexError
        h, w = (int(side) for side in self.sizes[i])
        if self._pixels is not None:
            end = int(self._ends[i])
            flat = self._pixels[end - 3 * h * w : end]
        else:
            flat = torch.from_numpy(self._decode_again(i))
        return flat.view(h, w, 3).permute(2, 0, 1)  # [3, H, W]

    def _decode_again(self, i: int) -> np.ndarray:
        try:
            item = self._items[i]
            item = os.fsdecode(item) if isinstance(self._items, np.ndarray) and isinstance(item, bytes) else item
            array, digest = _load(item, self._bound, self._max_pixels)
        except BadImage as error:
            raise RunError(f"data.root: '{self.names[i]}' was fine when loaded, but now: {error.reason}") from error
        if digest != bytes(self._digests[i]):
            raise RunError(f"data.root: '{self.names[i]}' was changed while in use")
        return array.reshape(-1)


def load_split(
    split: Split, *, bound: int | None, data: config.Data, part: str = "train", progress: bool = False
) -> ImageStore:
    """Reads, checks, hashes and decodes all images of a split, in parallel; or finds that done on the disk.

    Args:
        split: From :func:`idmm.data.datasets.open_splits`.
        bound: Longest short side kept (pixels); None keeps all pixels.
        data: Says where to keep pixels (``cache``, ``cache_dir``), what to do with bad files (``on_error``) and
            ``max_pixels``.
        part: Which split this is: train, val or test.
        progress: Show a bar on standard error if this takes longer than a second.

    Returns:
        The store; without the bad images where ``data.on_error`` is 'skip'.

    Raises:
        UserError: Bad images (all of them in one), none left, a class of which none is left, too little memory for
            ``data.cache`` 'ram', or no place for 'disk'.
        RunError: The disk became full ('disk' only; 'auto' goes on in memory).
    """
    if not len(split):
        raise UserError("data.root: there is no image to load")
    loading = _Loading(split, bound, data, progress)
    if data.cache == "disk" or (data.cache == "auto" and not isinstance(split.items, np.ndarray)):
        store = _from_disk(loading, part)
        if store is not None:
            return store
    buffer = _Buffer(len(split), data.cache)
    index = loading.run(buffer.add)
    return loading.store(index, buffer.finish())


def _from_disk(loading: "_Loading", part: str) -> ImageStore | None:
    """Opens the split's shelf, filling it first if need be; None where 'auto' had better keep the images elsewhere."""
    must = loading.data.cache == "disk"
    try:
        shelf = Shelf(loading.split, part, loading.bound, loading.data)
        store = _opened(loading, shelf)
        if store is None:
            with shelf.locked():
                store = _opened(loading, shelf)  # another process may have filled it
                if store is None and loading.fits(shelf, must):
                    store = loading.store(shelf.write(loading.run), shelf.pixels)
                    where = f" --dir {shlex.quote(loading.data.cache_dir)}" if loading.data.cache_dir else ""
                    command = f"idmm data cache --clear{where}"
                    log.info("cache: kept in '%s' for later runs; clear all that is kept: %s", shelf.path, command)
        return store
    except UserError as error:
        if must or loading.judged:
            raise
        log.info("%s: using memory instead", error)
    except RunError as error:
        if must:
            raise
        log.warning("%s: using memory instead", error)
    return None


def _opened(loading: "_Loading", shelf: Shelf) -> ImageStore | None:
    """Returns what lies on a shelf; None unless it is whole."""
    index = shelf.read()
    if index is None:
        return None
    loading.judge(index)
    try:
        return loading.store(index, shelf.pixels)
    except RunError as error:  # cleared since, or filled with something else
        log.debug("%s", error)
        return None


class _Loading:
    """Decodes a split, once or again.

    Attributes:
        judged: Whether the bad images were reported.
    """

    def __init__(self, split: Split, bound: int | None, data: config.Data, progress: bool):
        self.split, self.bound, self.data, self.progress, self.judged = split, bound, data, progress, False

    def run(self, keep: Callable[[np.ndarray], None]) -> Index:
        """Hands each good image, uint8 [H, W, 3], to ``keep``, in order."""
        digests, sizes, good, bad, reasons = [], [], [], [], []
        given = (self.split, self.bound, self.data.max_pixels)
        looks = in_order(lambda i: _try_load(*given, i), len(self.split), "reading images", self.progress)
        with closing(looks) as results:
            for i, result in enumerate(results):
                if isinstance(result, BadImage):
                    bad.append(i)
                    reasons.append(result.reason)
                    continue
                array, digest = result  # [H, W, 3]
                keep(array)
                digests.append(digest)
                sizes.append(array.shape[:2])
                good.append(i)
        index = Index(
            sizes=np.array(sizes, dtype=np.int64).reshape(-1, 2),
            digests=np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16),
            good=np.array(good, dtype=np.int64),
            bad=np.array(bad, dtype=np.int64),
            reasons=np.array(reasons, dtype=np.str_),
        )
        self.judge(index)
        return index

    def judge(self, index: Index) -> None:
        """Raises, or with 'skip' warns, about the bad images; once."""
        if not self.judged:
            self.judged = True
            _report(index, self.split, self.data.on_error)

    def store(self, index: Index, pixels: np.ndarray | Path | None) -> ImageStore:
        """Returns the good images."""
        split = self.split.take(index.good) if len(index.bad) else self.split
        return ImageStore(split, index, pixels, self.bound, self.data.max_pixels)

    def fits(self, shelf: Shelf, must: bool) -> bool:
        """Whether the decoded images have room on the disk, and may have it."""
        need, free = self.estimate(), shelf.free()
        if need > (free if must else free // 2):
            what = f"'{shelf.folder_of_all}' has {size_of(free)} free, the decoded images need about {size_of(need)}"
            if must:
                raise UserError(f"data.cache_dir: {what}; name another folder, or --data.cache ram or off")
            log.info("cache: %s: not kept there", what)
            return False
        log.info("cache: decoding %s, about %s", counted(len(self.split), "image"), size_of(need))
        return True

    def estimate(self) -> int:
        """Bytes of all decoded images, from the headers of a few."""
        items = self.split.items
        if isinstance(items, np.ndarray):
            h, w = bounded_size(*items.shape[1:3], self.bound)
            return len(items) * h * w * 3
        chosen = np.unique(np.linspace(0, len(items) - 1, _PROBED).astype(int))
        total = 0  # bad images take no room
        for i in chosen:
            with suppress(BadImage):
                h, w = bounded_size(*probe(items[i], self.data.max_pixels), self.bound)
                total += h * w * 3
        return round(total * len(items) / len(chosen))


def fingerprint(store: ImageStore) -> dict:
    """Returns what identifies the images, for JSON: ``{"classes": [...] or None, "images": {name: "digest label"}}``.

    Digests are cut to 16 hexadecimal digits; labels are left out where there are none. The order counts.
    """
    labels = [""] * len(store) if store.labels is None else [f" {label}" for label in store.labels]
    entries = zip(store.names, store.digests, labels, strict=True)
    return {"classes": store.classes, "images": {name: digest[:16] + label for name, digest, label in entries}}


def compare(old: dict, new: dict) -> list[str]:
    """Says in a few lines how two fingerprints differ; an empty list if image i is still image i."""
    before, now = _parsed(old), _parsed(new)
    both = [name for name in before if name in now]
    groups = {
        "removed": [name for name in before if name not in now],
        "added": [name for name in now if name not in before],
        "changed": [name for name in both if before[name][0] != now[name][0]],
        "relabelled": [
            f"{name} ({before[name][1]} to {now[name][1]})" for name in both if before[name][1] != now[name][1]
        ],
    }
    lines = [f"{counted(len(names), 'image')} {what}: {listed(names)}" for what, names in groups.items() if names]
    moved = [name for name, other in zip(both, (n for n in now if n in before), strict=True) if name != other]
    if moved:
        lines.append(f"{counted(len(moved), 'image')} in another order: {listed(moved)}")
    if not lines and old["classes"] != new["classes"]:
        lines.append("the list of classes is another")
    return lines


def _parsed(print_: dict) -> dict[str, tuple[str, str]]:
    """Returns name → (digest, class name)."""
    parts = {name: entry.partition(" ") for name, entry in print_["images"].items()}
    classes = print_["classes"]
    return {name: (p[0], f"'{classes[int(p[2])]}'" if p[2] else "no label") for name, p in parts.items()}


def _load(item: str | bytes | np.ndarray, bound: int | None, max_pixels: int) -> tuple[np.ndarray, bytes]:
    """Returns an image, uint8 [H, W, 3], and the digest of its file or pixels."""
    if isinstance(item, np.ndarray):
        content, array = item.tobytes(), item
    else:
        content = read(item) if isinstance(item, str) else item
        array = decode(content, max_pixels)
    return bound_short_side(array, bound), _digest(content)


def file_digest(path: str) -> str:
    """Returns a file's digest as :func:`fingerprint` has it."""
    return _digest(read(path)).hex()[:16]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _try_load(split: Split, bound: int | None, max_pixels: int, i: int) -> tuple[np.ndarray, bytes] | BadImage:
    try:
        return _load(split.items[i], bound, max_pixels)
    except BadImage as error:
        return error
    except MemoryError as error:
        where = split.place(i)
        raise RunError(f"out of memory while decoding '{where}'; a lower data.max_pixels refuses it") from error


class _Buffer:
    """Pixels of all images end to end, grown without a second copy, given up where 'auto' runs out of its share."""

    def __init__(self, images: int, cache: str):
        self._images, self._cache, self._used, self._seen = images, cache, 0, 0
        self._flat = None if cache == "off" else np.empty(0, dtype=np.uint8)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # each process of a machine keeps its own copy
        self._limit = available_memory() // 2 // ranks if cache == "auto" else None

    def add(self, array: np.ndarray) -> None:
        """Appends an image, uint8 [H, W, 3]."""
        if self._flat is None:
            return
        self._seen += 1
        end = self._used + array.size
        if self._limit is not None and end > self._limit:
            self._give_up(f"more than {self._limit / 2**20:.0f} MiB, half of the free memory")
            return
        try:
            if end > self._flat.size:
                expected = end * self._images // self._seen
                # resize zeroes what it adds, so a first large image must not make it add too much
                self._resize(max(end, min(2 * self._flat.size, expected + expected // 50)))
        except MemoryError:
            self._give_up("more memory than there is")
            return
        self._flat[self._used : end] = array.reshape(-1)
        self._used = end

    def finish(self) -> np.ndarray | None:
        """Returns the pixels, uint8 [sum of H*W*3]; None where they are not kept."""
        if self._flat is not None:
            self._resize(self._used)
        return self._flat

    def _resize(self, size: int) -> None:
        self._flat.resize(size, refcheck=False)  # realloc: large blocks move by page table, not by copy

    def _give_up(self, why: str) -> None:
        self._flat = None
        if self._cache == "ram":
            raise UserError(f"data.cache: 'ram' needs {why}; wanted 'auto', 'disk' or 'off'")
        log.info("data.cache: decoded images need %s, so they are decoded at every use", why)


def _report(index: Index, split: Split, on_error: str) -> None:
    bad = [(split.place(i), reason) for i, reason in zip(index.bad.tolist(), index.reasons.tolist(), strict=True)]
    if not bad:
        return
    lines = [f"  {path}: {reason}" for path, reason in bad[:_MOST_LISTED]]
    if len(bad) > _MOST_LISTED:
        lines.append(f"  and {len(bad) - _MOST_LISTED} more")
    count = f"{len(bad)} of {counted(len(split), 'image')}"
    if on_error == "fail":
        raise UserError(f"data.root: {count} cannot be used (--data.on_error skip leaves them out):", *lines)
    log.warning("data.root: left out %s that cannot be used:\n%s", count, "\n".join(lines))
    if not len(index.good):
        raise UserError(f"data.root: none of the {len(split)} images can be used:", *lines)
    if split.labels is not None:
        left = Counter(split.labels[index.good].tolist())
        empty = [split.classes[label] for label in np.unique(split.labels) if not left[int(label)]]
        if empty:
            raise UserError(f"data.root: no usable image is left of the classes {listed(empty)}")


def _packed(items: list[str] | np.ndarray | LazyFiles) -> np.ndarray | LazyFiles:
    """Returns paths as one buffer of bytes [N]; workers would copy the shared pages of strings to count references."""
    return items if isinstance(items, (np.ndarray, LazyFiles)) else np.array([os.fsencode(path) for path in items])
