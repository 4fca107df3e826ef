"""Runs on deep pictures and on images of many channels, used: exports, files and arrays, explore, weights for RGB."""

import csv
import json
import subprocess
import sys

import bands
import numpy as np
import pytest
import tifffile
from folders import tuned
from helpers import ENVIRONMENT, ROOT, call, refused
from PIL import Image

import idmm
from idmm.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]
LONG = {"train__epochs": 12, "train__lr": 0.01, "augment__mixup_alpha": 0.0, "augment__cutmix_alpha": 0.0}
TOP = 3000  # of the deep pictures
WITHOUT_TORCH = """
import runpy, sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchvision", "timm", "idmm", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Gone())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def grey(bright, seed):
    """An X-ray, say: uint16 [H, W] of values from 400 to 3000, some of which are a bright square."""
    image = np.random.default_rng([bright, seed]).integers(400, 900, (20, 26)).astype(np.uint16)
    image[5:15, 4:18] += 1800 * bright
    image[0, 0], image[-1, -1] = 400, TOP
    return image


@pytest.fixture(scope="module")
def xrays(tmp_path_factory):
    root = tmp_path_factory.mktemp("xrays") / "d"
    for split, first, count in (("train", 0, 10), ("test", 100, 4)):
        for bright, name in enumerate(("clear", "node")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(grey(bright, first + i)).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return bands.tree(tmp_path_factory.mktemp("tiles") / "d", train=6, test=3, channels=7)


@pytest.fixture(scope="module")
def runs(xrays, tiles, tmp_path_factory):
    """Of deep pictures, and of three of seven bands."""
    folder = tmp_path_factory.mktemp("runs")
    assert tuned(folder / "rgb", xrays, **LONG) == 0
    assert tuned(folder / "some", tiles, **LONG, data__bands=[2, 0, 1]) == 0
    return folder


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def ran(*argv):
    argv = [sys.executable, "-c", WITHOUT_TORCH, *argv]
    done = subprocess.run(argv, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["rgb", "some"])
def test_the_example(runs, xrays, tiles, tmp_path, name):
    """examples/classify_onnx.py gives the run's own classes, without torch."""
    run, root = runs / name, tiles if name == "some" else xrays
    own, files = rows(run / "predictions.csv"), []
    for n, row in enumerate(own):  # a third of them as .npy, of bands by turns [C, H, W]
        files.append(root / row["path"])
        if n % 3 == 0:
            image = np.asarray(Image.open(files[-1])) if name != "some" else tifffile.imread(files[-1])
            files[-1] = tmp_path / f"{n}.npy"
            np.save(files[-1], image)
    for kind, out in (("hf", tmp_path / "hf"), ("onnx", tmp_path / "m.onnx")):
        assert call(["export", "--init", run, "--format", kind, "--out", out]) == 0

    printed = ran("examples/classify_onnx.py", tmp_path / "m.onnx", *files)
    lines = [line.split(",")[1:] for line in printed.splitlines()]
    assert [label for label, _ in lines] == [row["predicted"] for row in own]
    assert [float(p) for _, p in lines] == pytest.approx([float(row["probability"]) for row in own], abs=2e-3)
    text = (tmp_path / "hf" / "README.md").read_text()
    kind = "images of 3 channels into 3" if name == "some" else "images into 2"
    assert f"A classifier of {kind} classes" in text and "image = ...  # [1, C, H, W], by hand" in text


def test_files_of_other_channels_are_refused(runs, tiles, tmp_path, capsys):
    run = runs / "some"
    for stem in ("model", "backbone"):
        assert json.loads((run / f"{stem}.json").read_text())["file_channels"] == 7
    image = bands.bands(1, 5, channels=7)
    np.save(tmp_path / "four.npy", image[..., :4])
    np.save(tmp_path / "seven.npy", np.moveaxis(image, 2, 0))
    said = f"  {tmp_path}/four.npy: has 4 channels, expected 7"
    for command in ("predict", "embed"):
        out = tmp_path / {"predict": "p.csv", "embed": "f.npz"}[command]
        assert call([command, "--init", run, tmp_path / "four.npy", tmp_path / "seven.npy", "--out", out]) == 0
        assert said in capsys.readouterr().err.splitlines()
    given = ["--init", run, tmp_path / "seven.npy", tmp_path / "four.npy", "--out", tmp_path / "s.png"]
    assert refused(capsys, ["similar", *given])[-1] == said
    clf = idmm.load_classifier(run)
    with pytest.raises(UserError, match=r"^images: the image: has 4 channels, expected 7$"):
        clf.predict(image[..., :4])


def test_arrays_of_pictures(runs, xrays):
    clf = idmm.load_classifier(runs / "rgb")
    deep = grey(1, 0)
    wanted = clf.predict(xrays / "train" / "node" / "0.png").probability
    for image in (deep, np.dstack([deep] * 3), Image.fromarray(deep)):
        assert clf.predict(image).probability == wanted
    wanted = r"^images: the image is an array of float32, \[20, 26\], expected .* or \[H, W\] of uint8 or uint16$"
    with pytest.raises(UserError, match=wanted):
        clf.predict(deep.astype(np.float32))


SMALL = ["--model.name", "resnet10t", "--model.kwargs", "{channels: [8, 16, 16, 32]}"]
SHORT = ["--train.batch_size", 8, "--train.device", "cpu", "--train.precision", "fp32", "--data.workers", 0]
IN_CHANS = ["--data.in_chans", 5]


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return bands.tree(tmp_path_factory.mktemp("bands") / "cells")


@pytest.fixture(scope="module")
def five_runs(five, tmp_path_factory):
    """Pretraining, fine-tuning and probe; nothing may be written to them."""
    folder = tmp_path_factory.mktemp("runs")
    data = ["--data.root", five]
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


def test_what_the_runs_learned(five_runs):
    """The class is a channel's brightness, which five channels show and no composite of three need."""
    assert read(five_runs / "b" / "result.json")["top1"] >= 80
    found = read(five_runs / "p" / "probe.json")
    assert found["probe"]["top1"] > 40 and found["init"] == str(five_runs / "a")


def test_predict_needs_no_flag(five_runs, five, tmp_path):
    """The run's own classes and probabilities, from files alone."""
    assert call(["predict", "--init", five_runs / "b", five / "test", "--out", tmp_path / "p.csv"]) == 0
    own, found = predicted(five_runs / "b" / "predictions.csv"), predicted(tmp_path / "p.csv")
    assert len(found) == 15
    for path, row in own.items():
        mine = found[str(five / path)]
        assert mine["class"] == row["predicted"]
        assert float(mine["probability"]) == pytest.approx(float(row["probability"]), abs=1e-4)
