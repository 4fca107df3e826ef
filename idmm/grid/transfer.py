"""Stage 3, from top to bottom: check, plan, run, report."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator

from idmm.config import parsing
from idmm.display import show
from idmm.files import Json, Lock, write_json
from idmm.grid import cluster
from idmm.grid.config import GridConfig
from idmm.grid.plan import GridPlan
from idmm.grid.preflight import check
from idmm.grid.run import Grid, run
from idmm.progress import log
from idmm.text import listed
from idmm.training.log import logging_to


def transfer(config: GridConfig | Json | str) -> Json:
    """Fill a transfer grid and write its tables and pictures to ``config.out``.

    Args:
        config: A GridConfig, a mapping of its keys, or the path of a YAML file.

    Returns:
        The content of ``grid.json``. Each of its ``cells`` has the ``status`` ok, failed or
        missing.

    Raises:
        UserError: All faults of the grid, before the first job starts.
        Interrupted: Ctrl-C or another stop signal. The same call resumes the grid.
    """
    config = parsing.build(GridConfig, config)
    plan = GridPlan(config)
    if config.plan and not plan.faults:  # printed even if datasets are missing
        print("\n".join([*plan.notes, *_planned(Grid(config, plan))]))
    check(config, plan)
    grid = Grid(config, plan)
    if config.plan:
        return grid.results()
    from idmm.report import render

    lock = Lock(grid.out / ".lock")
    lock.acquire_output(grid.out)
    with contextlib.closing(lock), logging_to(grid.out):
        grid.start()
        for note in plan.notes:
            log.info(note)
        try:
            grid.log_progress()
            if grid.remaining():
                if config.engine == "ray":
                    cluster.run(grid)
                else:
                    run(grid)
        finally:
            results = grid.results()
            write_json(grid.out / "grid.json", results)
            text = render.write(grid.out, results)
        _warn_of_changes(results["cells"])
        for failure in grid.failures().values():
            log.error(f"failed: {failure.title}: {failure.error} ({grid.out / failure.log})")
    show(text)
    return results


def command(config: GridConfig) -> int:
    """Run ``idmm transfer``, and return the exit code: 1 if a cell has no result."""
    cells = transfer(config)["cells"]
    return int(not config.plan and any(cell["status"] != "ok" for cell in cells))


def _warn_of_changes(cells: list[Json]) -> None:
    """Warn of targets whose runs had different numbers of test images."""
    sizes = defaultdict(set)
    for cell in cells:
        if cell["test_size"] is not None:
            sizes[cell["target"]].add(cell["test_size"])
    for target, counts in sizes.items():
        if len(counts) > 1:
            log.warning(
                f"target '{target}': its images changed between runs "
                f"({listed(map(str, sorted(counts)))} test images). Rerun it in a new --out"
            )


def _planned(grid: Grid) -> Iterator[str]:
    """Yield a line for each remaining job, with the job that it waits for, then the counts."""
    jobs = grid.plan.jobs
    cells = grid.plan.cells
    failures = grid.failures()
    # a start retries the failed ones
    remaining = {job.key: job for job in grid.plan.remaining(grid.finished())}
    for key, job in remaining.items():
        columns = [f"{job.command:9} {key}", job.title]
        if job.command == "pretrain":
            columns.append(_training(**job.config["train"]))
        if job.needs in remaining:
            columns.append(f"after {jobs[job.needs].title}")
        text = "  ".join(columns)
        if key in failures:
            text += ", failed before"
        yield text
    missing = sum(key in remaining for key in cells.values())
    yield f"{len(remaining)} jobs for {missing} cells, {len(cells) - missing} cells are done"


def _training(
    *, minutes: float | None, epochs: int, batch_size: int, optimizer: str, **_: object
) -> str:
    """Return the main keys of a config's ``train`` as text."""
    if minutes is None:
        return f"{epochs} epochs, batches of {batch_size}, {optimizer}"
    return f"{minutes:g} min, batches of {batch_size}, {optimizer}"
