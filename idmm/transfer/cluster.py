"""Runs a grid on a Ray cluster: a job is a task, and a backbone's future is an argument of what is tuned from it.

Where all nodes see the grid's folder, a task works in it as the local engine does, under a lock of its own. Elsewhere
a task works in a temporary folder of its node; what it made comes back by value, and the lock is this process's.
"""

import contextlib
import copy
import importlib.util
import logging
import os
import shutil
import signal
import socket
import tempfile
import textwrap
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from idmm.data.loaders import cores
from idmm.errors import Interrupted, UserError
from idmm.files import write_bytes
from idmm.transfer.config import Ray
from idmm.transfer.plan import Job
from idmm.transfer.run import POLL, Grid, JobLocks, attempt, take
from idmm.transfer.status import GridStatus

log = logging.getLogger("idmm")
GRACE = 60.0  # seconds that interrupted jobs have to save their state
PATIENCE = 5.0  # seconds for a cluster to answer
STORE = 2**27  # bytes of a local cluster's object store where nothing large travels
BACKBONE = ("backbone.safetensors", "backbone.json")
IMAGES = "last/images.json"


@dataclass(frozen=True)
class Outcome:
    """What comes back from a task."""

    done: bool
    """False too where another runner has the job, or the one that it needs was not done."""
    error: str | None = None
    """Why it was given up."""
    files: dict[str, bytes] = field(default_factory=dict)
    """By value: what the run folder holds, by path in it."""
    images_read: int | None = None
    """By value: when the run read its images (ns)."""


def require() -> None:
    """Raises UserError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("engine: ray needs ray; install it with: pip install 'idmm[ray]'")


def run(grid: Grid, status: GridStatus) -> None:
    """Does what can be done of a grid on the cluster of ``config.ray``, beside other runners of the same folder.

    Args:
        grid: The grid.
        status: Says where it stands.

    Raises:
        UserError: Ray is not installed, there is no such cluster, or it cannot run these jobs.
        Interrupted: Ctrl-C or SIGTERM; jobs had their time to save.
    """
    require()
    with _connected(grid.config.ray):
        scheduler = _RayScheduler(grid)
        try:
            while scheduler.send() or grid.remaining():
                scheduler.receive()
                status.say()
        except KeyboardInterrupt:
            scheduler.cancel()
            raise Interrupted("interrupted; the same command goes on") from None
        finally:
            scheduler.release()


class _RayScheduler:
    """The tasks of a grid that are in the cluster.

    Args:
        grid: The grid.
    """

    def __init__(self, grid: Grid):
        import ray

        self.ray, self.grid, wanted = ray, grid, grid.config.ray
        self.shared = wanted.shared
        # the directory that relative paths mean, and what tells this run's temporary folders from others'
        self.place = os.getcwd(), uuid.uuid4().hex[:8]
        self.sent: dict[Any, tuple[Job, contextlib.ExitStack]] = {}  # by future; the job's lock is on the stack
        self.backbones: dict[str, Any] = {}  # futures by the pretraining's key
        self.died: Counter[str] = Counter()  # workers, by the job's key
        self._grid = ray.put(grid)
        # tries are counted here: Ray's own would not be seen
        self._task = ray.remote(max_retries=0, num_cpus=wanted.num_cpus, num_gpus=wanted.num_gpus)(_do)

    def send(self) -> int:
        """Sends what is left and not another runner's; returns how many tasks there are."""
        done, taken = self.grid.finished(), self.grid.locks.held_by_others()
        left, known = self.grid.remaining(), {job.key for job, _ in self.sent.values()}
        for job in left:
            if job.key in known or job.key in taken or not (job.needs is None or job.needs in known | done):
                continue
            lock = contextlib.ExitStack()
            if not self.shared and not lock.enter_context(self.grid.locks.held(job.key)):
                continue
            start = self._backbone(job, job.needs in done)
            future = self._task.options(name=job.title).remote(self._grid, job, start, *self.place)
            self.sent[future], self.backbones[job.key] = (job, lock), future
            known.add(job.key)
        waited_for = {job.needs for job in left} | known
        self.backbones = {key: future for key, future in self.backbones.items() if key in waited_for}
        return len(self.sent)

    def _backbone(self, job: Job, done: bool) -> Any:
        """What a job starts from: a future where that is being made, a value where it lies here, else nothing."""
        if job.needs is None or (done and self.shared):
            return None
        if job.needs not in self.backbones:
            folder = self.grid.out / self.grid.plan.jobs[job.needs].folder
            files = {name: (folder / name).read_bytes() for name in BACKBONE}
            self.backbones[job.needs] = self.ray.put(Outcome(True, files=files))
        return self.backbones[job.needs]

    def receive(self) -> None:
        """Waits a moment, and takes in what is ready."""
        if not self.sent:
            time.sleep(POLL)  # other runners have all that is left
            return
        for future in self.ray.wait(list(self.sent), timeout=POLL)[0]:
            job, lock = self.sent.pop(future)
            with lock:
                self._take_in(job, future)

    def _take_in(self, job: Job, future: Any) -> None:
        try:
            outcome = self.ray.get(future)
        except self.ray.exceptions.RayError as error:
            self.backbones.pop(job.key, None)
            outcome = self._lost(job, error)
        if outcome.done and not self.shared:
            self._keep(job, outcome)
            self.backbones.pop(job.key, None)  # from now on by value: a node that goes away does not take it along
        elif outcome.error:
            for name, data in outcome.files.items():
                write_bytes(self.grid.out / job.folder / name, data)
            if job.key not in self.grid.failed():
                self.grid.give_up(job, outcome.error)
            log.warning("%s failed: %s", job.title, outcome.error)

    def _lost(self, job: Job, error: Exception) -> Outcome:
        """What a task comes to that did not end by itself; one without error is sent again."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, UserError):  # of the cluster; a job's own comes as an outcome
            raise UserError(*cause.faults) from None
        unmade = isinstance(cause, self.ray.exceptions.RayError)  # an argument of the task
        if unmade or (job.needs is not None and job.needs not in self.grid.finished()):
            return Outcome(False)  # what failed is what it waits for
        why = " ".join(str(cause or error).split())[:300]
        if cause is not None:
            return Outcome(False, why)
        self.died[job.key] += 1
        left = self.grid.config.retries + 1 - self.died[job.key]
        if left <= 0:
            return Outcome(False, f"its worker died, {self.died[job.key]} times: {why}")
        log.warning("ray: the worker of %s died; tries left: %d (%s)", job.title, left, why)
        return Outcome(False)

    def _keep(self, job: Job, outcome: Outcome) -> None:
        """Writes a run folder, the file last by which it counts as done."""
        folder = self.grid.out / job.folder
        for name in sorted(outcome.files, key=lambda name: name == "result.json"):
            data = outcome.files[name]
            if name == "config.yaml":  # it names the node's folders
                config, start = yaml.safe_load(data), self.grid.plan.jobs.get(job.needs)
                paths = {"out": str(folder)} | ({"init": str(self.grid.out / start.folder)} if start else {})
                config |= {key: path for key, path in paths.items() if key in config}
                data = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode()
            write_bytes(folder / name, data)
            if name == IMAGES:  # files that are younger may be others
                os.utime(folder / name, ns=(outcome.images_read, outcome.images_read))

    def cancel(self) -> None:
        """Ends all tasks; those at work save their state first."""
        log.info("interrupted: jobs at work save their state")
        for future in self.sent:
            self.ray.cancel(future)
        if self.sent:
            self.ray.wait(list(self.sent), num_returns=len(self.sent), timeout=GRACE)

    def release(self) -> None:
        """Lets other runners have what was sent."""
        for _, lock in self.sent.values():
            lock.close()


# ------------------------------------------------------------------ on a node
def _do(grid: Grid, job: Job, start: Outcome | None, home: str, token: str) -> Outcome:
    """A task: does a job, or nothing where what it needs was not done."""
    if start is not None and not start.done:
        return Outcome(False)
    with contextlib.suppress(OSError):
        os.chdir(home)
    grid = copy.copy(grid)
    if not grid.config.ray.shared:
        return _by_value(grid, job, start, token)
    if not (grid.out / "grid.yaml").exists():
        host = socket.gethostname()
        raise UserError(
            f"ray.shared: node {host} does not see '{grid.out.absolute()}'; wanted is a folder that all nodes see at "
            "the same path, or --ray.shared false"
        )
    grid.locks = JobLocks(grid.out / "jobs")  # this process's
    take(grid, job)
    failure = grid.failed().get(job.key)
    return Outcome((grid.out / job.folder / "result.json").exists(), failure and failure["error"])


def _by_value(grid: Grid, job: Job, start: Outcome | None, token: str) -> Outcome:
    """Does a job in a temporary folder, where a task that is tried again on the same node finds what was begun."""
    grid.out = Path(tempfile.gettempdir()) / f"idmm-ray-{token}-{job.key}"
    grid.out.mkdir(mode=0o700, exist_ok=True)
    try:
        if start is not None:
            for name in BACKBONE:
                write_bytes(grid.out / grid.plan.jobs[job.needs].folder / name, start.files[name])
        attempt(grid, job)
        failure = grid.failed().get(job.key)
        folder = grid.out / job.folder
        if failure is not None:
            return Outcome(False, failure["error"], _files(folder, "log.txt"))
        images = folder / IMAGES
        read = images.stat().st_mtime_ns if images.exists() else None
        return Outcome(True, files=_files(folder, "**/*"), images_read=read)
    finally:
        shutil.rmtree(grid.out, ignore_errors=True)


def _files(folder: Path, pattern: str) -> dict[str, bytes]:
    """Files of a run, without what only a resume needs."""
    found = {path: path.relative_to(folder) for path in folder.glob(pattern) if path.is_file()}
    return {str(n): path.read_bytes() for path, n in found.items() if n.parts[0] != "last" or str(n) == IMAGES}


# ------------------------------------------------------------------ the cluster
@contextlib.contextmanager
def _connected(wanted: Ray) -> Iterator[None]:
    """Joins or starts the cluster; leaves or ends it at the end, unless this process was in it before."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_task_oom_retries", "0")  # else a job too large for memory is tried for ever
    import ray

    joined, handler = ray.is_initialized(), signal.getsignal(signal.SIGTERM)
    if not joined:
        _join(ray, wanted)
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own would exit at once
        _check_room(ray, wanted)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # Ray prints what is logged here
            yield
    finally:
        if not joined:
            ray.shutdown()


def _join(ray: Any, wanted: Ray) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if wanted.address is not None:
        _answers(wanted.address)
        start = {"address": wanted.address}
        wrong = f"ray.address: '{wanted.address}' is no cluster that can be joined"
        mend = "start one with 'ray start --head', set RAY_AUTH_MODE=token where it wants one, or leave ray.address out"
    else:
        start = {"address": "local", "num_cpus": cores(), "include_dashboard": False}
        start |= {"object_store_memory": STORE} if wanted.shared else {}
        wrong, mend = "engine: Ray does not start on this machine", "join a running cluster with --ray.address"
    try:
        ray.init(**start, **quiet)
    except Exception as error:  # of many kinds
        why = textwrap.shorten(str(error), 200, placeholder=" ...")
        raise UserError(f"{wrong} ({why}); {mend}") from None


def _answers(address: str) -> None:
    """Raises UserError where nobody listens: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdigit()) or "/" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        mend = "start one with 'ray start --head'"
        raise UserError(f"ray.address: nobody answers at '{address}' ({error}); {mend}") from None


def _check_room(ray: Any, wanted: Ray) -> None:
    """Says what there is.

    Raises:
        UserError: No node has what a job takes, and none can join.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    log.info("ray: %d nodes, %g cores, %g GPUs", len(nodes), cpus, gpus)
    if gpus and not wanted.num_gpus:
        log.warning("ray.num_gpus: 0, so nothing shares out the GPUs; --ray.num_gpus 1 gives each job one of its own")
    if any(node.get("CPU", 0) >= wanted.num_cpus and node.get("GPU", 0) >= wanted.num_gpus for node in nodes):
        return
    line = f"ray: a job takes {wanted.num_cpus:g} cores and {wanted.num_gpus:g} GPUs, and no node has them"
    if wanted.address is None:
        raise UserError(f"{line}; lower --ray.num_cpus or --ray.num_gpus")
    log.warning("%s yet; waiting for one to join", line)
