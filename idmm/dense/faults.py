"""What is wrong with images next to their boxes or masks, in words."""

from collections.abc import Callable, Sequence
from pathlib import Path

from idmm.data.formats import Header
from idmm.data.images import image_header
from idmm.data.parallel import parallel_map
from idmm.data.split import Split
from idmm.dense.targets import Size
from idmm.progress import log
from idmm.text import capped, listed


def unusable(source: Path, total: str, reasons: Sequence[str]) -> list[str]:
    """Return the faults of a file or folder: the objects or images (of ``total``) that cannot be
    used, by reason."""
    line = f"data.root: '{source}': {len(reasons)} of {total} cannot be used:"
    if reasons:
        return [line, *capped([f"  {reason}" for reason in reasons])]
    return []


def read_each(split: Split, read_one: Callable) -> list:
    """Return ``read_one(path)`` of each file, or a BadImage if it cannot be used."""
    return list(
        parallel_map(lambda i: read_one(split.items[i]), len(split), split.place, "reading sizes")
    )


def as_text(size: Size) -> str:
    """Return a (height, width) as width x height."""
    return f"{size[1]} x {size[0]}"


def misfits(source: Path, split: Split, sizes: Sequence[Size | None]) -> list[str | None]:
    """Return how the size of each image's boxes or mask contradicts the image. None: it does not,
    or there is no size.

    Warns of images that are turned, as their labels may be of the stored pixels.
    """
    faults = []
    turned = []
    for name, size, header in zip(split.names, sizes, read_each(split, image_header), strict=True):
        fault = None
        if isinstance(header, Header):  # bad images are reported when they are loaded
            if size not in (None, header.size):
                fault = f"{as_text(size)} pixels, its image {as_text(header.size)}"
            if header.orientation > 1:
                turned.append(f"'{name}' ({header.orientation})")
                remedy = "remove the tag (exiftool -Orientation= FILE), else export them anew"
                upright = f" when upright (EXIF orientation {header.orientation})"
                fault = (
                    fault and f"{fault}{upright}. If the labels are of the stored pixels, {remedy}"
                )
        faults.append(fault)
    if turned:
        line = "data.root: '%s': these files have an EXIF orientation: %s. Boxes and masks must be of the upright images"
        log.warning(line, source, listed(turned))
    return faults
