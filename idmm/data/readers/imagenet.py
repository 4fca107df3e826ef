"""ImageNet (ILSVRC 2012) and its 100-class subset, from unpacked archives or Kaggle's copy."""

import csv
import os
from importlib.resources import files
from pathlib import Path

import numpy as np

from idmm.data.formats import SUFFIXES
from idmm.data.readers.layout import NotAsPublished, folder_with, lines, listed_split, mat, no_repeats, numbers_from
from idmm.data.split import Split, Splits
from idmm.errors import listed, reason

_DEVKIT = "ILSVRC2012_devkit_t12/data"
_KAGGLE = "LOC_val_solution.csv"
_CLS_LOC = Path("ILSVRC/Data/CLS-LOC")  # where Kaggle's copy has the images, below its tables


def read_imagenet(root: Path) -> Splits:
    """train/WNID/*.JPEG and val, in WNID folders, or flat with the devkit or with Kaggle's LOC_val_solution.csv."""
    base = _base(root, "imagenet")
    wnids, _ = _content(base / "train")
    if not wnids:
        raise NotAsPublished(base / "train", "has no class folders", "train/WNID/*.JPEG")
    return _read(root, base, wnids, base / "train")


def read_imagenet100(root: Path) -> Splits:
    """The classes of ROOT/imagenet100.txt, a WNID a line; where there is none, those of Tian et al. (CMC)."""
    base = _base(root, "imagenet100")
    shipped = files("idmm.data.readers") / "imagenet100.txt"
    path = next((path for path in (root / shipped.name, base / shipped.name) if path.exists()), shipped)
    wnids = [line.split()[0] for line in lines(path)]
    if len(set(wnids)) < len(wnids):
        raise NotAsPublished(path, "names a class twice", "a WNID a line, each once")
    return _read(root, base, sorted(wnids), path)


def _base(root: Path, name: str) -> Path:
    return folder_with(name, [root, root / _CLS_LOC, root / "imagenet"], "train", "val")


def _read(root: Path, base: Path, wnids: list[str], source: Path) -> Splits:
    """``source``: where the classes come from, for errors."""
    train = _from_folders(base, "train", wnids, source)
    folders, images = _content(base / "val")
    val = _from_folders(base, "val", wnids, source) if folders else _flat_val(root, base, wnids, images)
    return Splits(train, None, val)


def _from_folders(base: Path, part: str, wnids: list[str], source: Path) -> Split:
    if absent := [wnid for wnid in wnids if not (base / part / wnid).is_dir()]:
        raise NotAsPublished(base / part, f"lacks classes of '{source}': {listed(absent)}")
    paths, labels = [], []
    for label, wnid in enumerate(wnids):
        _, names = _content(base / part / wnid)
        if not names:
            raise NotAsPublished(base / part / wnid, "has no images")
        paths += [f"{part}/{wnid}/{name}" for name in names]
        labels += [label] * len(names)
    return Split([os.path.join(base, path) for path in paths], paths, np.array(labels, dtype=np.int64), wnids)


def _flat_val(root: Path, base: Path, wnids: list[str], images: list[str]) -> Split:
    """val/*.JPEG, whose labels stand elsewhere."""
    above = [base.parents[2]] if base.parts[-3:] == _CLS_LOC.parts else []
    for place in (folder / name for name in (_DEVKIT, _KAGGLE) for folder in (root, base, *above)):
        if place.exists():
            source, of_image = _kaggle_labels(place) if place.name == _KAGGLE else _devkit_labels(place, base, images)
            index = {wnid: i for i, wnid in enumerate(wnids)}
            kept = {f"val/{name}": index[wnid] for name, wnid in sorted(of_image.items()) if wnid in index}
            return listed_split(base, wnids, source, list(kept), list(kept.values()))
    wanted = f"val/WNID/*.JPEG, or {_DEVKIT} or {_KAGGLE} beside it"
    raise NotAsPublished(base / "val", "has no class folders and no labels", wanted)


def _devkit_labels(folder: Path, base: Path, images: list[str]) -> tuple[Path, dict[str, str]]:
    """The file of labels, and image name → WNID, from the order of that file."""
    meta, truth = folder / "meta.mat", folder / "ILSVRC2012_validation_ground_truth.txt"
    (synsets,) = mat(meta, "synsets")
    try:
        wnid_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["num_children"]) == 0}
    except (TypeError, ValueError, IndexError):  # no such fields, or no numbers
        wnid_of = {}
    if not wnid_of or sorted(wnid_of) != list(range(1, len(wnid_of) + 1)):
        wanted = "synsets with ILSVRC2012_ID, WNID and num_children, those without children numbered from 1"
        raise NotAsPublished(meta, "has other synsets", wanted)
    numbers = numbers_from(truth, lines(truth), 1, len(wnid_of)) + 1
    if len(images) != len(numbers):
        raise NotAsPublished([base / "val", truth], f"have {len(images)} images and {len(numbers)} labels")
    return truth, {name: wnid_of[number] for name, number in zip(images, numbers.tolist(), strict=True)}


def _kaggle_labels(path: Path) -> tuple[Path, dict[str, str]]:
    """The file, and image name → WNID, from columns ImageId and PredictionString, which begins with the WNID."""
    wanted = "a table with the columns ImageId and PredictionString"
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            table = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        why = reason(error) if isinstance(error, OSError) else "damaged, or another format"
        raise NotAsPublished(path, f"cannot be read ({why})", wanted) from None
    if not table or not {"ImageId", "PredictionString"} <= set(table[0]):
        raise NotAsPublished(path, "lacks columns or rows", wanted)
    words = {row["ImageId"]: (row["PredictionString"] or "").split() for row in table}
    no_repeats(path, [row["ImageId"] for row in table])
    if absent := [image for image, found in words.items() if not found]:
        raise NotAsPublished(path, f"has no WNID for {listed(absent, 3)}", "'IMAGE,WNID ...'")
    return path, {f"{image}.JPEG": found[0] for image, found in words.items()}


def _content(path: Path) -> tuple[list[str], list[str]]:
    """Names of the folders and of the images in a folder, each sorted."""
    try:
        with os.scandir(path) as found:
            children = sorted((child.name, child.is_dir()) for child in found if not child.name.startswith("."))
    except OSError as error:
        raise NotAsPublished(path, f"cannot be read ({reason(error)})", "a folder") from None
    images = [name for name, _ in children if os.path.splitext(name)[1].lower() in SUFFIXES]
    return [name for name, is_dir in children if is_dir], images
