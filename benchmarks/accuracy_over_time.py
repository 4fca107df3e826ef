"""Accuracy over seconds: the baseline, training from scratch, pretraining, joint training
(docs/train.md).

    python benchmarks/small_sets.py ... --out sets                         the images, see there
    python benchmarks/accuracy_over_time.py --sets sets --out runs/over_time

Every run is ``idmm train`` on one core. Its budget of wall time includes imports, reading the
images, features and evaluation. Two runs share the machine. Budgets are 1 and 3 minutes on four
sets and 10 minutes on three, with 5 labels per class and with all, for three seeds. 'simclr' has
one seed, and two stages with SimCLR's loss and views. With 5 labels per class the seed also draws
the labelled images. All other images count as unlabelled: 'pretrain' and 'joint' give them
pseudo-labels. Finished runs are in ``results.json``. Repeat the command to resume, or to print the
table. ``--plan`` lists the remaining runs and their time.

``--runs 'fashion-5-10-*' ...`` selects runs by patterns of SET-LABELS-MINUTES-WAY-SEED, in that
order. Only there: speech, ten minutes on stamps, and 'self-training' (pseudo-labels from scratch,
with few labels).
"""

import argparse
import concurrent.futures
import fnmatch
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from side_by_side import head, mean_and_spread, row

from idmm.auto.plan import CONVNET

IDMM = str(Path(sys.executable).with_name("idmm"))
CORES = sorted(os.sched_getaffinity(0))[:2]
SETS = ("digits", "fashion", "photos", "stamps", "speech")
BUDGETS = {1.0: 4, 3.0: 4, 10.0: 3}  # minutes: on how many of the sets, without --runs
LABELS = {"5 labels a class": 5, "all labels": None}
# of each way, joint was taken out
SEEDS = {"scratch": 3, "self-training": 3, "pretrain": 3, "joint": 0, "simclr": 1}
FEW = ("self-training",)  # ways only with few labels, and only by name
OPTIONS = {
    "scratch": ["--way", "scratch", "--pseudolabel", "false"],
    "self-training": ["--way", "scratch"],
}
FIRST = 0.7  # of the time for stage 1
COLOURS = {"scratch": "#555555", "pretrain": "#0072b2", "joint": "#d55e00", "simclr": "#009e73"}
COLOURS |= {"self-training": "#cc79a7"}  # Okabe and Ito's
FLIPPED = {"digits": 0.0, "speech": 0.0}  # a mirrored digit or spectrogram is another sign or sound
JITTER = {"speech": 0.0}  # a louder one may be another, too


def jobs() -> list[dict]:
    """Return all runs, the shortest first, so that an interrupted plan can be compared."""
    found = []
    for minutes, seed, name in itertools.product(BUDGETS, range(max(SEEDS.values())), SETS):
        for labels in LABELS.values():
            ways = [
                way for way, seeds in SEEDS.items() if seed < seeds and (labels or way not in FEW)
            ]
            found += [
                dict(set=name, minutes=minutes, labels=labels, way=way, seed=seed) for way in ways
            ]
    return found


def standard(job: dict) -> bool:
    """Whether a run is made without ``--runs``."""
    return job["set"] in SETS[: BUDGETS[job["minutes"]]] and job["way"] not in FEW


def folder(job: dict) -> str:
    """Where a run writes to."""
    return "{set}-{labels}-{minutes:g}-{way}-{seed}".format(
        **{**job, "labels": job["labels"] or "all"}
    )


def commands(job: dict, images: Path, out: Path) -> list[list[str]]:
    """The commands of a run."""
    few = json.dumps({"per_class": job["labels"], "seed": job["seed"]}) if job["labels"] else None
    common = ["--data.root", images / job["set"], "--seed", job["seed"], "--data.workers", 0]
    flip = FLIPPED.get(job["set"], 0.5)
    if job["way"] != "simclr":
        labelled = ["--data.labelled", few] if few else []
        way = OPTIONS.get(job["way"], ["--way", job["way"]])
        flags = [*common, *labelled, *way, "--minutes", job["minutes"], "--flip", flip]
        return [["train", *flags, "--jitter", JITTER.get(job["set"], 0.4), "--out", out]]
    first = out / "stage1"
    share = FIRST * job["minutes"]
    model = ["--model.name", CONVNET["name"], "--model.kwargs", json.dumps(CONVNET["kwargs"])]
    size = 64 if job["set"] in ("stamps", "speech") else 32
    stage1 = ["--config", "simclr", *common, *model, "--views.size", size, "--views.flip", flip]
    stage2 = [
        "--config",
        "fast",
        *common,
        *(["--data.subset", few] if few else []),
        "--augment.flip",
        flip,
    ]
    return [
        ["pretrain", *stage1, "--train.minutes", share, "--out", first],
        ["finetune", *stage2, "--train.size", size, "--train.minutes", job["minutes"] - share]
        + ["--init", first, "--out", out],
    ]


def make(args: argparse.Namespace, jobs: dict[str, dict]) -> list[dict] | None:
    """Make the remaining runs of ``jobs`` (by name, each with its ``minutes``) in the order of the
    patterns.

    Returns:
        One record per finished run: its job, ``top1`` and the like in percent, ``seconds`` of wall
        time. If the time was too short, ``top1`` is None and ``refused`` has the error. None with
        --plan.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "results.json"
    records = json.loads(kept.read_text()) if kept.exists() else []
    done = {record["run"] for record in records}
    wanted = [name for pattern in args.runs for name in fnmatch.filter(jobs, pattern)]
    wanted = [name for name in dict.fromkeys(wanted) if name not in done]
    left = sum(jobs[name]["minutes"] for name in wanted) / len(CORES)
    print(f"{len(records)} runs are there, {len(wanted)} are left, {left:.0f} minutes", flush=True)
    if args.plan:
        print("\n".join(wanted))
        return None
    began = time.monotonic()
    todo = iter(wanted)
    lock = threading.Lock()

    def work(core: int) -> None:
        while True:
            with lock:
                name = next(todo, None)
            if name is None or time.monotonic() - began + 66 * jobs[name]["minutes"] > args.seconds:
                return
            record = (
                {"run": name}
                | jobs[name]
                | _run(commands(jobs[name], args.sets, args.out / name), args.out / name, core)
            )
            with lock:
                records.append(record)
                kept.write_text(json.dumps(records, indent=1) + "\n")
            said = record.get("refused") or f"{record['top1']:.1f} in {record['seconds']:.0f} s"
            print(f"{name}: {said}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(len(CORES)) as pool:
        for finished in [pool.submit(work, core) for core in CORES]:
            finished.result()
    return records


def _run(commands: list[list], place: Path, core: int) -> dict:
    """Make a run on one core. RuntimeError: it failed, and not for lack of time."""
    began = time.monotonic()
    for command in commands:
        command = ["taskset", "-c", str(core), IDMM, *map(str, command)]
        with open(f"{place}.txt", "a") as log:
            done = subprocess.run(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        if done.returncode:
            last = Path(log.name).read_text().splitlines()[-1]
            if "wanted at least" not in last:
                raise RuntimeError(
                    f"{' '.join(command)}: exit code {done.returncode}, see {log.name}"
                )
            return {"top1": None, "refused": last}
    result = json.loads((place / "result.json").read_text())
    found = {
        name: result.get(name)
        for name in ("top1", "baseline_top1", "largest_class", "test_size", "train_size")
    }
    kept = place / "train.json"
    if kept.exists() and (labelled := json.loads(kept.read_text()).get("pseudolabels")):
        found["alike"] = labelled["agreement"]
    return found | {"seconds": round(time.monotonic() - began, 1)}


# ---------------------------------------------------------------------- tables and pictures
def table(records: list[dict]) -> str:
    """Return mean and spread over seeds as Markdown: a row for a set, labels and minutes, a column
    for each way."""
    lines = [head("set", "labels", "minutes", "no network", *SEEDS)]
    cells: dict[tuple, dict[str, list[dict]]] = {}
    for record in sorted(
        records, key=lambda one: (one["set"], one["labels"] or 999, one["minutes"], one["seed"])
    ):
        key = record["set"], record["labels"] or "all", f"{record['minutes']:g}"
        cells.setdefault(key, {}).setdefault(record["way"], []).append(record)
    for key, ways in cells.items():
        floors = {
            r["seed"]: value for of in ways.values() for r in of if (value := _floor(r)) is not None
        }
        shown = [
            mean_and_spread(list(floors.values())),
            *(mean_and_spread([r["top1"] for r in ways.get(way, ())]) for way in SEEDS),
        ]
        lines.append(row(*key, *shown))
    return "\n".join(lines)


def _floor(record: dict) -> float | None:
    """Return the baseline's accuracy, or kNN on raw pixels in results of earlier versions."""
    return record.get("baseline_top1", record.get("pixel_knn"))


def draw(records: list[dict], name: str, path: Path) -> None:
    """Draw a set's accuracy over seconds, few labels and all. Bands reach from the worst seed to
    the best."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(LABELS), figsize=(10.5, 3.6), sharey=True, layout="constrained"
    )
    for axis, (title, labels) in zip(axes, LABELS.items(), strict=True):
        of = [record for record in records if record["set"] == name and record["labels"] == labels]
        for way in SEEDS:
            groups: dict[float, list[dict]] = {}
            for record in (record for record in of if record["way"] == way):
                groups.setdefault(record["minutes"], []).append(record)
            if points := [
                (statistics.mean(r["seconds"] for r in group), [r["top1"] for r in group])
                for _, group in sorted(groups.items())
            ]:
                seconds = [x for x, _ in points]
                axis.plot(
                    seconds,
                    [statistics.mean(y) for _, y in points],
                    "o-",
                    color=COLOURS[way],
                    label=way,
                )
                low, high = ([pick(y) for _, y in points] for pick in (min, max))
                axis.fill_between(seconds, low, high, color=COLOURS[way], alpha=0.15, linewidth=0)
        if floors := [value for record in of if (value := _floor(record)) is not None]:
            axis.axhline(
                statistics.mean(floors), color="black", linestyle=":", label="without a network"
            )
        axis.set(title=f"{name}, {title}", xscale="log", xlabel="seconds, everything counted")
        axis.set_xticks([60, 180, 600], ["60", "180", "600"])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("top-1 on test images (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Make the remaining runs, then write table.md, results.json and a picture for each set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=Path, required=True, help="folder that small_sets.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no run that would end later"
    )
    parser.add_argument("--plan", action="store_true", help="list the remaining runs")
    named = {folder(job): job for job in jobs()}
    usual = [name for name, job in named.items() if standard(job)]
    parser.add_argument(
        "--runs", nargs="+", default=usual, help="patterns of the names of the runs to make"
    )
    args = parser.parse_args()
    records = make(args, named)
    if records is None:
        return
    records = [record for record in records if record["top1"] is not None]
    text = table(records)
    (args.out / "table.md").write_text(text + "\n")
    for name in dict.fromkeys(record["set"] for record in records):
        draw(records, name, args.out / f"{name}.png")
    print(text)


if __name__ == "__main__":
    main()
