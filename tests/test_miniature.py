"""benchmarks/miniature.py on a tiny set: it makes runs, skips those that have a file, and prints
verdicts."""

import itertools
import json
import sys

import pytest
from folders import tree
from grids import cell
from helpers import ROOT, call_ok, one_thread, read

sys.path.append(str(ROOT / "benchmarks"))
import miniature  # noqa: E402


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """The script with its folders: a function of further flags that returns what it prints."""

    def run(*flags):
        folders = [
            "--sets",
            tmp_path / "sets",
            "--out",
            tmp_path / "runs",
            "--results",
            tmp_path / "results",
        ]
        monkeypatch.setattr(sys, "argv", ["miniature.py", *map(str, folders), *flags])
        with one_thread():
            miniature.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def page(script, tmp_path, monkeypatch):
    """A function that writes the tables into a page; returns their rows by the first cell."""
    path = tmp_path / "page.md"
    monkeypatch.setattr(miniature, "PAGE", path)
    path.write_text(f"# A\n\n{miniature.MARK}\n\nold\n\n{miniature.MARK}\n\nlast\n")
    (tmp_path / "results").mkdir(exist_ok=True)

    def fill():
        script("--table")
        lines = path.read_text().splitlines()
        assert (lines[0], lines[-1]) == ("# A", "last")
        assert "old" not in lines
        rows = {}
        for line in lines:
            name, *cells = line.strip("| ").split(" | ")
            rows[name] = cells
        return rows

    return fill


def save_run(tmp_path, name, answers):
    """A file of results: which of the test images were classified right."""
    bits = "".join(f"{int(answer)}" for answer in answers)
    right = int(bits, 2).to_bytes(len(bits) // 8, "big").hex()
    content = {"result": {"test_size": len(answers)}, "right": right}
    (tmp_path / f"results/{name}.json").write_text(json.dumps(content))


def test_runs_and_verdicts(script, page, tmp_path):
    tree(tmp_path / "sets" / "fashion", train={"a": 8, "b": 8}, test={"a": 5, "b": 5})
    names = ["fashion-scratch-200-[01]", "fashion-idmm-400-0", "fashion-idmm-400-0-tuned"]
    names += ["fashion-idmm_muon-50-0", "fashion-idmm_muon-50-0-tuned"]
    plan = script("--runs", *names, "fashion-idmm-400-0-tuned-112", "--plan")
    assert "7 of 7 runs remain" in plan
    script("--tiny", "--runs", *names)
    assert "0 of 6 runs remain" in script("--tiny", "--runs", *names)
    tuned = read(tmp_path / "results/fashion-idmm-400-0-tuned.json")
    assert "--config paper --seed 0" in tuned["command"]
    assert "--init runs/miniature/" in tuned["command"]
    right = sum(byte.bit_count() for byte in bytes.fromhex(tuned["right"]))
    assert tuned["result"]["top1"] == 10 * right
    assert {"knn", "loss"} <= {*read(tmp_path / "results/fashion-idmm-400-0.json")["result"]}
    rows = page()
    assert rows["scratch"][3] == "2"
    assert rows["idmm is better than scratch (Table 2)"][2] != "not run yet"
    assert rows["idmm, 50 epochs"][-1].count(",") == 2
    assert "idmm, 100 epochs" not in rows


def save_grid(folder):
    """A grid of one seed and four test images: 2 are right from scratch, 3 with idmm on any images,
    1 with simclr."""
    answers = {"none": "abab", "idmm": "aaab", "simclr": "abbb"}  # the class is a
    rows = [("scratch", "none")]
    for source in miniature.SETS:
        rows += [(source, "idmm"), (source, "simclr")]
    cells = []
    for (source, method), target in itertools.product(rows, miniature.SETS):
        run = f"{source}-{method}-{target}"
        cells.append(
            cell(
                source,
                method,
                target=target,
                baseline_top1=9.0,
                test_size=4,
                folder=run,
            )
        )
        lines = ["header"]
        for number, predicted in enumerate(answers[method]):
            lines.append(f"{number}.png,a,{predicted},0.9")
        (folder / run).mkdir()
        (folder / run / "predictions.csv").write_text("\n".join(lines))
    (folder / "grid.json").write_text(json.dumps({"cells": cells}))


def test_a_grid_becomes_a_table_with_verdicts(script, page, tmp_path):
    save_grid(tmp_path)
    script("--grid", str(tmp_path))
    claim = "idmm on other images is better than scratch"
    assert page()[claim] == ["+25.0", "one seed"]
    save_run(tmp_path, "fashion-scratch-200-0", [True] + 7 * [False])
    save_run(tmp_path, "fashion-scratch-200-1", 2 * [True] + 6 * [False])
    variance = (1 / 8) ** 2 / 2
    # 6 cells that count a sixth and 3 that count a third. Of 4 images of each target, one is won
    seeds = 12.7062 * (variance * (6 / 36 + 3 / 9)) ** 0.5
    images = 1.959964 * (3 * (1 / 3) ** 2 * (3 / 16) / 4) ** 0.5
    half = 100 * (seeds**2 + images**2) ** 0.5
    interval = f"[{25 - half:.1f}, +{half + 25:.1f}]"
    assert page()[claim] == [f"+25.0 {interval}", "not decidable"]


def test_one_seed_has_the_spread_of_other_rows(page, tmp_path):
    """A lead of 10 points on 1,000 images is much over images, but not if other rows differ as much
    by seed."""
    for name, hits in {
        "scratch-200-0": 496,
        "scratch-200-1": 624,
        "idmm-400-0-tuned": 600,
    }.items():
        save_run(tmp_path, f"fashion-{name}", [True] * hits + [False] * (1000 - hits))
    claim = "idmm is better than scratch (Table 2)"
    assert page()[claim][-1] == "not decidable"
    (tmp_path / "results/fashion-scratch-200-1.json").unlink()
    assert page()[claim][-2:] == ["+10.4", "one seed"]


def test_commands_parse(script, tmp_path):
    for run in [*miniature.plan(tmp_path), *miniature.photographs()]:
        with pytest.raises(SystemExit) as ended:
            call_ok([*run.command(tmp_path, tmp_path), "--print_config"])
        assert ended.value.code == 0


def test_docs_have_the_tables_of_the_files():
    tables = miniature.tables(ROOT / "benchmarks/results/miniature")
    assert tables in miniature.PAGE.read_text(), "run 'python benchmarks/miniature.py --table'"
