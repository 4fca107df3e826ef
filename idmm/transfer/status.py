"""Where a grid stands: cells done, at work, failed, and how long the rest may take."""

import contextlib
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from idmm import options
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
        counts, on_terminal = self.counts(), sys.stderr.isatty()
        look = {"desc": "grid", "unit": "cell", "dynamic_ncols": True}
        total, begun = sum(counts[name] for name in ("done", "failed", "left")), counts["done"] + counts["failed"]
        with Bar(total=total, initial=begun, disable=not on_terminal, **look) as self._bar:
            self._tell()
            try:
                yield
            finally:
                self._tell()

    def say(self, grid: Grid) -> None:
        """Moves the bar; where there is none, logs a line if something changed and the last one is some time ago."""
        if time.monotonic() - self.looked >= LOOK:
            self._tell(SAY)

    def _tell(self, pause: float = 0.0) -> None:
        self.looked, counts = time.monotonic(), self.counts()
        line = self.line(counts)
        if self._bar is not None and not self._bar.disable:
            self._bar.n = counts["done"] + counts["failed"]
            self._bar.set_postfix_str(line.partition("cells, ")[2])
            if pause:
                return
        if line != self.shown and self.looked - self.said >= pause:
            self.said, self.shown = self.looked, line
            log.info("%s", line)

    def counts(self) -> dict[str, int]:
        """Cells by ``done``, ``failed`` and ``left``; jobs ``running``."""
        finished, failed = self.grid.finished(), self.grid.failed()
        cells = list(self.grid.plan.cells.values())
        jobs = self.grid.plan.jobs
        done = sum(key in finished for key in cells)
        lost = sum(key not in finished and (key in failed or jobs[key].needs in failed) for key in cells)
        running = len(self.grid.locks.held_by_others())
        return {"done": done, "failed": lost, "left": len(cells) - done - lost, "running": running}

    def line(self, counts: dict[str, int]) -> str:
        """Returns a line: cells done, failed, and the time that is left."""
        text = f"grid: {counts['done']} of {sum(counts[n] for n in ('done', 'failed', 'left'))} cells"
        text += f", {counts['failed']} failed" if counts["failed"] else ""
        eta = self.seconds_left()
        return text + (f", about {duration(eta)} left" if eta else "")

    def text(self) -> str:
        """Returns the line, then what is at work and what failed."""
        lines = [self.line(self.counts())]
        for key, owner in self.grid.locks.held_by_others().items():
            job = self.grid.plan.jobs.get(key)
            lines.append(f"  running: {job.title if job else key} ({job.stage if job else '?'}, on {owner['host']})")
        for record in self.grid.failed().values():
            lines.append(f"  failed: {record['title']}: {record['error']} ({self.grid.out / record['log']})")
        return "\n".join(lines)

    def seconds_left(self) -> float | None:
        """Time for the jobs that are left, at the pace of those of their stage that are done; None before any is."""
        spent: dict[str, list[float]] = {}
        for key in self.grid.finished():
            job = self.grid.plan.jobs[key]
            if key not in self._seconds:
                result = json.loads((self.grid.out / job.folder / "result.json").read_text())
                self._seconds[key] = result.get("seconds", 0.0)
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
    return GridStatus(Grid(options.build(GridConfig, {**options.read_file(path), "out": out}))).text()
