"""The decoded images of a split: each file is read once, checked, hashed, reduced, and kept in the cache folder.

An entry of the cache is a folder for one split of a dataset at one size. It holds ``pixels-SIGNATURE`` (all images end
to end) and ``index.npz``, which names the signature of their files and is written last. So a kill leaves no index with
pixels of other files.
"""

import functools
import hashlib
import logging
import math
import os
import shutil
import warnings
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import tifffile
import torch
from tqdm import tqdm

from idmm import config
from idmm.data.decode import Index, Reading, decode_split
from idmm.data.formats import BadImage
from idmm.data.images import Bands, CentreCrop, StoredSize, bands_of, composite, digest, fitted_size, image_size
from idmm.data.split import Split, counted
from idmm.data.values import AUTO, ValueRange, as_range
from idmm.errors import RunError, reason
from idmm.files import Lock, expand_home, replacing, sweep

log = logging.getLogger(__name__)

_FORMAT = "9"  # of the cache's files and of what is done to the pixels
_SAMPLED = 64  # images whose headers give an estimate of the size of a cache


class ImageStore:
    """The images of a split as uint8 or uint16 tensors, in the split's order. :func:`store_split` makes it.

    It holds flat buffers only, which forked loader workers share.

    Args:
        split: The images.
        index: Facts about them.
        pixels: File of all images end to end. None: images are decoded at each use.
        reading: How their files are read.

    Attributes:
        names, labels, classes, groups, targets: The split's.
        sizes: Height and width of each image (pixels), int64 [N, 2].
        channels: Channels of an image. 3 for pictures.
        bands: Channels of the files that are used. None: pictures.
        high_bit: Number of images of more than 8 bits.
        value_range: Their value range, or one per channel. None: there are none.
        stored_size: What is stored of an image, see :class:`Reading`.
        decodes: Whether an image is decoded at each use.
    """

    def __init__(self, split: Split, index: Index, pixels: Path | None, reading: Reading):
        self.names, self.labels, self.classes, self.groups = split.names, split.labels, split.classes, split.groups
        self.targets = split.targets
        self.sizes, self._pixel_bytes = index.sizes, index.pixel_bytes
        self._digests, self._ends = index.digests, index.ends
        self.channels = reading.channels
        self.high_bit = int((index.pixel_bytes > self.channels).sum())
        if self.high_bit and reading.value_range == AUTO:
            measured = as_range((index.range if reading.bands else index.range[0]).tolist())
            reading = replace(reading, value_range=measured)
        self.value_range = reading.value_range if self.high_bit else None
        self.bands, self.stored_size = reading.bands, reading.stored_size
        self._reading = replace(reading, value_range=self.value_range)
        self.decodes = pixels is None and not isinstance(split.items, np.ndarray)
        self._file, self._items = pixels, split.items if pixels is None else None
        if isinstance(self._items, list):  # workers would copy the shared pages of strings to count references
            self._items = np.array([os.fsencode(path) for path in self._items])

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def digests(self) -> list[str]:
        """BLAKE2b of each file's bytes, 32 hexadecimal digits."""
        text = self._digests.tobytes().hex()  # at once: there may be millions
        return [text[at : at + 32] for at in range(0, len(text), 32)]

    def image(self, i: int) -> torch.Tensor:
        """Return image ``i``, uint8 [C, H, W], or uint16 if it has more than 8 bits.

        It is a view of [H, W, C] that must not be written to. :func:`idmm.data.values.unit` makes floats of it. If
        ``stored_size`` is a centre crop, it is that crop, [C, size, size].

        Raises:
            RunError: Its file is gone or was changed since it was loaded (only if it is decoded at each use).
        """
        i = range(len(self))[i]  # wraps -1, raises IndexError
        if self._file is not None:
            (h, w), pixel_bytes, end = self.sizes[i].tolist(), int(self._pixel_bytes[i]), int(self._ends[i])
            flat = _mapped(self._file, int(self._ends[-1]))[end - h * w * pixel_bytes : end]
            if pixel_bytes > self.channels:
                flat = (flat.clone() if flat.storage_offset() % 2 else flat).view(torch.uint16)
            image = flat.view(h, w, self.channels)
        else:
            image = torch.from_numpy(self._decode(i))  # [H, W, C]
        crop = self.stored_size
        if isinstance(crop, CentreCrop) and image.shape[:2] != (crop.size, crop.size):  # a small image is stored whole
            image = torch.from_numpy(crop(image.numpy()))
        return image.permute(2, 0, 1)  # [C, H, W]

    def picture(self, i: int) -> np.ndarray:
        """Return a picture of image ``i`` for people, uint8 [H, W, 3]."""
        return composite(self.image(i).permute(1, 2, 0).numpy())

    def _decode(self, i: int) -> np.ndarray:
        item = self._items[i]
        try:
            decoded = self._reading.read(os.fsdecode(item) if isinstance(item, bytes) else item)
        except BadImage as error:
            raise RunError(f"data.root: '{self.names[i]}' was fine when loaded, but now: {error.reason}") from error
        if decoded.digest != bytes(self._digests[i]):
            raise RunError(f"data.root: '{self.names[i]}' was changed while in use")
        return decoded.pixels


@functools.lru_cache(maxsize=64)
def _mapped(file: Path, size: int) -> torch.Tensor:
    """Map a file of pixels in this process, uint8 [size], read when used. RunError: gone or cut short."""
    try:
        pages = np.memmap(file, mode="r", shape=size)  # a writable map would need memory
    except (OSError, ValueError) as error:  # ValueError: cut short
        why = f"decoded images cannot be read ({reason(error)}). The next run decodes them again"
        raise RunError(f"{file}: {why}") from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(pages)


# ---------------------------------------------------------------------- reading a split
def store_split(
    split: Split,
    *,
    stored_size: StoredSize,
    data: config.Data,
    part: str = "train",
    value_range: ValueRange = None,
    bands: Bands | None = None,
) -> ImageStore:
    """Read, check, hash and decode all images of a split in parallel, or find that done in the cache.

    Args:
        stored_size: Longest short side (pixels), or the centre crop, that is stored of each image. None: all of it.
        data: The config's section: channels (``in_chans``, ``bands``) and the cache (``cache``, ``cache_dir``).
        value_range, bands: Of images of more than 8 bits, and the channels of all files. None: as in ``data``.

    Raises:
        UserError, RunError: As :func:`idmm.data.decode.decode_split`.
    """
    bands = bands or bands_of(data.in_chans, data.bands)
    if bands is not None and bands.count is None:  # that of the first readable file
        for item in split.items:
            with suppress(BadImage):
                bands = bands._replace(count=Reading(None, (0, 1), Bands()).read(item).pixels.shape[2])
                break
    reading = Reading(stored_size, as_range(value_range or data.range), bands)
    index, pixels = None, None
    if data.cache == "auto" and isinstance(split.items, list):
        try:
            index, pixels = _cached(split, part, data, reading)
        except RunError as error:
            log.warning("%s: images are decoded at each use instead", str(error))
    return ImageStore(split, index or decode_split(split, reading, None), pixels, reading)


# ---------------------------------------------------------------------- the cache on the disk
def cache_folder(cache_dir: str | None) -> Path:
    """Return ``data.cache_dir``, else $IDMM_CACHE, else the user's cache folder."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "idmm")
    return expand_home(cache_dir or os.environ.get("IDMM_CACHE") or default)


def _cached(split: Split, part: str, data: config.Data, reading: Reading) -> tuple[Index | None, Path | None]:
    """Return index and file of pixels of a split, from the cache or written to it now. None: there is no room.

    One process writes, the others wait for it.

    Raises:
        RunError: The cache folder cannot be written, or the disk is full.
    """
    size, root = reading.stored_size, os.path.realpath(os.path.expanduser(data.root)) if data.root else None
    names = split.names if split.drawn else ()  # a whole split keeps its entry when images are added
    key = repr((_FORMAT, data.name, root, part, size, split.drawn, names, reading.value_range, reading.bands))
    pixels_side = size.size if isinstance(size, CentreCrop) else size or "full"
    name = f"{data.name}-{part}-{pixels_side}-{digest(key.encode('utf-8', 'surrogateescape')).hex()[:10]}"
    folder, signature = cache_folder(data.cache_dir) / name, _signature(split, reading)
    pixels = folder / f"pixels-{signature}"
    if index := _read_index(pixels, signature):
        return index, pixels
    with closing(Lock(folder.with_name(f"{folder.name}.lock"))) as lock:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(lambda: log.info("cache: waiting for another process that fills '%s'", folder))
            sweep(folder)  # what a kill left
        except OSError as error:
            raise RunError(f"cannot write to '{folder.parent}' ({reason(error)})") from None
        if index := _read_index(pixels, signature):
            return index, pixels
        sampled = np.unique(np.linspace(0, len(split) - 1, _SAMPLED).astype(int))
        need, free = 0, shutil.disk_usage(folder).free
        for item in split.take(sampled).items:
            with suppress(BadImage):  # bad images take no room
                size = fitted_size(*image_size(item), reading.stored_size)
                need += math.prod(size) * reading.channels * (2 if reading.bands else 1)
        need = round(need * len(split) / len(sampled))
        if need > free // 2:
            line = "cache: '%s' has %s free, the decoded images need about %s: they are decoded at each use"
            log.info(line, folder.parent, tqdm.format_sizeof(free, "B"), tqdm.format_sizeof(need, "B"))
            return None, None
        size = tqdm.format_sizeof(need, "B")
        log.info("cache: '%s' is filled, decoding %s, about %s", folder, counted(len(split), "image"), size)
        with replacing(pixels) as file:
            index = decode_split(split, reading, file)
        with replacing(folder / "index.npz") as file:
            np.savez(file, signature=np.array(signature), **vars(index))
        for path in folder.glob("pixels-*"):
            if path != pixels:
                path.unlink(missing_ok=True)
        return index, pixels


def _read_index(pixels: Path, signature: str) -> Index | None:
    """Return the index of an entry if it is whole and its files are unchanged."""
    try:
        with open(pixels.with_name("index.npz"), "rb") as file, np.load(file, allow_pickle=False) as arrays:
            content = {name: arrays[name] for name in arrays.files}
        if str(content.pop("signature")) != signature:
            return None
        index = Index(**content)
        return index if pixels.stat().st_size == index.ends[-1:].sum() else None
    except Exception as error:  # not there, or torn: numpy and zipfile raise a dozen types
        log.debug("%s: %s", pixels, error)
        return None


def _signature(split: Split, reading: Reading) -> str:
    """Return a hash that differs if any file was added, removed, renamed, written to, or would be read differently."""
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(repr((PIL.__version__, tifffile.__version__, reading.stored_size, len(split))).encode())
    hashed.update("\0".join(split.names).encode("utf-8", "surrogateescape"))  # paths differ with how root is written
    for path in split.items:
        try:
            status = os.stat(path)
            state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)  # ctime cannot be set back
        except OSError as error:
            state = error.errno
        hashed.update(repr(state).encode())
    return hashed.hexdigest()
