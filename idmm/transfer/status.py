"""Where a grid stands: cells done, at work, failed, and how long the rest may take."""

import contextlib
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from idmm.config import parsing
from idmm.errors import UserError
from idmm.progress import Bar, duration
from idmm.transfer.config import GridConfig
from idmm.transfer.run import Grid

log = logging.getLogger("idmm")
LOOK = 1.0  # seconds between two looks at the folder
SAY = 10.0  # seconds between two lines


class GridStatus:
    """Counts jobs and cells, and says so now and then: a bar on a terminal, a line elsewhere.

    Args:
        grid: The grid.
    """

    def __init__(self, grid: Grid):
        self.grid, self.looked, self.said, self.shown = grid, 0.0, 0.0, ""
        self._bar: Bar | None = None
        self._seconds: dict[str, float] = {}  # of finished jobs, whose results never change

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Says where the grid stands at the beginning and the end of the block; meanwhile :meth:`say` does."""
        look = {"desc": "grid", "unit": "cell", "dynamic_ncols": True}
        with Bar(
            total=len(self.grid.plan.cells), initial=sum(self.counts()), disable=not sys.stderr.isatty(), **look
        ) as self._bar:
            self._tell()
            try:
                yield
            finally:
                self._tell()

    def say(self) -> None:
        """Moves the bar; where there is none, logs a line if something changed and the last one is some time ago."""
        if time.monotonic() - self.looked >= LOOK:
            self._tell(SAY)

    def _tell(self, pause: float = 0.0) -> None:
        self.looked, line = time.monotonic(), self.line()
        if self._bar is not None and not self._bar.disable:
            self._bar.n = sum(self.counts())
            self._bar.set_postfix_str(line.partition("cells, ")[2])
            if pause:
                return
        if line != self.shown and self.looked - self.said >= pause:
            self.said, self.shown = self.looked, line
            log.info("%s", line)

    def counts(self) -> tuple[int, int]:
        """Returns how many cells are done, and how many failed."""
        finished, failed, jobs = self.grid.finished(), self.grid.failed(), self.grid.plan.jobs
        left = [key for key in self.grid.plan.cells.values() if key not in finished]
        lost = sum(key in failed or jobs[key].needs in failed for key in left)
        return len(self.grid.plan.cells) - len(left), lost

    def line(self) -> str:
        """Returns a line: cells done, failed, and the time that is left."""
        done, failed = self.counts()
        text = f"grid: {done} of {len(self.grid.plan.cells)} cells"
        text += f", {failed} failed" if failed else ""
        eta = self.seconds_left()
        return text + (f", about {duration(eta)} left" if eta else "")

    def text(self) -> str:
        """Returns the line, then what is at work and what failed."""
        lines = [self.line()]
        for key, owner in self.grid.locks.held_by_others().items():
            job = self.grid.plan.jobs.get(key)
            what = f"{job.title} ({job.stage}" if job else f"{key} (?"
            lines.append(f"  running: {what}, on {owner.get('host', '?')})")
        for record in self.grid.failed().values():
            lines.append(f"  failed: {record['title']}: {record['error']} ({self.grid.out / record['log']})")
        return "\n".join(lines)

    def seconds_left(self) -> float | None:
        """Time for the jobs that are left, at the pace of those of their stage that are done; None before any is."""
        spent: dict[str, list[float]] = {}
        for key in self.grid.finished():
            job = self.grid.plan.jobs[key]
            if key not in self._seconds:
                self._seconds[key] = self.grid.result(job).get("seconds", 0.0)
            spent.setdefault(job.stage, []).append(self._seconds[key])
        left = self.grid.remaining()
        if not left or any(job.stage not in spent for job in left):
            return None
        return sum(statistics.median(spent[job.stage]) for job in left) / self.grid.at_once()


def status(out: str) -> str:
    """Returns where the grid in a folder stands, for ``idmm transfer status``.

    Raises:
        UserError: There is no grid.
    """
    path = Path(out) / "grid.yaml"
    if not path.exists():
        raise UserError(f"{out}: there is no grid in it; wanted is the folder of a transfer run")
    return GridStatus(Grid(parsing.build(GridConfig, {**parsing.read_file(path), "out": out}))).text()
