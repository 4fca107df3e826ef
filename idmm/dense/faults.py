"""What is wrong with images next to their boxes or masks, in words."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from idmm.data.formats import BadImage, Header
from idmm.data.images import image_header
from idmm.data.parallel import parallel_map
from idmm.data.split import Split
from idmm.dense.targets import Size
from idmm.errors import Fault
from idmm.progress import log
from idmm.text import capped, listed

Result = TypeVar("Result")


def unusable(
    source: Path,
    total: str,
    reasons: Sequence[str],
) -> list[Fault]:
    """Return the faults of a file or folder: what of ``total`` cannot be used, by reason."""
    if not reasons:
        return []
    return under(f"'{source}': {len(reasons)} of {total} cannot be used:", reasons)


def under(heading: str, reasons: Sequence[str]) -> list[Fault]:
    """Return a fault of ``data.root`` and its reasons, each on a line of its own."""
    lines = capped([f"  {reason}" for reason in reasons])
    return [Fault("data.root", heading), *(Fault("", line) for line in lines)]


def read_each(split: Split, read_one: Callable[[Any], Result]) -> list[Result | BadImage]:
    """Return ``read_one(path)`` of each file, or a BadImage if it cannot be used."""
    results = parallel_map(lambda i: read_one(split.items[i]), split.places, "reading sizes")
    return list(results)


def as_text(size: Size) -> str:
    """Return a (height, width) as width x height."""
    return f"{size[1]} x {size[0]}"


def misfits(
    source: Path,
    split: Split,
    sizes: Sequence[Size | None],
) -> list[str | None]:
    """Return how the size of each image's boxes or mask contradicts the image.

    None: it does not, or there is no size. Warns of images that are turned, as their labels may be
    of the stored pixels.
    """
    faults = []
    turned = []
    for name, size, header in zip(split.names, sizes, read_each(split, image_header), strict=True):
        fault = None
        if isinstance(header, Header):  # bad images are reported when they are loaded
            if header.orientation > 1:
                turned.append(f"'{name}' ({header.orientation})")
            if size is not None and size != header.size:
                fault = _misfit(size, header)
        faults.append(fault)
    if turned:
        log.warning(
            f"data.root: '{source}': these files have an EXIF orientation: {listed(turned)}. Boxes "
            "and masks must be of the upright images"
        )
    return faults


def _misfit(size: Size, header: Header) -> str:
    if header.orientation == 1:
        return f"{as_text(size)} pixels, its image {as_text(header.size)}"
    return (
        f"{as_text(size)} pixels, its image {as_text(header.size)} "
        f"when upright (EXIF orientation {header.orientation}). "
        "If the labels are of the stored pixels, "
        "remove the tag (exiftool -Orientation= FILE), else export them anew"
    )
