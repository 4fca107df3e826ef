"""``idmm explore``: planted duplicates and wrong labels are found, the maths is that of naive
loops, and what happens where rows, images or labels are missing."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from folders import TINY, section, tiles
from helpers import call, call_ok, inside_ok, refused
from matplotlib.offsetbox import AnnotationBbox
from PIL import Image, ImageColor, ImageEnhance

from idmm.data.listing import list_images
from idmm.evaluation import similarity
from idmm.figures import COLOURS, shortened
from idmm.files import read_csv as table
from idmm.inference import explore_tables
from idmm.inference.explore_tables import _map

pytestmark = pytest.mark.usefixtures("own_cache")
FILES = """duplicates.csv duplicates.png labels.csv labels.png neighbours.png exclude.txt map.png
    rows.png""".split()
COPIES = {
    ("flower/02.png", "flower/c02.jpg"),
    ("china/03.png", "china/c03.png"),
    ("flower/04.png", "flower/c04.png"),
}
SAME = ("china/05.png", "china/c05.png")
MOVED = {"flower/wrong.png", "china/wrong.png"}
CONFLICT = "train/flower/conflict.png"
LENGTH = {
    "train__epochs": 6,
    "views__crops": [{"count": 2, "scale": [0.5, 1.0]}],
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Squares cut out of two photographs, none overlapping; copies of four of them, two in the
    other's class."""
    root = tmp_path_factory.mktemp("planted") / "images"
    train = root / "train"
    for name in ("china", "flower"):
        tiles(train / name, range(24), 104, 104, 104)
        for path in (train / name).iterdir():
            Image.open(path).resize((32, 32)).save(path)
    Image.open(train / "flower/02.png").save(train / "flower/c02.jpg", quality=50)
    Image.open(train / "china/03.png").resize((24, 24)).save(train / "china/c03.png")
    brighter = ImageEnhance.Brightness(Image.open(train / "flower/04.png")).enhance(1.3)
    brighter.save(train / "flower/c04.png")
    shutil.copy(train / "china/05.png", train / "china/c05.png")
    (train / "china/20.png").rename(train / "flower/wrong.png")
    (train / "flower/11.png").rename(train / "china/wrong.png")
    return root


def test_held_out_images_and_conflicts_are_found(planted, tmp_path, capsys):
    """A wrong label among the held-out images, and copies of two classes, one in training and one
    in the test set."""
    out = tmp_path / "a"
    root = shutil.copytree(planted, tmp_path / "images")
    photo = Image.open(root / "train/china/09.png")
    photo.resize((40, 40)).save(root / CONFLICT)
    options = {
        **TINY,
        "data__root": root,
        "data__val_fraction": 0.3,
        "stages": [{"size": 16}],
    }
    inside_ok("finetune", out, **options)
    call_ok(f"explore {out}")
    text = capsys.readouterr().out
    assert text.startswith("37 train, 16 test images of")
    assert "The labels of 1 pair differ. These come first." in text
    first, *_ = table(out / "explore/duplicates.csv")
    assert (first["path"], first["duplicate"]) == (
        "train/china/09.png",
        CONFLICT,
    )
    labels = table(out / "explore/labels.csv")
    tested, held = (
        {row["path"] for row in rows if row["split"] == "test"}
        for rows in (labels, table(out / "split.csv"))
    )
    assert tested == held
    assert len(labels) == 53
    exclude = (out / "explore/exclude.txt").read_text()
    assert "but of class 'flower', not 'china': one may be wrong" in exclude
    assert call(f"data check --root {root} --out {tmp_path}/check") == 1
    text = capsys.readouterr().out
    finding = f"labels differ: 1 pair (train/china/09.png and {CONFLICT}: near"
    assert text.index(finding) < text.index("duplicates: 1 pair")
    exclude = (tmp_path / "check/exclude.txt").read_text()
    why = f"# nearly the same as train/china/09.png .*one may be wrong\n#{CONFLICT}\n"
    assert re.search(why, exclude)


@pytest.fixture(scope="module")
def run(planted, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "a"
    inside_ok("pretrain", out, **{**TINY, **LENGTH, "data__root": planted})
    return out


@pytest.fixture(scope="module")
def simclr(planted, tmp_path_factory):
    """A run without rows, on images without labels."""
    out = tmp_path_factory.mktemp("simclr") / "a"
    flat = out.parent / "images"
    flat.mkdir()
    for path in (planted / "train").rglob("*.png"):
        shutil.copy(path, flat / f"{path.parent.name}-{path.name}")
    off = {f"method__classifier{end}": None for end in ("", "_init", "_lr_scale")}
    own = {
        **off,
        "method__name": "simclr",
        "views__crops": [{"count": 2}],
        "data__root": flat,
    }
    inside_ok("pretrain", out, **{**TINY, **own})
    return out


def pairs(path):
    return {
        (
            row["path"].removeprefix("train/"),
            row["duplicate"].removeprefix("train/"),
        )
        for row in table(path)
    }


def test_rows_of_w_are_compared_with_features(run, planted, capsys):
    """The shares by a plain loop. W is that of the last checkpoint."""
    call_ok(f"explore {run}")
    printed = capsys.readouterr().out
    rows = torch.load(run / "last/state.pt", weights_only=True)["method"][
        "classifier.weight"
    ].numpy()
    images = list_images(section(planted), labelled=False).train
    unit = rows - rows.mean(0)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    shares = []
    for row, label in zip(unit, images.labels, strict=True):
        order = np.argsort(-unit @ row)[1:7]  # the first is the row itself
        shares.append(np.mean(images.labels[order] == label))
    assert f"rows of W: {100 * np.mean(shares):.1f} % of the 6 nearest" in printed


def test_planted_faults_are_found(run, planted, capsys):
    call_ok(f"explore {run}")
    text = capsys.readouterr().out
    out = run / "explore"
    duplicates = table(out / "duplicates.csv")
    assert duplicates[0]["kind"] == "same file"
    assert pairs(out / "duplicates.csv") >= COPIES | {SAME}
    kinds = {row["duplicate"]: row["kind"] for row in duplicates}
    assert kinds["train/china/c03.png"] == kinds["train/flower/c02.jpg"] == "near"
    labels = table(out / "labels.csv")
    assert {row["path"].removeprefix("train/") for row in labels[:5]} >= MOVED
    assert float(labels[0]["score"]) > similarity.LIKELY > float(labels[-1]["score"])
    assert len(labels) == 52
    assert {path.name for path in out.iterdir()} == {*FILES}
    parts = [
        "likely pair",
        "another label",
        "train/china/c05.png",
        "exclude.txt",
    ]
    for part in (*parts, "idmm data check"):
        assert part in text
    with Image.open(out / "map.png") as image:
        pixels = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 20)}
    assert [ImageColor.getrgb(colour) in pixels for colour in COLOURS[:3]] == [True, True, False]
    lines = (out / "exclude.txt").read_text().splitlines()
    assert {"train/china/c05.png", "#train/flower/c02.jpg"} <= {*lines}
    names = list_images(section(planted, exclude=str(out / "exclude.txt")), False).train.names
    assert len(names) == 51
    assert "train/china/c05.png" not in names


def test_a_folder_of_idmm_train_stands_for_its_first_stage(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "stage1")
    (tmp_path / "train.json").touch()
    call_ok(f"explore {tmp_path}")
    assert (tmp_path / "stage1/explore/map.png").exists()
    assert f"run: '{tmp_path}/stage1', which learned from all images" in capsys.readouterr().err


def test_two_runs_are_mapped_next_to_each_other(run, simclr, tmp_path, monkeypatch, capsys):
    figures = []
    monkeypatch.setattr(explore_tables, "save", lambda figure, path: figures.append(figure))
    call_ok(f"explore {run} {simclr} --classes [flower] --out {tmp_path}/e")
    before, after = figures[0].axes
    count = 26
    for axis, name in ((before, run), (after, simclr)):
        assert axis.get_title() == f"{count} images, t-SNE of {shortened(str(name))}"
        assert [len(points.get_offsets()) for points in axis.collections] == [
            count,
            count,
        ], "all, and the class"
        assert sum(isinstance(artist, AnnotationBbox) for artist in axis.artists) > 3, "thumbnails"
    assert len(table(tmp_path / "e/labels.csv")) == 52, "the tables have all classes"
    capsys.readouterr()
    line = "classes: 'flowr' is no class of these images. Did you mean 'flower'?"
    assert (
        refused(
            capsys,
            f"explore {run} --classes [flowr] --out {tmp_path}/f",
        )[-1]
        == line
    )
    assert refused(capsys, f"explore {run} {tmp_path}")[-1].startswith(
        f"{tmp_path}: is no finished run"
    )


def test_without_rows_and_labels(simclr, tmp_path, capsys):
    """Another method goes by features; without labels there is no labels.csv."""
    call_ok(f"explore {simclr} --out {tmp_path}/e")
    text = capsys.readouterr().out
    assert "skipped, the images have no labels" in text
    assert not (tmp_path / "e/labels.csv").exists()
    assert ("china-05.png", "china-c05.png") in pairs(tmp_path / "e/duplicates.csv")


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(similarity, "_BLOCK", 100)  # several blocks
    return np.random.default_rng(0).normal(size=(37, 6)).astype(np.float32)


def test_no_map_of_features_that_are_all_equal(tmp_path):
    images = [SimpleNamespace(label=None)] * 6
    equal = {"runs/a": np.ones((6, 4), np.float32)}
    (line,) = _map(SimpleNamespace(maps=equal, images=images, classes=[]), tmp_path)
    assert line.startswith("Map: skipped, the features of all images are equal")


def test_neighbours_by_a_naive_loop(rows):
    unit = similarity.unit_rows(rows)
    centred = rows - rows.mean(0)
    expected = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, expected, rtol=1e-5, atol=1e-6)
    near = similarity.nearest(unit, 4)
    for i in range(37):
        cosine = unit @ unit[i]
        order = np.argsort(-cosine)[1:5]  # the first is the row itself
        assert near.index[i].tolist() == order.tolist()
        np.testing.assert_allclose(near.value[i], cosine[order], rtol=1e-5)


def test_duplicates_by_a_naive_loop(rows):
    unit = similarity.unit_rows(np.vstack([rows, rows[:2] + 0.01]))
    duplicates = similarity.likely_duplicates(unit)
    cosine = unit.astype(np.float64) @ unit.T
    # the row itself and the nearest one are left out
    crowd = [np.mean(sorted(row, reverse=True)[2:12]) for row in cosine]
    best = {}
    index = duplicates.index.tolist()
    for (i, j), score in zip(index, duplicates.score, strict=True):
        assert i < j
        expected = cosine[i, j] - (crowd[i] + crowd[j]) / 2
        np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-5)
        for one in (i, j):
            best[one] = max(best.get(one, -9), score)
    assert index[0] == [1, 38]
    assert [0, 37] in index
    assert (np.diff(duplicates.score) <= 0).all()
    assert len({*map(tuple, index)}) == len(index)
    low, middle = np.percentile(list(best.values()), [25, 50])
    threshold = middle + similarity.ABOVE * (middle - low)
    assert duplicates.threshold == pytest.approx(threshold, rel=1e-4)


def test_label_margins_by_a_naive_loop(rows):
    labels = np.random.default_rng(1).integers(-1, 3, 37)
    near = similarity.nearest(similarity.unit_rows(rows), 30)
    margins, suggested = similarity.label_margins(near, labels)
    for i in range(37):
        votes = {}
        seen = 0
        for j, cosine in zip(near.index[i], near.value[i], strict=True):
            if labels[j] >= 0 and seen < similarity.VOTERS:
                seen += 1
                votes[labels[j]] = votes.get(labels[j], 0) + np.exp(cosine / similarity.TEMPERATURE)
        if labels[i] < 0:
            assert (margins[i], suggested[i]) == (-1, -1)
            continue
        own = votes.pop(labels[i], 0)
        other = max(votes, key=votes.get, default=-1)
        expected = (votes.get(other, 0) - own) / (own + sum(votes.values()))
        assert suggested[i] == other
        assert margins[i] == pytest.approx(expected, rel=1e-4, abs=1e-5)
