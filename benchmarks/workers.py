"""Images a second of stage 1 on a CPU by loader workers and threads, for one run and for several beside each other.

    python benchmarks/workers.py --out workers.json

Workers make views on the cores that train. For each network and number of runs at once, all ways take turns in each
round, and what counts is the median over rounds of the ratio to 'workers 0': the images a second of all runs together.
A way has so many workers in each run and, of its cores, so many threads in each (0: torch's own choice, all cores).
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from reference import make_images
from side_by_side import head, ratios, row, turns, where, write

DIGITS = ["--config", "digits/pretrain"]
FAST = ["--config", "idmm_fast", "--train.batch_size", "32"]
NETS = {
    "small ViT, 32 px": DIGITS,
    "resnet10t, 64 px": [
        *FAST, "--model.name", "resnet10t", "--model.kwargs", "{channels: [32, 64, 128, 256]}", "--views.size", "64",
    ],
    "DeiT-Tiny, 112 px": [*FAST, "--model.name", "deit_tiny_patch16_224", "--views.size", "112"],
}  # fmt: skip


def train(argv: list[str], workers: int, threads: int, seconds: float, ready, rates) -> None:
    """Trains for so many seconds once all runs are ``ready``; puts the images a second into ``rates``."""
    import torch

    from idmm.config import PretrainConfig
    from idmm.config.parsing import parse
    from idmm.engine import Loop
    from idmm.stages.assemble import load_splits, resolve, session

    if threads:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as out:
        flags = ["--train.device", "cpu", "--data.workers", str(workers), "--out", f"{out}/run"]
        parts, notes = resolve(parse(PretrainConfig, [*argv, *flags], "workers"))
        (phase,) = parts.phases
        with session(parts, notes) as run:
            images = load_splits(parts, run.folder).train
            method, plan = parts.method(phase, parts.backbone(phase), len(images), None), parts.plan(phase, images, [])
            with contextlib.closing(Loop(run, method, plan).trial()) as steps:
                for _ in range(2 * workers + 2):  # what workers made while the first step warmed up
                    float(next(steps)[0])
                ready.wait()
                began, count = time.monotonic(), 0
                while time.monotonic() - began < seconds:
                    count += next(steps)[1]
                rates.put(count / (time.monotonic() - began))
                ready.wait()  # all others train until then
                sys.stderr.flush()
                os._exit(0)


def rate(argv: list[str], workers: int, threads: int, runs: int, seconds: float) -> float:
    """Returns the images a second of so many runs beside each other."""
    made = multiprocessing.get_context("fork")  # torch is imported once, and has no threads yet
    ready, rates = made.Barrier(runs), made.SimpleQueue()
    given = (argv, workers, threads, seconds, ready, rates)
    processes = [made.Process(target=train, args=given) for _ in range(runs)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        time.sleep(0.1)
        if any(process.exitcode for process in processes):
            ready.abort()  # the others would wait for it
    if any(process.exitcode for process in processes):
        sys.exit("a run failed, see above")
    return sum(rates.get() for _ in processes)


def main() -> None:
    """Prints the table, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=list(NETS), choices=NETS)
    parser.add_argument("--runs", nargs="*", type=int, default=[1, 2, 4], help="runs beside each other")
    parser.add_argument("--workers", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="one short round of one network, to see that it runs")
    parser.add_argument("--out", type=Path, help="a JSON file of all rounds")
    given = parser.parse_args()
    if given.quick:
        given.nets, given.runs, given.rounds, given.seconds = given.nets[:1], [1], 1, 1.0
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line has it
    import idmm.stages.assemble  # noqa: F401

    ways, found = list(itertools.product(given.threads, given.workers)), {}
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder) / "images", 256)
        os.environ["IDMM_CACHE"] = f"{folder}/cache"
        for net, runs in itertools.product(given.nets, given.runs):
            argv = NETS[net] + ([] if NETS[net] is DIGITS else ["--data.root", f"{folder}/images"])
            for _, (threads, workers) in turns(ways, given.rounds):
                one = rate([*argv, "--train.precision", "fp32"], workers, threads, runs, given.seconds)
                found.setdefault((net, runs), {}).setdefault((threads, workers), []).append(one)
                print(f"{net}, {runs} runs, threads {threads}, workers {workers}: {one:.1f}", file=sys.stderr)
    at = f"{where(packages=['torch'])}, fp32"
    print(f"{given.rounds} rounds of {given.seconds:g} s, {at}\n")
    print(head("network", "runs", *(f"{w} workers, {t or 'all'} threads" for t, w in ways)))
    for (net, runs), times in found.items():
        first = times[ways[0]]
        others = [f"{ratios(times[way], first).median:.2f}" for way in ways[1:]]
        print(row(net, runs, f"{statistics.median(first):.1f} images/s", *others))
    rows = [{"net": net, "runs": runs, "ways": ways, "rates": list(times.values()), "order": list(times)}
            for (net, runs), times in found.items()]  # fmt: skip
    write(given.out, where=at, seconds=given.seconds, rows=rows)


if __name__ == "__main__":
    main()
