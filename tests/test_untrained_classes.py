"""Classes without a label do not stop ``idmm train``: the others are trained and tested."""

import pytest
from folders import tree
from helpers import call_ok, read, refused
from test_train import command_line, names_of

from idmm.files import read_csv

pytestmark = pytest.mark.usefixtures("own_cache", "fake_clock")


def in_folders(root):
    """An empty class folder, and a class that only the test images have."""
    tree(root, train={"cat": 4, "dog": 4}, test={"cat": 3, "dog": 3, "emu": 2})
    (root / "train/fox").mkdir()
    return {}


def in_a_list(root):
    """Two classes of the test images that nobody labelled in training. Some rows are empty."""
    tree(root, images={"": 24})
    rows = ["path,class,split"]
    rows += [f"images/{i}.png,{'cat' if i < 4 else 'dog'},train" for i in range(8)]
    rows += [f"images/{i}.png,{'cat' if i < 11 else 'dog'},test" for i in range(8, 14)]
    rows += ["images/14.png,emu,test", "images/15.png,fox,test", "images/16.png,,test"]
    rows += ["images/17.png,,train"]
    (root / "labels.csv").write_text("\n".join(rows))
    return {"data.labels": root / "labels.csv"}


def by_a_draw(root):
    """Of 12 labelled images of 4 classes 3 are drawn."""
    names = ("cat", "dog", "emu", "fox")
    tree(root, train=dict.fromkeys(names, 3), test=dict.fromkeys(names, 3))
    return {"data.labelled": "{total: 2}"}


@pytest.mark.parametrize(
    ("build", "images", "labelled"),
    [(in_folders, 8, 8), (in_a_list, 15, 8), (by_a_draw, 12, 2)],
)
def test_classes_with_labels_are_trained(build, images, labelled, tmp_path, capsys):
    flags = build(tmp_path / "d")
    out = tmp_path / "x"
    argv = command_line(tmp_path / "d", out, way="pretrain", **flags)
    call_ok(argv)
    errors = capsys.readouterr().err
    result = read(out / "result.json")
    trained = read(out / "model.json")["classes"]
    untrained = result["untrained_classes"]
    assert sorted([*trained, *untrained]) == ["cat", "dog", "emu", "fox"]
    assert len(trained) == 2
    assert "2 of 4 classes have no training image with a label and are left out, with" in errors
    assert ", ".join(untrained) in errors
    assert result["train_size"] == labelled
    assert result["test_size"] == 6
    assert {row["class"] for row in read_csv(out / "predictions.csv")} == {*trained}
    learned_from = names_of(out / "stage1", "train")
    assert len(learned_from) == images
    assert not {*learned_from} & {f"images/{i}.png" for i in range(8, 17)}, "tests stay unseen"
    assert read(out / "train.json")["result"] == result
    call_ok(argv)
    assert read(out / "result.json") == result, "a finished command changes nothing"


def test_images_to_test_on_later_stay_unseen(tmp_path, capsys):
    """``idmm suggest --test`` drew them, and nobody has filled in their classes."""
    root = tree(tmp_path / "d", images={"": 24})
    rows = ["path,class,split"]
    rows += [f"images/{i}.png,{'cat' if i < 6 else 'dog'},train" for i in range(12)]
    later = [f"images/{i}.png" for i in range(12, 16)]
    rows += [f"{name},,test" for name in later]
    labels = tmp_path / "labels.csv"
    labels.write_text("\n".join(rows))
    out = tmp_path / "x"
    call_ok(command_line(root, out, way="pretrain", **{"data.labels": labels}))
    assert "4 images to test on: no class is filled in" in capsys.readouterr().err
    held_out = [row["path"] for row in read_csv(out / "predictions.csv")]
    learned_from = names_of(out / "stage1", "train")
    assert len(learned_from) + len(held_out) == 20
    assert not {*learned_from} & {*later, *held_out}


def test_one_class_is_too_few(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"cat": 4}, test={"cat": 3, "dog": 3})
    (root / "train/dog").mkdir()
    line = f"data.root: '{root}/train' has one class only ('cat'), expected two or more"
    assert refused(capsys, command_line(root, tmp_path / "x")) == [line]
    root = tree(tmp_path / "e", train={"cat": 4, "dog": 1}, test={"cat": 3, "dog": 3})
    (tmp_path / "out.txt").write_text("train/dog/0.png")
    argv = command_line(root, tmp_path / "x", **{"data.exclude": tmp_path / "out.txt"})
    line = "data.root: only 'cat' has training images with a label"
    assert refused(capsys, argv)[-1] == f"{line}. A classifier needs two classes or more"
