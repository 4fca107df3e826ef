"""A folder of five-channel 16-bit TIFFs goes through everything, with nothing but ``--data.in_chans 5`` added.

The commands are those of README; what is shorter here is the network and the training.
"""

import csv
import json
import re
import signal
import subprocess
import sys

import bands
import numpy as np
import onnx
import onnxruntime
import pytest
import tifffile
import timm
import torch
from helpers import ENVIRONMENT, ROOT, call, inside, same, start, state_file
from PIL import Image

import idmm
from idmm.data.cache import load_split
from idmm.data.composite import picture
from idmm.data.datasets import open_splits
from idmm.errors import UserError
from idmm.stages.artifacts import config_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:FutureWarning")]
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


def test_check(root, tmp_path, capsys):
    assert call(["data", "check", "--root", root, "--out", tmp_path / "check"]) == 0
    assert "5 channels" in capsys.readouterr().out


# ---------------------------------------------------------------------- what is kept
def test_what_the_runs_learned(runs):
    """The class is a channel's brightness, which five channels show and no composite of three need."""
    assert read(runs / "b" / "result.json")["top1"] >= 80
    found = read(runs / "p" / "probe.json")
    assert found["probe"]["top1"] > 40 and found["init"] == str(runs / "a")


@pytest.mark.parametrize(("run", "stem"), [("a", "backbone"), ("b", "backbone"), ("b", "model")])
def test_what_is_saved(runs, root, run, stem):
    """Channels, and mean, std and range of each as the training images have them."""
    saved = read(runs / run / f"{stem}.json")
    assert saved["channels"] == saved["kwargs"]["in_chans"] == 5
    assert [len(saved[name]) for name in ("mean", "std", "range")] == [5, 5, 5]
    images = [tifffile.imread(path) for path in (root / "train").rglob("*.tif")]  # [H, W, C], or [C, H, W] of pages
    images = np.stack([image if image.shape[2] == 5 else np.moveaxis(image, 0, 2) for image in images])
    low, high = np.array(saved["range"]).T
    ends = images.min((0, 1, 2)), images.max((0, 1, 2))
    assert (low >= ends[0]).all() and (low <= ends[0] + 1).all() and (high <= ends[1]).all()
    values = (images - low) / (high - low)  # [N, H, W, C]
    assert np.allclose(values.mean((0, 1, 2)), saved["mean"], atol=2e-3)
    assert np.allclose(values.std((0, 1, 2)), saved["std"], atol=2e-3)


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
    given = ["--tta", "--out", tmp_path / "t.csv"]
    assert call(["predict", "--init", runs / "b", root / "test", *given]) == 0
    assert predicted(tmp_path / "t.csv").keys() == found.keys()


def test_arrays_as_files_have_them(runs, root):
    """[H, W, C] of 16 bits, and floats of the same values; 8 bits are 0 to 255 of [0, 1]."""
    clf = idmm.load_classifier(runs / "b")
    image = bands.bands(1, 1000)
    path = root / "test" / bands.CLASSES[1] / "0.tif"
    wanted = clf.predict(path)
    for same_image in (image, image.astype(np.float32), image.astype(np.int32)):
        found = clf.predict(same_image)
        assert (found.label, found.path) == (wanted.label, None)
        assert found.probability == pytest.approx(wanted.probability, abs=1e-4)
    low, high = np.array(read(runs / "b" / "model.json")["range"]).T
    eight = np.rint(255 * np.clip((image - low) / (high - low), 0, 1)).astype(np.uint8)
    assert clf.predict(eight).probability == pytest.approx(wanted.probability, abs=0.02)
    features = idmm.embed(runs / "a", [path, image])
    assert np.allclose(features[0], features[1], atol=1e-4)


def test_other_channels_are_told_one_by_one(runs, root, tmp_path, capsys):
    folder = tmp_path / "mixed"
    bands.write(folder / "0.tif", bands.bands(0, 5))
    bands.write(folder / "2.tif", bands.bands(0, 5, channels=4))
    Image.fromarray(bands.bands(0, 5)[..., :3].astype(np.uint8)).save(folder / "3.png")
    out = tmp_path / "p.csv"
    assert call(["predict", "--init", runs / "b", folder, "--out", out]) == 0
    said = capsys.readouterr().err
    assert list(predicted(out)) == [str(folder / "0.tif")]
    assert "left out 2 of 3 images" in said
    for name, count in (("2.tif", 4), ("3.png", 3)):
        (line,) = (line for line in said.splitlines() if f"{name}:" in line)
        assert f"{count}" in line.partition(name)[2] and "5" in line.partition(name)[2], line
    clf = idmm.load_classifier(runs / "b")
    with pytest.raises(UserError, match="image 0: .*4.*5"):
        clf.predict([bands.bands(0, 5, channels=4)])


def test_embed_and_similar(runs, root, tmp_path):
    assert call(["embed", "--init", runs / "b", root / "test", "--out", tmp_path / "f.npz"]) == 0
    with np.load(tmp_path / "f.npz") as found:
        assert found["features"].shape == (15, 32) and np.isfinite(found["features"]).all()
    query = root / "test" / bands.CLASSES[0] / "0.tif"
    assert call(["similar", "--init", runs / "b", query, root / "test", "--out", tmp_path / "s.png"]) == 0
    assert np.asarray(Image.open(tmp_path / "s.png").convert("RGB")).std() > 5


# ---------------------------------------------------------------------- pictures
def test_report_and_explore_show_composites(runs, root, tmp_path):
    assert call(["report", runs / "a", runs / "b", "--out", tmp_path / "report"]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "No crops" not in page and page.count("What the network saw") == 2
    assert call(["explore", runs / "a", "--out", tmp_path / "explored"]) == 0
    assert (tmp_path / "explored" / "outliers.png").exists()
    config = config_of(runs / "a")
    store = load_split(open_splits(config.data, labelled=False).train, bound=None, data=config.data)
    seen = picture(store, 0)
    assert seen.shape == (24, 28, 3) and seen.dtype == np.uint8 and seen.min() == 0 and seen.max() == 255


# ---------------------------------------------------------------------- exports
def test_exports(runs, root, tmp_path):
    """ONNX and timm's folder give the run's own classes for prepared images [N, 5, S, S]."""
    out = {kind: tmp_path / name for kind, name in (("onnx", "m.onnx"), ("timm", "t"))}
    for kind, path in {**out, "hf": tmp_path / "h"}.items():
        assert call(["export", "--init", runs / "b", "--format", kind, "--out", path]) == 0
    clf = idmm.load_classifier(runs / "b")
    files = sorted((root / "test").rglob("*.tif"))
    batches = clf._network.file_batches(files, list(map(str, files)), 10**8, {})
    images = torch.cat([batch["images"] for batch in batches])  # [N, 5, 32, 32]
    wanted = clf.predict(files).probabilities

    session = onnxruntime.InferenceSession(str(out["onnx"]), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape[1:] == [5, 32, 32]
    found = [session.run(None, {"images": images.numpy()})[0]]
    found.append(timm.create_model(f"local-dir:{out['timm']}", pretrained=True).eval()(images).detach().numpy())
    for logits in found:
        assert np.allclose(torch.from_numpy(logits).softmax(1).numpy(), wanted, atol=1e-4)

    told = json.loads(onnx.load(out["onnx"]).metadata_props[0].value)
    saved = read(runs / "b" / "model.json")
    assert told["channels"] == 5 and told["range"] == saved["range"] and told["mean"] == saved["mean"]
    card = (out["timm"] / "README.md").read_text()
    assert "5 channels" in card and str(saved["range"][4][1]) in card and "Image.open" not in card


def python(path, n):
    """The n-th block of Python in a page."""
    return re.findall(r"(?s)```python\n(.*?)```", path.read_text())[n]


def test_documented_lines(runs, root, tmp_path):
    """Those of docs/export.md, as they stand there: the run's own classes and probabilities."""
    own = predicted(runs / "b" / "predictions.csv")
    assert call(["export", "--init", runs / "b", "--format", "onnx", "--out", tmp_path / "m.onnx"]) == 0
    (tmp_path / "a.py").write_text(python(ROOT / "docs" / "export.md", 1))
    files = [root / name for name in own]
    said = ran([tmp_path / "a.py", tmp_path / "m.onnx", *files])
    for line, row in zip(said.splitlines(), own.values(), strict=True):
        path, label, share = line.rsplit(",", 2)
        assert label == row["predicted"] and float(share) == pytest.approx(float(row["probability"]), abs=2e-3)


def ran(argv):
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------------- stopping
def test_killed_in_the_middle(root, tmp_path):
    """kill -9, then the same command: the same weights, mean and std as of the run that was never stopped."""
    own = dict(data__root=str(root), data__in_chans=5, data__subset=None)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert inside("pretrain", whole, **own) == 0
    with start("pretrain", cut, **own) as process:
        assert process.until(lambda: state_file(cut).exists()), process.said()
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (cut / "result.json").exists()
    assert inside("pretrain", cut, **own) == 0
    assert same(cut, whole)
    assert read(cut / "backbone.json") == read(whole / "backbone.json")
