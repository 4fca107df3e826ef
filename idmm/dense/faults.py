"""What is wrong with images next to their boxes or masks, in words."""

from collections.abc import Callable, Sequence
from pathlib import Path

from idmm.data.formats import BadImage, Header
from idmm.data.parallel import parallel_map
from idmm.data.split import Split
from idmm.errors import capped, listed
from idmm.progress import log


def unusable(source: Path, total: str, reasons: Sequence[str]) -> list[str]:
    """Return the faults of a file or folder: the objects or images (of ``total``) that cannot be used, by reason."""
    line = f"data.root: '{source}': {len(reasons)} of {total} cannot be used:"
    return [line, *capped([f"  {reason}" for reason in reasons])] if reasons else []


def read_each(split: Split, read_one: Callable) -> list:
    """Return ``read_one(path)`` of each file, or a BadImage if it cannot be used."""
    return list(parallel_map(lambda i: read_one(split.items[i]), len(split), split.place, "reading sizes"))


def as_text(size: tuple[int, int]) -> str:
    """Return a (height, width) as width x height."""
    return f"{size[1]} x {size[0]}"


def misfit(size: tuple[int, int], header: Header) -> str | None:
    """Return how the size of boxes or a mask (height and width) contradicts that of the image. None: it does not."""
    if size == header.size:
        return None
    text = f"{as_text(size)} pixels, its image {as_text(header.size)}"
    if header.orientation == 1:
        return text
    remedy = (
        "If the labels are of the stored pixels, remove the tag (exiftool -Orientation= FILE), else export them anew"
    )
    return f"{text} when upright (EXIF orientation {header.orientation}). {remedy}"


def warn_of_turned(source: Path, names: Sequence[str], headers: Sequence[Header | BadImage]) -> None:
    """Warn of files that are turned, as their labels may be of the stored pixels."""
    turned = []
    for name, header in zip(names, headers, strict=True):
        if isinstance(header, Header) and header.orientation > 1:
            turned.append(f"'{name}' ({header.orientation})")
    if turned:
        line = (
            "data.root: '%s': these files have an EXIF orientation: %s. Boxes and masks must be of the upright images"
        )
        log.warning(line, source, listed(turned))
