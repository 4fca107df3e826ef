"""CONTRIBUTING.md's blocks in a copy of the code, and examples/tune_with_optuna.py on digits."""

import re
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

PLACE = re.compile(r"# (\S+?)(?:, (before|after|at the end) ?(.*))?\n")


def put(code, folder):
    """Puts a block of the page where its first line says."""
    file, how, line = PLACE.match(code).groups()
    block = code.partition("\n")[2]
    path = folder / file
    if how is None:
        path.write_text(block)
        return file
    text = path.read_text()
    if how == "at the end":
        path.write_text(f"{text}\n\n{block}")
        return file
    lines = text.splitlines(keepends=True)
    (number,) = [n for n, other in enumerate(lines) if other.strip().startswith(line)]
    lines.insert(number + (how == "after"), block)
    path.write_text("".join(lines))
    return file


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
    for name in ("idmm", "configs"):
        shutil.copytree(
            ROOT / name,
            house / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pretrain.py", "finetune.py"):
        shutil.copy(ROOT / name, house)
    blocks = re.findall(
        r"(?ms)^```(?:python|yaml)\n(.*?)^```$",
        (ROOT / "CONTRIBUTING.md").read_text(),
    )
    assert len([put(block, house) for block in blocks]) == 9

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


@pytest.mark.slow
def test_a_method_outside_the_package_trains(tmp_path):
    own = {"PYTHONPATH": str(ROOT), "OUT": str(tmp_path / "a"), "EPOCHS": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "own_method.py"],
        env={**ENVIRONMENT, **own},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "name: spread" in (tmp_path / "a" / "config.yaml").read_text()


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
