"""Datasets that are not as they should be: each fault is one line with the path and the remedy."""

import itertools
import json
import shutil

import helpers
import official_trees
import pytest
from folders import faults, paint, section
from helpers import flags, inside
from official_trees import BUILD, TABBY, TENCH, advice, append, opened, resize, write

from idmm import config
from idmm.data.datasets import open_splits

NEEDED = {
    "flowers": "jpg, imagelabels.mat, setid.mat",
    "pets": "images, annotations/trainval.txt, annotations/test.txt",
    "dtd": "images, labels/train1.txt, labels/val1.txt, labels/test1.txt",
    "indoor67": "Images, TrainImages.txt, TestImages.txt",
    "cub200": "images, images.txt, image_class_labels.txt, train_test_split.txt, classes.txt",
    "aircraft": "images, variants.txt, images_variant_trainval.txt, images_variant_test.txt",
    "cars": "cars_train, cars_test, devkit/cars_meta.mat, devkit/cars_train_annos.mat, cars_test_annos_withlabels.mat",
    "cifar10": "data_batch_1, data_batch_2, data_batch_3, data_batch_4, data_batch_5 and 2 more",
    "cifar100": "train, test, meta",
    "svhn": "train_32x32.mat, test_32x32.mat",
    "imagenet": "train, val",
    "imagenet100": "train, val",
    "domainnet-real": "real, real_train.txt, real_test.txt",
}
DEVKIT, META, TRUTH = "ILSVRC2012_devkit_t12/data", "meta.mat", "ILSVRC2012_validation_ground_truth.txt"


def refused(name, root):
    return faults(opened, name, root)


# ------------------------------------------------------------------ roots and names
@pytest.mark.parametrize("name", ["flowers", "domainnet-real", "cars"])
def test_roots_that_are_none(name, tmp_path):
    wanted = f"data.name '{name}' wants its folder ('idmm data info {name}' shows it)"
    assert refused(name, None) == [f"data.root: not given; {wanted}", advice(name, "DIR")]
    root = tmp_path / "x"
    for fault in ("does not exist", "is not a folder"):
        line = f"data.root: '{root}' {fault}; wanted the folder that holds {name}"
        assert refused(name, root) == [line, advice(name, root)]
        root.touch()


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_folder_lacks_is_named(name, tmp_path):
    paint(tmp_path / "holiday/1.jpg")
    (line, more) = refused(name, tmp_path)
    assert f" lacks {NEEDED[name]}; 'idmm data info {name}' shows what {name} looks like" in line
    assert more == advice(name, tmp_path)
    base = BUILD[name](tmp_path)
    file = NEEDED[name].partition(" and ")[0].rpartition(", ")[2]
    shutil.rmtree(base / file) if (base / file).is_dir() else (base / file).unlink()
    line = f"data.root: '{base}' lacks {file}; 'idmm data info {name}' shows what {name} looks like"
    assert refused(name, tmp_path) == [line, advice(name, tmp_path)]


# ------------------------------------------------------------------ damaged files
SPOILT = [  # dataset, what is done to the base, the line
    ("pets", lambda b: (b / "images/Abyssinian_201.jpg").unlink(),
     "'BASE' lacks 1 listed images: images/Abyssinian_201.jpg"),
    ("aircraft", lambda b: append(b / "images_variant_test.txt", "1514522 Zeppelin NT"),
     "files in 'BASE/..' are damaged (KeyError: 'Zeppelin NT'); fetch them again"),
    ("dtd", lambda b: append(b / "labels/val1.txt", "banded_0005.jpg"),
     "files in 'BASE/..' are damaged (ValueError: not enough values to unpack (expected 2, got 1)); fetch them again"),
    ("indoor67", lambda b: append(b / "TestImages.txt", "\nImages/gameroom/1.jpg"),
     "'BASE/TestImages.txt' has 'Images/gameroom/1.jpg' in line 4, expected 'CLASS/FILE'"),
    ("indoor67", lambda b: write(b / "TestImages.txt"),
     "'BASE/TestImages.txt' is empty"),
    ("indoor67", lambda b: (b / "TestImages.txt").unlink() or (b / "TestImages.txt").mkdir(),
     "'BASE/TestImages.txt' cannot be read (is a directory)"),
    ("domainnet-real", lambda b: append(b / "real_test.txt", "real/x/1.jpg x"),
     "'BASE/real_test.txt' has 'real/x/1.jpg x' in line 3, expected 'real/CLASS/FILE LABEL'"),
    *(("cub200", lambda b, name=name, line=line: append(b / f"{name}.txt", line),
       f"the lists in 'BASE' do not agree on image {image}") for name, line, image in (
          ("images", "6 x.jpg", 6), ("image_class_labels", "2 3", 2), ("image_class_labels", "2 0", 2),
          ("train_test_split", "1 2", 1))),
    ("cub200", lambda b: write(b / "train_test_split.txt", *(f"{i} 1" for i in range(1, 6))),
     "the lists in 'BASE' name no image of a split"),
    ("imagenet", lambda b: shutil.rmtree(b / "ILSVRC2012_devkit_t12"),
     f"'BASE/val' has no class folders and no labels; expected val/WNID/*.JPEG, or '{DEVKIT}' or"
     " 'LOC_val_solution.csv' in 'BASE'"),
    ("imagenet", lambda b: write(b / DEVKIT / TRUTH, 2, 3, 1),
     f"'BASE/{DEVKIT}' does not fit the images of val (4 images, 3 labels; ValueError: zip() argument 2 is shorter"
     " than argument 1)"),
    ("imagenet", lambda b: (b / DEVKIT / META).write_bytes(b"moved"),
     f"'BASE/{DEVKIT}' does not fit the images of val (4 images, 4 labels; "),
    ("imagenet", lambda b: paint(b / "val" / TENCH / "1.JPEG"),
     f"'BASE/val' lacks classes of 'BASE/train': n01443537, {TABBY}"),
    ("imagenet", lambda b: [path.unlink() for path in (b / "train" / TENCH).iterdir()],
     f"'BASE/train' has no images of {TENCH}"),
    ("imagenet", lambda b: shutil.rmtree(b / "train") or (b / "train").touch(),
     "'BASE/train' cannot be read (not a directory)"),
    ("imagenet100", lambda b: append(b / "imagenet100.txt", "n00000001 nothing"),
     "'BASE/train' lacks classes of 'BASE/imagenet100.txt': n00000001"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "text"), SPOILT, ids=[f"{i}-{r[0]}" for i, r in enumerate(SPOILT)])
def test_what_is_wrong_is_named(name, spoil, text, tmp_path):
    base = BUILD[name](tmp_path)
    spoil(base)
    for labelled in (True, False):
        line, more = faults(open_splits, section(tmp_path, name=name, allow_size_mismatch=True), labelled)
        line = line.replace(str(base), "BASE").replace(str(base.parent), "BASE/..")
        assert line.startswith(f"data.root: {text}") and more == advice(name, tmp_path)


@pytest.mark.parametrize("name", ["flowers", "cifar10", "cifar100", "svhn"])
def test_other_files_than_the_publishers(name, tmp_path):
    """Their checksums are verified before anything is read: a pickle may run anything."""
    base = BUILD[name](tmp_path)
    line = f"data.root: files in '{base}' are damaged (a checksum differs); fetch them again"
    assert refused(name, tmp_path) == [line, advice(name, tmp_path)]


def test_kaggles_table_is_not_as_it_should_be(tmp_path):
    official_trees.imagenet_kaggle(tmp_path)
    path = append(tmp_path / "LOC_val_solution.csv", "ILSVRC2012_val_00000009")
    line = f"data.root: '{path}' has 'ILSVRC2012_val_00000009' in line 6, expected 'ImageId,PredictionString'"
    assert refused("imagenet", tmp_path) == [line, advice("imagenet", tmp_path)]


# ------------------------------------------------------------------ sizes
GO_ON = "data.allow_size_mismatch: true goes on all the same, and result.json says so"


@pytest.mark.parametrize("labelled", [True, False])
def test_sizes_other_than_the_protocols(tmp_path, caplog, labelled, any_checksum):
    official_trees.flowers(tmp_path)
    lines = [
        "data.root: flowers: the split 'train' has 4 images, its protocol 2040",
        "data.root: flowers: the split 'test' has 4 images, its protocol 6149",
    ]
    assert faults(open_splits, section(tmp_path, name="flowers"), labelled) == [*lines, GO_ON]
    splits = open_splits(section(tmp_path, name="flowers", allow_size_mismatch=True), labelled)
    assert splits.size_mismatch == {"train": [4, 2040], "test": [4, 6149]}
    assert [record.getMessage() for record in caplog.records] == lines
    assert len(splits.train) == len(splits.test) == 4


def test_a_size_or_the_classes_alone(tmp_path, monkeypatch):
    official_trees.dtd(tmp_path)
    resize(monkeypatch, "dtd", 6, 4, 3)
    line = "data.root: dtd: the split 'test' has 3 images, its protocol 4"
    assert faults(opened, "dtd", tmp_path) == [line, GO_ON]
    resize(monkeypatch, "dtd", 6, 3, 47)
    assert faults(opened, "dtd", tmp_path) == ["data.root: dtd: has 3 classes, its protocol 47", GO_ON]
    assert opened("dtd", tmp_path, allow_size_mismatch=True).size_mismatch == {"classes": [3, 47]}
    resize(monkeypatch, "dtd", 6, 3, 3)  # what is held out or not drawn is no mismatch
    splits = opened("dtd", tmp_path, val_fraction=0.5, subset=config.Subset(total=2))
    assert (len(splits.train), len(splits.val), len(splits.test), splits.size_mismatch) == (2, 3, 3, {})


# ------------------------------------------------------------------ the real command line
def test_flowers_through_both_stages(tmp_path, capsys, any_checksum):
    """24 px, three of the 102 classes: other sizes than the protocol's are refused, or allowed and written down."""
    labels = [77, 1, 102] * 4 + [77] + [1] * 3 + [102] * 8  # the test images: 1, 3 and 8 of a class
    numbers = {"trnid": list(range(1, 9)), "valid": list(range(9, 13)), "tstid": list(range(13, 25))}
    official_trees.flowers(tmp_path / "data", size=(24, 24), labels=labels, **numbers)
    common = dict(data__name="flowers", data__root=str(tmp_path / "data"), data__subset=None)
    common |= dict(train__epochs=1, train__warmup_epochs=0, train__batch_size=12)
    mismatch = {"train": [12, 2040], "test": [12, 6149]}

    def result(stage, out):
        assert inside(stage, tmp_path / out, data__allow_size_mismatch=True, **common) == 0
        return json.loads((tmp_path / out / "result.json").read_text())

    first = result("pretrain", "a")
    assert first["size_mismatch"] == mismatch and first["train_size"] == 12

    common |= dict(init=str(tmp_path / "a"), stages=[{"size": 24}], train__classifier_init="random")
    capsys.readouterr()
    assert helpers.refused(capsys, ["finetune", *flags("finetune", tmp_path / "b", **common)]) == [
        "data.root: flowers: the split 'train' has 12 images, its protocol 2040",
        "data.root: flowers: the split 'test' has 12 images, its protocol 6149",
        GO_ON,
    ]
    assert not (tmp_path / "b/result.json").exists()
    result = result("finetune", "b")  # in the same folder
    assert result["size_mismatch"] == mismatch
    assert (result["num_classes"], result["train_size"], result["test_size"]) == (102, 12, 12)
    counts = itertools.product(range(2), range(4), range(9))  # of right answers in each class
    scores = [(100 * (a + b + c) / 12, 100 * (a + b / 3 + c / 8) / 3) for a, b, c in counts]
    assert any((result["top1"], result["mean_per_class"]) == pytest.approx(pair) for pair in scores)
    assert result["mean_per_class"] != pytest.approx(result["top1"])
