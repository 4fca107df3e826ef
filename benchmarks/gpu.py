"""Rows of measurements for a GPU, in commands of at most four minutes. benchmarks/gpu.sh starts it.

    python benchmarks/gpu.py tests
    python benchmarks/gpu.py speed
    python benchmarks/gpu.py paper
    python benchmarks/gpu.py all --quick

Each row is a process of its own. OUT/PART/ROW.json has its command, its seconds and what it found,
and the status done, failed or unfinished. Repeat a command until no row remains. It skips rows that
are done. A row that had to stop is unfinished and starts again, trainings from their checkpoint.

With --quick the rows are tiny and run on a CPU.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from side_by_side import head, row

ROOT = Path(__file__).parents[1]
PARTS = ("tests", "speed", "paper")
GRACE = 20.0  # seconds to save a checkpoint in
SHORTEST = 25.0  # seconds that a row is started for
TESTS = ("test_gpu", "test_device_views", "test_cuda_paths")
SPEED = ("obvious fp32", "workers bf16", "idmm bf16", "step bf16", "views device", "idmm fp32")
COMPILED = ("idmm bf16 compiled", "step bf16 compiled", "views device compiled")
LOSSES = ("loss 2000", "loss 20000", "loss 2000 compiled", "loss 20000 compiled")
DRLOC = ("Swin-T", "T2T-ViT-14", "CvT-13")
QUICK = ("obvious fp32", "workers fp32", "idmm fp32", "step fp32", "views device", "loss 2000")


@dataclass(frozen=True)
class Row:
    """A measurement: its part, its name, and the command that makes it. ``found`` is the JSON file
    of its figures."""

    part: str
    name: str
    command: list[str]
    found: Path | None = None


def rows(part: str, out: Path, sets: Path, quick: bool) -> Iterator[Row]:
    """Yield the rows of a part, the most important ones first."""
    if part == "tests":
        flags = [
            "-q",
            "-W",
            "ignore",
            "-p",
            "no:cacheprovider",
            "-rs",
            *(["-k", "nway_loss or solarize"] if quick else []),
        ]
        for name in TESTS[:1] if quick else TESTS:
            yield Row(part, name, [sys.executable, "-m", "pytest", *flags, f"tests/{name}.py"])
    if part == "speed":
        flags = [
            "--device",
            "cuda",
            "--batch",
            "256",
            "--images",
            "2048",
            "--rounds",
            "2",
            "--seconds",
            "6",
        ]
        flags = ["--quick"] if quick else flags
        for label in QUICK if quick else (*SPEED, *COMPILED, *LOSSES):
            found = out / part / f"{_file_name(label)}.rates"
            argv = [
                sys.executable,
                "benchmarks/reference.py",
                *flags,
                "--folder",
                str(out / "speed_images"),
            ]
            yield Row(part, label, [*argv, "--out", str(found), "--rows", label], found)
        flags = (
            ["--device", "cpu", "--rounds", "1", "--batch", "1"]
            if quick
            else ["--device", "cuda", "--rounds", "8"]
        )
        # Table 14 of the drloc supplement. The overhead is in ``found``
        for network in DRLOC[:1] if quick else DRLOC:
            found = out / part / f"drloc-{network}.rates"
            argv = [
                sys.executable,
                "benchmarks/drloc_overhead.py",
                *flags,
                "--models",
                network,
                "--out",
                str(found),
            ]
            yield Row(part, f"drloc {network}", argv, found)
    if part == "paper":
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from miniature import photographs

        for run in photographs():
            results = out / part / "runs"
            argv = [
                sys.executable,
                "benchmarks/miniature.py",
                "--photographs",
                "--runs",
                run.name,
                "--sets",
                str(sets),
            ]
            argv += [
                "--out",
                str(out / "trainings"),
                "--results",
                str(results),
                *(["--tiny"] if quick else []),
            ]
            yield Row(part, run.name, argv, results / f"{run.name}.json")


def _file_name(name: str) -> str:
    return name.replace(" ", "-")


def make(one: Row, out: Path, limit: float) -> dict:
    """Run a row for up to ``limit`` seconds. Write its JSON file before and after, and return its
    content."""
    path = out / one.part / f"{_file_name(one.name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = load(path).get("seconds", 0.0)
    content = {"row": one.name, "command": one.command, "status": "unfinished", "seconds": before}
    path.write_text(json.dumps(content, indent=1) + "\n")  # also if this process is ended
    began = time.monotonic()
    log = path.with_suffix(".log")
    with open(log, "a") as file:
        process = subprocess.Popen(
            one.command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)  # a training saves its state
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    content["seconds"] = round(before + time.monotonic() - began, 1)
    content["printed"] = log.read_text().splitlines()[-8:]
    if one.found is not None and one.found.exists():
        content["found"] = json.loads(one.found.read_text())
    if code is not None:
        content["status"] = "failed" if code else "done"
        content["exit_code"] = code
    path.write_text(json.dumps(content, indent=1) + "\n")
    return content


def load(path: Path) -> dict:
    """Return the content of a row's JSON file, {} if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def table(part: str, out: Path, wanted: list[Row]) -> list[str]:
    """Return the rows so far as a Markdown table. Speed has images/s and the ratio to the first
    row."""
    lines = [head(part, "status", "seconds", "images/s", "ratio to the first row")]
    first = None
    for one in wanted:
        content = load(out / part / f"{_file_name(one.name)}.json")
        rates = content.get("found", {}).get("rates", {}).get(one.name)
        rate = ratio = ""
        if rates:
            rate = statistics.median(rates)
            first = first or rate
            ratio = f"{rate / first:.2f}"
            rate = f"{rate:.1f}"
        lines.append(
            row(
                one.name,
                content.get("status", "not begun"),
                content.get("seconds", ""),
                rate,
                ratio,
            )
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Make the rows that remain, and return 1 if one failed, 3 if rows remain."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--seconds", type=float, default=235.0, help="of this command")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for the rows")
    parser.add_argument(
        "--sets", type=Path, default=Path("sets"), help="folder that small_sets.py wrote"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny rows on a CPU, to see that all run"
    )
    args = parser.parse_args(argv)
    ends = time.monotonic() + args.seconds * (10 if args.quick else 1)
    out = args.out.resolve()
    sets = args.sets
    if args.quick:
        sets = out / "sets"
        tiny_set(sets / "windows")
    statuses = []
    for part in PARTS if args.part == "all" else [args.part]:
        wanted = list(rows(part, out, sets.resolve(), args.quick))
        for one in wanted:
            status = load(out / part / f"{_file_name(one.name)}.json").get("status")
            remaining = ends - time.monotonic() - GRACE
            if status != "done" and remaining >= SHORTEST:
                print(f"{part}: {one.name}", file=sys.stderr, flush=True)
                status = make(one, out, remaining)["status"]
            statuses.append(status)
        print("\n".join(table(part, out, wanted)), flush=True)
    if "failed" in statuses:
        return 1
    remaining_rows = sum(status != "done" for status in statuses)
    if remaining_rows:
        print(f"{remaining_rows} rows remain: repeat the command", file=sys.stderr)
    return 3 if remaining_rows else 0


def tiny_set(folder: Path) -> None:
    """Write a few images of two classes."""
    import cv2
    from views_speed import smooth_noise

    for number, image in enumerate(smooth_noise(24, 40, 48)):
        path = folder / ("train", "test")[number % 3 == 0] / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), image)


if __name__ == "__main__":
    sys.exit(main())
