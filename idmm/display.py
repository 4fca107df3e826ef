"""Standard output and standard error that keep their errors, so that a lost terminal never ends the
work."""

import contextlib
import io
import os
import sys
from typing import Any

from idmm.errors import RunError, reason


class Display:
    """A stream of text that keeps its errors: a lost terminal, a closed pipe, a full disk.

    Letters that its encoding lacks are escaped.

    Args:
        stream: Where text goes. None, as of a process that was started without: nowhere.

    Attributes:
        error: Why text was lost, the last time. It is missing if all was written.
    """

    error: Exception

    def __init__(self, stream: Any):
        self.stream = stream or io.StringIO()

    def write(self, text: str) -> int:
        """Write and flush a text, and return its length."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except UnicodeEncodeError as error:
            self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError) as error:  # a ValueError if the caller closed it
            self.error = error
        return len(text)

    def flush(self) -> None:
        """Do nothing, because every write is flushed."""

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        with contextlib.suppress(ValueError):
            return self.stream.isatty()
        return False

    def release(self) -> None:
        """Lead a stream that failed to nowhere. Else Python would fail to empty its buffer, and
        exit with 120."""
        if lost(self):
            with contextlib.suppress(Exception):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __eq__(self, other: object) -> bool:
        """Return whether both write to the same stream, so that tqdm clears its bars there."""
        return self.stream is getattr(other, "stream", other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def lost(stream: Any) -> Exception | None:
    """Return why text of a stream was lost; None if all was written."""
    return getattr(stream, "error", None)


def show(text: str) -> None:
    """Print the result of a run. It is saved, so an error of standard output does not matter."""
    print(text, file=Display(sys.stdout))


def output_code() -> int:
    """Return the exit code of a command whose result is its output: 0, or 141 if the reader closed
    the pipe.

    Raises:
        RunError: Standard output cannot be written.
    """
    error = lost(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 141  # as of a shell's tools
    if error:
        raise RunError(f"standard output: cannot be written ({reason(error)})")
    return 0


def open_closed() -> None:
    """Open the standard streams that are closed, to nowhere. Else a file would get a number that
    libraries write to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
