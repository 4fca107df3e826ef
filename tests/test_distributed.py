"""Two processes do what one does: the same images, losses, gradients, weights and checkpoints, for
every method."""

import json
import os
import re
import signal
from contextlib import closing

import pytest
import torch
from folders import tree
from frozen import NAME, a_run
from helpers import (
    Process,
    Together,
    distance,
    flags,
    inside,
    inside_ok,
    logged,
    metrics,
    read,
    same,
    state,
)
from test_resume import stop_at, where
from tiny import batch, make

from idmm.files import Lock, read_csv
from idmm.models import create_backbone
from idmm.seeding import seeded

TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
]
# A key's bias changes nothing: its gradient is rounding noise, which Adam scales to full steps. So
# models have none.
PLAIN = {
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "qkv_bias": False,
}
ALONE = dict(model__drop_path=0.0, model__kwargs=PLAIN)  # nothing may be drawn a process
# 41 images in batches of 20: the last step has one image, for two processes with three
# micro-batches
IDMM = dict(
    **ALONE,
    data__subset={"total": 41},
    train__accumulate=3,
    train__epochs=3,
    train__save_minutes=60,
    method__cutmix_alpha=0,
    train__monitor_every=1,
    train__clip_grad=0.5,
)
PRETRAIN = IDMM | {"train__epochs": 6}
NOISE = 3e-4  # a tenth of a step at full rate, which Adam may make of noise
SIDES = [{"size": 16}, {"size": 32, "batch_size": 8}]


def together(stage, out, **changes):
    """Starts a stage on two processes."""
    return Together([stage, *flags(stage, out, **changes)], f"{out}.err")


def torchrun(stage, out, **changes):
    """Starts a stage on two processes, with torchrun."""
    return Process(
        [*TORCHRUN, f"{stage}.py", *flags(stage, out, **changes)],
        f"{out}.err",
    )


def both(stage, folder, launch=together, **changes):
    """Runs a stage on one process and on two; returns the folders and what the two printed."""
    one = folder / "one"
    two = folder / "two"
    inside_ok(stage, one, **changes)
    with launch(stage, two, **changes) as processes:
        processes.succeed()
        return one, two, processes.said()


def assert_alike(one, two, tolerance=NOISE):
    """Records and exported weights are the same, to float tolerance."""
    assert_records_alike(one, two, 1e-4, 2e-4)
    assert distance(one, two) < tolerance


def assert_records_alike(one, two, relative, absolute):
    """Losses and accuracies are the same, to a tolerance."""
    for record, other in zip(metrics(one), metrics(two), strict=True):
        assert record.keys() == other.keys()
        for key, value in record.items():
            near = pytest.approx(other[key], rel=relative, abs=absolute)
            if key.startswith("top"):
                near = other[key]
            elif key == "feature_rank":  # it has four digits in the record
                near = pytest.approx(other[key], rel=relative, abs=max(absolute, 1.1e-4))
            assert value == near, (key, record, other)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return both(
        "pretrain",
        tmp_path_factory.mktemp("pretrained"),
        torchrun,
        **PRETRAIN,
    )


def test_pretrain_on_two_processes(pretrained):
    one, two, printed = pretrained
    assert_records_alike(one, two, 1e-5, 1e-12)
    assert_state_alike(one, two, NOISE)
    assert printed.count("images: 41 train of digits") == 1, "the first process speaks for both"
    assert re.search("training on cpu(:0)?, 2 processes, fp32", printed)
    assert logged(two).count("training on") == 1


def test_finetune_on_two_processes(tmp_path):
    """23 images in batches of 20, then of 8; 7 test images, so that the processes have 4 and 3; one
    epoch a stage."""
    root = tree(tmp_path / "images", train={"a": 12, "b": 11}, val={"a": 3, "b": 4})
    with seeded(0):
        model = create_backbone(NAME, 16, **PLAIN)
    init = a_run(tmp_path / "init", model=model, kwargs={**PLAIN, "img_size": 16})
    one, two, _ = both(
        "finetune",
        tmp_path,
        **ALONE,
        data__name="folder",
        data__root=root,
        data__subset=None,
        stages=SIDES,
        init=init,
        train__epochs=1,
        train__save_minutes=60,
        augment__mixup_alpha=0,
        augment__cutmix_alpha=0,
    )
    assert_records_alike(one, two, 1e-5, 1e-12)
    assert_alike(one, two)
    results = [read(out / "result.json") | {"seconds": 0} for out in (one, two)]
    assert results[0] == results[1]
    rows, others = (read_csv(out / "predictions.csv") for out in (one, two))
    for row, other in zip(rows, others, strict=True):
        probability = float(row.pop("probability"))
        assert probability == pytest.approx(float(other.pop("probability")), rel=1e-3)
        assert row == other


def test_stopped_and_taken_up_on_two_processes(pretrained, tmp_path):
    """SIGTERM to torchrun: one state is saved, two processes go on from it, and nothing shows in
    the result."""
    out = tmp_path / "run"
    _, whole, _ = pretrained
    with torchrun("pretrain", out, **PRETRAIN) as processes:
        records = out / "metrics.jsonl"
        assert processes.until(records.exists), processes.said()
        processes.popen.send_signal(signal.SIGTERM)
        assert processes.wait() != 0
        printed = processes.said()
    saved = state(out)
    position = f"from epoch {saved['epoch'] + 1}, step {saved['step']}"
    assert re.search(rf"(?m)^interrupted\. .* {position}$", printed)
    assert printed.count("interrupted") == 1
    assert not (out / "result.json").exists()
    with together("pretrain", out, **PRETRAIN) as processes:
        processes.succeed()
        assert f"resumes {position}" in processes.said()
    assert same(out, whole)
    assert_alike(out, whole)


def test_a_signal_to_one_of_two_processes_stops_both(tmp_path):
    out = tmp_path / "run"
    with together("pretrain", out, **PRETRAIN) as processes:
        first, other = processes.parts
        assert first.until((out / "metrics.jsonl").exists), processes.said()
        os.kill(other.popen.pid, signal.SIGUSR1)
        assert (first.wait(), other.wait()) == (130, 130), processes.said()
        assert processes.said().count("The same command resumes from") == 1
    assert state(out)["steps"]
    assert not (out / "result.json").exists()


def test_diverged_run_says_so_once(tmp_path):
    out = tmp_path / "run"
    diverging = PRETRAIN | {"train__lr": 1e20, "train__warmup_epochs": 0}
    with together("pretrain", out, **diverging) as processes:
        assert processes.wait() != 0
        printed = processes.said()
    assert printed.count("the loss is not finite at step 2 (epoch 1, lr ") == 1, printed
    assert "RunError" not in printed
    assert state(out)["step"] == 1


def test_run_in_use_is_left_alone(tmp_path):
    """Only the first process looks at the lock; the other hears of it, and one of them says so."""
    out = tmp_path / "run"
    with closing(Lock(out / "last" / "run.lock")) as lock:
        assert lock.acquire()
        with together("pretrain", out, **PRETRAIN) as processes:
            assert processes.wait() != 0
            printed = processes.said()
    line = f"out: '{out}' is in use by another run. Wait for it or name another folder"
    assert printed.count(line) == 1
    assert "UserError" not in printed
    assert not (out / "config.yaml").exists()


SGD = {
    "train__optimizer": "sgd",
    "train__lr": 0.05,
}  # Adam would hide a factor in the gradient
LINEAR = {
    f"method__{key}": None for key in ("classifier", "classifier_init", "classifier_lr_scale")
}
# the last of an epoch's steps has one image, so that one process has none
PAIR = dict(
    **ALONE,
    **SGD,
    **LINEAR,
    views__crops=[{"count": 2, "scale": [0.3, 1.0]}],
    train__accumulate=1,
    train__save_minutes=60,
    data__subset={"total": 43},
    train__batch_size=21,
    train__epochs=3,
)
DINO = {"method__hidden_dim": 24, "method__dim": 12, "method__momentum": 0.9}
METHODS = {
    "muon": IDMM | LINEAR | {"train__optimizer": "muon", "train__lr": 0.001},
    "supcon": PAIR | {"method__name": "supcon"},
    # a batch fills the queue: no key is lost; with seed 0 a ReLU of the head is so near its kink
    # that rounding decides
    "mocov2": PAIR
    | {
        "method__name": "mocov2",
        "data__subset": {"total": 42},
        "method__queue": 21,
        "method__momentum": 0.9,
        "seed": 1,
    },
    # equal shares
    "dino": PAIR
    | DINO
    | {
        "method__name": "dino",
        "data__subset": {"total": 40},
        "train__batch_size": 20,
    },
}
NWAY = {
    "linear": IDMM | SGD | LINEAR | {"train__accumulate": 1},
    "cosine": IDMM | SGD | {"train__clip_grad_mode": "tensor", "method__classifier_lr_scale": 1},
    "adamw": IDMM | {"train__lr": 0.001, "train__save_minutes": 0},
}
RUNS = METHODS | NWAY
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
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(counts), 5, dtype=torch.float64, generator=generator)
    return whole.requires_grad_(), whole.detach().split(counts)[rank].clone().requires_grad_()

def check(value, expected):
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)

for counts in ((3, 2), (2, 3), (4, 0), (0, 3), (1, 1)):
    factor = counts[rank] * 2 / sum(counts)  # the loop's, of this process's loss
    whole, mine = shares(counts, 0)
    rows = distributed.gather_rows(mine)
    assert torch.equal(rows, whole), counts
    labels = torch.arange(sum(counts))
    assert torch.equal(distributed.gather_rows(labels.split(counts)[rank]), labels)
    ((rows**3).sum() * factor).backward()
    (whole**3).sum().backward()
    # the mean over processes is yet to come
    check(mine.grad / 2, whole.grad.split(counts)[rank])

    (query, q), (key, k) = shares(counts, 1), shares(counts, 2)
    expected = info_nce(query, key, 0.2)
    expected.backward()
    image = {"weight": factor}  # a process without images has one at factor 0
    if not counts[rank]:
        q, k = (torch.ones(1, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = info_nce(*gather_batch(image, q, k), 0.2)
    check(loss, expected)
    (loss * factor).backward()
    check(q.grad / 2, query.grad.split(counts)[rank] if counts[rank] else torch.zeros_like(q))

half = torch.ones(rank + 1, 2, dtype=torch.float16)
assert gather_batch({"weight": 1.0}, half)[0].dtype == torch.float32
assert len(gather_batch({}, half)[0]) == 3
for own in gather_batch({"weight": 0.0}, half):
    assert len(own) == rank + 1, "none has images: each keeps its own"
print("gathered")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every run on one process and, in one launch, on two; cut on one and taken up on two, and the
    other way."""
    folder = tmp_path_factory.mktemp("runs")
    commands = []

    def command(out, name, place=None):
        commands.append((["pretrain", *flags("pretrain", out, **RUNS[name])], place))

    for name, changes in RUNS.items():
        inside_ok("pretrain", folder / f"{name}-one", **changes)
        command(folder / f"{name}-two", name)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, *PLACE)
        assert inside("pretrain", folder / "one-two", **RUNS["adamw"]) == 130
    command(folder / "one-two", "adamw")
    command(folder / "two-one", "adamw", PLACE)
    (folder / "commands.json").write_text(json.dumps(commands))
    (folder / "several.py").write_text(SCRIPT + GATHERING)
    with Together([folder / "several.py", folder / "commands.json"], folder / "err") as processes:
        processes.succeed()
        (folder / "printed").write_text(processes.said())
    assert where(folder / "two-one") == PLACE
    inside_ok("pretrain", folder / "two-one", **RUNS["adamw"])
    return folder


def assert_state_alike(one, two, tolerance):
    """So are all trained tensors, the optimizer's moments and the exported N-way rows."""
    assert_alike(one, two, tolerance)
    one = state(one)
    two = state(two)
    for name, tensor in one["method"].items():
        assert float((tensor - two["method"][name]).abs().max()) < tolerance, name
    for number, moments in one["optimizer"]["state"].items():
        for name, value in moments.items():
            other = two["optimizer"]["state"][number][name]
            assert float((value - other).abs().max()) < 10 * tolerance, name


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(name, runs):
    losses = [record["loss"] for record in metrics(runs / f"{name}-one")]
    assert abs(losses[-1] - losses[0]) > 1e-4, "it moved"
    compare = assert_state_alike if name in NWAY else assert_alike
    compare(
        runs / f"{name}-one",
        runs / f"{name}-two",
        NOISE if name in ("adamw", "muon") else 1e-5,
    )


@pytest.mark.parametrize("name", ["one-two", "two-one"])
def test_taken_up_on_another_number_of_processes(name, runs):
    assert_state_alike(runs / "adamw-one", runs / name, NOISE)


def test_gathered_rows_and_losses_of_them(runs):
    """What ``GATHERING`` asserts, in each process; MoCo v3's batch norms keep it from equality of
    whole runs."""
    printed = (runs / "printed").read_text()
    assert printed.count("gathered") == 2
    assert printed.count("2 processes, fp32") == len(RUNS) + 2


@pytest.mark.parametrize("name", ["simclr", "supcon", "mocov2", "mocov3", "dino"])
def test_a_micro_batch_without_an_image_is_no_nan(name):
    """If a step has fewer images than micro-batches, the rest run one image at factor 0, and 0
    times NaN is NaN."""
    method = make(name)
    loss = method({**batch(2, images=1, double=False), "weight": 0.0}, 0, 0)["loss"]
    (loss * 0.0).backward()
    assert bool(torch.isfinite(loss))
    gradients = [p.grad for p in method.parameters() if p.grad is not None]
    assert max(float(gradient.abs().max()) for gradient in gradients) == 0
