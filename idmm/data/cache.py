"""Every image read once: checked, hashed, bounded in size, and kept as pixels in the cache folder."""

import logging
import math
import operator
import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import torch

from idmm import config
from idmm.data.depth import each_scaled, ends_of, range_of, tidy
from idmm.data.disk import CacheEntry, Index, mapped
from idmm.data.formats import BadImage
from idmm.data.images import (
    AUTO,
    Bands,
    Bound,
    CentreCrop,
    Decoded,
    Scale,
    bands_of,
    digest,
    fitted,
    fitted_size,
    header,
    read,
    read_image,
)
from idmm.data.split import Split, counted
from idmm.errors import RunError, UserError, by_reason, capped, listed
from idmm.progress import size as size_of

log = logging.getLogger(__name__)

_PROBED = 64  # images whose headers the size of a cache is estimated from


class ImageStore:
    """The images of a split as uint8 or uint16 tensors, in the split's order; made by :func:`load_split`.

    Holds flat buffers only, which forked loader workers share. ``names``, ``labels``, ``classes`` and ``groups`` are
    the split's, ``bound`` is what is kept of each image, ``sizes`` its height and width (pixels, int64 [N, 2]) and
    ``pixel_bytes`` what a pixel takes, all channels (bytes, [N]). ``extremes`` are the index's. ``scale`` is the range
    of images of more than 8 bits, or those of channels; None: there are none. ``channels`` counts those of an image: 3
    of pictures. ``decodes``: an image is decoded at each use.

    Args:
        split: The images.
        index: What is known of them.
        pixels: The file of all images end to end; None: they are decoded at each use.
        bound: Longest short side (pixels), or the centre crop that images are finished to; None: all of them is kept.
        max_pixels: Images with more pixels are refused (pixels).
        scale: Of images deeper than 8 bits; AUTO: by the range of these images.
        bands: Channels that there are; None: pictures.
    """

    def __init__(
        self,
        split: Split,
        index: Index,
        pixels: Path | None,
        bound: Bound,
        max_pixels: int,
        scale: Scale,
        bands: Bands | None = None,
    ):
        self.names, self.labels, self.classes, self.sizes = split.names, split.labels, split.classes, index.sizes
        self.groups, self.channels = split.groups, index.channels
        self.bands = bands and bands._replace(count=index.file_channels)
        self.extremes, self._digests = index.extremes, index.digests
        found = range_of(index.extremes)
        self.scale = found if found is None or scale == AUTO else scale
        self._ends, self.pixel_bytes = index.ends, index.pixel_bytes  # [N]
        self._file, self.bound, self._max_pixels = pixels, bound, max_pixels
        self._items = split.items if pixels is None else None
        self.decodes = pixels is None and not isinstance(split.items, np.ndarray)
        if isinstance(self._items, list):  # workers would copy the shared pages of strings to count references
            self._items = np.array([os.fsencode(path) for path in self._items])
        self._pixels = self._open()

    def _open(self) -> torch.Tensor | None:  # uint8 [bytes of all images]
        return None if self._file is None else mapped(self._file, int(self._ends[-1]))

    def __getstate__(self) -> dict:
        return {**vars(self), "_pixels": None}  # a process of its own maps the file by itself

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._pixels = self._open()

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def digests(self) -> list[str]:
        """BLAKE2b of each file's bytes, 32 hexadecimal digits."""
        text = self._digests.tobytes().hex()  # in one go: there may be millions
        return [text[at : at + 32] for at in range(0, len(text), 32)]

    def image(self, i: int) -> torch.Tensor:
        """Returns image ``i``, uint8 [C, H, W], or uint16 where it has more than 8 bits: a view of [H, W, C] that must
        not be written to. :func:`idmm.data.images.unit` makes floats of it.

        Where ``bound`` is a centre crop it is that, [C, size, size].

        Raises:
            RunError: Its file is gone or was changed since it was loaded (only if it is decoded at each use).
        """
        i = range(len(self))[i]  # wraps -1, raises IndexError
        if self._pixels is not None:
            (h, w), each, end = self.sizes[i].tolist(), int(self.pixel_bytes[i]), int(self._ends[i])
            flat = self._pixels[end - h * w * each : end]
            if each > self.channels:
                flat = (flat.clone() if flat.storage_offset() % 2 else flat).view(torch.uint16)
            image = flat.view(h, w, self.channels)
        else:
            image = torch.from_numpy(self._decode_again(i))  # [H, W, C]
        if isinstance(self.bound, CentreCrop) and image.shape[:2] != (self.bound.size, self.bound.size):  # kept whole
            image = torch.from_numpy(self.bound(image.numpy()))
        return image.permute(2, 0, 1)  # [C, H, W]

    def _decode_again(self, i: int) -> np.ndarray:
        try:
            item = self._items[i]
            if isinstance(item, np.ndarray) and self.bands is None:
                return fitted(item, self.bound)
            item = os.fsdecode(item) if isinstance(item, np.bytes_) else item
            pixels, _, found = read_image(item, self._max_pixels, self.scale, self.bands, measure=False)
        except BadImage as error:
            raise RunError(f"data.root: '{self.names[i]}' was fine when loaded, but now: {error.reason}") from error
        if found != bytes(self._digests[i]):
            raise RunError(f"data.root: '{self.names[i]}' was changed while in use")
        return fitted(pixels, self.bound)


def load_split(
    split: Split,
    *,
    bound: Bound,
    data: config.Data,
    part: str = "train",
    progress: bool = False,
    scale: Scale | None = None,
    bands: Bands | None = None,
    again: bool = False,
) -> ImageStore:
    """Reads, checks, hashes and decodes all images of a split, in parallel; or finds that done on the disk.

    Args:
        split: From :func:`idmm.data.datasets.open_splits`.
        bound: What is kept of each image: up to so long a short side (pixels), its centre crop, or with None all.
        data: Says which channels are used (``in_chans``, ``bands``), where to keep pixels (``cache``, ``cache_dir``),
            what to do with bad files (``on_error``) and ``max_pixels``.
        part: Which split this is: train, val or test.
        progress: Show a bar on standard error if this takes longer than a second.
        scale, bands: Of images deeper than 8 bits; which channels all files have; None: as ``data`` says.
        again: They were loaded before at another bound, so the bad ones that are left out have been logged.

    Returns:
        The store; without the bad images where ``data.on_error`` is 'skip'.

    Raises:
        UserError: Bad images (all of them in one), none left, or a class of which none is left.
        RunError: An image does not fit into memory.
    """
    if not len(split):
        raise UserError("data.root: there is no image to load")
    bands = bands or bands_of(data.in_chans, data.bands)
    loading = _Loading(split, bound, data, progress, tidy(scale or data.range), bands, again)
    if data.cache == "auto" and not isinstance(split.items, np.ndarray):
        try:
            if store := loading.from_disk(part):
                return store
        except RunError as error:
            log.warning("%s: images are decoded at each use instead", error)
    return loading.at_each_use()


class _Loading:
    """Decodes a split, once or again."""

    def __init__(
        self,
        split: Split,
        bound: Bound,
        data: config.Data,
        progress: bool,
        scale: Scale,
        bands: Bands | None,
        again: bool,
    ):
        self.split, self.bound, self.data, self.progress = split, bound, data, progress
        self.scale, self.bands, self.again = scale, bands, again
        self.reported = False  # the bad images, once

    def from_disk(self, part: str) -> ImageStore | None:
        """Opens a cache entry, written first if need be; None if there is no cache folder or no room.

        Raises:
            RunError: The cache folder cannot be written, or the disk became full.
        """
        try:
            # images of 8 bits are the same by any range
            scales = dict.fromkeys((AUTO, self.scale))
            entries = [CacheEntry(self.split, part, self.bound, self.data, scale, self.bands) for scale in scales]
        except UserError as error:  # no home folder
            log.info("%s: images are decoded at each use", error)
            return None
        for entry in entries:
            if store := self._found(entry):
                return store
        with entry.locked():
            store = self._found(entry)  # another process may have filled it
            if store is None and self._fits(entry):
                store = self._store(entry.write(self._decode), entry.pixels)
                log.info("cache: decoded images are kept in '%s' for later runs", entry.path)
        return store

    def at_each_use(self) -> ImageStore:
        """Reads all images once and keeps no pixels."""
        return self._store(self._decode(lambda pixels: None), None)

    def _found(self, entry: CacheEntry) -> ImageStore | None:
        """Returns the images of a cache entry; None unless it is whole."""
        index = entry.read()
        if index is None or not entry.serves(index, self.scale):
            return None
        self._report(index)
        try:
            return self._store(index, entry.pixels)
        except RunError as error:  # cleared since, or filled with something else
            log.debug("%s", error)
            return None

    def _store(self, index: Index, pixels: Path | None) -> ImageStore:
        """Returns the good images."""
        split = self.split.take(index.good) if len(index.bad) else self.split
        return ImageStore(split, index, pixels, self.bound, self.data.max_pixels, self.scale, self.bands)

    def _decode(self, keep: Callable[[np.ndarray], None]) -> Index:
        """Hands each good image, [H, W, C], to ``keep``, in order."""
        sizes, digests, ends, pixel_bytes, bad = {}, [], [], [], {}  # sizes and what is wrong, by number
        if self.bands and self.bands.count is None:
            self.bands = self.bands._replace(count=self._channels())
        given = (self.split, self.scale, self.bands, self.data.max_pixels, "reading images", self.progress)
        with closing(each_scaled(self._load, *given)) as results:
            for i, result in enumerate(results):
                if isinstance(result, BadImage):
                    bad[i] = result.reason
                else:
                    keep(result.pixels)
                    sizes[i] = result.pixels.shape[:2]
                    digests.append(result.digest)
                    ends.append(result.ends)
                    pixel_bytes.append(result.pixels.shape[2] * result.pixels.itemsize)
        index = Index(
            sizes=np.array(list(sizes.values()), dtype=np.int64).reshape(-1, 2),
            digests=np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16),
            good=np.array(list(sizes), dtype=np.int64),
            bad=np.array(list(bad), dtype=np.int64),
            reasons=np.array(list(bad.values()), dtype=np.str_),
            extremes=ends_of(ends, self.bands),
            pixel_bytes=np.array(pixel_bytes, dtype=np.int64),
            channels=self.bands.used if self.bands else 3,
            file_channels=self.bands.count if self.bands else 0,
        )
        self._report(index)
        return index

    def _channels(self) -> int | None:
        """Returns how many channels the first file has that can be read; None: none can."""
        for item in self.split.items:
            with suppress(BadImage):
                return header(item, self.data.max_pixels, Bands()).channels
        return None

    def _load(self, i: int, scale: Scale) -> Decoded:
        decoded = read_image(self.split.items[i], self.data.max_pixels, scale, self.bands)
        return decoded._replace(pixels=fitted(decoded.pixels, self.bound))

    def _fits(self, entry: CacheEntry) -> bool:
        """Whether half of the free disk holds the decoded images."""
        need, free = self.estimate(), entry.free()
        if need > free // 2:
            line = "cache: '%s' has %s free, the decoded images need about %s: they are decoded at each use"
            log.info(line, entry.path.parent, size_of(free), size_of(need))
            return False
        log.info("cache: decoding %s, about %s", counted(len(self.split), "image"), size_of(need))
        return True

    def estimate(self) -> int:
        """Bytes of all decoded images, from the headers of a few."""
        items = self.split.items
        chosen = np.unique(np.linspace(0, len(items) - 1, _PROBED).astype(int))
        total = 0  # bad images take no room
        for i in chosen:
            with suppress(BadImage):
                image = header(items[i], self.data.max_pixels, self.bands)
                each = (self.bands.used if self.bands else 3) * (2 if image.deep else 1)
                total += math.prod(fitted_size(image.height, image.width, self.bound)) * each
        return round(total * len(items) / len(chosen))

    def _report(self, index: Index) -> None:
        """Raises, or with 'skip' warns, about the bad images; once."""
        if self.reported or not len(index.bad):
            return
        self.reported, split = True, self.split
        told = by_reason(map(split.place, index.bad.tolist()), index.reasons.tolist())
        lines = capped([f"  {line}" for line in told])
        count = f"{len(index.bad)} of {counted(len(split), 'image')}"
        if self.data.on_error == "fail":
            how = "--data.on_error skip leaves them out, --data.exclude all that 'idmm data check' lists"
            raise UserError(f"data.root: {count} cannot be used ({how}):", *lines)
        level = logging.DEBUG if self.again else logging.WARNING
        log.log(level, "data.root: left out %s that cannot be used:\n%s", count, "\n".join(lines))
        if not len(index.good):
            raise UserError(f"data.root: none of the {len(split)} images can be used:", *lines)
        if split.labels is not None:
            left = Counter(split.labels[index.good].tolist())
            there = np.unique(split.labels[split.labels >= 0])
            if empty := [split.classes[label] for label in there if not left[int(label)]]:
                raise UserError(f"data.root: no usable image is left of the classes {listed(empty)}")


def file_digest(path: str) -> str:
    """Returns a file's digest as :func:`fingerprint` has it."""
    return digest(read(path)).hex()[:16]


def fingerprint(store: ImageStore) -> dict:
    """Returns what identifies the images, for JSON: ``{"classes": [...] or None, "images": {name: "digest label"}}``.

    Digests are cut to 16 hexadecimal digits, labels that there are none of left out. The order counts.
    """
    known = [-1] * len(store) if store.labels is None else store.labels.tolist()
    labels = ["" if label < 0 else f" {label}" for label in known]
    images = zip(store.names, store.digests, labels, strict=True)
    return {"classes": store.classes, "images": {name: found[:16] + label for name, found, label in images}}


def compare(old: dict, new: dict) -> list[str]:
    """Says in a few lines how two fingerprints differ; an empty list if image i is still image i."""
    if old == new and all(map(operator.eq, old["images"], new["images"])):  # dicts are equal in any order
        return []
    before, now = _parsed(old), _parsed(new)
    both = [name for name in before if name in now]
    groups = {
        "removed": [name for name in before if name not in now],
        "added": [name for name in now if name not in before],
        "changed": [name for name in both if before[name][0] != now[name][0]],
        "relabelled": [f"{n} ({before[n][1]} to {now[n][1]})" for n in both if before[n][1] != now[n][1]],
        "in another order": [a for a, b in zip(both, (n for n in now if n in before), strict=True) if a != b],
    }
    lines = [f"{counted(len(names), 'image')} {what}: {listed(names)}" for what, names in groups.items() if names]
    return lines or (["the list of classes is another"] if old["classes"] != new["classes"] else [])


def _parsed(kept: dict) -> dict[str, tuple[str, str]]:
    """Returns name → (digest, class name)."""
    parts = {name: text.partition(" ") for name, text in kept["images"].items()}
    return {n: (p[0], f"'{kept['classes'][int(p[2])]}'" if p[2] else "no label") for n, p in parts.items()}
