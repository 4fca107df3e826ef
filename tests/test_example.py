"""examples/own_folder.py on a tiny folder, its notebook (the same cells), and tune_with_optuna.py on digits."""

import os
import re
import runpy
import subprocess
import sys

import nbformat
import pytest
from folders import tree
from helpers import ENVIRONMENT, ROOT

from idmm.config import PretrainConfig
from idmm.config.parsing import build
from idmm.data.loaders import one_thread

SCRIPT, NOTEBOOK = ROOT / "examples" / "own_folder.py", ROOT / "examples" / "own_folder.ipynb"


def cells():
    """The script's code cells, each with its title."""
    parts = re.split(r"(?m)^# %% (.*)\n", SCRIPT.read_text())[1:]
    return [(title, code.rstrip()) for title, code in zip(parts[::2], parts[1::2], strict=True)]


def notebook():
    """The script as a notebook: a line of text and a cell of code for each of its cells."""
    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    head = SCRIPT.read_text().split('"""')[1].strip().replace("\n\n", "\n\n    ", 1)
    texts = [(nbformat.v4.new_markdown_cell, f"# Your own folder\n\n{head}")]
    for title, code in cells():
        texts += [(nbformat.v4.new_markdown_cell, title), (nbformat.v4.new_code_cell, code)]
    for number, (make, text) in enumerate(texts):
        made.cells.append(make(text, id=f"cell-{number}"))
    return made


def test_notebook_has_the_same_cells():
    """Written anew from the script with IDMM_WRITE_NOTEBOOK=1 set."""
    if os.environ.get("IDMM_WRITE_NOTEBOOK"):
        nbformat.write(notebook(), NOTEBOOK)
    kept = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(kept)
    assert [(c.cell_type, c.source) for c in kept.cells] == [(c.cell_type, c.source) for c in notebook().cells]
    assert not any(c.get("outputs") for c in kept.cells)


def test_script_is_short():
    lines = [line for _, code in cells() for line in code.splitlines() if line.strip()]
    assert len(lines) <= 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    splits = {"train": {"cat": 6, "dog": 6}, "test": {"cat": 3, "dog": 3}}
    return tree(tmp_path_factory.mktemp("own") / "photos", **splits)


def settings(folder, out):
    own = {"FOLDER": str(folder), "OUT": str(out), "EPOCHS": "1", "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    return {**ENVIRONMENT, **own}


def check(out):
    for name in ("a/backbone.safetensors", "b/model.safetensors", "explore/neighbours.csv", "own_folder.png"):
        assert (out / name).exists(), name


@pytest.mark.slow
def test_script_runs(folder, tmp_path):
    done = subprocess.run([sys.executable, SCRIPT], env=settings(folder, tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        "pretrained: loss" in done.stdout and "linear probe" in done.stdout and "photos/test/cat/0.png" in done.stdout
    )
    check(tmp_path)


@pytest.mark.slow
def test_notebook_runs(folder, tmp_path, monkeypatch):
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in settings(folder, tmp_path).items():
        monkeypatch.setenv(name, value)
    client.NotebookClient(nbformat.read(NOTEBOOK, as_version=4), timeout=300).execute()
    check(tmp_path)


@pytest.mark.slow
def test_tuning_keeps_the_best_trial_and_continues(tmp_path, monkeypatch, capsys):
    script, out = ROOT / "examples" / "tune_with_optuna.py", tmp_path / "out"
    for trials in ("1", "2"):
        for name, value in {"OUT": str(out), "TRIALS": trials, "EPOCHS": "1"}.items():
            monkeypatch.setenv(name, value)
        with one_thread():
            runpy.run_path(script)
        said = capsys.readouterr()
        assert said.err.count("finished with value") == 1, "a finished trial is not repeated"
    assert "kNN on held-out training images: first trial" in said.out and str(out / "tuned.yaml") in said.out
    found = build(PretrainConfig, out / "tuned.yaml")
    assert found.views.crops[0].scale[1] == 1.0 and 1e-4 <= found.train.lr <= 1e-2
    assert sorted(path.name for path in out.iterdir()) == ["study.db", "tuned.yaml"]
