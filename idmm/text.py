"""Words, names and lists in messages."""

import difflib
import re
from collections.abc import Iterable, Sequence


def counted(n: int, noun: str) -> str:
    """Return ``1 image`` or ``2 images``."""
    if n == 1:
        return f"1 {noun}"
    return f"{n} {noun}s"


def one_line(text: str) -> str:
    """Return a text with its control characters escaped, so that it takes one line."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def abridged(text: str, most: int = 800) -> str:
    """Return a text of at most ``most`` characters, without its middle if it is longer."""
    if len(text) <= most:
        return text
    return f"{text[: most - 200]} … {text[-150:]}"


def closest(word: str, words: Iterable[str]) -> str:
    """Return the most similar of ``words``, or an empty text if none is similar."""
    # other tools' names of keys
    word = word.replace("learning_rate", "lr").replace("num_", "").replace("image_size", "size")
    return "".join(difflib.get_close_matches(word, list(words), n=1))


def nearest(word: str, words: Iterable[str]) -> str:
    """Return ``Did you mean 'x'?`` for the most similar of ``words``, or an empty text."""
    match = closest(word, words)
    if match:
        return f"Did you mean '{match}'?"
    return ""


def by_reason(names: Iterable[str], reasons: Iterable[str]) -> list[str]:
    """Return lines ``name: reason``. More than five names of one reason share a line."""
    groups: dict[str, list[str]] = {}
    for name, reason in zip(names, reasons, strict=True):
        groups.setdefault(reason, []).append(name)
    lines = []
    for reason, members in groups.items():
        if len(members) > 5:
            members = [f"{len(members)} files ({listed(members)})"]
        lines += [one_line(f"{member}: {reason}") for member in members]
    return lines


def capped(lines: Sequence[str], begin: str = "  ") -> list[str]:
    """Return at most 20 lines, and one more with the number of the others, after ``begin``."""
    first = [*map(one_line, lines[:20])]
    if len(lines) > 20:
        first.append(f"{begin}and {len(lines) - 20} more")
    return first


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return at most ``most`` names joined by commas, and the number of others."""
    names = list(names)
    text = abridged(", ".join(names[:most]), 400)
    if len(names) > most:
        return f"{text} and {len(names) - most} more"
    return text
