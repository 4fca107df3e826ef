"""Which images a dataset has, what is held out and what is refused."""

import os
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from folders import faults, paint, section, tree
from helpers import call

from idmm import config
from idmm.data.listing import draw_subset, list_images
from idmm.data.split import Split


def test_digits():
    from sklearn.datasets import load_digits

    splits = list_images(section(name="digits"), labelled=True)
    train = splits.train
    test = splits.test
    assert splits.val is None
    assert train.items.shape == (1437, 8, 8, 3)
    assert train.classes == [str(i) for i in range(10)]
    assert not set(train.names) & set(test.names)
    assert set(np.bincount(test.labels)) <= {35, 36, 37}, "stratified"
    digits = load_digits()
    original = int(test.names[100].split("/")[1])
    assert test.labels[100] == digits.target[original]
    pixels = np.rint(digits.images[original] * 255 / 16)
    np.testing.assert_array_equal(test.items[100][..., 1], pixels)


def test_roots_that_are_none(tmp_path):
    line = "data.root: missing, data.name 'folder' expects a folder of images"
    assert faults(list_images, section(), True) == [line]
    root = tmp_path / "x"
    for fault in ("does not exist", "is not a folder"):
        line = f"data.root: '{root}' {fault}, expected a folder of images"
        for labelled in (True, False):
            assert faults(list_images, section(root), labelled) == [line]
        root.touch()


def test_labelled_folder_with_nesting_hidden_files_and_links(tmp_path, caplog):
    classes = {"dog": 1, "cat": 1, "Katze 猫": 1}
    root = tree(tmp_path / "d", train=classes, val=classes)
    train = root / "train"
    for name in ("cat/deep/er/9.JPG", "cat/.hidden.png", ".hidden/1.png"):
        paint(train / name)
    (train / "cat/notes.txt").touch()
    (train / "dog/loop").symlink_to(train)
    (train / "dog/itself").symlink_to("itself")
    shutil.copytree(train / "cat/deep", tmp_path / "elsewhere")
    (train / "dog/linked").symlink_to(tmp_path / "elsewhere")
    splits = list_images(section(root), labelled=True)
    assert splits.val is None
    assert len(splits.test) == 3
    assert splits.train.classes == splits.test.classes == ["Katze 猫", "cat", "dog"]
    names = "Katze 猫/0.png,cat/0.png,cat/deep/er/9.JPG,dog/0.png,dog/linked/er/9.JPG".split(",")
    assert splits.train.names == [f"train/{name}" for name in names]
    assert splits.train.labels.tolist() == [0, 1, 1, 2, 2]
    assert f"data.root: '{train}': skipped 2 files of other kinds" in caplog.text


def test_links_bring_no_image_to_evaluate_on_into_training(tmp_path, caplog):
    """To the root, to a folder of test, to its images, from every folder that training reads."""
    root = tree(
        tmp_path / "d",
        train={"a": 2, "b": 2},
        test={"a": 2, "b": 2},
        unlabelled={"": 1},
    )
    for folder in (root / "train/a", root / "unlabelled"):
        (folder / "1.png").unlink(missing_ok=True)
        links = {
            "root": root,
            "test": root / "test/a",
            "1.png": root / "test/a/1.png",
        }
        for name, target in (links | {"gone.png": tmp_path / "gone.png"}).items():
            (folder / name).symlink_to(target)
    (tmp_path / "outside").symlink_to(paint(tmp_path / "pool/9.png").parent)
    (root / "train/b/pool").symlink_to(tmp_path / "outside")
    os.mkfifo(root / "train/b/pipe.png")
    names = [f"train/{name}.png" for name in ("a/0", "a/gone", "b/0", "b/1", "b/pool/9")]
    names += ["unlabelled/0.png", "unlabelled/gone.png"]
    for labelled in (True, False):
        assert list_images(section(root), labelled, unlabelled=True).train.names == names
    assert "train': skipped 3 files of other kinds (2 links to other splits, 1 .png)" in caplog.text
    (root / "train/c").symlink_to(root / "train/b")
    paint(root / "test/c/0.png")
    why = "has classes without images: c (c: a link to images that are read already)"
    line = f"data.root: '{root}/train' {why}. Fill or remove them"
    assert faults(list_images, section(root), True) == [line]


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device"])
def test_what_is_no_regular_file_is_not_waited_for(kind, tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 2, "b": 2}, test={"a": 1, "b": 1})
    odd = root / "train/a/odd.png"
    os.mkfifo(odd if kind == "pipe" else tmp_path / "pipe")
    if kind != "pipe":
        odd.symlink_to("/dev/zero" if kind == "device" else tmp_path / "pipe")
    assert call(f"data check --root {root}") == (kind != "pipe")
    assert ("odd.png: not a regular file" in capsys.readouterr().out) == (kind != "pipe")


def test_val_and_test_both_or_one(tmp_path, caplog):
    root = tree(
        tmp_path,
        train={"x": 2, "y": 2},
        val={"x": 1, "y": 1},
        test={"x": 2, "y": 2},
    )
    data = section(root, val_fraction=0.5)

    def sizes():
        return {part: len(split) for part, split in list_images(data, True).parts.items()}

    assert sizes() == {"train": 4, "val": 2, "test": 4}
    assert "data.val_fraction: 0.5 is not used, as the dataset has a 'val' split" in caplog.text
    shutil.rmtree(root / "val")
    assert sizes() == {"train": 2, "val": 2, "test": 4}


def test_val_fraction_is_stratified(tmp_path):
    root = tree(tmp_path, train={"many": 10, "one": 1, "two": 2})
    splits = list_images(section(root, val_fraction=0.2), labelled=True)
    assert splits.val is None
    assert np.bincount(splits.test.labels, minlength=3).tolist() == [2, 0, 1]
    assert np.bincount(splits.train.labels).tolist() == [8, 1, 1]
    names = list_images(section(root), False).train.names
    assert sorted(splits.train.names + splits.test.names) == names
    most = list_images(section(root, val_fraction=0.99), labelled=True)
    # no class loses its last training image
    assert np.bincount(most.train.labels).tolist() == [1, 1, 1]
    ones = tree(tmp_path / "ones", train={"a": 1, "b": 1})
    (line,) = faults(list_images, section(ones, val_fraction=0.2), True)
    why = "0.2 holds out no image, as no class has two different images. Add "
    assert line.startswith(f"data.val_fraction: {why}")


def held_out(root):
    """Maps the content of each image to the part that it is in."""
    splits = list_images(section(root, val_fraction=0.25), labelled=True)
    sides = {}
    for part, split in splits.parts.items():
        for path in split.items:
            content = Path(path).read_bytes()
            assert sides.setdefault(content, part) == part, "copies are on one side"
    return sides


def test_what_is_held_out_depends_on_each_file(tmp_path):
    """Corrected labels move no more than one other image per class. A copy, another name or root
    move none."""
    root = tree(tmp_path / "a", train={"x": 20, "y": 20, "z": 20})
    before = held_out(root)
    assert list(before.values()).count("test") == 15
    for number in (3, 11):
        (root / f"train/x/{number}.png").rename(root / f"train/y/from_x{number}.png")
    after = held_out(root)
    moved = [content for content in before if before[content] != after[content]]
    assert len(moved) <= 4
    assert list(after.values()).count("test") in (15, 16)
    root = root.rename(tmp_path / "b")
    for number, path in enumerate(sorted(root.rglob("*.png"), reverse=True)):
        path.rename(path.with_name(f"renamed{number:02d}.png"))
    assert held_out(root) == after
    for number, path in enumerate(sorted((root / "train/z").iterdir())[:4]):
        shutil.copy(path, root / f"train/z/copy{number}.png")
        shutil.copy(path, root / f"train/x/wrong{number}.png")
    assert held_out(root).keys() == after.keys()


def test_arrays_are_held_out_by_their_pixels():
    whole = list_images(section(name="digits"), labelled=True)
    splits = list_images(section(name="digits", val_fraction=0.2), labelled=True)
    pixels = [{image.tobytes() for image in split.items} for split in (splits.train, splits.val)]
    assert pixels[0].isdisjoint(pixels[1])
    assert splits.test.names == whole.test.names
    shares = np.bincount(splits.val.labels) / np.bincount(whole.train.labels)
    assert np.allclose(shares, 0.2, atol=0.005)


def test_groups_of_all_sizes_are_held_out_by_their_names(tmp_path):
    """One group is half of all images. The share of each class is near to the fraction, and labels
    move little."""
    sizes = {f"p{n}": 30 if n == 0 else 1 + n % 4 for n in range(16)}
    for seed in range(6):
        groups = {f"s{seed}{name}_": count for name, count in sizes.items()}
        root = tree(tmp_path / str(seed), **{"train/a": groups, "train/b": groups})
        data = section(root, groups="/(s[0-9]p[0-9]+)_/", val_fraction=0.25)
        splits = list_images(data, labelled=True)
        assert not {*splits.train.groups} & {*splits.test.groups}
        tested = np.bincount(splits.test.labels)
        counts = tested + np.bincount(splits.train.labels)
        assert np.all(np.abs(tested / counts - 0.25) < 0.05), seed


def test_all_faults_of_a_folder_come_together(tmp_path):
    root = tree(tmp_path, train={"a": 1, "b": 1, "c": 1}, val={"a": 1, "d": 1})
    (root / "train/empty").mkdir()
    (root / "val/empty").mkdir()
    paint(root / "train/loose.png")
    train = f"'{root}/train'"
    val = f"'{root}/val'"
    loose = f"1 image outside of class folders (loose.png), expected {root}/train/CLASS/*"
    empty = "classes without images: empty. Fill or remove them"
    assert faults(list_images, section(root), True) == [
        f"data.root: {train} has {loose}",
        f"data.root: {train} has {empty}",
        f"data.root: {val} has {empty}",
        f"data.root: {val} lacks classes of {train}: b, c",
        f"data.root: {val} has classes that {train} lacks: d",
    ]


def test_labelled_folder_without_train_images_or_a_second_class(tmp_path):
    def fault(**fields):
        (line,) = faults(list_images, section(tmp_path, **fields), True)
        return line

    train = tmp_path / "train"
    expected = f"expected {train}/CLASS/*"
    lists = "or the classes in a CSV file (--data.labels)"
    assert fault() == f"data.root: '{tmp_path}' has no 'train' folder, {expected}, {lists}"
    for name in "ab":
        (train / name).mkdir(parents=True)
    (train / "a/x.jxl").touch()
    kinds = "1 file of other kinds (1 .jxl)"
    assert fault() == f"data.root: '{train}' has no images, but {kinds}, {expected}"
    (train / "b").rmdir()
    paint(train / "a/x.png")
    line = f"data.root: '{train}' has one class only ('a'), expected two or more"
    assert fault(val_fraction=0.5) == line


def test_class_names_agree_whatever_their_unicode_form(tmp_path):
    composed, split = (unicodedata.normalize(form, "Grüße") for form in ("NFC", "NFD"))
    root = tree(tmp_path, train={composed: 1, "x": 1}, val={split: 1, "x": 1})
    splits = list_images(section(root), labelled=True)
    assert splits.train.classes == splits.test.classes == [composed, "x"]


def test_pretraining_takes_any_tree_and_warns_of_val_fraction(tmp_path, caplog):
    paint(tmp_path / "b.png")
    paint(tmp_path / "deep/er/a.jpg")
    splits = list_images(section(tmp_path, val_fraction=0.5), labelled=False)
    assert splits.train.names == ["b.png", "deep/er/a.jpg"]
    assert splits.train.labels is splits.train.classes is splits.val is splits.test is None
    why = "0.5 is not used, as there are no labels to evaluate with"
    assert f"data.val_fraction: {why}" in caplog.text


def test_pretraining_never_sees_test_images(tmp_path):
    root = tree(tmp_path, train={"x": 2, "y": 1}, test={"x": 1, "y": 1})
    splits = list_images(section(root), labelled=False)
    assert splits.train.names == [
        "train/x/0.png",
        "train/x/1.png",
        "train/y/0.png",
    ]
    assert splits.train.labels.tolist() == [0, 0, 1]
    assert splits.train.classes == ["x", "y"]
    assert splits.test.names == ["test/x/0.png", "test/y/0.png"]
    assert splits.val is None
    paint(root / "train/loose.png")
    splits = list_images(section(root), labelled=False)
    assert len(splits.train) == 4
    assert splits.train.labels is None


def test_pretraining_trees_that_are_no_classes(tmp_path):
    def labels():
        return list_images(section(tmp_path), labelled=False).train.labels

    tree(tmp_path, x={"": 2}, y={"": 2})
    assert labels().tolist() == [0, 0, 1, 1]
    (tmp_path / "z").mkdir()
    assert labels() is None, "an empty one"
    paint(tmp_path / "z/deep/1.png")
    assert labels() is None, "a nested one"
    (tmp_path / "z/deep").replace(tmp_path / "unlabelled")
    (tmp_path / "z").rmdir()
    assert labels() is None, "the folder of images without labels"
    (line,) = faults(list_images, section(tmp_path), True)
    assert line.endswith(f"expected the class folders in {tmp_path}/train, next to 'unlabelled'")


def labelled_split(counts):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    names = [f"{i:03d}" for i in range(len(labels))]
    return Split(names, names, labels, [f"class{i}" for i in range(len(counts))])


def test_subset_per_class_total_and_fraction():
    split = labelled_split([5, 10, 40])
    few = draw_subset(split, config.Subset(per_class=3))
    assert np.bincount(few.labels).tolist() == [3, 3, 3]
    assert few.names == sorted(few.names)
    numbers = [int(name) for name in few.names]
    assert split.labels[numbers].tolist() == few.labels.tolist()
    assert len(draw_subset(split, config.Subset(total=17))) == 17
    tenth = draw_subset(split, config.Subset(fraction=0.1))
    assert np.bincount(tenth.labels).tolist() == [1, 1, 4]
    assert len(draw_subset(unlabelled(split), config.Subset(fraction=0.1))) == 6


def unlabelled(split):
    return Split(split.items, split.names, None, None)


def test_subset_depends_on_its_seed_alone_and_grows_by_adding():
    split = labelled_split([20, 20])
    a, b, c = (draw_subset(split, config.Subset(total=10, seed=seed)).names for seed in (0, 0, 1))
    assert a == b != c
    assert set(a) < set(draw_subset(split, config.Subset(total=20)).names)


def test_subset_faults():
    split = labelled_split([5, 10, 4])
    few = "6 is more than the 4 training images of class 'class2', expected up to 4"
    bare = "these images have no labels, expected total or fraction"
    for images, subset, line in (
        (split, {"per_class": 6}, f"per_class: {few}"),
        (
            split,
            {"total": 20},
            "total: 20 is more than the 19 training images",
        ),
        (unlabelled(split), {"per_class": 1}, f"per_class: {bare}"),
    ):
        assert faults(draw_subset, images, config.Subset(**subset)) == [f"data.subset.{line}"]
