"""Run the benchmarks in turn, each in a process of its own, and collect their tables.

    python benchmarks/run_all.py            # 'make bench'
    python benchmarks/run_all.py --quick    # 'make bench-quick': tiny models for a moment, to see
    that all runs

    reference   this project end to end, its step and its loader, against the obvious implementation
    scaling     the same batches on one process and on two
    views       crops and colours, against torchvision on Pillow images
    nway        time and memory of the N-way loss
    gpu         with --quick: the commands of benchmarks/gpu.sh, which measures a GPU

If a part fails or exceeds its time, the others still run and the exit code is 1. The folder --out
gets results.json, results.md with all tables, and NAME.log of each part. By default it is in
benchmarks/results, named by device and date. A quick run, whose figures mean nothing, writes to
runs/bench-quick.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
BENCHMARKS = {
    "reference": "reference",
    "scaling": "reference",
    "views": "views_speed",
    "nway": "nway",
}
# Flags of each part and its longest time (seconds)
PARTS = {
    "reference": (["--seconds", "15"], 1500),
    "scaling": (["--processes", "2", "--rows", "idmm fp32", "--rounds", "2"], 400),
    "views": ([], 120),
    "nway": (["--width", "192", "--rounds", "2"], 900),
}
TOTAL = 3300.0


def command(part: str, args, out: Path) -> list[str]:
    """Return the command of a part, which writes its JSON to ``out``."""
    if part == "gpu":
        return [
            sys.executable,
            str(ROOT / "benchmarks" / "gpu.py"),
            "all",
            "--quick",
            "--out",
            str(out.parent),
        ]
    argv = [sys.executable, str(ROOT / "benchmarks" / f"{BENCHMARKS[part]}.py"), "--out", str(out)]
    if args.quick:
        return [*argv, "--quick", *(["--processes", "2"] if part == "scaling" else [])]
    return [*argv, *PARTS[part][0]]


def run(argv: list[str], log: Path, seconds: float) -> tuple[int, str]:
    """Run a command for up to ``seconds``, with standard error in a file.

    Returns:
        Exit code (124: stopped) and standard output.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *_paths()]),
        "PYTHONUNBUFFERED": "1",
    }
    with open(log, "w") as file:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=file, text=True
        )
        try:
            code = None
            printed = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                # those of torchrun and of loaders lead groups of their own
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            code = 124
            printed = process.communicate()[0]
        file.write(printed)
    return process.returncode if code is None else code, printed


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def output_of(code: str) -> str:
    """Return the output of a line of Python, run in another process so that the GPU is free
    again."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *_paths()])
    environment = {**os.environ, "PYTHONPATH": paths}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def folder(where: str, args) -> Path:
    """Return the folder for the results, by device and date."""
    if args.out or args.quick:
        return args.out or ROOT / "runs" / "bench-quick"
    device = re.sub(r"\((R|TM)\)|CPU|Processor|@.*", "", where.partition(", torch")[0])
    name = "-".join(re.findall(r"[a-z0-9.]+", device.lower()))
    return ROOT / "benchmarks" / "results" / f"{name}-{datetime.now(UTC).date().isoformat()}"


def main() -> int:
    """Run all parts and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=[*PARTS, "gpu"], help="parts to run, by default all"
    )
    parser.add_argument("--seconds", type=float, help="for all parts together")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models for a moment, to see that all runs"
    )
    parser.add_argument("--out", type=Path, help="the folder for the results")
    args = parser.parse_args()
    ends = time.monotonic() + (args.seconds or TOTAL)
    where = output_of("import side_by_side; print(side_by_side.where())")
    out = folder(where, args)
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    pages = [f"# Speed on {where}\n"]
    for part in args.parts or [*PARTS, *(["gpu"] if args.quick else [])]:
        began = time.monotonic()
        limit = min(PARTS.get(part, ([], 900))[1], ends - began)
        with tempfile.TemporaryDirectory() as made:
            argv = command(part, args, Path(made) / "found.json")
            shown = " ".join(["python", *(f'"{a}"' if " " in a else a for a in argv[1:])]).replace(
                f"{ROOT}/", ""
            )
            shown = re.sub(r" --out \S+", "", shown)
            print(f"{part}: {shown}", file=sys.stderr, flush=True)
            code, printed = run(argv, out / f"{part}.log", max(1.0, limit))
            text = (
                (Path(made) / "found.json").read_text()
                if (Path(made) / "found.json").exists()
                else "null"
            )
        seconds = round(time.monotonic() - began, 1)
        note = {0: "", 124: f"STOPPED after {seconds:.0f} s\n\n"}.get(
            code, f"FAILED, exit code {code}\n\n"
        )
        if note:
            tail = "".join((out / f"{part}.log").read_text().splitlines(keepends=True)[-5:])
            print(f"{part}: {note.strip()}, {out}/{part}.log:\n{tail}", file=sys.stderr, flush=True)
        pages.append(f"## {part}\n\n    {shown}\n\n{note}{printed.strip()}\n")
        print(f"\n{pages[-1]}", flush=True)
        found[part] = {
            "command": shown,
            "exit_code": code,
            "seconds": seconds,
            "found": json.loads(text),
        }
        written = {"where": where, "quick": args.quick, "parts": found}
        # whole after each part
        (out / "results.json").write_text(json.dumps(written, indent=1) + "\n")
        (out / "results.md").write_text("\n".join(pages))
    print(f"{out}: results.json, results.md", file=sys.stderr)
    return 1 if any(part["exit_code"] for part in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
