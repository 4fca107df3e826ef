"""CONTRIBUTING.md's blocks in a copy of the code, and the examples that use the Python API."""

import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import ENVIRONMENT, ROOT, read
from PIL import Image

from idmm.config import PretrainConfig
from idmm.config.parsing import build
from idmm.data.loaders import one_thread

sys.path.append(str(ROOT / ".ci"))
from lint_contributing import copy_with_blocks  # noqa: E402


def leaves(folder):
    """The dataset of the page: 24 images to train on, 8 to test on."""
    (folder / "images").mkdir(parents=True)
    for split, count in (("train", 24), ("test", 8)):
        rows = []
        for i in range(count):
            pixels = np.random.default_rng(i).integers(0, 255, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{split}{i}.png")
            rows.append(f"{split}{i}.png {('ash', 'oak')[i % 2]}\n")
        (folder / f"{split}.txt").write_text("".join(rows))


@pytest.mark.slow
def test_examples_train(tmp_path):
    """All three at once, as a newcomer would: a copy of the code, the page's blocks, the command
    line."""
    house = tmp_path / "house"
    assert len(copy_with_blocks(house)) == 9
    for name in ("pretrain.py", "finetune.py"):
        shutil.copy(ROOT / name, house)
    leaves(tmp_path / "data" / "leaves")
    data = [
        "--data.name",
        "leaves",
        "--data.root",
        tmp_path / "data",
        "--data.workers",
        "0",
    ]
    small = "--train.epochs 1 --train.batch_size 8 --train.device cpu --train.precision fp32"
    data += small.split()
    model = [
        "--model.name",
        "plainnet_4",
        "--model.kwargs",
        "{width: 8}",
        "--views.size",
        "32",
    ]
    first = tmp_path / "a"
    second = tmp_path / "b"
    run(
        house,
        "pretrain.py",
        "--config",
        "barlowtwins",
        *data,
        *model,
        "--out",
        first,
    )
    run(
        house,
        "finetune.py",
        "--init",
        first,
        *data,
        "--train.size",
        "32",
        "--out",
        second,
    )
    assert read(second / "result.json")["num_classes"] == 2
    assert read(second / "model.json")["name"] == "plainnet_4"


def run(house, *argv):
    # the copy's idmm, no other
    own = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=house,
        env=own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def example(name, out, **settings):
    """Runs an example in its own process. Returns its standard output."""
    own = {"PYTHONPATH": str(ROOT), "OUT": str(out), **settings}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        env={**ENVIRONMENT, **own},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_method_outside_the_package_trains(tmp_path):
    example("own_method.py", tmp_path / "a", EPOCHS="1")
    assert "name: spread" in (tmp_path / "a" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_backbone_outside_the_package_trains(tmp_path):
    assert "with 32 features" in example("own_backbone.py", tmp_path, EPOCHS="1")
    assert read(tmp_path / "fine-tuned" / "model.json")["name"] == "tiny_conv"


@pytest.mark.slow
def test_the_example_of_the_api_compares_two_runs(tmp_path):
    printed = example("train_predict_compare.py", tmp_path, MINUTES="0.1")
    for name in ("trained", "scratch"):
        result = read(tmp_path / name / "result.json")
        assert result["test_size"] == 360
        assert f"{name} {result['top1']:.1f} %, 95 % interval" in printed
    assert "only right by idmm.train: " in printed


def run_example(name, monkeypatch, **settings):
    for key, value in settings.items():
        monkeypatch.setenv(key, str(value))
    with one_thread():
        runpy.run_path(ROOT / "examples" / name)


@pytest.mark.slow
def test_tuning_keeps_the_best_trial_and_continues(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    for trials in (1, 2):
        run_example(
            "tune_with_optuna.py",
            monkeypatch,
            OUT=out,
            TRIALS=trials,
            EPOCHS=1,
        )
        printed = capsys.readouterr()
        assert printed.err.count("finished with value") == 1, "a finished trial is not repeated"
    assert "kNN on held-out training images: first trial" in printed.out
    assert str(out / "tuned.yaml") in printed.out
    tuned = build(PretrainConfig, out / "tuned.yaml")
    assert tuned.views.crops[0].scale[1] == 1.0
    assert 1e-4 <= tuned.train.lr <= 1e-2
    assert sorted(path.name for path in out.iterdir()) == [
        "study.db",
        "tuned.yaml",
    ]
