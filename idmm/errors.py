"""What can go wrong for a user, and the exit code it ends with."""

import difflib
import importlib.util
import re
from collections.abc import Callable, Iterable
from os.path import commonprefix
from typing import Any


class UserError(Exception):
    """One or more mistakes that the user can mend; the command line prints a line a fault and exits 2.

    Args:
        faults: One line each, naming the field or file, what it was and what is wanted.
    """

    exit_code = 2

    def __init__(self, *faults: str):
        super().__init__("\n".join(faults))
        self.faults = faults


class SizeError(UserError):
    """An image size that a model cannot take; who asked for it says in which field."""


class RunError(Exception):
    """A run that could not go on (diverged, out of memory, disk full): one line, exit code 1.

    Args:
        line: What happened.
        shared: Every process of the run raises it, so one of them may speak for all.
    """

    exit_code = 1

    def __init__(self, line: str, shared: bool = False):
        super().__init__(line)
        self.shared = shared


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: whatever could be saved was saved; exit code 130."""

    exit_code = 130


def checked(*checks: Callable[[], Any]) -> list:
    """Returns what each check returns; a single UserError with all that they find."""
    found, faults = [], []
    for check in checks:
        try:
            found.append(check())
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(*faults)
    return found


def one_line(text: str) -> str:
    """Returns a name with its line ends and other control characters escaped, so that it takes one line."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


def reason(error: Exception) -> str:
    """Returns in a few small letters why a file operation failed, e.g. ``no such file or directory``."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def in_short(error: Exception) -> str:
    """Returns an error of a library, which may have many lines, with its kind in 200 characters at most."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def needed(what: str, libraries: Iterable[str], extra: str) -> None:
    """Raises UserError, with what installs them, where libraries of an extra are missing that something needs."""
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise UserError(f"{what}: needs {', '.join(missing)}; install it with: {install(extra)}")


def install(extra: str) -> str:
    """Returns the command that installs an extra, in the checkout."""
    return f"pip install -e '.[{extra}]'"


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?`` for the known word most like ``word``, or nothing; of two as alike, that
    which begins as it does."""

    def likeness(match: str) -> tuple[float, int]:
        return difflib.SequenceMatcher(None, match, word).ratio(), len(commonprefix([match, word]))

    best = max(difflib.get_close_matches(word, list(known), n=5, cutoff=0.6), key=likeness, default=None)
    return f"; did you mean '{best}'?" if best else ""


def by_reason(names: Iterable[str], reasons: Iterable[str], most: int = 5) -> list[str]:
    """Returns ``name: reason`` a line; more names than ``most`` with one reason in a single line, with their count."""
    groups: dict[str, list[str]] = {}
    for name, why in zip(names, reasons, strict=True):
        groups.setdefault(why, []).append(name)
    lines = []
    for why, alike in groups.items():
        places = alike if len(alike) <= most else [f"{len(alike)} files ({listed(alike, most)})"]
        lines += [one_line(f"{place}: {why}") for place in places]
    return lines


def capped(lines: list[str], most: int = 20, begin: str = "  ") -> list[str]:
    """Cuts a list of lines after ``most`` of them, and counts the rest in a line that begins as they do."""
    return [*map(one_line, lines[:most])] + ([f"{begin}and {len(lines) - most} more"] if len(lines) > most else [])


def listed(names: Iterable[str], most: int = 5) -> str:
    """Joins names for one line of text, cutting the list after ``most`` of them."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
