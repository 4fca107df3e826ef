"""Weights that were trained on other images: use them as they are, adapt them by pretraining, or start from scratch?

    python benchmarks/small_sets.py ... --out sets                                        the images, see there
    python benchmarks/adaptation.py --sets sets --out runs/adaptation                     the table, on test images

A small ViT learns the labels of a source (20 epochs on all its training images), as public weights did. IDMM adapts it
to 500 unlabelled training images of a target (configs/pretrain/adapt.yaml, and lr 2e-3 for 10 epochs). Then it is
fine-tuned on 10 labels per class (recipe fast). Compared with: the weights as they are, IDMM from scratch for the same
time, and no pretraining (recipe fast_scratch, three times the epochs).

The table has three seeds, which also draw the labelled images. The settings were chosen on held-out training images
(benchmarks/results/fine_tuning.md). Every run is an idmm command. Finished runs are in OUT/results.json: repeat the
command to resume, or to print the table. ``--minutes`` limits the time.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from side_by_side import head, mean_and_spread, row

NEAR, SAME = ("fashion 0-4", "fashion 5-9"), ("fashion 0-4", "fashion 0-4")  # classes of one set
PAIRS = (("fashion", "digits"), NEAR, SAME, ("photos", "stamps"), ("photos", "speech"), ("digits", "fashion"))
FLIPPED = {"digits": 0.0, "speech": 0.0}  # others: 0.5
SIDE, IMAGES, LABELS, SEEDS = 32, 500, 10, 3
FEWER = {"stamps": (460, 9)}  # of images in all, and of each class
VIT = {
    "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 2, "mlp_ratio": 2, "global_pool": "avg",
    "class_token": False, "weight_init": "jax",
}  # fmt: skip
MODEL = ["--model.name", "vit_tiny_patch16_224", "--model.kwargs", json.dumps(VIT), "--model.drop_path", 0]
COMMON = ["--data.workers", 0, "--train.precision", "fp32", "--train.device", "cpu"]
VIEWS = ["--views.size", SIDE, "--views.crops", "[{count: 2, scale: [0.35, 1.0]}]", "--views.jitter", "[0, 0, 0, 0]"]
VIEWS += ["--views.grey_prob", 0, "--views.blur_prob", 0]
IDMM = ["--train.batch_size", 32, "--train.weight_decay", 1e-3, "--train.warmup_epochs", 1, "--train.knn_every", 1000]
IDMM += ["--train.monitor_every", 1000, "--method.cutmix_alpha", 0, "--method.classifier", "cosine"]
IDMM += ["--method.classifier_lr_scale", 10, "--method.classifier_init", "features", "--model.drop_path", 0]
BASE = {"epochs": 10, "lr": 5e-4}
AS_IS, SCRATCH, NOTHING = "source's weights as they are", "IDMM from scratch", "no pretraining"
ROWS = {  # rows of the table, the recipe first
    "adapted: lr 5e-4, 30 epochs": {"epochs": 30},
    "adapted, lr 2e-3": {"lr": 2e-3},
    "adapted, lr 2e-3, layer_decay 0.7": {"lr": 2e-3, "layer_decay": 0.7},
}
SCRATCH_LR = 2e-3  # that of digits/pretrain, of the same model


class Runs:
    """The runs of the benchmark, each in a folder of ``out``. None starts after ``until``."""

    def __init__(self, sets: Path, out: Path, until: float):
        self.sets, self.out, self.until, self.file = sets, out, until, out / "results.json"
        self.results = json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self, name: str, argv: list) -> dict:
        """Run a command line and return its result, or that of an earlier run."""
        from idmm.cli import main

        if name not in self.results:
            if time.monotonic() > self.until:
                raise TimeoutError
            folder = self.out / name
            code = main([str(word) for word in [*argv, *COMMON, "--out", folder]])
            if code:
                raise SystemExit(f"{folder}: exit code {code}")
            self.results[name] = {"result": json.loads((folder / "result.json").read_text())}
            self.file.write_text(json.dumps(self.results))
        return self.results[name]

    def source(self, name: str) -> Path:
        """Learn a source's labels and return the run's folder."""
        argv = ["finetune", "--config", "fast_scratch", *MODEL, *self.images(name, 0), "--train.size", SIDE]
        self.run(run := _slug("source", name), [*argv, "--train.epochs", 20, "--train.eval_every", 20])
        return self.out / run

    def images(self, name: str, seed: int) -> list:
        """The flags of a set, or of some of its classes, and of a seed."""
        root, (whole, _, classes) = self.sets / name, name.partition(" ")
        if classes:
            root = self.out / "sets" / name
            first, last = map(int, classes.split("-"))
            for place in (Path(part, str(label)) for part in ("train", "test") for label in range(first, last + 1)):
                (root / place).parent.mkdir(parents=True, exist_ok=True)
                if not (root / place).exists():
                    (root / place).symlink_to((self.sets / whole / place).resolve())
        return ["--data.root", root, "--seed", seed]

    def adapted(self, source: str | None, target: str, label: str, seed: int, **settings) -> dict:
        """Pretrain on a target, from a source's weights or from scratch."""
        argv = ["pretrain", *self.images(target, seed), *VIEWS, "--views.flip", FLIPPED.get(target, 0.5), *IDMM]
        argv += ["--data.subset", json.dumps({"total": FEWER.get(target, (IMAGES,))[0]})]
        argv += ["--init", self.source(source)] if source else MODEL
        for key, value in {**BASE, **settings}.items():
            argv += [f"--train.{key}", value]
        return self.run(_name(source, target, label, seed), argv)

    def tuned(self, init: Path | None, target: str, label: str, source: str | None, seed: int) -> dict:
        """Fine-tune on a target's few labels, from weights or from scratch."""
        argv = ["finetune", "--config", "fast" if init else "fast_scratch", *self.images(target, seed)]
        argv += ["--init", init] if init else MODEL
        few = {"per_class": FEWER.get(target, (0, LABELS))[1], "seed": seed}
        argv += ["--data.subset", json.dumps(few), "--train.eval_every", 1000]
        argv += ["--train.size", SIDE, "--augment.flip", FLIPPED.get(target, 0.5)]
        return self.run(f"{_name(source, target, label, seed)}-tuned", argv)

    def both(self, source: str | None, target: str, label: str, seed: int, **settings) -> tuple:
        """Adapt, fine-tune and return both results."""
        first = self.adapted(source, target, label, seed, **settings)
        return first, self.tuned(self.out / _name(source, target, label, seed), target, label, source, seed)


def table(runs: Runs) -> str:
    """Return the table of test accuracies, for the finished runs."""
    found: dict[tuple, list[float]] = {}
    for source, target in PAIRS:
        for seed in range(SEEDS):
            try:
                measured = one(runs, source, target, seed)
            except TimeoutError:
                continue
            for name, values in measured.items():
                for column, value in zip(("kNN", "fine-tuned"), values, strict=True):
                    found.setdefault((name, source, target, column), []).append(value)
    lines = [head("pretraining", *(f"{a} → {b}: kNN / fine-tuned" for a, b in PAIRS))]
    for name in [AS_IS, *ROWS, SCRATCH, NOTHING]:
        columns = [[_mean(found.get((name, *pair, column), [])) for column in ("kNN", "fine-tuned")] for pair in PAIRS]
        lines.append(row(name, *(" / ".join(both) for both in columns)))
    return "\n".join(lines)


def one(runs: Runs, source: str, target: str, seed: int) -> dict[str, tuple]:
    """Return kNN and fine-tuned accuracy (percent, test images) of each row for a seed."""
    found = {}
    for label, settings in ROWS.items():
        first, second = runs.both(source, target, label, seed, **settings)
        found[label] = first["result"]["knn"], second["result"]["top1"]
    tuned = runs.tuned(runs.source(source), target, "as-is", source, seed)
    found[AS_IS] = first["result"]["start_knn"], tuned["result"]["top1"]
    first, second = runs.both(None, target, SCRATCH, seed, lr=SCRATCH_LR)
    found[SCRATCH] = first["result"]["knn"], second["result"]["top1"]
    found[NOTHING] = None, runs.tuned(None, target, NOTHING, None, seed)["result"]["top1"]
    return found


def _name(source: str | None, target: str, label: str, seed: int) -> str:
    return _slug(source or "none", target, label, str(seed))


def _slug(*parts: str) -> str:
    return "-".join("".join(c if c.isalnum() else "_" for c in part) for part in parts)


def _mean(values: list) -> str:
    return "–" if not values or None in values else mean_and_spread(values)


def main() -> None:
    """Run the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=Path, required=True, help="folder of the image sets")
    parser.add_argument("--out", type=Path, default=Path("runs/adaptation"), help="folder for the runs")
    parser.add_argument("--minutes", type=float, default=50.0, help="no run begins after so many minutes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(args.sets, args.out, time.monotonic() + 60 * args.minutes)
    try:
        print(table(runs))
    except TimeoutError:
        sys.exit("not finished: repeat the command to resume")


if __name__ == "__main__":
    main()
