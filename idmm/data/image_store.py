"""The decoded images of a split.

Each file is read once, checked, hashed, reduced, and kept in the cache folder. An entry of the
cache is a folder for one split of a dataset at one size. It holds ``SIGNATURE.pixels`` (all images
end to end) and ``SIGNATURE.npz`` (the index, which is written last), named by the signature of the
images' files.
"""

import functools
import logging
import math
import os
import shutil
import warnings
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import tifffile
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from idmm.config import Data
from idmm.data import images
from idmm.data.decoding import Index, Reading, decode_split
from idmm.data.formats import BadImage, Pixels
from idmm.data.images import AUTO, Bands, CentreCrop, StoredSize, ValueRange
from idmm.data.split import Labelled, Split
from idmm.errors import RunError, reason
from idmm.files import Lock, expand_home, replacing, sweep
from idmm.text import counted

log = logging.getLogger(__name__)

# ratios of sides, see choose_crop_mode (benchmarks/results/baseline.md)
LONG = 1.36
VERY_LONG = 1.5
_FORMAT = "11"  # of the cache's files and of what is done to the pixels


class ImageStore(Labelled):
    """The images of a split as uint8 or uint16 tensors, in the split's order.

    :func:`store_split` makes it. It holds flat buffers only, which forked loader workers share.

    Args:
        split: The images.
        index: Facts about them.
        pixels: File of all images end to end. None: images are decoded at each use.
        reading: How their files are read.

    Attributes:
        names, labels, classes, groups, targets: The split's.
        sizes: Height and width of each image (pixels), int64 [N, 2].
        pixel_bytes: Bytes per pixel of each image, all channels, int64 [N].
        channels: Channels of an image. 3 for pictures.
        bands: Channels of the files that are used. None: pictures.
        high_bit: Number of images of more than 8 bits.
        value_range: Their value range, or one per channel. None: there are none.
        stored_size: What is stored of an image, see :class:`Reading`.
        decodes: Whether an image is decoded at each use.
    """

    def __init__(
        self,
        split: Split,
        index: Index,
        pixels: Path | None,
        reading: Reading,
    ):
        self.names = split.names
        self.labels = split.labels
        self.classes = split.classes
        self.groups = split.groups
        self.targets = split.targets
        self.sizes = index.sizes
        self.pixel_bytes = index.pixel_bytes
        self.channels = reading.channels
        self.bands = reading.bands
        self.stored_size = reading.stored_size
        self.high_bit = int((index.pixel_bytes > self.channels).sum())
        self.value_range: ValueRange = None
        if self.high_bit:
            self.value_range = reading.value_range
            if reading.value_range == AUTO:
                self.value_range = index.range.tolist()
        self.decodes = pixels is None and isinstance(split.items, list)
        self._index = index
        self._ends = index.ends
        self._reading = replace(reading, value_range=self.value_range)
        # the file of pixels, or the paths or images that are decoded
        self._source: Path | NDArray[Any]
        if pixels is not None:
            self._source = pixels
            _mapped(pixels, int(self._ends[-1]))  # it stays so if another process removes the file
        elif isinstance(split.items, list):
            # workers would copy the shared pages of strings to count references
            self._source = np.array([os.fsencode(path) for path in split.items])
        else:
            self._source = split.items

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def digests(self) -> list[str]:
        """BLAKE2b of each file's bytes, 32 hexadecimal digits."""
        return [bytes(row).hex() for row in self._index.digests]

    def image(self, i: int) -> torch.Tensor:
        """Return image ``i``, uint8 [C, H, W], or uint16 if it has more than 8 bits.

        It is a view of [H, W, C] that must not be written to. :func:`idmm.data.images.unit` makes
        floats of it. If ``stored_size`` is a centre crop, it is that crop, [C, size, size].

        Raises:
            RunError: Its file is gone or was changed since it was loaded (only if it is decoded at
                each use).
        """
        source = self._source
        if isinstance(source, Path):
            image = self._mapped_image(source, i)  # [H, W, C]
        else:
            image = torch.from_numpy(self._decoded(source[i], i))
        crop = self.stored_size
        # a small image is stored whole
        if isinstance(crop, CentreCrop) and image.shape[:2] != (crop.size, crop.size):
            image = torch.from_numpy(crop(image.numpy()))
        return image.permute(2, 0, 1)  # [C, H, W]

    def picture(self, i: int) -> NDArray[np.uint8]:
        """Return a picture of image ``i`` for people, uint8 [H, W, 3]."""
        image = self.image(i).permute(1, 2, 0)  # [H, W, C]
        return images.composite(image.numpy())

    def _mapped_image(self, file: Path, i: int) -> torch.Tensor:
        """Return image ``i`` of the file of pixels, [H, W, C]."""
        height, width = self.sizes[i].tolist()
        pixel_bytes = int(self.pixel_bytes[i])
        end = int(self._ends[i])
        start = end - height * width * pixel_bytes
        values = _mapped(file, int(self._ends[-1]))[start:end]
        if pixel_bytes > self.channels:
            if start % 2:  # where no view of 16 bits may start
                values = values.clone()
            values = values.view(torch.uint16)
        return values.view(height, width, self.channels)

    def _decoded(self, item: bytes | Pixels, i: int) -> Pixels:
        """Return image ``i`` from its path or pixels, [H, W, C]."""
        try:
            path_or_pixels = os.fsdecode(item) if isinstance(item, bytes) else item
            decoded = self._reading.read(path_or_pixels)
        except BadImage as error:
            raise RunError(
                f"data.root: '{self.names[i]}' was fine when loaded, but now: {error.reason}"
            ) from error
        if decoded.digest != bytes(self._index.digests[i]):
            raise RunError(f"data.root: '{self.names[i]}' was changed while in use")
        return decoded.pixels


@functools.lru_cache(maxsize=64)
def _mapped(file: Path, size: int) -> torch.Tensor:
    """Map a file of pixels in this process, uint8 [size], read when used.

    Raises:
        RunError: It is gone or cut short.
    """
    try:
        pages = np.memmap(file, mode="r", shape=size)  # a writable map would need memory
    except (OSError, ValueError) as error:  # ValueError: cut short
        raise RunError(
            f"{file}: decoded images cannot be read ({reason(error)}). "
            "The next run decodes them again"
        ) from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(pages)


# ---------------------------------------------------------------------- reading a split
def store_split(
    split: Split,
    *,
    stored_size: StoredSize,
    data: Data,
    part: str = "train",
    value_range: ValueRange = None,
    bands: Bands | None = None,
) -> ImageStore:
    """Read, check, hash and decode all images of a split in parallel, or find that done.

    Args:
        stored_size: Longest short side (pixels), or the centre crop, that is stored of each image.
            None: all of it.
        data: The config's section: channels (``in_chans``, ``bands``) and the cache (``cache``,
            ``cache_dir``).
        value_range, bands: Of images of more than 8 bits, and the channels of all files. None: as
            in ``data``.

    Raises:
        UserError: Images that cannot be used, all of them in one.
        RunError: An image does not fit into memory.
    """
    bands = bands or images.bands_of(data.in_chans, data.bands)
    if bands is not None and bands.count is None:
        bands = replace(bands, count=_channels_of_files(split))
    reading = Reading(stored_size, value_range or data.range, bands)
    if data.cache == "auto" and isinstance(split.items, list):
        try:
            return ImageStore(split, *_cached(split, part, data, reading), reading)
        except RunError as error:
            log.warning(f"{error}: images are decoded at each use")
    return ImageStore(split, decode_split(split, reading, None), None, reading)


def _channels_of_files(split: Split) -> int | None:
    """Return the channels of the first readable file, None if there is none."""
    for item in split.items:
        with suppress(BadImage):
            pixels = images.read_image(item, (0, 1), Bands()).pixels
            return int(pixels.shape[2])
    return None


# ---------------------------------------------------------------------- the cache on the disk
def cache_folder(cache_dir: str | None) -> Path:
    """Return ``data.cache_dir``, else $IDMM_CACHE, else the user's cache folder."""
    of_user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expand_home(cache_dir or os.environ.get("IDMM_CACHE") or f"{of_user}/idmm")


def _cached(
    split: Split,
    part: str,
    data: Data,
    reading: Reading,
) -> tuple[Index, Path]:
    """Return index and file of pixels of a split, from the cache or written to it now.

    One process writes, the others wait for it.

    Raises:
        RunError: The cache folder cannot be written, or there is no room.
    """
    root = None
    if data.root:
        root = os.path.realpath(os.path.expanduser(data.root))
    # a whole split keeps its entry when images are added
    names = () if split.whole else split.names
    key = _hashed(_FORMAT, data.name, root, part, names, reading)[:10]
    folder = cache_folder(data.cache_dir) / f"{data.name}-{part}-{key}"
    pixels = folder / f"{_signature(split)}.pixels"
    if index := _read_index(pixels):
        return index, pixels
    with closing(Lock(folder.with_name(f"{folder.name}.lock"))) as lock:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(
                lambda: log.info(f"cache: waiting for another process that fills '{folder}'")
            )
            sweep(folder)  # what a kill left
        except OSError as error:
            raise RunError(f"cannot write to '{folder.parent}' ({reason(error)})") from None
        index = _read_index(pixels) or _fill(pixels, split, reading)
        return index, pixels


def _fill(pixels: Path, split: Split, reading: Reading) -> Index:
    """Decode a split into a file of pixels, write its index, and delete older ones.

    Raises:
        RunError: There is no room.
    """
    folder = pixels.parent
    needed = _bytes_of(split, reading)
    size = tqdm.format_sizeof(needed, "B")
    free = shutil.disk_usage(folder).free
    if needed > free // 2:
        raise RunError(
            f"cache: '{folder.parent}' has {tqdm.format_sizeof(free, 'B')} free, "
            f"the decoded images need about {size}"
        )
    log.info(f"cache: '{folder}' is filled, decoding {counted(len(split), 'image')}, about {size}")
    with replacing(pixels) as file:
        index = decode_split(split, reading, file)
    with replacing(pixels.with_suffix(".npz")) as file:
        np.savez(file, **vars(index))
    for path in folder.glob("[!.]*"):
        if path.stem != pixels.stem:
            path.unlink(missing_ok=True)
    return index


def _bytes_of(split: Split, reading: Reading) -> int:
    """Return about how many bytes a decoded split takes, by the headers of a sample."""
    pixel_bytes = reading.channels
    if reading.bands:
        pixel_bytes *= 2
    total = 0
    for height, width in sampled_sizes(split):  # bad images take no room
        total += math.prod(images.fitted_size(height, width, reading.stored_size)) * pixel_bytes
    return round(total * len(split) / len(split.sample()))


def sampled_sizes(split: Split) -> list[tuple[int, int]]:
    """Return height and width (pixels) of the readable images of a split's sample."""
    sizes = []
    for item in split.sample():
        with suppress(BadImage):
            sizes.append(images.image_size(item))
    return sizes


def choose_crop_mode(train: Split) -> str:
    """Return what ``augment.crop_mode`` auto means, by a sample of images.

    It is squash if half of them are longer than :data:`VERY_LONG` times their short side, pad if a
    tenth of them are longer than :data:`LONG` times, else crop.
    """
    ratios = [max(size) / min(size) for size in sampled_sizes(train)]
    middle, long = np.quantile(ratios or [1.0], (0.5, 0.9))
    if middle > VERY_LONG:
        return "squash"
    if long > LONG:
        return "pad"
    return "crop"


def _read_index(pixels: Path) -> Index | None:
    """Return the index of a file of pixels if both are whole."""
    try:
        with open(pixels.with_suffix(".npz"), "rb") as file, np.load(file) as arrays:
            index = Index(**arrays)
        if pixels.stat().st_size == index.ends[-1:].sum():
            return index
    except Exception as error:  # not there, or torn: numpy and zipfile raise a dozen types
        log.debug(f"{pixels}: {error}")
    return None


def _signature(split: Split) -> str:
    """Return a hash of the files of a split and of what reads them.

    It differs if any file was added, removed, renamed, written to, or would be read differently.
    """
    states: list[object] = []
    for path in split.items:
        try:
            status = os.stat(path)
            # ctime cannot be set back
            states.append((status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        except OSError as error:
            states.append(error.errno)
    # names, as paths differ with how root is written
    return _hashed(PIL.__version__, tifffile.__version__, split.names, states)


def _hashed(*values: object) -> str:
    return images.digest(repr(values).encode()).hex()
