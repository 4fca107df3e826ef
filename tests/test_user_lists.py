"""What people keep in lists beside their images: images to leave out, classes, groups. By the real
command line."""

import csv
import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from folders import faults, paint, result, section, tree, tuned
from helpers import call, column, read, refused

from idmm.data.listing import list_images
from idmm.data.user_lists import class_rows
from idmm.files import read_csv, write_csv

pytestmark = pytest.mark.usefixtures("own_cache")


def written(path, text):
    path.write_bytes(text.encode())
    return str(path)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Images with one fault of each kind."""
    root = tree(
        tmp_path_factory.mktemp("faulty") / "d",
        train={"cat": 5, "dog": 5},
        test={"cat": 2, "dog": 2},
    )
    train = root / "train"
    test = root / "test"
    (train / "dog/broken.png").write_text("no image")
    shutil.copy(train / "cat/0.png", train / "cat/copy.png")
    shutil.copy(train / "cat/1.png", test / "cat/leak.png")
    shutil.copy(train / "cat/2.png", train / "dog/wrong.png")
    shutil.copy(test / "dog/0.png", test / "dog/copy.png")
    return root


@pytest.fixture(scope="module")
def checked(faulty, tmp_path_factory):
    out = tmp_path_factory.mktemp("check") / "out"
    assert call(f"data check folder --root {faulty} --out {out}") == 1
    return out / "exclude.txt"


def test_the_check_writes_what_to_leave_out_and_why(faulty, checked):
    lines = checked.read_text().splitlines()
    reasons = {}
    for comment, line in itertools.pairwise(lines):
        if not line.startswith("#"):
            reasons[line] = comment.removeprefix("# ")
    assert reasons == {
        "train/dog/broken.png": "unreadable (not an image)",
        "train/cat/copy.png": "the same as train/cat/0.png",
        "train/cat/1.png": "the same as test/cat/leak.png",
        "train/cat/2.png": "the same as train/dog/wrong.png, but of class 'cat', not 'dog': "
        "one is wrong",
        "train/dog/wrong.png": "the same as train/cat/2.png, but of class 'dog', not 'cat': "
        "one is wrong",
        "test/dog/copy.png": "the same as test/dog/0.png",
    }
    assert f"idmm data check folder --root {faulty}" in lines[0]


def test_odd_names_come_back_from_every_list(tmp_path):
    """Commas, quotes, # and no UTF-8 in names of files: the check's list, labels and groups."""
    root = tree(tmp_path / "d", train={"a": 3, "b": 3}, test={"a": 1, "b": 1})
    odd = ['"quoted", 1.png', "#1.png", "tab\t.png", "back\\slash.png", os.fsdecode(b"caf\xe9.png")]
    for i, name in enumerate(odd):
        shutil.copy(root / f"train/a/{i % 3}.png", root / "train/a" / name)
        shutil.copy(root / f"train/a/{i % 3}.png", root / name)
    assert call(f"data check --root {root} --out {tmp_path}/c") == 1
    left = list_images(section(root, exclude=str(tmp_path / "c/exclude.txt")), labelled=True)
    assert left.excluded == 5
    assert len(left.train) == 6
    with open(tmp_path / "labels.csv", "w", newline="", errors="surrogateescape") as file:
        rows = csv.writer(file)
        rows.writerows(
            [
                ("path", "class", "split", "group"),
                *((n, "ab"[i % 2], "train", n) for i, n in enumerate(odd)),
            ]
        )
        rows.writerows(
            [
                ("test/a/0.png", "a", "test", "x"),
                ("test/b/0.png", "b", "test", "y"),
            ]
        )
    lists = list_images(section(root, labels=str(tmp_path / "labels.csv")), labelled=True)
    assert sorted(lists.train.names) == sorted(odd) == sorted(lists.train.groups)
    for name in ("e/#1", "e/ dog"):
        tree(tmp_path, **{name: {"": 3}})
        shutil.copy(tmp_path / name / "0.png", tmp_path / name / "9.png")
    assert call(f"data check --root {tmp_path}/e --out {tmp_path}/c") == 1
    other = {"root": tmp_path / "e", "exclude": str(tmp_path / "c/exclude.txt")}
    plain = list_images(section(**other, val_fraction=0.4), labelled=True)
    assert (len(plain.train), len(plain.test), plain.excluded, plain.train.classes) == (
        4,
        2,
        2,
        ["#1", "dog"],
    )
    write_csv(tmp_path / "own.csv", class_rows(plain.parts))
    again = list_images(section(**other, labels=str(tmp_path / "own.csv")), labelled=True)
    assert again.train.names == plain.train.names
    assert again.train.classes == plain.train.classes
    hand = written(tmp_path / "hand.txt", '# by hand\n./#1.png\n "quoted", 1.png \n')
    assert (
        list_images(
            section(root, labels=str(tmp_path / "labels.csv"), exclude=hand), labelled=True
        ).excluded
        == 2
    )


def test_a_run_leaves_them_out_and_says_so(faulty, checked, tmp_path, capsys):
    out = tmp_path / "run"
    mine = shutil.copy(checked, tmp_path / "mine.txt")
    assert tuned(out, faulty, data__exclude=str(mine)) == 0
    assert (
        f"data.exclude: '{mine}' leaves out 6 images (5 train, 1 test)" in capsys.readouterr().err
    )
    results = result(out)
    assert results["excluded"] == 6
    assert results["train_size"] == 8
    assert results["test_size"] == 5
    assert read(out / "config.yaml")["data"]["exclude"] == str(mine)
    names = read(out / "last/images.json")["train"]["images"]
    assert "train/cat/copy.png" not in names
    assert "train/cat/0.png" in names
    # a list that is another one by now does not go unseen when the run is taken up again
    (out / "result.json").unlink()
    Path(mine).write_text(Path(mine).read_text() + "train/dog/0.png\n")
    assert tuned(out, faulty, data__exclude=str(mine)) == 2
    assert (
        "since this run: 0 with another label, 0 new, 1 gone, 0 with other content, 0 renamed "
        "(train/dog/0.png). " in capsys.readouterr().err
    )


def test_lines_that_name_no_image(tmp_path):
    """Folders leave nothing out, nor do images of another root."""
    root = tree(tmp_path / "d", train={"cat": 3, "dog": 3}, val={"cat": 1, "dog": 1})
    other = tree(tmp_path / "copy", train={"cat": 1}) / "train/cat/0.png"
    names = ["train/cat/7.png", "train/cat", str(other), "../copy/train/cat/0.png"]
    mine = written(tmp_path / "out.txt", "\n".join(["# why", "", "train/dog/1.png", *names]))
    assert faults(list_images, section(root, exclude=mine), False) == [
        f"data.exclude: {mine}:{line}: '{name}' is no image under '{root}'"
        for line, name in enumerate(names, start=4)
    ]
    (tmp_path / "link").symlink_to(root)
    real = written(tmp_path / "real.txt", f"{root}/train/dog/1.png")
    assert list_images(section(tmp_path / "link", exclude=real), False).excluded == 1
    gone = str(tmp_path / "gone.txt")
    expected = "expected a file with the name of one image per line, as idmm data check writes it"
    line = f"data.exclude: cannot read '{gone}' (no such file or directory), {expected}"
    assert faults(list_images, section(root, exclude=gone), True) == [line]
    everything = written(tmp_path / "all.txt", "val/cat/0.png\nval/dog/0.png\n")
    line = f"data.exclude: '{everything}' leaves no image of test, expected at least one"
    assert faults(list_images, section(root, exclude=everything), True) == [line]
    everything = written(tmp_path / "all.txt", "".join(f"train/cat/{i}.png\n" for i in range(3)))
    line = (
        f"data.exclude: '{everything}' leaves no training image of cat, expected at least "
        "one per class"
    )
    assert faults(list_images, section(root, exclude=everything), True) == [line]
    many = written(tmp_path / "many.txt", "".join(f"{i}\n" for i in range(50)))
    lines = faults(list_images, section(root, exclude=many), True)
    assert len(lines) == 21
    assert lines[-1] == "data.exclude: and 30 more"


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """Two classes of three patients each, two images a patient; and two images that nobody
    labelled."""
    root = tmp_path_factory.mktemp("flat") / "d"
    for patient in range(6):
        for i in range(2):
            paint(root / f"scans/p{patient}_{i}.png", seed=10 * patient + i)
    # without a row. The last is never trained on
    for i, name in enumerate(("new/0", "new/1", "test/0")):
        paint(root / f"{name}.png", seed=90 + i)
    return root


ROWS = []
for patient in range(6):
    for number in range(2):
        name = f"scans/p{patient}_{number}.png"
        ROWS.append((name, ("well", "ill")[patient % 2], f"patient {patient}"))


def table(*columns, header="path,class"):
    return "\n".join([header, *(",".join(row) for row in zip(*columns, strict=True))]) + "\n"


PATHS, CLASSES, PATIENTS = (list(column) for column in zip(*ROWS, strict=True))


def test_classes_from_a_csv(flat, tmp_path):
    """A byte order mark, Windows' line ends, a further column, whole paths."""
    paths = [f'"{flat / path}"' for path in PATHS]
    text = "\ufeff" + table(CLASSES, map(str, range(12)), paths, header="class,age,path").replace(
        "\n", "\r\n"
    )
    data = section(flat, labels=written(tmp_path / "labels.csv", text), val_fraction=0.5)
    splits = list_images(data, labelled=True)
    assert splits.train.classes == ["ill", "well"]
    class_of = {}
    for part in splits.parts.values():
        class_of |= {
            name: part.classes[label] for name, label in zip(part.names, part.labels, strict=True)
        }
    assert class_of == dict(zip(PATHS, CLASSES, strict=True))
    assert len(list_images(data, labelled=False).train) == 14, (
        "pretraining takes those without a row, too"
    )


def test_without_a_column_split_the_folders_decide(tmp_path):
    root = tree(
        tmp_path / "d",
        train={"": 6},
        test={"": 1},
        unlabelled={"": 1},
    )
    text = (
        "path,class\n"
        + "".join(f"train/{i}.png,{'ab'[i % 2]}\n" for i in range(4))
        + "test/0.png,a\n"
    )
    data = section(root, labels=written(tmp_path / "labels.csv", text))
    train = list_images(data, labelled=True, unlabelled=True).train
    assert train.names == [f"train/{i}.png" for i in range(6)] + ["unlabelled/0.png"]
    assert train.labels.tolist() == [0, 1, 0, 1, -1, -1, -1]
    assert len(list_images(data, labelled=True).train) == 4
    plain = list_images(data, labelled=False).train
    assert sorted(plain.names) == sorted(train.names)
    assert plain.labels is None
    written(tmp_path / "labels.csv", text + "unlabelled/0.png,a\n")
    train = list_images(data, labelled=True, unlabelled=True).train
    assert train.names[4] == "unlabelled/0.png"
    assert train.labels.tolist() == [0, 1, 0, 1, 0, -1, -1], "an image to train on"
    tree(root, new={"": 1})
    file = written(tmp_path / "labels.csv", text + "new/0.png,a\n")
    line = f"{file}:7: 'new/0.png' is outside of train, val and test, expected a column split"
    assert faults(list_images, section(root, labels=file), True) == [f"data.labels: {line}"]


def test_a_run_by_a_csv_with_splits_and_groups(flat, tmp_path, capsys, caplog):
    part = ["test" if patient in ("patient 0", "patient 1") else "train" for patient in PATIENTS]
    text = table(PATHS, CLASSES, part, PATIENTS, header="path,class,split,group")
    labels = written(tmp_path / "labels.csv", text)
    out = tmp_path / "run"
    assert tuned(out, flat, data__labels=labels) == 0
    errors = capsys.readouterr().err
    assert f"data.labels: '{labels}' has no class for 3 of 15 images\n" in errors
    assert "data.groups" not in errors, "no group is on both sides"
    assert result(out)["train_size"] == 8
    assert result(out)["test_size"] == 4
    assert result(out)["num_classes"] == 2
    assert {*column(read_csv(out / "predictions.csv"), "group")} == {"patient 0", "patient 1"}
    assert result(out)["test_groups"] == 2
    assert "the interval is over the 2 groups of the test images" in errors
    splits = list_images(section(flat, labels=labels), labelled=False)
    assert len(splits.train) == 10
    assert not {name for name in splits.train.names if "p0" in name or "p1" in name}
    # a patient on both sides is logged
    mixed = written(
        tmp_path / "mixed.csv",
        text.replace("scans/p0_0.png,well,test", "scans/p0_0.png,well,train"),
    )
    list_images(section(flat, labels=mixed), labelled=True)
    shared = "1 group with images both in train and in val or test"
    assert f"data.groups: {shared}, so accuracies come out too high: patient 0" in caplog.text


def test_bad_lines_of_a_csv(flat, tmp_path, capsys):
    text = "path,class,split\nscans/p0_0.png,ill,train\nscans/p9_0.png,ill,train\n"
    text += "scans/p0_0.png,well,train\nscans/p1_0.png,ill,\n"
    labels = written(tmp_path / "labels.csv", text)
    argv = (
        f"finetune --data.name folder --data.root {flat} --data.labels {labels} --out {tmp_path}/r"
    )
    assert (
        refused(capsys, argv)[-1]
        == f"data.labels: {labels}:5: has no split, expected path,class,split"
    )
    written(tmp_path / "labels.csv", text.replace("p1_0.png,ill,", "p1_0.png,ill,trian"))
    assert refused(capsys, argv)[-3:] == [
        f"data.labels: {labels}:3: 'scans/p9_0.png' is no image under '{flat}'",
        f"data.labels: {labels}:4: 'scans/p0_0.png' is in line 2, too, expected one row per image",
        f"data.labels: {labels}:5: the split is 'trian', expected train, val or test",
    ]


def test_rows_without_a_class_and_a_folder_of_lists(flat, tmp_path):
    lists = tmp_path / "lists"
    lists.mkdir()
    written(lists / "first.csv", table(PATHS[:4], CLASSES[:4]))
    written(lists / "more.csv", table(PATHS[4:8], [*CLASSES[4:6], "", " "]))
    tests = table(PATHS[8:], [*CLASSES[8:11], ""], ["test"] * 4, header="path,class,split")
    written(lists / "test.csv", tests)
    data = section(flat, labels=str(lists))
    splits = list_images(data, labelled=True, unlabelled=True)
    assert splits.train.names == PATHS[:6] + ["new/0.png", "new/1.png", *PATHS[6:8]]
    assert splits.train.labels.tolist() == [1, 1, 0, 0, 1, 1, -1, -1, -1, -1]
    assert splits.test.names == PATHS[8:11]
    assert splits.aside == (PATHS[11],)
    assert PATHS[11] not in list_images(data, labelled=False).train.names, "it is to be tested on"
    written(lists / "z.csv", table(PATHS[:1], CLASSES[:1]))
    place = f"{lists / 'first.csv'}:2"
    line = f"{lists / 'z.csv'}:2: '{PATHS[0]}' is in {place}, too, expected one row per image"
    assert faults(list_images, data, True) == [f"data.labels: {line}"]
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    line = f"data.labels: '{empty}' has no CSV file, expected some of path,class"
    assert faults(list_images, section(flat, labels=empty), True) == [line]


TWO = "expected two or more classes in the split train"


@pytest.mark.parametrize(
    "text, line",
    [
        (
            "path,red\nx,y\n",
            "the header of 'FILE' lacks class, expected path,class. Its first line is 'path,red'",
        ),
        ("path,class\n", f"'FILE' has no image with a class to train on, {TWO}"),
        ("path,class\nscans/p0_0.png,a\n", f"'FILE' has one class to train on ('a'), {TWO}"),
        (
            "path,class,split\nnew/0.png,a,test\n",
            f"'FILE' has no image with a class to train on, {TWO}",
        ),
        (
            "path,class,split\nscans/p0_0.png,a,train\nscans/p1_0.png,b,train\nscans/p2_0.png,c,test\n",
            "'FILE' has classes in test that train lacks: c",
        ),
        (
            'path,class\nscans/p0_0.png,"a\n',
            "FILE:2: is not CSV (unexpected end of data), expected path,class",
        ),
    ],
)
def test_files_of_labels_that_cannot_be_used(text, line, flat, tmp_path):
    file = written(tmp_path / "labels.csv", text)
    assert faults(list_images, section(flat, labels=file), True) == [
        f"data.labels: {line.replace('FILE', file)}"
    ]
    line = f"data.labels: '{file}' is for data.name folder, and digits has classes of its own"
    assert faults(list_images, section(name="digits", labels=file), True) == [line]


@pytest.mark.parametrize("source", ["file", "column", "pattern"])
def test_groups_are_held_out_whole(source, flat, tmp_path, caplog):
    caplog.set_level("INFO")
    fields = {"groups": r"/(p\d)_"}
    labels = table(PATHS, CLASSES)
    if source == "file":
        fields["groups"] = written(
            tmp_path / "groups.csv", table(PATHS, PATIENTS, header="path,group")
        )
    if source == "column":
        fields = {}
        labels = table(PATHS, CLASSES, PATIENTS, header="path,class,group")
    fields["labels"] = written(tmp_path / "labels.csv", labels)
    splits = list_images(section(flat, val_fraction=0.3, **fields), labelled=True)
    held, left = (
        {name.split("/")[1][:2] for name in part.names} for part in (splits.test, splits.train)
    )
    assert len(held) == 2
    assert not held & left
    assert np.bincount(splits.test.labels).tolist() == [2, 2], "as much of each class"
    again = list_images(section(flat, val_fraction=0.3, **fields), labelled=True)
    assert again.test.names == splits.test.names
    assert "data.val_fraction: held out are 2 groups of 6 groups, 4 of 12 images" in caplog.text
    if source == "column":
        return
    # one image of each patient
    fields["labels"] = written(tmp_path / "labels.csv", table(PATHS[::2], CLASSES[::2]))
    splits = list_images(section(flat, val_fraction=0.3, **fields), labelled=True, unlabelled=True)
    held = {name[:8] for name in splits.test.names}
    more = [name for name in PATHS[1::2] if name[:8] not in held]
    assert len(held) == 2
    assert splits.train.names[4:] == ["new/0.png", "new/1.png", *more]
    assert "data.groups: left out 2 images without labels, of groups in val or test" in caplog.text
    write_csv(tmp_path / "split.csv", class_rows(splits.parts))
    first = list_images(
        section(flat, **fields | {"labels": str(tmp_path / "split.csv")}), labelled=False
    )
    assert sorted(first.train.names) == sorted(splits.train.names), "in pretraining, too"


WANTED = r"expected a CSV file of path,group, or a pattern with one bracket, e.g. '(patient\d+)_'"


@pytest.mark.parametrize(
    "source, line",
    [
        (
            "(p",
            "'(p' is no file and no pattern (missing ), unterminated subpattern at position "
            f"0), {WANTED}",
        ),
        ("p[0-9]_", f"'p[0-9]_' is no file and no pattern (0 brackets), {WANTED}"),
        (
            "(p0)",
            "'(p0)' gives no group to 10 images: scans/p1_0.png, scans/p1_1.png, "
            "scans/p2_0.png and 7 more,"
            " expected one for each image",
        ),
        (
            "gone.csv",
            "cannot read 'gone.csv' (no such file or directory), expected a CSV file of path,group",
        ),
        (
            "twice.csv",
            "twice.csv:3: 'scans/p0_0.png' is of 'a' already, expected one group per image",
        ),
        (
            "(scans)",
            "0.3 holds out no image, as all images are of one group ('scans'). Add images to "
            "train, or a folder"
            " test",
        ),
    ],
)
def test_groups_that_cannot_be_used(source, line, flat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "twice.csv", "path,group\nscans/p0_0.png,a\nscans/p0_0.png,b\n")
    labels = written(tmp_path / "labels.csv", table(PATHS, CLASSES))
    field = "data.val_fraction" if "holds out" in line else "data.groups"
    data = section(flat, labels=labels, groups=source, val_fraction=0.3)
    assert faults(list_images, data, True) == [f"{field}: {line}"]
