"""Every other command on a folder of five-channel images: label curves, folds, joint training, the grid, the search."""

import json

import bands
import numpy as np
import pytest
import transfers
from folders import TINY, result, tuned
from frozen import a_run
from helpers import VIT, call, inside, logged, refused

import idmm
from idmm.errors import UserError
from idmm.models import read_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]
FIVE = {"data__in_chans": 5}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return bands.tree(tmp_path_factory.mktemp("bands") / "cells", train=6, test=3)


@pytest.fixture(scope="module")
def pretrained(root, tmp_path_factory):
    """Of all five channels, and of two, in another order."""
    folder = tmp_path_factory.mktemp("runs")
    assert inside("pretrain", folder / "five", **TINY, **FIVE, data__root=str(root)) == 0
    assert inside("pretrain", folder / "two", **TINY, data__bands=[4, 0], data__root=str(root)) == 0
    return folder


def read(path):
    return json.loads(path.read_text())


def test_folds(root, tmp_path):
    assert tuned(tmp_path / "b", root / "train", **FIVE, data__folds=2) == 0
    assert result(tmp_path / "b")["test_size"] == 18
    one, other = (read(tmp_path / "b" / f"fold-{n}" / "model.json") for n in (1, 2))
    assert len(one["mean"]) == 5 and one["mean"] != other["mean"], "each by its own training images"


def test_a_grid(root, tmp_path):
    short = {"epochs": 1, "batch_size": 8, "lr": 1e-3, "precision": "fp32", "device": "cpu"}
    data, entry = {"in_chans": 5, "workers": 0}, {"name": "folder", "root": str(root), "label": "cells"}
    pretrain = {**transfers.GRID["pretrain"], "data": data, "train": short}
    stages = {"pretrain": pretrain, "finetune": {"data": data, "train": {**short, "size": 16}}}
    given = dict(sources=[entry], targets=[entry], **stages)
    assert transfers.inside(tmp_path / "g", **given) == 0
    rows = (tmp_path / "g" / "grid.csv").read_text().splitlines()
    assert len(rows) == 3 and all(row.endswith(",ok") for row in rows[1:])


def test_training_in_a_time(root, tmp_path):
    given = [
        "train",
        root,
        "--data.in_chans",
        5,
        "--minutes",
        0.4,
        "--size",
        16,
        "--device",
        "cpu",
        "--data.workers",
        0,
    ]
    model = ["--model.name", "vit_tiny_patch16_224", "--model.kwargs", json.dumps(VIT)]
    assert call([*given, *model, "--out", tmp_path / "x"]) == 0
    assert read(tmp_path / "x" / "model.json")["channels"] == 5


# ---------------------------------------------------------------------- other channels than the weights'
def test_weights_for_rgb(root, tmp_path, capsys):
    """Adapted where the number is given, with a line on it; mean, std and range are the images' own."""
    init = a_run(tmp_path / "rgb", extra={"range": [0, 4095]})
    assert tuned(tmp_path / "b", root, init=str(init), **FIVE) == 0
    line = "  patch_embed.proj.weight: from 3 channels to 5: repeated in turn, scaled by 3/5"
    assert line in logged(tmp_path / "b")
    saved = read(tmp_path / "b" / "model.json")
    assert (
        saved["channels"] == 5
        and len(saved["range"]) == 5
        and "measured from the training images" in logged(tmp_path / "b")
    )
    assert call(["probe", "--init", init, "--data.root", root, "--data.in_chans", 5, "--out", tmp_path / "p"]) == 0
    assert line in capsys.readouterr().err
    lines = refused(capsys, ["probe", "--init", init, "--data.root", root, "--out", tmp_path / "q"])
    assert any("expected a page of grey, RGB or RGBA, or --data.in_chans 5" in line for line in lines)
    assert not (tmp_path / "q").exists()
    before, after = read_checkpoint(init), read_checkpoint(tmp_path / "b")
    assert before.in_chans == 3 and after.in_chans == 5 and after.kwargs["in_chans"] == 5


def test_chosen_bands_travel(root, pretrained, tmp_path, capsys):
    """Fine-tuning and use take the two channels of the run, in its order, from files of five."""
    run = pretrained / "two"
    assert read(run / "backbone.json")["bands"] == [4, 0]
    assert tuned(tmp_path / "b", root, init=str(run)) == 0
    assert read(tmp_path / "b" / "model.json")["bands"] == [4, 0]
    assert call(["predict", "--init", tmp_path / "b", root / "test", "--out", tmp_path / "p.csv"]) == 0
    image = bands.bands(2, 1000)
    other = image.copy()
    other[..., 1:4] = 0  # what is not used
    features = idmm.embed(run, [image, other, image[..., ::-1]])
    assert np.array_equal(features[0], features[1]) and not np.allclose(features[0], features[2])
    with pytest.raises(UserError, match="has 4 channels; expected 5"):
        idmm.embed(run, [image[..., :4]])
