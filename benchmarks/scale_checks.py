"""The model's predictions against what is measured on this machine: the N-way layer on one process and on two.

Each measurement is a process of its own (two of them for the second table), with one thread. It first times what the
prediction is made of, on the shapes of the step, and then the step itself, in turns; medians count. On one process
times are the process's own; on two they are the wall clock's, so that a busy machine shows.

    products    the bare matrix products of a step, tile by tile as the loss takes them
    softmax     the least that can be done to each logit: logsumexp, and exp of what is left
    adam        torch's fused AdamW on W alone
    all-reduce  of a tensor of W's size, gather and reduce of the features
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WARM = 1


def high_water() -> int:
    """Returns the largest memory that this process had since it was last asked to forget it (bytes)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_high_water() -> int:
    """Makes :func:`high_water` count from here on; returns what this process has now (bytes)."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_turns(rounds: int, clock: Callable[[], float], **parts: Callable[[], object]) -> dict[str, float]:
    """Times each part in every round; returns medians (s)."""
    seconds = {name: [] for name in parts}
    for number in range(WARM + rounds):
        for name, work in parts.items():
            began = clock()
            work()
            if number >= WARM:
                seconds[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def classifier(n: int, d: int):
    """Returns IDMM's N-way layer as its recipe has it."""
    from idmm.config.methods import METHODS
    from idmm.methods.idmm import InstanceClassifier

    return InstanceClassifier(n, d, METHODS["idmm"]())


def warmed_up(views: int, d: int) -> None:
    """Makes a small step, so that what libraries load and keep is not taken for the step's memory."""
    import torch

    layer = classifier(2 * views, d)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    loss_of(layer, torch.randn(views, d, requires_grad=True), torch.arange(views)).backward()
    optimizer.step()


def loss_of(model, features, target):
    """Returns the loss of one group of mixed crops by ``model``: the layer, or what wraps it."""
    return model((features, target, target.flip(0), 0.7))


def tile(rows: int, views: int) -> int:
    """Returns the rows of W whose logits are made at a time on one thread, by idmm/losses/instance.py."""
    from idmm.losses.instance import CPU_TILE, TILE_VIEWS

    return min(rows, 2 * CPU_TILE // min(views, TILE_VIEWS))


def products(weight, features, gradient) -> None:
    """The bare products of a step: three, and once more the logits that are not kept for the backward pass."""
    from idmm.losses.instance import CPU_KEPT

    size, made = tile(len(weight), len(features)), 0
    for rows, of_rows in zip(weight.split(size), gradient.split(size), strict=True):
        logits = features @ rows.T  # [V, T]
        made += logits.numel()
        if made > CPU_KEPT:
            features @ rows.T
        logits @ rows
        of_rows.copy_(logits.T @ features)


def softmax(rows: int, views: int) -> None:
    """The least that can be done to the logits of so many rows of W: logsumexp, and exp of what is left."""
    import torch

    size = tile(rows, views)
    logits = torch.zeros(views, min(size, rows))
    for _ in range(0, rows, size):
        logits.sub_(logits.logsumexp(1, keepdim=True)).exp_()


def one(n: int, d: int, views: int, rounds: int) -> dict:
    """Measures a step of the N-way layer alone."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    features, target = torch.randn(views, d), torch.randint(n, (views,))
    warmed_up(64, d)
    start = forget_high_water()
    layer = classifier(n, d)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    optimizer.zero_grad()

    def step() -> None:
        z = features.clone().requires_grad_()
        loss_of(layer, z, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM + 1):
        step()
    peak = high_water() - start
    weight = layer.weight.detach()
    gradient = torch.empty_like(weight)

    def adam() -> None:
        layer.weight.grad = gradient
        optimizer.step()

    parts = {"products": lambda: products(weight, features, gradient), "softmax": lambda: softmax(n, views)}
    found = in_turns(rounds, time.process_time, step=step, adam=adam, **parts)
    return {"n": n, "d": d, "views": views, "peak": peak, **found}


def two(n: int, d: int, views: int, rounds: int, way: str) -> dict:
    """Measures a step of two processes, this being one: ``whole`` W in DistributedDataParallel, or ``sharded``."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mine = views // world
    features, target = torch.randn(mine, d), torch.randint(n, (mine,))
    from idmm import distributed

    with distributed.alone():
        warmed_up(64, d)
    start = forget_high_water()
    with distributed.alone() if way == "whole" else contextlib.nullcontext():
        layer = classifier(n, d)
    model = layer if way == "sharded" else torch.nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)

    def step() -> None:
        z = features.clone().requires_grad_()
        loss_of(model, z, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM + 1):
        step()
    peak = high_water() - start
    (weight,) = (p.detach() for p in layer.parameters())  # [N, d], or this rank's rows
    gradient = torch.empty_like(weight)
    all_rows = features if way == "whole" else features.repeat(world, 1)

    def adam() -> None:
        layer.weight.grad = gradient
        optimizer.step()

    def network() -> None:
        if way == "whole":
            dist.all_reduce(gradient)
            return
        dist.all_gather([torch.empty_like(features) for _ in range(world)], features)
        dist.all_reduce(torch.zeros(views), op=dist.ReduceOp.MAX)
        dist.all_reduce(torch.zeros(views, 4))
        dist.all_gather([torch.empty(mine, 4) for _ in range(world)], torch.zeros(mine, 4))
        dist.all_reduce(torch.zeros_like(all_rows))

    parts = {"step": step, "products": lambda: products(weight, all_rows, gradient), "adam": adam, "network": network}
    parts["softmax"], found = lambda: softmax(len(weight), len(all_rows)), {}
    for name, work in parts.items():  # with both at the same one
        dist.barrier()
        found |= in_turns(rounds, time.monotonic, **{name: work})
    dist.barrier()
    dist.destroy_process_group()
    return {"n": n, "d": d, "views": views, "way": way, "rank": rank, "peak": peak, **found}


def run(arguments: list[str], world: int = 1) -> dict:
    """Runs this file in ``world`` processes; returns what the first measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *arguments]
    address = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    address |= {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, env={**address, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    ended = [process.communicate() for process in started]
    if failed := [error for process, (_, error) in zip(started, ended, strict=True) if process.returncode]:
        sys.exit(f"{' '.join(arguments)}:\n{failed[0].decode()}")
    return json.loads(ended[0][0].decode().splitlines()[-1])


def compared(found: dict, ranks: int, sharded: bool) -> dict:
    """Adds the predictions: the sum of the timed parts, which do not overlap on these processors, and the memory of
    W, gradient, moments, features and logits."""
    from scale_model import Step

    from idmm.losses.instance import CPU_KEPT, CPU_TILE

    model = Step(found["n"], found["d"], found["views"], 1, ranks)
    seconds = sum(found.get(part, 0.0) for part in ("products", "softmax", "adam", "network"))
    memory, logits = model.states(sharded) + model.features(sharded), model.all_logits()
    memory += 4 * (logits if logits <= CPU_KEPT else CPU_KEPT + 2 * CPU_TILE)  # those kept, and a tile of the others
    return {**found, "predicted": seconds, "predicted_bytes": memory}


def checks(quick: bool, rounds: int) -> list[dict]:
    """Returns the measurements with their predictions, some N on one process and one N on two."""
    sizes = [(20_000, 192, 512)] if quick else [(20_000, 192, 512), (100_000, 192, 512), (400_000, 192, 512)]
    sizes += [] if quick else [(100_000, 384, 512), (100_000, 192, 1536)]
    found = []
    for n, d, views in sizes:
        given = ["--n", str(n), "--d", str(d), "--views", str(views), "--rounds", str(rounds)]
        found.append({"way": "one process", **compared(run([*given, "--way", "one"]), 1, False)})
    for n, d, views in sizes[:1] if quick else [(100_000, 192, 512), (200_000, 192, 512)]:
        for way in ("whole", "sharded"):
            given = ["--n", str(n), "--d", str(d), "--views", str(views), "--rounds", str(rounds), "--way", way]
            found.append(compared(run(given, 2), 2, way == "sharded"))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("one", "whole", "sharded"), required=True)
    for name in ("n", "d", "views", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    sizes_ = (given.n, given.d, given.views, given.rounds)
    print(json.dumps(one(*sizes_) if given.way == "one" else two(*sizes_, given.way)))
