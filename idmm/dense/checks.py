"""What the readers of boxes and of masks share: faults reported together, and a look at each file."""

import contextlib
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from idmm import config
from idmm.data.formats import opened
from idmm.data.images import read
from idmm.data.parallel import in_order
from idmm.data.split import Split
from idmm.errors import capped

log = logging.getLogger(__name__)


def unusable(data: config.Data, faults: list[str], source: Path, total: str, reasons: Collection[str]) -> None:
    """Adds the images or objects that cannot be used to the faults; with ``data.on_error`` skip logs them instead.

    Args:
        data: The ``data`` section of a config.
        faults: Lines of a UserError.
        source: The file or folder that holds them.
        total: How many there are, e.g. ``20 images``.
        reasons: One for each.
    """
    if not reasons:
        return
    line = f"data.root: '{source}': {len(reasons)} of {total} cannot be used"
    details = capped([f"  {one}" for one in reasons])
    if data.on_error == "skip":
        log.warning("left out:\n%s", "\n".join([f"{line}:", *details]))
    else:
        faults += [f"{line} (--data.on_error skip leaves them out):", *details]


def split_of(root: Path, folder: Path, names: list[str]) -> Split:
    """Returns files of a folder as a split without labels, named below ``root``."""
    items = [os.path.join(folder, *name.split("/")) for name in names]
    return Split(items, [os.path.relpath(item, root).replace(os.sep, "/") for item in items], None, None)


def look_at(split: Split, look: Callable, data: config.Data, progress: bool) -> list:
    """Returns ``look(path, max_pixels)`` of each file, or BadImage if it cannot be used; a bar if slow."""
    given = (len(split), split.place, "reading sizes", progress)
    with contextlib.closing(in_order(lambda i: look(split.items[i], data.max_pixels), *given)) as results:
        return list(results)


def image_size(path: str, max_pixels: int) -> tuple[int, int]:
    """Returns height and width of an image, upright (pixels)."""
    with opened(read(path), max_pixels) as image:
        turned = image.orientation() in (5, 6, 7, 8)
        return (image.width, image.height) if turned else (image.height, image.width)


def pixels(size: tuple[int, int]) -> str:
    """Returns a height and width as people write them."""
    return f"{size[1]} x {size[0]}"
