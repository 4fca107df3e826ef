"""What a run shows and listens to: the log, the progress bar, Ctrl-C and SIGTERM."""

import contextlib
import io
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from idmm.errors import Interrupted, RunError, UserError, reason

log = logging.getLogger("idmm")
LOG_SECONDS = 10.0  # between two lines of progress where there is no terminal to draw a bar on
EPOCH_LINES = 10  # a stage logs, and one wherever it measured an accuracy
READERS = "image_store", "listing", "user_lists", "folder"  # of idmm.data
SCORES = ("top1", "top5", "knn", "ap", "ap50", "ap75", "mask_ap", "miou", "macc", "pixel_accuracy")
BOOKKEEPING = ("epoch", "stage", "step", "loss", "lr", "seconds", "images_per_s")  # the rest of a record is measured


class KeptLog(MemoryHandler):
    """Keeps records until :func:`logging_to` opens a log, where they then stand first; shows warnings at once, those
    of the first process."""

    def __init__(self):
        super().__init__(sys.maxsize, flushLevel=sys.maxsize, flushOnClose=False)

    def emit(self, record):
        super().emit(record)
        if record.levelno >= logging.WARNING and first_process():
            logging.lastResort.handle(record)


def first_process() -> bool:
    """Whether this process prints: the only one, or the first of several. A shell may have RANK set without them."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def logging_by(*handlers: logging.Handler) -> Iterator[None]:
    """Gives handlers what is logged inside the block, from INFO on, and closes them after it."""
    level = log.level
    log.setLevel(logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        log.setLevel(level)


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Has what is said of a folder or list of images said once inside the block, though parts of a command read them
    again."""
    said: dict[tuple, logging.LogRecord] = {}

    def first(record: logging.LogRecord) -> bool:
        key = (record.msg, *(record.args or ())[:1])  # the words, and the folder or file
        return said.setdefault(key, record) is record

    readers = [logging.getLogger(f"idmm.data.{name}") for name in READERS]
    for reader in readers:
        reader.addFilter(first)
    try:
        yield
    finally:
        for reader in readers:
            reader.removeFilter(first)


@contextlib.contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Logs to standard error and to FOLDER/log.txt inside the block; only of the first process."""
    if not first_process():
        with logging_by(logging.NullHandler()):
            yield
        return
    shown = logging.StreamHandler(sys.stderr)
    try:
        kept: logging.Handler = logging.FileHandler(folder / "log.txt", encoding="utf-8")
    except OSError as error:
        kept = logging.NullHandler()
        log.warning("%s: cannot be written (%s)", folder / "log.txt", reason(error))
    kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    kept.handleError = lambda record: None  # a full disk shows where it matters
    for early in (before := [handler for handler in log.handlers if isinstance(handler, KeptLog)]):
        log.removeHandler(early)
        for record in early.buffer:
            for handler in (kept,) if record.levelno >= logging.WARNING else (shown, kept):
                handler.handle(record)
        early.buffer.clear()
    propagate, log.propagate = log.propagate, False
    try:
        with logging_by(shown, kept), logging_redirect_tqdm([log]):
            try:
                yield
            except (Interrupted, RunError, UserError) as error:  # whoever catches it shows it; the file is to say it
                for line in str(error).splitlines():
                    kept.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, line, None, None))
                raise
    finally:
        log.propagate = propagate
        for early in before:  # for what is said before the next log
            log.addHandler(early)


@contextlib.contextmanager
def drawing(name: str, how: str = "drawn", fatal: tuple[type[Exception], ...] = (Interrupted,)) -> Iterator[None]:
    """Only warns where the block cannot make a file that results do without, a picture above all."""
    try:
        yield
    except fatal:
        raise
    except Exception as error:  # a full disk, say, a font that matplotlib cannot read, or too little memory
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        log.warning("%s is not %s: %s%s", name, how, kind, error)


class Interrupts:
    """Turns Ctrl-C and SIGTERM into a flag that the training loop looks at between steps.

    Where nobody looks (``patient`` is False: before and after the loop), and at a second signal, KeyboardInterrupt is
    raised at once.
    """

    def __init__(self):
        self.asked = False
        self.patient = False

    def __enter__(self) -> "Interrupts":
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number, frame) -> None:
        if self.asked or not self.patient:
            raise KeyboardInterrupt
        self.asked = True

    def watch(self, items: Iterable) -> Iterator:
        """Yields the items until a signal comes; then raises Interrupted.

        One of several processes goes on to the end: the others may wait there for its part.
        """
        from idmm import distributed  # torch, which 'idmm transfer status' does without

        for item in items:
            if self.asked and distributed.world() == 1:
                raise Interrupted("interrupted; the same command goes on")
            yield item


class Bar(tqdm):
    """tqdm's bar on a terminal; elsewhere its text is a line of the log every ten seconds."""

    monitor_interval = 0  # no thread: loader workers are forked later

    def __init__(self, *args, **given):
        self.drawn = sys.stderr.isatty()
        lines = dict(file=io.StringIO(), ncols=0, miniters=1, mininterval=LOG_SECONDS, delay=LOG_SECONDS, leave=False)
        super().__init__(*args, **{**given, **(dict(dynamic_ncols=True) if self.drawn else lines)})

    def due(self) -> bool:
        """Whether the next update shows."""
        return not self.disable and self._time() - self.last_print_t >= self.mininterval

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Shows how far it is; an empty ``msg`` clears the bar."""
        if self.drawn:
            super().display(msg, pos)
        elif msg is None:
            log.info("%s", self)


def counting(batches: Iterable[dict], total: int, label: str) -> Iterator[dict]:
    """Yields batches of images, showing how far they are."""
    with Bar(total=total, desc=label, unit="img", delay=1) as bar:
        for batch in batches:
            yield batch
            bar.update(len(batch["images"]))


def epoch_line(record: dict, epochs: int | None, before: float, after: float) -> str | None:
    """Returns the log's line on an epoch, with all that was measured; None: there is none.

    Args:
        record: Of the epoch.
        epochs: Of the stage; None: not known.
        before: Share of the stage that was over before the epoch.
        after: And after it.
    """
    tenths = [math.floor(share * EPOCH_LINES + 1e-9) for share in (before, after)]
    scores = [f"{name} {record[name]:.2f}" for name in SCORES if name in record]
    if not scores and tenths[0] == tenths[1]:
        return None
    others = [f"{name} {value:.4g}" for name, value in record.items() if name not in (*BOOKKEEPING, *SCORES)]
    of = "" if epochs is None else f"/{epochs}"
    return "  ".join([f"epoch {record['epoch']}{of}", f"loss {record['loss']:.4f}", *scores, *others])


def brief(value: float) -> str:
    """A number with two digits that matter, as people write it: '0.013', '1.5', '100'."""
    return f"{float(f'{value:.2g}'):g}"


def duration(seconds: float) -> str:
    """A time as people say it: '45 s', '12 min', '3 h 20 min', '2 days'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min"
    return f"{seconds / 86400:.1f} days"


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Returns rows of cells as lines, each column as wide as its longest cell; columns ``right`` stand at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ways = [str.rjust if number in right else str.ljust for number in range(len(widths))]
    return ["  ".join(way(*of) for way, *of in zip(ways, row, widths, strict=True)).rstrip() for row in rows]


def size(count: float) -> str:
    """Bytes as people say them: '66 MB'."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.0f} {units[0]}"
