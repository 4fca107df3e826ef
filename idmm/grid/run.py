"""A grid's folder with its jobs, and the runner that does one job after the other in this
process."""

import gc
import json
import re
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from idmm.config import parsing
from idmm.errors import Interrupted, RunError, UserError
from idmm.files import REWRITE, idmm_version, read_json, write_json, write_text
from idmm.grid.config import GridConfig
from idmm.grid.plan import Cell, GridPlan, Job
from idmm.grid.status import Failure, cell_status, progress, read_failures
from idmm.progress import drawing, log
from idmm.runs import STAGES
from idmm.runs.resolve import run_stage

DEATHS = 2  # of the process during a job, after which the job has failed
MEASURED = ("top1", "top1_interval", "top5", "mean_per_class", "knn", "largest_class", "baseline_top1",
            "baseline_train_size", "start_top1", "start_knn", "test_size", "test_groups", "seconds", "params",
            "backbone_params")  # fmt: skip


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
            key = path.name.rpartition("-")[2]
            if key in self.plan.jobs and path.is_dir():
                self.plan.jobs[key] = replace(
                    self.plan.jobs[key], folder=str(path.relative_to(self.out))
                )

    def start(self) -> None:
        """Write ``grid.yaml``, which marks the folder as a grid's, and ``cells.json`` for its
        status.

        Jobs that failed before are tried again.
        """
        jobs = [self.plan.jobs[key] for key in self.plan.cells.values()]
        folders = [
            [job.folder, self.plan.jobs[job.needs].folder if job.needs else None] for job in jobs
        ]
        write_text(self.out / "grid.yaml", parsing.dump(self.config))
        write_json(self.out / "cells.json", folders)
        for path in self.out.glob("jobs/*.failed.json"):
            path.unlink()

    def finished(self) -> set[str]:
        """Return the keys of the jobs that have a result."""
        return {
            key
            for key, job in self.plan.jobs.items()
            if (self.out / job.folder / "result.json").exists()
        }

    def failures(self) -> dict[str, Failure]:
        """Return the jobs of the plan that failed, by key."""
        return {
            key: failure
            for key, failure in read_failures(self.out).items()
            if key in self.plan.jobs
        }

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
        log.warning("%s failed: %s", job.title, error)
        failure = Failure(job.title, error, f"{job.folder}/log.txt")
        name = f"{job.key}.failed.json"
        with drawing(f"jobs/{name}", "written"):
            (self.out / "jobs" / f"{job.key}.started").unlink(missing_ok=True)
            write_text(self.out / "jobs" / name, json.dumps(asdict(failure)) + "\n")

    def log_progress(self) -> None:
        """Log the finished and failed cells, if they have changed."""
        line = progress(self.out)
        if line != self._logged:
            log.info("%s", line)
        self._logged = line

    def result(self, job: Job) -> dict:
        """Return the content of a job's result.json, empty before it is finished."""
        file = self.out / job.folder / "result.json"
        if file.exists():
            return read_json(file, REWRITE)
        return {}

    def results(self) -> dict:
        """Return the content of grid.json."""
        failures = self.failures()
        cells = [self._cell(cell, failures) for cell in self.plan.cells]
        labels = {f"{name}s": list(dict.fromkeys(cell[name] for cell in cells)) for name in
                  ("source", "method", "backbone", "target")}  # fmt: skip
        return {
            "version": idmm_version(),
            "protocol": self.config.target.protocol,
            **labels,
            "cells": cells,
        }

    def _cell(self, cell: Cell, failures: dict) -> dict:
        job = self.plan.jobs[self.plan.cells[cell]]
        start = self.plan.jobs[job.needs] if job.needs else None
        result = self.result(job)
        pretraining = self.result(start) if start else {}
        if result:
            failure = None
        else:
            failure = failures.get(job.key) or failures.get(job.needs)
        return {
            **vars(cell),
            "protocol": job.stage,
            **{name: result.get(name) for name in MEASURED},
            "status": cell_status(bool(result), failure is not None),
            "error": failure.error if failure else None,
            "log": failure.log if failure else None,
            "folder": job.folder,
            "key": job.key,
            "pretrain_folder": start.folder if start else None,
            "source_size": pretraining.get("train_size"),
            "pretrain_seconds": pretraining.get("seconds"),
            "config": job.config,
            "pretrain_config": start.config if start else None,
        }


def attempt(grid: Grid, job: Job) -> str | None:
    """Run a job that is not finished, and return why it failed. Interrupted after Ctrl-C or another
    stop signal."""
    if grid.result(job):
        return None
    if grid.starts(job.key) >= DEATHS:
        return f"its process died, {DEATHS} times: killed from outside, or too large for the memory"
    log.info("%s: %s", job.stage, job.title)
    out = grid.out.absolute()
    config = {**job.config, "out": str(out / job.folder)}
    if job.needs is not None:
        config["init"] = str(out / grid.plan.jobs[job.needs].folder)
    started = out / "jobs" / f"{job.key}.started"
    with drawing(started.name, "written"):
        write_text(started, str(grid.starts(job.key) + 1))
    try:
        run_stage(STAGES[job.stage].build(config))
        return None
    except Interrupted:
        raise
    except Exception as error:  # the other jobs continue
        is_known = isinstance(error, (UserError, RunError))
        file = out / job.folder / "log.txt"
        if not (is_known and file.exists()):  # a run logs such an error itself
            with drawing("log.txt", "written"):
                before = file.read_text() if file.exists() else ""
                write_text(
                    file, before + (str(error) if is_known else traceback.format_exc()) + "\n"
                )
        text = " ".join((str(error) if is_known else f"{type(error).__name__}: {error}").split())
        # with the grid's flags. A changed option is another job, so no new folder is needed
        flag = "--pretrain." if job.stage == "pretrain" else "--finetune."
        return re.sub(r"--(?=[a-z]+\.)", flag, text.removesuffix(", in a new --out"))
    finally:  # a kill leaves it
        with drawing(started.name, "removed"):
            started.unlink(missing_ok=True)


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
