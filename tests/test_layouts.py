"""Every dataset opens from its official layout with the right images, labels and names, in the order of the lists."""

import os
import re
from pathlib import Path

import numpy as np
import official_trees
import pytest
from official_trees import BUILD, GOLDFISH, IMAGES, TABBY, TENCH, opened, resize

from idmm.data.images import read_image
from idmm.data.readers import layout
from idmm.data.registry import DATASETS

IMAGENET_TRAIN = {
    f"train/{TENCH}/{TENCH}_26.JPEG": 0,
    f"train/{TENCH}/{TENCH}_27.JPEG": 0,
    f"train/{GOLDFISH}/{GOLDFISH}_26.JPEG": 1,
    f"train/{TABBY}/{TABBY}_26.JPEG": 2,
}
FLAT_VAL = {f"val/ILSVRC2012_val_0000000{i}.JPEG": label for i, label in ((1, 2), (2, 0), (3, 1), (4, 2))}
WANTED = {
    **IMAGES,
    "imagenet": (IMAGENET_TRAIN, FLAT_VAL, [TENCH, GOLDFISH, TABBY]),
    "imagenet100": (
        {name: min(label, 1) for name, label in IMAGENET_TRAIN.items() if GOLDFISH not in name},
        {f"val/ILSVRC2012_val_0000000{i}.JPEG": label for i, label in ((1, 1), (2, 0), (4, 1))},
        [TENCH, TABBY],
    ),
    "folder": (
        {"train/cat/0.png": 0, "train/cat/1.png": 0, "train/dog/0.png": 1},
        {"val/cat/0.png": 0, "val/dog/0.png": 1},
        ["cat", "dog"],
    ),
}

pytestmark = pytest.mark.usefixtures("any_checksum")


def is_as(split, images, classes):
    assert split.labels.dtype == np.int64
    assert list(zip(split.names, split.labels.tolist(), strict=True)) == list(images.items())
    if isinstance(classes, dict):
        assert len(split.classes) == 102 and {i: split.classes[i] for i in classes} == classes
    else:
        assert split.classes == classes


def matches(splits, wanted, base):
    train, test, classes = wanted
    is_as(splits.train, train, classes)
    is_as(splits.test, test, classes)
    assert splits.val is None and splits.size_mismatch == {}
    for split in (splits.train, splits.test):
        if isinstance(split.items, list):
            assert split.items == [os.path.join(base, *name.split("/")) for name in split.names]
            assert all(read_image(item, 10**6).pixels.shape == (9, 12, 3) for item in split.items)
        else:
            np.testing.assert_array_equal(split.items, official_trees.squares(50 * (split is splits.test), len(split)))
            assert split.items.dtype == np.uint8


@pytest.mark.parametrize("name", [name for name, spec in DATASETS.items() if not spec.embedded])
def test_opens_from_its_official_layout(name, tmp_path, monkeypatch):
    wanted = WANTED[name]
    base = BUILD[name](tmp_path)
    classes = 102 if name == "flowers" else len(wanted[2])
    resize(monkeypatch, name, len(wanted[0]), len(wanted[1]), None if name == "folder" else classes)
    between = [folder for folder in (base, *base.parents) if folder.is_relative_to(tmp_path)]
    assert between[-1] == tmp_path and (base == tmp_path or len(between) > 1)
    for root in between:  # what holds the dataset's folder, the folder itself, and what lies between
        matches(opened(name, root), wanted, base)


def test_all_datasets_are_covered():
    assert {*WANTED, "digits"} == set(DATASETS)


# ------------------------------------------------------------------ forms of a layout
def edited_elsewhere(root):
    """A byte order mark, blank lines, Windows' line ends, spaces and other alphabets in names."""
    base = official_trees.domainnet(root, "real")
    official_trees.images(base, [ODD])
    path = base / "real_train.txt"
    path.write_bytes(b"\xef\xbb\xbf" + f"{path.read_text()}\n{ODD} 2\n".replace("\n", " \r\n").encode())
    return base


ODD = "real/axe/eine Axt, größer (1).jpg"
SORTED_VAL = {
    f"val/{wnid}/ILSVRC2012_val_0000000{i}.JPEG": label
    for label, wnid, i in ((0, TENCH, 2), (1, GOLDFISH, 3), (2, TABBY, 1), (2, TABBY, 4))
}
FORMS = {  # dataset, builder, what is there if it is not as in WANTED
    "val in folders": ("imagenet", official_trees.imagenet_folders, {1: SORTED_VAL}),
    "kaggle": ("imagenet", official_trees.imagenet_kaggle, {}),
    "edited": ("domainnet-real", edited_elsewhere, {0: {**WANTED["domainnet-real"][0], ODD: 2}}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_a_layout(form, tmp_path, monkeypatch):
    name, build, other = FORMS[form]
    wanted = [other.get(i, part) for i, part in enumerate(WANTED[name])]
    resize(monkeypatch, name, *(len(part) for part in wanted))
    base = build(tmp_path)
    matches(opened(name, tmp_path), wanted, base)


@pytest.mark.parametrize("build", [official_trees.imagenet_folders, official_trees.imagenet_kaggle])
def test_imagenet100_takes_its_own_list_from_the_root(tmp_path, monkeypatch, build):
    resize(monkeypatch, "imagenet100", 3, 3, 2)
    base = build(tmp_path)
    official_trees.write(tmp_path / "imagenet100.txt", TENCH, TABBY)
    splits = opened("imagenet100", tmp_path)
    is_as(splits.train, WANTED["imagenet100"][0], [TENCH, TABBY])
    assert sorted(splits.test.labels.tolist()) == [0, 1, 1] and not any(GOLDFISH in item for item in splits.test.items)
    assert splits.test.items[0].startswith(str(base / "val"))


def test_imagenet100_comes_with_the_list_of_cmc(tmp_path, monkeypatch):
    resize(monkeypatch, "imagenet100", 100, 100, 100)
    wnids = [line.split()[0] for line in (Path(layout.__file__).parent / "imagenet100.txt").read_text().splitlines()]
    assert len(set(wnids)) == 100 and all(re.fullmatch(r"n\d{8}", wnid) for wnid in wnids)
    assert wnids[:3] == ["n02869837", "n01749939", "n02488291"]  # bonnet, green mamba, langur
    base = official_trees.imagenet100_shipped(tmp_path, [*wnids, TENCH, GOLDFISH])
    splits = opened("imagenet100", tmp_path)
    assert splits.train.classes == sorted(wnids) and not {TENCH, GOLDFISH} & set(wnids)
    assert splits.train.labels.tolist() == splits.test.labels.tolist() == list(range(100))
    assert splits.test.items[99] == str(base / f"val/{max(wnids)}/{max(wnids)}_1.JPEG")
