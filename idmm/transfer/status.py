"""Progress of a grid: cells done, running, failed, and how long the rest may take."""

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from idmm.config import parsing
from idmm.errors import UserError
from idmm.progress import Bar, duration, log
from idmm.transfer.config import GridConfig
from idmm.transfer.run import Grid

LOOK = 1.0  # seconds between two looks at the folder
SAY = 10.0  # seconds between two lines


class GridStatus:
    """Counts the cells that are done and failed, and shows them: a bar on a terminal, log lines elsewhere."""

    def __init__(self, grid: Grid):
        self.grid, self._looked, self._logged, self._line = grid, 0.0, 0.0, ""
        self._bar: Bar | None = None
        self._seconds: dict[str, float] = {}  # of finished jobs, whose results never change

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Logs a line at the beginning and the end of the block, and shows the bar in between."""
        cells, off = len(self.grid.plan.cells), not sys.stderr.isatty()
        look = {"desc": "grid", "unit": "cell", "dynamic_ncols": True, "disable": off}
        with Bar(total=cells, initial=sum(self.counts()), **look) as self._bar:
            self._update()
            try:
                yield
            finally:
                self._update()

    def say(self) -> None:
        """Moves the bar; where there is none, logs a line if something changed and the last one is some time ago."""
        if time.monotonic() - self._looked >= LOOK:
            self._update(SAY)

    def _update(self, pause: float = 0.0) -> None:
        self._looked, line = time.monotonic(), self.line()
        if not self._bar.disable:
            self._bar.n = sum(self.counts())
            self._bar.set_postfix_str(line.partition("cells, ")[2])
            if pause:
                return
        if line != self._line and self._looked - self._logged >= pause:
            self._logged, self._line = self._looked, line
            log.info("%s", line)

    def counts(self) -> tuple[int, int]:
        """Returns the numbers of cells that are done and that failed."""
        finished, failed, jobs = self.grid.finished(), self.grid.failed(), self.grid.plan.jobs
        left = [key for key in self.grid.plan.cells.values() if key not in finished]
        lost = sum(key in failed or jobs[key].needs in failed for key in left)
        return len(self.grid.plan.cells) - len(left), lost

    def line(self) -> str:
        """Returns one line: cells done, failed, and the time that is left."""
        done, failed = self.counts()
        text = f"grid: {done} of {len(self.grid.plan.cells)} cells"
        text += f", {failed} failed" if failed else ""
        eta = self.seconds_left()
        return text + (f", about {duration(eta)} left" if eta else "")

    def text(self) -> str:
        """Returns that line, then one for each job that is running or failed."""
        lines = [self.line()]
        for key, owner in self.grid.locked_by_others().items():
            job = self.grid.plan.jobs.get(key)
            what = f"{job.title} ({job.stage}" if job else f"{key} (?"
            lines.append(f"  running: {what}, on {owner.get('host', '?')})")
        for record in self.grid.failed().values():
            lines.append(f"  failed: {record['title']}: {record['error']} ({self.grid.out / record['log']})")
        report = self.grid.out / "grid.md"
        return "\n".join([*lines, *([f"  results so far: {report}"] if report.exists() else [])])

    def seconds_left(self) -> float | None:
        """Returns the time for the jobs that are left, by the median job of their stage; None before any is done."""
        spent: dict[str, list[float]] = {}
        for key in self.grid.finished():
            job = self.grid.plan.jobs[key]
            if key not in self._seconds:
                self._seconds[key] = self.grid.result(job).get("seconds", 0.0)
            spent.setdefault(job.stage, []).append(self._seconds[key])
        left = self.grid.remaining()
        if not left or any(job.stage not in spent for job in left):
            return None
        return sum(statistics.median(spent[job.stage]) for job in left) / self.grid.parallel()


def status(out: str) -> str:
    """Returns what ``idmm transfer status`` prints; raises UserError where the folder holds no grid."""
    path = Path(out) / "grid.yaml"
    if not path.exists():
        raise UserError(f"{out}: there is no grid in it; wanted is the folder of a transfer run")
    return GridStatus(Grid(parsing.build(GridConfig, {**parsing.read_file(path), "out": out}))).text()
