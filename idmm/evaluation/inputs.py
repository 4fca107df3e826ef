"""Shared by commands that use a run on files: checks before the work, messages on the files."""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from idmm.config.commands import EmbedConfig, PredictConfig, SimilarConfig
from idmm.data.folder import images_at
from idmm.errors import Fault, UserError, checked
from idmm.files import output_path, weights_file
from idmm.progress import log
from idmm.text import capped, counted


def inputs(
    config: PredictConfig | EmbedConfig | SimilarConfig,
    stem: str,
    endings: Sequence[str] | None,
    *checks: Callable[[], Any],
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
    """Log the images that could not be read, of ``count`` in ``field``.

    Raises:
        UserError: None could be read.
    """
    if not unreadable:
        return
    images = counted(count, "image")
    reasons = capped([f"  {path}: {reason}" for path, reason in unreadable.items()])
    if len(unreadable) == count:
        fault = Fault(field, f"none of {images} can be read:")
        raise UserError(fault, *(Fault("", reason) for reason in reasons))
    lines = "\n".join(reasons)
    log.warning(f"{field}: skipped {len(unreadable)} of {images} that cannot be read:\n{lines}")


def print_bytes(data: bytes) -> None:
    """Write UTF-8 to standard output, whatever the locale.

    Names of files that are not UTF-8 are preserved.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.closed:
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    print(data.decode("utf-8", "surrogateescape"), end="")
