"""Files that are whole or not there: written aside, flushed to the disk, renamed."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from idmm.errors import RunError, UserError

_MARK = "part-"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a binary file that takes ``path``'s place when the block ends well.

    Raises:
        RunError: The disk is full or the folder cannot be written; what was there before is kept.
    """
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.{_MARK}")
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~_umask())  # mkstemp's files are the owner's alone
        os.replace(aside, path)
    except OSError as error:
        why = error.strerror or error
        raise RunError(f"{path}: cannot be written ({why}); what was there before is kept") from None
    finally:
        if aside is not None:
            with contextlib.suppress(OSError):
                os.unlink(aside)


def write_bytes(path: Path, data) -> None:
    """Replaces a file in one step."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file in one step."""
    write_bytes(path, text.encode())


def made_folder(out: str | None) -> Path | None:
    """Makes the folder for a command's results, before the work; UserError where it cannot be made."""
    if out is None:
        return None
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: cannot write to '{out}' ({error.strerror}); wanted a folder") from None
    return Path(out)


def missing_folders(path: Path) -> list[Path]:
    """Returns those of a path and the folders above it that are not there, the path first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Removes folders in order, as long as they are empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextlib.contextmanager
def emptied_if_refused(out: str | None) -> Iterator[None]:
    """Removes the folder ``out`` if the block made it, ends with a user's mistake and left nothing in it."""
    missing = missing_folders(Path(out)) if out else []
    try:
        yield
    except UserError:
        remove_empty(missing)
        raise


def sweep(folder: Path) -> None:
    """Removes what a kill left of files that were being written; nobody else may be writing there."""
    for path in folder.glob(f".*.{_MARK}*"):
        path.unlink(missing_ok=True)


def being_written(path: Path) -> bool:
    """Whether this is no file yet, but what is being written, or was when its writer was killed."""
    return path.name.startswith(".") and f".{_MARK}" in path.name


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
