"""``idmm data check`` on what the images suggest, and on what raw pixels reach."""

import json
import shlex

import numpy as np
import pytest
from folders import paint, tree, tuned
from helpers import call
from PIL import Image, ImageDraw
from sklearn.neighbors import KNeighborsClassifier

from idmm.config import PretrainConfig
from idmm.config.parsing import parse
from idmm.data.images import CentreCrop
from idmm.data.looks import look_at, suggestions, summary
from idmm.stages import results


def drawn(root, side=96, grey=False, plain=False, classes=("dark", "light"), parts=(("train", 10), ("test", 4))):
    """Writes squares that are dark or light: noise, or a filled box on white."""
    rng = np.random.default_rng(0)
    for part, count in parts:
        for c, name in enumerate(classes):
            for i in range(count):
                if plain:
                    image = Image.new("RGB", (side, side), "white")
                    at = rng.integers(side // 8, side // 3, 2)
                    colour = tuple(int(v) for v in rng.integers(90 * c, 90 * c + 90, 3))
                    ImageDraw.Draw(image).rectangle([*at, *(at + side // 3)], fill=colour)
                else:
                    pixels = rng.integers(110 * c, 110 * c + 140, (side, side, 1 if grey else 3), dtype=np.uint8)
                    image = Image.fromarray(np.broadcast_to(pixels, (side, side, 3)))
                path = root / part / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
    return root


def checked(root, out, capsys, *argv):
    """Runs the check; returns what it printed and what check.json holds."""
    assert call(["data", "check", "--root", root, "--out", out, *argv]) in (0, 1)
    return capsys.readouterr().out, json.loads((out / "check.json").read_text())


@pytest.mark.parametrize(("kind", "named"), [
    ({}, []),
    ({"grey": True}, ["grey"]),
    ({"side": 20}, ["tiny"]),
    ({"plain": True}, ["plain"]),
    ({"side": 20, "grey": True}, ["grey", "tiny"]),
], ids=lambda value: str(value))  # fmt: skip
def test_each_kind_of_image_suggests_its_flags(kind, named, tmp_path, capsys):
    said, found = checked(drawn(tmp_path / "d", **kind), tmp_path / "c", capsys)
    assert [hint["about"] for hint in found["suggestions"]] == named
    for hint in found["suggestions"]:
        assert f"\n{hint['about']}: {hint['why']}\n  pretraining may want: {hint['flags']}\n" in said
        parse(PretrainConfig, shlex.split(hint["flags"]), "idmm")  # a run takes them


def test_a_tiny_image_is_not_blown_up():
    tiny = summary(
        [look_at(np.random.default_rng(0).integers(0, 256, (60, 50, 3), dtype=np.uint8), CentreCrop(28, 0.875))]
    )
    (hint,) = suggestions(tiny)
    assert hint["flags"].startswith("--views.size 64 ") and "50 px" in hint["why"]
    assert suggestions(summary([])) == []


def test_looks_by_hand():
    image = np.full((8, 10, 3), 255, dtype=np.uint8)
    image[2:4, 2:4] = [200, 10, 10]
    look = look_at(image, CentreCrop(8, 1.0))
    assert look.short == 8 and not look.grey and look.border == 1
    assert look.flat == pytest.approx(1 - 4 / 72)  # two lines with an edge at either side
    image[0, :5] = 0
    assert look_at(image, CentreCrop(8, 1.0)).border == pytest.approx(1 - 6 / 36)  # the corner lies on two sides
    assert look_at(np.zeros((4, 1, 3), np.uint8), CentreCrop(8, 1.0)).flat == 1


def test_the_floor_is_the_pixel_knn_of_a_run(tmp_path, capsys):
    """To the last digit, at the run's size, on images that are larger or smaller than what it keeps of them."""
    train = {"a": 12, "b": 12, "c": 12}
    for side in (24, 160):
        root = tree(tmp_path / f"d{side}", train=train, val={"a": 2, "b": 2, "c": 2}, test={"a": 6, "b": 6, "c": 7})
        for seed, path in enumerate(sorted(root.rglob("*.png"))):
            paint(path, seed, (side, side + 9))
        own = {"stages": [{"size": 32}], "augment__scale": [0.35, 1.0], "train__epochs": 30, "train__eval_every": 30}
        assert tuned(tmp_path / f"run{side}", root, **own) == 0
        wanted = json.loads((tmp_path / f"run{side}/result.json").read_text())["pixel_knn"]
        said, found = checked(root, tmp_path / "c", capsys, "--size", 32)
        floor = found["floor"]
        assert floor["pixel_knn"] == wanted and (floor["images"], floor["of"], floor["size"]) == (19, "test", 32)
        line = f"the floor to beat: kNN of raw pixels {wanted:.1f} % (largest class 36.8 %), on 19 test images at 32 px"
        assert line in said.splitlines()


def test_without_test_images_a_part_of_train_is_held_out(tmp_path, capsys):
    root = drawn(tmp_path / "d", side=32, parts=(("train", 10),))
    said, found = checked(root, tmp_path / "c", capsys)
    assert found["floor"]["images"] == 4 and found["floor"]["of"] == "train"
    assert "(largest class 50.0 %), on 4 held-out training images at 224 px" in said


def test_unreadable_images_are_left_out_of_the_floor(tmp_path, capsys):
    root = drawn(tmp_path / "d", side=32)
    (root / "test/dark/0.png").write_text("no image")
    assert checked(root, tmp_path / "c", capsys)[1]["floor"]["images"] == 7


@pytest.mark.parametrize("form", ["no labels", "one class", "other classes"])
def test_without_labels_to_compare_there_is_no_floor(form, tmp_path, capsys):
    names = ("dark",) if form == "one class" else ("dark", "light")
    root = drawn(tmp_path / "d", side=32, classes=names, parts=(("train", 3),))
    if form == "no labels":
        for number, path in enumerate(sorted(root.rglob("*.png"))):
            path.rename(root / f"{number}.png")
        for folder in (root / "train/dark", root / "train/light", root / "train"):
            folder.rmdir()
    if form == "other classes":
        drawn(root, side=32, classes=("x", "y"), parts=(("test", 2),))
    said, found = checked(root, tmp_path / "c", capsys)
    if form == "other classes":
        assert found["floor"]["pixel_knn"] == 0
    else:
        assert found["floor"] is None and "floor" not in said


def test_many_images_are_thinned_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(results, "PAIRS", 30)  # 4 * 30 pairs with 20 training images
    root = drawn(tmp_path / "d", side=32)
    assert checked(root, tmp_path / "c", capsys)[1]["floor"]["images"] == 6


def test_raw_pixels_vote_as_neighbours_do():
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(30, 6)).astype(np.float32), np.arange(30) % 2
    rows[:, 0] += 3 * labels
    held, truth = rows[::3] + 0.01, labels[::3]
    mean = rows.mean(0)
    model = KNeighborsClassifier(5, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    wanted = 100 * model.fit(rows - mean, labels).score(held - mean, truth)
    assert results.rows_knn(rows, labels, held, truth) == pytest.approx(wanted)
