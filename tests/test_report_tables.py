"""What a transfer grid's cells say together, and its CSV, Markdown and LaTeX."""

import csv
import io
import json
import re
import shutil
import statistics
import subprocess

import numpy as np
import pytest
from grids import cell, changed, failed, full, grid, missing, runs, sizes
from scipy import stats

from idmm.report import render, sections
from idmm.report.stats import accuracy, bootstrap, seed_stats
from idmm.report.table import SCRATCH, Row, Table

HOSTILE = ["<script>alert(1)</script>", "a_b & c%", "$x^2$ {~} \\end{tabular} #1", "[2] *|--`\n\"'"]
HEADER = "source,method,backbone,target,pretrain_seed,seed,top1,top5,seconds,status"
WITH, WITHOUT = {"source": "flowers", "method": "idmm"}, {"source": "scratch", "method": "none"}


def table(cells, protocol="finetune", metric="top1"):
    return Table(grid(cells, protocol), protocol, metric)


def rendered(name, cells, protocol="finetune"):
    """The text of one of the files, or what is printed."""
    found = sections.sections(grid(cells, protocol))
    return render.text(found) if name == "text" else render.render(name, found)


def csv_text(cells, protocol="finetune", **orders):
    return render.csv_text(Table({**grid(cells, protocol), **orders}, protocol))


# ------------------------------------------------------------------ over seeds
def test_mean_std_and_t_interval_are_scipys():
    values = (90.0, 91.5, 93.0, 91.0)
    found = seed_stats(runs(values), "top1")
    assert (found.n, found.units, found.status) == (4, 4, "ok")
    assert found.mean == pytest.approx(np.mean(values)) and found.std == pytest.approx(np.std(values, ddof=1))
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))


def test_runs_of_one_pretraining_are_no_independent_draws():
    """Two pretrainings, three fine-tunings of each: the interval is that of two means."""
    values = {0: (90.0, 90.2, 90.1), 1: (92.0, 92.2, 92.1)}
    cells = [cell(pretrain_seed=p, seed=s, top1=v) for p, some in values.items() for s, v in enumerate(some)]
    found = seed_stats(cells, "top1")
    assert (found.n, found.units) == (6, 2)
    assert found.half == pytest.approx(stats.t.ppf(0.975, 1) * stats.sem([90.1, 92.1]))
    one = seed_stats(cells[:3], "top1")  # of a single pretraining, fine-tuning is all that varies
    assert one.units == 3 and one.half == pytest.approx(stats.t.ppf(0.975, 2) * stats.sem(values[0]))


def test_one_seed_has_no_spread_and_broken_cells_no_value():
    one = seed_stats(runs([80.0]), "top1")
    assert (one.mean, one.std, one.half) == (80.0, None, None)
    nan, none = cell(top1=float("nan")), cell(top1=None, status="ok")
    assert seed_stats([nan, none], "top1").status == "missing"
    assert seed_stats([failed(), cell(top1=None)], "top1").status == "failed"
    some = seed_stats([cell(top1=80.0), failed(seed=1)], "top1")
    assert (some.mean, some.n, some.failed, some.status) == (80.0, 1, 1, "ok")
    assert accuracy(failed(knn=3.0), "knn") is None


def test_gain_over_scratch_is_of_the_same_backbone_and_target():
    with_it, without = (80.0, 82.0, 81.5), (60.0, 61.0)
    elsewhere = runs([10.0], **WITHOUT, target="cars") + runs([20.0], **WITHOUT, backbone="other")
    found = table(runs(with_it) + runs(without, **WITHOUT) + elsewhere)
    gain = found.cells["net", Row(**WITH), "pets"].gain
    assert gain.mean == pytest.approx(statistics.mean(with_it) - 60.5)
    interval = stats.ttest_ind(with_it, without, equal_var=False).confidence_interval()
    assert (gain.mean - gain.half, gain.mean + gain.half) == pytest.approx(tuple(interval))
    assert found.cells["net", SCRATCH, "pets"].gain is None and ("other", Row(**WITH), "pets") not in found.cells
    for values, scratch, wanted in (([80.0, 80.0], [60.0, 60.0], (20.0, 0.0)), ([80.0], without, (19.5, None))):
        same = table(runs(values) + runs(scratch, **WITHOUT))
        assert same.cells["net", Row(**WITH), "pets"].gain == wanted


# ------------------------------------------------------------------ marks
def test_best_of_column_and_source_with_ties_as_printed():
    values = {
        ("scratch", "none"): 50.0, ("a", "idmm"): 90.04, ("a", "simclr"): 89.99,
        ("b", "idmm"): 90.0, ("b", "simclr"): 70.0, ("c", "idmm"): 60.0,
    }  # fmt: skip
    elsewhere = [cell("a", backbone="x"), cell("b", backbone="x", top1=99.0)]
    found = table([cell(*row, top1=value) for row, value in values.items()] + elsewhere)

    def best(mark, backbone):
        return [row for (b, row, _), one in found.cells.items() if b == backbone and getattr(one, mark)]

    assert best("best_of_column", "net") == [("a", "idmm"), ("a", "simclr"), ("b", "idmm")], "90.0 in print"
    assert best("best_of_source", "net") == [("a", "idmm"), ("a", "simclr"), ("b", "idmm")], "nothing competes in c"
    assert best("best_of_column", "x") == [("b", "idmm")], "columns are marked within their backbone"
    assert found.rows[0] == SCRATCH and found.rows_of("net") == found.rows
    found = table([cell()])
    assert best("best_of_column", "net") == []


# ------------------------------------------------------------------ CSV
def test_csv_is_one_line_a_run_of_the_own_protocol():
    cells = [cell(pretrain_seed=3, seed=4, top1=91.25, top5=99.0), missing(**WITHOUT)]
    cells += [failed(target='a,b"c'), cell(protocol="probe")]
    text = csv_text(cells)
    first = ["scratch,none,net,pets,,0,,,,missing", "flowers,idmm,net,pets,3,4,91.25,99.0,12.5,ok"]
    assert text.split("\n")[:3] == [HEADER, *first]
    last = list(csv.DictReader(io.StringIO(text)))[-1]
    assert (last["target"], last["status"], last["top1"]) == ('a,b"c', "failed", "")
    assert len(text.splitlines()) == 4 and csv_text([]) == HEADER + "\n"
    assert len(csv_text(cells, "probe").splitlines()) == 2
    # in the user's order, scratch first
    cells = [cell("z"), cell("a"), cell("scratch", "none"), cell("a", target="cars")]
    rows = csv.DictReader(io.StringIO(csv_text(cells, sources=["z", "a"], targets=["cars", "pets"])))
    wanted = [("scratch", "pets"), ("z", "pets"), ("a", "cars"), ("a", "pets")]
    assert [(row["source"], row["target"]) for row in rows] == wanted


# ------------------------------------------------------------------ Markdown and LaTeX
def paper():
    """A corner of Table 5, with what may go wrong."""
    cells = runs([76.0, 76.6], source="scratch", method="none", target="flowers")
    cells += runs([92.2, 92.6], target="flowers") + runs([90.0, 90.2], method="simclr", target="flowers")
    cells += runs([92.8, 92.8], source="pets", target="flowers") + [cell("pets", "simclr", target="flowers", top1=89.9)]
    cells += [failed(source="pets", method="simclr", target="flowers", seed=1), cell(target="cub", top1=None)]
    cells += [failed(method="simclr", target="cub", seed=seed) for seed in (0, 1)]
    return cells


def test_markdown_marks_and_n():
    text = rendered("grid.md", paper())
    assert "| N/A | random init. | 76.3 ± 0.4 |  |" in text
    assert "| flowers | idmm | <ins>92.4</ins> ± 0.3 | — |" in text
    assert "| flowers | simclr | 90.1 ± 0.1 | failed |" in text
    assert "| pets | idmm | <ins>**92.8**</ins> ± 0.0 |  |" in text
    assert "| pets | simclr | 89.9 (n = 1)† |  |" in text
    assert "mean ± standard deviation over n = 2 runs, another n where noted" in text
    assert text.count("it broke (log: runs/finetune/x/log.txt)") == 3


def test_latex_marks_and_n():
    text = rendered("grid.tex", paper())
    assert r"N/A & random init. & 76.3$\,\pm\,$0.4 &  \\" in text
    assert r"flowers & idmm & \underline{92.4}$\,\pm\,$0.3 & --- \\" in text
    assert r" & simclr & 90.1$\,\pm\,$0.1 & \textit{failed} \\" in text
    assert r"pets & idmm & \underline{\textbf{92.8}}$\,\pm\,$0.0 &  \\" in text
    assert r" & simclr & 89.9 {\scriptsize($n=1$)}$^\dagger$ &  \\" in text
    structure(text, columns=4)
    # a block a backbone
    cells = full(2, targets=2, backbones=("net", "other_net"))
    text = rendered("grid.tex", cells)
    assert text.count(r"\midrule") == 2 and r"\multicolumn{4}{l}{\itshape other\_net} \\" in text
    assert rendered("grid.md", cells).count("| source | method |") == 2
    structure(text, columns=4)


def structure(text, columns):
    """What LaTeX would stumble over: braces, environments, columns, characters with a meaning."""
    bare = re.sub(r"\\[{}$&#%_\\]", "", re.sub(r"%.*?\n", "", text, count=1))
    depth = np.cumsum([(c == "{") - (c == "}") for c in bare])
    assert depth.min() >= 0 and depth[-1] == 0 and bare.count("$") % 2 == 0
    inside = [("begin", "table"), ("begin", "tabular"), ("end", "tabular"), ("end", "table")]
    assert re.findall(r"\\(begin|end)\{(\w+)\}", text) == inside
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    lines = [line for line in body.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    for line in lines:
        assert len(re.findall(r"(?<!\\)&", line)) == columns - 1, line
        assert not re.search(r"(?<!\\)[#%_]", line) and not re.match(r"\s*[\[*]", line), line


@pytest.mark.parametrize("label", HOSTILE)
def test_hostile_labels_stay_text(label, tmp_path):
    cells = [
        *runs([50.0, 51.0], source=label, method=label, backbone=label, target=label),
        *runs([40.0], source="scratch", method="none", backbone=label, target=label),
        failed(label, target=label, seed=3, method="x", source=label, backbone=label),
    ]
    text = rendered("grid.tex", cells)
    structure(text, columns=3)
    compiles(text, tmp_path)
    marked = rendered("grid.md", cells)
    lines = [line for line in marked.split("## Which")[0].splitlines() if line.startswith("|")]
    assert "<script" not in marked and len(lines) == 5
    for line in lines:
        assert len(re.findall(r"(?<!\\)\|", line)) == 4, line
    assert [row["source"] for row in csv.DictReader(io.StringIO(csv_text(cells)))][1:] == [label] * 3
    assert " ".join(label.split()) in rendered("text", cells)


def test_escapes():
    assert render.tex_escape("a_b & c%") == r"a\_b \& c\%"
    assert render.tex_escape("\\{}~^") == r"\textbackslash{}\{\}\textasciitilde{}\textasciicircum{}"
    assert render.tex_escape("a---b-c\n d\x07") == "a-{}-{}-b-c d"
    assert "a\\_b &amp; c%" in rendered("grid.md", [cell("a_b & c%")])
    assert "a b, idmm" in rendered("text", [cell("a⇥b")]), "the columns' mark"


def compiles(text, folder):
    """Where there is a LaTeX; the structure is tested everywhere."""
    if shutil.which("pdflatex"):
        document = f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}\n{text}\\end{{document}}\n"
        (folder / "table.tex").write_text(document)
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, done.stdout[-2000:]


# ------------------------------------------------------------------ sources
def test_mean_ranks_by_hand():
    values = {"a": (90, 80), "b": (85, 85), "c": (85, 70)}  # ranks 1 2, 2.5 1, 2.5 3
    cells = [cell(s, target=t, top1=float(v)) for s, both in values.items() for t, v in zip("xy", both, strict=True)]
    found = sections.ranking(table(cells + [cell("scratch", "none", target=t, top1=50.0) for t in "xy"]))
    wanted = [
        ("a", 1.5, 85, 35, True), ("b", 1.75, 85, 35, True), ("c", 2.75, 77.5, 27.5, True),
        ("scratch", 4.0, 50, None, False),
    ]  # fmt: skip
    assert [(r.source, r.rank.value, r.average, r.gain and r.gain.value, r.pretrained) for r in found.ranks] == wanted
    assert found.ranks[0].rank.interval == (1.0, 2.0) and (found.used, found.total, found.targets) == (2, 2, 2)
    assert found.ranks[0].by_method == {"idmm": 1.5}


def test_only_complete_comparisons_are_ranked():
    cells = changed(full(3, targets=3, seeds=1), failed, source="dtd", method="idmm", target="pets")
    found = sections.ranking(table(cells))
    assert (found.used, found.total) == (5, 6)
    alone = sections.ranking(table([cell("a"), cell("scratch", "none", top1=None)]))
    assert alone.ranks == [] and alone.used == 0


def test_weights_are_ranked_as_themselves_under_every_method():
    weights = [cell("IN", "none", target=target, top1=99.0, pretrain_seed=None) for target in ("flowers", "pets")]
    cells = full(2, targets=2, seeds=1) + weights
    first = sections.ranking(table(cells)).ranks[0]
    assert (first.source, first.rank.value, first.pretrained, first.by_method) == ("IN", 1.0, False, {})
    many = sections.ranking(table(cells + full(2, targets=2, seeds=1, backbones=("other",))))
    assert "IN" not in [one.source for one in many.ranks] and many.used == many.total, "no rank where it is not"


def test_bootstrap_draws_targets_not_rows():
    """Rows of a target go together: three of each are no more than one."""
    draws = np.random.default_rng(0).normal(size=(12, 2))
    one = bootstrap(draws, list(range(12)))
    three = bootstrap(np.repeat(draws, 3, axis=0), [n for n in range(12) for _ in range(3)])
    for n in range(2):
        np.testing.assert_allclose(one[n].interval, three[n].interval)
        assert one[n].value == pytest.approx(draws[:, n].mean())
    theirs = stats.bootstrap((draws[:, 0],), np.mean, method="percentile", n_resamples=9999).confidence_interval
    np.testing.assert_allclose(one[0].interval, theirs, atol=0.06)
    assert [one.interval for one in bootstrap(draws, ["same"] * 12)] == [None, None]


def test_best_source_and_its_lead_over_another_source():
    values = {("a", "idmm"): 90.0, ("a", "simclr"): 89.0, ("b", "idmm"): 85.0}
    better = [cell(*row, top1=value) for row, value in values.items()]
    worse = [*better, cell("scratch", "none", top1=95.0)]
    (pick,) = sections.picks(table(worse))
    assert (pick.row, pick.second) == (("a", "idmm"), ("b", "idmm")) and pick.lead == (5.0, None)
    assert pick.cell.gain == (-5.0, None)
    better.append(cell("scratch", "none", top1=80.0))
    for name in ("grid.md", "text", "grid.html"):
        assert "−5.0 (scratch is better)" in rendered(name, worse)
        assert "scratch is better" not in rendered(name, better)
    assert sections.picks(table([failed(), cell("scratch", "none")])) == []


# ------------------------------------------------------------------ preview
def previews(cells):
    return sections.sections(grid(cells)).previews


def test_preview_is_spearmans_within_targets():
    draw = np.random.default_rng(1)
    tuned, probed = draw.normal(70, 5, (2, 5)), draw.normal(50, 5, (2, 5))
    cells = []
    for t, target in enumerate("xy"):
        for s, source in enumerate("abcde"):
            cells.append(cell(source, target=target, top1=float(tuned[t, s])))
            cells.append(cell(source, target=target, top1=float(probed[t, s]), knn=1.0, protocol="probe"))
        cells += [cell("scratch", "none", target=target, top1=1.0, protocol=p, knn=0.0) for p in ("finetune", "probe")]
    cells += [cell("f", target="x"), cell("g", target="x", top1=None, protocol="probe")]
    probe, knn = previews(cells)
    rhos = [stats.spearmanr(tuned[t], probed[t]).statistic for t in range(2)]
    assert probe.rho.value == pytest.approx(np.mean(rhos)) and (probe.groups, probe.pairs) == (2, 10)
    assert probe.rho.interval == pytest.approx((min(rhos), max(rhos)))
    assert probe.pooled == pytest.approx(stats.spearmanr(tuned.ravel(), probed.ravel()).statistic)
    assert probe.loss == pytest.approx(np.mean([tuned[t].max() - tuned[t, probed[t].argmax()] for t in range(2)]))
    assert (knn.label, knn.rho, knn.pooled) == ("kNN", None, None), "all alike have no order"
    assert knn.loss == pytest.approx(np.mean([tuned[t].max() - tuned[t].mean() for t in range(2)])), "any may be picked"
    assert previews([cell()]) == []
    assert "too few" in previews([cell(), cell(protocol="probe")])[0].sentence


# ------------------------------------------------------------------ source size
def test_size_curve_by_hand():
    (curve,) = sections.size_curves(table(sizes()))
    assert list(curve.points) == [100, 200, 500, 1000, 2000, 5000] and curve.dataset == "flowers"
    assert curve.points[1000].mean == pytest.approx(60.5) and curve.points[1000].n == 2
    assert curve.slope == (pytest.approx(10), pytest.approx(0, abs=1e-6)) and curve.scratch.mean == 40.5
    noisy = [30.0, 45.0, 41.0, 60.0, 52.0, 66.0]
    cells = [{**one, "top1": noisy[n]} for n, one in enumerate(sizes(seeds=1)[1:])]
    (curve,) = sections.size_curves(table(cells))
    line = stats.linregress(np.log10([100, 200, 500, 1000, 2000, 5000]), noisy)
    assert curve.slope == pytest.approx((line.slope, stats.t.ppf(0.975, 4) * line.stderr)) and curve.scratch is None


def test_what_makes_a_curve():
    """Six sizes of one dataset; draws of one size are one point."""
    assert sections.size_curves(table(sizes((1, 2, 3, 4, 5)))) == []
    others = full(7, targets=2, seeds=1)
    for n, one in enumerate(others):  # the targets' configs are alike, and so are not what makes a family
        one["source_size"] = 100 + n
    assert sections.size_curves(table(others)) == []
    cells = sizes()
    cells += [{**one, "source": "another draw", "top1": 0.0} for one in cells if one["source_size"] == 100]
    for one in cells[-2:]:
        data = one["pretrain_config"]["data"]
        one["pretrain_config"] = {"data": {**data, "subset": {"total": 100, "seed": 1}}}
    (curve,) = sections.size_curves(table(cells))
    assert len(curve.points) == 6 and curve.points[100].n == 4 and curve.points[100].units == 4


# ------------------------------------------------------------------ whole
@pytest.mark.parametrize("protocol", ["finetune", "probe"])
@pytest.mark.parametrize(
    "cells",
    [[], [failed(), failed(seed=1)], [cell()], [missing()], [cell(seconds=None, config=None)], paper()],
    ids=len,
)
def test_report_never_fails(tmp_path, cells, protocol):
    given = grid([{**one, "protocol": protocol} for one in cells], protocol)
    (tmp_path / "grid.json").write_text(json.dumps(given))
    (tmp_path / "size.png").write_bytes(b"of an earlier grid")
    text = render.text(render.write(tmp_path))
    wanted = {"grid.json", "grid.csv", "grid.md", "grid.tex", "grid.html"} | ({"grid.png"} if cells else set())
    found = {path.name for path in tmp_path.iterdir()}
    assert found - {"insight.png"} == wanted
    structure((tmp_path / "grid.tex").read_text(), columns=2 + len(given["targets"]))
    assert (tmp_path / "grid.html").read_text().count('<table id="grid">') == bool(cells)
    assert f"{sum(c['status'] == 'ok' for c in cells)} of {len(cells)}" in text or not cells


def test_text_is_a_screen():
    cells = full(7, ("idmm", "simclr", "supcon"), 7, 1, ("pvt", "deit"))
    cells += [failed("very long " * 50, target="pets", seed=n) for n in range(2, 40)]
    cells += full(7, ("idmm",), 7, 1, ("pvt",), protocol="probe")
    text = rendered("text", cells)
    assert len(text.splitlines()) <= 50 and "… and 26 more" in text
    assert "transfer grid, finetune: 308 of 346 cells done, 38 failed" in text and "kNN: Spearman's ρ" in text
    assert "+10.0 ± 0.0 points" in rendered("text", sizes())
