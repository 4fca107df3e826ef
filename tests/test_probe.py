"""Frozen features: idmm probe and idmm fewlabel, their intervals, strengths, draws and files."""

import os
from dataclasses import replace

import numpy as np
import pytest
from folders import tree
from frozen import MEAN, NAME, STD, a_run, by_hand, linear
from helpers import VIT, call_ok, column, read, refused
from PIL import Image
from pytest import approx
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from idmm import config, probe
from idmm.data.listing import list_images
from idmm.data.registry import DATASETS
from idmm.data.stratify import stratified_folds
from idmm.errors import UserError
from idmm.evaluation import evaluate, network
from idmm.models import create_backbone
from idmm.models.spec import ModelSpec
from idmm.models.weights import save_model
from idmm.runs import fewlabel
from idmm.seeding import seeded

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def run(tmp_path):
    return a_run(tmp_path / "run")


@pytest.fixture
def looks(monkeypatch):
    """A list that grows by the number of images that went through a network."""
    counts = []
    extract = network.extract_features

    def counted(*args):
        features = extract(*args)
        counts.append(len(features))
        return features

    monkeypatch.setattr(network, "extract_features", counted)
    return counts


def probed(run, more="", *, out):
    """Runs the command; returns what result.json holds, with both readouts."""
    call_ok(f"probe --init {run} --data.workers 0 --out {out} {more}")
    result = read(out / "result.json")
    return result | result["readouts"]


def some_digits(n=240):
    x, y = load_digits(return_X_y=True)
    return x[:n], y[:n], x[n : n + 200], y[n : n + 200]


def test_score_by_hand():
    truth = np.array([0, 0, 0, 0, 2, 2])  # class 1 has no test image
    predicted = np.array([0, 0, 0, 1, 1, 2])
    scores = evaluate.score(predicted, truth)
    assert scores["top1"] == approx(100 * 4 / 6)
    assert scores["top1_interval"] == approx([30.00, 90.32], abs=0.01)  # Wilson's of 4 of 6
    assert scores["mean_per_class"] == approx(100 * (3 / 4 + 1 / 2) / 2)


def test_the_strength_is_the_best_on_held_out_images():
    train, labels, _, _ = some_digits()
    choice = evaluate.choose_strength(train, labels, seed=5)
    folds = stratified_folds(labels, None, 5)
    naive = {}
    for c in evaluate.STRENGTHS:
        right = [
            linear(train[some], labels[some], c).predict(train[held]) == labels[held]
            for some, held in folds
        ]
        naive[c] = 100 * np.concatenate(right).mean()
    # warm starts may turn a single image
    assert choice.accuracies == approx(naive, abs=100 * 1.5 / 240)
    assert choice.accuracies[choice.strength] == max(choice.accuracies.values())
    assert choice.by == "5 of 5 stratified folds of train"
    assert max(naive.values()) - min(naive.values()) > 5, "the choice matters here"


def test_the_strength_without_a_choice(monkeypatch):
    apart = 100.0 * np.repeat(np.eye(3), 12, axis=0)
    labels = np.repeat(np.arange(3), 12)
    choice = evaluate.choose_strength(apart, labels)
    assert choice.accuracies[10.0] == choice.accuracies[1.0] == 100.0
    assert choice.strength == evaluate.USUAL_STRENGTH
    choice = evaluate.choose_strength(np.eye(3), np.arange(3))
    assert choice.strength == evaluate.USUAL_STRENGTH
    assert choice.accuracies == {}
    assert "under 10 images per class" in choice.by
    mixed = np.random.default_rng(0).normal(size=(27, 8))  # 9 per class
    choice = evaluate.choose_strength(mixed, np.repeat(np.arange(3), 9))
    assert choice.strength == 1
    assert max(choice.accuracies.values()) > choice.accuracies[1], "few images choose nothing"
    monkeypatch.setattr(evaluate, "ENOUGH", 12)  # folds are of 7 or 8 images
    assert evaluate.choose_strength(apart, labels).by == "2 of 5 stratified folds of train"


def test_one_scale_keeps_rare_features_small():
    train, labels, test, truth = some_digits()
    rng = np.random.default_rng(0)
    noisy = [np.c_[x, rng.normal(scale=0.01, size=(len(x), 500))] for x in (train, test)]
    tops = {}
    for one_scale in (False, True):
        scores = evaluate.readouts(noisy[0], labels, noisy[1], truth, one_scale=one_scale)
        tops[one_scale] = scores["probe"]["top1"]
    choice = evaluate.choose_strength(noisy[0], labels, one_scale=True)
    weight, bias = evaluate.fit_linear(noisy[0], labels, 10, choice.strength, one_scale=True)
    predicted = (noisy[1] @ weight.T + bias).argmax(axis=1)
    assert 100 * (predicted == truth).mean() == approx(tops[True])
    assert tops[True] > tops[False] + 10


def test_figures_are_those_of_the_features(run, tmp_path, capsys):
    results = probed(run, out=tmp_path / "o")
    (train, labels), (test, truth) = (
        by_hand(run),
        by_hand(
            run,
            part="test",
        ),
    )
    model = linear(train, labels, results["probe"]["strength"])
    # an image of 360
    assert results["probe"]["top1"] == approx(100 * model.score(test, truth), abs=0.3)
    knn = KNeighborsClassifier(20, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07)).fit(
        train, labels
    )
    assert results["knn"]["top1"] == approx(100 * knn.score(test, truth), abs=0.3)
    low, high = results["probe"]["top1_interval"]
    assert low < results["probe"]["top1"] < high
    assert results["probe"]["top1"] > 60  # chance is 10
    expected = {
        "model": NAME,
        "size": 16,
        "dataset": "digits",
        "num_classes": 10,
        "train_size": 1437,
        "test_size": 360,
    }
    assert expected.items() <= results.items()
    assert results["init"] == str(run)
    assert "mean_per_class" not in results["probe"]
    lines = capsys.readouterr().out.splitlines()
    where = f"{run} ({NAME}, 16 px) on digits: 1,437 training and 360 test images, 10 classes"
    assert lines[0] == f"{where}, the largest 10.3 % of the test images"
    assert f"{results['knn']['top1']:.1f}" in lines[2]
    assert f"{low:.1f} to {high:.1f}" in lines[3]
    assert (
        f"C = {results['probe']['strength']:g}, chosen by 4 of 5 stratified folds of train"
        in lines[3]
    )


def test_size_is_the_one_it_was_built_at_or_the_one_asked_for(run, tmp_path, looks):
    few = "--data.subset '{per_class: 2}' --size 24"
    assert probed(run, few, out=tmp_path / "o")["size"] == 24
    anyone = {k: v for k, v in VIT.items() if k != "patch_size"}
    with seeded(0):
        model = create_backbone(NAME, 224, **anyone)
    save_model(
        tmp_path / "b", "backbone", model.state_dict(), name=NAME, kwargs=anyone, mean=MEAN, std=STD
    )
    root = tree(tmp_path / "d", train={"a": 2, "b": 2}, test={"a": 1, "b": 1})
    assert probed(tmp_path / "b", f"--data.root {root}", out=tmp_path / "p")["size"] == 224
    assert looks[-1] == 2
    assert (
        f"size: 224 px, the default for {NAME}. --size sets another"
        in (tmp_path / "p/log.txt").read_text()
    )


def test_mean_per_class_where_the_literature_reports_it(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(DATASETS, "digits", replace(DATASETS["digits"], metric="mean_per_class"))
    results = probed(run, "--data.subset '{per_class: 10}'", out=tmp_path / "o")
    for readout in ("knn", "probe"):
        assert results[readout]["mean_per_class"] != results[readout]["top1"]
    assert f"mean over classes {results['probe']['mean_per_class']:.1f}" in capsys.readouterr().out


def test_val_chooses_the_strength_and_nothing_else(run, tmp_path, looks):
    root = tree(
        tmp_path / "d",
        train={"a": 6, "b": 6},
        val={"a": 3, "b": 3},
        test={"a": 4, "b": 5},
    )
    results = probed(run, f"--data.root {root}", out=tmp_path / "o")
    assert results["probe"]["chosen_by"] == "val"
    assert looks == [12, 6, 9]
    assert results["train_size"] == 12
    assert results["val_size"] == 6
    assert results["test_size"] == 9
    assert results["knn"]["k"] == 12  # the neighbours are training images


def test_a_probe_is_a_run_like_any_other(run, tmp_path, looks):
    """Its folder holds what was asked for and what came of it; asked for again it does nothing."""
    root = tree(tmp_path / "d", train={"a": 4, "b": 4}, test={"a": 3, "b": 3})
    data = {
        "name": "folder",
        "root": root,
        "workers": 0,
    }
    config = {
        "out": tmp_path / "o",
        "init": run,
        "seed": 3,
        "data": data,
    }
    result = probe(config)
    by_hand = probed(run, f"--data.root {root} --seed 3", out=tmp_path / "p")
    assert result["readouts"] == {name: by_hand[name] for name in ("probe", "knn")}
    assert result["top5"] is None
    assert result["top1"] == by_hand["probe"]["top1"]
    assert result["knn"] == by_hand["knn"]["top1"]
    saved = read(tmp_path / "o/config.yaml")
    assert saved["init"] == str(run)
    assert saved["seed"] == 3
    assert saved["size"] == 16
    assert looks == [8, 6, 8, 6]
    assert probe(config) == result == read(tmp_path / "o/result.json")
    with pytest.raises(UserError, match="^seed: the run in .* has 3, this command has 4"):
        probe({**config, "seed": 4})
    del config["out"]  # then nothing is left
    assert probe(config)["readouts"] == result["readouts"]
    assert len(list(tmp_path.iterdir())) == 5


def test_mistakes_are_a_line_each(run, tmp_path, capsys):
    def mistake(flags):
        return refused(capsys, f"probe {flags}")[-1]

    assert mistake("") == "init: missing, expected --init or --model.name"
    assert mistake(f"--init {tmp_path}/none").startswith(
        f"init: '{tmp_path}/none' does not exist, expected"
    )
    assert mistake(f"--init {run} --size 20").startswith(
        "size: image size 20x20: vit_tiny_patch16_224 does not accept it"
    )
    assert mistake(f"--init {run} --data.subset '{{total: 1}}'").startswith(
        "data: the training images are all of one class"
    )
    (run / "backbone.json").write_text("{}")
    line = mistake(f"--init {run}/backbone.safetensors")
    assert line.endswith("does not name its model. Give its timm name")


def measured(init, more, *, out):
    """Runs the command; returns what fewlabel.json holds."""
    call_ok(f"fewlabel --init {init} --data.workers 0 --out {out} {more}")
    return read(out / "fewlabel.json")


def one(results, **where):
    (record,) = (r for r in results["records"] if where.items() <= r.items())
    return record


def subset_rows(number, seed):
    """Rows of digits' training images that ``data.subset`` draws."""
    whole = list_images(config.Data(), labelled=True).train
    part = list_images(config.Data(subset={"per_class": number, "seed": seed}), labelled=True).train
    return [whole.names.index(name) for name in part.names]


def test_records_are_those_of_the_images_that_a_subset_draws(run, tmp_path, capsys):
    results = measured(run, "--per_class '[4, 1]' --seeds 2", out=tmp_path / "o")
    (train, labels), (test, truth) = (
        by_hand(run),
        by_hand(
            run,
            part="test",
        ),
    )
    for number, seed in (
        (1, 0),
        (4, 0),
        (4, 1),
    ):
        some = subset_rows(number, seed)
        probe = one(results, readout="probe", per_class=number, seed=seed)
        knn = one(results, readout="knn", per_class=number, seed=seed)
        choice = evaluate.choose_strength(train[some], labels[some], seed=seed)
        assert probe["images"] == knn["images"] == 10 * number
        assert probe["strength"] == choice.strength
        model = linear(train[some], labels[some], probe["strength"])
        # an image of 360
        assert probe["top1"] == approx(100 * model.score(test, truth), abs=0.3)
        near = evaluate.knn_predict(train[some], labels[some], test)
        assert knn["top1"] == approx(100 * np.mean(near == truth), abs=0.3)
    assert (
        one(
            results,
            readout="probe",
            per_class=1,
            seed=0,
        )["strength"]
        == evaluate.USUAL_STRENGTH
    )
    assert len(results["records"]) == 2 * 2 * 2
    assert results["per_class"] == [1, 4]
    capsys.readouterr()
    line = f"out: '{tmp_path}/o' has the results of other measurements. Name a new folder"
    for other in ("[4]", "'[4, 1, 4]' --data.subset '{total: 900}'"):
        argv = f"fewlabel --init {run} --per_class {other} --out {tmp_path}/o"
        assert refused(capsys, argv)[-1] == line


def test_files_agree_with_each_other(run, tmp_path, capsys):
    out = tmp_path / "o"
    results = measured(run, "--per_class '[1, 2, 3]' --seeds 3 --untrained", out=out)
    table = (out / "fewlabel.md").read_text()
    assert table in capsys.readouterr().out
    for label in (str(run), "untrained"):
        for readout, name in (
            ("knn", "kNN"),
            ("probe", "linear probe"),
        ):
            cells = []
            for number in (1, 2, 3):
                values = [
                    one(
                        results,
                        run=label,
                        readout=readout,
                        per_class=number,
                        seed=s,
                    )["top1"]
                    for s in range(3)
                ]
                cells.append(f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}")
            assert f"| {label}, {name} | {' | '.join(cells)} |\n" in table
    assert results["runs"][str(run)] == {
        "init": str(run),
        "model": NAME,
        "size": 16,
    }
    assert results["runs"]["untrained"] == {
        "init": None,
        "model": NAME,
        "size": 16,
    }
    assert {*os.listdir(out)} == set(fewlabel.FILES)
    with Image.open(out / "fewlabel.png") as image:
        assert image.format == "PNG"
        assert min(image.size) >= 300
        assert np.asarray(image.convert("RGB")).std() > 5


def test_the_untrained_backbone_is_the_same_with_fresh_weights(run, tmp_path):
    """Its weights are those that a stage would start from."""
    results = measured(run, "--per_class 5 --seeds 1 --untrained --seed 7", out=tmp_path / "o")
    model = ModelSpec(NAME, VIT, 3, list(MEAN), list(STD), 0.0, None).build(16, 7)
    fresh = a_run(tmp_path / "fresh", model=model)
    (train, labels), (test, truth), some = (
        by_hand(fresh),
        by_hand(fresh, part="test"),
        subset_rows(5, 0),
    )
    near = evaluate.knn_predict(train[some], labels[some], test)
    assert one(results, run="untrained", readout="knn")["top1"] == approx(
        100 * np.mean(near == truth), abs=0.3
    )
    assert (
        one(results, run=str(run), readout="knn")["top1"]
        != one(results, run="untrained", readout="knn")["top1"]
    )


def test_the_usual_numbers_are_those_that_every_class_has(run, tmp_path):
    root = tree(tmp_path / "d", train={"a": 3, "b": 9}, test={"a": 1, "b": 1})
    results = measured(run, f"--data.root {root} --seeds 1", out=tmp_path / "o")
    assert results["per_class"] == [1, 2, 3]
    assert column(results["records"], "per_class") == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_mistakes_of_fewlabel(run, tmp_path, capsys):
    assert refused(capsys, f"fewlabel --out {tmp_path}/o")[0].startswith("init: missing, ")
    assert refused(capsys, f"fewlabel --init {run}")[0].startswith("out: missing, ")
    for flags, begin in (
        (f"--init {tmp_path}/none", f"init: '{tmp_path}/none' does not exist, "),
        ("--per_class [0]", "per_class[0]: got 0"),
        ("--per_class '[1, 999]'", "per_class: 999 is more than the training images of "),
    ):
        argv = f"fewlabel --init {run} --out {tmp_path}/o {flags}"
        assert refused(capsys, argv)[0].startswith(begin), flags
    assert not (tmp_path / "o").exists()
