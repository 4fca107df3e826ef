"""benchmarks/gpu.sh: rows that resume, and rows that were cut off."""

import sys

import pytest
from helpers import ROOT, read

sys.path.append(str(ROOT / "benchmarks"))
import gpu  # noqa: E402 (a script)

SLOW = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
time.sleep(60)
"""


def command(path, code):
    """A row that notes that it ran."""
    return [
        sys.executable,
        "-c",
        f"open({str(path)!r}, 'a').write('x')\n{code}",
    ]


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands of the rows a and b, which may be changed between two starts."""
    argv_of = {
        "a": command(tmp_path / "a", "print('well')"),
        "b": command(tmp_path / "b", SLOW),
    }

    def rows(part, *_):
        return [gpu.Row(part, name, argv) for name, argv in argv_of.items()]

    monkeypatch.setattr(gpu, "rows", rows)
    monkeypatch.setattr(gpu, "GRACE", 2.0)
    monkeypatch.setattr(gpu, "SHORTEST", 0.1)
    return argv_of


def record(out, name):
    return read(out / "speed" / f"{name}.json")


def test_a_row_that_is_cut_off_is_unfinished_and_starts_again(commands, tmp_path, capsys):
    out = tmp_path / "out"
    start = ["speed", "--out", str(out), "--seconds"]
    assert gpu.main([*start, "6"]) == 3
    assert record(out, "a")["printed"] == ["well"]
    assert record(out, "b")["status"] == "unfinished"
    assert "1 rows remain: repeat the command" in capsys.readouterr().err
    commands["b"] = command(tmp_path / "b", "pass")
    assert gpu.main([*start, "30"]) == 0
    assert record(out, "b")["status"] == "done"
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == (
        "x",
        "xx",
    )
    assert "| b | done |" in capsys.readouterr().out


def test_a_row_that_fails_does_not_stop_the_others(commands, tmp_path):
    commands["a"] = command(tmp_path / "a", "raise SystemExit(7)")
    commands["b"] = command(tmp_path / "b", "pass")
    assert gpu.main(["speed", "--out", str(tmp_path), "--seconds", "30"]) == 1
    assert {"status": "failed", "exit_code": 7}.items() <= record(tmp_path, "a").items()
    assert record(tmp_path, "b")["status"] == "done"
