"""Every image read once: checked, hashed, bounded in size, and kept as pixels in the cache folder."""

import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from idmm import config
from idmm.data.depth import each_scaled, range_of, tidy
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
    ``pixel_bytes`` what a pixel takes, all channels (bytes, [N]). ``deep`` counts those of more than 8 bits, ``scale``
    is their range, or those of channels; None: there are none. ``channels`` counts those of an image: 3 of pictures.
    ``decodes``: an image is decoded at each use.

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
        self._digests, self.deep = index.digests, int((index.pixel_bytes > index.channels).sum())
        self.scale = scale if self.deep else None
        if self.deep and scale == AUTO:
            self.scale = tidy((index.range if bands else index.range[0]).tolist())
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
            item = os.fsdecode(item) if isinstance(item, np.bytes_) else item
            decoded = read_image(item, self._max_pixels, self.scale, self.bands, measure=False)
        except BadImage as error:
            raise RunError(f"data.root: '{self.names[i]}' was fine when loaded, but now: {error.reason}") from error
        if decoded.digest != bytes(self._digests[i]):
            raise RunError(f"data.root: '{self.names[i]}' was changed while in use")
        return fitted(decoded.pixels, self.bound)


def load_split(
    split: Split,
    *,
    bound: Bound,
    data: config.Data,
    part: str = "train",
    progress: bool = False,
    scale: Scale | None = None,
    bands: Bands | None = None,
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

    Returns:
        The store; without the bad images where ``data.on_error`` is 'skip'.

    Raises:
        UserError: Bad images (all of them in one), none left, or a class of which none is left.
        RunError: An image does not fit into memory.
    """
    if not len(split):
        raise UserError("data.root: there is no image to load")
    scale, bands = tidy(scale or data.range), bands or bands_of(data.in_chans, data.bands)
    decode = partial(_decode, split, bound, data.max_pixels, scale, bands, progress)
    index, pixels = None, None
    if data.cache == "auto" and not isinstance(split.items, np.ndarray):
        try:
            entry = CacheEntry(split, part, bound, data, scale, bands)
            if index := entry.read() or _written(entry, decode, len(split), _estimate(split, bound, data, bands)):
                pixels = entry.pixels
        except RunError as error:
            log.warning("%s: images are decoded at each use instead", str(error))
    index = index or decode(lambda pixels: None)
    if len(index.bad):
        _report(split, index, data.on_error)
        split = split.take(index.good)
    return ImageStore(split, index, pixels, bound, data.max_pixels, scale, bands)


def _written(entry: CacheEntry, decode: Callable, count: int, need: int) -> Index | None:
    """Writes a cache entry of ``count`` images, unless another process did; None if half of the free disk does not hold
    the ``need`` (bytes).

    Raises:
        RunError: The cache folder cannot be written, or the disk became full.
    """
    with entry.locked():
        if index := entry.read():
            return index
        free = shutil.disk_usage(entry.path).free
        if need > free // 2:
            line = "cache: '%s' has %s free, the decoded images need about %s: they are decoded at each use"
            log.info(line, entry.path.parent, size_of(free), size_of(need))
            return None
        line = "cache: '%s' is filled, decoding %s, about %s"
        log.info(line, entry.path, counted(count, "image"), size_of(need))
        return entry.write(decode)


def _decode(
    split: Split,
    bound: Bound,
    max_pixels: int,
    scale: Scale,
    bands: Bands | None,
    progress: bool,
    keep: Callable[[np.ndarray], None],
) -> Index:
    """Reads all images of a split, and hands each good one, [H, W, C], to ``keep``, in order."""
    if bands and bands.count is None:
        bands = bands._replace(count=_channels(split, max_pixels))

    def work(i: int, scale: Scale) -> Decoded:
        decoded = read_image(split.items[i], max_pixels, scale, bands)
        return decoded._replace(pixels=fitted(decoded.pixels, bound))

    sizes, digests, ends, pixel_bytes, bad = {}, [], [], [], {}  # sizes and what is wrong, by number
    with closing(each_scaled(work, split, scale, bands, max_pixels, "reading images", progress)) as results:
        for i, result in enumerate(results):
            if isinstance(result, BadImage):
                bad[i] = result.reason
            else:
                keep(result.pixels)
                sizes[i] = result.pixels.shape[:2]
                digests.append(result.digest)
                ends.append(result.ends)
                pixel_bytes.append(result.pixels.shape[2] * result.pixels.itemsize)
    return Index(
        sizes=np.array(list(sizes.values()), dtype=np.int64).reshape(-1, 2),
        digests=np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16),
        good=np.array(list(sizes), dtype=np.int64),
        bad=np.array(list(bad), dtype=np.int64),
        reasons=np.array(list(bad.values()), dtype=np.str_),
        range=np.array(range_of(ends, bands) or (), dtype=np.float64).reshape(-1, 2),
        pixel_bytes=np.array(pixel_bytes, dtype=np.int64),
        channels=bands.used if bands else 3,
        file_channels=(bands.count if bands else 0) or 0,
    )


def _channels(split: Split, max_pixels: int) -> int | None:
    """Returns how many channels the first file has that can be read; None: none can."""
    for item in split.items:
        with suppress(BadImage):
            return header(item, max_pixels, Bands()).channels
    return None


def _estimate(split: Split, bound: Bound, data: config.Data, bands: Bands | None) -> int:
    """Returns the bytes of all decoded images, from the headers of a few."""
    chosen = np.unique(np.linspace(0, len(split) - 1, _PROBED).astype(int))
    total = 0  # bad images take no room
    for i in chosen:
        with suppress(BadImage):
            image = header(split.items[i], data.max_pixels, bands)
            each = (bands.used if bands else 3) * (2 if image.deep else 1)
            total += math.prod(fitted_size(image.height, image.width, bound)) * each
    return round(total * len(split) / len(chosen))


def _report(split: Split, index: Index, on_error: str) -> None:
    """Raises, or with 'skip' warns, about the bad images."""
    told = by_reason(map(split.place, index.bad.tolist()), index.reasons.tolist())
    lines = capped([f"  {line}" for line in told])
    count = f"{len(index.bad)} of {counted(len(split), 'image')}"
    if on_error == "fail":
        how = "--data.on_error skip leaves them out, --data.exclude all that 'idmm data check' lists"
        raise UserError(f"data.root: {count} cannot be used ({how}):", *lines)
    log.warning("data.root: left out %s", "\n".join([f"{count} that cannot be used:", *lines]))
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
    before, now = old["images"], new["images"]
    if old == new and list(before) == list(now):  # dicts are equal in any order
        return []
    both = [name for name in before if name in now]
    groups = {
        "removed": [name for name in before if name not in now],
        "added": [name for name in now if name not in before],
        "changed": [name for name in both if before[name].split()[0] != now[name].split()[0]],
        "relabelled": [name for name in both if before[name].split()[1:] != now[name].split()[1:]],
        "in another order": [a for a, b in zip(both, (n for n in now if n in before), strict=True) if a != b],
    }
    lines = [f"{counted(len(names), 'image')} {what}: {listed(names)}" for what, names in groups.items() if names]
    return lines or (["the list of classes is another"] if old["classes"] != new["classes"] else [])
