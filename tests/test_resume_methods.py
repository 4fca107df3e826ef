"""Methods with a state of their own (a queue, a teacher, a centre) go on after a kill as if nothing
had happened."""

import shutil

import pytest
import torch
from helpers import inside, inside_ok, metrics, same, state, state_file
from test_resume import stop_at, where

from idmm.methods.dino import DINO

IDMM_ONLY = dict.fromkeys(
    ("method__classifier", "method__classifier_init", "method__classifier_lr_scale")
)
# 5 steps an epoch, the last of 16 images; two passes a step; stochastic depth draws in each
PAIR = dict(IDMM_ONLY, views__crops=[{"count": 2, "scale": [0.3, 1.0]}], train__epochs=2)
RUNS = {
    "mocov2": {
        **PAIR,
        "method__queue": 33,
        "method__momentum": 0.9,
        "train__optimizer": "sgd",
        "train__lr": 0.05,
    },
    "mocov3": {
        **PAIR,
        "method__hidden_dim": 24,
        "method__dim": 12,
        "method__momentum": 0.9,
    },
    "dino": {
        **PAIR,
        "views__crops": None,
        "method__hidden_dim": 24,
        "method__dim": 12,
        "method__momentum": 0.9,
        "train__clip_grad": 0.5,
        "train__clip_grad_mode": "tensor",
        "train__weight_decay": 0.04,
        "train__weight_decay_end": 0.4,
    },
}
STATES = {  # what a checkpoint must hold beside trained weights
    "mocov2": ["loss.memory_bank.bank", "teacher."],
    "mocov3": ["teacher.", "head.layers.1.running_mean"],
    "dino": ["loss.center", "teacher."],
}


@pytest.fixture(scope="module", autouse=True)
def schedules():
    """DINO freezes its last layer for one of two epochs and warms up in both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("idmm.methods.dino.SHORT", 1)
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Runs that were never stopped, made as they are asked for."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    folders = {}

    def run(name):
        if name not in folders:
            folders[name] = folder / name
            inside_ok(
                "pretrain",
                folders[name],
                **RUNS[name],
                method__name=name,
                train__save_minutes=60,
            )
        return folders[name]

    return run


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Runs that were interrupted in their first epoch and again in mid of the second, to be
    copied."""
    folder = tmp_path_factory.mktemp("cut")
    folders = {}

    def run(name, to):
        if name not in folders:
            folders[name] = folder / name
            for place in (
                (0, 3),
                (1, 2),
            ):
                with pytest.MonkeyPatch.context() as patch:
                    stop_at(patch, 1, *place)
                    assert (
                        inside(
                            "pretrain",
                            folders[name],
                            **RUNS[name],
                            method__name=name,
                        )
                        == 130
                    )
                assert where(folders[name]) == (1, *place)
        return shutil.copytree(folders[name], to)

    return run


def assert_alike(out, whole):
    assert same(out, whole)
    assert metrics(out) == metrics(whole)
    one, other = (state(folder)["method"] for folder in (out, whole))
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name])


@pytest.mark.parametrize("name", RUNS)
def test_interrupted_twice_in_mid_epoch(name, uninterrupted, cut, tmp_path):
    out = cut(name, tmp_path / "run")
    inside_ok("pretrain", out, **RUNS[name], method__name=name)
    assert_alike(out, uninterrupted(name))


SPOILED = [(name, part) for name, parts in STATES.items() for part in parts]


@pytest.mark.parametrize("name, part", SPOILED)
def test_each_part_is_in_the_state_and_needed(name, part, uninterrupted, cut, tmp_path):
    out = cut(name, tmp_path / "run")
    saved = state(out)
    spoiled = [tensor for key, tensor in saved["method"].items() if key.startswith(part)]
    assert spoiled
    assert any(bool(tensor.any()) for tensor in spoiled)
    for tensor in spoiled:
        tensor.zero_() if tensor.is_floating_point() else None
    torch.save(saved, state_file(out))
    code = inside("pretrain", out, **RUNS[name], method__name=name)
    assert (
        code == 1
        or not same(out, uninterrupted(name))
        or metrics(out) != metrics(uninterrupted(name))
    )


def test_the_loop_tells_epochs_and_steps(tmp_path, monkeypatch):
    """Once a step whatever its passes, counted over the run; between the backward pass and the
    optimizer's step."""
    before = []
    after = []

    def before_step(method, epoch):
        before.append(
            (epoch, method.head.last_layer.parametrizations.weight.original1.grad is None)
        )
        original(method, epoch)

    original = DINO.before_step
    monkeypatch.setattr(DINO, "before_step", before_step)
    monkeypatch.setattr(DINO, "after_step", lambda method, step: after.append(step))
    inside_ok("pretrain", tmp_path / "run", **RUNS["dino"], method__name="dino")
    assert after == list(range(10))
    assert before == [(epoch, False) for epoch in (0, 1) for _ in range(5)]
