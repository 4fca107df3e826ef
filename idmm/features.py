"""Features of a frozen backbone, taken from each image once and kept on the disk.

They lie beside the decoded images in the cache's folder, not in a run's: runs are copied, shared and read-only, a
checkpoint may be a file in somebody else's folder, and what can be made again should be where it is cleared.
"""

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL
import timm
import torch
from torch import nn

from idmm import distributed
from idmm.data.augment import EvalTransform
from idmm.data.cache import ImageStore, fingerprint
from idmm.data.loaders import evaluation_batches, worker_count
from idmm.data.split import counted
from idmm.errors import RunError, UserError
from idmm.evaluate import extract_features
from idmm.files import replacing
from idmm.progress import counting, duration

log = logging.getLogger("idmm")
_FOLDER = "features"  # in the cache's folder
_OURS = re.compile(r"\.?.+-(train|val|test)-[0-9a-f]{32}\.npz(\.part-.*)?")
# what else decides about the numbers: this file's format and the libraries that decode, resize and compute
_VERSIONS = ["1", PIL.__version__, timm.__version__, torch.__version__]


def centre_crops(
    store: ImageStore,
    size: int,
    crop_pct: float,
    mean,
    std,
    batch_size: int,
    workers: int | None = None,
    images: np.ndarray | None = None,
) -> Iterator[dict]:
    """Yields this process's share of a split, centre-cropped; ``images``: only those numbers."""
    maker = EvalTransform(store, size, crop_pct, mean, std)
    images = np.arange(len(store)) if images is None else images
    rank, world = distributed.rank(), distributed.world()
    few = len(images) <= 2 * batch_size * world  # workers would take longer to start than to work
    workers = 0 if few else worker_count(workers, batch_size * len(mean) * size**2 * 4)[0]
    return evaluation_batches(maker, images, batch_size, workers, rank, world)


def pick_device(wanted: str, flag: str = "device") -> str:
    """Resolves 'auto' to cuda, mps or cpu.

    Raises:
        UserError: The device is not there; the line begins with ``flag``.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    there = [name for name in found if found[name]]
    if wanted != "auto" and wanted not in there:
        raise UserError(f"{flag}: '{wanted}' is not there; wanted one of {', '.join(there)}")
    return there[0] if wanted == "auto" else wanted


def digest(about: dict, state: dict[str, torch.Tensor] | None = None) -> str:
    """Returns 32 hexadecimal digits that differ where the facts ``about`` a backbone or its weights do."""
    hashed = hashlib.blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted((state or {}).items()):
        tensor = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


@dataclass
class Extractor:
    """Takes features of splits by one backbone at one size, in fp32.

    Attributes:
        build: Makes the backbone; called when the first features are not found on the disk.
        weights: From :func:`digest`; another for each backbone.
        source: Where the backbone comes from, for messages.
        size: Side of the images (pixels).
        crop_pct: Share of the resized short side that is kept.
        mean: Of each channel.
        std: Likewise.
        batch_size: Images at a time.
        workers: Loader processes; None: by the cores.
        device: Where the network runs.
        folder: The cache's; None: nothing is kept.
    """

    build: Callable[[], nn.Module]
    weights: str
    source: str
    size: int
    crop_pct: float
    mean: list[float]
    std: list[float]
    batch_size: int = 64
    workers: int | None = None
    device: str = "cpu"
    folder: Path | None = None
    _backbone: nn.Module | None = field(default=None, init=False)

    @property
    def bound(self) -> int:
        """Short side to which images are resized before the crop (pixels)."""
        return max(self.size, round(self.size / self.crop_pct))

    def features(self, store: ImageStore, part: str, dataset: str) -> np.ndarray:
        """Returns the pooled features of all images of a split, float32 [N, d]; found on the disk or taken now.

        Args:
            store: The images.
            part: train, val or test.
            dataset: Its name, for that of the file.

        Raises:
            RunError: They are not finite, or there is too little memory for the batch.
        """
        key = self._key(store)
        name = "".join(c if c.isalnum() else "-" for c in dataset)[-40:]
        path = None if self.folder is None else self.folder / _FOLDER / f"{name}-{part}-{key}.npz"
        found = None if path is None else _read(path, key, len(store))
        if found is None:
            began = time.monotonic()
            found = self._extract(store, f"features of {part}")
            took = duration(time.monotonic() - began)
            log.info("%s: features of %s (%s) in %s", self.source, part, counted(len(store), "image"), took)
            if path is not None:
                _write(path, key, found)
        else:
            log.info("%s: features of %s (%s) found on the disk", self.source, part, counted(len(store), "image"))
        return found

    def _key(self, store: ImageStore) -> str:
        looks = [self.weights, self.size, self.crop_pct, list(self.mean), list(self.std), self.device]
        return digest({"look": looks, "versions": _VERSIONS, "images": fingerprint(store)})

    def _extract(self, store: ImageStore, label: str) -> np.ndarray:
        if self._backbone is None:
            self._backbone = self.build().to(self.device)
        batches = centre_crops(store, self.size, self.crop_pct, self.mean, self.std, self.batch_size, self.workers)
        try:
            shown = counting(batches, len(store), label)
            found = extract_features(self._backbone, shown, self.device, contextlib.nullcontext).numpy()
        except torch.OutOfMemoryError:
            why = f"out of memory with {self.batch_size} images at a time; try a smaller --batch_size"
            raise RunError(f"{self.source}: {why}") from None
        if not np.isfinite(found).all():
            raise RunError(f"{self.source}: its features are not finite; the run that wrote it has diverged")
        return found


def _read(path: Path, key: str, count: int) -> np.ndarray | None:
    """Returns what lies there if it is whole and what was asked for."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = arrays["features"]  # reading to the end compares the checksum
            if str(arrays["key"]) == key and found.dtype == np.float32 and found.ndim == 2 and len(found) == count:
                return found
    except FileNotFoundError:
        return None
    except Exception as error:  # torn or damaged: numpy and zipfile raise a dozen types
        log.debug("%s: %s", path, error)
    log.warning("%s: is damaged, its features are taken again", path)
    return None


def _write(path: Path, key: str, features: np.ndarray) -> None:
    """Keeps features; where that fails the next call takes them again, no more."""
    try:
        with replacing(path) as file:
            np.savez(file, features=features, key=np.array(key))
    except RunError as error:
        log.warning("features are not kept: %s", error)


def kept(folder: Path) -> dict[Path, int]:
    """Returns the files of features in a cache folder and their bytes, what a kill left of some included."""
    found = {}
    for path in sorted((folder / _FOLDER).glob("*")):
        with contextlib.suppress(OSError):  # being removed
            if _OURS.fullmatch(path.name) and path.is_file():
                found[path] = path.stat().st_size
    return found


def clear(folder: Path) -> int:
    """Removes them; returns the bytes that were freed.

    Raises:
        RunError: One cannot be removed.
    """
    found = kept(folder)
    for path in found:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{path}: cannot be removed ({error.strerror})") from None
    with contextlib.suppress(OSError):  # not there, or something else lies in it
        (folder / _FOLDER).rmdir()
    return sum(found.values())
