"""Reports of runs and of grids: what their pages and pictures show, that labels stay text, what is
refused."""

import itertools
import re
import shutil
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
import scipy.stats
from folders import result, tree, tuned
from grids import changed, failed, full, grid, missing
from helpers import call_ok, column, inside_ok, metrics, refused
from PIL import Image
from pytest import approx

from idmm.files import read_csv, write_csv
from idmm.inference.runs import finished_runs
from idmm.report import charts, grid_pictures, run_page
from idmm.report.render import render
from idmm.report.sections import sections
from idmm.report.stats import PREDICTIONS, compared, format_number, holm, mcnemar
from idmm.report.table import Table


class Reader(HTMLParser):
    """A page: its elements with their attributes, and all text of the body, with single spaces."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)
        body = re.sub(r"<[^>]*>", " ", text.partition("<body>")[2])
        self.text = " ".join(unescape(body).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


ODD = ("<b>& $x_1$", "_under", "עברית", "猫\U0001f408")  # names of classes
WIDE = {
    "patch_size": 8,
    "embed_dim": 64,
    "depth": 1,
    "num_heads": 2,
}
ONE = {
    "stages": None,
    "train__size": 16,
    "train__epochs": 2,
    "train__warmup_epochs": 0,
    "train__ema": None,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Pretraining, fine-tunings of two seeds from it, one of another size from scratch, and one
    with odd names."""
    root = tmp_path_factory.mktemp("runs")
    inside_ok("pretrain", root / "pre", train__epochs=2, train__accumulate=1)
    for seed in (0, 1):
        inside_ok(
            "finetune",
            root / f"tuned-{seed}",
            **ONE,
            seed=seed,
            init=str(root / "pre"),
        )
    inside_ok("finetune", root / "wide", **ONE, model__kwargs=WIDE)
    classes = dict.fromkeys(ODD, 4)
    assert (
        tuned(
            root / 'o "<i>" $x_1$',
            tree(root / "images", train=classes, test=classes),
            train__epochs=2,
        )
        == 0
    )
    return root


def reported(out, *folders):
    call_ok(["report", *folders, "--out", out])
    return (out / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(runs):
    """The folder of a report on all of them, and the text of its page."""
    names = ["pre", "tuned-0", "tuned-1", "wide", 'o "<i>" $x_1$']
    return runs / "out", reported(runs / "out", *(runs / name for name in names))


def test_it_shows_what_the_runs_measured(page, runs):
    text = Reader(page[1]).text
    for name in ("tuned-0", "tuned-1", "wide"):
        results = result(runs / name)
        low, high = results["top1_interval"]
        assert f"{name} {results['top1']:.1f} {low:.1f} to {high:.1f}" in text
    assert f"{result(runs / 'pre')['loss']:.4g}" in text
    tests = [compared(runs / "tuned-0", runs / name) for name in ("tuned-1", "wide")]
    for name, test, p in zip(("tuned-1", "wide"), tests, holm(column(tests, "p")), strict=True):
        assert f"tuned-0 {name} 360 {format_number(test['points'], sign=True)} {p:.2g}" in text
    assert "These classifiers were tested on different images" in text
    titles = column(Reader(page[1]).all("img"), "alt")
    assert titles.count("Confusion matrix") == titles.count("Mistakes") == 4
    assert titles.count("Curves") == 5
    assert len(titles) == 15
    worst = read_csv(runs / "wide/per_class.csv")[3]
    assert " ".join(worst.values()) in text
    assert "most confused with" in text
    assert {"Accuracy over epochs", "Accuracy over parameters"} < {*titles}
    assert "patch_size 8, embed_dim 64, " in text, "a name would hide it"
    assert "'embed_dim': 64" in text
    assert "Fine-tuning: settings that differ" in text


def test_runs_are_compared_on_the_images_that_both_have(runs, tmp_path):
    """Two labels were corrected in between and one image is no test image any more: these three do
    not count."""
    other = shutil.copytree(runs / "wide", tmp_path / "other")
    rows = read_csv(other / PREDICTIONS)
    for row in rows[:2]:
        row["class"] = str((int(row["class"]) + 1) % 10)
    write_csv(other / PREDICTIONS, [rows[0], *(row.values() for row in rows[:-1])])
    test = compared(runs / "tuned-0", other)
    first = {
        row["path"]: row["class"] == row["predicted"]
        for row in read_csv(runs / "tuned-0" / PREDICTIONS)
    }
    both = rows[2:-1]
    lead = sum(first[row["path"]] - (row["class"] == row["predicted"]) for row in both)
    assert test["images"] == len(both) == 357
    assert test["points"] == approx(100 * lead / 357)
    write_csv(other / PREDICTIONS, [rows[0], *(row.values() for row in rows[:179])])
    assert compared(runs / "tuned-0", other) is None, "other test images"


def test_curves_and_sizes_of_several_runs_are_in_one_picture(runs, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        charts,
        "save",
        lambda figure, path: (
            figures.append(figure),
            path.touch(),
        ),
    )
    monkeypatch.setattr(run_page, "html", lambda *_: "")
    reported(tmp_path / "both", runs / "tuned-0", runs / "wide")
    epochs, sizes = figures
    (axis,) = epochs.axes
    assert axis.get_title() == "digits"
    for curve, name in zip(axis.containers, ("tuned-0", "wide"), strict=True):
        points = []
        for epoch, record in enumerate(metrics(runs / name), 1):
            if "top1" in record:
                points.append((epoch, record["top1"]))
        assert curve.get_label() == name
        assert [*zip(*curve.lines[0].get_data(), strict=True)] == points
    (axis,) = sizes.axes
    starts = {curve.get_label(): curve.lines[0].get_ydata().tolist() for curve in axis.containers}
    assert starts == {
        "idmm": [result(runs / "tuned-0")["top1"]],
        "scratch": [result(runs / "wide")["top1"]],
    }


def test_names_are_text(page, runs, tmp_path):
    text = Reader(page[1])
    assert not text.all("b")
    assert not text.all("i"), "no name became an element"
    assert 'o "<i>" $x_1$' in text.text
    run = shutil.copytree(runs / 'o "<i>" $x_1$', tmp_path / "a\x07\udce4")
    (run / "explore").mkdir()
    Image.new("RGB", (30, 20), "red").save(run / "explore" / "duplicates.png")
    text = Reader(reported(tmp_path / "out", run))
    assert text.all("img")
    assert "a\ufffd\ufffd" in text.text
    assert "idmm explore: duplicates" in text.text


def test_folders_that_hold_runs(runs, tmp_path, capsys):
    """Of ``idmm train``, in their order; in a folder of any kind, that of the demo, say."""
    held = tmp_path / "demo"
    shutil.copytree(runs / "pre", held / "a")
    (held / "images").mkdir()
    train = shutil.copytree(runs / "wide", held / "train")
    shutil.copytree(runs / "pre", train / "stage1")
    (train / "scratch").mkdir()
    (train / "scratch" / "config.yaml").write_text("")
    (train / "train.json").write_text("{}")
    folders, notes = finished_runs([str(train)])
    assert folders == [train, train / "stage1"]
    assert notes == [f"{train / 'scratch'} is skipped: it is not finished"]
    assert finished_runs([str(held)]) == ([held / "a", *folders], notes)
    text = Reader(reported(tmp_path / "out", held))
    assert notes[0] in capsys.readouterr().err
    assert notes[0] in text.text


def test_what_is_refused(runs, tmp_path, capsys):
    unfinished = shutil.copytree(runs / "wide", tmp_path / "begun")
    (unfinished / "result.json").unlink()
    (tmp_path / "empty").mkdir()
    expected = "expected the folder of a finished run, its --out, or one that holds some"
    expected_words = {
        tmp_path / "none": expected,
        tmp_path / "empty": expected,
        unfinished: "not finished. Repeat the command to resume it",
    }
    errors = refused(capsys, ["report", *expected_words, "--out", tmp_path / "out"])
    assert errors == [f"runs: '{path}': {words}" for path, words in expected_words.items()]
    assert not (tmp_path / "out").exists()


def test_many_comparisons_are_adjusted(runs, tmp_path):
    """Of 40 images the second run loses 7 and wins none: p is 0.016. One of ten such tests on a
    page is chance."""
    rows = [(f"{number}.png", "a", "a", 0.9) for number in range(40)]
    folders = []
    for number in range(11):
        folders.append(shutil.copytree(runs / "wide", tmp_path / f"run{number}"))
        wrong = 7 if number == 1 else number % 3
        answers = [(*row[:2], "b" if i < wrong else "a", row[3]) for i, row in enumerate(rows)]
        write_csv(
            folders[-1] / "predictions.csv",
            [("path", "class", "predicted", "probability"), *answers],
        )
    alone, many = (
        Reader(reported(tmp_path / "out", *some)).text for some in (folders[:2], folders)
    )
    assert "run0 run1 40 +17.5 0.016 run0 is better" in alone
    assert "run0 run1 40 +17.5 0.16 the difference may be chance" in many
    assert "is better" not in many.replace("'is", "")
    assert "Holm" in many
    assert holm([0.01, 0.04, 0.03]) == approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.6, 0.001, 0.7]) == approx([1.0, 0.003, 1.0])


def test_images_in_groups_are_compared_by_groups():
    """Sign flips of each group's images won less those lost, all of them written out."""
    rng = np.random.default_rng(0)
    groups = {n: f"patient {n // 5}" for n in range(40)}
    one, other = ({n: bool(rng.random() < share) for n in groups} for share in (0.8, 0.5))
    sums = []
    for patient in range(8):
        lead = sum(one[n] - other[n] for n in range(5 * patient, 5 * patient + 5))
        if lead:
            sums.append(lead)
    flipped = [abs(np.dot(signs, sums)) for signs in itertools.product((-1, 1), repeat=len(sums))]
    comparison = mcnemar(one, other, groups)
    assert comparison["p"] == approx(np.mean([each >= abs(sum(sums)) for each in flipped]))
    assert comparison["points"] == approx(100 * sum(sums) / 40)
    assert sum(sums) > 0
    alike = {n: n // 5 % 2 == 0 for n in groups}  # each patient's images are all right or all wrong
    assert mcnemar(alike, {n: not right for n, right in alike.items()}, groups) == {
        "images": 40,
        "points": 0.0,
        "p": 1.0,
    }
    test = mcnemar(alike, alike | {0: False}, groups)
    assert test == {"images": 40, "points": 2.5, "p": 1.0}, "one group differs"


def test_without_groups_it_is_mcnemars():
    one = {n: n < 15 for n in range(20)}
    other = {n: n >= 12 for n in range(20)}
    assert mcnemar(one, other)["p"] == approx(scipy.stats.binomtest(12, 17).pvalue)


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were saved, as objects."""
    kept = []
    save = grid_pictures.save
    monkeypatch.setattr(
        grid_pictures,
        "save",
        lambda figure, path: (
            kept.append(figure),
            save(figure, path),
        ),
    )
    return kept


def table(cells):
    return Table(grid(cells))


def broken():
    """Flowers' failed on pets, dtd's is missing on flowers, and one of two seeds of scratch failed
    on flowers."""
    cells = changed(
        full(3, ("idmm",), 2, 2),
        failed,
        source="flowers",
        target="pets",
    )
    cells = changed(cells, missing, source="dtd", target="flowers")
    return changed(
        cells,
        failed,
        source="scratch",
        target="flowers",
        seed=1,
    )


def named_rows(figure):
    return [[label.get_text() for label in axis.get_yticklabels()] for axis in figure.axes]


def test_bars_show_numbers_marks_and_signs(tmp_path, drawn):
    grid_table = table(broken())
    grid_pictures.bars(grid_table, tmp_path / "grid.png")
    rows = ["from scratch", "flowers, idmm", "pets, idmm", "dtd, idmm"]
    assert [axis.get_title(loc="left") for axis in drawn[0].axes] == ["net\nflowers", "pets"]
    assert named_rows(drawn[0]) == [rows, []], "the same rows are named once"
    for axis, target in zip(drawn[0].axes, grid_table.targets, strict=True):
        shown = [text.get_text().split()[0] for text in axis.texts]
        means = [grid_table.mean("net", row, target) for row in grid_table.rows]
        lengths = [bar.get_width() for bar in axis.patches]
        assert lengths == [mean for mean in means if mean is not None]
        assert [text for text in shown if text[0].isdigit()] == [
            f"{length:.1f}" for length in lengths
        ]
        bold = [text.get_text().split()[0] for text in axis.texts if text.get_weight() == "bold"]
        assert bold == [f"{max(lengths):.1f}"]
    flowers, pets = ([text.get_text() for text in axis.texts] for axis in drawn[0].axes)
    assert pets[1] == "failed"
    assert flowers[3] == "—"
    assert flowers[0].endswith(" (n = 1) †")


def test_bars_of_one_source_are_named_by_method(tmp_path, drawn):
    cells = full(2, ("idmm", "simclr"), 2, 1)
    grid_pictures.bars(
        table([one for one in cells if one["source"] in ("scratch", one["target"])]),
        tmp_path / "a.png",
    )
    assert named_rows(drawn[0]) == [
        ["from scratch", "idmm", "simclr"],
        [],
    ]


def test_accuracy_over_parameters(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(charts, "save", lambda figure, path: figures.append(figure))
    sizes = {"tiny": 771_680, "larger": 44_700_000}
    cells = full(1, ("idmm",), 2, 2, backbones=tuple(sizes))
    cells = [{**one, "backbone_params": sizes[one["backbone"]]} for one in cells]
    grid_table = table(cells)
    grid_pictures.parameters(grid_table, tmp_path / "a.png")
    for axis, target in zip(figures[0].axes, grid_table.targets, strict=True):
        assert [label.get_text() for label in axis.get_xticklabels()] == [
            "tiny\n0.772 M",
            "larger\n44.7 M",
        ]
        for curve, row in zip(axis.containers, grid_table.rows, strict=True):
            assert curve.get_label() == {"scratch": "from scratch", "flowers": "idmm"}[row.source]
            expected = [grid_table.mean(name, row, target) for name in sizes]
            assert curve.lines[0].get_ydata().tolist() == expected
    assert "**tiny (0.772 M parameters)**" in render("grid.md", sections(grid(cells)))
