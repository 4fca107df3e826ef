"""The file for ``data.exclude``: what a check found that should be left out."""

from collections.abc import Sequence
from pathlib import Path

from idmm.data.doctor import ImageRef, Pair
from idmm.data.user_lists import quoted
from idmm.files import home, write_bytes

_COMMENT = "#"
_STAYS = ("unlabelled", "train", "val", "test")  # of equal images the last one's stays


def exclusions(
    pairs: Sequence[Pair], unreadable: Sequence[dict] = (), suspected: dict[str, Sequence[dict]] | None = None
) -> list[str]:
    """Returns the lines of a file for ``data.exclude``: what should be left out, a line each, under a comment with all
    reasons; broken files first, then images that are the same, then those that are nearly so.

    Of images that are the same one stays: the first of the test split, else of val, else of train. Where those of that
    split are of different classes none stays, as one of them is wrong. Nearly equal ones are there, commented out: of a
    pair across splits the training image, else the second. So are ``suspected`` images, by what they are.
    """
    reasons: dict[str, list[str]] = {bad["name"]: [f"unreadable ({bad['reason']})"] for bad in unreadable}
    same: dict[ImageRef, list[ImageRef]] = {}
    for pair in pairs:
        if pair.exact:
            same.setdefault(pair.first, [pair.first]).append(pair.second)
    for images in same.values():
        last = max((image.split for image in images), key=_STAYS.index)
        kept = [image for image in images if image.split == last]
        wrong = len({image.label for image in kept} - {None}) > 1
        for image in images:
            why = f"the same as {quoted(kept[0].name)}"
            if wrong and image in kept:
                other = next(other for other in kept if other.label != image.label)
                why = (
                    f"the same as {quoted(other.name)}, but of class '{image.label}', not '{other.label}': one is wrong"
                )
            if wrong or image != kept[0]:
                reasons.setdefault(image.name, []).append(why)
    certain = set(reasons)
    for why, images in (suspected or {}).items():
        for image in images:
            reasons.setdefault(image["name"], []).append(why)
    for pair in pairs:
        if not pair.exact:
            out, other = (pair.first, pair.second) if pair.leaks else (pair.second, pair.first)
            why = f"nearly the same as {quoted(other.name)} ({pair.similarity:.3f})"
            reasons.setdefault(out.name, []).append(why)
    head = [f"{_COMMENT} a {_COMMENT} before a path: only suspected, left out once you remove it"]
    lines = head if reasons.keys() - certain else []
    for name, why in reasons.items():
        lines.append(f"{_COMMENT} {'; '.join(why)}\n{'' if name in certain else _COMMENT}{quoted(name)}")
    return lines


def write_exclusions(command: str, before: str | None, lines: list[str], path: Path) -> str:
    """Writes a file for ``data.exclude``, after what was left out already, by the file ``before``; ``command``: what
    finds it. Returns a line on what to do with it."""
    if before is not None:
        head = home(before).read_bytes().rstrip(b"\n")
    else:
        head = f"# for --data.exclude: what '{command}' would leave out".encode()
    content = b"\n".join([head, *(line.encode("utf-8", "surrogateescape") for line in lines), b""])
    note = ""
    if path.exists() and path.read_bytes() != content:  # it may have been edited
        old = path.replace(path.with_suffix(".old.txt"))
        note = f" (the one before is {old.name})"
    write_bytes(path, content)
    return f"{path}{note}; leave out what it names with --data.exclude {path}"
