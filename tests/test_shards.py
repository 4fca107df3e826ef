"""Rows of the N-way layer divided over two processes: losses, gradients, runs and checkpoints are one process's."""

import json
import shutil

import numpy as np
import pytest
import torch
from helpers import Together, distance, flags, inside, metrics, state
from test_distributed import ALONE
from test_resume import stop_at, where
from tiny import make

from idmm.distributed import Rows
from idmm.shards import own_states, row_shards, shard_processes, whole_states
from idmm.stages import artifacts

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
FUNCTIONS = """
import torch
from test_losses import naive
from idmm import config, distributed
from idmm.distributed import Rows
from idmm.losses.instance import instance_losses
from idmm.methods.idmm import InstanceClassifier
from idmm.optim import create_optimizer
from idmm.seeding import seeded
from idmm.shards import clip_gradients, own_states, row_shards, whole_states

rank = distributed.rank()
assert distributed.world() == 2

def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

def check(found, wanted, what):
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8, msg=lambda text: f"{what}: {text}")

for n, counts, mix, cosine in ((7, (3, 2), 1, 0), (7, (1, 4), 0, 1), (2, (2, 2), 1, 1), (9, (4, 1), 1, 1)):
    v, shard = sum(counts), Rows.mine(n)
    z, w, bias = (random(*s, seed=i).requires_grad_() for i, s in enumerate(((v, 3), (n, 3), (n,))))
    index = torch.randint(n, (2, v), generator=torch.Generator().manual_seed(4))
    lam = torch.linspace(0.2, 0.9, v, dtype=torch.float64) if mix else torch.ones(v)
    factors = (0.7, 0.0 if counts[1] == 1 else 1.6)  # the loop's, of each process's loss
    rows = torch.nn.functional.normalize(w, dim=1) if cosine else w
    total, at = 0.0, 0
    for count, factor in zip(counts, factors):
        own = slice(at, at + count)
        total = total + factor * naive(z[own], rows, index[0, own], index[1, own], lam[own], 0.1, bias)
        at += count
    wanted = torch.autograd.grad(total, (z, w, bias))
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    parts = [z.detach()[mine], w.detach()[shard.slice], bias.detach()[shard.slice]]
    parts = [part.clone().requires_grad_() for part in parts]
    mixed = index[1, mine] if mix else None
    losses = instance_losses(
        *parts[:2], index[0, mine], mixed, lam[mine], 0.1, bias=parts[2], cosine=cosine, shard=shard
    )
    (losses.mean() * factors[rank]).backward()
    check(parts[0].grad, wanted[0][mine], f"z {n} {counts}")  # the mean over processes is yet to come for the backbone
    for part, grad in zip(parts[1:], wanted[1:]):
        check(2 * part.grad, grad[shard.slice], f"rows {n} {counts}")  # and has been taken here

# rows, what is nearest, norms and states of the layer are those of one process
if True:
    for kind in ("linear", "cosine"):
        given = config.Method(classifier=kind)
        with seeded(1):
            layer = InstanceClassifier(11, 4, given)
        with seeded(1), distributed.alone():
            whole = InstanceClassifier(11, 4, given)
        assert torch.equal(layer.weight, whole.weight[layer.shard.slice]) and len(layer.weight) in (5, 6)
        features = random(11, 4, seed=7).float()
        layer.start_from(features), whole.start_from(features)
        assert torch.equal(layer.nearest(features), whole.nearest(features))
        for each in (False, True):
            for module in (layer, whole):
                for name, parameter in module.named_parameters():
                    full = random(11, *parameter.shape[1:], seed=len(name)).float()
                    parameter.grad = full[module.shard.slice].clone() if parameter.ndim else full.max()
            shards = row_shards(layer)
            assert set(shards) == {"weight"}
            clip_gradients(layer, 0.5, each, shards)
            with distributed.alone():
                clip_gradients(whole, 0.5, each, {})
            for name, parameter in layer.named_parameters():
                grad = whole.get_parameter(name).grad
                check(parameter.grad, grad[layer.shard.slice] if name in shards else grad, f"clipped {name}")
        # a whole state comes out and goes in again
        optimizers = []
        for module in (layer, whole):
            optimizers.append(create_optimizer(torch.nn.Linear(1, 1), {"x": (module, 1.0)}, config.Train(), 0.1))
            optimizers[-1].step()
        named = dict(layer.named_parameters())
        states = whole_states(layer.state_dict(), optimizers[0], named, shards)
        wanted = (whole.state_dict(), optimizers[1].state_dict())
        if rank == 0:
            check(states[0], wanted[0], "rows")
            check(states[1]["state"], wanted[1]["state"], "moments")
        back = own_states(*wanted, optimizers[0], named, shards)
        assert all(len(back[0][name]) == len(layer.weight) for name in shards)
        for moments in back[1]["state"].values():
            assert all(value.ndim == 0 or len(value) == len(layer.weight) for value in moments.values())
print("one")
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
    (folder / "several.py").write_text(SCRIPT + FUNCTIONS)
    with Together([folder / "several.py", folder / "commands.json"], folder / "err") as processes:
        assert processes.wait() == 0, processes.said()
        (folder / "said").write_text(processes.said())
    assert where(folder / "two-one") == PLACE
    shutil.copytree(folder / "two-one", folder / "two-cut")
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
    assert np.abs(artifacts.instances(one).weight - artifacts.instances(two).weight).max() < tolerance


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(name, runs):
    assert_one(runs / f"{name}-one", runs / f"{name}-two", 3e-4 if name == "adamw" else 1e-5)


@pytest.mark.parametrize("name", ["one-two", "two-one"])
def test_taken_up_on_another_number_of_processes(name, runs):
    assert_one(runs / "adamw-one", runs / name, 3e-4)


def test_functions_on_two_processes(runs):
    """What ``FUNCTIONS`` asserts, in each process."""
    assert (runs / "said").read_text().count("one\n") == 2


def test_the_state_is_whole_and_each_process_has_half(runs, monkeypatch):
    """Of W and of both moments of AdamW, which a process takes out of the state."""
    saved = state(runs / "two-cut")
    whole = [t for t in saved["optimizer"]["state"].values() if t["exp_avg"].shape == (41, 32)]
    assert saved["method"]["classifier.weight"].shape == (41, 32) and len(whole) == 1
    monkeypatch.setattr("idmm.distributed.world", lambda: 2)
    monkeypatch.setattr("idmm.distributed.rank", lambda: 1)
    method = make("idmm")
    assert row_shards(method) == {"classifier.weight": Rows(11, 5, 11)}
    assert method.classifier.weight.shape == (6, 16)


def test_one_process_divides_nothing():
    method = make("idmm")
    assert row_shards(method) == {} == shard_processes(method, None)
    optimizer = torch.optim.AdamW(method.parameters())
    found = whole_states(method.state_dict(), optimizer, dict(method.named_parameters()), {})
    assert own_states(*found, optimizer, dict(method.named_parameters()), {})[0].keys() == method.state_dict().keys()
    assert found[0]["classifier.weight"].data_ptr() == method.classifier.weight.data_ptr(), "no copy is made"
