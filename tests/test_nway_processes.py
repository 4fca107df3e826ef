"""The N-way layer on two processes: runs and checkpoints are those of one process."""

import json

import numpy as np
import pytest
from helpers import Together, distance, flags, inside, metrics, state
from test_distributed import ALONE
from test_resume import stop_at, where

from idmm.stages import read_outputs

# 41 images in steps of 20: the last has one image, for two processes with three micro-batches
RUN = dict(
    **ALONE, data__subset={"total": 41}, train__accumulate=3, train__epochs=3, train__save_minutes=60,
    method__cutmix_alpha=0, train__monitor_every=1, train__clip_grad=0.5,
)  # fmt: skip
SGD = {"train__optimizer": "sgd", "train__lr": 0.05}  # Adam would hide a factor in the gradient
LINEAR = {f"method__{key}": None for key in ("classifier", "classifier_init", "classifier_lr_scale")}
RUNS = {
    "linear": {**RUN, **SGD, **LINEAR, "train__accumulate": 1},
    "cosine": {
        **RUN,
        **SGD,
        "train__clip_grad_mode": "tensor",
        "method__classifier_lr_scale": 1,
    },
    "adamw": {**RUN, "train__lr": 0.001, "train__save_minutes": 0},
}
PLACE = (1, 1, 2)  # stage, epoch and step where runs are cut
SCRIPT = """
import json, sys
sys.path.insert(0, "tests")
import pytest
from test_resume import stop_at
from idmm.cli import main
for argv, place in json.load(open(sys.argv[1])):
    with pytest.MonkeyPatch.context() as patch:
        if place:
            stop_at(patch, *place)
        assert main(argv) == (130 if place else 0), argv
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every run on one process and, in one launch, on two; cut on one and taken up on two, and the other way."""
    folder, commands = tmp_path_factory.mktemp("runs"), []

    def command(out, name, place=None):
        commands.append((["pretrain", *flags("pretrain", out, **RUNS[name])], place))

    for name, changes in RUNS.items():
        assert inside("pretrain", folder / f"{name}-one", **changes) == 0
        command(folder / f"{name}-two", name)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, *PLACE)
        assert inside("pretrain", folder / "one-two", **RUNS["adamw"]) == 130
    command(folder / "one-two", "adamw")
    command(folder / "two-one", "adamw", PLACE)
    (folder / "commands.json").write_text(json.dumps(commands))
    (folder / "several.py").write_text(SCRIPT)
    with Together([folder / "several.py", folder / "commands.json"], folder / "err") as processes:
        assert processes.wait() == 0, processes.said()
    assert where(folder / "two-one") == PLACE
    assert inside("pretrain", folder / "two-one", **RUNS["adamw"]) == 0
    return folder


def assert_one(one, two, tolerance):
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=2e-4), (key, a, b)
    assert distance(one, two) < tolerance
    a, b = state(one), state(two)
    for name, tensor in a["method"].items():
        assert float((tensor - b["method"][name]).abs().max()) < tolerance, name
    for number, moments in a["optimizer"]["state"].items():
        for name, value in moments.items():
            assert float((value - b["optimizer"]["state"][number][name]).abs().max()) < 10 * tolerance, name
    assert np.abs(read_outputs.instances(one).weight - read_outputs.instances(two).weight).max() < tolerance


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(name, runs):
    assert_one(runs / f"{name}-one", runs / f"{name}-two", 3e-4 if name == "adamw" else 1e-5)


@pytest.mark.parametrize("name", ["one-two", "two-one"])
def test_taken_up_on_another_number_of_processes(name, runs):
    assert_one(runs / "adamw-one", runs / name, 3e-4)
