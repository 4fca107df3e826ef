"""Features of a frozen backbone: taken from each image once, in fp32, and kept on the disk.

They lie beside the decoded images in the cache's folder, not in a run's: runs are copied, shared and read-only, a
checkpoint may be a file in somebody else's folder, and what can be made again should be where it is cleared.
"""

import contextlib
import hashlib
import json
import logging
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import timm
import torch

from idmm import distributed
from idmm.config.commands import ProbeConfig
from idmm.data.cache import ImageStore, fingerprint
from idmm.data.disk import cache_folder, plain
from idmm.data.split import counted
from idmm.errors import RunError, SizeError, UserError
from idmm.files import replacing
from idmm.models.spec import ModelSpec
from idmm.network import Network
from idmm.progress import counting, duration

log = logging.getLogger("idmm")
UNTRAINED = "untrained"
_FOLDER = "features"  # in the cache's folder
_OURS = re.compile(r"\.?.+-(train|val|test)-[0-9a-f]{32}\.npz(\.part-.*)?")
# what else decides about the numbers: this file's format and the libraries that decode, resize and compute
_VERSIONS = ["5", PIL.__version__, timm.__version__, torch.__version__]


class FrozenBackbone:
    """A backbone to be measured at one size, which takes the features of splits or finds them on the disk.

    Args:
        spec: What is known of it.
        size: Side of the images (pixels).
        config: Where it comes from, seed of fresh weights, crop, batch size and device; of its ``data`` the workers,
            and whether and where features are kept.
        label: For people; None: as ``config.init`` says.

    Raises:
        UserError: The device is not there.
    """

    def __init__(self, spec: ModelSpec, size: int, config: ProbeConfig, label: str | None = None):
        self.spec, self.size, self.config, self.label = spec, size, config, label or config.init or UNTRAINED
        about = {"name": spec.name, "kwargs": spec.kwargs} | ({} if spec.init else {"seed": config.seed})
        self.weights = _digest(about, spec.init.state if spec.init else None)  # others for other weights
        self.device = distributed.pick_device(config.device)
        self.folder = cache_folder(config.data.cache_dir) if config.data.cache in ("auto", "disk") else None
        self._network: Network | None = None

    @property
    def init(self) -> str | None:
        """Where it comes from, as the user said; None: its weights are fresh."""
        return self.config.init

    @property
    def about(self) -> dict:
        """What results say of it."""
        return {"init": self.init, "model": self.spec.name, "size": self.size}

    def untrained(self, label: str) -> "FrozenBackbone":
        """Returns the same with fresh weights, drawn from ``config.seed`` as a stage draws them."""
        return FrozenBackbone(replace(self.spec, init=None), self.size, replace(self.config, init=None), label)

    def know(self, spec: ModelSpec) -> None:
        """Takes what is known of the backbone once the images were read: their mean and std."""
        self.spec = spec
        if self._network is not None:
            self._network = replace(self._network, mean=spec.mean, std=spec.std)

    def features(self, store: ImageStore, part: str) -> np.ndarray:
        """Returns the pooled features of all images of a split (train, val or test), float32 [N, d].

        Raises:
            RunError: They are not finite, or there is too little memory for the batch.
        """
        key = self._key(store)
        name = f"{plain(self.config.data.name)}-{part}-{key}.npz"
        path = None if self.folder is None else self.folder / _FOLDER / name
        found = None if path is None else _read(path, key, len(store))
        if found is None:
            began = time.monotonic()
            found = self._extract(store, f"features of {part}")
            how = f"in {duration(time.monotonic() - began)}"
            if path is not None:
                _write(path, key, found)
        else:
            how = "found on the disk"
        log.info("%s: features of %s (%s) %s", self.label, part, counted(len(store), "image"), how)
        return found

    def _key(self, store: ImageStore) -> str:
        """Another one where the weights, the crop, the bytes of an image, the device or a library's version are."""
        spec = self.spec
        looks = [self.weights, self.size, self.config.crop_pct, list(spec.mean), list(spec.std), self.device]
        looks += [] if store.scale is None else [store.scale]
        looks += [] if store.bands is None else [store.bands]
        return _digest({"look": looks, "versions": _VERSIONS, "images": fingerprint(store)})

    def build(self) -> None:
        """Builds the model now, not at the first image.

        Raises:
            UserError: It cannot be built at this size, or the weights do not fit.
        """
        spec, given = self.spec, self.config
        try:
            model = spec.build(self.size, given.seed)
        except SizeError as error:
            raise UserError(f"size: {error}") from None
        if report := spec.load(model):
            log.info("%s", report)
        looks = (self.size, given.crop_pct, spec.mean, spec.std)
        model = model.eval().to(self.device)
        self._network = Network(model, *looks, self.device, given.batch_size, self.label, "--batch_size")

    def _extract(self, store: ImageStore, label: str) -> np.ndarray:
        if self._network is None:
            self.build()
        batches = self._network.split_batches(store, workers=self.config.data.workers)
        return self._network.outputs(counting(batches, len(store), label))


def _digest(about: dict, state: dict[str, torch.Tensor] | None = None) -> str:
    """Returns 32 hexadecimal digits that differ where the facts ``about`` a backbone or its weights do."""
    hashed = hashlib.blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted((state or {}).items()):
        tensor = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


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
