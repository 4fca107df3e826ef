"""Datasets that come as pixels in a few files: digits, cifar10, cifar100, svhn."""

import io
import pickle
from pathlib import Path

import numpy as np

from idmm import config
from idmm.data.readers.layout import NotAsPublished, folder_with, mat, numbers_from
from idmm.data.split import Split, Splits, arranged
from idmm.errors import reason


def read_digits(data: config.Data, labelled: bool) -> Splits:
    """scikit-learn's 8 x 8 digits, split once and for all, stratified."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], from 0..16
    pixels = np.repeat(grey[..., None], 3, axis=3)  # [1797, 8, 8, 3]
    everything = _split(pixels, "digits", digits.target.astype(np.int64), [str(c) for c in digits.target_names], 5)
    train, test = train_test_split(np.arange(len(grey)), test_size=360, stratify=digits.target, random_state=0)
    return Splits(everything.take(np.sort(train)), None, everything.take(np.sort(test)))


def read_cifar10(root: Path) -> Splits:
    """CIFAR-10's Python version: data_batch_1 to 5, test_batch, batches.meta."""
    parts = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    base = folder_with("cifar10", [root, root / "cifar-10-batches-py"], *sum(parts.values(), []), "batches.meta")
    return _cifar(base, parts, "labels", "batches.meta", "label_names")


def read_cifar100(root: Path) -> Splits:
    """CIFAR-100's Python version, its 100 fine classes: train, test, meta."""
    base = folder_with("cifar100", [root, root / "cifar-100-python"], "train", "test", "meta")
    return _cifar(base, {"train": ["train"], "test": ["test"]}, "fine_labels", "meta", "fine_label_names")


def read_svhn(root: Path) -> Splits:
    """Street View House Numbers, cropped: train_32x32.mat and test_32x32.mat, in which 10 stands for 0."""
    names = ("train_32x32.mat", "test_32x32.mat")
    base = folder_with("svhn", [root, root / "svhn"], *names)
    splits = []
    for name in names:
        pixels, numbers = mat(base / name, "X", "y")  # [32, 32, 3, N], [N]
        pixels = pixels[..., None] if pixels.ndim == 3 else pixels  # a single image
        _check(base / name, "X", pixels, [32, 32, 3, "N"], len(numbers))
        labels = (numbers_from(base / name, numbers, 1, 10) + 1) % 10
        images = np.ascontiguousarray(pixels.transpose(3, 0, 1, 2))  # [N, 32, 32, 3]
        splits.append(_split(images, name, labels, [str(digit) for digit in range(10)]))
    return Splits(splits[0], None, splits[1])


def _cifar(base: Path, parts: dict[str, list[str]], key: str, meta: str, names: str) -> Splits:
    classes = [str(name) for name in _unpickled(base / meta, names)[0]]
    splits = {}
    for part, batches in parts.items():
        images, labels = [], []
        for path in (base / name for name in batches):
            pixels, numbers = _unpickled(path, "data", key)
            _check(path, "data", pixels, ["N", 3072], len(numbers))
            images.append(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))  # [N, 32, 32, 3]
            labels.append(numbers_from(path, numbers, 0, len(classes) - 1))
        splits[part] = _split(np.concatenate(images), part, np.concatenate(labels), classes)
    return arranged(splits)


def _check(path: Path, name: str, pixels: np.ndarray, form: list, count: int) -> None:
    """Raises NotAsPublished unless the pixels are uint8 of the shape ``form`` with ``count`` for 'N'."""
    if pixels.dtype != np.uint8 or list(pixels.shape) != [count if n == "N" else n for n in form] or not count:
        got = f"has {name} as {pixels.dtype} {list(pixels.shape)} beside {count} labels"
        raise NotAsPublished(path, got, f"uint8 [{', '.join(map(str, form))}] and N labels")


def _split(images: np.ndarray, part: str, labels: np.ndarray, classes: list[str], width: int = 6) -> Split:
    return Split(images, [f"{part}/{i:0{width}d}" for i in range(len(images))], labels, classes)


class _PlainUnpickler(pickle.Unpickler):
    """Makes arrays and plain containers only: a pickle from the network may otherwise run anything."""

    ALLOWED = {"_reconstruct", "ndarray", "dtype", "scalar", "encode"}

    def find_class(self, module, name):
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}")


def _unpickled(path: Path, *keys: str) -> list:
    """Lists or arrays out of a pickled mapping."""
    wanted = f"the Python version with {' and '.join(keys)}"
    try:
        content = _PlainUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        found = [content.get(key) for key in keys]
        found = [np.atleast_1d(value) if isinstance(value, list | np.ndarray) else None for value in found]
    except Exception as error:  # a damaged pickle raises nearly anything
        raise NotAsPublished(path, f"cannot be read ({reason(error)})", wanted) from None
    if absent := [key for key, value in zip(keys, found, strict=True) if value is None]:
        raise NotAsPublished(path, f"has no list '{absent[0]}'", wanted)
    return found
