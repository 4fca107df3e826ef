"""Datasets that libraries read: scikit-learn's digits, and torchvision's for lists, arrays and checksums.

torchvision decodes no image here. It names classes and parts in its own way, so names come from the files.
"""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import numpy as np

from idmm import config
from idmm.data.readers.layout import FilesMissing, Listed, folder_of, lines, listed_splits, names_by_number
from idmm.data.split import Listing, Split
from idmm.errors import in_short


def read_digits(data: config.Data, labelled: bool) -> Listing:
    """scikit-learn's 8 x 8 digits, split once and for all, stratified."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], from 0..16
    pixels = np.repeat(grey[..., None], 3, axis=3)  # [1797, 8, 8, 3]
    names = [f"digits/{i:05d}" for i in range(len(grey))]
    everything = Split(pixels, names, digits.target.astype(np.int64), [str(name) for name in digits.target_names])
    train, test = train_test_split(np.arange(len(grey)), test_size=360, stratify=digits.target, random_state=0)
    return Listing(everything.take(np.sort(train)), None, everything.take(np.sort(test)))


# ---------------------------------------------------------------------- images in files
def read_flowers(root: Path) -> Listing:
    """Oxford Flowers-102; train is its train and val, 2,040 images."""
    base = folder_of("flowers", root, "flowers-102", "jpg", "imagelabels.mat", "setid.mat")
    classes = lines(files("idmm.data.readers") / "flowers102.txt")
    train, val, test = (_opened("Flowers102", base, split=part) for part in ("train", "val", "test"))
    return listed_splits(base, classes, _listed(base, train, val), _listed(base, test))


def read_pets(root: Path) -> Listing:
    """Oxford-IIIT Pet; train is trainval."""
    lists = ("annotations/trainval.txt", "annotations/test.txt")
    base = folder_of("pets", root, "oxford-iiit-pet", "images", *lists)
    parts = [_listed(base, _opened("OxfordIIITPet", base, split=part), key="_images") for part in ("trainval", "test")]
    classes = names_by_number((label, Path(name).stem.rpartition("_")[0]) for part in parts for name, label in part)
    return listed_splits(base, classes, *parts)


def read_dtd(root: Path) -> Listing:
    """Describable Textures; train is train and val of split 1, 3,760 images."""
    lists = [f"labels/{part}1.txt" for part in ("train", "val", "test")]
    base = folder_of("dtd", root, "dtd/dtd", "images", *lists)
    train, val, test = (_opened("DTD", base.parent, split=part) for part in ("train", "val", "test"))
    parts = [[(name, name.split("/")[1]) for name, _ in _listed(base, *some)] for some in ((train, val), (test,))]
    classes = sorted({name for part in parts for _, name in part})
    return listed_splits(base, classes, *([(name, classes.index(of)) for name, of in part] for part in parts))


def read_aircraft(root: Path) -> Listing:
    """FGVC-Aircraft, its variants; train is trainval."""
    lists = ("variants.txt", "images_variant_trainval.txt", "images_variant_test.txt")
    base = folder_of("aircraft", root, "fgvc-aircraft-2013b/data", "images", *lists)
    train, test = (_opened("FGVCAircraft", base.parent, split=part) for part in ("trainval", "test"))
    return listed_splits(base, train.classes, _listed(base, train), _listed(base, test))


def read_cars(root: Path) -> Listing:
    """Stanford Cars by the lists of its devkit, that of the test images with labels beside it."""
    lists = ("devkit/cars_meta.mat", "devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat")
    base = folder_of("cars", root, "stanford_cars", "cars_train", "cars_test", *lists)
    train, test = (_opened("StanfordCars", base, split=part) for part in ("train", "test"))
    parts = [[(_below(base, file), label) for file, label in part._samples] for part in (train, test)]
    return listed_splits(base, [str(name) for name in train.classes], *parts)


def _opened(kind: str, base: Path, root: Path | None = None, **part):
    """Returns torchvision's dataset in ``base``, looked for in ``root``; FilesMissing if it refuses the files."""
    from torchvision import datasets

    try:
        return getattr(datasets, kind)(root or base.parent, **part)
    except Exception as error:  # a dozen types for damaged files
        why = "a checksum differs" if isinstance(error, RuntimeError) else in_short(error)
        raise FilesMissing(f"data.root: files in '{base}' are damaged ({why}); fetch them again") from None


def _listed(base: Path, *parts, key: str = "_image_files") -> Listed:
    """Returns names and labels of the images of some of torchvision's datasets."""
    return [
        (_below(base, file), label)
        for part in parts
        for file, label in zip(getattr(part, key), part._labels, strict=True)
    ]


def _below(base: Path, file: str | Path) -> str:
    return Path(file).relative_to(base).as_posix()


# ---------------------------------------------------------------------- images in arrays
def read_cifar10(root: Path) -> Listing:
    """CIFAR-10's Python version."""
    return _cifar("cifar10", "CIFAR10", root)


def read_cifar100(root: Path) -> Listing:
    """CIFAR-100's Python version, its 100 fine classes."""
    return _cifar("cifar100", "CIFAR100", root)


def _cifar(name: str, kind: str, root: Path) -> Listing:
    from torchvision import datasets

    known = getattr(datasets, kind)
    batches = [file for file, _ in known.train_list + known.test_list]
    base = folder_of(name, root, known.base_folder, *batches, known.meta["filename"])
    train, test = (_opened(kind, base, train=is_train) for is_train in (True, False))
    classes = [str(name) for name in train.classes]
    return Listing(
        _arrays("train", train.data, train.targets, classes), None, _arrays("test", test.data, test.targets, classes)
    )


def read_svhn(root: Path) -> Listing:
    """Street View House Numbers, cropped: train_32x32.mat and test_32x32.mat."""
    names = ("train_32x32.mat", "test_32x32.mat")
    base = folder_of("svhn", root, "", *names)
    parts = [_opened("SVHN", base, base, split=name.partition("_")[0]) for name in names]  # [N, 3, 32, 32], [N]
    classes = [str(digit) for digit in range(10)]
    train, test = (
        _arrays(name, part.data.transpose(0, 2, 3, 1), part.labels, classes)
        for name, part in zip(names, parts, strict=True)
    )
    return Listing(train, None, test)


def _arrays(part: str, pixels: np.ndarray, labels: Iterable[int], classes: list[str]) -> Split:
    """A split of pixels, uint8 [N, 32, 32, 3]."""
    names = [f"{part}/{i:06d}" for i in range(len(pixels))]
    return Split(np.ascontiguousarray(pixels), names, np.array(labels, dtype=np.int64), classes)
