"""A grid's folder with its jobs, and the runner that does one job after the other in this
process."""

import gc
import json
import re
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from idmm.config import parsing
from idmm.errors import Interrupted, RunError, UserError
from idmm.files import REWRITE, Json, idmm_version, read_json, write_json, write_text
from idmm.grid.config import GridConfig
from idmm.grid.plan import Cell, GridPlan, Job
from idmm.grid.status import Failure, cell_status, progress, read_failures
from idmm.progress import drawing, log
from idmm.runs.commands import finetune, pretrain, probe

DEATHS = 2  # of the process during a job, after which the job has failed
MEASURED = (
    "top1", "top1_interval", "top5", "mean_per_class", "knn", "largest_class", "baseline_top1",
    "baseline_train_size", "start_top1", "start_knn", "test_size", "test_groups", "seconds",
    "params", "backbone_params",
)  # fmt: skip
_FLAG = re.compile(r"--(?=[a-z]+\.)")  # of a section's key


class Grid:
    """A grid's folder: which jobs are finished, which failed.

    ``jobs/KEY.started`` has the number of starts of a job that did not end. It is left only if the
    process was killed. ``jobs/KEY.failed.json`` has a :class:`Failure`.
    """

    def __init__(self, config: GridConfig, plan: GridPlan):
        self.config = config
        self.plan = plan
        self.out = Path(config.out)
        self._logged = ""  # progress
        # a job continues in its folder, even if its title has changed
        for path in sorted((self.out / "runs").glob("*/*")):
            job = plan.jobs.get(path.name.rpartition("-")[2])
            if job is not None and path.is_dir():
                plan.jobs[job.key] = replace(job, folder=str(path.relative_to(self.out)))

    def start(self) -> None:
        """Write ``grid.yaml``, which marks the folder as a grid's, and ``cells.json`` for its
        status.

        Jobs that failed before are tried again.
        """
        folders: list[list[str | None]] = []
        for key in self.plan.cells.values():
            job = self.plan.jobs[key]
            start = self._start_of(job)
            folders.append([job.folder, start.folder if start else None])
        write_text(self.out / "grid.yaml", parsing.dump(self.config))
        write_json(self.out / "cells.json", {"cells": folders})
        for path in self.out.glob("jobs/*.failed.json"):
            path.unlink()

    def _start_of(self, job: Job) -> Job | None:
        """Return the pretraining that a job starts from."""
        if job.needs is None:
            return None
        return self.plan.jobs[job.needs]

    def finished(self) -> set[str]:
        """Return the keys of the jobs that have a result."""
        keys = set()
        for key, job in self.plan.jobs.items():
            if (self.out / job.folder / "result.json").exists():
                keys.add(key)
        return keys

    def failures(self) -> dict[str | None, Failure]:
        """Return the jobs of the plan that failed, by key."""
        failures = read_failures(self.out)
        return {key: failures[key] for key in failures if key in self.plan.jobs}

    def starts(self, key: str) -> int:
        """Return how often an unfinished job was started, or 0 if it is not running."""
        path = self.out / "jobs" / f"{key}.started"
        if path.exists():
            return int(path.read_text())
        return 0

    def remaining(self) -> list[Job]:
        """Return the jobs that are left and can still be done."""
        failures = self.failures()
        jobs = self.plan.remaining(self.finished())
        return [job for job in jobs if job.key not in failures and job.needs not in failures]

    def mark_failed(self, job: Job, error: str) -> None:
        """Mark a job, and so its cells, as failed until the command is repeated."""
        log.warning(f"{job.title} failed: {error}")
        failure = Failure(job.title, error, f"{job.folder}/log.txt")
        name = f"{job.key}.failed.json"
        with drawing(f"jobs/{name}", "written"):
            (self.out / "jobs" / f"{job.key}.started").unlink(missing_ok=True)
            write_text(self.out / "jobs" / name, json.dumps(asdict(failure)) + "\n")

    def log_progress(self) -> None:
        """Log the finished and failed cells, if they have changed."""
        text = progress(self.out)
        if text != self._logged:
            log.info(text)
        self._logged = text

    def result(self, job: Job | None) -> Json:
        """Return the content of a job's result.json, empty before it is finished."""
        if job is None:
            return {}
        file = self.out / job.folder / "result.json"
        if not file.exists():
            return {}
        return read_json(file, REWRITE)

    def results(self) -> Json:
        """Return the content of grid.json."""
        failures = self.failures()
        cells = [self._cell(cell, failures) for cell in self.plan.cells]
        labels = {}
        for name in ("source", "method", "backbone", "target"):
            labels[f"{name}s"] = list(dict.fromkeys(cell[name] for cell in cells))
        return {
            "version": idmm_version(),
            "protocol": self.config.target.protocol,
            **labels,
            "cells": cells,
        }

    def _cell(self, cell: Cell, failures: Mapping[str | None, Failure]) -> Json:
        job = self.plan.jobs[self.plan.cells[cell]]
        start = self._start_of(job)
        result = self.result(job)
        pretraining = self.result(start)
        failure = None
        if not result:
            failure = failures.get(job.key) or failures.get(job.needs)
        return {
            **vars(cell),
            "protocol": job.command,
            **{name: result.get(name) for name in MEASURED},
            "status": cell_status(bool(result), failure is not None),
            "error": failure and failure.error,
            "log": failure and failure.log,
            "folder": job.folder,
            "key": job.key,
            "pretrain_folder": start and start.folder,
            "source_size": pretraining.get("train_size"),
            "pretrain_seconds": pretraining.get("seconds"),
            "config": job.config,
            "pretrain_config": start and start.config,
        }


def attempt(grid: Grid, job: Job) -> str | None:
    """Run a job that is not finished, and return why it failed.

    Raises:
        Interrupted: Ctrl-C or another stop signal.
    """
    if grid.result(job):
        return None
    starts = grid.starts(job.key)
    if starts >= DEATHS:
        return f"its process died, {DEATHS} times: killed from outside, or too large for the memory"
    log.info(f"{job.command}: {job.title}")
    out = grid.out.absolute()
    config = {**job.config, "out": str(out / job.folder)}
    if job.needs is not None:
        config["init"] = str(out / grid.plan.jobs[job.needs].folder)
    started = out / "jobs" / f"{job.key}.started"
    with drawing(started.name, "written"):
        write_text(started, str(starts + 1))
    try:
        run_command(job.command, config)
        return None
    except Interrupted:
        raise
    except (UserError, RunError) as error:
        if not (out / job.folder / "log.txt").exists():  # else the run has logged it
            _log_error(out / job.folder, str(error))
        return _with_flags_of_grid(str(error), job)
    except Exception as error:  # the other jobs continue
        _log_error(out / job.folder, traceback.format_exc())
        return " ".join(f"{type(error).__name__}: {error}".split())
    finally:  # a kill leaves it
        with drawing(started.name, "removed"):
            started.unlink(missing_ok=True)


def _log_error(folder: Path, text: str) -> None:
    file = folder / "log.txt"
    with drawing("log.txt", "written"):
        before = file.read_text() if file.exists() else ""
        write_text(file, f"{before}{text}\n")


def _with_flags_of_grid(text: str, job: Job) -> str:
    """Return the error of a run in one line, with the flags as the grid takes them."""
    # a changed option is another job, so no new folder is needed
    text = " ".join(text.split()).removesuffix(", in a new --out")
    if job.command == "pretrain":
        return _FLAG.sub("--pretrain.", text)
    return _FLAG.sub("--finetune.", text)


def run(grid: Grid) -> None:
    """Run all jobs of a grid in this process, one after the other."""
    for job in grid.remaining():  # each after the one that it needs
        if job.needs in grid.failures():
            continue
        error = attempt(grid, job)
        gc.collect()  # else a step that ran out of memory may keep it
        if error is not None:
            grid.mark_failed(job, error)
        grid.log_progress()


def run_command(command: str, config: dict[str, Any]) -> None:
    """Run a job's command by its keys."""
    if command == "pretrain":
        pretrain(config)
    elif command == "finetune":
        finetune(config)
    else:
        probe(config)
