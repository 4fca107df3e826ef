"""docs/start.md: its commands, all of them in their order, in less time."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT, ROOT, call

from idmm.files import read_csv

pytestmark = pytest.mark.slow
EXIT_CODES = {"data": 1}  # the check found something to fix


def commands():
    """The page's shell lines."""
    for language, block in re.findall(
        r"(?ms)^```(\w*)\n(.*?)^```$", (ROOT / "docs" / "start.md").read_text()
    ):
        yield from [] if language else block.replace("\\\n", " ").splitlines()


def test_commands(tmp_path, monkeypatch, capsys):
    for name in ("benchmarks", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    shell = {
        **ENVIRONMENT,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
    }
    programs = []
    printed = []
    for line in commands():
        if line.startswith("idmm "):
            programs.append(shlex.split(re.sub("--minutes [13]", "--minutes 0.4", line))[1:])
            assert call(programs[-1]) == EXIT_CODES.get(programs[-1][0], 0), (
                line,
                capsys.readouterr().err,
            )
        elif not line.startswith("pip "):
            done = subprocess.run(
                ["bash", "-ec", line],
                env=shell,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            printed.append(done.stdout)
    assert [argv[0] for argv in programs] == [
        *("data", "train", "report", "explore", "predict", "export"),
        *("data", "train", "train", "report", "suggest"),
    ]
    mistakes = (tmp_path / "runs/before/mistakes.csv").read_text()
    assert "grass/hubble1.png,grass,hubble_deep_field," in mistakes, "a planted label"
    tested = [
        {row["path"] for row in read_csv(tmp_path / f"runs/{of}/predictions.csv")}
        for of in ("before", "after")
    ]
    assert len(tested[0] & tested[1]) >= len(tested[1]) - 4
    for name in (
        "check/exclude.txt",
        "x/confusion.png",
        "x/report/report.html",
        "x/explore/neighbours.png",
    ):
        assert (tmp_path / "runs" / name).exists(), name
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 1 + 2 * 256
    assert re.search(r"moon/0001\.png,\w+,[\d.]+\n", "".join(printed))  # by onnxruntime only
