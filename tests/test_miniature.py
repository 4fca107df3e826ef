"""benchmarks/miniature.py on a tiny set: it makes runs, skips those that have a file, and prints
verdicts."""

import json
import sys

import pytest
from folders import tree
from grids import cell
from helpers import ROOT, call, one_thread

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


def test_runs_and_verdicts(script, tmp_path, monkeypatch):
    tree(tmp_path / "sets" / "fashion", train={"a": 8, "b": 8}, test={"a": 5, "b": 5})
    names = ["fashion-scratch-200-[01]", "fashion-idmm-400-0", "fashion-idmm-400-0-tuned"]
    assert "5 of 5 runs remain" in script(
        "--runs", *names, "fashion-idmm-400-0-tuned-112", "--plan"
    )
    script("--tiny", "--runs", *names)
    assert "0 of 4 runs remain" in script("--tiny", "--runs", *names)
    files = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()}
    tuned = files["fashion-idmm-400-0-tuned"]
    assert "--config paper --seed 0" in tuned["command"]
    assert "--init runs/miniature/" in tuned["command"]
    right = sum(bin(byte).count("1") for byte in bytes.fromhex(tuned["right"]))
    assert tuned["result"]["top1"] == 10 * right
    assert {"knn", "loss"} <= set(files["fashion-idmm-400-0"]["result"])
    monkeypatch.setattr(miniature, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(
        f"# A\n\n{miniature.MARK}\n\nold\n\n{miniature.MARK}\n\nlast\n"
    )
    script("--table")
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert lines[0] == "# A"
    assert lines[-1] == "last"
    assert "old" not in lines
    rows = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines)}
    assert rows["scratch"][3] == "2"
    assert rows["idmm is better than scratch (Table 2)"][2] != "not run yet"


def test_a_grid_becomes_a_table_with_verdicts(script, tmp_path):
    answers = {"none": "abab", "idmm": "aaab", "simclr": "abbb"}  # predictions, the class is a
    rows = [
        ("scratch", "none"),
        *((source, method) for source in miniature.SETS for method in ("idmm", "simclr")),
    ]
    cells = [
        cell(*each, target=target, baseline_top1=9.0, test_size=4)
        for each in rows
        for target in miniature.SETS
    ]
    for one in cells:
        one["folder"] = folder = "-".join([one["source"], one["method"], one["target"]])
        (tmp_path / folder).mkdir()
        lines = [
            "header",
            *(f"{i}.png,a,{predicted},0.9" for i, predicted in enumerate(answers[one["method"]])),
        ]
        (tmp_path / folder / "predictions.csv").write_text("\n".join(lines))
    (tmp_path / "grid.json").write_text(json.dumps({"cells": cells}))
    script("--grid", str(tmp_path))
    claim = "| idmm on other images is better than scratch | +25.0 "
    assert f"{claim}| one seed |" in "\n".join(miniature.grid_tables(tmp_path / "results"))
    for seed, bits in enumerate((0b10000000, 0b11000000)):  # right on 1 and on 2 of 8 images
        run = {"result": {"test_size": 8}, "right": bytes([bits]).hex()}
        (tmp_path / f"results/fashion-scratch-200-{seed}.json").write_text(json.dumps(run))
    variance = (1 / 8) ** 2 / 2
    assert miniature.seed_variance(tmp_path / "results") == (pytest.approx(variance), 1)
    # 6 cells that count a sixth and 3 that count a third. Of 4 images of each target, one is won
    seeds = 12.7062 * (variance * (6 / 36 + 3 / 9)) ** 0.5
    images = 1.959964 * (3 * (1 / 3) ** 2 * (3 / 16) / 4) ** 0.5
    half = 100 * (seeds**2 + images**2) ** 0.5
    text = "\n".join(miniature.grid_tables(tmp_path / "results"))
    assert f"{claim}[{25 - half:.1f}, +{half + 25:.1f}] | not decidable |" in text


def test_one_seed_has_the_spread_of_other_rows(tmp_path):
    """A lead of 10 points on 1,000 images is much over images, but not if other rows differ as much
    by seed."""
    for name, hits in {"scratch-200-0": 496, "scratch-200-1": 624, "idmm-400-0-tuned": 600}.items():
        right = bytes([255] * (hits // 8) + [0] * (125 - hits // 8)).hex()
        found = {"result": {"test_size": 1000}, "right": right}
        (tmp_path / f"fashion-{name}.json").write_text(json.dumps(found))
    names = "fashion-idmm-400-{seed}-tuned", "fashion-scratch-200-{seed}"
    assert miniature.verdict(tmp_path, *names)[1] == "not decidable"
    assert miniature.verdict(tmp_path, *names[::-1])[0].startswith("-")
    (tmp_path / "fashion-scratch-200-1.json").unlink()
    assert miniature.verdict(tmp_path, *names) == ("+10.4", "one seed")


def test_commands_parse(script, tmp_path):
    for run in [*miniature.plan(tmp_path), *miniature.photographs()]:
        with pytest.raises(SystemExit) as ended:
            assert call([*run.command(tmp_path, tmp_path), "--print_config"]) == 0
        assert ended.value.code == 0


def test_docs_have_the_tables_of_the_files():
    tables = miniature.tables(ROOT / "benchmarks/results/miniature")
    assert tables in miniature.PAGE.read_text(), "run 'python benchmarks/miniature.py --table'"
