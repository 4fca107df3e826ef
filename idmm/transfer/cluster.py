"""Runs a grid on a Ray cluster: each job is a task, and the future of a pretraining is an argument of what needs it.

Where all nodes see the grid's folder, a task works in it as the local engine does, under a lock of its own. Elsewhere
(``ray.shared false``) a task works in a temporary folder of its node and returns the run's files, and this process
holds the lock.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from idmm.data.loaders import cores
from idmm.errors import Interrupted, UserError, install
from idmm.files import write_bytes
from idmm.progress import log
from idmm.transfer.config import Ray
from idmm.transfer.plan import Job
from idmm.transfer.run import POLL, Grid, attempt, take

GRACE = 60.0  # seconds that interrupted jobs have to save their state
PATIENCE = 5.0  # seconds for a cluster to answer
STORE = 2**27  # bytes of a local cluster's object store where nothing large travels
BACKBONE = ("backbone.safetensors", "backbone.json")
IMAGES = "last/images.json"


@dataclass(frozen=True)
class Outcome:
    """What a task returns; ``files`` and ``images_read`` only where no folder is shared."""

    done: bool  # False also where another runner has the job, or the one that it needs was not done
    error: str | None = None  # why it failed for good
    files: dict[str, bytes] = field(default_factory=dict)  # contents by path in the run folder
    images_read: int | None = None  # when the run read its images (ns)


def require() -> None:
    """Raises UserError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"engine: ray needs ray; install it with: {install('ray')}")


def reason(error: Exception) -> str:
    """Returns in a line why a task did not return; raises UserError where that is a mistake in the cluster's settings,
    as a job's own is in what it returns."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, UserError):
        raise UserError(*cause.faults) from None
    return " ".join(str(cause or error).split())[:300]


def run(grid: Grid, say: Callable[[], None]) -> None:
    """Runs all jobs of a grid on the cluster of ``config.ray``, beside other runners; calls ``say`` now and then.

    Raises:
        UserError: Ray is not installed, there is no such cluster, or it cannot run these jobs.
        Interrupted: Ctrl-C or SIGTERM; running jobs had time to save.
    """
    require()
    with connected(grid.config.ray):
        scheduler = _RayScheduler(grid)
        try:
            while scheduler.send() or grid.remaining():
                scheduler.receive()
                say()
        except BaseException as error:
            with contextlib.suppress(Exception):  # the cluster is gone, say
                scheduler.cancel()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted; the same command goes on") from None
            raise
        finally:
            for _, lock in scheduler.sent.values():
                lock.close()


class _RayScheduler:
    """The tasks of a grid that are in the cluster."""

    def __init__(self, grid: Grid):
        import ray

        self.ray, self.grid, wanted = ray, grid, grid.config.ray
        self.shared = wanted.shared
        # what relative paths start from, and what tells this run's temporary folders from others'
        self.place = os.getcwd(), uuid.uuid4().hex[:8]
        self.sent: dict[Any, tuple[Job, contextlib.ExitStack]] = {}  # by future; the job's lock is on the stack
        self.backbones: dict[str, Any] = {}  # futures by the pretraining's key
        self.died: Counter[str] = Counter()  # workers, by the job's key
        self._grid = ray.put(grid)
        # tries are counted here: Ray's own would not be seen
        self._task = ray.remote(max_retries=0, num_cpus=wanted.num_cpus, num_gpus=wanted.num_gpus)(_do)

    def send(self) -> int:
        """Sends the jobs that are ready and that no other runner has; returns how many tasks are in the cluster."""
        done, taken = self.grid.finished(), self.grid.locked_by_others()
        left, known = self.grid.remaining(), {job.key for job, _ in self.sent.values()}
        for job in left:
            if job.key in known or job.key in taken or not (job.needs is None or job.needs in known | done):
                continue
            lock = contextlib.ExitStack()
            if not self.shared and not lock.enter_context(self.grid.lock(job)):
                continue
            start = self._backbone(job, job.needs in done)
            future = self._task.options(name=job.title).remote(self._grid, job, start, *self.place)
            self.sent[future], self.backbones[job.key] = (job, lock), future
            known.add(job.key)
        waited_for = {job.needs for job in left} | known
        self.backbones = {key: future for key, future in self.backbones.items() if key in waited_for}
        return len(self.sent)

    def _backbone(self, job: Job, done: bool) -> Any:
        """What a task needs to be given: its pretraining's future or files; None where it reads the shared folder."""
        if job.needs is None or (done and self.shared):
            return None
        if job.needs not in self.backbones:
            folder = self.grid.out / self.grid.plan.jobs[job.needs].folder
            files = {name: (folder / name).read_bytes() for name in BACKBONE}
            self.backbones[job.needs] = self.ray.put(Outcome(True, files=files))
        return self.backbones[job.needs]

    def receive(self) -> None:
        """Waits a moment for tasks that end, and keeps what they return."""
        if not self.sent:
            time.sleep(POLL)  # other runners have all that is left
            return
        for future in self.ray.wait(list(self.sent), timeout=POLL)[0]:
            job, lock = self.sent.pop(future)
            with lock:
                self._collect(job, future)

    def _collect(self, job: Job, future: Any) -> None:
        try:
            outcome = self.ray.get(future)
        except self.ray.exceptions.RayError as error:
            self.backbones.pop(job.key, None)
            outcome = self._lost(job, error)
        if outcome.done and not self.shared:
            self._keep(job, outcome)
            self.backbones.pop(job.key, None)  # a node that goes away would take it along: now this machine has it
        elif outcome.error:
            for name, data in outcome.files.items():
                write_bytes(self.grid.out / job.folder / name, data)
            if job.key not in self.grid.failed():
                self.grid.mark_failed(job, outcome.error)
            log.warning("%s failed: %s", job.title, outcome.error)

    def _lost(self, job: Job, error: Exception) -> Outcome:
        """The outcome of a task that did not return; without an error it is sent again."""
        why, cause = reason(error), getattr(error, "cause", None)
        argument = isinstance(cause, self.ray.exceptions.RayError)
        if argument or (job.needs is not None and job.needs not in self.grid.finished()):
            return Outcome(False)  # what it waited for was lost
        if cause is not None:
            return Outcome(False, why)
        self.died[job.key] += 1
        left = self.grid.config.retries + 1 - self.died[job.key]
        if left <= 0:
            return Outcome(False, f"its worker died, {self.died[job.key]} times: {why}")
        log.warning("ray: the worker of %s died; tries left: %d (%s)", job.title, left, why)
        return Outcome(False)

    def _keep(self, job: Job, outcome: Outcome) -> None:
        """Writes a run folder, last ``result.json``, by which it counts as done."""
        folder = self.grid.out / job.folder
        for name in sorted(outcome.files, key=lambda name: name == "result.json"):
            write_bytes(folder / name, outcome.files[name])
            if name == "config.yaml":
                self.grid.update_paths(job)
            elif name.endswith(IMAGES):  # images that are younger may have changed
                os.utime(folder / name, ns=(outcome.images_read, outcome.images_read))

    def cancel(self) -> None:
        """Ends all tasks; those that run save their state first."""
        log.info("stopping: jobs at work save their state")
        for future in self.sent:
            self.ray.cancel(future)
        if self.sent:
            self.ray.wait(list(self.sent), num_returns=len(self.sent), timeout=GRACE)


# ------------------------------------------------------------------ on a node
def _do(grid: Grid, job: Job, start: Outcome | None, home: str, token: str) -> Outcome:
    """A task: runs a job, unless the one that it needs was not done."""
    if start is not None and not start.done:
        return Outcome(False)
    with contextlib.suppress(OSError):
        os.chdir(home)
    grid = copy.copy(grid)
    grid.runner = uuid.uuid4().hex  # this process's
    if not grid.config.ray.shared:
        return _by_value(grid, job, start, token)
    if not (grid.out / "grid.yaml").exists():
        host = socket.gethostname()
        raise UserError(
            f"ray.shared: node {host} does not see '{grid.out.absolute()}'; wanted is a folder that all nodes see at "
            "the same path, or --ray.shared false"
        )
    take(grid, job)
    return Outcome(bool(grid.result(job)), grid.failed().get(job.key, {}).get("error"))


def _by_value(grid: Grid, job: Job, start: Outcome | None, token: str) -> Outcome:
    """Runs a job in a temporary folder, which outlives a worker that is killed: the next try there resumes in it."""
    grid.out = Path(tempfile.gettempdir()) / f"idmm-ray-{token}-{job.key}"
    grid.out.mkdir(mode=0o700, exist_ok=True)
    try:
        if start is not None:
            for name in BACKBONE:
                write_bytes(grid.out / grid.plan.jobs[job.needs].folder / name, start.files[name])
        attempt(grid, job)
        folder, failure = grid.out / job.folder, grid.failed().get(job.key)
        if failure is not None:
            return Outcome(False, failure["error"], _files(folder, "log.txt"))
        read = min((path.stat().st_mtime_ns for path in folder.glob(f"**/{IMAGES}")), default=None)
        return Outcome(True, files=_files(folder, "**/*"), images_read=read)
    finally:
        shutil.rmtree(grid.out, ignore_errors=True)


def _files(folder: Path, pattern: str) -> dict[str, bytes]:
    """Contents of a run's files by their paths, without what only a resume needs."""
    names = [str(path.relative_to(folder)) for path in folder.glob(pattern) if path.is_file()]
    # a run of folds has a folder ``last`` in each of them
    kept = [name for name in names if name.endswith(IMAGES) or "last" not in name.split("/")[:-1]]
    return {name: (folder / name).read_bytes() for name in kept}


# ------------------------------------------------------------------ the cluster
@contextlib.contextmanager
def connected(wanted: Ray) -> Iterator[None]:
    """Joins or starts the cluster; leaves or ends it at the end, unless this process was in it before."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_task_oom_retries", "0")  # else a job too large for memory is tried for ever
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of tasks that an interrupt ended
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
    """Logs the cluster's size; raises UserError where no node has what a job takes and none can join."""
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
