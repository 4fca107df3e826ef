"""Runs of ``idmm train`` for a given time, one core each and two side by side, kept in results.json as they end."""

import concurrent.futures
import fnmatch
import json
import os
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

IDMM = str(Path(sys.executable).with_name("idmm"))
CORES = sorted(os.sched_getaffinity(0))[:2]


def add_flags(parser: ArgumentParser) -> None:
    """Adds the flags that :func:`make` reads."""
    parser.add_argument("--sets", type=Path, required=True, help="folder that small_sets.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", default=["*"], help="patterns of runs' names, for these alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run that would end later")
    parser.add_argument("--plan", action="store_true", help="list what is left")


def make(args, jobs: dict[str, dict], commands: Callable[[dict, Path], list[list]]) -> list[dict] | None:
    """Makes the runs that are left of ``jobs`` (by name; each has ``minutes``) in the order of the patterns.

    Returns:
        All that ended, each its job with ``top1`` and the like in percent and ``seconds`` of wall time, or with
        ``top1`` None and the line that says why there was not time enough; None where only the plan was asked for.
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
    began, todo, lock = time.monotonic(), iter(wanted), threading.Lock()

    def work(core: int) -> None:
        while True:
            with lock:
                name = next(todo, None)
            if name is None or time.monotonic() - began + 66 * jobs[name]["minutes"] > args.seconds:
                return
            record = {"run": name} | jobs[name] | _run(commands(jobs[name], args.out / name), args.out / name, core)
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
    """Makes a run on one core; RuntimeError: it ended in another way than well or for want of time."""
    began = time.monotonic()
    for command in commands:
        command = ["taskset", "-c", str(core), IDMM, *map(str, command)]
        with open(f"{place}.txt", "a") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            last = Path(log.name).read_text().splitlines()[-1]
            if "wanted at least" not in last:
                raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}, see {log.name}")
            return {"top1": None, "refused": last}
    result = json.loads((place / "result.json").read_text())
    found = {name: result.get(name) for name in ("top1", "pixel_knn", "largest_class", "test_size", "train_size")}
    kept = place / "train.json"
    if kept.exists() and (labelled := json.loads(kept.read_text()).get("pseudolabels")):
        found["alike"] = labelled["alike"]
    return found | {"seconds": round(time.monotonic() - began, 1)}
