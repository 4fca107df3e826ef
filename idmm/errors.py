"""Errors for users, with their exit codes, and helpers for their texts."""

import difflib
import importlib.util
import re
from collections.abc import Callable, Iterable
from typing import Any


class Message(Exception):
    """An error that its text explains. Notebooks show no traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class UserError(Message):
    """One or more mistakes of the user. The command line prints one line per fault and exits with
    2.

    Args:
        faults: One line each: the field or file, its value, and what is expected. Control
            characters are escaped.
    """

    exit_code = 2

    def __init__(self, *faults: str):
        self.faults = tuple(abridged(one_line(fault)) for fault in faults)
        super().__init__("\n".join(self.faults))


class SizeError(UserError):
    """An image size that a model does not accept. The caller adds the field."""


class RunError(Message):
    """A run that cannot continue (diverged, out of memory, disk full): one line, exit code 1.

    Args:
        line: What happened.
        shared: Every process of the run raises it, so only one prints it.
    """

    exit_code = 1

    def __init__(self, line: str, shared: bool = False):
        super().__init__(one_line(line))
        self.shared = shared


class Interrupted(Message):
    """Ctrl-C or another stop signal, after the state was saved: exit code 130."""

    exit_code = 130


def checked(*checks: Callable[[], Any]) -> list:
    """Return the result of each check, or raise one UserError with the faults of all."""
    results = []
    faults = []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(*dict.fromkeys(faults))
    return results


def one_line(text: str) -> str:
    """Return a text with its control characters escaped, so that it takes one line."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def abridged(text: str, most: int = 800) -> str:
    """Return a text of at most ``most`` characters, without its middle if it is longer."""
    if len(text) <= most:
        return text
    return f"{text[: most - 200]} … {text[-150:]}"


def reason(error: Exception) -> str:
    """Return why a file operation failed in lower case, e.g. ``no such file or directory``."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def in_short(error: Exception) -> str:
    """Return type and text of a library's error in one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def needed(feature: str, libraries: Iterable[str], extra: str) -> None:
    """Raise UserError with the install command if libraries of an extra are missing."""
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"{feature}: needs {', '.join(missing)}. Install it with: pip install -e '.[{extra}]'"
        )


def nearest(word: str, words: Iterable[str]) -> str:
    """Return ``. Did you mean 'x'?`` for the most similar of ``words``, or an empty text."""
    # of other tools
    word = word.replace("learning_rate", "lr").replace("num_", "").replace("image_size", "size")
    matches = difflib.get_close_matches(word, list(words), n=1)
    if matches:
        return f". Did you mean '{matches[0]}'?"
    return ""


def by_reason(names: Iterable[str], reasons: Iterable[str]) -> list[str]:
    """Return lines ``name: reason``. More than five names with one reason share a line with their
    count."""
    groups: dict[str, list[str]] = {}
    for name, why in zip(names, reasons, strict=True):
        groups.setdefault(why, []).append(name)
    lines = []
    for why, names in groups.items():
        if len(names) <= 5:
            places = names
        else:
            places = [f"{len(names)} files ({listed(names)})"]
        lines += [one_line(f"{place}: {why}") for place in places]
    return lines


def capped(lines: list[str], begin: str = "  ") -> list[str]:
    """Return at most 20 lines, and a last one with the number of others that begins with
    ``begin``."""
    return [*map(one_line, lines[:20])] + (
        [f"{begin}and {len(lines) - 20} more"] if len(lines) > 20 else []
    )


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return at most ``most`` names joined by commas, and the number of others."""
    names = list(names)
    if len(names) > most:
        more = f" and {len(names) - most} more"
    else:
        more = ""
    return abridged(", ".join(names[:most]), 400) + more
