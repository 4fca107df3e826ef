"""Where a grid stands: cells done and failed, jobs under way."""

from pathlib import Path

from idmm.config import parsing
from idmm.errors import UserError
from idmm.transfer.config import GridConfig
from idmm.transfer.run import DEATHS, Grid


def line(grid: Grid) -> str:
    """Returns one line: cells done and failed."""
    finished, failed, jobs = grid.finished(), grid.failed(), grid.plan.jobs
    keys = grid.plan.cells.values()
    lost = sum(key not in finished and (key in failed or jobs[key].needs in failed) for key in keys)
    done = f"grid: {sum(key in finished for key in keys)} of {len(keys)} cells"
    return done + (f", {lost} failed" if lost else "")


def status(out: str) -> str:
    """Returns what ``idmm transfer status`` prints; raises UserError if the folder holds no grid."""
    path = Path(out) / "grid.yaml"
    if not path.exists():
        raise UserError(f"{out}: there is no grid in it; wanted is the folder of a transfer run")
    grid = Grid(parsing.build(GridConfig, {**parsing.read_file(path), "out": out}))
    lines, jobs = [line(grid)], grid.plan.jobs
    for key, count in grid.starts().items():
        again = f" (start {count}; a job whose process died {DEATHS} times fails)" if count > 1 else ""
        lines.append(f"  under way, or killed: {jobs[key].title}{again}")
    for record in grid.failed().values():
        lines.append(f"  failed: {record['title']}: {record['error']} ({grid.out / record['log']})")
    report = grid.out / "grid.md"
    return "\n".join([*lines, *([f"  results so far: {report}"] if report.exists() else [])])
