"""ImageNet (ILSVRC 2012) and its 100-class subset, from unpacked archives or Kaggle's copy."""

import csv
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np

from idmm.data.images import SUFFIXES
from idmm.data.readers.layout import HALF, base_folder, labels_in, lines, listed_split, mat, no_repeats
from idmm.data.split import Split, Splits
from idmm.errors import UserError, listed

_DEVKIT = "ILSVRC2012_devkit_t12/data"
_KAGGLE = "LOC_val_solution.csv"
_CLS_LOC = Path("ILSVRC/Data/CLS-LOC")  # where Kaggle's copy has the images, below its tables


def read_imagenet(root: Path) -> Splits:
    """train/WNID/*.JPEG and val, in WNID folders, or flat with the devkit or with Kaggle's LOC_val_solution.csv."""
    base = _base(root, "imagenet")
    return _read(root, base, sorted(_folders(base / "train")))


def read_imagenet100(root: Path) -> Splits:
    """The classes of ROOT/imagenet100.txt, a WNID a line; where there is none, those of Tian et al. (CMC)."""
    base = _base(root, "imagenet100")
    own = next((folder / "imagenet100.txt" for folder in (root, base) if (folder / "imagenet100.txt").exists()), None)
    path = own or files("idmm.data.readers") / "imagenet100.txt"
    wanted = [line.split()[0] for line in lines(path)]
    if len(set(wanted)) < len(wanted):
        raise UserError(f"data.root: '{path}' names a class twice")
    if absent := [wnid for wnid in wanted if not (base / "train" / wnid).is_dir()]:
        raise UserError(f"data.root: '{base / 'train'}' lacks classes of '{path}': {listed(absent)}; {HALF}")
    return _read(root, base, sorted(wanted))


def _base(root: Path, name: str) -> Path:
    return base_folder(root, name, (str(_CLS_LOC), "imagenet"), ("train", "val"))


def _read(root: Path, base: Path, wnids: list[str]) -> Splits:
    if not wnids:
        raise UserError(f"data.root: '{base / 'train'}' has no class folders; wanted train/WNID/*.JPEG")
    train = _from_folders(base, "train", wnids)
    if _folders(base / "val"):
        if absent := [wnid for wnid in wnids if not (base / "val" / wnid).is_dir()]:
            raise UserError(f"data.root: '{base / 'val'}' lacks the classes {listed(absent)}; {HALF}")
        return Splits(train, None, _from_folders(base, "val", wnids))
    return Splits(train, None, _flat_val(root, base, wnids))


def _from_folders(base: Path, part: str, wnids: list[str]) -> Split:
    paths, labels = [], []
    for label, wnid in enumerate(wnids):
        names = _images(base / part / wnid)
        if not names:
            raise UserError(f"data.root: '{base / part / wnid}' has no images; {HALF}")
        paths += [f"{part}/{wnid}/{name}" for name in names]
        labels += [label] * len(names)
    items = [os.path.join(base, path) for path in paths]
    return Split(items, paths, np.array(labels, dtype=np.int64), wnids)


def _flat_val(root: Path, base: Path, wnids: list[str]) -> Split:
    """val/*.JPEG, whose labels stand elsewhere."""
    readers: tuple[tuple[str, Callable], ...] = ((_DEVKIT, _devkit_labels), (_KAGGLE, _kaggle_labels))
    above = [base.parents[2]] if base.parts[-3:] == _CLS_LOC.parts else []
    for place, reader in readers:
        for folder in (root, base, *above):
            if (folder / place).exists():
                source, of_image = reader(folder / place, base / "val")
                index = {wnid: i for i, wnid in enumerate(wnids)}
                kept = {f"val/{name}": index[wnid] for name, wnid in sorted(of_image.items()) if wnid in index}
                return listed_split(base, source, list(kept), list(kept.values()), wnids)
    wanted = f"wanted val/WNID/*.JPEG, or {_DEVKIT} or {_KAGGLE} beside it"
    raise UserError(f"data.root: '{base / 'val'}' has no class folders and no labels; {wanted}")


def _devkit_labels(folder: Path, val: Path) -> tuple[Path, dict[str, str]]:
    """Image name → WNID, from the order of the ground truth file."""
    (synsets,) = mat(folder / "meta.mat", "synsets")
    fields = synsets.dtype.names or ()
    if not {"ILSVRC2012_ID", "WNID", "num_children"} <= set(fields):
        raise UserError(f"data.root: '{folder / 'meta.mat'}' has no synsets with ILSVRC2012_ID, WNID and num_children")
    try:
        wnid_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["num_children"]) == 0}
    except (TypeError, ValueError):  # no numbers
        wnid_of = {}
    if not wnid_of or sorted(wnid_of) != list(range(1, len(wnid_of) + 1)):
        raise UserError(f"data.root: '{folder / 'meta.mat'}' does not number its synsets without children from 1")
    truth = folder / "ILSVRC2012_validation_ground_truth.txt"
    numbers = labels_in(truth, lines(truth), 1, len(wnid_of)) + 1
    names = _images(val)
    if len(names) != len(numbers):
        raise UserError(f"data.root: '{val}' has {len(names)} images, '{truth}' labels for {len(numbers)}; {HALF}")
    return truth, {name: wnid_of[number] for name, number in zip(names, numbers.tolist(), strict=True)}


def _kaggle_labels(path: Path, val: Path) -> tuple[Path, dict[str, str]]:
    """Image name → WNID, from columns ImageId and PredictionString, which begins with the WNID."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            table = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        why = getattr(error, "strerror", None) or "damaged, or not a table"
        raise UserError(f"data.root: cannot read '{path}' ({why.lower()})") from None
    if not table or not {"ImageId", "PredictionString"} <= set(table[0]):
        raise UserError(f"data.root: '{path}' has no columns ImageId and PredictionString")
    words = {row["ImageId"]: (row["PredictionString"] or "").split() for row in table}
    no_repeats(path, [row["ImageId"] for row in table])
    if absent := [image for image, found in words.items() if not found]:
        raise UserError(f"data.root: '{path}' has no WNID for {listed(absent, 3)}; wanted 'IMAGE,WNID ...'")
    return path, {f"{image}.JPEG": found[0] for image, found in words.items()}


def _folders(path: Path) -> list[str]:
    return [entry.name for entry in _entries(path) if entry.is_dir()]


def _images(path: Path) -> list[str]:
    names = [entry.name for entry in _entries(path)]
    return sorted(name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES)


def _entries(path: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"data.root: '{path}' cannot be read ({(error.strerror or str(error)).lower()})") from None
