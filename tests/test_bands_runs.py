"""A folder of five-channel 16-bit TIFFs goes through everything, with nothing but ``--data.in_chans 5`` added.

The commands are those of README; what is shorter here is the network and the training.
"""

import csv
import json

import bands
import numpy as np
import pytest
from folders import tuned
from frozen import a_run
from helpers import call, logged

from idmm.data.image_store import store_split
from idmm.data.images import composite
from idmm.data.listing import list_images
from idmm.stages.read_outputs import config_of

pytestmark = pytest.mark.slow
SMALL = ["--model.name", "resnet10t", "--model.kwargs", "{channels: [8, 16, 16, 32]}"]
SHORT = ["--train.batch_size", 8, "--train.device", "cpu", "--train.precision", "fp32", "--data.workers", 0]
IN_CHANS = ["--data.in_chans", 5]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return bands.tree(tmp_path_factory.mktemp("bands") / "cells")


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """Pretraining, fine-tuning and probe; nothing may be written to them."""
    folder = tmp_path_factory.mktemp("runs")
    data = ["--data.root", root]
    argv = ["pretrain", "--config", "idmm_fast", *SMALL, "--views.size", 32, *data, *IN_CHANS, "--out", folder / "a"]
    assert call([*argv, *SHORT, "--train.epochs", 2]) == 0
    argv = ["finetune", "--config", "fast", "--init", folder / "a", "--train.size", 32, *data, "--out", folder / "b"]
    assert call([*argv, *SHORT, *IN_CHANS, "--train.epochs", 25, "--train.lr", 0.01]) == 0
    assert call(["probe", "--init", folder / "a", *data, "--out", folder / "p"]) == 0
    return folder


def read(path):
    return json.loads(path.read_text())


def predicted(path):
    with open(path) as file:
        return {row["path"]: row for row in csv.DictReader(file)}


# ---------------------------------------------------------------------- what is kept
def test_what_the_runs_learned(runs):
    """The class is a channel's brightness, which five channels show and no composite of three need."""
    assert read(runs / "b" / "result.json")["top1"] >= 80
    found = read(runs / "p" / "probe.json")
    assert found["probe"]["top1"] > 40 and found["init"] == str(runs / "a")


# ---------------------------------------------------------------------- use
def test_predict_needs_no_flag(runs, root, tmp_path):
    """The run's own classes and probabilities, from files alone."""
    assert call(["predict", "--init", runs / "b", root / "test", "--out", tmp_path / "p.csv"]) == 0
    own, found = predicted(runs / "b" / "predictions.csv"), predicted(tmp_path / "p.csv")
    assert len(found) == 15
    for path, row in own.items():
        mine = found[str(root / path)]
        assert mine["class"] == row["predicted"]
        assert float(mine["probability"]) == pytest.approx(float(row["probability"]), abs=1e-4)


# ---------------------------------------------------------------------- pictures
def test_explore_shows_composites(runs, root, tmp_path):
    assert call(["explore", runs / "a", "--out", tmp_path / "explored"]) == 0
    assert (tmp_path / "explored" / "clusters.png").exists()
    config = config_of(runs / "a")
    store = store_split(list_images(config.data, labelled=False).train, stored_size=None, data=config.data)
    seen = store.picture(0)
    assert seen.shape == (24, 28, 3) and seen.dtype == np.uint8 and seen.min() == 0 and seen.max() == 255
    image = bands.bands(0, 0)
    image[..., 0] = 7
    two, one = composite(image[..., :2]), composite(image[..., 1:2])
    assert not two[..., [0, 2]].any() and two[..., 1].max() == 255, "a constant channel is black, a third one, too"
    assert (one == two[..., 1:2]).all()


# ---------------------------------------------------------------------- other stages, other weights


def test_weights_for_rgb(root, tmp_path):
    """Adapted, with a line on it; mean, std and range are the images' own."""
    init = a_run(tmp_path / "rgb", extra={"range": [0, 4095]})
    assert tuned(tmp_path / "b", root, init=str(init), data__in_chans=5) == 0
    assert "  patch_embed.proj.weight: from 3 channels to 5: repeated in turn, scaled by 3/5" in logged(tmp_path / "b")
    assert "measured from the training images" in logged(tmp_path / "b")
    saved = read(tmp_path / "b" / "model.json")
    assert saved["channels"] == saved["kwargs"]["in_chans"] == len(saved["range"]) == 5
