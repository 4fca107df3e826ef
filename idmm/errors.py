"""Errors for users, with their exit codes, and helpers for their texts."""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from idmm.text import abridged, one_line


class Message(Exception):
    """An error that its text explains. Notebooks show no traceback."""

    exit_code: int  # of the command
    shared = True  # whether every process of the run raises it, so that only the first prints it

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@dataclass(frozen=True)
class Fault:
    """A mistake of the user. The command line prints it as one sentence and a hint."""

    field: str  # key of the config, or file. Empty: the text names it
    text: str  # what is wrong, and what is expected
    hint: str = ""  # what to do, a sentence of its own

    def __str__(self) -> str:
        """Return one line of at most 800 characters. Control characters are escaped."""
        sentence = self.text
        if self.field:
            sentence = f"{self.field}: {sentence}"
        if self.hint:
            sentence = f"{sentence}. {self.hint}"
        return abridged(one_line(sentence))

    def within(self, owner: str) -> "Fault":
        """Return the fault with the owner of its field, e.g. ``sources 'a': data.root``."""
        if self.field:
            owner = f"{owner}: {self.field}"
        return replace(self, field=owner)


class UserError(Message):
    """One or more mistakes of the user. The command line prints a line per fault and exits with 2.

    Args:
        faults: What is wrong, each once.
    """

    exit_code = 2

    def __init__(self, *faults: Fault):
        self.faults = tuple(dict.fromkeys(faults))
        super().__init__(*self.faults)

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))

    @classmethod
    def of(cls, field: str, text: str, hint: str = "") -> Self:
        """Return the error of a single :class:`Fault`."""
        return cls(Fault(field, text, hint))


class SizeError(UserError):
    """An image size that a model does not accept. The caller adds the field."""


class RunError(Message):
    """A run that cannot continue (diverged, out of memory, disk full): one line, exit code 1.

    Args:
        message: What happened.
        shared: Every process of the run raises it, so only one prints it.
    """

    exit_code = 1

    def __init__(self, message: str, shared: bool = False):
        super().__init__(one_line(message))
        self.shared = shared


class Interrupted(Message):
    """Ctrl-C or another stop signal, after the state was saved: exit code 130."""

    exit_code = 130


def checked(*checks: Callable[[], Any]) -> list[Any]:
    """Return the result of each check, or raise one UserError with the faults of all."""
    results = []
    faults: list[Fault] = []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(*faults)
    return results


def reason(error: Exception) -> str:
    """Return why a file operation failed in lower case, e.g. ``no such file or directory``."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def in_short(error: Exception) -> str:
    """Return type and text of a library's error in one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def needed(feature: str, libraries: Iterable[str], extra: str) -> None:
    """Raise UserError with the install command if libraries of an extra are missing."""
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise UserError.of(
            feature,
            f"needs {', '.join(missing)}",
            f"Install it with: pip install -e '.[{extra}]'",
        )
