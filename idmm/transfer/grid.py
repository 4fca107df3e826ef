"""Stage 3, read from top to bottom: check, plan, run, report."""

import logging
import os
import subprocess
import sys
import time

from idmm import options
from idmm.errors import Interrupted, RunError
from idmm.files import write_text
from idmm.progress import Interrupts, logging_to
from idmm.transfer.config import GridConfig
from idmm.transfer.plan import GridPlan
from idmm.transfer.preflight import check
from idmm.transfer.run import Grid, work
from idmm.transfer.status import GridStatus

log = logging.getLogger("idmm")
PAUSE = 0.2  # seconds between looks at the workers


def transfer(config: GridConfig | dict | str) -> dict:
    """Fills a transfer grid and writes its tables and pictures to ``config.out``.

    Args:
        config: A GridConfig, a mapping of its keys, or the path of a YAML file.

    Returns:
        What ``grid.json`` holds: ``cells``, each with ``status`` ok, failed or missing.

    Raises:
        UserError: Faults of the grid, all of them, before the first job starts.
        Interrupted: Ctrl-C or SIGTERM; the same call goes on.
    """
    config = options.build(GridConfig, config)
    try:
        with Interrupts():
            return _transfer(config)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command goes on") from None


def _transfer(config: GridConfig) -> dict:
    # ------------------------------------------------------------------ before the first job
    plan = GridPlan(config)
    counts = check(config, plan)
    grid = Grid(config, plan)
    if config.plan:
        from idmm.transfer.estimate import text

        print(text(grid, counts))
        return grid.results()
    from idmm.transfer import report

    grid.write_config()
    grid.forgive()
    with logging_to(grid.out):
        # -------------------------------------------------------------- jobs
        status = GridStatus(grid)
        try:
            with status.going():
                _run(grid, status)
        finally:
            # ---------------------------------------------------------- results
            results = grid.results()
            report.write(results, grid.out)
        for record in grid.failed().values():
            log.error("failed: %s: %s (%s)", record["title"], record["error"], grid.out / record["log"])
    print(report.text(results))
    return results


def _run(grid: Grid, status: GridStatus) -> None:
    if not grid.remaining():
        return
    if grid.config.engine == "ray":
        from idmm.transfer.cluster import run

        run(grid, status)
    elif grid.config.workers > 1:
        _several(grid, status)
    else:
        work(grid, status.say)


def _several(grid: Grid, status: GridStatus) -> None:
    """Lets processes share the folder, each with a GPU of its own where there are any; ends them all with this one."""
    plan = grid.out / "jobs" / f"workers-{os.getpid()}.yaml"
    write_text(plan, options.dump(grid.config))
    command = [sys.executable, "-m", "idmm.transfer.worker", str(plan), str(os.getpid())]
    workers = []
    try:
        for number in range(grid.config.workers):
            with open(plan.with_name(f"worker-{number}.log"), "ab") as said:
                # in a session of its own: Ctrl-C is passed on once, by this process
                kept = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said, "start_new_session": True}
                workers.append(subprocess.Popen(command, env=_environment(number, grid.config.workers), **kept))
        while any(worker.poll() is None for worker in workers):
            time.sleep(PAUSE)
            status.say(grid)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in workers:
            worker.wait()
        plan.unlink(missing_ok=True)
    if grid.remaining():
        codes = ", ".join(str(worker.returncode) for worker in workers)
        logs = plan.with_name("worker-*.log")
        raise RunError(f"the workers ended (codes {codes}) with jobs left, see {logs}; the same command goes on")


def _environment(number: int, workers: int) -> dict[str, str]:
    """Of a worker: a GPU of its own, or its share of the cores."""
    import torch

    environment = dict(os.environ)
    if torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = seen if seen != [""] else [str(i) for i in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
    else:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // workers)))
    return environment
