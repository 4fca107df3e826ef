"""The lines of a file for ``data.exclude``: what a check found that should be left out."""

from idmm.data.doctor import Checkup, ImageRef

BROKEN, LEAKS = "broken files", "in two splits"  # groups of files to leave out, beside copies in a split
_COMMENT = "#"
_STAYS = ("unlabelled", "train", "val", "test")  # of equal images the last one's stays


def exclusions(found: Checkup) -> list[str]:
    """Returns the lines of a file for ``data.exclude``: what should be left out, a line each, under a comment with all
    reasons; broken files first, then what lies in two splits, then copies within a split.

    Of images that are the same one stays: the first of the test split, else of val, else of train. Where those of that
    split are of different classes none stays, as one of them is wrong. Nearly equal ones are there, commented out: of a
    pair across splits the training image, else the second.
    """
    named: dict[str, list[tuple[str, bool, str]]] = {}  # group, whether it is certain, reason

    def add(name: str, group: str, certain: bool, reason: str) -> None:
        named.setdefault(name, []).append((group, certain, reason))

    for bad in found.unreadable:
        add(bad["name"], BROKEN, True, f"unreadable ({bad['reason']})")
    same: dict[ImageRef, list[ImageRef]] = {}
    for pair in found.pairs:
        if pair.exact:
            same.setdefault(pair.first, [pair.first]).append(pair.second)
    for images in same.values():
        kept = [image for image in images if image.split == max(images, key=lambda i: _STAYS.index(i.split)).split]
        wrong = len({image.label for image in kept} - {None}) > 1
        for image in images:
            group = f"copies in {image.split}" if image.split == kept[0].split else LEAKS
            if wrong and image in kept:
                other = next(other for other in kept if other.label != image.label)
                why = f"the same as {other.name}, but of class '{image.label}', not '{other.label}': one is wrong"
            else:
                why = f"the same as {kept[0].name}"
            if wrong or image != kept[0]:
                add(image.name, group, True, why)
    for pair in found.pairs:
        if pair.exact:
            continue
        out, other = (pair.first, pair.second) if pair.leaks else (pair.second, pair.first)
        group = LEAKS if pair.leaks else f"copies in {out.split}"
        add(out.name, group, False, f"nearly the same as {other.name} ({pair.similarity:.3f})")
    return _grouped(named)


def _grouped(named: dict[str, list[tuple[str, bool, str]]]) -> list[str]:
    order = [BROKEN, LEAKS, *(f"copies in {split}" for split in ("train", "unlabelled", "val", "test"))]
    lines = []
    for group in order:
        names = [name for name, about in named.items() if min((g for g, *_ in about), key=order.index) == group]
        lines += [f"{_COMMENT} -- {group}"] if names else []
        for name in names:
            certain = any(sure for _, sure, _ in named[name])
            reasons = "; ".join(reason for *_, reason in named[name])
            lines.append(f"{_COMMENT} {reasons}\n{'' if certain else _COMMENT}{_line(name)}")
    suspected = any(not sure for abouts in named.values() for _, sure, _ in abouts)
    head = f"{_COMMENT} a # before a path: only suspected, left out once you remove it"
    return [head, *lines] if suspected else lines


def _line(name: str) -> str:
    return f"./{name}" if name.startswith(_COMMENT) else name
