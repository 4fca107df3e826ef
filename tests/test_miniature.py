"""benchmarks/miniature.py on a tiny set: it makes runs, skips those that have a file, and prints verdicts."""

import json
import sys

import pytest
from folders import tree
from helpers import ROOT, call, one_thread

sys.path.append(str(ROOT / "benchmarks"))
import miniature  # noqa: E402


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """The script with its folders: a function of further flags that returns what it prints."""

    def run(*flags):
        folders = ["--sets", tmp_path / "sets", "--out", tmp_path / "runs", "--results", tmp_path / "results"]
        monkeypatch.setattr(sys, "argv", ["miniature.py", *map(str, folders), *flags])
        with one_thread():
            miniature.main()
        return capsys.readouterr().out

    return run


def test_runs_and_verdicts(script, tmp_path, monkeypatch):
    tree(tmp_path / "sets" / "fashion", train={"a": 8, "b": 8}, test={"a": 5, "b": 5})
    names = ["fashion-scratch-200-[01]", "fashion-idmm-400-0", "fashion-idmm-400-0-tuned"]
    assert "5 of 5 runs remain" in script("--runs", *names, "fashion-idmm-400-0-tuned-112", "--plan")
    script("--tiny", "--runs", *names)
    assert "0 of 4 runs remain" in script("--tiny", "--runs", *names)
    files = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()}
    tuned = files["fashion-idmm-400-0-tuned"]
    assert (
        "--config paper --seed 0" in tuned["command"] and "--init runs/miniature/fashion-idmm-400-0" in tuned["command"]
    )
    right = sum(bin(byte).count("1") for byte in bytes.fromhex(tuned["right"]))
    assert tuned["result"]["top1"] == 10 * right and {"knn", "loss"} <= set(files["fashion-idmm-400-0"]["result"])
    monkeypatch.setattr(miniature, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"# A\n\n{miniature.MARK}\n\nold\n\n{miniature.MARK}\n\nlast\n")
    script("--table")
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert lines[0] == "# A" and lines[-1] == "last" and "old" not in lines
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:]]
        for cells in (line.split("|") for line in lines)
        if cells[1:]
    }
    assert rows["scratch"][3] == "2" and rows["idmm is better than scratch (Table 2)"][2] != "not run yet"
    assert "CutMix helps (Table 8)" not in rows and "Missing rows were not run" in "".join(lines)


def test_commands_parse(script, tmp_path):
    for run in [*miniature.plan(tmp_path), *miniature.photographs(3.4)]:
        with pytest.raises(SystemExit) as ended:
            assert call([*run.command(tmp_path, tmp_path), "--print_config"]) == 0
        assert ended.value.code == 0


def test_docs_have_the_tables_of_the_files():
    tables = miniature.tables(ROOT / "benchmarks/results/miniature")
    assert tables in miniature.PAGE.read_text(), "run 'python benchmarks/miniature.py --table'"
