"""Stage 3, read from top to bottom: check, plan, run, report."""

import sys
from collections.abc import Callable

from idmm.config import parsing
from idmm.errors import Interrupted
from idmm.files import write_json
from idmm.progress import Interrupts, log, logging_to
from idmm.transfer.config import GridConfig
from idmm.transfer.plan import GridPlan
from idmm.transfer.preflight import check, length_notes
from idmm.transfer.run import Grid
from idmm.transfer.status import GridStatus


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
    counts = check(config, plan)
    grid = Grid(config, plan)
    if config.plan:
        from idmm.transfer.estimate import text

        for line in length_notes(grid, counts):
            print(line, file=sys.stderr)
        print("\n".join([*plan.notes, text(grid, counts)]))
        return grid.results()
    from idmm.report import render

    grid.write_config()
    grid.forget_failures()
    with logging_to(grid.out):
        for note in plan.notes:
            log.info("%s", note)
        for line in length_notes(grid, counts):
            log.warning("%s", line)
        del counts  # boxes and masks of large datasets take memory
        # -------------------------------------------------------------- jobs
        status = GridStatus(grid)
        try:
            with status.shown():
                if grid.remaining():
                    _runner(config)(grid, status.say)
        finally:
            # ---------------------------------------------------------- results
            results = grid.results()
            write_json(grid.out / "grid.json", results, indent=1)
            reported = render.write(grid.out, results)
        for record in grid.failed().values():
            log.error("failed: %s: %s (%s)", record["title"], record["error"], grid.out / record["log"])
    print(render.text(reported))
    return results


def _runner(config: GridConfig) -> Callable:
    if config.engine == "ray":
        from idmm.transfer.cluster import run
    elif config.workers > 1:
        from idmm.transfer.workers import run
    else:
        from idmm.transfer.run import work as run
    return run
