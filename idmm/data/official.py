"""Official datasets as their publishers lay them out: from a root to paths (or pixels), names and
labels.

torchvision reads lists, arrays and checksums, and decodes no image here. It names classes and parts
in its own way, so names come from the files.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np

from idmm.data.folder import FilesMissing, read_labelled
from idmm.data.split import Listing, Split, split_of
from idmm.errors import in_short
from idmm.text import listed

# images: path below the dataset's folder, '/' between, and label
Listed = Sequence[tuple[str, int]]


# ---------------------------------------------------------------------- helpers
def lines(path: Path) -> list[str]:
    """Return the stripped lines of a list that are not blank."""
    # names of files are bytes
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    return [line.strip() for line in text.splitlines() if line.strip()]


def listed_splits(base: Path, classes: list[str], train: Listed, test: Listed) -> Listing:
    """Return the splits of listed images. FilesMissing if some are not there."""
    splits = []
    for images in (train, test):
        names = [name for name, _ in images]
        if missing := absent(base, names):
            raise FilesMissing(
                f"data.root: '{base}' lacks {len(missing)} listed images: {listed(missing, 3)}"
            )
        splits.append(split_of(base, names, [label for _, label in images], classes))
    return Listing(splits[0], test=splits[1])


def absent(base: Path, paths: Sequence[str]) -> list[str]:
    """Return the paths under a folder that do not exist."""
    return [path for path in paths if not os.path.exists(os.path.join(base, path))]


# ---------------------------------------------------------------------- libraries' readers
def read_digits() -> Listing:
    """Read scikit-learn's 8 x 8 digits, with one fixed, stratified split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], from 0..16
    pixels = np.repeat(grey[..., None], 3, axis=3)  # [1797, 8, 8, 3]
    names = [f"digits/{i:05d}" for i in range(len(grey))]
    everything = Split(
        pixels, names, digits.target.astype(np.int64), [str(name) for name in digits.target_names]
    )
    train, test = train_test_split(
        np.arange(len(grey)), test_size=360, stratify=digits.target, random_state=0
    )
    return Listing(everything.take(np.sort(train)), test=everything.take(np.sort(test)))


def _torchvision(kind: str, root: Path, **options):
    """Return a dataset of torchvision's. FilesMissing if it refuses the files."""
    from torchvision import datasets

    try:
        return getattr(datasets, kind)(root, **options)
    except Exception as error:  # a dozen types for damaged files
        if isinstance(error, RuntimeError):
            why = "a checksum differs"
        else:
            why = in_short(error)
        raise FilesMissing(
            f"data.root: files in '{root}' are damaged ({why}). Fetch them again"
        ) from None


def _by_torchvision(
    kind: str, folder: str, train: Sequence[str], names: str | None, root: Path
) -> Listing:
    """Return a dataset in ROOT/FOLDER. Train is its parts ``train``. ``names``: file of the
    classes, if any."""
    base = root / folder
    parts = []
    for part in (train, ("test",)):
        parts.append([])
        for name in part:
            dataset = _torchvision(kind, root, split=name)
            own = vars(dataset)  # each class has other names
            pairs = own.get("_samples") or zip(
                own.get("_images") or own["_image_files"], own["_labels"], strict=True
            )
            parts[-1] += [(Path(path).relative_to(base).as_posix(), label) for path, label in pairs]
    if names:
        classes = lines(files("idmm.data") / names)
    else:
        classes = map(str, dataset.classes)
    return listed_splits(base, list(classes), *parts)


read_flowers = partial(
    _by_torchvision, "Flowers102", "flowers-102", ("train", "val"), "flowers102.txt"
)
read_pets = partial(_by_torchvision, "OxfordIIITPet", "oxford-iiit-pet", ("trainval",), None)
read_dtd = partial(_by_torchvision, "DTD", "dtd/dtd", ("train", "val"), None)  # of split 1
# variants
read_aircraft = partial(
    _by_torchvision, "FGVCAircraft", "fgvc-aircraft-2013b/data", ("trainval",), None
)
read_cars = partial(_by_torchvision, "StanfordCars", "stanford_cars", ("train",), None)


def _arrays_of_torchvision(kind: str, parts: dict[str, dict], root: Path) -> Listing:
    """Return a dataset of pixels. ``parts``: options of train and test, by the beginning of their
    images' names."""
    splits = []
    for begin, options in parts.items():
        dataset = _torchvision(kind, root, **options)
        if kind == "SVHN":
            # uint8 [N, 32, 32, 3], int64 [N]
            pixels = dataset.data.transpose(0, 2, 3, 1)
            labels = dataset.labels
        else:
            pixels = dataset.data
            labels = dataset.targets
        names = [f"{begin}/{i:06d}" for i in range(len(pixels))]
        classes = [str(name) for name in getattr(dataset, "classes", range(10))]
        splits.append(
            Split(np.ascontiguousarray(pixels), names, np.array(labels, dtype=np.int64), classes)
        )
    return Listing(splits[0], test=splits[1])


_CIFAR = {"train": {"train": True}, "test": {"train": False}}
read_cifar10 = partial(_arrays_of_torchvision, "CIFAR10", _CIFAR)
read_cifar100 = partial(_arrays_of_torchvision, "CIFAR100", _CIFAR)  # its 100 fine classes
_SVHN = {f"{part}_32x32.mat": {"split": part} for part in ("train", "test")}
read_svhn = partial(_arrays_of_torchvision, "SVHN", _SVHN)  # cropped


# ---------------------------------------------------------------------- lists read here
def read_indoor67(root: Path) -> Listing:
    """Read MIT Indoor-67: Images/CLASS/, TrainImages.txt and TestImages.txt, whose lines are
    CLASS/FILE."""
    base = root / "indoorCVPR_09"
    parts = [
        [(path, path.split("/")[0]) for path in lines(base / f"{part}Images.txt")]
        for part in ("Train", "Test")
    ]
    classes = sorted({name for part in parts for _, name in part})
    return listed_splits(
        base,
        classes,
        *([(f"Images/{path}", classes.index(n)) for path, n in part] for part in parts),
    )


def read_cub200(root: Path) -> Listing:
    """Read Caltech-UCSD Birds 200-2011: images/ and lists of 'IMAGE_NUMBER VALUE'."""
    base = root / "CUB_200_2011"
    classes = [line.split(maxsplit=1)[1] for line in lines(base / "classes.txt")]
    lists = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
    path_of, label_of, is_train = (
        dict(line.split(maxsplit=1) for line in lines(base / name)) for name in lists
    )
    parts: dict[str, Listed] = {"1": [], "0": []}
    for number, path in path_of.items():
        parts[is_train[number]].append(
            (f"images/{path}", range(len(classes)).index(int(label_of[number]) - 1))
        )
    return listed_splits(base, classes, parts["1"], parts["0"])


def read_domainnet(root: Path, domain: str) -> Listing:
    """Read a domain of DomainNet: DOMAIN/CLASS/ and DOMAIN_{train,test}.txt, whose lines are 'PATH
    LABEL'.

    The lists number the classes. In painting, one class has no training and another no test images.
    A number without images is its own name.
    """
    base = root / "domainnet"
    pairs = [
        [line.rsplit(maxsplit=1) for line in lines(base / f"{domain}_{part}.txt")]
        for part in ("train", "test")
    ]
    # a path may hold spaces
    parts = [[(path.rstrip(), int(label)) for path, label in part] for part in pairs]
    names = {label: path.split("/")[-2] for part in parts for path, label in part}
    classes = [names.get(number, f"class {number}") for number in range(max(names) + 1)]
    return listed_splits(base, classes, *parts)


def read_imagenet(root: Path) -> Listing:
    """Read train/WNID/*.JPEG and val/WNID/*.JPEG."""
    return read_labelled(str(root), ("train", "val"))


def read_imagenet100(root: Path) -> Listing:
    """Read the 100 classes of Tian et al. (CMC) of ImageNet's folders."""
    listing = read_imagenet(root)
    wnids = sorted(lines(files("idmm.data") / "imagenet100.txt"))
    numbers = np.searchsorted(listing.train.classes, wnids)

    def of_these(split: Split) -> Split:
        part = split.take(np.flatnonzero(np.isin(split.labels, numbers)))
        return replace(part, labels=np.searchsorted(numbers, part.labels), classes=wnids)

    return Listing(of_these(listing.train), test=of_these(listing.test))
