"""Losses that see the whole batch: two processes are one, in values, gradients and whole runs."""

import json

import pytest
import torch
from helpers import Together, distance, flags, inside, metrics, weights
from test_distributed import ALONE
from tiny import batch, make

# SGD: Adam would hide a factor in the gradient. The last of an epoch's steps has one image: one process has none.
RUN = dict(
    ALONE, method__classifier=None, method__classifier_init=None, method__classifier_lr_scale=None,
    views__crops=[{"count": 2, "scale": [0.3, 1.0]}], train__optimizer="sgd", train__lr=0.05, train__accumulate=1,
    train__save_minutes=60, data__subset={"total": 43}, train__batch_size=21, train__epochs=3,
)  # fmt: skip
DINO = {"method__hidden_dim": 24, "method__dim": 12, "method__freeze_epochs": 0, "method__momentum": 0.9}
RUNS = {
    "supcon": RUN,
    # an epoch fills the queue: no key is lost; with seed 0 a ReLU of the head is so near its kink that rounding decides
    "mocov2": {**RUN, "method__queue": 43, "method__momentum": 0.9, "seed": 1},
    "dino": {**RUN, **DINO, "data__subset": {"total": 40}, "train__batch_size": 20},  # equal shares
}


SEVERAL = """
import json, sys
from idmm.cli import main
assert all(main(argv) == 0 for argv in json.load(open(sys.argv[1])))
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
def both(tmp_path_factory):
    """All methods on one process, and on two in one launch."""
    folder = tmp_path_factory.mktemp("both")
    commands = []
    for name, changes in RUNS.items():
        assert inside("pretrain", folder / f"{name}-one", **changes, method__name=name) == 0
        commands.append(["pretrain", *flags("pretrain", folder / f"{name}-two", **changes, method__name=name)])
    (folder / "commands.json").write_text(json.dumps(commands))
    (folder / "several.py").write_text(SEVERAL + GATHERING)
    with Together([folder / "several.py", folder / "commands.json"], folder / "err") as processes:
        assert processes.wait() == 0, processes.said()
        assert processes.said().count("2 processes, fp32") == len(RUNS)
        (folder / "said").write_text(processes.said())
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_runs_on_two_processes(name, both):
    one, two = both / f"{name}-one", both / f"{name}-two"
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=2e-4), (key, a, b)
    start = weights(one)
    assert start and distance(one, two) < 1e-5, "of weights that moved by far more"


def test_the_runs_moved(both):
    """The equality above is not that of runs that stood still."""
    still = {**RUNS["supcon"], "train__lr": 1e-9, "train__epochs": 1}
    assert inside("pretrain", both / "still", **still, method__name="supcon") == 0
    for name in RUNS:
        assert distance(both / f"{name}-one", both / "still") > (1e-3 if name != "dino" else 1e-5)


def test_gathered_rows_and_losses_of_them(both):
    """What ``GATHERING`` asserts, in each process; MoCo v3's batch norms keep it from equality of whole runs."""
    assert (both / "said").read_text().count("gathered") == 2


@pytest.mark.parametrize("name", ["simclr", "supcon", "mocov2", "mocov3", "dino"])
def test_a_micro_batch_without_an_image_is_no_nan(name):
    """Where a step has fewer images than micro-batches, the rest run one image at factor 0, and 0 times NaN is NaN."""
    method = make(name)
    loss = method({**batch(2, images=1, double=False), "weight": 0.0}, 0, 0)["loss"]
    (loss * 0.0).backward()
    grads = [p.grad for p in method.parameters() if p.grad is not None]
    assert bool(torch.isfinite(loss)) and grads and all(float(grad.abs().max()) == 0 for grad in grads)


def test_fewer_images_than_micro_batches_in_a_run(tmp_path):
    changes = {**RUN, "train__accumulate": 3, "train__batch_size": 21, "method__name": "mocov2", "method__queue": 9}
    assert inside("pretrain", tmp_path / "run", **changes) == 0
