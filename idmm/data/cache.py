"""Every image read once: checked, hashed, bounded in size, and kept as pixels where memory allows."""

import hashlib
import logging
import os
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import torch
from tqdm import tqdm

from idmm import config
from idmm.data.images import BadImage, bound_short_side, decode, quiet_pillow, read
from idmm.data.memory import available_memory
from idmm.data.split import Split, counted
from idmm.errors import RunError, UserError, listed

log = logging.getLogger(__name__)

_MOST_LISTED = 20  # bad images named one by one


class ImageStore:
    """The images of a split as uint8 tensors, in the split's order; made by :func:`load_split`.

    Holds flat buffers only, which forked loader workers share.

    Attributes:
        sizes: Height and width after bounding, int64 [N, 2] (pixels).
        labels: int64 [N], or None.
        classes: Name of each label, or None.
        names: A name for each image that stays the same wherever the dataset lies.
        in_memory: Whether the decoded pixels are kept.
    """

    def __init__(
        self,
        split: Split,
        sizes: np.ndarray,
        digests: np.ndarray,
        pixels: np.ndarray | None,
        bound: int | None,
        max_pixels: int,
    ):
        self.names, self.labels, self.classes, self.sizes = split.names, split.labels, split.classes, sizes
        self.in_memory = pixels is not None
        self._digests = digests  # uint8 [N, 16]
        self._ends = np.cumsum(sizes.prod(axis=1) * 3)  # [N]
        self._pixels = torch.from_numpy(pixels) if self.in_memory else None  # uint8 [sum of H*W*3]
        self._bound, self._max_pixels = bound, max_pixels
        self._items = None if self.in_memory else _packed(split.items)

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
        if self.in_memory:
            end = int(self._ends[i])
            flat = self._pixels[end - 3 * h * w : end]
        else:
            flat = torch.from_numpy(self._decode_again(i))
        return flat.view(h, w, 3).permute(2, 0, 1)  # [3, H, W]

    def _decode_again(self, i: int) -> np.ndarray:
        item = self._items[i]
        item = os.fsdecode(item) if isinstance(item, bytes) else item
        try:
            array, digest = _load(item, self._bound, self._max_pixels)
        except BadImage as error:
            raise RunError(f"data.root: '{self.names[i]}' was fine when loaded, but now: {error.reason}") from error
        if digest != bytes(self._digests[i]):
            raise RunError(f"data.root: '{self.names[i]}' was changed while in use")
        return array.reshape(-1)


def load_split(split: Split, *, bound: int | None, data: config.Data, progress: bool = False) -> ImageStore:
    """Reads, checks, hashes and decodes all images of a split, in parallel.

    Args:
        split: From :func:`idmm.data.datasets.open_splits`.
        bound: Longest short side kept (pixels); None keeps all pixels.
        data: Says where to keep pixels (``cache``), what to do with bad files (``on_error``) and ``max_pixels``.
        progress: Show a bar on standard error if this takes longer than a second.

    Returns:
        The store; without the bad images where ``data.on_error`` is 'skip'.

    Raises:
        UserError: Bad images (all of them in one), none left, a class of which none is left, or too little memory
            for ``data.cache`` 'ram'.
    """
    buffer = _Buffer(len(split), data.cache)
    digests, sizes, good, bad = [], [], [], []
    with closing(_results(split, bound, data.max_pixels, progress)) as results:
        for i, result in enumerate(results):
            if isinstance(result, BadImage):
                bad.append((split.items[i], result.reason))
                continue
            array, digest = result  # [H, W, 3]
            buffer.add(array, i)
            digests.append(digest)
            sizes.append(array.shape[:2])
            good.append(i)
    if bad:
        _report(bad, split, np.array(good, dtype=np.int64), data.on_error)
        split = split.take(good)
    elif not good:
        raise UserError("data.root: there is no image to load")
    hashes = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16)  # [N, 16]
    return ImageStore(split, np.array(sizes, dtype=np.int64), hashes, buffer.finish(), bound, data.max_pixels)


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


def _load(item: str | np.ndarray, bound: int | None, max_pixels: int) -> tuple[np.ndarray, bytes]:
    """Returns an image, uint8 [H, W, 3], and the digest of its file or pixels."""
    content = read(item) if isinstance(item, str) else item.tobytes()
    array = decode(content, max_pixels) if isinstance(item, str) else item
    return bound_short_side(array, bound), hashlib.blake2b(content, digest_size=16).digest()


def _try_load(*args) -> tuple[np.ndarray, bytes] | BadImage:
    try:
        return _load(*args)
    except BadImage as error:
        return error
    except MemoryError as error:
        raise RunError(f"out of memory while decoding '{args[0]}'; a lower data.max_pixels refuses it") from error


def _results(split: Split, bound: int | None, max_pixels: int, progress: bool) -> Iterator:
    """Yields what became of each image, in order; a few are under way at a time, so that memory stays bounded."""
    threads = os.cpu_count() or 1
    waiting = deque()
    bar = _Bar(total=len(split), desc="reading images", unit="img", delay=1, disable=not progress)
    with quiet_pillow(), bar, ThreadPoolExecutor(threads) as pool:
        try:
            for item in split.items:
                waiting.append(pool.submit(_try_load, item, bound, max_pixels))
                if len(waiting) >= 4 * threads:
                    yield waiting.popleft().result()
                    bar.update()
            while waiting:
                yield waiting.popleft().result()
                bar.update()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for the queue


class _Bar(tqdm):
    monitor_interval = 0  # no monitor thread: loader workers are forked later


class _Buffer:
    """Pixels of all images end to end, grown without a second copy, given up where 'auto' runs out of its share."""

    def __init__(self, images: int, cache: str):
        self._images, self._cache, self._used = images, cache, 0
        self._flat = None if cache == "off" else np.empty(0, dtype=np.uint8)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # each process of a machine keeps its own copy
        self._limit = available_memory() // 2 // ranks if cache == "auto" else None

    def add(self, array: np.ndarray, i: int) -> None:
        """Appends image ``i`` of the split, uint8 [H, W, 3]."""
        if self._flat is None:
            return
        end = self._used + array.size
        if self._limit is not None and end > self._limit:
            self._give_up(f"more than {self._limit / 2**20:.0f} MiB, half of the free memory")
            return
        try:
            if end > self._flat.size:
                expected = end * self._images // (i + 1)
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
            raise UserError(f"data.cache: 'ram' needs {why}; wanted 'auto' or 'off'")
        log.info("data.cache: decoded images need %s, so they are decoded at every use", why)


def _report(bad: list[tuple[str, str]], split: Split, good: np.ndarray, on_error: str) -> None:
    """Raises, or with 'skip' warns, about the bad images."""
    lines = [f"  {path}: {reason}" for path, reason in bad[:_MOST_LISTED]]
    if len(bad) > _MOST_LISTED:
        lines.append(f"  and {len(bad) - _MOST_LISTED} more")
    count = f"{len(bad)} of {counted(len(split), 'image')}"
    if on_error == "fail":
        raise UserError(f"data.root: {count} cannot be used (--data.on_error skip leaves them out):", *lines)
    log.warning("data.root: left out %s that cannot be used:\n%s", count, "\n".join(lines))
    if not len(good):
        raise UserError(f"data.root: none of the {len(split)} images can be used:", *lines)
    if split.labels is not None:
        left = Counter(split.labels[good].tolist())
        empty = [split.classes[label] for label in np.unique(split.labels) if not left[int(label)]]
        if empty:
            raise UserError(f"data.root: no usable image is left of the classes {listed(empty)}")


def _packed(items: list[str] | np.ndarray) -> np.ndarray:
    """Returns paths as one buffer of bytes [N]; workers would copy the shared pages of strings to count references."""
    return items if isinstance(items, np.ndarray) else np.array([os.fsencode(path) for path in items])
