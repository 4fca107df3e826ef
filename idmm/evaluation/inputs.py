"""Common to the commands that use a run on files: the checks before the work, and messages on the
files."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from idmm.config.commands import UseConfig
from idmm.data.folder import images_at
from idmm.errors import UserError, checked
from idmm.files import output_path, weights_file
from idmm.progress import log
from idmm.text import capped, counted


def inputs(
    config: UseConfig, stem: str, endings: Sequence[str] | None, *checks: Callable[[], Any]
) -> tuple[Path | None, list[str]]:
    """Check a command's run, files and output before the work, and report all faults at once.

    Args:
        config: Of the command.
        stem: Of the weights that it needs, ``backbone`` or ``model``.
        endings: Of the file ``config.out``. None: it is a folder, new or empty.
        checks: The command's own. They raise UserError.

    Returns:
        The file or folder to write (None if the command has none) and the images, each once.

    Raises:
        UserError: No such run or files, or a file that cannot be written, with a line each.
    """
    _, out, images, *_ = checked(
        lambda: weights_file(config.init, "init", stem),
        lambda: config.out and output_path(config.out, endings),
        lambda: images_at(config.paths),
        *checks,
    )
    return out, images


def report_unreadable(unreadable: dict[str, str], count: int, field: str = "paths") -> None:
    """Log the images that could not be read, of ``count`` in ``field``. UserError if none could be
    read."""
    lines = capped([f"  {path}: {reason}" for path, reason in unreadable.items()])
    if lines and len(unreadable) == count:
        raise UserError(f"{field}: none of {counted(count, 'image')} can be read:", *lines)
    if lines:
        images = counted(count, "image")
        log.warning(
            "%s: skipped %d of %s that cannot be read:\n%s",
            field,
            len(unreadable),
            images,
            "\n".join(lines),
        )


def print_bytes(data: bytes) -> None:
    """Write UTF-8 to standard output, whatever the locale. Names of files that are not UTF-8 are
    preserved."""
    with contextlib.suppress(AttributeError, ValueError):  # no stream of bytes, or a closed one
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    print(data.decode("utf-8", "surrogateescape"), end="")
