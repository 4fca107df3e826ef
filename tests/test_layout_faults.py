"""Datasets that are not as they should be: what is said, naming the path, and that nothing else happens."""

import base64
import itertools
import json
import os
import pickle
import re
import shutil

import helpers
import numpy as np
import official_trees
import pytest
from folders import faults, paint, section
from helpers import flags, inside
from official_trees import BUILD, DOMAINS, TABBY, advice, opened, resize

from idmm import config
from idmm.data.datasets import open_splits
from idmm.data.readers.layout import HALF
from idmm.data.registry import DATASETS

FILES = [name for name, spec in DATASETS.items() if not spec.embedded and name != "folder"]


def refused(name, root):
    return faults(opened, name, root)


# ------------------------------------------------------------------ roots and names
@pytest.mark.parametrize("name", FILES)
def test_roots_that_are_none(name, tmp_path):
    wanted = f"data.name '{name}' wants its folder ('idmm data info {name}' shows it)"
    assert refused(name, None) == [f"data.root: not given; {wanted}", advice(name, "DIR")]
    root = tmp_path / "x"
    for fault in ("does not exist", "is not a folder"):
        line = f"data.root: '{root}' {fault}; wanted the folder that holds {name}"
        assert refused(name, root) == [line, advice(name, root)]
        root.touch()


NEEDED = {
    "flowers": "jpg, imagelabels.mat, setid.mat",
    "pets": "images, annotations/trainval.txt, annotations/test.txt",
    "dtd": "images, labels/train1.txt, labels/val1.txt, labels/test1.txt",
    "indoor67": "Images",
    "cub200": "images, images.txt, image_class_labels.txt, train_test_split.txt, classes.txt",
    "aircraft": "images, variants.txt, images_variant_trainval.txt, images_variant_test.txt",
    "cars": "cars_train, cars_test, devkit/cars_meta.mat, devkit/cars_train_annos.mat",
    "cifar10": "data_batch_1, data_batch_2, data_batch_3, data_batch_4, data_batch_5 and 2 more",
    "cifar100": "train, test, meta",
    "svhn": "train_32x32.mat, test_32x32.mat",
    "imagenet": "train, val",
    "imagenet100": "train, val",
    **{f"domainnet-{domain}": domain for domain in DOMAINS},
}
LACKS = [
    (name, file) for name, text in NEEDED.items() if "," in text for file in text.partition(" and ")[0].split(", ")
]
LACKS += [("cars", "cars_test_annos_withlabels.mat"), ("cifar10", "test_batch"), ("cifar10", "batches.meta")]
LACKS += [("indoor67", f"{part}Images.txt") for part in ("Train", "Test")]
LACKS += [("domainnet-sketch", f"sketch_{part}.txt") for part in ("train", "test")]


@pytest.mark.parametrize("name", FILES)
def test_a_root_that_holds_something_else(name, tmp_path):
    paint(tmp_path / "holiday/1.jpg")
    line = f"data.root: '{tmp_path}' lacks {NEEDED[name]}; 'idmm data info {name}' shows what {name} looks like"
    assert refused(name, tmp_path) == [line, advice(name, tmp_path)]


@pytest.mark.parametrize(("name", "file"), LACKS)
def test_a_folder_or_list_is_missing(name, file, tmp_path):
    base = BUILD[name](tmp_path)
    shutil.rmtree(base / file) if (base / file).is_dir() else (base / file).unlink()
    line = f"data.root: '{base}' lacks {file}; 'idmm data info {name}' shows what {name} looks like"
    assert refused(name, tmp_path) == [line, advice(name, tmp_path)]


def test_names_that_are_none(tmp_path):
    known = f"{', '.join(DATASETS)}, or hfds:NAME"
    close = {"flower": "flowers", "domainnet-quick": "domainnet-quickdraw", "imagenet-100": "imagenet100"}
    for name, nearest in close.items():
        line = f"data.name: '{name}' is not known; wanted one of {known}; did you mean '{nearest}'?"
        assert refused(name, tmp_path) == [line]
    assert refused("xyz", tmp_path) == [f"data.name: 'xyz' is not known; wanted one of {known}"]
    for name in ("hfids:ylecun/mnist", "wds:shards/{00..99}.tar", "tfds:mnist"):
        assert refused(name, tmp_path) == [
            f"data.name: '{name}' is a stream, which has no index: instance discrimination needs image i to be the"
            " same image in every epoch; wanted hfds:NAME or a folder"
        ]


# ------------------------------------------------------------------ damaged files
TEXTS = [(name, file) for name, file in LACKS if file.endswith(".txt")]
MATS = [(name, file) for name, file in LACKS if file.endswith(".mat")]
MATS += [("imagenet", "ILSVRC2012_devkit_t12/data/meta.mat")]
PICKLES = [("cifar10", "data_batch_4"), ("cifar10", "batches.meta"), ("cifar100", "test"), ("cifar100", "meta")]


@pytest.mark.parametrize(("name", "file"), TEXTS)
def test_a_list_is_empty_or_a_folder(name, file, tmp_path):
    path = BUILD[name](tmp_path) / file
    for content in ("", " \n\n"):
        path.write_text(content)
        assert refused(name, tmp_path) == [f"data.root: '{path}' is empty; {HALF}"]
    path.unlink()
    path.mkdir()
    assert refused(name, tmp_path) == [f"data.root: '{path}' cannot be read (is a directory); wanted a list"]


@pytest.mark.parametrize(("name", "file"), MATS + PICKLES)
def test_a_binary_file_is_damaged(name, file, tmp_path):
    path = BUILD[name](tmp_path) / file
    whole, why, wanted = path.read_bytes(), r"damaged, or another format", "a .mat file"
    contents = [whole[: len(whole) // 2], whole[:60], b"", b"<html>moved</html>" * 20, b"\xff" * 300]
    if (name, file) in PICKLES:
        why, wanted, contents = ".+", "the Python version", [*contents, whole[:-1], pickle.dumps([1])]
    for content in contents:
        path.write_bytes(content)
        (line,) = refused(name, tmp_path)
        assert re.fullmatch(rf"data.root: '{path}' cannot be read \({why}\); wanted {wanted} with .+", line)


class Attack:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


ATTACKS = {
    f"{os.system.__module__}.system": Attack(os.system, ("touch EXECUTED",)),
    "numpy.load": Attack(np.load, ("x.npy",)),  # another name of a module that arrays need
    "base64.encode": Attack(base64.encode, (1, 2)),  # a name that text needs, of another module
}


@pytest.mark.parametrize(("name", "file"), PICKLES)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_executes_nothing(name, file, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = BUILD[name](tmp_path) / file
    keys = ("data", "labels", "fine_labels", "label_names", "fine_label_names")
    for called, attack in ATTACKS.items():
        path.write_bytes(pickle.dumps(dict.fromkeys(keys, attack), protocol=protocol))
        (line,) = refused(name, tmp_path)
        wanted = f"data.root: '{path}' cannot be read (it wants to load {called}); wanted the Python version"
        assert line.startswith(wanted)
    assert not (tmp_path / "EXECUTED").exists()
    pickle.loads(pickle.dumps(next(iter(ATTACKS.values()))))  # which it otherwise would
    assert (tmp_path / "EXECUTED").exists()


# ------------------------------------------------------------------ ImageNet's other forms
COLUMNS = "wanted a table with the columns ImageId and PredictionString"
TABLES = {
    b"": f"lacks columns or rows; {COLUMNS}",
    b"ImageId,PredictionString\n": f"lacks columns or rows; {COLUMNS}",
    b"image,label\nILSVRC2012_val_00000001,n01440764 1 2 3 4\n": f"lacks columns or rows; {COLUMNS}",
    b"ImageId,PredictionString\nx,n01440764 1\ny, \nz\n": "has no WNID for y, z; wanted 'IMAGE,WNID ...'",
    b"ImageId,PredictionString\nx,n01440764 1\nx,n01440764 1\n": "names 1 image twice: x; wanted each once",
    b"ImageId,PredictionString\nx,n99999999 1\n": f"leaves a split without images; {HALF}",
    b"ImageId,PredictionString\n\xff\xfe,n01440764\n": f"cannot be read (damaged, or another format); {COLUMNS}",
}


@pytest.mark.parametrize("content", TABLES)
def test_kaggles_table_is_not_as_it_should_be(content, tmp_path):
    official_trees.imagenet_kaggle(tmp_path)
    path = tmp_path / "LOC_val_solution.csv"
    path.write_bytes(content)
    assert refused("imagenet", tmp_path) == [f"data.root: '{path}' {TABLES[content]}"]


def test_kaggles_table_cannot_be_read_or_images_are_missing(tmp_path):
    base = official_trees.imagenet_kaggle(tmp_path)
    (base / "val/ILSVRC2012_val_00000003.JPEG").unlink()
    path = tmp_path / "LOC_val_solution.csv"
    what = f"names an image that is not there: val/ILSVRC2012_val_00000003.JPEG (under '{base}'); {HALF}"
    for root in (base, tmp_path):
        assert refused("imagenet", root) == [f"data.root: '{path}' {what}", advice("imagenet", root)]
    path.unlink()
    path.mkdir()
    assert refused("imagenet", tmp_path) == [f"data.root: '{path}' cannot be read (is a directory); {COLUMNS}"]


def test_imagenet_in_folders_lacks_some(tmp_path):
    base = official_trees.imagenet_folders(tmp_path)
    shutil.rmtree(base / "val" / TABBY)
    line = f"data.root: '{base / 'val'}' lacks classes of '{base / 'train'}': {TABBY}; {HALF}"
    assert refused("imagenet", tmp_path) == [line]
    (base / "val" / TABBY).mkdir()
    assert refused("imagenet", tmp_path) == [f"data.root: '{base / 'val' / TABBY}' has no images; {HALF}"]


def test_the_shipped_list_of_imagenet100_names_what_is_missing(tmp_path):
    base = official_trees.imagenet(tmp_path)
    (line,) = refused("imagenet100", tmp_path)
    assert line.startswith(f"data.root: '{base / 'train'}' lacks classes of '")
    wanted = "n01558993, n01692333, n01729322, n01735189, n01749939 and 94 more"  # it has the tabby
    assert line.endswith(f"imagenet100.txt': {wanted}; {HALF}")


# ------------------------------------------------------------------ sizes
GO_ON = "data.allow_size_mismatch: true goes on all the same, and result.json says so"


@pytest.mark.parametrize("labelled", [True, False])
def test_sizes_other_than_the_protocols(tmp_path, caplog, labelled):
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
def test_flowers_through_both_stages(tmp_path, capsys):
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
