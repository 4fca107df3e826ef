"""Which images to label next, by the real command line, and what ``idmm train`` reads of it."""

import csv
import re
import shutil

import numpy as np
import pytest
from folders import paint, section, tree
from frozen import a_run
from helpers import call_ok, column, refused
from PIL import Image
from pytest import approx

import idmm
from idmm.data.listing import list_images
from idmm.files import read_csv
from idmm.inference import suggest as steps

pytestmark = pytest.mark.usefixtures("own_cache")
KINDS = ("blue", "green", "red", "white")


def picture(path, kind, seed):
    """The pattern of a kind with some noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pattern = np.random.default_rng(KINDS.index(kind)).integers(0, 200, (5, 6, 3))
    noise = np.random.default_rng(100 + seed).integers(0, 20, (20, 24, 3))
    pixels = pattern.repeat(4, axis=0).repeat(4, axis=1) + noise
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder of 40 images without labels. Each kind has another number of images."""
    root = tmp_path_factory.mktemp("plain") / "d"
    seed = 0
    for kind, count in zip(KINDS, (4, 7, 12, 17), strict=True):
        for i in range(count):
            picture(root / f"{kind}ä-{i}.png", kind, seed := seed + 1)
    return root


def suggested(root, out, count, *flags):
    """Runs the command; returns the paths of to_label.csv."""
    call_ok(["suggest", root, "--count", count, "--out", out, "--device", "cpu", *flags])
    rows = read_csv(out / "to_label.csv")
    assert {tuple(row) for row in rows} == {("path", "class")}
    assert {*column(rows, "class")} == {""}
    return column(rows, "path")


def kinds(paths):
    return [path.partition("ä")[0] for path in paths]


def fill_in(file, most=None):
    """Fills the classes in as Excel saves them: semicolons after a byte order mark."""
    rows = read_csv(file)
    for row in rows[:most]:
        row["class"] = f"{kinds([row['path']])[0]} ü"
    with open(file, "w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, rows[0], delimiter=";")
        writer.writeheader()
        writer.writerows(rows)


def test_rounds(plain, tmp_path, capsys):
    first = tmp_path / "1"
    paths = suggested(plain, first, 4, "--test", 10)
    assert sorted(kinds(paths)) == sorted(KINDS), "one of each kind"
    assert kinds(paths)[0] == "white", "the largest cluster is first"
    tests = read_csv(first / "test.csv")
    assert len({*column(tests, "path")} - {*paths}) == 10
    assert {*column(tests, "split")} == {"test"}
    assert sorted(path.name for path in first.iterdir()) == [
        "test-1.png",
        "test.csv",
        "to_label-1.png",
        "to_label.csv",
    ]
    printed = capsys.readouterr().err
    assert "test.csv: 10 images, drawn at random, to label and to test on" in printed
    command = f"idmm train {plain} --data.labels {first} --out NEW"
    assert f"fill in the classes in {first}/to_label.csv, then: {command}" in printed
    # half of the tests and three of the four images are labelled
    fill_in(first / "to_label.csv", 3)
    fill_in(first / "test.csv", 5)
    data = section(plain, labels=str(first))
    splits = list_images(data, labelled=True, unlabelled=True, least_classes=2).trained()
    labelled = splits.train.take(np.flatnonzero(splits.train.labels >= 0))
    assert sorted(labelled.names) == sorted(paths[:3])
    assert {labelled.class_name(i) for i in range(3)} == {f"{kind} ü" for kind in kinds(paths[:3])}
    assert len(splits.train) == 30
    second = tmp_path / "2"
    more = suggested(plain, second, 3, "--data.labels", first)
    printed = capsys.readouterr().err
    assert re.search(r"coverage: 0.\d\d with the labels so far, 0.\d\d with those", printed)
    assert "are no test images" not in printed
    assert kinds(paths)[3] in kinds(more), "the kind without a label"
    assert not {*more} & {*paths[:3], *column(tests, "path")}
    remaining = column(read_csv(second / "test.csv"), "path")
    assert remaining == sorted(column(tests, "path")[5:])
    rows = {row["path"]: row for row in read_csv(second / "labels.csv")}
    assert {*rows} == {*paths[:3], *column(tests, "path")[:5]}
    assert [rows[path]["split"] for path in paths[:3]] == ["train"] * 3
    # the newest folder has all that was labelled
    fill_in(second / "to_label.csv")
    last = list_images(section(plain, labels=str(second)), labelled=True)
    assert sorted(last.train.names) == sorted([*paths[:3], *more])
    assert sorted(last.test.names) == sorted(column(tests, "path")[:5])
    rest = suggested(plain, tmp_path / "3", 24, "--data.labels", second)
    others = {path.name for path in plain.iterdir()}
    assert {*rest} == others.difference(paths[:3], more, column(tests, "path"))


def test_what_python_returns(plain, tmp_path):
    keys = {"data": {"root": str(plain)}, "count": 5, "device": "cpu", "batch_size": 16}
    result = idmm.suggest({**keys, "out": str(tmp_path / "a")})
    assert result["to_label"] == column(read_csv(tmp_path / "a/to_label.csv"), "path")
    assert result["test"] == []
    assert result["coverage"] == 0
    again = idmm.suggest({**keys, "out": str(tmp_path / "b")})
    assert again == result, "the same seed"
    other = idmm.suggest({**keys, "out": str(tmp_path / "c"), "seed": 1})
    assert other["to_label"] != result["to_label"]
    shutil.rmtree(tmp_path / "a")
    weights = str(a_run(tmp_path / "run"))
    by_run = idmm.suggest({**keys, "out": str(tmp_path / "a"), "init": weights})
    assert by_run["to_label"] != result["to_label"]
    features = idmm.embed(weights, sorted(map(str, plain.iterdir())))
    centred = features - features.mean(axis=0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    names = sorted(path.name for path in plain.iterdir())
    chosen = [names.index(name) for name in by_run["to_label"]]
    assert by_run["coverage_after"] == approx((unit @ unit[chosen].T).max(axis=1).mean(), abs=1e-5)


def test_class_folders_copies_and_broken_files(tmp_path, capsys):
    """Labels in folders are listed next to the new ones, so that one flag reads them all."""
    root = tmp_path / "d"
    for i in range(6):
        picture(root / f"train/redä/{i}.png", "red", i)
        picture(root / f"train/greenä/{i}.png", "green", i)
        picture(root / f"unlabelled/deep/blueä{i}.png", "blue", i)
    tree(root, test={"redä": 2, "greenä": 2})
    (root / "train/whiteä").mkdir()
    (root / "unlabelled/broken.png").write_text("no image")
    shutil.copy(root / "train/redä/0.png", root / "unlabelled/red.png")
    shutil.copy(root / "test/redä/0.png", root / "unlabelled/test.png")
    shutil.copy(root / "unlabelled/deep/blueä1.png", root / "unlabelled/blue.png")
    out = tmp_path / "out"
    paths = suggested(root, out, 6)
    assert {path.rpartition("/")[0] for path in paths} <= {"unlabelled/deep", "unlabelled"}
    assert len({(root / path).read_bytes() for path in paths}) == 6
    errors = capsys.readouterr().err
    assert "left out 3 duplicates of other images" in errors
    assert "skipped 1 of 19 images that cannot be read" in errors
    assert "broken.png: not an image" in errors
    rows = read_csv(out / "to_label.csv")
    lines = [f"{row['path']},blue" for row in rows[:4]]
    (out / "to_label.csv").write_text("\n".join(["path,class", *lines]))
    data = section(root, labels=str(out))
    train = list_images(data, labelled=True, evaluated=False, least_classes=2).train
    assert np.bincount(train.labels).tolist() == [4, 6, 6]
    assert len(list_images(data, labelled=True, least_classes=2).test) == 4
    more = suggested(root, tmp_path / "more", 2, "--data.labels", out)
    assert {*more} == {*paths[4:]}, "nor copies of images with a label"


def test_the_ends_of_long_images_count(tmp_path):
    root = tmp_path / "d"
    for i in range(24):
        path = root / f"{KINDS[i % 4]}ä-{i}.png"
        picture(path, KINDS[i % 4], i)
        with Image.open(path) as image:
            long = Image.new("RGB", (96, 20))  # a black centre
            for left in (0, 72):
                long.paste(image, (left, 0))
        long.save(path)
    assert sorted(kinds(suggested(root, tmp_path / "1", 4))) == sorted(KINDS)


def test_one_image_per_group(tmp_path, capsys):
    root = tmp_path / "d"
    for i in range(24):
        picture(root / f"p{i % 8}-{i}.png", KINDS[i % 4], i)
    flags = ("--data.groups", r"^(p\d)-")
    paths = suggested(root, tmp_path / "1", 5, "--test", 3, *flags)
    tests = column(read_csv(tmp_path / "1/test.csv"), "path")
    assert len({path[:2] for path in paths + tests}) == 8
    argv = ["suggest", root, "--count", 6, "--test", 3, "--out", tmp_path / "2", *flags]
    line = "count: 9 images are more than the 8 groups without a label"
    assert refused(capsys, argv)[-1] == line
    # images of the tests' groups are not suggested later, with a class or without
    fill_in(tmp_path / "1/test.csv", 1)
    labels = ("--data.labels", tmp_path / "1")
    more = suggested(root, tmp_path / "3", 5, *flags, *labels)
    assert {path[:2] for path in more} == {path[:2] for path in paths}
    # two groups of which one image each has a label
    labels = tmp_path / "labels.csv"
    labels.write_text("path,class\np0-0,a\np1-1,b\n")
    flags = (*flags, "--data.labels", labels)
    argv = ["suggest", root, "--count", 1, "--test", 7, "--out", tmp_path / "2", *flags]
    line = "test: 7 is more than the 6 groups without a label"
    assert refused(capsys, argv)[-1] == line
    tests = ("--test", 6)
    assert {path[:2] for path in suggested(root, tmp_path / "2", 2, *tests, *flags)} == {"p0", "p1"}


def test_many_images_on_several_sheets(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "LARGEST", 0)
    monkeypatch.setattr(steps, "SAMPLE", 30)
    monkeypatch.setattr(steps, "COMPONENTS", 8)
    monkeypatch.setattr(steps, "ON_A_SHEET", 3)
    assert len({*suggested(plain, tmp_path / "1", 8)}) == 8
    assert kinds(suggested(plain, tmp_path / "2", 4)) == [*reversed(KINDS)], "the largest first"
    assert len([*(tmp_path / "1").glob("to_label-?.png")]) == 3


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--count", 0], "count: got 0, expected greater than or equal to 1"),
        (["--count", 41], "count: 41 images are more than the 40 images without a label"),
        (["--test", 40], "count: 90 images are more than the 40 images without a label"),
        (["--out", "."], "out: '.' exists and is not empty. Name a new folder"),
        (["--data.labels", "tests.csv", "--test", 1], "test: 'ROOT' has 2 test images already. "),
    ],
)
def test_what_cannot_be_suggested(flags, line, plain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = sorted(path.name for path in plain.iterdir())[0]
    text = f"path,class,split\n{name},a,test\nredä-0,,test\n"
    (tmp_path / "tests.csv").write_text(text)
    argv = ["suggest", plain, "--out", "out", *flags]
    assert refused(capsys, argv)[-1].startswith(line.replace("ROOT", str(plain)))
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_to_label(tmp_path, capsys):
    root = tree(tmp_path / "d", a={"x": 2}, b={"y": 2})
    line = f"data.root: every image of '{root}' has a label, nothing is left to label. "
    argv = ["suggest", root, "--out", tmp_path / "out"]
    assert refused(capsys, argv)[-1].startswith(line)
    shutil.move(root, tmp_path / "e/unlabelled")
    assert len(suggested(tmp_path / "e", tmp_path / "out", 4)) == 4
    for broken in (tmp_path / "e").rglob("*.png"):
        broken.write_text("no image")
    argv = ["suggest", tmp_path / "e", "--count", 1, "--out", tmp_path / "more"]
    capsys.readouterr()
    assert refused(capsys, argv)[-2] == "data.root: none of 1 image can be read:"
    assert not (tmp_path / "more").exists()
    paint(tmp_path / "e/unlabelled/9.png")
    assert suggested(tmp_path / "e", tmp_path / "more", 1) == ["unlabelled/9.png"]
