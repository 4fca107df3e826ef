"""Runs a grid on a Ray cluster: each job is a task in the grid's folder, which all nodes see at the same path."""

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from idmm.data.parallel import cores
from idmm.errors import Interrupted, UserError, install
from idmm.progress import log
from idmm.transfer.config import Ray
from idmm.transfer.plan import Job
from idmm.transfer.run import DEATHS, Grid, attempt

POLL = 1.0  # seconds between looks at the tasks
GRACE = 60.0  # seconds that interrupted jobs have to save their state
STORE = 2**27  # bytes of a local cluster's object store, in which nothing large travels


def require() -> None:
    """Raises UserError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"engine: ray needs ray; install it with: {install('ray')}")


def run(grid: Grid, say: Callable[[], None]) -> None:
    """Runs all jobs of a grid on the cluster of ``config.ray``; calls ``say`` now and then.

    Raises:
        UserError: Ray is not installed, there is no such cluster, or it cannot run these jobs.
        Interrupted: Ctrl-C or SIGTERM; running jobs had time to save.
    """
    require()
    with connected(grid.config.ray):
        tasks = _Tasks(grid)
        try:
            while tasks.send():
                tasks.receive()
                say()
        except BaseException as error:
            with contextlib.suppress(Exception):  # the cluster may be gone
                tasks.cancel()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted; the same command goes on") from None
            raise


class _Tasks:
    """The jobs of a grid that are in the cluster."""

    def __init__(self, grid: Grid):
        import ray

        self.ray, self.grid, wanted = ray, grid, grid.config.ray
        self.sent: dict[Any, Job] = {}  # by future
        self.ended: set[str] = set()  # keys of jobs whose task returned
        self.died: Counter[str] = Counter()  # workers, by the job's key
        self._grid = ray.put(grid)
        # deaths are counted here: Ray's own retries would not be seen
        self._task = ray.remote(max_retries=0, num_cpus=wanted.num_cpus, num_gpus=wanted.num_gpus)(_do)

    def send(self) -> int:
        """Sends the jobs that are ready; returns how many tasks are in the cluster."""
        known, done = {job.key for job in self.sent.values()} | self.ended, self.grid.finished() | self.ended
        for job in self.grid.remaining():
            if job.key not in known and (job.needs is None or job.needs in done):
                future = self._task.options(name=job.title).remote(self._grid, job, os.getcwd())
                self.sent[future] = job
        return len(self.sent)

    def receive(self) -> None:
        """Waits a moment for tasks that end."""
        for future in self.ray.wait(list(self.sent), timeout=POLL)[0]:
            job = self.sent.pop(future)
            try:
                error = self.ray.get(future)
            except self.ray.exceptions.RayError as lost:
                error = self._lost(job, lost)
                if error is None:
                    continue  # it is sent again
            self.ended.add(job.key)
            if error is not None:
                self.grid.mark_failed(job, error)

    def _lost(self, job: Job, error: Exception) -> str | None:
        """Returns why a task that did not return has failed; None: it is tried again."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, UserError):  # a mistake in the cluster's settings: a job's own is in what it returns
            raise UserError(*cause.faults) from None
        why = textwrap.shorten(str(cause or error), 300, placeholder=" ...")
        if cause is not None:
            return why
        self.died[job.key] += 1
        if self.died[job.key] >= DEATHS:
            return f"its worker died, {DEATHS} times: {why}"
        log.warning("ray: the worker of %s died, it is tried once more (%s)", job.title, why)
        return None

    def cancel(self) -> None:
        """Ends all tasks; those that run save their state first."""
        log.info("stopping: jobs at work save their state")
        for future in self.sent:
            self.ray.cancel(future)
        if self.sent:
            self.ray.wait(list(self.sent), num_returns=len(self.sent), timeout=GRACE)


def _do(grid: Grid, job: Job, home: str) -> str | None:
    """A task: runs a job on a node; returns why it failed. ``home`` is what relative paths start from."""
    with contextlib.suppress(OSError):
        os.chdir(home)
    if not (grid.out / "grid.yaml").exists():
        host = socket.gethostname()
        raise UserError(
            f"out: node {host} does not see '{grid.out.absolute()}'; name a folder that all nodes see at the same path"
        )
    return attempt(grid, job)


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
        start = {"address": wanted.address}
        wrong = f"ray.address: '{wanted.address}' is no cluster that can be joined"
        mend = "start one with 'ray start --head', set RAY_AUTH_MODE=token where it wants one, or leave ray.address out"
    else:
        start = {"address": "local", "num_cpus": cores(), "include_dashboard": False, "object_store_memory": STORE}
        wrong, mend = "engine: Ray does not start on this machine", "join a running cluster with --ray.address"
    try:
        ray.init(**start, **quiet)
    except Exception as error:  # of many kinds
        why = textwrap.shorten(str(error), 200, placeholder=" ...")
        raise UserError(f"{wrong} ({why}); {mend}") from None


def _check_room(ray: Any, wanted: Ray) -> None:
    """Logs the cluster's size; raises UserError where no node has what a job takes and none can join."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    log.info("ray: %d nodes, %g cores, %g GPUs", len(nodes), cpus, gpus)
    if any(node.get("CPU", 0) >= wanted.num_cpus and node.get("GPU", 0) >= wanted.num_gpus for node in nodes):
        return
    line = f"ray: a job takes {wanted.num_cpus:g} cores and {wanted.num_gpus:g} GPUs, and no node has them"
    if wanted.address is None:
        raise UserError(f"{line}; lower --ray.num_cpus or --ray.num_gpus")
    log.warning("%s yet; waiting for one to join", line)
