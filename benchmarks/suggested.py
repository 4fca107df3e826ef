"""Accuracy over the number of labels: those of random images, or of images by ``idmm suggest``.

    python benchmarks/held_out.py --packages . --sets sets    # writes the sets, see there
    python benchmarks/suggested.py --sets sets --out runs/suggested    # makes the remaining runs
    python benchmarks/suggested.py --table    # writes docs/data.md and docs/images/suggested.png

Both choices are made once, from no labels, among all training images of a set. Then they get their
classes and ``idmm train`` runs. Test images whose class has no label count as wrong. A seed drives
the choice and the training. The clock of a run counts the seconds of one core.
"""

import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from held_out import SETS, VIEWS
from side_by_side import commit, fill_page, head, read_runs, row, runs_parser, write_runs

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/data.md"
PICTURE = ROOT / "docs/images/suggested.png"
MARK = "<!-- suggested -->"
CHOICES = {"random": "random images", "suggested": "idmm suggest"}
PER_CLASS = (1, 2.5, 5, 10)  # labels in all, over classes
SEEDS = range(3)
MEAN = "mean of the five sets"


# ---------------------------------------------------------------------- the runs
def call(*argv: object) -> None:
    """Run a command of idmm. SystemExit: it was stopped or failed."""
    from idmm.cli import main as command

    if code := command(list(map(str, argv))):
        sys.exit(code)


def labels(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the lines of a list for ``data.labels``."""
    return [("path", "class"), *((name, name.split("/")[1]) for name in names)]


def make(name: str, choice: str, per_class: float, seed: int, sets: Path, out: Path) -> dict:
    """Choose images, label them, train on them and return the figures."""
    from idmm.files import read_csv, write_csv

    root = sets / name
    folder = out / f"{name}-{choice}-{per_class:g}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # of a stopped run
    folder.mkdir(parents=True)
    train = [str(path.relative_to(root)) for path in sorted(root.glob("train/*/*"))]
    tests = [str(path.relative_to(root)) for path in sorted(root.glob("test/*/*"))]
    count = round(per_class * len(list(root.glob("train/*"))))
    write_csv(folder / "labels.csv", labels(tests))
    flags = ["--data.labels", folder / "labels.csv", "--seed", seed, "--out"]
    chosen = np.random.default_rng(seed).permutation(train)[:count]
    if choice == "suggested":
        call("suggest", root, *flags, folder / choice, "--count", count)
        chosen = [line["path"] for line in read_csv(folder / choice / "to_label.csv")]
    write_csv(folder / "labels.csv", labels([*chosen, *tests]))
    flags += [folder / "run", "--data.cache_dir", folder / "cache", *VIEWS.get(name, [])]
    call("train", root, "--minutes", 1, *flags)
    result = json.loads((folder / "run/result.json").read_text())
    shutil.rmtree(folder)
    right = result["top1"] * result["test_size"]  # of the classes with a label
    made = {"set": name, "choice": choice, "per_class": per_class, "seed": seed, "labels": count}
    return {**made, "top1": round(right / len(tests), 2), "commit": commit()}


# ---------------------------------------------------------------------- table and picture
def table(top1: np.ndarray) -> str:
    """Return means over seeds, and how many random labels are as good, as Markdown.

    ``top1``: [seeds, sets, numbers of labels, choices].
    """
    lines = [head("labels per class", *(f"{k:g}" for k in PER_CLASS))]
    of_sets = [*top1.mean(axis=0), top1.mean(axis=(0, 1))]
    for title, values in zip([*SETS.values(), MEAN], of_sets, strict=True):
        random, suggested = values.T
        cells = map("{:.1f} to {:.1f} ({:+.1f})".format, random, suggested, suggested - random)
        lines.append(row(title, *cells))
    numbers = np.exp(np.interp(suggested, random, np.log(PER_CLASS)))
    cells = [f"{number:.1f}" for number in numbers[:-1]]  # the last is above all random ones
    lines.append(row("random labels per class for the same mean", *cells, ""))
    return "\n".join(lines)


def draw(top1: np.ndarray) -> None:
    """Draw the means of the sets over labels per class."""
    from idmm.report.charts import Point, accuracy_curves

    curves = {}
    for number, label in enumerate(CHOICES.values()):
        values = top1.mean(axis=1)[..., number]  # [seeds, numbers of labels]
        curves[label] = list(map(Point, PER_CLASS, values.mean(axis=0), values.std(axis=0, ddof=1)))
    ticks = {k: f"{k:g}" for k in PER_CLASS}
    axes = ("labels per class", "top-1 on the test images (%)")
    accuracy_curves({MEAN: curves}, PICTURE, axes, ticks, note="mean ± deviation, 3 seeds")


def main() -> None:
    """Make the remaining runs, or write the table and the picture."""
    args = runs_parser(__doc__, "suggested.json").parse_args()
    runs = read_runs(args.results)
    plan = list(itertools.product(SEEDS, SETS, PER_CLASS, CHOICES))
    if args.table:
        shape = (len(SEEDS), len(SETS), len(PER_CLASS), len(CHOICES))
        top1 = np.reshape([run["top1"] for run in runs], shape)
        fill_page(PAGE, MARK, table(top1))
        draw(top1)
        return
    time.monotonic = time.process_time
    for seed, name, per_class, choice in plan[len(runs) :]:
        runs.append(make(name, choice, per_class, seed, args.sets.resolve(), args.out.resolve()))
        write_runs(args.results, runs)


if __name__ == "__main__":
    main()
