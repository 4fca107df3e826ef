"""Official datasets as their publishers lay them out: from a root to paths (or pixels) and labels.

torchvision reads lists, arrays and checksums, and decodes no image here. It names classes and parts
in its own way, so names come from the files.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idmm.data.folder import FilesMissing, read_labelled
from idmm.data.split import Listing, Split, split_of
from idmm.errors import in_short
from idmm.text import listed


class Listed(NamedTuple):
    """A line of a publisher's list."""

    path: str  # below the dataset's folder, '/' between
    label: int


# ---------------------------------------------------------------------- helpers
def lines(path: Path) -> list[str]:
    """Return the stripped lines of a list that are not blank."""
    text = path.read_bytes().decode("utf-8-sig", "surrogateescape")  # names of files are bytes
    return list(filter(None, map(str.strip, text.splitlines())))


def listed_splits(
    base: Path, classes: list[str], train: Sequence[Listed], test: Sequence[Listed]
) -> Listing:
    """Return the splits of listed images. FilesMissing if some are not there."""
    splits = []
    for images in (train, test):
        names = [image.path for image in images]
        if missing := absent(base, names):
            raise FilesMissing.of(
                "data.root", f"'{base}' lacks {len(missing)} listed images: {listed(missing, 3)}"
            )
        splits.append(split_of(base, names, [image.label for image in images], classes))
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
    classes = list(map(str, digits.target_names))
    everything = Split(pixels, names, digits.target.astype(np.int64), classes)
    train, test = train_test_split(
        np.arange(len(grey)), test_size=360, stratify=digits.target, random_state=0
    )
    return Listing(everything.take(np.sort(train)), test=everything.take(np.sort(test)))


def _torchvision(kind: str, root: Path, **options: Any) -> Any:
    """Return a dataset of torchvision's. FilesMissing if it refuses the files."""
    from torchvision import datasets

    try:
        return getattr(datasets, kind)(root, **options)
    except Exception as error:  # a dozen types for damaged files
        problem = in_short(error)
        if isinstance(error, RuntimeError):
            problem = "a checksum differs"
        raise FilesMissing.of(
            "data.root", f"files in '{root}' are damaged ({problem})", "Fetch them again"
        ) from None


def read_by_torchvision(
    root: Path, kind: str, folder: str, train: Sequence[str], names: str | None = None
) -> Listing:
    """Read a dataset in ROOT/FOLDER.

    Args:
        root: Of the dataset.
        kind: torchvision's class.
        folder: Where it lies.
        train: Parts to train on.
        names: File of the classes. None: torchvision's.
    """
    base = root / folder

    def images_of(dataset: Any) -> list[Listed]:
        own = vars(dataset)  # each class has other names
        pairs = own.get("_samples")
        if not pairs:
            paths = own.get("_images") or own["_image_files"]
            pairs = zip(paths, own["_labels"], strict=True)
        return [Listed(Path(path).relative_to(base).as_posix(), label) for path, label in pairs]

    images = []
    for part in train:
        images += images_of(_torchvision(kind, root, split=part))
    test = _torchvision(kind, root, split="test")
    if names:
        classes = lines(Path(__file__).with_name(names))
    else:
        classes = list(map(str, test.classes))
    return listed_splits(base, classes, images, images_of(test))


def _arrays_of_torchvision(kind: str, parts: Mapping[str, dict[str, Any]], root: Path) -> Listing:
    """Return a dataset of pixels.

    Args:
        kind: torchvision's class.
        parts: Options of train and test, by the beginning of their images' names.
        root: Of the dataset.
    """
    splits = []
    for begin, options in parts.items():
        dataset = _torchvision(kind, root, **options)
        pixels = dataset.data  # uint8 [N, 32, 32, 3]
        if kind == "SVHN":  # [N, 3, 32, 32]
            pixels = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
            labels = dataset.labels
            classes = list(map(str, range(10)))
        else:
            labels = dataset.targets
            classes = dataset.classes
        names = [f"{begin}/{i:06d}" for i in range(len(pixels))]
        splits.append(Split(pixels, names, np.array(labels, dtype=np.int64), classes))
    return Listing(splits[0], test=splits[1])


# ---------------------------------------------------------------------- lists read here
def read_indoor67(root: Path) -> Listing:
    """Read MIT Indoor-67: Images/, and TrainImages.txt and TestImages.txt of lines CLASS/FILE."""
    base = root / "indoorCVPR_09"
    train = lines(base / "TrainImages.txt")
    test = lines(base / "TestImages.txt")
    classes = sorted({path.split("/")[0] for path in train + test})

    def images(paths: list[str]) -> list[Listed]:
        return [Listed(f"Images/{path}", classes.index(path.split("/")[0])) for path in paths]

    return listed_splits(base, classes, images(train), images(test))


def read_cub200(root: Path) -> Listing:
    """Read Caltech-UCSD Birds 200-2011: images/ and lists of 'IMAGE_NUMBER VALUE'."""
    base = root / "CUB_200_2011"

    def column(name: str) -> dict[str, str]:
        return dict(line.split(maxsplit=1) for line in lines(base / name))

    classes = list(column("classes.txt").values())
    label_of = column("image_class_labels.txt")
    is_train = column("train_test_split.txt")
    parts: dict[str, list[Listed]] = {"1": [], "0": []}
    for number, path in column("images.txt").items():
        label = range(len(classes)).index(int(label_of[number]) - 1)
        parts[is_train[number]].append(Listed(f"images/{path}", label))
    return listed_splits(base, classes, parts["1"], parts["0"])


def read_domainnet(root: Path, domain: str) -> Listing:
    """Read a domain of DomainNet: DOMAIN/CLASS/, and DOMAIN_{train,test}.txt of lines 'PATH LABEL'.

    The lists number the classes. In painting, one class has no training and another no test images.
    A number without images is its own name.
    """
    base = root / "domainnet"

    def images(part: str) -> list[Listed]:
        rows = []
        for line in lines(base / f"{domain}_{part}.txt"):
            path, label = line.rsplit(maxsplit=1)
            rows.append(Listed(path.rstrip(), int(label)))  # a path may hold spaces
        return rows

    train = images("train")
    test = images("test")
    names = {label: path.split("/")[-2] for path, label in train + test}
    classes = [names.get(number, f"class {number}") for number in range(max(names) + 1)]
    return listed_splits(base, classes, train, test)


def read_imagenet(root: Path) -> Listing:
    """Read train/WNID/*.JPEG and val/WNID/*.JPEG."""
    return read_labelled(str(root), ("train", "val"))


def read_imagenet100(root: Path) -> Listing:
    """Read the 100 classes of Tian et al. (CMC) of ImageNet's folders."""
    listing = read_imagenet(root)
    wnids = sorted(lines(Path(__file__).with_name("imagenet100.txt")))
    numbers = np.searchsorted(listing.train.class_names, wnids)

    def of_these(split: Split) -> Split:
        part = split.take(np.flatnonzero(np.isin(split.known_labels, numbers)))
        return replace(part, labels=np.searchsorted(numbers, part.known_labels), classes=wnids)

    return listing.with_parts({name: of_these(split) for name, split in listing.parts.items()})


_CIFAR = {"train": {"train": True}, "test": {"train": False}}
_SVHN = {f"{part}_32x32.mat": {"split": part} for part in ("train", "test")}  # cropped
_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")

# from the root of a dataset to its images. Others: ``torchvision`` in datasets.yaml, folder, digits
READERS: dict[str, Callable[[Path], Listing]] = {
    "cifar10": partial(_arrays_of_torchvision, "CIFAR10", _CIFAR),
    # its 100 fine classes
    "cifar100": partial(_arrays_of_torchvision, "CIFAR100", _CIFAR),
    "svhn": partial(_arrays_of_torchvision, "SVHN", _SVHN),
    "indoor67": read_indoor67,
    "cub200": read_cub200,
    "imagenet": read_imagenet,
    "imagenet100": read_imagenet100,
    **{f"domainnet-{domain}": partial(read_domainnet, domain=domain) for domain in _DOMAINS},
}
