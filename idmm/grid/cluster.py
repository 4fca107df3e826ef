"""A grid on a Ray cluster: each job is a task in the grid's folder, which all nodes see at the same
path."""

import contextlib
import logging
import os
import signal
import socket
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

from idmm.data.parallel import cores
from idmm.errors import Interrupted, UserError, in_short
from idmm.grid.config import Ray
from idmm.grid.plan import Job
from idmm.grid.run import DEATHS, Grid, attempt
from idmm.progress import log

POLL = 1.0  # seconds to wait for tasks at a time
GRACE = 60.0  # seconds for interrupted jobs to save their state
STORE = 2**27  # bytes of a local cluster's object store, which holds nothing large


def run(grid: Grid) -> None:
    """Run all jobs of a grid on the cluster of ``config.ray``, which starts a job when the one that
    it needs has ended.

    Raises:
        UserError: There is no such cluster, or it cannot run these jobs.
        Interrupted: Ctrl-C or another stop signal. Running jobs had time to save.
    """
    with connected(grid.config.ray) as (ray, num_gpus):
        limits = {
            "max_retries": DEATHS - 1,
            "num_cpus": grid.config.ray.num_cpus,
            "num_gpus": num_gpus,
        }
        task = ray.remote(**limits)(_run_job)
        grid_ref = ray.put(grid)
        futures = {}  # by key of the job
        running = {}  # by future
        for job in grid.remaining():  # each after the one that it needs
            future = task.options(name=job.title).remote(
                grid_ref, job, os.getcwd(), futures.get(job.needs)
            )
            futures[job.key], running[future] = future, job
        try:
            while running:
                for future in ray.wait(list(running), timeout=POLL)[0]:
                    _receive(ray, grid, running.pop(future), future)
                grid.log_progress()
        except BaseException as error:
            log.info("stopping: running jobs save their state")
            with contextlib.suppress(Exception):  # the cluster may be gone
                for future in running:
                    ray.cancel(future)
                if running:
                    ray.wait(list(running), num_returns=len(running), timeout=GRACE)
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted. Repeat the command to resume") from None
            raise


def _receive(ray: Any, grid: Grid, job: Job, future: Any) -> None:
    """Mark a job as failed if its task, which has ended, failed."""
    try:
        error = ray.get(future)
    except ray.exceptions.RayError as lost:
        cause = getattr(lost, "cause", None)
        # of the cluster's settings. A task returns a job's own mistake
        if isinstance(cause, UserError):
            raise UserError(*cause.faults) from None
        error = textwrap.shorten(str(cause or f"its worker died: {lost}"), 300, placeholder=" ...")
    if error is not None and job.needs not in grid.failures():
        grid.mark_failed(job, error)


def _run_job(grid: Grid, job: Job, folder: str, needs_error: str | None) -> str | None:
    """Run a job on a node, and return why it failed. Relative paths start from ``folder``.

    The job is left out if the one that it needs failed, with ``needs_error``.
    """
    if needs_error is not None:
        return None
    with contextlib.suppress(OSError):
        os.chdir(folder)
    if not (grid.out / "grid.yaml").exists():
        out = grid.out.absolute()
        line = f"out: node {socket.gethostname()} does not see '{out}'"
        raise UserError(f"{line}. Name a folder that all nodes see at the same path")
    return attempt(grid, job)


@contextlib.contextmanager
def connected(config: Ray) -> Iterator[tuple[Any, float]]:
    """Join or start the cluster and yield Ray and the GPUs per job.

    Leave or stop it at the end, unless this process was in it before.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # of jobs too large for memory. Else without end
    os.environ.setdefault("RAY_task_oom_retries", str(DEATHS - 1))
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of interrupted tasks
    import ray

    joined = ray.is_initialized()
    handler = signal.getsignal(signal.SIGTERM)
    if not joined:
        _join(ray, config)
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own would exit at once
        num_gpus = _check_resources(ray, config)
        # Ray prints the tasks' log
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
            yield ray, num_gpus
    finally:
        if not joined:
            ray.shutdown()


def _join(ray: Any, config: Ray) -> None:
    address = config.address or "local"
    options = {}
    problem = f"ray.address: cannot join the cluster '{address}'"
    cure = "Start one with 'ray start --head', set RAY_AUTH_MODE=token if it needs one, or leave ray.address out"
    if config.address is None:
        options = {"num_cpus": cores(), "include_dashboard": False, "object_store_memory": STORE}
        problem = "engine: Ray does not start on this machine"
        cure = "Join a running cluster with --ray.address"
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # of many kinds
        raise UserError(f"{problem} ({in_short(error)}). {cure}") from None


def _check_resources(ray: Any, config: Ray) -> float:
    """Log the cluster's size, and return the GPUs per job. UserError if no node can run a job and
    none can join."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    log.info("ray: %d nodes, %g cores, %g GPUs", len(nodes), cpus, gpus)
    # with 0, Ray would let every job see all GPUs, and all would use the first
    if config.num_gpus is None:
        num_gpus = float(gpus > 0)
    else:
        num_gpus = config.num_gpus
    if any(
        node.get("CPU", 0) >= config.num_cpus and node.get("GPU", 0) >= num_gpus for node in nodes
    ):
        return num_gpus
    line = f"ray: a job needs {config.num_cpus:g} cores and {num_gpus:g} GPUs, and no node has them"
    if config.address is None:
        raise UserError(f"{line}. Lower --ray.num_cpus or --ray.num_gpus")
    log.warning("%s yet. Waiting for one to join", line)
    return num_gpus
