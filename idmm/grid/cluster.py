"""A grid on a Ray cluster: each job is a task in the grid's folder, which all nodes see at the same
path."""

import contextlib
import functools
import logging
import os
import signal
import socket
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

from idmm.data.parallel import cores
from idmm.errors import Fault, Interrupted, UserError, in_short
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
        futures: dict[str | None, Any] = {}  # by key of the job
        running: dict[Any, Job] = {}  # by future
        for job in grid.remaining():  # each after the one that it needs
            future = task.options(name=job.title).remote(
                grid_ref, job, os.getcwd(), futures.get(job.needs)
            )
            futures[job.key] = future
            running[future] = job
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
        raise UserError.of(
            "out",
            f"node {socket.gethostname()} does not see '{grid.out.absolute()}'",
            "Name a folder that all nodes see at the same path",
        )
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
    """Join the cluster of a config, or start one on this machine. UserError: there is none."""
    start = functools.partial(ray.init, log_to_driver=False, logging_level=logging.ERROR)
    try:
        if config.address is None:
            start("local", num_cpus=cores(), include_dashboard=False, object_store_memory=STORE)
        else:
            start(config.address)
    except Exception as error:  # of many kinds
        if config.address is None:
            fault = Fault(
                "engine",
                f"Ray does not start on this machine ({in_short(error)})",
                "Join a running cluster with --ray.address",
            )
        else:
            fault = Fault(
                "ray.address",
                f"cannot join the cluster '{config.address}' ({in_short(error)})",
                "Start one with 'ray start --head', set RAY_AUTH_MODE=token if it needs one, "
                "or leave ray.address out",
            )
        raise UserError(fault) from None


def _check_resources(ray: Any, config: Ray) -> float:
    """Log the cluster's size, and return the GPUs per job. UserError if no node can run a job and
    none can join."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = sum(node.get("CPU", 0) for node in nodes)
    gpus = sum(node.get("GPU", 0) for node in nodes)
    log.info(f"ray: {len(nodes)} nodes, {cpus:g} cores, {gpus:g} GPUs")
    num_cpus = config.num_cpus
    num_gpus = config.num_gpus
    # with 0, Ray would let every job see all GPUs, and all would use the first
    if num_gpus is None:
        num_gpus = float(gpus > 0)
    for node in nodes:
        if node.get("CPU", 0) >= num_cpus and node.get("GPU", 0) >= num_gpus:
            return num_gpus
    if config.address is None:
        raise UserError.of(
            "ray",
            f"a job needs {num_cpus:g} cores and {num_gpus:g} GPUs, and no node has them",
            "Lower --ray.num_cpus or --ray.num_gpus",
        )
    log.warning(
        f"ray: a job needs {num_cpus:g} cores and {num_gpus:g} GPUs, and no node has them yet. "
        "Waiting for one to join"
    )
    return num_gpus
