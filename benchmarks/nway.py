"""Time and memory of the N-way layer against the bare matrix products, from 2,000 images to
ImageNet's.

    python benchmarks/nway.py --out nway.json
    python benchmarks/nway.py --device cuda --out nway.json
    python benchmarks/nway.py --quick

A forward and a backward pass of two groups of views (a third and two thirds of them, as IDMM's
crops) in fp32 takes turns with its three matrix products: z W^T, its gradient times W, its
transpose times z. The table has the median of the rounds' ratios, in processor time with one thread
and in wall time otherwise. Memory is the increase over two steps with AdamW, divided by W, its
gradient and AdamW's two moments. On a CPU each measurement is a process of its own.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from side_by_side import head, ratios, row, turns, wait, where, write

ROWS = [
    (2_000, 512), (20_000, 512), (100_000, 512), (400_000, 512), (1_281_167, 1_536),
]  # fmt: skip
QUICK = [(60_000, 96)]
WAYS = ("linear", "cosine", "all at once")
ALL_AT_ONCE = 2**28  # logits, at most


@functools.cache
def _held():
    from idmm.losses import instance

    return instance.LOGITS_HELD, instance.GPU_HELD  # as runs have them


def layer(instances: int, width: int, way: str, device: str):
    """Return the N-way layer, as a run has it."""
    import torch

    from idmm import config
    from idmm.losses import instance
    from idmm.methods.idmm import InstanceClassifier

    usual = _held()
    instance.LOGITS_HELD, instance.GPU_HELD = (
        (ALL_AT_ONCE, ALL_AT_ONCE) if way == "all at once" else usual
    )
    torch.manual_seed(0)
    kind = "cosine" if way == "cosine" else "linear"
    return InstanceClassifier(instances, width, config.METHODS["idmm"](classifier=kind)).to(device)


def views(instances: int, width: int, count: int, device: str) -> list:
    """Return two groups of mixed crops, with features as their views."""
    import torch

    from idmm.methods.mixing import MixedCrops

    generator = torch.Generator().manual_seed(1)
    groups = []
    for size in (count // 3, count - count // 3):
        z = torch.randn(size, width, generator=generator).to(device).requires_grad_()
        own, other = torch.randint(instances, (2, size), generator=generator).to(device)
        groups.append(MixedCrops(z, own, other, 0.7))
    return groups


def measured_time(
    instances: int, width: int, count: int, way: str, device: str, rounds: int
) -> dict:
    """Return the seconds of the bare products, and the layer's as a multiple."""
    import torch

    module = layer(instances, width, way, device)
    groups = views(instances, width, count, device)
    w = module.weight.detach()
    z = torch.cat([group.views.detach() for group in groups])
    clock = (
        time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    )

    def bare() -> None:
        o = z @ w.T
        o @ w, o.T @ z

    def ours() -> None:
        module.zero_grad()
        module(*groups).backward()

    ways = {"bare": bare, "ours": ours}
    seconds = {"bare": [], "ours": []}
    for number, name in turns(list(ways), rounds + 1):
        began = clock()
        ways[name]()
        wait(device)
        if number:  # the first warms up
            seconds[name].append(clock() - began)
    return {
        "bare": statistics.median(seconds["bare"]),
        "ratio": ratios(seconds["ours"], seconds["bare"]).median,
    }


def measured_memory(instances: int, width: int, count: int, way: str, device: str) -> dict:
    """Return the bytes that two steps need, also as a multiple of W, its gradient and its
    moments."""
    import torch

    def two_steps(instances: int, count: int) -> None:
        module = layer(instances, width, way, device)
        groups = views(instances, width, count, device)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        for _ in range(2):
            module(*groups).backward()
            optimizer.step()
            optimizer.zero_grad()

    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # without earlier rows
    two_steps(8, 8)  # loads libraries
    before = _peak(device)
    two_steps(instances, count)
    needed = _peak(device) - before
    return {"bytes": needed, "over": needed / (16 * instances * width)}


def _peak(device: str) -> int:
    """Return the most memory that this process ever had (bytes)."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise OSError("VmHWM is not in /proc/self/status")


def measured(kind: str, *arguments) -> dict | str:
    """Measure in this process."""
    return {"time": measured_time, "memory": measured_memory, "here": here}[kind](*arguments)


def child(*arguments) -> dict | str:
    """Measure in another process and return the figures."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    environment = {"GOMP_SPINCOUNT": "1000", **os.environ}  # as the command line does
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    if found.returncode:
        raise SystemExit(found.stderr)
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, nargs="+", default=[192, 384])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--quick", action="store_true", help="a small layer and one round, to see that it runs"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured(*json.loads(args.child))))
        return
    sizes, rounds = (QUICK, 1) if args.quick else (ROWS, args.rounds)
    widths, ways = (args.width[:1], WAYS[:2]) if args.quick else (args.width, WAYS)
    measure = child if args.device == "cpu" else measured  # a GPU resets its count of memory
    at = measure("here", args.device)
    found = {"where": at, "rounds": rounds, "rows": []}
    print(f"{at}, median of {rounds} rounds\n")
    print(
        head(
            "images",
            "width",
            "views",
            "way",
            "bare products, s",
            "ratio",
            "MiB",
            "of W, gradient and moments",
        )
    )
    for width in widths:
        for instances, count in sizes:
            for way in ways:
                if way == "all at once" and instances * count > ALL_AT_ONCE:
                    continue
                one = {"images": instances, "width": width, "views": count, "way": way}
                one |= measure("time", instances, width, count, way, args.device, rounds)
                one |= measure("memory", instances, width, count, way, args.device)
                show(one, found, args.out)


def here(device: str) -> str:
    """Return device, threads and versions."""
    import torch

    return where(device, torch.get_num_threads(), ["torch"])


def show(of: dict, found: dict, out: Path | None) -> None:
    """Print a row of the table and write all rows so far."""
    found["rows"].append(of)
    write(out, **found)
    values = [
        f"{of['bare']:.4g}",
        f"{of['ratio']:.2f}",
        f"{of['bytes'] / 2**20:.0f}",
        f"{of['over']:.2f}",
    ]
    print(row(f"{of['images']:,}", of["width"], f"{of['views']:,}", of["way"], *values), flush=True)


if __name__ == "__main__":
    main()
