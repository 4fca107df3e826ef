"""``idmm transfer status``: the progress of a grid."""

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from idmm.errors import UserError
from idmm.files import read_json, reading
from idmm.grid.config import StatusConfig

RESTART = "Delete it and repeat the grid's command, which writes it again"


@dataclass(frozen=True)
class Failure:
    """The record of a job that failed."""

    title: str
    error: str
    log: str  # path under the grid's folder


def read_failures(out: Path) -> dict[str, Failure]:
    """Return the failed jobs of a grid's folder, by key."""
    failures = {}
    for path in sorted(out.glob("jobs/*.failed.json")):
        with reading(path, RESTART):
            failures[path.name.partition(".")[0]] = Failure(**read_json(path, RESTART))
    return failures


def cell_status(is_finished: bool, has_failed: bool) -> str:
    """Return the status of a cell: ok, failed (its job or its pretraining did) or missing."""
    if is_finished:
        return "ok"
    if has_failed:
        return "failed"
    return "missing"


def progress(out: Path) -> str:
    """Return a line with the finished and failed cells of the grid that was started last in a
    folder."""
    failed = {str(Path(failure.log).parent) for failure in read_failures(out).values()}
    file = out / "cells.json"
    with reading(file, RESTART):
        cells = read_json(file, RESTART)["cells"]  # of each the folders of its job and pretraining
    counts: Counter[str] = Counter()
    for folders in cells:
        is_finished = (out / folders[0] / "result.json").exists()
        counts[cell_status(is_finished, not failed.isdisjoint(folders))] += 1
    if counts["failed"]:
        return f"grid: {counts['ok']} of {len(cells)} cells, {counts['failed']} failed"
    return f"grid: {counts['ok']} of {len(cells)} cells"


def status(config: StatusConfig) -> str:
    """Return the progress, the running and the failed jobs of a grid.

    Raises:
        UserError: The folder holds no grid.
    """
    out = Path(config.out)
    if not (out / "cells.json").exists():
        raise UserError.of("out", f"'{out}' holds no grid, expected the folder of a transfer run")
    lines = [progress(out)]
    running = set()
    for path in sorted(out.glob("jobs/*.started")):
        run = next(out.glob(f"runs/*/*-{path.stem}"), path)
        # else a kill came between the result and the removal of this file
        if not (run / "result.json").exists():
            running.add(run.name)
            with contextlib.suppress(FileNotFoundError):  # the job has just ended
                lines.append(f"  running, or killed: {run.name}, start {path.read_text()}")
    failures = read_failures(out).values()
    failed = {Path(failure.log).parent.name for failure in failures}
    begun = {path.parent.name for path in out.glob("runs/*/*/config.yaml")}
    finished = {path.parent.name for path in out.glob("runs/*/*/result.json")}
    for name in sorted(begun - finished - failed - running):
        lines.append(f"  stopped: {name}. Repeat the command to continue it")
    for failure in failures:
        lines.append(f"  failed: {failure.title}: {failure.error} ({out / failure.log})")
    if (out / "grid.md").exists():
        lines.append(f"  results so far: {out / 'grid.md'}")
    return "\n".join(lines)
