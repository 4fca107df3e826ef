"""Datasets that come as pixels in a few files: digits, cifar10, cifar100, svhn."""

import io
import pickle
from pathlib import Path

import numpy as np

from idmm import config
from idmm.data.readers.layout import HALF, base_folder, labels_in, mat
from idmm.data.split import Split, Splits
from idmm.errors import UserError


def read_digits(data: config.Data, labelled: bool) -> Splits:
    """scikit-learn's 8 x 8 digits, split once and for all, stratified."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], from 0..16
    everything = Split(
        items=np.repeat(grey[..., None], 3, axis=3),  # [1797, 8, 8, 3]
        names=[f"digits/{i:05d}" for i in range(len(grey))],
        labels=digits.target.astype(np.int64),
        classes=[str(c) for c in digits.target_names],
    )
    indices = np.arange(len(grey))
    train, test = train_test_split(indices, test_size=360, stratify=digits.target, random_state=0)
    return Splits(everything.take(np.sort(train)), None, everything.take(np.sort(test)))


def read_cifar10(root: Path) -> Splits:
    """CIFAR-10's Python version: data_batch_1 to 5, test_batch, batches.meta."""
    train = tuple(f"data_batch_{i}" for i in range(1, 6))
    base = base_folder(root, "cifar10", ("cifar-10-batches-py",), (*train, "test_batch", "batches.meta"))
    return _cifar(base, train, ("test_batch",), "labels", "batches.meta", "label_names")


def read_cifar100(root: Path) -> Splits:
    """CIFAR-100's Python version, its 100 fine classes: train, test, meta."""
    base = base_folder(root, "cifar100", ("cifar-100-python",), ("train", "test", "meta"))
    return _cifar(base, ("train",), ("test",), "fine_labels", "meta", "fine_label_names")


def read_svhn(root: Path) -> Splits:
    """Street View House Numbers, cropped: train_32x32.mat and test_32x32.mat, in which 10 stands for 0."""
    files = ("train_32x32.mat", "test_32x32.mat")
    base = base_folder(root, "svhn", ("svhn",), files)
    splits = []
    for name in files:
        pixels, numbers = mat(base / name, "X", "y")  # [32, 32, 3, N], [N]
        if pixels.ndim == 3:  # a single image
            pixels = pixels[..., None]
        if pixels.dtype != np.uint8 or pixels.shape != (32, 32, 3, len(numbers)) or not len(numbers):
            got = f"X is {pixels.dtype} {list(pixels.shape)} beside {len(numbers)} labels"
            raise UserError(f"data.root: '{base / name}': {got}, wanted uint8 [32, 32, 3, N] and N")
        labels = (labels_in(base / name, numbers, 1, 10) + 1) % 10
        images = np.ascontiguousarray(pixels.transpose(3, 0, 1, 2))  # [N, 32, 32, 3]
        splits.append(_split(images, name, labels, [str(digit) for digit in range(10)]))
    return Splits(splits[0], None, splits[1])


def _cifar(base: Path, train: tuple, test: tuple, key: str, meta: str, names: str) -> Splits:
    classes = [str(name) for name in _unpickled(base / meta, names)[0]]
    splits = []
    for part, files in (("train", train), ("test", test)):
        images, labels = [], []
        for name in files:
            pixels, numbers = _unpickled(base / name, "data", key)
            pixels = np.asarray(pixels)
            if pixels.dtype != np.uint8 or pixels.shape != (len(numbers), 3072) or not len(numbers):
                got = f"data is {pixels.dtype} {list(pixels.shape)} beside {len(numbers)} labels"
                raise UserError(f"data.root: '{base / name}': {got}, wanted uint8 [N, 3072] and N")
            images.append(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))  # [N, 32, 32, 3]
            labels.append(labels_in(base / name, numbers, 0, len(classes) - 1))
        splits.append(_split(np.concatenate(images), part, np.concatenate(labels), classes))
    return Splits(splits[0], None, splits[1])


def _split(images: np.ndarray, part: str, labels: np.ndarray, classes: list[str]) -> Split:
    return Split(images, [f"{part}/{i:06d}" for i in range(len(images))], labels, classes)


class _PlainUnpickler(pickle.Unpickler):
    """Makes arrays and plain containers only: a pickle from the network may otherwise run anything."""

    ALLOWED = {"_reconstruct", "ndarray", "dtype", "scalar", "encode"}

    def find_class(self, module, name):
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}")


def _unpickled(path: Path, *keys: str) -> list:
    try:
        content = _PlainUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        found = [content[key] for key in keys]
        if odd := [key for key, value in zip(keys, found, strict=True) if not isinstance(value, list | np.ndarray)]:
            raise ValueError(f"its entry '{odd[0]}' is no list")
        return found
    except KeyError as error:
        raise UserError(f"data.root: '{path}' lacks the entry {error}; wanted is the Python version") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"data.root: cannot read '{path}' ({why.lower()}); {HALF}") from None
