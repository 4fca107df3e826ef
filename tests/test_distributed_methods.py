"""Losses that see the whole batch, and the N-way layer: two processes are one, in values, gradients and whole runs."""

import json

import numpy as np
import pytest
import torch
from helpers import Together, distance, flags, inside, metrics, state
from test_distributed import ALONE
from test_resume import stop_at, where
from tiny import batch, make

from idmm.stages import read_outputs

SGD = {"train__optimizer": "sgd", "train__lr": 0.05}  # Adam would hide a factor in the gradient
LINEAR = {f"method__{key}": None for key in ("classifier", "classifier_init", "classifier_lr_scale")}
# the last of an epoch's steps has one image, so that one process has none
PAIR = dict(
    **ALONE, **SGD, **LINEAR, views__crops=[{"count": 2, "scale": [0.3, 1.0]}], train__accumulate=1,
    train__save_minutes=60, data__subset={"total": 43}, train__batch_size=21, train__epochs=3,
)  # fmt: skip
DINO = {"method__hidden_dim": 24, "method__dim": 12, "method__freeze_epochs": 0, "method__momentum": 0.9}
# 41 images in steps of 20: the last has one image, for two processes with three micro-batches
IDMM = dict(
    **ALONE, data__subset={"total": 41}, train__accumulate=3, train__epochs=3, train__save_minutes=60,
    method__cutmix_alpha=0, train__monitor_every=1, train__clip_grad=0.5,
)  # fmt: skip
METHODS = {
    "supcon": PAIR,
    # an epoch fills the queue: no key is lost; with seed 0 a ReLU of the head is so near its kink that rounding decides
    "mocov2": {**PAIR, "method__queue": 43, "method__momentum": 0.9, "seed": 1},
    "dino": {**PAIR, **DINO, "data__subset": {"total": 40}, "train__batch_size": 20},  # equal shares
}
NWAY = {
    "linear": {**IDMM, **SGD, **LINEAR, "train__accumulate": 1},
    "cosine": {**IDMM, **SGD, "train__clip_grad_mode": "tensor", "method__classifier_lr_scale": 1},
    "adamw": {**IDMM, "train__lr": 0.001, "train__save_minutes": 0},
}
RUNS = {**{name: {**run, "method__name": name} for name, run in METHODS.items()}, **NWAY}
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


GATHERING = """
import torch
from idmm import distributed
from idmm.losses.contrastive import info_nce
from idmm.methods.common import gather_batch

rank = distributed.rank()
assert distributed.world() == 2

def shares(counts, seed):
    whole = torch.randn(sum(counts), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return whole.requires_grad_(), whole.detach().split(counts)[rank].clone().requires_grad_()

def check(found, wanted, what):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what} {counts}: {text}")

for counts in ((3, 2), (2, 3), (4, 0), (0, 3), (1, 1)):
    factor = counts[rank] * 2 / sum(counts)  # the loop's, of this process's loss
    whole, mine = shares(counts, 0)
    rows = distributed.gather_rows(mine)
    assert torch.equal(rows, whole), counts
    labels = torch.arange(sum(counts))
    assert torch.equal(distributed.gather_rows(labels.split(counts)[rank]), labels)
    ((rows**3).sum() * factor).backward()
    (whole**3).sum().backward()
    check(mine.grad / 2, whole.grad.split(counts)[rank], "gather_rows")  # the mean over processes is yet to come

    (query, q), (key, k) = shares(counts, 1), shares(counts, 2)
    wanted = info_nce(query, key, 0.2)
    wanted.backward()
    image = {"weight": factor}  # a process without images has one at factor 0
    if not counts[rank]:
        q, k = (torch.ones(1, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = info_nce(*gather_batch(image, q, k), 0.2)
    check(loss, wanted, "info_nce")
    (loss * factor).backward()
    check(q.grad / 2, query.grad.split(counts)[rank] if counts[rank] else torch.zeros_like(q), "info_nce")

half = torch.ones(rank + 1, 2, dtype=torch.float16)
assert gather_batch({"weight": 1.0}, half)[0].dtype == torch.float32 and len(gather_batch({}, half)[0]) == 3
for own in gather_batch({"weight": 0.0}, half):
    assert len(own) == rank + 1, "none has images: each keeps its own"
print("gathered")
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
    (folder / "several.py").write_text(SCRIPT + GATHERING)
    with Together([folder / "several.py", folder / "commands.json"], folder / "err") as processes:
        assert processes.wait() == 0, processes.said()
        (folder / "said").write_text(processes.said())
    assert where(folder / "two-one") == PLACE
    assert inside("pretrain", folder / "two-one", **RUNS["adamw"]) == 0
    return folder


def assert_alike(one, two, tolerance):
    """Records and exported weights are the same, to float tolerance."""
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=2e-4), (key, a, b)
    assert distance(one, two) < tolerance


def assert_state_alike(one, two, tolerance):
    """So are all trained tensors, the optimizer's moments and the exported N-way rows."""
    assert_alike(one, two, tolerance)
    a, b = state(one), state(two)
    for name, tensor in a["method"].items():
        assert float((tensor - b["method"][name]).abs().max()) < tolerance, name
    for number, moments in a["optimizer"]["state"].items():
        for name, value in moments.items():
            assert float((value - b["optimizer"]["state"][number][name]).abs().max()) < 10 * tolerance, name
    assert np.abs(read_outputs.instances(one).weight - read_outputs.instances(two).weight).max() < tolerance


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(name, runs):
    same = assert_state_alike if name in NWAY else assert_alike
    same(runs / f"{name}-one", runs / f"{name}-two", 3e-4 if name == "adamw" else 1e-5)


@pytest.mark.parametrize("name", ["one-two", "two-one"])
def test_taken_up_on_another_number_of_processes(name, runs):
    assert_state_alike(runs / "adamw-one", runs / name, 3e-4)


def test_the_runs_moved(runs):
    """The equality above is not that of runs that stood still."""
    still = {**RUNS["supcon"], "train__lr": 1e-9, "train__epochs": 1}
    assert inside("pretrain", runs / "still", **still) == 0
    for name in METHODS:
        assert distance(runs / f"{name}-one", runs / "still") > (1e-3 if name != "dino" else 1e-5)


def test_gathered_rows_and_losses_of_them(runs):
    """What ``GATHERING`` asserts, in each process; MoCo v3's batch norms keep it from equality of whole runs."""
    said = (runs / "said").read_text()
    assert said.count("gathered") == 2 and said.count("2 processes, fp32") == len(RUNS) + 2


@pytest.mark.parametrize("name", ["simclr", "supcon", "mocov2", "mocov3", "dino"])
def test_a_micro_batch_without_an_image_is_no_nan(name):
    """If a step has fewer images than micro-batches, the rest run one image at factor 0, and 0 times NaN is NaN."""
    method = make(name)
    loss = method({**batch(2, images=1, double=False), "weight": 0.0}, 0, 0)["loss"]
    (loss * 0.0).backward()
    grads = [p.grad for p in method.parameters() if p.grad is not None]
    assert bool(torch.isfinite(loss)) and grads and all(float(grad.abs().max()) == 0 for grad in grads)
