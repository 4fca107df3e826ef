"""The log: what goes to standard error and what to files, lines of epochs, and signals that stop a
run."""

import logging
import math
import os
import platform
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from tqdm.auto import tqdm

from idmm.display import Display
from idmm.errors import Interrupted, Message, reason
from idmm.files import idmm_version
from idmm.progress import PROGRESS, log
from idmm.text import one_line

T = TypeVar("T")
EPOCH_LINES = 10  # log lines per stage, in addition to epochs with an evaluation
READERS = "image_store", "listing", "user_lists", "folder"  # of idmm.data
SCORES = ("top1", "top5", "knn", "ap", "ap50", "ap75", "mask_ap", "miou", "macc", "pixel_accuracy")
# other keys are measurements
BOOKKEEPING = ("epoch", "stage", "step", "loss", "lr", "seconds", "images_per_s")


class Screen(logging.Handler):
    """Prints records on standard error, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = self.format(record).split("\n")
        with suppress(Exception):  # of a bar of the caller's
            tqdm.write("\n".join(map(one_line, lines)), file=Display(sys.stderr))


def screen() -> logging.Handler:
    """Return the handler of the first process, which prints, or that of another one, which does
    not."""
    if first_process():
        return Screen()
    return logging.NullHandler()


def first_process() -> bool:
    """Return whether this process prints: the only one or the first. A shell may have RANK set
    without others."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


@contextmanager
def logging_by(*handlers: logging.Handler) -> Iterator[None]:
    """Log to handlers from INFO up inside the block, and close them after it.

    Nothing that writes to standard error inside the block gets its errors.
    """
    level = log.level
    log.setLevel(logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        with redirect_stderr(Display(sys.stderr)):
            yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            with suppress(OSError):  # of a full disk, as above
                handler.close()
        log.setLevel(level)


@contextmanager
def filtering(
    targets: Sequence[logging.Filterer], is_logged: Callable[[logging.LogRecord], bool]
) -> Iterator[None]:
    """Filter the records of loggers or handlers inside the block."""
    for target in targets:
        target.addFilter(is_logged)
    try:
        yield
    finally:
        for target in targets:
            target.removeFilter(is_logged)


def details_in_file() -> AbstractContextManager[None]:
    """Print only lines of progress inside the block. Files get every line as usual."""
    screens = [handler for handler in log.handlers if isinstance(handler, Screen)]
    return filtering(screens, lambda record: record.levelno == PROGRESS)


def log_once() -> AbstractContextManager[None]:
    """Log each message about a folder or list of images only once inside the block, even if it is
    read again."""
    logged: dict[str, logging.LogRecord] = {}

    def is_first(record: logging.LogRecord) -> bool:
        return logged.setdefault(record.msg, record) is record

    return filtering([logging.getLogger(f"idmm.data.{name}") for name in READERS], is_first)


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Log to standard error and to FOLDER/log.txt inside the block, in the first process only.

    The file gets no lines of progress. It begins with the command and versions.
    """
    if not first_process():
        with logging_by(logging.NullHandler()):
            yield
        return
    if any(isinstance(handler, Screen) for handler in log.handlers):
        screens = []
    else:
        screens = [Screen()]
    try:
        file: logging.Handler = logging.FileHandler(
            folder / "log.txt", encoding="utf-8", errors="backslashreplace"
        )
    except OSError as error:
        file = logging.NullHandler()
        log.warning(f"{folder / 'log.txt'}: cannot be written ({reason(error)})")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    file.addFilter(lambda record: record.levelno != PROGRESS)
    # more important files report a full disk
    file.handleError = lambda record: None  # type: ignore[method-assign]  # of this handler only
    versions = f"idmm {idmm_version()}, torch {version('torch')}, timm {version('timm')}"
    _log_to(
        file, logging.INFO, f"{shlex.join(map(str, sys.argv))} ({versions}, {platform.platform()})"
    )
    propagate = log.propagate
    log.propagate = False
    try:
        with logging_by(*screens, file):
            try:
                yield
            except Message as error:  # the caller prints it
                for line in str(error).splitlines():
                    _log_to(file, logging.ERROR, line)
                raise
    finally:
        log.propagate = propagate


def _log_to(handler: logging.Handler, level: int, line: str) -> None:
    """Log a line to one handler only."""
    handler.handle(log.makeRecord(log.name, level, __file__, 0, line, (), None))


def stop_signals() -> list[int]:
    """Return the signals that stop a run, without those that are ignored, as by nohup."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    # Windows lacks the last two
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


class Interrupts:
    """Turns Ctrl-C and the other :func:`stop_signals` into a flag for the training loop to check
    between steps.

    Before and after the loop (``deferred`` is False), and at a second Ctrl-C, KeyboardInterrupt is
    raised at once. Other signals may come twice, as from a terminal that closes.
    """

    def __init__(self) -> None:
        self.requested = False
        self.deferred = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        # Python allows handlers only there
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        is_first = not self.requested
        self.requested = True
        if is_first and self.deferred:
            return
        if is_first or number == signal.SIGINT:
            raise KeyboardInterrupt

    def watch(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and raise Interrupted after a signal.

        One of several processes continues to the end, because the others may wait for it.
        """
        from idmm import distributed  # torch, which 'idmm transfer status' does not need

        for item in items:
            if self.requested and distributed.world() == 1:
                raise Interrupted("interrupted. Repeat the command to continue")
            yield item


def epoch_line(record: dict[str, Any], epochs: int | None, start: float, end: float) -> str | None:
    """Return the log line of an epoch with all measurements, or None if it needs none.

    Args:
        record: Of the epoch.
        epochs: Of the stage. None: unknown.
        start, end: Progress of the stage before and after the epoch, from 0 to 1.
    """
    tenths = [math.floor(share * EPOCH_LINES + 1e-9) for share in (start, end)]
    scores = [f"{name} {record[name]:.2f}" for name in SCORES if record.get(name) is not None]
    if not scores and tenths[0] == tenths[1]:
        return None
    others = [
        f"{name} {value:.4g}"
        for name, value in record.items()
        if name not in (*BOOKKEEPING, *SCORES)
    ]
    of = "" if epochs is None else f"/{epochs}"
    return "  ".join(
        [f"epoch {record['epoch']}{of}", f"loss {record['loss']:.4f}", *scores, *others]
    )
