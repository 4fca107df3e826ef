"""``idmm fewlabel``: which images are drawn, what is measured on them, and what is written."""

import json

import numpy as np
import pytest
from folders import tree
from frozen import MEAN, NAME, STD, a_run, by_hand, linear
from helpers import VIT, call, refused
from PIL import Image

from idmm import config
from idmm.data.listing import list_images
from idmm.evaluation import evaluate
from idmm.models.spec import ModelSpec
from idmm.stages import fewlabel

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def run(tmp_path):
    return a_run(tmp_path / "run")


def measured(init, *argv, out):
    """Runs the command; returns what fewlabel.json holds."""
    assert call(["fewlabel", "--init", init, "--data.workers", 0, "--out", out, *argv]) == 0
    return json.loads((out / "fewlabel.json").read_text())


def one(found, **where):
    (record,) = (r for r in found["records"] if where.items() <= r.items())
    return record


def drawn(number, seed):
    """Rows of digits' training images that ``data.subset`` draws."""
    whole = list_images(config.Data(), labelled=True).train
    part = list_images(config.Data(subset={"per_class": number, "seed": seed}), labelled=True).train
    return [whole.names.index(name) for name in part.names]


# ------------------------------------------------------------------ frozen features
def test_records_are_those_of_the_images_that_a_subset_draws(run, tmp_path):
    found = measured(run, "--per_class", "[4, 1]", "--seeds", 2, out=tmp_path / "o")
    (train, labels), (test, truth) = by_hand(run), by_hand(run, part="test")
    for number, seed in ((1, 0), (4, 0), (4, 1)):
        some = drawn(number, seed)
        probe = one(found, readout="probe", per_class=number, seed=seed)
        knn = one(found, readout="knn", per_class=number, seed=seed)
        choice = evaluate.choose_strength(train[some], labels[some], seed=seed)
        assert probe["images"] == knn["images"] == 10 * number and probe["strength"] == choice.strength
        model = linear(train[some], labels[some], probe["strength"])
        assert probe["top1"] == pytest.approx(100 * model.score(test, truth), abs=0.3)  # an image of 360
        assert knn["top1"] == pytest.approx(evaluate.knn_accuracy(train[some], labels[some], test, truth), abs=0.3)
    assert one(found, readout="probe", per_class=1, seed=0)["strength"] == evaluate.USUAL_STRENGTH
    assert len(found["records"]) == 2 * 2 * 2 and found["per_class"] == [1, 4]


def test_files_agree_with_each_other(run, tmp_path, capsys):
    out = tmp_path / "o"
    found = measured(run, "--per_class", "[1, 2, 3]", "--seeds", 3, "--untrained", out=out)
    table = (out / "fewlabel.md").read_text()
    assert table in capsys.readouterr().out
    for label in (str(run), "untrained"):
        for readout, name in (("knn", "kNN"), ("probe", "linear probe")):
            cells = []
            for number in (1, 2, 3):
                values = [one(found, run=label, readout=readout, per_class=number, seed=s)["top1"] for s in range(3)]
                cells.append(f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}")
            assert f"| {label}, {name} | {' | '.join(cells)} |\n" in table
    assert found["runs"][str(run)] == {"init": str(run), "model": NAME, "size": 16}
    assert found["runs"]["untrained"] == {"init": None, "model": NAME, "size": 16}
    assert {path.name for path in out.iterdir()} == set(fewlabel.FILES)
    with Image.open(out / "fewlabel.png") as image:
        assert image.format == "PNG" and min(image.size) >= 300 and np.asarray(image.convert("RGB")).std() > 5


def test_the_untrained_backbone_is_the_same_with_fresh_weights(run, tmp_path):
    """Its weights are those that a stage would start from."""
    found = measured(run, "--per_class", 5, "--seeds", 1, "--untrained", "--seed", 7, out=tmp_path / "o")
    model = ModelSpec(NAME, VIT, 3, list(MEAN), list(STD), 0.0, None).build(16, 7)
    fresh = a_run(tmp_path / "fresh", model=model)
    (train, labels), (test, truth), some = by_hand(fresh), by_hand(fresh, part="test"), drawn(5, 0)
    wanted = evaluate.knn_accuracy(train[some], labels[some], test, truth)
    assert one(found, run="untrained", readout="knn")["top1"] == pytest.approx(wanted, abs=0.3)
    assert one(found, run=str(run), readout="knn")["top1"] != one(found, run="untrained", readout="knn")["top1"]


def test_the_usual_numbers_are_those_that_every_class_has(run, tmp_path):
    """Unreadable images are left out of what is drawn."""
    root = tree(tmp_path / "d", train={"a": 3, "b": 9}, test={"a": 1, "b": 1})
    (root / "train/a/1.png").write_bytes(b"")
    argv = ["--data.name", "folder", "--data.root", root, "--data.on_error", "skip"]
    found = measured(run, *argv, "--seeds", 1, out=tmp_path / "o")
    assert found["per_class"] == [1, 2, 3] and [r["per_class"] for r in found["records"]] == [1, 1, 2, 2, 3, 3]
    assert found["records"][-1]["images"] == 5


def test_several_architectures_without_training(run, tmp_path):
    third = a_run(tmp_path / "third", size=24)
    found = measured(f"[{run}, {third}]", "--untrained", "--per_class", 1, "--seeds", 1, out=tmp_path / "o")
    labels, sizes = list(found["runs"]), [about["size"] for about in found["runs"].values()]
    assert labels[2:] == [f"untrained, as {run}", f"untrained, as {third}"] and sizes == [16, 24, 16, 24]


# ------------------------------------------------------------------ mistakes
def mistake(capsys, *argv):
    return refused(capsys, ["fewlabel", *argv])


def test_a_class_with_too_few_images_is_refused(run, tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 3, "b": 9, "c": 2}, test={"a": 1, "b": 1, "c": 1})
    argv = ["--init", run, "--out", tmp_path / "o", "--data.name", "folder", "--data.root", root]
    wanted = "per_class: 5 is more than the training images of 'c' (2), 'a' (3), expected at most 2"
    assert mistake(capsys, *argv, "--per_class", "[1, 5]") == [wanted]
    assert not (tmp_path / "cache/features").exists() and not (tmp_path / "o").exists(), "before any work"


def test_mistakes_are_a_line_each(run, tmp_path, capsys):
    def said(*argv):
        return mistake(capsys, "--init", run, "--out", tmp_path / "o", *argv)

    assert mistake(capsys, "--out", tmp_path / "o")[0].startswith("init: missing, ")
    assert mistake(capsys, "--init", run)[0].startswith("out: missing, ")
    for argv, begin in (
        (["--init", f"[{run}, {run}]"], f"init: '{run}' is given twice"),
        (["--init", tmp_path / "none"], f"init: '{tmp_path}/none' does not exist, "),
        (["--per_class", "[0]"], "per_class[0]: got 0"),
        (["--data.subset", "{total: 9}"], "data.subset: "),
    ):
        assert said(*argv)[0].startswith(begin), argv
    assert not (tmp_path / "o").exists()
