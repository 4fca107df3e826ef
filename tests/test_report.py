"""``idmm report``: what its page says with scripts off, what a browser makes of it, and what is refused."""

import base64
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import yaml
from browser import Reader
from folders import tree, tuned
from helpers import call, inside, refused
from matplotlib.text import Text
from PIL import Image

from idmm.commands.found_runs import found_runs
from idmm.commands.recipe_of import nearest_recipe
from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config.parsing import build
from idmm.config.reading import recipe
from idmm.pictures import COLOURS, curves_figure
from idmm.report import run_page
from idmm.report.calibration import calibration
from idmm.report.facts import Cloud
from idmm.report.run_pictures import cloud_figure, scores_figure
from idmm.stages import STAGES
from idmm.stages.results import compared

ODD = ("<b>& $x_1$", "_under", "עברית", "猫\U0001f408")  # names of classes
WIDE = {"patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2}
SHEET = "Likely duplicates: thumbnails of the images in the table"
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
def test_it_says_what_the_runs_say(page, runs):
    text = Reader(page[1])
    summary = text.sections["summary"]
    for name in ("tuned-0", "tuned-1", "wide"):
        found = result(runs / name)
        low, high = found["top1_interval"]
        assert f"{name} " in summary and f"{found['top1']:.1f} {low:.1f} to {high:.1f}" in summary
    assert f"{result(runs / 'pre')['loss']:.4g}" in summary
    top1 = [result(runs / f"tuned-{seed}")["top1"] for seed in (0, 1)]
    assert f"tuned 2 {np.mean(top1):.1f} {np.std(top1, ddof=1):.1f} {top1[0]:.1f}, {top1[1]:.1f}" in summary
    said = compared(runs / "tuned-0", runs / "wide")
    points = f"{said['points']:+.1f}".replace("-", "−")
    assert f"tuned-0 wide {points} {said['p']:.2g}" in summary
    for name in ("curves", "size", "run-1", "crops-1", "explored-1", "run-2", "crops-2", "cloud-2", "predicted-2"):
        assert name in text.sections, name
    assert "as seen in epochs 1 to 2" in page[1], "no more than there were"
    assert f"kNN of raw pixels {result(runs / 'wide')['pixel_knn']:.2f}" in (runs / "wide/log.txt").read_text()
    for name in ("mistakes-2", "calibration-2", "run-4", "run-5", "settings", "environment"):
        assert name in text.sections, name
    assert "run-3" not in text.sections and "the same but for the seed" in text.sections["run-2"]
    assert f"idmm explore {runs / 'pre'} shows" in text.sections["explored-1"]
    assert "python" in text.sections["environment"] and "torch" in text.sections["environment"]
    assert "embed_dim" in text.sections["settings"], "where the runs differ"


def test_pictures_lie_beside_it_too(page):
    names = {path.name for path in page[0].iterdir()}
    wanted = {"report.html", "accuracy.png", "size.png", "crops-1.png", "crops-2.png", "features-2.png"}
    wanted |= {"confusion-2.png", "calibration-2.png"}
    wanted |= {f"curves-{kind}-{over}.png" for kind in ("pretrain", "finetune") for over in ("epochs", "seconds")}
    assert wanted <= names
    for path in page[0].glob("*.png"):
        with Image.open(path) as image:
            assert image.format == "PNG" and np.asarray(image).std() > 1, path
    assert (page[0] / "report.html").stat().st_size < 3e6


def test_it_is_whole_and_can_be_read_aloud(page):
    text = Reader(page[1])
    assert {tag for tag, _ in text.tags} & {"script", "link", "iframe", "object"} == set()
    assert not [a for _, attrs in text.tags for a in attrs if a.startswith("on") or a == "style"]
    for image in text.all("img"):
        assert image["src"].startswith("data:image/") and image["alt"].strip()
    heads = text.all("th")
    assert heads and all(head.get("scope") in ("col", "row") for head in heads)
    linked, ids = [a["href"] for a in text.all("a")], {attrs.get("id") for _, attrs in text.tags}
    assert linked and all(href[0] == "#" and href[1:] in ids for href in linked)
    (policy,) = [a["content"] for a in text.all("meta") if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "img-src data:" in policy
    outside = re.sub(r"data:image/[^\"]*", "", page[1])
    assert not re.search(r"https?://|@import|url\(", outside)


def test_names_are_text_wherever_they_stand(page):
    text = Reader(page[1])
    assert not text.all("b")[1:] and not text.all("i"), "no name became an element"
    for name in ODD:
        assert " ".join(name.split()) in text.sections["predicted-5"]
    assert 'o "<i>" $x_1$' in text.sections["run-5"]
    for image in text.all("img"):
        kind, _, content = image["src"].partition(";base64,")
        if kind.endswith("svg+xml"):
            svg = base64.b64decode(content).decode()
            assert "<b>" not in svg and "<i>" not in svg and not re.search(r"(?i)<script|href=.http", svg)


def test_names_that_are_no_text(runs, tmp_path):
    run = shutil.copytree(runs / "wide", tmp_path / "a\x07\udce4")
    text = Reader(reported(tmp_path / "out", run))
    assert text.all("img") and "a\ufffd\ufffd" in text.sections["summary"]


# ------------------------------------------------------------------ a browser
def test_nothing_leaves_it_and_every_picture_is_drawn(browser, page):
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(page[0] / "report.html", scripts=False)
    drawn = browser.run("[...document.images].map(image => [image.complete, image.naturalWidth])")
    assert len(drawn) > 20 and all(done and width > 0 for done, width in drawn)
    assert {url.partition(":")[0] for url in browser.requests} == {"file", "data"}
    assert sum(url.startswith("file:") for url in browser.requests) == 1 and browser.complaints == []


SHOWN = "[...document.querySelectorAll('.tabs')].map(t => [...t.querySelectorAll('figure')].map(f => !!f.offsetHeight))"


def test_tabs_switch_without_scripts_and_paper_shows_both(browser, page):
    browser.open(page[0] / "report.html", scripts=False)
    assert browser.run(SHOWN) == [[True, False], [True, False]]
    browser.click("document.querySelectorAll('.tabs label')[1]")
    assert browser.run(SHOWN) == [[False, True], [True, False]]
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run(SHOWN) == [[True, True], [True, True]]
    assert base64.b64decode(browser.call("Page.printToPDF")["data"]).startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="")


def test_light_dark_and_narrow(browser, page, tmp_path):
    ground = {}
    for dark in (False, True):
        browser.open(page[0] / "report.html")
        browser.picture(tmp_path / "shot.png", width=1280, height=900, dark=dark)
        place = browser.run("(b => [b.x, b.y])(document.querySelector('.picture img').getBoundingClientRect())")
        with Image.open(tmp_path / "shot.png") as shot:
            grey = shot.convert("L")
            ground[dark] = grey.getpixel((2, 2)), grey.getpixel((round(place[0]) + 20, round(place[1]) + 20))
    assert min(ground[False]) > 240 and max(ground[True]) < 60, "the page, and its pictures"
    browser.picture(tmp_path / "shot.png", width=390, height=800)
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    pictures = "[...document.querySelectorAll('.picture img')].filter(i => i.offsetWidth)"
    assert browser.run(f"{pictures}.every(i => i.getBoundingClientRect().right <= 390)"), "scaled, not cut"
    assert browser.run(f"{pictures}[0].offsetHeight > 0.7 * {pictures}[0].offsetWidth"), "the narrow figure"
    heads = browser.run("[...document.querySelector('#summary table').rows[0].cells].map(c => c.textContent)")
    assert heads[:3] == ["run", "accuracy", "95 % interval"]
    cell = "document.querySelector('#summary table').rows[1].cells"
    assert browser.run(f"{cell}[0].offsetHeight < 45 && {cell}[1].getBoundingClientRect().right < 390")


# ------------------------------------------------------------------ older runs, folders of runs, what is gone
def test_an_older_run_whose_images_are_gone(runs, tmp_path):
    run = shutil.copytree(runs / 'o "<i>" $x_1$', tmp_path / "old")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["root"] = str(tmp_path / "gone")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = (run / "predictions.csv").read_text().splitlines()
    (run / "predictions.csv").write_text("\n".join(row.rpartition(",")[0] for row in rows) + "\n")
    for name in ("features.npz", "environment.json"):
        (run / name).unlink()
    text = Reader(reported(tmp_path / "out", run))
    assert "The images cannot be read" in text.sections["crops-1"] and "gone" in text.sections["crops-1"]
    assert "gone" in text.sections["cloud-1"]
    assert "without probabilities" in text.sections["mistakes-1"] and "without prob" in text.sections["calibration-1"]
    assert "No environment.json" in text.sections["environment"]
    assert "Confusion matrix" in str(text.all("img")), "that needs no images"


def test_an_older_run_whose_images_are_there(runs, tmp_path):
    run = shutil.copytree(runs / "wide", tmp_path / "old")
    rows = (run / "predictions.csv").read_text().splitlines()
    (run / "predictions.csv").write_text("\n".join(row.rpartition(",")[0] for row in rows) + "\n")
    (run / "features.npz").unlink()
    before = sorted(path.name for path in run.iterdir())
    text = Reader(reported(tmp_path / "out", run))
    assert "Expected calibration error" in text.sections["calibration-1"]
    assert "before" in text.sections["cloud-1"] and "right" in text.sections["predicted-1"]
    assert sorted(path.name for path in run.iterdir()) == before, "its folder is left as it was"


def test_what_explore_found_is_shown(runs, tmp_path):
    run = shutil.copytree(runs / "pre", tmp_path / "pre")
    (run / "explore").mkdir()
    Image.new("RGB", (30, 20), "red").save(run / "explore" / "duplicates.png")
    table = {"columns": ["rank", "image"], "rows": [[1, "<u>a.png"], [2, None]]}
    duplicates = {"name": "duplicates", "title": "Likely duplicates", "count": 12, "lines": ["Look at them."]}
    duplicates |= {"table": table, "csv": "duplicates.csv", "sheets": ["duplicates.png", "gone.png"]}
    none = {"name": "labels", "title": "Likely label errors", "count": 0, "lines": [], "table": None, "csv": None}
    found = {"title": "", "by": "instances", "images": 96, "lines": ["By the rows of W."], "notes": ["No labels."]}
    found["sections"] = [duplicates, {**none, "sheets": []}]
    (run / "explore" / "explore.json").write_text(json.dumps(found))
    text = Reader(reported(tmp_path / "out", run))
    for words in ("By the rows of W.", "Likely duplicates: 12", "<u>a.png", "Likely label errors: 0", "No labels."):
        assert words in text.sections["explored-1"], words
    assert [image["alt"] for image in text.all("img") if "Likely" in image["alt"]] == [SHEET]


def test_what_explore_found_of_a_classifier_is_shown_too(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "wide", tmp_path / "wide")
    assert call(["explore", run, "--out", tmp_path / "elsewhere"]) == 0
    assert "idmm report" not in capsys.readouterr().out, "which looks into the run's folder alone"
    assert "explored-1" not in Reader(reported(tmp_path / "before", run)).sections
    assert call(["explore", run]) == 0
    assert f"'idmm report {run}' shows them" in capsys.readouterr().out
    assert "Likely label errors" in Reader(reported(tmp_path / "after", run)).sections["explored-1"]


def test_seeds_are_pooled_by_their_settings_not_by_their_names(runs, tmp_path):
    for number, name in enumerate(("tuned-0", "tuned-1", "wide", "wide")):
        run = shutil.copytree(runs / name, tmp_path / f"run-{number}")
        if number == 3:
            text = (run / "config.yaml").read_text()
            (run / "config.yaml").write_text(text.replace("\nseed: 0\n", "\nseed: 1\n"))
    text = Reader(reported(tmp_path / "out", *sorted(tmp_path.glob("run-*"))))
    pooled = text.sections["summary"].partition("Runs that are the same but for the seed")[2]
    assert "run 2 " in pooled and "run-2 and 1 more 2 " in pooled


def test_images_that_are_alone_in_their_class_have_no_nearest_of_it(runs, tmp_path):
    run = shutil.copytree(runs / "wide", tmp_path / "wide")
    with np.load(run / "features.npz") as file:
        kept = {name: file[name] for name in file}
    one = np.unique(kept["labels"], return_index=True)[1]
    for some, said in ((one, None), (np.append(one, 1 + one[0]), " %")):  # the second image of the first class
        few = {name: kept[name][some] for name in ("paths", "labels", "before", "after")}
        np.savez(run / "features.npz", **{**kept, **few})
        text = Reader(reported(tmp_path / "out", run)).sections["cloud-1"]
        assert ("nearest other one" in text) == bool(said), text


def test_folds_are_one_run(runs, tmp_path):
    folder = tmp_path / "folds"
    results = []
    for fold in (1, 2):
        shutil.copytree(runs / "wide", folder / f"fold-{fold}")
        results.append({"fold": fold, **result(runs / "wide")})
    shutil.copy(runs / "wide" / "config.yaml", folder)
    pooled = {**results[0], "test_size": 2 * results[0]["test_size"], "folds": results}
    (folder / "result.json").write_text(json.dumps(pooled))
    text = Reader(reported(tmp_path / "out", folder))
    assert f"{pooled['test_size']:,} test images right" in text.sections["summary"]
    assert "a thin line is a fold" in text.sections["curves"] and "run-1" not in text.sections


def test_a_probe(runs, tmp_path, capsys):
    assert call(["probe", "--init", runs / "pre", "--data.subset", "{total: 96}", "--out", tmp_path / "probe"]) == 0
    text = Reader(reported(tmp_path / "out", tmp_path / "probe", runs / "pre"))
    found = json.loads((tmp_path / "probe/probe.json").read_text())
    assert f"{found['probe']['top1']:.1f}" in text.sections["summary"]
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
    assert (
        line in capsys.readouterr().err and line in text.sections[""] and "not finished" not in text.sections["summary"]
    )
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
    summary = Reader(page).sections["summary"]
    half = scipy.stats.t.ppf(0.975, 2) * np.sqrt((16 + 4) / 3)
    assert (
        "a 84.0 ± 4.0 %, b 72.0 ± 2.0 % of the test images right, over 3 seeds each: a has +12.0 points (95 % "
        in summary
    )
    assert f"interval over seeds {12 - half:+.1f} to {12 + half:+.1f}) over b.".replace("-", "−") in summary
    assert "<h1>digits: a 84.0 % and b 72.0 % of test images right</h1>" in page
    summary = Reader(reported(tmp_path / "one", tmp_path / "a-0", tmp_path / "b-0")).sections["summary"]
    said = "a-0 80.0 %, b-0 70.0 % of the test images right, over 1 seed each: a-0 has +10.0 points over b-0"
    p = compared(tmp_path / "a-0", tmp_path / "b-0")["p"]
    assert p > 0.05 and f"{said}, which may be chance (p {p:.2g})." in summary, "McNemar's test of their predictions"
    assert "How far another seed would move" in summary and "±" not in summary
    fewer = {**result(tmp_path / "b-0"), "test_size": 90}
    (tmp_path / "b-0/result.json").write_text(json.dumps(fewer))
    summary = Reader(reported(tmp_path / "other", tmp_path / "a-0", tmp_path / "b-0")).sections["summary"]
    assert "These classifiers were tested on different images" in summary and "has +10.0 points" not in summary
    some = Reader(reported(tmp_path / "same", tmp_path / "a-0", tmp_path / "a-1"))
    assert "size" not in some.sections and "no picture" not in some.sections["summary"]


def test_accuracy_over_size_wants_a_real_difference(monkeypatch):
    monkeypatch.setattr(run_page.draw, "sizes_figure", lambda *_, **__: None)

    def drawn(*sizes):
        given = dict(label="a", classifies=True, result={"top1": 50.0})
        return bool(list(run_page._sizes([SimpleNamespace(parameters=size, **given) for size in sizes])))

    assert drawn(100_000, 120_000) and not drawn(130_300, 130_800) and not drawn(100_000) and not drawn()


def test_the_same_colour_wherever_a_group_is_drawn(runs):
    class Run:
        def __init__(self, label):
            self.label, self.group, self.result = label, label[0], {"top1": 50.0, "top1_interval": [40.0, 60.0]}

    axis = scores_figure([Run("a-0"), Run("a-1"), Run("b-0")]).axes[0]
    colours = [line.get_color() for line in axis.lines if len(line.get_xdata()) == 1]
    assert colours == [COLOURS[0], COLOURS[0], COLOURS[1]]
    loss = curves_figure({"a": [records(4, 1.0)], "b": [records(4, 2.0)]}).axes[0]
    assert [line.get_color() for line in loss.lines] == colours[1:]


def test_ten_classes_have_ten_colours_and_their_names_at_their_medians():
    rng = np.random.default_rng(0)
    labels, places = np.repeat(np.arange(10), 7), rng.normal(size=(70, 2))
    cloud = Cloud(labels, [f"c{n}" for n in range(10)], {"before": places, "after": places}, {})
    for stacked in (False, True):
        axis = cloud_figure(cloud, stacked).axes[1]
        assert len({tuple(dots.get_facecolor()[0]) for dots in axis.collections}) == 10
        names = {text.get_text(): text.xy for text in axis.texts}
        assert names["c3"] == pytest.approx(np.median(places[21:28], axis=0)) and len(names) == 10


def test_names_of_classes_in_one_place_stand_above_each_other():
    labels, places = np.repeat(np.arange(4), 5), np.random.default_rng(0).normal(scale=1e-3, size=(20, 2))
    places[:5] += 9.0
    figure = cloud_figure(Cloud(labels, [f"class {n}" for n in range(4)], {"before": places}, {}))
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert figure.axes[0].texts[0].get_position() == (0, 0)  # alone there


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


def test_a_run_that_is_given_twice_is_one(runs):
    twice = [str(runs / "wide"), f"{runs}/tuned-0/../wide", str(runs)]
    found, _ = found_runs(twice)
    assert found[0] == runs / "wide" and len(found) == len(found_runs([str(runs)])[0])


# ------------------------------------------------------------------ the parts
def test_the_recipe_that_is_nearest():
    given = {"method": {"name": "idmm"}, "train": {"epochs": 7, "lr": 1.0}, "views": {"size": 48}}
    for name in ("idmm_fast", "simclr"):
        found = nearest_recipe(STAGES["pretrain"].by_method(build(PretrainConfig, name))[0])
        assert (found.name, found.differences) == (name, [])
    assert nearest_recipe(build(FinetuneConfig, "paper_448")).name == "paper_448"
    found = nearest_recipe(build(PretrainConfig, given))
    assert ("train.epochs", 7) in [(key, new) for key, _, new in found.differences]
    tuned = build(FinetuneConfig, {**recipe(FinetuneConfig, "fast"), "seed": 5, "init": "runs/a"})
    tuned.train.epochs = 3
    tuned.train.classifier_init = "features"  # as a run resolves it
    found = nearest_recipe(tuned)
    assert found.name == "fast" and found.differences == [("train.epochs", 20, 3)]


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
    assert [axis.get_title("left").partition(",")[0] for axis in curves_figure(seeds).axes] == ["loss", "learning rate"]
    seeds["a"][0][0]["top1"] = 40.0
    loss, lr, top1 = curves_figure(seeds, over="seconds").axes
    lines = [line.get_xydata().tolist() for line in loss.lines]
    assert lines[2] == [[2, 2], [4, 1], [6, pytest.approx(2 / 3)]], "the mean as far as both have come"
    assert len(lines) == 4 and lines[3][-1] == [10, 0.4] and len(top1.lines) == 1
    figure = curves_figure(seeds)
    assert [text.get_text() for text in figure.legends[0].texts] == ["a (mean of 2)", " _b"]
    assert [line.get_xdata()[-1] for line in figure.axes[0].lines] == [4, 3, 3, 5]
