"""What stages leave for those who draw and search it."""

import os
import sys

import numpy as np
import pytest
import torch
from folders import faults, paint, tree, tuned
from frozen import exported, timms
from helpers import read
from PIL import Image

from idmm.files import read_csv
from idmm.inference import runs

ODD = os.fsdecode(b"\xff.png")  # a name that is no UTF-8


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tree(
        tmp_path_factory.mktemp("images") / "d", train={"a": 7, "b": 8}, test={"a": 3, "b": 3}
    )
    paint(root / "train/a" / ODD, 5)
    paint(root / "test/b" / ODD, 6)
    return root


def prepared(run, paths):
    """Images as a run's JSON says, by timm alone, [N, 3, S, S]."""
    transform = timms(read(run / "model.json"))
    return torch.stack([transform(Image.open(path)) for path in paths])


def test_probabilities_are_the_models(root, tmp_path, monkeypatch):
    """After two sizes. The log begins with the command."""
    run = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["idmm", "finetune", "--out", "a b"])
    assert tuned(run, root, stages=[{"size": 16}, {"size": 24}]) == 0
    first = (run / "log.txt").read_text().splitlines()[0]
    assert " INFO idmm finetune --out 'a b' (idmm " in first
    assert f"torch {torch.__version__.partition('+')[0]}" in first
    rows = read_csv(run / "predictions.csv")
    assert list(rows[0]) == ["path", "class", "predicted", "probability"]
    assert len(rows) == 7
    assert f"test/b/{ODD}" in [row["path"] for row in rows]
    model, info = exported(run)
    with torch.no_grad():
        expected = model(prepared(run, [root / row["path"] for row in rows])).softmax(1)
    assert [row["predicted"] for row in rows] == [info["classes"][k] for k in expected.argmax(1)]
    assert [float(row["probability"]) for row in rows] == pytest.approx(
        expected.amax(1).tolist(), rel=1e-4
    )
    assert all(len(row["probability"]) <= len("0.123456e-05") for row in rows)
    top1 = read(run / "result.json")["top1"]
    assert 100 * np.mean([row["class"] == row["predicted"] for row in rows]) == pytest.approx(top1)


def test_what_is_no_finished_run(tmp_path):
    nowhere = tmp_path / "nowhere"
    fold = tmp_path / "folds" / "fold-1"
    fold.mkdir(parents=True)
    fault = "is no finished run, it has no result.json. Give the folder of a finished run"
    assert faults(runs.config_of, nowhere) == [f"{nowhere}: {fault}"]
    assert faults(runs.config_of, fold) == [f"{fold}: {fault}"]
    line = f"{fold.parent}: holds k-fold runs. Give one of them ('{fold}')"
    assert faults(runs.config_of, fold.parent) == [line]
    (fold / "result.json").write_text("{}")
    (fold / "config.yaml").write_text("{")
    (line,) = faults(runs.config_of, fold)
    assert line.startswith(f"{fold}: config.yaml cannot be read: ")
    (fold / "config.yaml").write_text("init: runs/a\nsize: 32\ncrop_pct: 0.9\n")
    line = f"{fold}: is a run of idmm probe, expected one of pretraining or fine-tuning"
    assert faults(runs.config_of, fold) == [line]
