"""What stages leave for those who draw and search it."""

import os
import sys

import numpy as np
import pytest
import torch
from folders import paint, tree, tuned_ok
from frozen import exported, timms
from helpers import read, refused
from PIL import Image

from idmm.files import read_csv

ODD = os.fsdecode(b"\xff.png")  # a name that is no UTF-8


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tree(
        tmp_path_factory.mktemp("images") / "d",
        train={"a": 7, "b": 8},
        test={"a": 3, "b": 3},
    )
    paint(root / "train/a" / ODD, 5)
    paint(root / "test/b" / ODD, 6)
    return root


def test_probabilities_are_the_models(root, tmp_path, monkeypatch):
    """After two sizes. The log begins with the command."""
    run = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["idmm", "finetune", "--out", "a b"])
    tuned_ok(run, root, stages=[{"size": 16}, {"size": 24}])
    first = (run / "log.txt").read_text().splitlines()[0]
    assert " INFO idmm finetune --out 'a b' (idmm " in first
    assert f"torch {torch.__version__.partition('+')[0]}" in first
    rows = read_csv(run / "predictions.csv")
    assert list(rows[0]) == ["path", "class", "predicted", "probability"]
    assert len(rows) == 7
    assert f"test/b/{ODD}" in [row["path"] for row in rows]
    model, info = exported(run)
    transform = timms(info)
    images = torch.stack([transform(Image.open(root / row["path"])) for row in rows])
    with torch.no_grad():
        shares = model(images).softmax(1)
    for row, share in zip(rows, shares, strict=True):
        assert row["predicted"] == info["classes"][share.argmax()]
        assert float(row["probability"]) == pytest.approx(float(share.amax()), rel=1e-4)
        assert len(row["probability"]) <= len("0.123456e-05")
    hits = [row["class"] == row["predicted"] for row in rows]
    assert read(run / "result.json")["top1"] == pytest.approx(100 * np.mean(hits))


def test_what_is_no_finished_run(tmp_path, capsys):
    def fault(run):
        *_, line = refused(capsys, f"explore {run}")
        start, _, reason = line.partition(": ")
        assert start == str(run)
        return reason

    fold = tmp_path / "folds/fold-1"
    fold.mkdir(parents=True)
    line = "is no finished run, it has no result.json. Give the folder of a finished run"
    assert fault(tmp_path / "nowhere") == fault(fold) == line
    assert fault(fold.parent) == f"holds k-fold runs. Give one of them ('{fold}')"
    (fold / "result.json").write_text("{}")
    (fold / "config.yaml").write_text("{")
    assert fault(fold).startswith("config.yaml cannot be read: ")
    (fold / "config.yaml").write_text("command: probe\ninit: runs/a\nsize: 32\ncrop_pct: 0.9\n")
    assert fault(fold) == "is a run of idmm probe, expected one of pretraining or fine-tuning"
