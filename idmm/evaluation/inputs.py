"""What the commands share that use a run on files: their checks before the work, what they say of the files."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from idmm.config.usage import UseConfig
from idmm.data.folder import FoundImage, images_at
from idmm.data.split import counted
from idmm.errors import UserError, capped, checked
from idmm.files import free_folder, out_file, weights_file
from idmm.progress import log


def inputs(
    given: UseConfig, stem: str, endings: Sequence[str] | None, *more: Callable[[], Any]
) -> tuple[Path | None, list[FoundImage]]:
    """Finds what can be wrong before the work, all of it at once: no such run or files, a file that cannot be written
    (UserError, a line each).

    Args:
        given: What the command was asked for.
        stem: Of the weights that are needed, ``backbone`` or ``model``.
        endings: That ``given.out`` may have; None: it is a folder, new or empty.
        more: Checks of the command's own, which raise UserError.

    Returns:
        The file (or folder) to write, None where the command was given none; and the images, each once.
    """
    _, out, images, *_ = checked(
        lambda: weights_file(given.init, "init", stem),
        lambda: given.out and (free_folder(given.out) if endings is None else out_file(given.out, endings)),
        lambda: images_at(given.paths),
        *more,
    )
    return out, images


def network_options(given: UseConfig) -> dict[str, Any]:
    """Returns what :func:`idmm.load_classifier` and its like are asked for beside the run."""
    options = {"device": given.device, "batch_size": given.batch_size, "max_pixels": given.max_pixels, "field": "init"}
    return {name: value for name, value in options.items() if value is not None}


def say_unreadable(unreadable: dict[str, str], count: int, field: str = "paths") -> None:
    """Lists the images that could not be read, of so many that ``field`` named; UserError where none could."""
    lines = capped([f"  {path}: {why}" for path, why in unreadable.items()])
    if lines and len(unreadable) == count:
        raise UserError(f"{field}: none of {counted(count, 'image')} can be read:", *lines)
    if lines:
        log.warning("%s: left out %d of %s that cannot be read:\n%s", field, len(unreadable),
                    counted(count, "image"), "\n".join(lines))  # fmt: skip


def print_bytes(data: bytes) -> None:
    """Writes to standard output; names of files may be no UTF-8, which ``print`` refuses."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
