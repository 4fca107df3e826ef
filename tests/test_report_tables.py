"""What a transfer grid's cells say together, and its CSV, Markdown and LaTeX."""

import csv
import io
import itertools
import os
import re
import statistics
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from grids import cell, failed, full, grid, missing, runs
from helpers import column
from pytest import approx
from scipy import stats

from idmm.files import csv_bytes
from idmm.report import render, sections
from idmm.report.stats import difference, pooled, seed_stats
from idmm.report.table import SCRATCH, Row, Table

HOSTILE = ["<script>alert(1)</script> a_b & c%", "[2] *|--`\n\"' $x^2$ {~} \\end{tabular} #1"]
HEADER = "source,method,backbone,target,pretrain_seed,seed,top1,top5,seconds,status"
WITH = {"source": "flowers", "method": "idmm"}
WITHOUT = {"source": "scratch", "method": "none"}


def table(cells, protocol="finetune"):
    return Table(grid(cells, protocol))


def rendered(name, cells, protocol="finetune"):
    """The text of one of the files."""
    parts = sections.sections(grid(cells, protocol))
    if name == "grid.html":
        return unescape(re.sub("<[^>]*>", " ", render.page(Path("none"), parts)))
    return render.render(name, parts)


def csv_text(cells, protocol="finetune", **orders):
    return csv_bytes(render.csv_rows(Table({**grid(cells, protocol), **orders}))).decode()


def test_runs_of_one_pretraining_are_no_independent_draws():
    """Two pretrainings, three fine-tunings of each: the interval is that of two means."""
    values = {0: (90.0, 90.2, 90.1), 1: (92.0, 92.2, 92.1)}
    cells = []
    for pretrain_seed, some in values.items():
        for seed, top1 in enumerate(some):
            cells.append(
                cell(
                    pretrain_seed=pretrain_seed,
                    seed=seed,
                    top1=top1,
                )
            )
    both = seed_stats(cells)
    assert both.n == 6
    assert both.units == 2
    assert both.variance == approx(stats.sem([90.1, 92.1]) ** 2)
    uneven = seed_stats(cells[:4])  # three runs of one pretraining and one of the other
    assert uneven.mean == approx((90.1 + 92.0) / 2)
    assert uneven.units == 2
    one = seed_stats(cells[:3])  # of a single pretraining, fine-tuning is all that varies
    assert one.units == 3
    assert one.variance == approx(stats.sem(values[0]) ** 2)


def test_gain_over_scratch_is_of_the_same_backbone_and_target():
    with_it = (80.0, 82.0, 81.5)
    without = (60.0, 61.0)
    elsewhere = runs([10.0], **WITHOUT, target="cars") + runs([20.0], **WITHOUT, backbone="other")
    grid_table = table(runs(with_it) + runs(without, **WITHOUT) + elsewhere)
    gain = grid_table.cells["net", Row(**WITH), "pets"].gain
    assert gain.value == approx(statistics.mean(with_it) - 60.5)
    interval = stats.ttest_ind(with_it, without).confidence_interval()
    assert gain.interval == pytest.approx(tuple(interval))
    assert gain.direction == "up"
    assert grid_table.cells["net", SCRATCH, "pets"].gain is None
    assert ("other", Row(**WITH), "pets") not in grid_table.cells
    for values, scratch, expected in (
        ([80.0] * 2, [60.0] * 2, (20.0, (20.0, 20.0))),
        ([80.0], [60.0], (20.0, None)),
    ):
        same = table(runs(values) + runs(scratch, **WITHOUT))
        assert same.cells["net", Row(**WITH), "pets"].gain == expected


def together(column):
    return pooled(column, column.values())


def test_seeds_of_a_column_give_one_variance():
    """The error mean square of a one-way analysis of variance; a cell of one run has it, too."""
    values = {
        "a": [80.0, 82.0],
        "b": [70.0, 71.0, 75.0],
        "c": [60.0],
    }
    column = together({name: seed_stats(runs(some, source=name)) for name, some in values.items()})
    square = sum(np.var(some) * len(some) for some in values.values()) / 3
    for name, some in values.items():
        assert column[name].variance == approx(square / len(some))
        assert column[name].freedom == 3
    half = stats.t.ppf(0.975, 3) * np.sqrt(square * (1 / 2 + 1))
    assert difference(column["a"], column["c"]) == (21.0, approx((21 - half, 21 + half)))
    # means of three fine-tunings do not move as single ones do
    means = [
        cell(
            "a",
            pretrain_seed=p,
            seed=s,
            top1=80.0 + p,
        )
        for p in (0, 1)
        for s in range(3)
    ]
    column = together({"a": seed_stats(means), "b": seed_stats(runs([1.0, 9.0]))})
    assert [one.variance for one in column.values()] == [0.25, 16.0]
    column = together({"a": seed_stats(means), "b": seed_stats(runs([1.0]))})
    assert [(one.variance, one.freedom) for one in column.values()] == [
        (0.25, 1),
        (0.5, 1),
    ], "better than nothing"


def test_test_images_are_in_the_interval_also_of_a_single_run():
    """Newcombe's paper has this example: 56 of 70 against 48 of 80, 0.2000 (0.0524 to 0.3339)."""
    one, other = (
        seed_stats([cell(top1=100 * h / n, test_size=n)])
        for h, n in (
            (56, 70),
            (48, 80),
        )
    )
    lead = difference(one, other)
    assert lead.value == approx(20.0)
    assert lead.interval == approx((5.24, 33.39), abs=0.005)
    with_interval = seed_stats(
        [
            cell(
                top1=80.0,
                test_size=70,
                top1_interval=[70.0, 85.0],
            )
        ]
    )
    assert with_interval.images == (10.0, 5.0), "what the run says itself goes first"
    # with seeds beside, lengths add up as standard errors do
    both = [
        [{**run, "test_size": 100} for run in runs(some)]
        for some in (
            (50.0, 54.0),
            (40.0, 44.0),
        )
    ]
    lead = difference(*together({n: seed_stats(some) for n, some in enumerate(both)}).values())
    seeds = stats.t.ppf(0.975, 2) * np.sqrt(8.0)
    images = [
        difference(*(seed_stats([cell(top1=m, test_size=100)]) for m in (52.0, 42.0))).interval
    ]
    assert lead.interval[0] == approx(10 - np.hypot(seeds, 10 - images[0][0]), abs=0.05)


def best(grid_table):
    return [row for (_, row, _), one in grid_table.cells.items() if one.best_of_column]


def test_best_of_column_only_where_the_runs_show_it():
    values = {
        ("scratch", "none"): 50.0,
        ("a", "idmm"): 90.0,
        ("a", "simclr"): 70.0,
        ("b", "idmm"): 87.0,
    }
    cells = [cell(*row, top1=value, test_size=2000) for row, value in values.items()]
    grid_table = table(cells)
    assert best(grid_table) == [("a", "idmm")]
    assert grid_table.rows[0] == SCRATCH
    assert best(table([{**one, "test_size": 200} for one in cells])) == []
    assert best(table([{**one, "test_size": None} for one in cells])) == [], "nothing is known"


def collapsed(**fields):
    """Ten runs of two sources by two methods: nearly all say one class, as 15.6 % of 96 test images
    are."""
    draw = np.random.default_rng(0)
    rows = [("scratch", "none")]
    for source in ("stamps", "coins"):
        rows += [(source, "idmm"), (source, "simclr")]
    cells = []
    for row, target, seed in itertools.product(rows, ("stamps", "digits"), (0, 1)):
        top1 = float(draw.normal(14, 2))
        one = cell(
            *row,
            target=target,
            seed=seed,
            top1=top1,
            test_size=96,
        )
        cells.append({**one, "largest_class": 15.6, **fields})
    return cells


def test_runs_that_say_one_class_crown_nothing():
    """In every format: a sign with a footnote, no best source, no bold, no gain without
    interval."""
    grid_table = table(collapsed())
    for one in grid_table.cells.values():
        assert one.no_better
    assert not best(grid_table)
    for name in ("grid.md", "grid.html"):
        text_of_page = " ".join(rendered(name, collapsed()).split())
        assert text_of_page.count("none better than the largest class ‡") == 2
        assert "undecided" not in text_of_page
        assert "**1" not in text_of_page
        assert "stamps: the largest class 15.6 %" in text_of_page
        assert "‡: no better than always predicting the largest class" in text_of_page
    html = render.page(Path("none"), sections.sections(grid(collapsed())))
    assert html.count('<span class="sign"> ‡</span>') == 10
    text = rendered("grid.tex", collapsed())
    assert text.count(r"\rlap{$^\ddagger$}") == 10
    assert text.count(r"$^\ddagger$") == 10 + 1, "numbers stay in line"
    better = rendered("grid.md", [{**one, "top1": 60.0} for one in collapsed()])
    assert "‡" not in better
    assert "undecided: stamps, idmm; stamps, simclr; coins" in better


def test_csv_is_one_line_a_run():
    cells = [
        cell(
            pretrain_seed=3,
            seed=4,
            top1=91.25,
            top5=99.0,
        ),
        missing(**WITHOUT),
    ]
    cells.append(failed(target='a,b"c'))
    text = csv_text(cells)
    first = ["scratch,none,net,pets,,0,,,,missing", "flowers,idmm,net,pets,3,4,91.25,99.0,12.5,ok"]
    assert text.split("\n")[:3] == [HEADER, *first]
    last = list(csv.DictReader(io.StringIO(text)))[-1]
    assert last["target"] == 'a,b"c'
    assert last["status"] == "failed"
    assert last["top1"] == ""
    assert len(text.splitlines()) == 4
    assert csv_text([]) == HEADER + "\n"
    cells = [
        cell("z"),
        cell("a"),
        cell("scratch", "none"),
    ]
    rows = csv.DictReader(io.StringIO(csv_text(cells, sources=["z", "a"])))
    assert column(rows, "source") == ["scratch", "z", "a"], "in the user's order"


def paper():
    """A corner of Table 5, with what may go wrong."""
    cells = runs(
        [76.0, 76.6],
        source="scratch",
        method="none",
        target="flowers",
    )
    cells += runs([92.2, 92.6], target="flowers") + runs(
        [90.0, 90.2], method="simclr", target="flowers"
    )
    cells += runs([94.0, 94.0], source="pets", target="flowers") + [
        cell("pets", "simclr", target="flowers", top1=89.9)
    ]
    cells += [
        failed(
            source="pets",
            method="simclr",
            target="flowers",
            seed=1,
        ),
        cell(target="cub", top1=None),
    ]
    cells += [
        failed(
            method="simclr",
            target="cub",
            seed=seed,
        )
        for seed in (0, 1)
    ]
    return cells


def test_marks_and_n_in_markdown_and_latex():
    text = rendered("grid.md", paper())
    assert "| from scratch | no pretraining | 76.3 ± 0.4 |  |" in text
    assert "| flowers | idmm | 92.4 ± 0.3 | — |" in text
    assert "| flowers | simclr | 90.1 ± 0.1 | failed |" in text
    assert "| pets | idmm | **94.0** ± 0.0 |  |" in text
    assert "| pets | simclr | 89.9 (n = 1)† |  |" in text
    assert "mean ± standard deviation over n = 2 runs, another n if noted" in text
    assert text.count("it broke (log: runs/finetune/x/log.txt)") == 3
    text = rendered("grid.tex", paper())
    assert r"from scratch & no pretraining & 76.3$\,\pm\,$0.4 &  \\" in text
    assert r"flowers & IDMM & 92.4$\,\pm\,$0.3 & --- \\" in text
    assert r" & SimCLR & 90.1$\,\pm\,$0.1 & \textit{failed} \\" in text
    assert r"pets & IDMM & \textbf{94.0}$\,\pm\,$0.0 &  \\" in text
    assert r" & SimCLR & 89.9 {\scriptsize($n=1$)}\rlap{$^\dagger$} &  \\" in text
    text = rendered("grid.tex", full(2, targets=2, backbones=("net", "other_net")))
    assert text.count(r"\midrule") == 2
    assert r"\multicolumn{4}{l}{\itshape other\_net} \\" in text
    structure(text, columns=4)


def test_one_meaning_of_plus_minus():
    """The standard deviation, in every format. Cells of two seeds count as such if most have
    one."""
    cells = runs([20.0, 42.8], target="flowers") + [
        cell("pets", target="flowers", top1=22.1, test_size=1234)
    ]
    cells += runs(
        [30.0],
        source="scratch",
        method="none",
        target="flowers",
    )
    for name in ("grid.md", "grid.tex", "grid.html"):
        text = " ".join(
            rendered(name, cells).replace(r"$\pm$", "±").replace(r"$\,\pm\,$", " ± ").split()
        )
        assert (
            "mean ± standard deviation over n = 2 runs, another n if noted. Test images: "
            "flowers 1,234." in text
        )
        assert "31.4 ± 16.1" in text
        assert "one run each" not in text
        assert set(re.findall(r"± ([\d.]+)", text)) == {"16.1"}
    text = rendered("grid.md", cells)
    assert "undecided: flowers, idmm; pets, idmm" in text
    assert "tie" not in text.lower()
    assert "one run each" in rendered("grid.md", cells[:1])


def test_a_name_shows_the_models_arguments():
    model = {"name": "vit_tiny_patch16_224", "kwargs": {"embed_dim": 64, "depth": 4}}
    cells = [
        cell(
            backbone=model["name"],
            config={"model": model},
            backbone_params=123456,
        )
    ]
    for name in ("grid.md", "grid.html", "grid.tex"):
        text = rendered(name, cells).replace("\\", "")
        assert "vit_tiny_patch16_224 (embed_dim 64, depth 4, 0.123 M parameters)" in text, name
    labelled = [cell(backbone="small", config={"model": model})]
    assert "**small**" in rendered("grid.md", labelled), "a label of the user's own"


def structure(text, columns):
    """What LaTeX would stumble over: braces, environments, columns, characters with a meaning."""
    bare = re.sub(r"\\[{}$&#%_\\]", "", re.sub(r"%.*?\n", "", text, count=1))
    depth = np.cumsum([(c == "{") - (c == "}") for c in bare])
    assert depth.min() >= 0
    assert depth[-1] == 0
    assert bare.count("$") % 2 == 0
    inside = [
        ("begin", "table"),
        ("begin", "tabular"),
        ("end", "tabular"),
        ("end", "table"),
    ]
    assert re.findall(r"\\(begin|end)\{(\w+)\}", text) == inside
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    for line in body.splitlines():
        if line.endswith(r"\\") and "multicolumn" not in line:
            assert len(re.findall(r"(?<!\\)&", line)) == columns - 1, line
            assert not re.search(r"(?<!\\)[#%_]", line)
            assert not re.match(r"\s*[\[*]", line), line


@pytest.mark.parametrize("label", HOSTILE)
def test_hostile_labels_stay_text(label):
    cells = [
        *runs(
            [50.0, 51.0],
            source=label,
            method=label,
            backbone=label,
            target=label,
        ),
        *runs(
            [40.0],
            source="scratch",
            method="none",
            backbone=label,
            target=label,
        ),
        failed(
            label,
            target=label,
            seed=3,
            method="x",
            source=label,
            backbone=label,
        ),
    ]
    text = rendered("grid.tex", cells)
    structure(text, columns=3)
    marked = rendered("grid.md", cells)
    lines = [line for line in marked.split("## Which")[0].splitlines() if line.startswith("|")]
    assert "<script" not in marked
    assert len(lines) == 5
    assert "<script>alert" not in render.page(Path("none"), sections.sections(grid(cells)))
    for line in lines:
        assert len(re.findall(r"(?<!\\)\|", line)) == 4, line
    assert column(csv.DictReader(io.StringIO(csv_text(cells))), "source")[1:] == [label] * 3


def test_a_best_source_has_its_lead_or_none_is_shown():
    values = {
        ("a", "idmm"): 90.0,
        ("a", "simclr"): 89.0,
        ("b", "idmm"): 80.0,
        ("c", "idmm"): 85.0,
    }
    cells = [cell(*row, top1=value, test_size=2000) for row, value in values.items()]
    worse = [
        *cells,
        cell(
            "scratch",
            "none",
            top1=95.0,
            test_size=2000,
        ),
    ]
    for name in ("grid.md", "grid.html"):
        text = rendered(name, worse)
        assert "none shown above scratch, highest: a, idmm" in text
        assert "−5.0 (−6.6 to −3.4)" in text
        few = [{**one, "test_size": 200} for one in worse]
        assert "undecided" not in rendered(name, few), (
            "what is shown to be worse than from scratch is no candidate"
        )
        tied = " ".join(rendered(name, [*few[:-1], {**few[-1], "top1": 88.0}]).split())
        assert "none shown above scratch, undecided: a, idmm; a, simclr; c, idmm" in tied
        assert "these runs show no difference" in tied
        above = rendered(name, [cells[0], *cells[2:], {**worse[-1], "top1": 60.0}])
        assert "none shown" not in above
        assert "a, idmm: +5.0 (+3.0 to +7.0) over c, idmm" in above
    assert (
        sections.best_pretrainings(
            table(
                [
                    failed(),
                    cell("scratch", "none"),
                ]
            )
        )
        is None
    )
    assert "no interval" in rendered(
        "grid.md",
        [
            cell(),
            cell("scratch", "none"),
        ],
    )


@pytest.mark.parametrize(
    "cells",
    [
        [],
        [failed(), failed(seed=1)],
        [cell()],
        [missing()],
        paper(),
    ],
    ids=len,
)
def test_report_never_fails(tmp_path, cells):
    content = grid(cells)
    text = render.write(tmp_path, content)
    expected = {"grid.csv", "grid.md", "grid.tex", "grid.html"} | ({"grid.png"} if cells else set())
    files = {*os.listdir(tmp_path)}
    assert files == expected
    structure((tmp_path / "grid.tex").read_text(), columns=2 + len(content["targets"]))
    done = f"{sum(c['status'] == 'ok' for c in cells)} of {len(cells)} cells done"
    assert done in text
    assert done in (tmp_path / "grid.html").read_text()
