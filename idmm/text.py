"""Words, names and lists in messages."""

import difflib
import re
from collections.abc import Iterable


def counted(n: int, what: str) -> str:
    """Return ``1 image`` or ``2 images``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def one_line(text: str) -> str:
    """Return a text with its control characters escaped, so that it takes one line."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def abridged(text: str, most: int = 800) -> str:
    """Return a text of at most ``most`` characters, without its middle if it is longer."""
    if len(text) <= most:
        return text
    return f"{text[: most - 200]} … {text[-150:]}"


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
