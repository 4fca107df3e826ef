"""``idmm explore``: planted duplicates and wrong labels are found, the maths is that of naive
loops, and what happens where rows, images or labels are missing."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from folders import TINY, section
from helpers import call, inside, refused
from matplotlib.offsetbox import AnnotationBbox
from PIL import Image, ImageEnhance
from sklearn.datasets import load_sample_image

from idmm.data.listing import list_images
from idmm.evaluation import similarity
from idmm.figures import COLOURS, shortened
from idmm.files import read_csv as table
from idmm.inference import explore_tables
from idmm.inference.explore_tables import _map

pytestmark = pytest.mark.usefixtures("own_cache")
FILES = ["duplicates.csv", "duplicates.png", "labels.csv", "labels.png", "neighbours.png"]
COPIES = {
    ("flower/02.png", "flower/c02.jpg"),
    ("china/03.png", "china/c03.png"),
    ("flower/04.png", "flower/c04.png"),
}
SAME = ("china/05.png", "china/c05.png")
MOVED = {"flower/wrong.png", "china/wrong.png"}
LENGTH = {"train__epochs": 6, "views__crops": [{"count": 2, "scale": [0.5, 1.0]}]}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Squares cut out of two photographs, none overlapping; copies of four of them, two in the
    other's class."""
    root = tmp_path_factory.mktemp("planted") / "images"
    for name in ("china", "flower"):
        photo = Image.fromarray(load_sample_image(f"{name}.jpg"))
        for i in range(24):
            left = 104 * (i % 6)
            top = 104 * (i // 6)
            path = root / "train" / name / f"{i:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo.crop((left, top, left + 104, top + 104)).resize((32, 32)).save(path)
    train = root / "train"
    Image.open(train / "flower/02.png").save(train / "flower/c02.jpg", quality=50)
    Image.open(train / "china/03.png").resize((24, 24)).save(train / "china/c03.png")
    ImageEnhance.Brightness(Image.open(train / "flower/04.png")).enhance(1.3).save(
        train / "flower/c04.png"
    )
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
    photo.resize((40, 40)).save(root / "train/flower/conflict.png")
    options = {**TINY, "data__root": str(root), "data__val_fraction": 0.3, "stages": [{"size": 16}]}
    assert inside("finetune", out, **options) == 0
    assert call(["explore", out]) == 0
    said = capsys.readouterr().out
    assert said.startswith("37 train, 16 test images of")
    assert "The labels of 1 pair differ. These come first." in said
    first, *_ = table(out / "explore/duplicates.csv")
    assert {first["class"], first["duplicate_class"]} == {"china", "flower"}
    assert pairs(out / "explore/duplicates.csv") >= {("china/09.png", "flower/conflict.png")}
    labels = {row["path"]: row for row in table(out / "explore/labels.csv")}
    held = {row["path"] for row in table(out / "split.csv") if row["split"] == "test"}
    assert {path for path, row in labels.items() if row["split"] == "test"} == held
    assert len(labels) == 53
    exclude = (out / "explore/exclude.txt").read_text()
    assert "but of class 'flower', not 'china': one may be wrong" in exclude
    assert call(["data", "check", "--root", root, "--out", tmp_path / "check"]) == 1
    said = capsys.readouterr().out
    finding = "labels differ: 1 pair (train/china/09.png and train/flower/conflict.png: near"
    assert said.index(finding) < said.index("duplicates: 1 pair")
    lines = (tmp_path / "check/exclude.txt").read_text().splitlines()
    why = lines[lines.index("#train/flower/conflict.png") - 1]
    assert why.startswith("# nearly the same as train/china/09.png (") and why.endswith(
        "one may be wrong"
    )


@pytest.fixture(scope="module")
def run(planted, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "a"
    assert inside("pretrain", out, **{**TINY, **LENGTH, "data__root": str(planted)}) == 0
    return out


@pytest.fixture(scope="module")
def simclr(planted, tmp_path_factory):
    """A run without rows, on images without labels."""
    out = tmp_path_factory.mktemp("simclr") / "a"
    flat = out.parent / "images"
    flat.mkdir()
    for path in (planted / "train").rglob("*.png"):
        shutil.copy(path, flat / f"{path.parent.name}-{path.name}")
    off = dict.fromkeys(
        ("method__classifier", "method__classifier_init", "method__classifier_lr_scale")
    )
    own = {**off, "method__name": "simclr", "views__crops": [{"count": 2}], "data__root": str(flat)}
    assert inside("pretrain", out, **{**TINY, **own}) == 0
    return out


def pairs(path):
    return {
        (row["path"].removeprefix("train/"), row["duplicate"].removeprefix("train/"))
        for row in table(path)
    }


def test_rows_of_w_are_compared_with_features(run, planted, capsys):
    """The shares by a plain loop. W is that of the last checkpoint."""
    assert call(["explore", run]) == 0
    printed = capsys.readouterr().out
    rows = torch.load(run / "last/state.pt", weights_only=True)["method"][
        "classifier.weight"
    ].numpy()
    images = list_images(section(planted), labelled=False).train
    unit = rows - rows.mean(0)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    same = 0
    for i, row in enumerate(unit):
        order = sorted((j for j in range(len(unit)) if j != i), key=lambda j: -(unit[j] @ row))
        same += sum(images.labels[j] == images.labels[i] for j in order[:6])
    assert f"rows of W: {100 * same / (6 * len(unit)):.1f} % of the 6 nearest" in printed


def test_planted_faults_are_found(run, planted, capsys):
    assert call(["explore", run]) == 0
    said = capsys.readouterr().out
    out = run / "explore"
    found = table(out / "duplicates.csv")
    assert found[0]["kind"] == "same file"
    assert pairs(out / "duplicates.csv") >= COPIES | {SAME}
    kinds = {row["duplicate"]: row["kind"] for row in found}
    assert kinds["train/china/c03.png"] == "near"
    assert kinds["train/flower/c02.jpg"] == "near"
    labels = table(out / "labels.csv")
    assert {row["path"].removeprefix("train/") for row in labels[:5]} >= MOVED
    assert float(labels[0]["score"]) > similarity.LIKELY > float(labels[-1]["score"])
    assert len(labels) == 52
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*FILES, "exclude.txt", "map.png", "rows.png"]
    )
    assert "likely pair" in said
    assert "another label" in said
    assert "train/china/c05.png" in said
    assert "exclude.txt" in said
    assert "idmm data check" in said, "which names this command, too"
    with Image.open(out / "map.png") as image:
        colours = {
            "#{:02x}{:02x}{:02x}".format(*pixel)
            for _, pixel in image.convert("RGB").getcolors(1 << 20)
        }
    assert {COLOURS[0].lower(), COLOURS[1].lower()} <= colours and COLOURS[
        2
    ].lower() not in colours, "two classes"
    lines = (out / "exclude.txt").read_text().splitlines()
    assert "train/china/c05.png" in lines
    assert "#train/flower/c02.jpg" in lines
    left = list_images(section(planted, exclude=str(out / "exclude.txt")), labelled=False).train
    assert len(left) == 51
    assert "train/china/c05.png" not in left.names


def test_a_folder_of_idmm_train_stands_for_its_first_stage(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "stage1")
    (tmp_path / "train.json").touch()
    assert call(["explore", tmp_path]) == 0
    assert (tmp_path / "stage1/explore/map.png").exists()
    assert f"run: '{tmp_path}/stage1', which learned from all images" in capsys.readouterr().err


def test_two_runs_are_mapped_next_to_each_other(run, simclr, tmp_path, monkeypatch, capsys):
    figures = []
    monkeypatch.setattr(explore_tables, "save", lambda figure, path: figures.append(figure))
    assert call(["explore", run, simclr, "--classes", "[flower]", "--out", tmp_path / "e"]) == 0
    before, after = figures[0].axes
    count = 26
    for axis, name in ((before, run), (after, simclr)):
        assert axis.get_title() == f"{count} images, t-SNE of {shortened(str(name))}"
        assert [len(points.get_offsets()) for points in axis.collections] == [count, count], (
            "all, and the class"
        )
        assert sum(isinstance(artist, AnnotationBbox) for artist in axis.artists) > 3, "thumbnails"
    assert len(table(tmp_path / "e/labels.csv")) == 52, "the tables have all classes"
    capsys.readouterr()
    line = "classes: 'flowr' is no class of these images. Did you mean 'flower'?"
    assert (
        refused(capsys, ["explore", run, "--classes", "[flowr]", "--out", tmp_path / "f"])[-1]
        == line
    )
    assert refused(capsys, ["explore", run, tmp_path])[-1].startswith(
        f"{tmp_path}: is no finished run"
    )


def test_without_rows_and_labels(simclr, tmp_path, capsys):
    """Another method goes by features; without labels there is no labels.csv."""
    assert call(["explore", simclr, "--out", tmp_path / "e"]) == 0
    said = capsys.readouterr().out
    assert "skipped, the images have no labels" in said
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
    np.testing.assert_allclose(
        unit, centred / np.linalg.norm(centred, axis=1, keepdims=True), rtol=1e-5, atol=1e-6
    )
    found = similarity.nearest(unit, 4)
    for i in range(37):
        cosine = {j: float(unit[i] @ unit[j]) for j in range(37) if j != i}
        wanted = sorted(cosine, key=lambda j: -cosine[j])[:4]
        assert found.index[i].tolist() == wanted
        np.testing.assert_allclose(found.value[i], [cosine[j] for j in wanted], rtol=1e-5)


def test_duplicates_by_a_naive_loop(rows):
    unit = similarity.unit_rows(np.vstack([rows, rows[:2] + 0.01]))
    found = similarity.likely_duplicates(unit)
    cosine = unit.astype(np.float64) @ unit.T
    crowd = []
    best = {}
    for i in range(39):
        others = sorted((cosine[i, j] for j in range(39) if j != i), reverse=True)
        crowd.append(np.mean(others[1:11]))
    for (i, j), score in zip(found.index.tolist(), found.score, strict=True):
        assert i < j
        np.testing.assert_allclose(
            score, cosine[i, j] - (crowd[i] + crowd[j]) / 2, rtol=1e-4, atol=1e-5
        )
        for one in (i, j):
            best[one] = max(best.get(one, -9), score)
    assert found.index[0].tolist() == [1, 38]
    assert [0, 37] in found.index.tolist()
    assert (np.diff(found.score) <= 0).all()
    assert len({*map(tuple, found.index.tolist())}) == len(found.index)
    low, middle = np.percentile(list(best.values()), [25, 50])
    assert found.threshold == pytest.approx(middle + similarity.ABOVE * (middle - low), rel=1e-4)


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
        wanted = (votes.get(other, 0) - own) / (own + sum(votes.values()))
        assert suggested[i] == other
        assert margins[i] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
