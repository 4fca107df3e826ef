"""docs/tutorial.md: its commands, all of them in their order, with fewer epochs; the ONNX file runs by its lines."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT, ROOT, call

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
FOUND = {("data", "check"): 1}  # exit codes other than 0: it found something that should be mended


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder to work in, with what a checkout has."""
    place = tmp_path_factory.mktemp("tutorial")
    (place / "benchmarks").symlink_to(ROOT / "benchmarks")
    code = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
    (place / "classify.py").write_text(code[-1])
    return place


def steps():
    """The page's commands: whole blocks of shell, but our own command lines one by one."""
    for language, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", PAGE):
        if language:
            continue
        shell = []
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("idmm "):
                yield "\n".join(shell), line
                shell = []
            elif not line.startswith("pip "):
                shell.append(line)
        yield "\n".join(shell), None


def test_commands(folder, monkeypatch, capsys):
    """One epoch a stage, as the page says how; all that the page names is there in the end."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EPOCHS", "1")
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    shell = {**ENVIRONMENT, "EPOCHS": "1", "PATH": path, "PYTHONPATH": str(ROOT)}
    said = []
    for lines, ours in steps():
        done = subprocess.run(["bash", "-ec", lines], env=shell, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
        if ours:
            argv = shlex.split(ours.replace("$EPOCHS", "1"))[1:]
            assert call(argv) == FOUND.get(tuple(argv[:2]), 0), (ours, capsys.readouterr().err)
    assert sum(ours is not None for _, ours in steps()) == 7
    for name in ("runs/check/exclude.txt", "runs/a/curves.png", "runs/a/explore/labels.csv", "runs/b/confusion.png"):
        assert (folder / name).exists(), name
    assert "<html" in (folder / "runs/report/report.html").read_text()
    assert len((folder / "predictions.csv").read_text().splitlines()) == 1 + 2 * 256
    assert re.search(r"coffee/0001\.png: \w+, [\d.]+%\n", said[-1])  # by onnxruntime alone
