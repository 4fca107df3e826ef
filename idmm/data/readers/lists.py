"""Datasets whose lists are read here: indoor67, cub200, the domains of DomainNet, and ImageNet."""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from idmm.data.formats import SUFFIXES
from idmm.data.readers.layout import FilesMissing, Listed, folder_of, listed_splits, names_by_number, rows
from idmm.data.split import Splits
from idmm.errors import in_short, listed, reason

_TWO = r"(\S+)\s+(.+)"  # a word, and the rest of the line
_DEVKIT = "ILSVRC2012_devkit_t12/data"
_KAGGLE = "LOC_val_solution.csv"
_CLS_LOC = "ILSVRC/Data/CLS-LOC"  # where Kaggle's copy has the images, below its tables


def read_indoor67(root: Path) -> Splits:
    """MIT Indoor-67: Images/CLASS/, TrainImages.txt and TestImages.txt."""
    lists = ("TrainImages.txt", "TestImages.txt")
    base = folder_of("indoor67", root, "indoorCVPR_09", "Images", *lists)
    parts = [rows(base / name, "(([^/]+)/[^/]+)", "CLASS/FILE") for name in lists]
    classes = sorted({name for part in parts for _, name in part})
    index = {name: i for i, name in enumerate(classes)}
    return listed_splits(base, classes, *([(f"Images/{path}", index[name]) for path, name in part] for part in parts))


def read_cub200(root: Path) -> Splits:
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


def read_domainnet(root: Path, domain: str) -> Splits:
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
def read_imagenet(root: Path) -> Splits:
    """train/WNID/*.JPEG and val, in WNID folders, or flat with the devkit or with Kaggle's LOC_val_solution.csv."""
    base = folder_of("imagenet", root, _CLS_LOC if (root / _CLS_LOC).is_dir() else "", "train", "val")
    return _imagenet(root, base, _content(base / "train")[0], base / "train")


def read_imagenet100(root: Path) -> Splits:
    """The classes of ROOT/imagenet100.txt, a WNID a line; where there is none, those of Tian et al. (CMC)."""
    base = folder_of("imagenet100", root, _CLS_LOC if (root / _CLS_LOC).is_dir() else "", "train", "val")
    path = root / "imagenet100.txt"
    path = path if path.exists() else files("idmm.data.readers") / "imagenet100.txt"
    return _imagenet(root, base, sorted({wnid for (wnid,) in rows(path, r"(\S+).*", "WNID")}), path)


def _imagenet(root: Path, base: Path, wnids: list[str], source: Path) -> Splits:
    """``source``: where the classes come from, for errors."""
    folders, images = _content(base / "val")
    val = _in_folders(base, "val", wnids, source) if folders else _flat(root, base, wnids, images)
    return listed_splits(base, wnids, _in_folders(base, "train", wnids, source), val)


def _in_folders(base: Path, part: str, wnids: Sequence[str], source: Path) -> Listed:
    if absent := [wnid for wnid in wnids if not (base / part / wnid).is_dir()]:
        raise FilesMissing(f"data.root: '{base / part}' lacks classes of '{source}': {listed(absent)}")
    images = {wnid: _content(base / part / wnid)[1] for wnid in wnids}
    if empty := [wnid for wnid, names in images.items() if not names]:
        raise FilesMissing(f"data.root: '{base / part}' has no images of {listed(empty)}")
    return [(f"{part}/{wnid}/{name}", label) for label, wnid in enumerate(wnids) for name in images[wnid]]


def _flat(root: Path, base: Path, wnids: Sequence[str], images: list[str]) -> Listed:
    """val/*.JPEG, whose labels stand in the devkit or in Kaggle's table."""
    if (root / _KAGGLE).exists():
        table = rows(root / _KAGGLE, r"([^,]+),(\S+).*", "ImageId,PredictionString")[1:]
        wnid_of = {f"{image}.JPEG": wnid for image, wnid in table}
    elif (root / _DEVKIT).is_dir():
        wnid_of = _devkit(root / _DEVKIT, images)
    else:
        what = f"'{base / 'val'}' has no class folders and no labels"
        raise FilesMissing(f"data.root: {what}; expected val/WNID/*.JPEG, or '{_DEVKIT}' or '{_KAGGLE}' in '{root}'")
    index = {wnid: i for i, wnid in enumerate(wnids)}
    return [(f"val/{name}", index[wnid]) for name, wnid in sorted(wnid_of.items()) if wnid in index]


def _devkit(folder: Path, images: list[str]) -> dict[str, str]:
    """Returns image name → WNID: the numbers of the synsets stand in the order of the images."""
    from scipy.io import loadmat

    truth = [int(number) for (number,) in rows(folder / "ILSVRC2012_validation_ground_truth.txt", r"(\d+)", "NUMBER")]
    try:
        synsets = loadmat(folder / "meta.mat", squeeze_me=True)["synsets"]
        wnid_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["num_children"]) == 0}
        return {name: wnid_of[number] for name, number in zip(images, truth, strict=True)}
    except Exception as error:  # scipy raises a dozen types on broken files
        why = f"{len(images)} images, {len(truth)} labels; {in_short(error)}"
        raise FilesMissing(f"data.root: '{folder}' does not fit the images of val ({why})") from None


def _content(path: Path) -> tuple[list[str], list[str]]:
    """Returns the names of the folders and of the images in a folder, each sorted."""
    try:
        with os.scandir(path) as found:
            children = sorted((child.name, child.is_dir()) for child in found if not child.name.startswith("."))
    except OSError as error:
        raise FilesMissing(f"data.root: '{path}' cannot be read ({reason(error)})") from None
    images = [name for name, _ in children if os.path.splitext(name)[1].lower() in SUFFIXES]
    return [name for name, is_dir in children if is_dir], images
