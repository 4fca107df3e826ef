"""Runs a grid: one job after the other in this process. What a grid's folder holds of its jobs."""

import contextlib
import json
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from idmm.config import parsing
from idmm.errors import Interrupted, RunError, UserError
from idmm.files import write_json, write_text
from idmm.progress import drawing, log
from idmm.stages import STAGES
from idmm.stages.run import run_stage
from idmm.transfer.config import GridConfig
from idmm.transfer.plan import Cell, GridPlan, Job

DEATHS = 2  # of the process while a job was under way, after which it counts as failed
MEASURED = ("top1", "top1_interval", "top5", "mean_per_class", "knn", "largest_class", "baseline_top1", "start_top1",
            "start_knn", "test_size", "test_groups", "seconds")  # fmt: skip
MEASURED_DENSE = ("ap", "ap50", "ap75", "mask_ap", "mask_ap50", "mask_ap75", "miou", "macc", "pixel_accuracy")


class Grid:
    """A grid's folder: which jobs are done, which failed. UserError with the grid's faults.

    ``jobs/KEY.started`` holds how often the process began a job whose end it did not see: only a kill leaves the file.
    ``jobs/KEY.failed.json`` says why a job failed.
    """

    def __init__(self, config: GridConfig, plan: GridPlan | None = None):
        self.config, self.plan, self.out = config, (plan or GridPlan(config)).checked(), Path(config.out)
        self.plan.jobs = self._begun(self.plan.jobs)

    def write_config(self) -> None:
        """Writes ``grid.yaml``, which marks the folder as a grid's, and ``cells.json``, which its status reads."""
        jobs = [self.plan.jobs[key] for key in self.plan.cells.values()]
        folders = [[job.folder, self.plan.jobs[job.needs].folder if job.needs else None] for job in jobs]
        try:
            write_text(self.out / "grid.yaml", parsing.dump(self.config))
            write_json(self.out / "cells.json", folders)
        except RunError as error:
            raise UserError(f"out: {error}") from None

    def finished(self) -> set[str]:
        """Returns the keys of the jobs that have a result."""
        return {key for key, job in self.plan.jobs.items() if (self.out / job.folder / "result.json").exists()}

    def failed(self) -> dict[str, dict]:
        """Returns title, error, log and time of the jobs that failed, by key."""
        paths = {key: self._failure(key) for key in self.plan.jobs}
        return {key: json.loads(path.read_text()) for key, path in paths.items() if path.exists()}

    def count(self, key: str) -> int:
        """Returns how often a job that is under way was started; 0 if it is not."""
        path = self._starts(key)
        return int(path.read_text()) if path.exists() else 0

    def remaining(self) -> list[Job]:
        """Returns the jobs that are left and can still be done."""
        failed = self.failed()
        left = self.plan.remaining(self.finished())
        return [job for job in left if job.key not in failed and job.needs not in failed]

    def mark_failed(self, job: Job, error: str) -> None:
        """Marks a job, and with it its cells, as failed: until the command is repeated."""
        log.warning("%s failed: %s", job.title, error)
        record = {"title": job.title, "error": error, "log": f"{job.folder}/log.txt", "time": time.time()}
        with drawing(f"jobs/{job.key}.failed.json", "written"):
            self._starts(job.key).unlink(missing_ok=True)
            write_text(self._failure(job.key), json.dumps(record) + "\n")

    def forget_failures(self) -> None:
        """Lets a new start try failed jobs again."""
        for path in self.out.glob("jobs/*.failed.json"):
            path.unlink()

    def results(self) -> dict:
        """Returns what grid.json holds."""
        failed, protocol = self.failed(), self.config.target.protocol
        cells = [self._cell(cell, failed) for cell in self.plan.cells]
        protocols = list(dict.fromkeys(cell["protocol"] for cell in cells)) or [protocol]
        orders = ("sources", "methods", "backbones", "targets")
        return {
            "version": version("idmm"),
            "protocol": protocol,
            "protocols": protocols,
            **{name: list(dict.fromkeys(cell[name[:-1]] for cell in cells)) for name in orders},
            "cells": cells,
        }

    def _cell(self, cell: Cell, failed: dict) -> dict:
        job = self.plan.jobs[self.plan.cells[cell]]
        result, start = self.result(job), self.plan.jobs.get(job.needs)
        pretraining = self.result(start) if start else {}
        failure = {} if result else failed.get(job.key) or failed.get(job.needs) or {}
        return {
            **vars(cell),
            "protocol": job.stage,
            **{name: result.get(name) for name in MEASURED},
            **{name: result[name] for name in MEASURED_DENSE if name in result},
            "status": "ok" if result else "failed" if failure else "missing",
            **{name: failure.get(name) for name in ("error", "log")},
            "folder": job.folder,
            "key": job.key,
            "pretrain_folder": start.folder if start else None,
            "source_size": pretraining.get("train_size"),
            "pretrain_seconds": pretraining.get("seconds"),
            "config": job.config,
            "pretrain_config": start.config if start else None,
        }

    def _begun(self, jobs: dict[str, Job]) -> dict[str, Job]:
        """Jobs in the folders where they were begun, with another title maybe."""
        folders = {path.name.rpartition("-")[2]: path for path in sorted((self.out / "runs").glob("*/*"))}
        begun = {key: str(path.relative_to(self.out)) for key, path in folders.items() if path.is_dir()}
        return {key: replace(job, folder=begun.get(key, job.folder)) for key, job in jobs.items()}

    def paths(self, job: Job) -> dict[str, str]:
        """Returns the paths in a job's config: ``out``, and ``init`` where it starts from another job or a file."""
        start = self.plan.jobs.get(job.needs)
        out = self.out.absolute()
        init = str(out / start.folder) if start else job.config.get("init")
        return {"out": str(out / job.folder)} | ({"init": init} if init else {})

    def result(self, job: Job) -> dict:
        """Returns what a job's result.json holds; nothing before it is done."""
        try:
            return json.loads((self.out / job.folder / "result.json").read_text())
        except FileNotFoundError:
            return {}

    def _failure(self, key: str) -> Path:
        return self.out / "jobs" / f"{key}.failed.json"

    def _starts(self, key: str) -> Path:
        return self.out / "jobs" / f"{key}.started"

    @contextlib.contextmanager
    def under_way(self, job: Job) -> Iterator[None]:
        """Counts a start of a job, and forgets it when the block ends, which a kill prevents."""
        path = self._starts(job.key)
        with drawing(path.name, "written"):
            write_text(path, str(self.count(job.key) + 1))
        try:
            yield
        finally:
            with drawing(path.name, "removed"):
                path.unlink(missing_ok=True)


def attempt(grid: Grid, job: Job) -> str | None:
    """Runs a job that is not done; returns why it failed. Interrupted after Ctrl-C or SIGTERM."""
    if grid.result(job):
        return None
    if grid.count(job.key) >= DEATHS:
        return f"its process died, {DEATHS} times: killed from outside, or too large for the memory"
    log.info("%s: %s", job.stage, job.title)
    with grid.under_way(job):
        try:
            run_stage(STAGES[job.stage].build({**job.config, **grid.paths(job)}))
            return None
        except Interrupted:
            raise
        except Exception as error:  # the other jobs go on
            expected = isinstance(error, (UserError, RunError))
            _add_to_log(grid.out / job.folder / "log.txt", str(error) if expected else traceback.format_exc())
            return for_grids(str(error) if expected else f"{type(error).__name__}: {error}", job.stage)


def for_grids(text: str, stage: str) -> str:
    """A run's message with the grid's flags; no new folder is needed, as a changed option is another job."""
    text = " ".join(text.split()).removesuffix(", in a new --out")
    return re.sub(r"--(?=[a-z]+\.)", f"--{STAGES[stage].GRID_KEY}.", text)


def _add_to_log(path: Path, text: str) -> None:
    """Adds what ended a run to its log, unless the run itself did."""
    with contextlib.suppress(OSError):  # a full disk shows where it matters
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.read_text(errors="replace") if path.exists() else ""
        if known.rstrip().endswith(text.rstrip().rpartition("\n")[2]):
            return
        with open(path, "a") as file:
            file.write(f"{text.rstrip()}\n")


def run(grid: Grid, say: Callable[[], None]) -> None:
    """Runs all jobs of a grid in this process; calls ``say`` after each."""
    failed: set[str] = set()
    for job in grid.remaining():  # each after the one that it needs
        if job.needs in failed:
            continue
        error = attempt(grid, job)
        if error is not None:
            grid.mark_failed(job, error)
            failed.add(job.key)
        say()
