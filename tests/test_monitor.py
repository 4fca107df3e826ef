"""The collapse and saturation monitor: its measures, what trips it in short real runs, and what
does not."""

import math

import numpy as np
import pytest
import torch
from helpers import column, inside, inside_ok, logged, metrics, same
from test_resume import lines, stop_at

from idmm.evaluation.monitor import FLOORS, effective_rank, spread

# A ViT that starts with features of some size, digits as large as they bear, nothing that hides a
# stroke.
PLAIN = {
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "global_pool": "avg",
    "class_token": False,
}
RUN = dict(
    method__classifier=None,
    method__classifier_init=None,
    method__classifier_lr_scale=None,
    train__accumulate=None,
    data__subset={"total": 200},
    train__batch_size=20,
    train__epochs=5,
    train__save_minutes=60,
    model__drop_path=0,
    model__kwargs={**PLAIN, "weight_init": "jax"},
    views__crops=[{"count": 2, "scale": [0.5, 1.0]}],
    views__flip=0,
    views__jitter=[0.4, 0.4, 0, 0],
    views__jitter_prob=0.5,
    views__grey_prob=0,
    views__blur_prob=0,
)
SMALL = dict(method__hidden_dim=64, method__dim=16)
# DINO with a target that holds still for the loss to fall
HEALTHY = {
    "idmm": {},
    "simclr": {},
    "dino": {**SMALL, "method__center_momentum": 0.99},
}
# SimCLR with its weights decayed away
COLLAPSE = {"method__name": "simclr", "train__weight_decay": 10.0, "train__lr": 0.05}


def ran(out, name, **changes):
    """Runs a method; returns its records and the warnings in its log."""
    inside_ok(
        "pretrain",
        out,
        **{
            **RUN,
            "method__name": name,
            **changes,
        },
    )
    return metrics(out), warnings(out)


def warnings(out):
    messages = []
    for line in logged(out).splitlines():
        _, warning, message = line.partition("WARNING ")
        if warning:
            messages.append(message)
    return messages


def test_measures_against_plain_forms():
    assert spread(torch.eye(4)[:1].repeat(5, 1)) < 1e-7
    assert effective_rank(torch.ones(5, 3)) == 0
    rows = np.random.default_rng(0).normal(size=(20, 6)) * [1, 1, 2, 4, 0.1, 3] + 2
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    variance = sum(np.mean([(u[d] - unit[:, d].mean()) ** 2 for u in unit]) for d in range(6))
    assert spread(torch.from_numpy(rows).float()) == pytest.approx(math.sqrt(variance), rel=1e-5)
    centred = rows - rows.mean(0)
    singular = np.sqrt(np.linalg.eigvalsh(centred.T @ centred))
    share = singular / singular.sum()
    assert effective_rank(torch.from_numpy(rows)) == pytest.approx(
        math.exp(-sum(p * math.log(p) for p in share))
    )


@pytest.mark.parametrize("name", HEALTHY)
def test_methods_learn_and_do_not_trip(name, tmp_path):
    """Bounds: two thirds of what was measured (feature_std 0.48 and more, rank 13.6, embedding_std
    0.28)."""
    records, messages = ran(tmp_path / "run", name, **HEALTHY[name])
    assert records[-1]["loss"] < records[0]["loss"] - 0.05
    for record in records:
        assert record["feature_std"] > 0.3
        assert record["feature_rank"] > 9
        assert record["embedding_std"] > 0.18
        assert ("instance_accuracy" in record) == (name == "idmm")
    for line in messages:
        assert not line.startswith("collapse")


def test_a_planted_collapse_is_said_once_also_after_a_resume(tmp_path, monkeypatch):
    """The best value before is that of an epoch before the interruption."""
    out = tmp_path / "run"
    stop_at(monkeypatch, 1, 2, 5)
    assert (
        inside(
            "pretrain",
            out,
            **{
                **RUN,
                **COLLAPSE,
                "train__save_minutes": 0,
            },
        )
        == 130
    )
    monkeypatch.undo()
    best = max(record["embedding_std"] for record in metrics(out))
    assert len(metrics(out)) == 2
    assert not [line for line in warnings(out) if "collapse" in line]
    inside_ok("pretrain", out, **{**RUN, **COLLAPSE})
    records = metrics(out)
    assert len(records) == 5
    assert max(record["embedding_std"] for record in records) == best
    assert records[-1]["embedding_std"] < 0.002
    (line,) = [line for line in warnings(out) if line.startswith("collapse")]
    assert line.startswith("collapse: embedding_std is ")
    assert f", {best:.3g} at best before: " in line


SHORT = dict(data__subset={"total": 40}, train__epochs=3)


def test_it_can_be_turned_off_and_changes_nothing(tmp_path):
    """Batch norms are left as they were."""
    watched, _ = ran(tmp_path / "on", "mocov3", **SHORT, **SMALL)
    alone, _ = ran(
        tmp_path / "off",
        "mocov3",
        **SHORT,
        **SMALL,
        train__monitor_every=0,
    )
    for record in watched:
        assert FLOORS.keys() <= record.keys()
    for record in alone:
        assert not FLOORS.keys() & record.keys()
    assert column(watched, "loss") == column(alone, "loss")
    assert same(tmp_path / "on", tmp_path / "off")


def test_features_that_are_not_finite_end_the_run(tmp_path, capsys):
    """The only step of the epoch had a finite loss and ruined the weights."""
    out = tmp_path / "run"
    changes = dict(SHORT, train__lr=1e20, train__warmup_epochs=0, train__batch_size=40)
    assert inside("pretrain", out, **{**RUN, **changes}) == 1
    assert lines(capsys)[-1] == (
        "the images' features are not finite. The last checkpoint is kept: lower --train.lr, "
        "set --train.clip_grad 1 or --train.precision fp32, in a new --out"
    )
    assert inside("finetune", out / "b", **{**changes, "train__lr": 1e30}) == 1
    assert lines(capsys)[-1].startswith("the network's outputs are not finite: lower --train.lr")
    assert not (out / "result.json").exists()
