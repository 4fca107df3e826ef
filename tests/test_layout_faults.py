"""Datasets that are not as they should be: each fault is one line with the path and the remedy."""

import itertools
import json
import shutil

import official_trees
import pytest
from folders import faults, paint, section
from helpers import inside
from official_trees import BUILD, advice, append, opened, resize, write

from idmm import config
from idmm.data.listing import list_images


def refused(name, root):
    return faults(opened, name, root)


# ------------------------------------------------------------------ roots and names
@pytest.mark.parametrize("name", ["flowers", "cars"])
def test_roots_that_are_none(name, tmp_path):
    wanted = f"data.name '{name}' expects its folder ('idmm data info {name}' shows it)"
    assert refused(name, None) == [f"data.root: missing, {wanted}", advice(name, "DIR")]
    line = f"data.root: '{tmp_path / 'x'}' does not exist, expected the folder that holds {name}"
    assert refused(name, tmp_path / "x") == [line, advice(name, tmp_path / "x")]


@pytest.mark.parametrize(
    ("name", "file"), {"flowers": "setid.mat", "cub200": "images", "cifar100": "meta", "imagenet": "val"}.items()
)
def test_what_a_folder_lacks_is_named(name, file, tmp_path):
    base = BUILD[name](tmp_path)
    shutil.rmtree(base / file) if (base / file).is_dir() else (base / file).unlink()
    line = f"data.root: '{base}' lacks {file}; 'idmm data info {name}' shows the expected files"
    assert refused(name, tmp_path) == [line, advice(name, tmp_path)]


# ------------------------------------------------------------------ damaged files
SPOILT = [  # dataset, what is done to the base, the line
    ("pets", lambda b: (b / "images/Abyssinian_201.jpg").unlink(),
     "'BASE' lacks 1 listed images: images/Abyssinian_201.jpg"),
    ("aircraft", lambda b: append(b / "images_variant_test.txt", "1514522 Zeppelin NT"),
     "files in 'BASE/..' are damaged (KeyError: 'Zeppelin NT'). Fetch them again"),
    ("indoor67", lambda b: append(b / "TestImages.txt", "\nImages/gameroom/1.jpg"),
     "'BASE/TestImages.txt' has 'Images/gameroom/1.jpg' in line 4, expected 'CLASS/FILE'"),
    ("indoor67", lambda b: write(b / "TestImages.txt"),
     "'BASE/TestImages.txt' is empty"),
    ("indoor67", lambda b: (b / "TestImages.txt").unlink() or (b / "TestImages.txt").mkdir(),
     "'BASE/TestImages.txt' cannot be read (is a directory)"),
    ("cub200", lambda b: append(b / "images.txt", "6 x.jpg"), "the lists in 'BASE' do not agree on image 6"),
    ("cub200", lambda b: append(b / "image_class_labels.txt", "2 0"), "the lists in 'BASE' do not agree on image 2"),
    ("cub200", lambda b: write(b / "train_test_split.txt", *(f"{i} 1" for i in range(1, 6))),
     "the lists in 'BASE' name no image of a split"),
    ("imagenet", lambda b: paint(b / "train/n00000001/1.JPEG"),
     "'BASE/val' lacks class folders: n00000001"),
    ("imagenet", lambda b: shutil.rmtree(b / "train") or (b / "train").touch(),
     "'BASE/train' cannot be read (not a directory)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "text"), SPOILT, ids=[f"{i}-{r[0]}" for i, r in enumerate(SPOILT)])
def test_what_is_wrong_is_named(name, spoil, text, tmp_path):
    base = BUILD[name](tmp_path)
    spoil(base)
    for labelled in (True, False):
        line, more = faults(list_images, section(tmp_path, name=name), labelled)
        line = line.replace(str(base), "BASE").replace(str(base.parent), "BASE/..")
        assert line.startswith(f"data.root: {text}") and more == advice(name, tmp_path)


@pytest.mark.parametrize("name", ["flowers", "cifar10", "cifar100", "svhn"])
def test_other_files_than_the_publishers(name, tmp_path):
    """Their checksums are verified before anything is read: a pickle may run anything."""
    base = BUILD[name](tmp_path)
    line = f"data.root: files in '{base}' are damaged (a checksum differs). Fetch them again"
    assert refused(name, tmp_path) == [line, advice(name, tmp_path)]


# ------------------------------------------------------------------ sizes
def test_sizes_other_than_the_protocols(tmp_path, monkeypatch):
    official_trees.dtd(tmp_path)
    resize(monkeypatch, "dtd", 7, 4, 47)
    for labelled in (True, False):
        assert faults(list_images, section(tmp_path, name="dtd"), labelled) == [
            "data.root: dtd: the split 'train' has 6 images, its protocol 7",
            "data.root: dtd: the split 'test' has 3 images, its protocol 4",
            "data.root: dtd: has 3 classes, its protocol 47",
        ]
    resize(monkeypatch, "dtd", 6, 3, 3)  # what is held out or not drawn is no mismatch
    splits = opened("dtd", tmp_path, val_fraction=0.5, subset=config.Subset(total=2))
    assert (len(splits.train), len(splits.val), len(splits.test)) == (2, 3, 3)


# ------------------------------------------------------------------ the real command line
def test_flowers_through_both_stages(tmp_path, monkeypatch, any_checksum):
    """24 px, three of the 102 classes."""
    resize(monkeypatch, "flowers", 12, 12, 102)
    labels = [77, 1, 102] * 4 + [77] + [1] * 3 + [102] * 8  # the test images: 1, 3 and 8 of a class
    numbers = {"trnid": list(range(1, 9)), "valid": list(range(9, 13)), "tstid": list(range(13, 25))}
    official_trees.flowers(tmp_path / "data", size=(24, 24), labels=labels, **numbers)
    common = dict(data__name="flowers", data__root=str(tmp_path / "data"), data__subset=None)
    common |= dict(train__epochs=1, train__warmup_epochs=0, train__batch_size=12)
    assert inside("pretrain", tmp_path / "a", **common) == 0
    common |= dict(init=str(tmp_path / "a"), stages=[{"size": 24}], train__classifier_init="random")
    assert inside("finetune", tmp_path / "b", **common) == 0
    result = json.loads((tmp_path / "b/result.json").read_text())
    assert (result["num_classes"], result["train_size"], result["test_size"]) == (102, 12, 12)
    counts = itertools.product(range(2), range(4), range(9))  # of right answers in each class
    scores = [(100 * (a + b + c) / 12, 100 * (a + b / 3 + c / 8) / 3) for a, b, c in counts]
    assert any((result["top1"], result["mean_per_class"]) == pytest.approx(pair) for pair in scores)
    assert result["mean_per_class"] != pytest.approx(result["top1"])
