"""Atomic files, the lock between processes, and paths of weights.

An atomic file is written aside, flushed to disk and renamed.
"""

import csv
import errno
import functools
import io
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from idmm.errors import Fault, Message, RunError, UserError, reason
from idmm.progress import log
from idmm.text import one_line

AnyPath = str | os.PathLike[str]
Json = dict[str, Any]  # an object of a JSON file
Rows = Iterable[Iterable[object]]
_MARK = "part-"
_CONTENT = f".{_MARK}content"
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # no flock there
# remedies for a damaged file: for one that a run can do without, and for result.json
WITHOUT = "Delete it to go on without it"
REWRITE = "Delete it and repeat the command of its run, which writes it again"
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
WEIGHTS_EXPECTED = (
    f"expected a run folder, or a {', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]} file of weights"
)
IMAGENET = "imagenet"  # short name of a small public network


# ---------------------------------------------------------------------- reading and writing
@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces ``path`` when the block ends without an error.

    Its ``name`` is its path until then.

    Raises:
        RunError: The disk is full or the folder cannot be written. The old file stays.
    """
    with _aside(path, "The old file stays") as aside, open(aside, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _aside(path: Path, remains: str) -> Iterator[Path]:
    """Yield a path next to another, which it replaces when the block ends.

    After a kill :func:`sweep` removes it if it is a file.
    """
    aside = path.with_name(f".{path.name}.{_MARK}{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        os.replace(aside, path)
    except IsADirectoryError:
        raise UserError.of(
            str(path), "is a folder, expected a file", "Move it away and repeat the command"
        ) from None
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror or error}). {remains}"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # nothing else than a folder
        with suppress(OSError):
            aside.unlink()


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically. File names that are not UTF-8 are preserved."""
    write_bytes(path, text.encode("utf-8", "surrogateescape"))


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Raise UserError if a file of idmm's cannot be read, or if the block fails on its content.

    ``remedy`` is the second sentence of the message.
    """
    try:
        yield
    except Message:
        raise
    except (OSError, ValueError) as error:
        raise _damaged(path, one_line(reason(error))[:200], remedy) from None
    except Exception:  # torch and json raise many kinds, and a value may be missing
        raise _damaged(path, "it is not what idmm wrote", remedy) from None


def _damaged(path: Path, cause: str, remedy: str) -> UserError:
    log.debug(str(path), exc_info=True)
    return UserError.of(str(path), f"is damaged ({cause})", remedy)


def read_json(path: Path, remedy: str) -> Json:
    """Return the object in a JSON file. Errors as of :func:`reading`."""
    with reading(path, remedy):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise TypeError
        return content


def read_metrics(path: Path) -> list[Json]:
    """Return the records of ``metrics.jsonl``, [] if there is none.

    A last line that was cut by a kill is left out.

    Raises:
        UserError: Another line is damaged.
    """
    records: list[Json] = []
    if not path.exists():
        return records
    with reading(path, WITHOUT):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                if line is not lines[-1]:
                    raise
                log.warning(f"{path}: the last line is cut and left out")
                break
            numbers = (record["stage"], record["epoch"], *record.values())
            if not all(isinstance(number, int | float | None) for number in numbers):
                raise TypeError
            records.append(record)
    return records


def write_csv(path: Path, rows: Rows) -> None:
    """Replace a CSV file atomically."""
    write_bytes(path, csv_bytes(rows))


def csv_bytes(rows: Rows) -> bytes:
    """Return the content of a CSV file. File names that are not UTF-8 are preserved."""
    lines = []
    for row in rows:
        line = io.StringIO()
        # quotes each character of its own line end, which names may have
        csv.writer(line).writerow(row)
        lines.append(line.getvalue().removesuffix("\r\n"))
    return "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by column name. UserError: it is damaged."""
    with (
        reading(path, WITHOUT),
        open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        rows = list(csv.DictReader(file))
        if any(None in row or None in row.values() for row in rows):
            raise ValueError("a row has other cells than the header")
        return rows


def sweep(folder: Path) -> None:
    """Remove unfinished files that a kill left. No other process may write there.

    Folders stay, because another command may export into them.
    """
    for path in folder.glob(f".*.{_MARK}*"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


# ------------------------------------------------------------ output paths, checked before the work
def output_path(out: str, endings: Sequence[str] | None) -> Path:
    """Return the path of results without creating it: a file, or a folder if ``endings`` is None.

    Raises:
        UserError: It has none of the endings, a folder is where a file is expected, the folder is
            not empty, or it cannot be written.
    """
    path = Path(out)
    folder = path.absolute()
    if endings is None:
        if path.is_dir() and _has_files(path):
            raise UserError.of("out", f"'{out}' exists and is not empty", "Name a new folder")
    else:
        folder = folder.parent
        if path.suffix.lower() not in endings:
            expected = f"expected a file that ends in {' or '.join(endings)}"
            raise UserError.of("out", f"'{out}' is of an unknown kind, {expected}")
        if path.is_dir():
            raise UserError.of("out", f"'{out}' is a folder, expected a file")
    while not os.path.lexists(folder):
        folder = folder.parent
    problem = ""
    if not folder.is_dir():
        problem = "is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = "cannot be written to"
    if problem:
        text = f"cannot write '{out}', because '{folder}' {problem}"
        raise UserError.of("out", text, "Name another place")
    return path


def made_folder(out: str) -> Path:
    """Create the folder for results and return it. UserError if it cannot be created or written."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"cannot write to '{out}' ({error.strerror}), expected a folder"
        raise UserError.of("out", text) from None
    if not os.access(out, os.W_OK | os.X_OK):
        text = f"cannot write to '{out}', its permissions forbid it"
        raise UserError.of("out", text, "Name another folder")
    return Path(out)


@contextmanager
def filling(path: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``path``, a new or empty one, when the block ends without an
    error.

    Raises:
        RunError: The disk is full or the place cannot be written. Nothing is left.
    """
    path = Path(os.path.realpath(path))  # '.' and links
    if not path.is_dir():
        with _aside(path, "Nothing is left of it") as aside:
            aside.mkdir()
            yield aside
        return
    inside = path / _CONTENT  # a mount point cannot be replaced
    with _aside(inside, "Nothing is left of it") as aside:
        aside.mkdir()
        yield aside
        if _has_files(path):
            raise RunError(f"{path}: another command wrote there meanwhile. Nothing was added")
    try:
        for child in inside.iterdir():
            child.replace(path / child.name)
        inside.rmdir()
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror}). '{inside}' has the rest"
        ) from None


def _has_files(folder: Path) -> bool:
    """Return whether a folder has files other than those that a kill of :func:`filling` left."""
    return any(_CONTENT not in child.name for child in folder.iterdir())


class Lock:
    """A lock between processes, by flock.

    The kernel frees it when its process ends, even if it is killed. A file system without flock
    costs one warning per lock, and nothing is locked.

    Args:
        path: Lock file. ``acquire`` creates it with its folder and ``release`` removes it.
    """

    def __init__(self, path: Path):
        self.path = path
        self.held = False

    def acquire(self, waiting: Callable[[], None] | None = None) -> bool:
        """Take the lock. Return False if another process holds it.

        Args:
            waiting: Called if another process holds it. The call then waits for the lock.

        Raises:
            OSError: The folder cannot be written.
        """
        from filelock import FileLock, Timeout  # 25 ms, which --help does not need

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
            log.warning(
                f"{self.path.parent}: this file system has no locks. "
                "Do not start a second process here"
            )
        self.held = True
        return True

    def acquire_output(self, out: Path) -> None:
        """Take the lock of the folder ``out`` of results.

        Raises:
            UserError: It is in use or cannot be written.
        """
        try:
            acquired = self.acquire()
        except OSError as error:
            text = f"cannot write to '{out}' ({error.strerror})"
            raise UserError.of("out", text, "Name another folder") from None
        if not acquired:
            text = f"'{out}' is in use by another run"
            raise UserError.of("out", text, "Wait for it or name another folder")

    def release(self) -> None:
        """Free the lock if it is held."""
        if self.held:
            self.held = False
            with suppress(OSError):
                self.path.unlink()  # before the release, so that a waiting process notices
            self._lock.release()

    close = release  # for contextlib.closing


# ---------------------------------------------------------------------- paths of weights and runs
def weights_file(path: AnyPath, field: str = "", stem: str = "backbone") -> Path:
    """Return the file of weights: that of a run if the path is a folder.

    Args:
        path: Of the folder or file, or the name of public weights, which is returned unchanged.
        field: Config field for messages.
        stem: File of a run: ``backbone``, or ``model`` for the one with the classifier.

    Raises:
        UserError: Nothing there, no such weights in the folder, or a file that is no checkpoint.
    """
    file = expand_home(path)
    has_public_name = is_public(path)
    if fault := _missing_weights(file, field, stem, has_public_name):
        raise UserError(fault)
    if file.is_dir() and not has_public_name:
        return file / f"{stem}.safetensors"
    return file


def _missing_weights(path: Path, field: str, stem: str, has_public_name: bool) -> Fault | None:
    """Return why there are no such weights, if so."""
    fault = functools.partial(weights_fault, path, field)
    command = f"idmm finetune --config fast --init {path} --data.root DIR --out NEW"
    fine_tune = f"Fine-tune it on labelled images first: {command}"
    if has_public_name:
        if stem == "model":
            return fault("has no classifier of your classes", fine_tune)
        return None
    if not path.exists():
        if stem == "backbone":
            return fault(f"does not exist, {WEIGHTS_EXPECTED}, timm:NAME or imagenet")
        return fault(f"does not exist, {WEIGHTS_EXPECTED}")
    if not path.is_dir():
        if path.suffix.lower() in WEIGHTS:
            return None
        return fault(f"is not a checkpoint, {WEIGHTS_EXPECTED}")
    names = (f"{stem}.safetensors", f"{stem}.json")
    missing = [name for name in names if not (path / name).is_file()]
    if not missing:
        return None
    fold = path / "fold-1"
    if fold.is_dir():
        return fault("holds k-fold runs", f"Give one of them ('{fold}'), or a run on all images")
    if stem == "model" and (path / "backbone.safetensors").is_file():
        return fault("is a run without a classifier", fine_tune)
    if (path / "last").is_dir() or (path / "train.json").is_file():
        return fault(
            f"is a run that is not finished ({missing[0]} is missing)",
            "Repeat its command to finish it",
        )
    return fault(f"has no {' and no '.join(missing)} in it, {WEIGHTS_EXPECTED}")


def weights_fault(source: AnyPath, field: str, text: str, hint: str = "") -> Fault:
    """Return a fault of weights: of the field that names them, or of their file if it is empty."""
    if field:
        return Fault(field, f"'{source}' {text}", hint)
    return Fault(str(source), text, hint)


def is_public(init: AnyPath | None) -> bool:
    """Return whether ``init`` names public weights: a source, or ``imagenet`` if it is no path."""
    if init == IMAGENET:  # which ./imagenet is not
        return not os.path.exists(init)
    return str(init).startswith(("timm:", "package:"))


def saved_info(path: AnyPath, stem: str = "backbone") -> Json:
    """Return the JSON next to weights, {} if there is none. ``stem``: as for :func:`weights_file`.

    Raises:
        UserError: It is damaged.
    """
    try:
        file = weights_file(path, stem=stem).with_suffix(".json")
    except UserError:  # of which the commands report
        return {}
    if is_public(path) or not file.is_file():
        return {}
    info = read_json(file, "Fetch the file again, or repeat the command of its run in a new folder")
    if isinstance(info.get("kwargs"), dict):
        return info
    return {}


def expand_home(path: AnyPath) -> Path:
    """Return a path with ``~`` replaced by the user's home. An unknown user's ``~`` stays."""
    return Path(os.path.expanduser(path))


def holds_run(path: AnyPath) -> bool:
    """Return whether a folder holds a run with a state to resume or a result."""
    return any((Path(path) / name).exists() for name in ("last/state.pt", "result.json"))


def idmm_version() -> str:
    """Return the version of the installed package. A copy that is not installed has none."""
    with suppress(PackageNotFoundError):
        return version("idmm")
    return "not installed"
