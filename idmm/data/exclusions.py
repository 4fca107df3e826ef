"""The lines of a file for ``data.exclude``: what a check found that should be left out."""

from idmm.data.doctor import Checkup, ImageRef

_COMMENT = "#"
_STAYS = ("unlabelled", "train", "val", "test")  # of equal images the last one's stays


def exclusions(found: Checkup) -> list[str]:
    """Returns the lines of a file for ``data.exclude``: what should be left out, a line each, under a comment with all
    reasons; broken files first, then images that are the same, then those that are nearly so.

    Of images that are the same one stays: the first of the test split, else of val, else of train. Where those of that
    split are of different classes none stays, as one of them is wrong. Nearly equal ones are there, commented out: of a
    pair across splits the training image, else the second.
    """
    reasons: dict[str, list[str]] = {bad["name"]: [f"unreadable ({bad['reason']})"] for bad in found.unreadable}
    same: dict[ImageRef, list[ImageRef]] = {}
    for pair in found.pairs:
        if pair.exact:
            same.setdefault(pair.first, [pair.first]).append(pair.second)
    for images in same.values():
        kept = [image for image in images if image.split == max(images, key=lambda i: _STAYS.index(i.split)).split]
        wrong = len({image.label for image in kept} - {None}) > 1
        for image in images:
            why = f"the same as {kept[0].name}"
            if wrong and image in kept:
                other = next(other for other in kept if other.label != image.label)
                why = f"the same as {other.name}, but of class '{image.label}', not '{other.label}': one is wrong"
            if wrong or image != kept[0]:
                reasons.setdefault(image.name, []).append(why)
    certain = set(reasons)
    for pair in found.pairs:
        if not pair.exact:
            out, other = (pair.first, pair.second) if pair.leaks else (pair.second, pair.first)
            why = f"nearly the same as {other.name} ({pair.similarity:.3f})"
            reasons.setdefault(out.name, []).append(why)
    head = [f"{_COMMENT} a {_COMMENT} before a path: only suspected, left out once you remove it"]
    lines = head if reasons.keys() - certain else []
    for name, why in reasons.items():
        lines.append(f"{_COMMENT} {'; '.join(why)}\n{'' if name in certain else _COMMENT}{_line(name)}")
    return lines


def _line(name: str) -> str:
    return f"./{name}" if name.startswith(_COMMENT) else name
