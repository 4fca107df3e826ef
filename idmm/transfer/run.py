"""Runs a grid: one job after the other in this process, or several processes that share the folder."""

import contextlib
import json
import logging
import os
import re
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from idmm.config import parsing
from idmm.errors import Interrupted, RunError, UserError
from idmm.files import being_written, write_text
from idmm.locks import Lock, holders
from idmm.stages import STAGES
from idmm.transfer.config import TRAINING, GridConfig
from idmm.transfer.plan import Cell, GridPlan, Job

log = logging.getLogger("idmm")
POLL = 1.0  # seconds between looks at what other runners do


class JobLocks:
    """The locks on a grid's jobs, as one runner of its folder takes them.

    Args:
        folder: Theirs; made by the first one.
    """

    def __init__(self, folder: Path):
        self.folder, self.runner = folder, uuid.uuid4().hex

    @contextlib.contextmanager
    def held(self, key: str) -> Iterator[bool]:
        """Holds a job's lock for the block; yields False where another runner has it.

        Raises:
            RunError: The folder cannot be written.
        """
        lock = Lock(self.folder / key, self.runner)
        try:
            mine = lock.acquire()
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be written ({error.strerror})") from None
        try:
            yield mine
        finally:
            lock.release()

    def held_by_others(self) -> dict[str, dict]:
        """Returns the runners of the jobs that others do, by the jobs' keys."""
        return {key: owner for key, owner in holders(self.folder).items() if owner.get("id") != self.runner}


class Grid:
    """A grid's folder: which jobs are done, which failed, who is at work.

    Args:
        config: The grid.
        plan: Its plan, where it is made already.

    Attributes:
        plan: Its jobs and cells.
        out: Its folder.
        locks: On its jobs.

    Raises:
        UserError: Faults of the grid, or a folder that belongs to something else.
    """

    def __init__(self, config: GridConfig, plan: GridPlan | None = None):
        faults = folder_faults(config)
        if faults:
            raise UserError(*faults)
        self.config, self.out = _absolute(config), Path(config.out)
        self.plan = (plan or GridPlan(config)).checked()
        folders = {path.name.rpartition("-")[2]: path for path in sorted((self.out / "runs").glob("*/*"))}
        begun = {key: str(path.relative_to(self.out)) for key, path in folders.items() if path.is_dir()}
        # jobs that an earlier start called otherwise keep their folders
        self.plan.jobs = {key: replace(job, begun=begun.get(key)) for key, job in self.plan.jobs.items()}
        self.locks = JobLocks(self.out / "jobs")
        self.at_work = 0  # jobs that this process does at a time

    def write_config(self) -> None:
        """Writes ``grid.yaml``, by which the folder is known."""
        try:
            write_text(self.out / "grid.yaml", parsing.dump(self.config))
        except RunError as error:
            raise UserError(f"out: {error}") from None

    def finished(self) -> set[str]:
        """Keys of the jobs that have a result."""
        return {key for key, job in self.plan.jobs.items() if (self.out / job.folder / "result.json").exists()}

    def at_once(self) -> int:
        """Jobs that are done side by side: by this grid's own workers, or by all who are at work now."""
        if self.config.engine == "ray" and not self.config.ray.shared:
            return 1  # the runner locks all that wait in Ray
        own = self.config.workers if self.config.engine == "local" else 1
        return max(own, len(self.locks.held_by_others()) + self.at_work)

    def failed(self) -> dict[str, dict]:
        """What is known of the jobs that were given up, by key."""
        found = {}
        for key in self.plan.jobs:
            with contextlib.suppress(FileNotFoundError):  # forgotten by another runner in between
                found[key] = json.loads(self._failure(key).read_text())
        return found

    def remaining(self) -> list[Job]:
        """Jobs that are left and can still be done."""
        failed = self.failed()
        left = self.plan.remaining(self.finished())
        return [job for job in left if job.key not in failed and job.needs not in failed]

    def give_up(self, job: Job, error: str) -> None:
        """Marks a job as failed; its cells say so."""
        record = {"title": job.title, "error": error, "log": f"{job.folder}/log.txt", "time": time.time()}
        write_text(self._failure(job.key), json.dumps(record) + "\n")

    def forget_failures(self) -> None:
        """Unless another runner is at work: a new start tries again."""
        for key in self.plan.jobs if not self.locks.held_by_others() else ():
            self._failure(key).unlink(missing_ok=True)

    def results(self) -> dict:
        """All of the grid as data: what grid.json holds."""
        from importlib.metadata import version

        failed = self.failed()
        config = self.config
        cells = [self._cell(cell, self.plan.jobs[key], failed) for cell, key in self.plan.cells.items()]
        cells += self._other_protocol({(c["protocol"], c["key"]) for c in cells})
        orders = ("sources", "methods", "backbones", "targets")
        return {
            "version": version("idmm"),
            "protocol": config.target.protocol,
            **{name: list(dict.fromkeys(cell[name[:-1]] for cell in cells)) for name in orders},
            "cells": cells,
        }

    def _cell(self, cell: Cell, job: Job, failed: dict) -> dict:
        result = self.result(job)
        blocker = job.key if job.key in failed else job.needs if job.needs in failed else None
        start = self.plan.jobs.get(job.needs)
        made = self.result(start) if start else {}
        return {
            **vars(cell),
            "protocol": job.stage,
            **{name: result.get(name) for name in ("top1", "top5", "mean_per_class", "knn", "seconds")},
            "status": "ok" if result else "failed" if blocker else "missing",
            "error": failed[blocker]["error"] if blocker and not result else None,
            "log": failed[blocker]["log"] if blocker and not result else None,
            "folder": job.folder,
            "key": job.key,
            "pretrain_folder": start.folder if start else None,
            "source_size": made.get("train_size"),
            "pretrain_seconds": made.get("seconds"),
            "config": job.config,
            "pretrain_config": start.config if start else None,
        }

    def _other_protocol(self, known: set) -> list[dict]:
        """Cells that an earlier start on this folder measured by the other protocol."""
        try:
            before = json.loads((self.out / "grid.json").read_text())["cells"]
        except (OSError, ValueError, KeyError):
            return []
        other = [cell for cell in before if cell["protocol"] != self.config.target.protocol]
        return [cell for cell in other if (cell["protocol"], cell["key"]) not in known and cell["status"] == "ok"]

    def result(self, job: Job) -> dict:
        """What a job's result.json holds; nothing before it is done."""
        try:
            return json.loads((self.out / job.folder / "result.json").read_text())
        except FileNotFoundError:
            return {}

    def _failure(self, key: str) -> Path:
        return self.out / "jobs" / f"{key}.failed.json"


def folder_faults(config: GridConfig) -> list[str]:
    """What is wrong with ``out``: something else is in it."""
    out = Path(config.out)
    known = out / "grid.yaml"
    try:
        # looked at before grid.yaml is: another runner, which writes that first, may be starting
        things = out.is_dir() and any(not being_written(path) for path in out.iterdir())
        if known.exists():
            before = parsing.read_file(known)
            if not _related(before, parsing.plain(_absolute(config))):
                return [f"out: '{out}' holds a grid of other sources and targets; name another folder"]
        elif out.exists() and not out.is_dir():
            return [f"out: '{out}' is a file; name a folder"]
        elif things:
            return [f"out: '{out}' holds something that is no grid; name another folder"]
        elif not out.exists():
            above = next(path for path in out.absolute().parents if path.exists())
            if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
                return [f"out: cannot write to '{out}'; name a folder elsewhere"]
    except UserError as error:
        return [f"out: '{out}': {fault.removeprefix('--config: ')}" for fault in error.faults]
    except OSError as error:
        return [f"out: cannot read '{out}' ({error.strerror}); name another folder"]
    return []


def _related(before: dict, now: dict) -> bool:
    """Whether two grids have a source or a target in common: then one goes on with the other's runs."""
    sides = [(before.get(name) or [], now.get(name) or []) for name in ("sources", "targets")]
    return any(entry in others for mine, others in sides for entry in mine)


def _absolute(config: GridConfig) -> GridConfig:
    """Names recipes by whole paths: ``grid.yaml`` is read from other working directories, too."""
    plain = parsing.plain(config)
    entries = [entry for given in plain.values() if isinstance(given, list) for entry in given]
    for holder in [plain, *entries]:
        for stage in TRAINING if isinstance(holder, dict) else ():
            layer = holder.get(stage)
            if isinstance(layer, dict) and isinstance(layer.get("config"), str):
                layer["config"] = str(Path(layer["config"]).absolute())
    return parsing.build(GridConfig, plain)


def execute(job: Job, out: Path) -> None:
    """Does a job in its folder under ``out``. What was begun is gone on with, where the grid was moved, too."""
    folder = out / job.folder
    config, path = {**job.config, "out": str(folder)}, folder / "config.yaml"
    if job.needs is not None:
        config["init"] = str(next(out.glob(f"runs/*/*-{job.needs}")))
        begun = parsing.read_file(path) if path.exists() else {}
        if begun.get("init", config["init"]) != config["init"]:
            begun["init"] = config["init"]
            write_text(path, yaml.safe_dump(begun, sort_keys=False, allow_unicode=True))
    STAGES[job.stage].run(config)


_SECTIONS = ("data", "model", "views", "augment", "method", "train", "drloc")


def attempt(grid: Grid, job: Job) -> None:
    """Does a job, again where it fails, and marks it where it fails for good: a user's mistake stays one.

    Raises:
        Interrupted: Ctrl-C or SIGTERM.
    """
    for more in range(grid.config.retries, -1, -1):
        log.info("%s: %s", job.stage, job.title)
        try:
            return execute(job, grid.out)
        except Interrupted:
            raise
        except Exception as error:  # one job's fault must not end the others'
            expected = isinstance(error, (UserError, RunError))
            line = _for_grids(str(error) if expected else f"{type(error).__name__}: {error}", job.stage)
            _add_to_log(grid.out / job.folder / "log.txt", str(error) if expected else traceback.format_exc())
            more = 0 if isinstance(error, UserError) else more
        log.warning("%s failed: %s%s", job.title, line, f"; tries left: {more}" if more else "")
        if not more:
            break
    grid.give_up(job, line)


def _for_grids(text: str, stage: str) -> str:
    """A run's message with the flags as a grid has them; it needs no new folder, a changed option is another job."""
    text = " ".join(text.split()).removesuffix(", in a new --out")
    return re.sub(rf"--(?=({'|'.join(_SECTIONS)})\.)", f"--{STAGES[stage].flags}.", text)


def _add_to_log(path: Path, text: str) -> None:
    """Says what ended a run, unless the run itself did."""
    with contextlib.suppress(OSError):  # a full disk shows where it matters
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.read_text(errors="replace") if path.exists() else ""
        if known.rstrip().endswith(text.rstrip().rpartition("\n")[2]):
            return
        with open(path, "a") as file:
            file.write(f"{text.rstrip()}\n")


def work(grid: Grid, say: Callable[[], None] = lambda: None) -> None:
    """Does what can be done of a grid, beside other runners of the same folder, until nothing is left.

    Args:
        grid: The grid.
        say: Called when something changed, to show where the grid stands.
    """
    grid.at_work = 1
    while True:
        done = grid.finished()
        ready = [job for job in grid.remaining() if job.needs is None or job.needs in done]
        if not ready:
            return
        if not any(take(grid, job) for job in ready):
            time.sleep(POLL)  # others have them all
        say()


def take(grid: Grid, job: Job) -> bool:
    """Does a job unless another runner has it or did it in between; returns whether anything was done."""
    with grid.locks.held(job.key) as mine:
        if not mine:
            return False
        if not (grid.out / job.folder / "result.json").exists() and job.key not in grid.failed():
            attempt(grid, job)
        return True
