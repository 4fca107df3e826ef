"""Where the seconds go between a command and its first step.

    python benchmarks/startup.py --out startup.json

Both stages on scikit-learn's digits, with a small vision transformer and with a narrow resnet10t at 64 px,
each run a process of its own that ends after its first step:

    imports       torch, timm and this project's modules
    images        reading and decoding, or finding them decoded
    model         building the network, and trying it at the run's sizes
    features      those that the N-way layer starts from
    precision     timing fp32 against bf16
    estimate      timing steps, for the log
    first step    loading its batch, forward, backward, and the optimizer's first step
    other         flags, the run's folder, the log, the optimizer

The first run of a row finds an empty cache folder, the one after it what the first left there: what was timed is not
timed again. Each cell has processor seconds, which other work on the machine changes little, and in brackets those of
the clock; medians over ``--rounds``, in which all rows take turns.
"""

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

from side_by_side import head, row, turns, where, write

PARTS = ("imports", "images", "model", "features", "precision", "estimate", "first step", "other")
NET = ["--model.name", "resnet10t", "--model.kwargs", "{channels: [32, 64, 128, 256]}"]
ROWS = {  # stage and flags
    "pretrain, small ViT": ("pretrain", ["--config", "digits/pretrain"]),
    "pretrain, resnet10t": ("pretrain", ["--config", "idmm_fast", *NET, "--views.size", "64"]),
    "finetune, small ViT": (
        "finetune", ["--config", "digits/finetune", "--model.name", "vit_tiny_patch16_224", "--model.kwargs",
                     "{patch_size: 8, embed_dim: 64, depth: 3, num_heads: 2, mlp_ratio: 2}"],
    ),
    "finetune, resnet10t": ("finetune", ["--config", "fast_scratch", *NET, "--train.size", "64"]),
}  # fmt: skip


# ---------------------------------------------------------------------- one run
class Watch:
    """Adds up what each part takes, without what other parts take inside it; all begins with the process."""

    def __init__(self):
        self.spent = {part: [0.0, 0.0] for part in PARTS}
        self.inside, self.last = ["other"], (0.0, 0.0)

    def turn(self) -> None:
        """Counts the time since the last call for the part that goes on."""
        from idmm.cli import _age

        now = (time.process_time(), _age())
        for kind in range(2):
            self.spent[self.inside[-1]][kind] += now[kind] - self.last[kind]
        self.last = now

    @contextlib.contextmanager
    def counting(self, part: str):
        """Counts what the block takes for ``part``."""
        self.turn()
        self.inside.append(part)
        try:
            yield
        finally:
            self.turn()
            self.inside.pop()

    def wrap(self, owner, name: str, part: str) -> None:
        """Counts what a function takes for ``part``."""
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            with self.counting(part):
                return function(*args, **kwargs)

        setattr(owner, name, counted)


class Done(BaseException):
    """The first step is made."""


def _watch(watch: Watch, module, stage: str) -> None:
    """Has the parts of a run counted, once torch is there; its first step ends it."""
    from idmm import engine, session
    from idmm.stages import assemble

    watch.wrap(module, "load_splits", "images")
    watch.wrap(assemble.Assembly, "check_sizes", "model")
    watch.wrap(assemble.Assembly, "backbone", "model")
    watch.wrap(session, "choose_precision", "precision")
    for name in ("time_training", "say_estimate"):
        watch.wrap(engine, name, "estimate")
    if stage == "pretrain":
        watch.wrap(module, "_features", "features")
    made = engine.Loop._step

    def step(loop, *args):
        with watch.counting("first step"):
            made(loop, *args)
        raise Done

    engine.Loop._step = step


def first_step(stage: str, argv: list[str]) -> dict[str, list[float]]:
    """Runs a command line to its first step; returns the processor seconds and seconds of each part."""
    from idmm import cli

    watch = Watch()

    def imported(name: str):  # what a command does last before it runs
        with watch.counting("imports"):
            module = importlib.import_module(name)
        _watch(watch, module, stage)
        return module

    cli.importlib = types.SimpleNamespace(import_module=imported)
    try:
        cli.main([stage, *argv], stage)
    except Done:
        return watch.spent
    sys.exit("the run ended before its first step")


# ---------------------------------------------------------------------- all of them
def measured(name: str, device: str, cache: str, folder: str) -> dict[str, list[float]]:
    """Returns what :func:`first_step` found in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, __file__, "--measure", name, "--device", device, "--out", f"{out}/run"]
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "IDMM_CACHE": cache})
    if ran.returncode:
        sys.exit(f"{name}:\n{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    """Prints the table, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="one round of one row, to see that it runs")
    parser.add_argument("--measure", choices=ROWS, help="one run alone")
    parser.add_argument("--out", type=Path, help="a JSON file of all rounds; with --measure the run's folder")
    given = parser.parse_args()
    if given.measure:
        stage, flags = ROWS[given.measure]
        flags = [*flags, "--train.device", given.device, "--out", str(given.out)]
        print(json.dumps(first_step(stage, flags)), flush=True)
        os._exit(0)  # loader workers need not be waited for
    rows, rounds = (given.rows[:1], 1) if given.quick else (given.rows, given.rounds)
    found = {f"{name}, {when}": [] for name in rows for when in ("first", "again")}
    with tempfile.TemporaryDirectory() as folder:
        for _, name in turns(rows, rounds):
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                for when in ("first", "again"):
                    found[f"{name}, {when}"].append(measured(name, given.device, cache, folder))
    at = where(given.device)
    print(f"seconds of the processor (of the clock), medians of {rounds} rounds, {at}\n")
    print(head("run", *PARTS, "all"))
    for name, times in found.items():
        each = [[[one[part][kind] for part in PARTS] for one in times] for kind in range(2)]
        cells = [[statistics.median(values) for values in zip(*kind, strict=True)] for kind in each]
        whole = [statistics.median(map(sum, kind)) for kind in each]
        shown = [f"{a:.1f} ({b:.1f})" for a, b in zip([*cells[0], whole[0]], [*cells[1], whole[1]], strict=True)]
        print(row(name, *shown))
    write(given.out, where=at, rounds=found)


if __name__ == "__main__":
    main()
