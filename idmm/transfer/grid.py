"""Stage 3, read from top to bottom: check, plan, run, report."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from idmm.config import parsing
from idmm.errors import Interrupted, UserError
from idmm.files import Lock, write_json
from idmm.progress import Interrupts, log, logging_to
from idmm.transfer.config import GridConfig
from idmm.transfer.plan import GridPlan
from idmm.transfer.preflight import check
from idmm.transfer.run import Grid, run
from idmm.transfer.status import line


def transfer(config: GridConfig | dict | str) -> dict:
    """Fills a transfer grid and writes its tables and pictures to ``config.out``.

    Args:
        config: A GridConfig, a mapping of its keys, or the path of a YAML file.

    Returns:
        What ``grid.json`` holds; ``cells``, each with ``status`` ok, failed or missing.

    Raises:
        UserError: Faults of the grid, all of them, before the first job starts.
        Interrupted: Ctrl-C or SIGTERM; the same call goes on.
    """
    try:
        with Interrupts():
            return _transfer(parsing.build(GridConfig, config))
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command goes on") from None


def _transfer(config: GridConfig) -> dict:
    # ------------------------------------------------------------------ before the first job
    plan = GridPlan(config)
    check(config, plan)
    grid = Grid(config, plan)
    if config.plan:
        print("\n".join([*plan.notes, *_planned(grid)]))
        return grid.results()
    from idmm.report import render

    with _lock(grid), logging_to(grid.out):
        for note in plan.notes:
            log.info("%s", note)
        # -------------------------------------------------------------- jobs
        try:
            say = _Lines(grid.out)
            if grid.remaining():
                _runner(config)(grid, say)
        finally:
            # ---------------------------------------------------------- results
            results = grid.results()
            write_json(grid.out / "grid.json", results, indent=1)
            text = render.write(grid.out, results)
        for record in grid.failed().values():
            log.error("failed: %s: %s (%s)", record["title"], record["error"], grid.out / record["log"])
    print(text)
    return results


@contextlib.contextmanager
def _lock(grid: Grid) -> Iterator[None]:
    """Holds the folder's lock, and begins a start of the grid."""
    lock = Lock(grid.out / ".lock")
    try:
        free = lock.acquire()
    except OSError as error:
        raise UserError(f"out: cannot write to '{grid.out}' ({error.strerror}); name a folder elsewhere") from None
    if not free:
        raise UserError(f"out: '{grid.out}' is in use by another run; wait for it or name another folder")
    with contextlib.closing(lock):
        grid.write_config()
        grid.forget_failures()
        yield


def _planned(grid: Grid) -> Iterator[str]:
    """Yields a line for each job that is left, with what it waits for, then how many there are."""
    jobs, cells, failed = grid.plan.jobs, grid.plan.cells, grid.failed()
    left = {job.key: job for job in grid.plan.remaining(grid.finished())}  # a start tries those that failed again
    for key, job in left.items():
        waits = f"  after {jobs[job.needs].title}" if job.needs in left else ""
        yield f"{job.stage:9} {key}  {job.title}{waits}{', failed before' if key in failed else ''}"
    missing = sum(key in left for key in cells.values())
    yield f"{len(left)} jobs for {missing} cells, {len(cells) - missing} cells are done"


def _runner(config: GridConfig) -> Callable:
    if config.engine == "ray":
        from idmm.transfer import cluster

        return cluster.run
    return run


class _Lines:
    """Logs where the grid stands, when that has changed."""

    def __init__(self, out: Path):
        self.out, self._last = out, ""
        self()

    def __call__(self) -> None:
        now = line(self.out)
        if now != self._last:
            self._last = now
            log.info("%s", now)
