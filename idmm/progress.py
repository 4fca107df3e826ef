"""The progress bar, lines of progress in the log, and numbers as text."""

import contextlib
import io
import logging
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from idmm.batch import Batch
from idmm.display import Display
from idmm.errors import Interrupted, reason

log = logging.getLogger("idmm")
PROGRESS = 25  # level of lines of progress, between INFO and WARNING
LOG_SECONDS = 10.0  # between two lines of progress without a terminal


@contextlib.contextmanager
def drawing(name: str, verb: str = "drawn") -> Iterator[None]:
    """Turn errors inside the block into a warning, for files that no result depends on."""
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:  # a full disk, an unreadable font, too little memory
        log.debug(name, exc_info=True)
        log.warning(f"{name} is not {verb}: {reason(error)}")


class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """tqdm's bar on a terminal, else a log line every ten seconds."""

    monitor_interval = 0  # no thread, because loader workers are forked later

    def __init__(self, *args: Any, **options: Any):
        terminal = Display(sys.stderr)
        self.on_terminal = terminal.isatty()
        if self.on_terminal:
            options |= {"file": terminal, "dynamic_ncols": True}
        else:
            options |= {
                "file": io.StringIO(),
                "ncols": 0,
                "miniters": 1,
                "mininterval": LOG_SECONDS,
                "delay": LOG_SECONDS,
                "leave": False,
            }
        super().__init__(*args, **options)

    def will_draw(self) -> bool:
        """Whether the next update is visible."""
        return bool(not self.disable and self._time() - self.last_print_t >= self.mininterval)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the bar or log a line. An empty ``msg`` clears the bar."""
        if self.on_terminal:
            super().display(msg, pos)
        elif msg is None:
            log.log(PROGRESS, str(self))


def counting(batches: Iterable[Batch], total: int, label: str) -> Iterator[Batch]:
    """Yield batches of images with a progress bar."""
    with Bar(total=total, desc=label, unit="img", delay=1) as bar:
        for batch in batches:
            yield batch
            bar.update(len(batch["images"]))


def duration(seconds: float) -> str:
    """Return a time as text: '45 s', '12 min', '3 h 20 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return rows of cells as lines, in aligned columns, those in ``right`` to the right."""
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        justify = str.rjust if number in right else str.ljust
        width = max(map(len, cells))
        columns.append([justify(cell, width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
