"""Helpers of both readers: faults reported together, and one pass over the files."""

import contextlib
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from idmm import config
from idmm.data.parallel import parallel_map
from idmm.data.split import Split
from idmm.errors import capped

log = logging.getLogger(__name__)


def report_unusable(data: config.Data, faults: list[str], source: Path, total: str, reasons: Collection[str]) -> None:
    """Add images or objects that cannot be used to ``faults``, or log them if ``data.on_error`` is skip.

    Args:
        data: The ``data`` section of a config.
        faults: Lines of a UserError.
        source: Their file or folder.
        total: How many there are, e.g. ``20 images``.
        reasons: One per image or object.
    """
    if not reasons:
        return
    line = f"data.root: '{source}': {len(reasons)} of {total} cannot be used"
    details = capped([f"  {reason}" for reason in reasons])
    if data.on_error == "skip":
        log.warning("skipped:\n%s", "\n".join([f"{line}:", *details]))
    else:
        faults += [f"{line} (--data.on_error skip skips them):", *details]


def split_of(root: Path, folder: Path, names: list[str]) -> Split:
    """Return the named files of a folder as a split without labels. Its names are relative to ``root``."""
    items = [os.path.join(folder, *name.split("/")) for name in names]
    return Split(items, [os.path.relpath(item, root).replace(os.sep, "/") for item in items], None, None)


def read_each(split: Split, read_one: Callable, data: config.Data, progress: bool) -> list:
    """Return ``read_one(path, max_pixels)`` of each file, or a BadImage if it cannot be used."""
    work = parallel_map(
        lambda i: read_one(split.items[i], data.max_pixels), len(split), split.place, "reading sizes", progress
    )
    with contextlib.closing(work) as results:
        return list(results)


def as_text(size: tuple[int, int]) -> str:
    """Return a (height, width) as width x height."""
    return f"{size[1]} x {size[0]}"
