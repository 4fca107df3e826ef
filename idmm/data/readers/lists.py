"""Datasets whose lists are read here: indoor67, cub200, the domains of DomainNet, and ImageNet."""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from idmm.data.formats import SUFFIXES
from idmm.data.readers.layout import FilesMissing, Listed, folder_of, lines, listed_splits, names_by_number, rows
from idmm.data.split import Listing
from idmm.errors import listed, reason

_TWO = r"(\S+)\s+(.+)"  # a word, and the rest of the line


def read_indoor67(root: Path) -> Listing:
    """MIT Indoor-67: Images/CLASS/, TrainImages.txt and TestImages.txt."""
    lists = ("TrainImages.txt", "TestImages.txt")
    base = folder_of("indoor67", root, "indoorCVPR_09", "Images", *lists)
    parts = [rows(base / name, "(([^/]+)/[^/]+)", "CLASS/FILE") for name in lists]
    classes = sorted({name for part in parts for _, name in part})
    index = {name: i for i, name in enumerate(classes)}
    return listed_splits(base, classes, *([(f"Images/{path}", index[name]) for path, name in part] for part in parts))


def read_cub200(root: Path) -> Listing:
    """Caltech-UCSD Birds 200-2011: images/ and lists of 'IMAGE_NUMBER VALUE'."""
    lists = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
    base = folder_of("cub200", root, "CUB_200_2011", "images", *lists, "classes.txt")
    classes = [name for _, name in rows(base / "classes.txt", _TWO, "CLASS_NUMBER NAME")]
    path_of, label_of, is_train = (dict(rows(base / name, _TWO, "IMAGE_NUMBER VALUE")) for name in lists)
    parts: dict[str, Listed] = {"1": [], "0": []}
    try:
        for number, path in path_of.items():
            parts[is_train[number]].append((f"images/{path}", range(len(classes)).index(int(label_of[number]) - 1)))
    except (KeyError, ValueError):
        raise FilesMissing(f"data.root: the lists in '{base}' do not agree on image {number}") from None
    return listed_splits(base, classes, parts["1"], parts["0"])


def read_domainnet(root: Path, domain: str) -> Listing:
    """A domain of DomainNet: DOMAIN/CLASS/ and DOMAIN_{train,test}.txt, whose lines are 'PATH LABEL'.

    Classes are numbered as the lists do it. In painting, one class has no training and another no test images.
    """
    lists = [f"{domain}_{part}.txt" for part in ("train", "test")]
    base = folder_of(f"domainnet-{domain}", root, "domainnet", domain, *lists)
    # a path may hold spaces: the label is the last word
    parts = [rows(base / name, r"(.+/([^/]+)/[^/]*\S) +(\d+)", f"{domain}/CLASS/FILE LABEL") for name in lists]
    classes = names_by_number((int(label), name) for part in parts for _, name, label in part)
    return listed_splits(base, classes, *([(path, int(label)) for path, _, label in part] for part in parts))


# ---------------------------------------------------------------------- ImageNet
def read_imagenet(root: Path) -> Listing:
    """train/WNID/*.JPEG and val/WNID/*.JPEG."""
    base = folder_of("imagenet", root, "", "train", "val")
    return _imagenet(base, [name for name in _children(base / "train") if (base / "train" / name).is_dir()])


def read_imagenet100(root: Path) -> Listing:
    """The 100 classes of Tian et al. (CMC)."""
    wnids = sorted(lines(files("idmm.data.readers") / "imagenet100.txt"))
    return _imagenet(folder_of("imagenet100", root, "", "train", "val"), wnids)


def _imagenet(base: Path, wnids: list[str]) -> Listing:
    return listed_splits(base, wnids, *(_in_folders(base, part, wnids) for part in ("train", "val")))


def _in_folders(base: Path, part: str, wnids: Sequence[str]) -> Listed:
    if absent := [wnid for wnid in wnids if not (base / part / wnid).is_dir()]:
        raise FilesMissing(f"data.root: '{base / part}' lacks class folders: {listed(absent)}")
    return [
        (f"{part}/{wnid}/{name}", label)
        for label, wnid in enumerate(wnids)
        for name in _children(base / part / wnid)
        if os.path.splitext(name)[1].lower() in SUFFIXES
    ]


def _children(path: Path) -> list[str]:
    """Returns what a folder holds, sorted, without hidden names."""
    try:
        return sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise FilesMissing(f"data.root: '{path}' cannot be read ({reason(error)})") from None
