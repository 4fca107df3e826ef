"""``idmm report``: what its page shows, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import scipy.stats
import yaml
from folders import tree, tuned
from helpers import call, inside, refused
from pages import Reader
from PIL import Image

from idmm.commands.found_runs import found_runs
from idmm.pictures import curves_figure
from idmm.report.stats import calibration
from idmm.stages.results import compared

ODD = ("<b>& $x_1$", "_under", "עברית", "猫\U0001f408")  # names of classes
WIDE = {"patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2}
ONE = {"stages": None, "train__size": 16, "train__epochs": 2, "train__warmup_epochs": 0, "train__ema": None}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Pretraining, fine-tunings of two seeds from it, one of another size from scratch, and one with odd names."""
    root = tmp_path_factory.mktemp("runs")
    assert inside("pretrain", root / "pre", train__epochs=2, train__accumulate=1) == 0
    for seed in (0, 1):
        assert inside("finetune", root / f"tuned-{seed}", **ONE, seed=seed, init=str(root / "pre")) == 0
    assert inside("finetune", root / "wide", **ONE, model__kwargs=WIDE) == 0
    classes = dict.fromkeys(ODD, 4)
    assert tuned(root / 'o "<i>" $x_1$', tree(root / "images", train=classes, test=classes), train__epochs=2) == 0
    return root


def reported(out, *given):
    assert call(["report", *given, "--out", out]) == 0
    return (out / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(runs):
    """The folder of a report on all of them, and the text of its page."""
    names = ["pre", "tuned-0", "tuned-1", "wide", 'o "<i>" $x_1$']
    return runs / "out", reported(runs / "out", *(runs / name for name in names))


def result(run):
    return json.loads((run / "result.json").read_text())


# ------------------------------------------------------------------ the page
def test_it_shows_what_the_runs_measured(page, runs):
    text = Reader(page[1]).text
    for name in ("tuned-0", "tuned-1", "wide"):
        found = result(runs / name)
        low, high = found["top1_interval"]
        assert f"{name} {found['top1']:.1f} {low:.1f} to {high:.1f}" in text
    assert f"{result(runs / 'pre')['loss']:.4g}" in text
    top1 = [result(runs / f"tuned-{seed}")["top1"] for seed in (0, 1)]
    assert f"tuned 2 {np.mean(top1):.1f} {np.std(top1, ddof=1):.1f} {top1[0]:.1f}, {top1[1]:.1f}" in text
    test = compared(runs / "tuned-0", runs / "wide")
    points = f"{test['points']:+.1f}".replace("-", "−")
    assert f"tuned-0 wide {points} {test['p']:.2g}" in text
    assert "Shown for all of tuned, which are the same except for the seed" in text
    assert "Expected calibration error" in text and "most often taken for" in text and "nearest other image" in text
    assert "'embed_dim': 64" in text and "Fine-tuning: settings that differ" in text
    assert f"kNN of raw pixels {result(runs / 'wide')['pixel_knn']:.2f}" in (runs / "wide/log.txt").read_text()


def test_pictures_are_in_the_page_and_beside_it(page):
    names = {path.name for path in page[0].glob("*.png")}
    assert names == {
        "accuracy.png", "curves-pretrain.png", "curves-finetune.png",
        *(f"crops-{n}.png" for n in (1, 2, 4, 5)),
        *(f"{kind}-{n}.png" for kind in ("features", "confusion", "calibration", "mistakes") for n in (2, 4, 5)),
    }  # fmt: skip
    for path in page[0].glob("*.png"):
        with Image.open(path) as image:
            assert image.format == "PNG" and np.asarray(image).std() > 1, path
    text = Reader(page[1])
    assert len(text.all("img")) == len(names)
    assert all(image["src"].startswith("data:image/png") and image["alt"].strip() for image in text.all("img"))
    assert not {tag for tag, _ in text.tags} & {"script", "link", "iframe", "object"}


def test_names_are_text(page, runs, tmp_path):
    text = Reader(page[1])
    assert not text.all("b") and not text.all("i"), "no name became an element"
    for name in (*ODD, 'o "<i>" $x_1$'):
        assert name in text.text
    run = shutil.copytree(runs / "wide", tmp_path / "a\x07\udce4")
    text = Reader(reported(tmp_path / "out", run))
    assert text.all("img") and "a\ufffd\ufffd" in text.text


# ------------------------------------------------------------------ what is gone, what explore found, folds, probes
def test_a_run_whose_images_are_gone(runs, tmp_path):
    run = shutil.copytree(runs / 'o "<i>" $x_1$', tmp_path / "old")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["root"] = str(tmp_path / "gone")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "explore").mkdir()
    Image.new("RGB", (30, 20), "red").save(run / "explore" / "duplicates.png")
    text = Reader(reported(tmp_path / "out", run))
    assert "No crops: " in text.text and "No pictures of mistakes: " in text.text and "gone" in text.text
    assert "Expected calibration error" in text.text and "idmm explore: duplicates" in text.text
    assert "Confusion matrix" in str(text.all("img")), "that needs no images"


def test_seeds_are_pooled_by_their_settings_not_by_their_names(runs, tmp_path):
    for number, name in enumerate(("tuned-0", "tuned-1", "wide", "wide")):
        run = shutil.copytree(runs / name, tmp_path / f"run-{number}")
        if number == 3:
            text = (run / "config.yaml").read_text()
            (run / "config.yaml").write_text(text.replace("\nseed: 0\n", "\nseed: 1\n"))
    text = Reader(reported(tmp_path / "out", *sorted(tmp_path.glob("run-*")))).text
    assert "over 2 seeds each: run has" in text and " over run-2 and 1 more" in text


def test_folds_are_one_run_and_a_probe_is_one(runs, tmp_path):
    folder, results = tmp_path / "folds", []
    for fold in (1, 2):
        shutil.copytree(runs / "wide", folder / f"fold-{fold}")
        results.append({"fold": fold, **result(runs / "wide")})
    shutil.copy(runs / "wide" / "config.yaml", folder)
    (folder / "result.json").write_text(json.dumps({**results[0], "test_size": 720, "folds": results}))
    assert call(["probe", "--init", runs / "pre", "--data.subset", "{total: 96}", "--out", tmp_path / "probe"]) == 0
    text = Reader(reported(tmp_path / "out", folder, tmp_path / "probe"))
    assert "folds" in text.text and " 720 " in text.text and "a thin line is a fold" in text.text
    found = json.loads((tmp_path / "probe/probe.json").read_text())
    assert f"{found['probe']['top1']:.1f}" in text.text
    assert any("strength of the linear probe" in image["alt"] for image in text.all("img"))


def test_folders_that_hold_runs(runs, tmp_path):
    """Of ``idmm train``, in their order; in a folder of any kind, that of the demo, say."""
    held = tmp_path / "demo"
    shutil.copytree(runs / "pre", held / "a")
    (held / "images").mkdir()
    train = shutil.copytree(runs / "wide", held / "train")
    shutil.copytree(runs / "pre", train / "stage1")
    (train / "scratch").mkdir()
    (train / "scratch" / "config.yaml").write_text("")
    (train / "train.json").write_text("{}")
    found, notes = found_runs([str(train)])
    assert found == [train / "stage1", train] and len(notes) == 1
    assert found_runs([str(held)]) == ([held / "a", *found], notes)
    assert notes[0].startswith(f"{train / 'scratch'} is left out, it is not finished: no epoch yet; the command that")


def test_what_is_not_finished_is_named_on_the_terminal_and_at_the_top(runs, tmp_path, capsys):
    for name in ("tuned-0", "tuned-1", "wide"):
        shutil.copytree(runs / name, tmp_path / "all" / name)
    begun = tmp_path / "all" / "wide"
    (begun / "result.json").unlink()
    lines = (begun / "metrics.jsonl").read_text().splitlines()
    (begun / "metrics.jsonl").write_text(f"{lines[0]}\n{lines[1][:9]}")  # torn by a kill
    text = Reader(reported(tmp_path / "out", tmp_path / "all"))
    loss = format(json.loads(lines[0])["loss"], ".4g")
    said = f"not finished: 1 of 2 epochs done, loss {loss}; the command that began it goes on with it"
    line = f"{begun} is left out, it is {said}"
    assert line in capsys.readouterr().err and line in text.text
    assert refused(capsys, ["report", begun, "--out", tmp_path / "out"])[-1] == f"runs: '{begun}' is {said}"
    shutil.rmtree(begun.parent / "tuned-0")
    shutil.rmtree(begun.parent / "tuned-1")
    (line,) = refused(capsys, ["report", begun.parent, "--out", tmp_path / "out"])
    assert f"has runs that are not finished (wide: 1 of 2 epochs done, loss {loss})" in line


def test_what_groups_of_seeds_reached(runs, tmp_path):
    top1 = {"a": [80.0, 84.0, 88.0], "b": [70.0, 72.0, 74.0]}
    for name, values in top1.items():
        for seed, value in enumerate(values):
            run = shutil.copytree(runs / ("wide" if name == "a" else "tuned-0"), tmp_path / f"{name}-{seed}")
            config = yaml.safe_load((run / "config.yaml").read_text())
            (run / "config.yaml").write_text(yaml.safe_dump({**config, "seed": seed}))
            found = {**result(run), "top1": value, "top1_interval": [value - 5, value + 5]}
            (run / "result.json").write_text(json.dumps(found))
    page = reported(tmp_path / "out", *sorted(tmp_path.glob("[ab]-*")))
    summary = Reader(page).text
    half = scipy.stats.t.ppf(0.975, 2) * np.sqrt((16 + 4) / 3)
    assert (
        "a 84.0 ± 4.0 %, b 72.0 ± 2.0 % of the test images right, over 3 seeds each: a has +12.0 points (95 % "
        in summary
    )
    assert f"interval over seeds {12 - half:+.1f} to {12 + half:+.1f}) over b.".replace("-", "−") in summary
    summary = Reader(reported(tmp_path / "one", tmp_path / "a-0", tmp_path / "b-0")).text
    said = "a-0 80.0 %, b-0 70.0 % of the test images right, over 1 seed each: a-0 has +10.0 points over b-0"
    p = compared(tmp_path / "a-0", tmp_path / "b-0")["p"]
    assert p > 0.05 and f"{said}, which may be chance (p {p:.2g})." in summary, "McNemar's test of their predictions"
    assert "how far another seed would move" in summary and "±" not in summary
    fewer = {**result(tmp_path / "b-0"), "test_size": 90}
    (tmp_path / "b-0/result.json").write_text(json.dumps(fewer))
    summary = Reader(reported(tmp_path / "other", tmp_path / "a-0", tmp_path / "b-0")).text
    assert "These classifiers were tested on different images" in summary and "has +10.0 points" not in summary


def test_what_is_refused(runs, tmp_path, capsys):
    unfinished = shutil.copytree(runs / "wide", tmp_path / "begun")
    (unfinished / "result.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid/grid.json").write_text("{}")
    (tmp_path / "file").write_text("")
    wanted = {
        tmp_path / "none": "does not exist", unfinished: "is not finished: 2 of 2 epochs done, loss",
        tmp_path / "empty": "has no config.yaml and no result.json", tmp_path / "file": "is a file",
        tmp_path / "grid": "holds a grid, whose page is",
    }  # fmt: skip
    said = refused(capsys, ["report", *wanted, "--out", tmp_path / "out"])
    assert len(said) == len(wanted)
    for line, (path, words) in zip(said, wanted.items(), strict=True):
        assert line.startswith(f"runs: '{path}' {words}"), line
    assert not (tmp_path / "out").exists()
    (line,) = refused(capsys, ["report", runs / "wide", "--out", tmp_path / "file" / "out"])
    assert line.startswith("out: cannot write to")


# ------------------------------------------------------------------ the figures
def test_calibration_is_the_definition():
    rng = np.random.default_rng(0)
    probability, right = rng.random(500), rng.random(500) < 0.5
    found = calibration(probability, right)
    error = 0.0
    for n in range(10):
        inside = [i for i in range(500) if n / 10 < probability[i] <= (n + 1) / 10]
        error += abs(np.mean(right[inside]) - np.mean(probability[inside])) * len(inside) / 500
    assert found.error == pytest.approx(error) and sum(one.images for one in found.bins) == 500
    assert calibration(np.array([1.0, 1.0]), np.array([True, True])).error == 0
    (one,) = calibration(np.array([0.0]), np.array([False])).bins
    assert (one.low, one.high, one.images) == (0.0, 0.1, 1)


def records(epochs, level, **last):
    made = [{"epoch": n, "stage": 1, "loss": level / n, "lr": 0.1, "seconds": 2.0} for n in range(1, epochs + 1)]
    made[-1] |= last
    return made


def test_curves_of_several_runs():
    seeds = {"a": [records(4, 1.0, top1=50.0), records(3, 3.0)], "_b": [records(5, 2.0)]}
    figure = curves_figure(seeds)
    loss, lr, top1 = figure.axes
    lines = [line.get_xydata().tolist() for line in loss.lines]
    assert lines[2] == [[1, 2], [2, 1], [3, pytest.approx(2 / 3)]], "the mean as far as both have come"
    assert [line[-1][0] for line in lines] == [4, 3, 3, 5] and len(top1.lines) == 1
    assert [text.get_text() for text in figure.legends[0].texts] == ["a (mean of 2)", " _b"]
