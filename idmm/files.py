"""Files that are whole or not there: written aside, flushed to the disk, renamed. And the lock between processes."""

import contextlib
import csv
import errno
import io
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from idmm.errors import RunError, UserError

log = logging.getLogger("idmm")

_MARK = "part-"
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # what such a file system answers
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
WEIGHTS_EXPECTED = f"give a run folder, or a {', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]} file of weights"
_FINETUNE = "idmm finetune --config fast --init {} --data.root DIR --out NEW"
_NAMES = "timm:NAME or hf-hub:ORG/NAME"
_PUBLIC = re.compile(r"(timm:[\w.-]+|hf-hub:[\w.-]+/[\w.-]+)(@[\w./-]+)?", re.ASCII)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a binary file that takes ``path``'s place when the block ends well; ``name`` is where it is until then.

    Raises:
        RunError: The disk is full or the folder cannot be written; what was there before is kept.
    """
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.{_MARK}")
        os.close(handle)
        with open(aside, "wb") as file:
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


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    """Replaces a JSON file in one step."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def csv_bytes(rows: Iterable[Iterable]) -> bytes:
    """Returns the content of a CSV file; names of files that are no UTF-8 go through."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def json_lines(path: Path) -> list[dict]:
    """Returns what a file holds of an object a line, without a line that a kill tore; nothing where it is not there."""
    found = []
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def read_csv(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file by the names of its columns."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Iterable[Iterable]) -> None:
    """Replaces a CSV file in one step."""
    write_bytes(path, csv_bytes(rows))


def out_file(out: str, endings: Sequence[str]) -> Path:
    """Returns the file for a command's results, before the work; nothing is made yet. UserError where it has none of
    the endings, is a folder, or lies where nothing can be written."""
    path = Path(out)
    if path.suffix.lower() not in endings:
        raise UserError(f"out: '{out}' is of no kind that is known; wanted a file that ends in {' or '.join(endings)}")
    if path.is_dir():
        raise UserError(f"out: '{out}' is a folder; wanted a file")
    _check_writable(out)
    return path


def made_folder(out: str | None) -> Path | None:
    """Makes the folder for a command's results, before the work; UserError where it cannot be made."""
    if out is None:
        return None
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: cannot write to '{out}' ({error.strerror}); wanted a folder") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise UserError(f"out: cannot write to '{out}'; make the folder writable or name another")
    return Path(out)


def free_folder(out: str) -> Path:
    """Returns a folder that a command may fill, before the work; nothing is made yet. UserError unless it is new or
    empty."""
    path = Path(out)
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"out: '{out}' is there already and not empty; name a new folder")
    if os.path.lexists(path) and not path.is_dir():
        raise UserError(f"out: '{out}' is a file; wanted a new folder")
    _check_writable(out)
    return path


def _check_writable(out: str) -> None:
    folder = next(folder for folder in Path(out).absolute().parents if os.path.lexists(folder))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if folder.is_dir() else "is no folder"
        raise UserError(f"out: cannot write '{out}', as '{folder}' {why}; name another place")


class Lock:
    """A lock between processes, by flock: the kernel frees it when its process ends, also by a kill.

    A file system without flock costs one warning per lock. Nothing is locked then.

    Args:
        path: File of the lock, made with its folder by ``acquire`` and removed by ``release``.
    """

    def __init__(self, path: Path):
        self.path, self.held = path, False

    def acquire(self, waiting: Callable[[], None] | None = None) -> bool:
        """Takes the lock. Returns False if another process holds it.

        Args:
            waiting: Called if another process holds it. Then the lock is waited for.

        Raises:
            OSError: The folder cannot be written.
        """
        from filelock import FileLock, Timeout  # 25 ms, which a page of help does not need

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path, fallback_to_soft=False, thread_local=False)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            if waiting is None:
                return False
            waiting()
            self._lock.acquire()
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            log.warning("%s: this file system has no locks; do not start a second process here", self.path.parent)
        self.held = True
        return True

    def release(self) -> None:
        """Frees the lock, if it is held."""
        if self.held:
            self.held = False
            with contextlib.suppress(OSError):
                self.path.unlink()  # first: who opened this file meanwhile sees that it is gone
            self._lock.release()

    close = release  # for contextlib.closing


@contextlib.contextmanager
def filling(path: Path) -> Iterator[Path]:
    """Yields a folder to write into, which becomes ``path``, a new or empty one, when the block ends well.

    Raises:
        RunError: The disk is full or the place cannot be written to; nothing is left.
    """
    made, aside = missing_folders(path.parent), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{_MARK}"))
        yield aside
        os.chmod(aside, 0o777 & ~_umask())  # mkdtemp's are the owner's alone
        os.replace(aside, path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror or error}); nothing is left of it") from None
    finally:
        if aside is not None and aside.exists():
            shutil.rmtree(aside, ignore_errors=True)
            remove_empty(made)


def weights_file(path: str | os.PathLike, field: str = "", stem: str = "backbone") -> Path:
    """Returns the file of weights that is meant: that of a run's backbone where the path is a folder; public weights
    as they are named.

    Args:
        path: Of the folder or file, or the name of public weights.
        field: Config field that names it, with which messages then begin.
        stem: Of the file in a folder: ``backbone``, or ``model`` for the one with the classifier.

    Raises:
        UserError: Nothing there, no such weights in the folder, or a file that is no checkpoint by its name.
    """
    if is_public(path):
        _check_public(str(path), field, stem)
        return Path(path)
    path = home(path)
    if path.is_dir():
        missing = [name for name in (f"{stem}.safetensors", f"{stem}.json") if not (path / name).is_file()]
        why = f"has no {' and no '.join(missing)} in it; {WEIGHTS_EXPECTED}"
        if missing and (path / "last").is_dir():
            how = "let it finish (the command that began it goes on with it)"
            why = f"is a run that has not written its {missing[0]} yet; {how}, or {WEIGHTS_EXPECTED}"
        if missing and stem == "model" and (path / "backbone.safetensors").is_file():
            command = _FINETUNE.format(path)
            why = f"is a run without a classifier; fine-tune it on labelled images first: {command}"
        if missing and (path / "fold-1").is_dir():
            why = f"holds k-fold runs; give one of them ('{path / 'fold-1'}'), or a run on all images"
        if missing:
            raise UserError(f"{weights_label(path, field)} {why}")
        return path / f"{stem}.safetensors"
    if not path.exists():
        hint = f"; or {_NAMES}" if stem == "backbone" else ""
        raise UserError(f"{weights_label(path, field)} does not exist; {WEIGHTS_EXPECTED}{hint}")
    if path.suffix.lower() not in WEIGHTS:
        raise UserError(f"{weights_label(path, field)} is not a checkpoint; {WEIGHTS_EXPECTED}")
    return path


def is_public(init: str | os.PathLike | None) -> bool:
    """Whether weights to start from are public ones, by their name: ``timm:NAME`` or ``hf-hub:ORG/NAME``, which may end
    in ``@`` and a revision of the repository."""
    return str(init).startswith(("timm:", "hf-hub:"))


def names_same(init: str | None, pinned: str | None) -> bool:
    """Whether the name of public weights may mean those of a name with a commit; timm's may lack the tag."""
    name = str(pinned).rpartition("@")[0]
    tagged = str(init).startswith("timm:") and name.partition(".")[0] == init
    return is_public(init) and (name == init or tagged)


def _check_public(text: str, field: str, stem: str) -> None:
    if not _PUBLIC.fullmatch(text):
        wanted = f"wanted {_NAMES}, with a revision after @ if need be"
        raise UserError(f"{weights_label(text, field)} is no name of public weights; {wanted}")
    if stem == "model":
        why = f"has no classifier of your classes; fine-tune it on labelled images first: {_FINETUNE.format(text)}"
        raise UserError(f"{weights_label(text, field)} {why}")


def saved_info(path: str | os.PathLike, stem: str = "backbone") -> dict:
    """Returns what the JSON beside weights says of them; empty where there is none, or no weights. ``stem``: of the
    weights that are meant where the path is a folder, ``backbone`` or ``model``."""
    with contextlib.suppress(UserError, OSError, ValueError):
        info = json.loads(weights_file(path, stem=stem).with_suffix(".json").read_text(encoding="utf-8"))
        return info if isinstance(info, dict) and isinstance(info.get("kwargs"), dict) else {}
    return {}


def weights_label(source: str | os.PathLike, field: str) -> str:
    """Returns how a message on weights begins: with the field and the file, or with the file alone."""
    return f"{field}: '{source}'" if field else f"{source}:"


def home(path: str | os.PathLike) -> Path:
    """Returns a path with the user's folder for ``~``; that of nobody here stays as it is."""
    return Path(os.path.expanduser(path))


def run_of(init: str) -> Path:
    """Returns the folder of the run that wrote weights, which are named by it or by one of its files."""
    path = home(init)
    return path.parent if path.suffix.lower() in WEIGHTS and not path.is_dir() else path


def begun(path: str | os.PathLike) -> bool:
    """Says whether a folder holds a run with a state to resume from or a result."""
    return any((Path(path) / name).exists() for name in ("last/state.pt", "result.json"))


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
    """Removes what a kill left of files that were being written; nobody else may be writing there.

    Folders stay: another command's export may be at work on them.
    """
    for path in folder.glob(f".*.{_MARK}*"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
