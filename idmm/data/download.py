"""Fetching a dataset: resumed after a broken connection, checked, and put in place whole."""

import contextlib
import hashlib
import http.client
import json
import logging
import lzma
import os
import shutil
import stat
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from tqdm import tqdm

from idmm.data.registry import Archive, Spec
from idmm.errors import RunError, UserError, reason
from idmm.files import Lock, home, write_text
from idmm.progress import Bar

log = logging.getLogger(__name__)

TRIES = 5  # connections without a byte of progress until it is given up
PAUSE = 1.0  # before the second of them, doubled each time (seconds)
TIMEOUT = 60.0  # without a byte (seconds)
_BLOCK = 1 << 20
_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2", ".zip")
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, EOFError, zlib.error)
_HIDDEN = ".idmm"  # folder under the root: parts, receipts and the lock


def fetch(spec: Spec, root: str | os.PathLike) -> None:
    """Downloads and unpacks all that a dataset needs into its ``root``, but what is there from an earlier call.

    An interrupted download is resumed. One process works at a time, the others wait and find it done.

    Raises:
        UserError: There is nothing to download it from, or ``root`` cannot be written.
        RunError: The network, a checksum or an archive failed; the line names it.
    """
    if not spec.archives:
        raise UserError(f"data.name: {spec.name} cannot be downloaded: {spec.manual or 'it needs no download'}")
    root = home(root)
    hidden = root / _HIDDEN
    lock = Lock(hidden / "fetch.lock")
    try:
        lock.acquire(lambda: log.info("waiting for another process that fetches into '%s'", root))
    except OSError as error:
        raise UserError(f"data.root: cannot write to '{root}' ({reason(error)}); wanted a folder") from None
    with contextlib.closing(lock):
        for archive in spec.archives:
            receipt = hidden / f"{archive.name}.done"
            if _is_done(archive, root, receipt):
                continue
            try:
                placed = _place(archive, _downloaded(archive, hidden), root, hidden)
            except OSError as error:
                what = f"{error.strerror or error}: '{error.filename or root}'"
                raise RunError(f"{archive.name}: cannot be stored ({what}); what was fetched is kept") from None
            write_text(receipt, json.dumps([archive.url, *placed]))


def _is_done(archive: Archive, root: Path, receipt: Path) -> bool:
    """Whether all that an archive held was put in place and none of it has been removed since."""
    try:
        url, *placed = json.loads(receipt.read_text())
    except (OSError, ValueError, TypeError):
        return False
    return url == archive.url and all(os.path.lexists(root / name) for name in placed)


def _downloaded(archive: Archive, folder: Path) -> Path:
    """Returns the file, whole and checked."""
    path, part = folder / archive.name, folder / f"{archive.name}.part"
    if not path.exists():
        while True:
            resumed = part.exists() and part.stat().st_size > 0
            _get(archive.url, part)
            fault = _checksum_fault(archive, part)
            if fault is None:
                break
            part.unlink()
            if not resumed:  # else what an earlier run had begun may be another version's
                raise RunError(f"{archive.url}: {fault}; nothing was kept")
            log.warning("%s: %s; fetching it again from the start", archive.url, fault)
        os.replace(part, path)
    return path


def _get(url: str, part: Path) -> None:
    """Appends to ``part`` until it is as long as the file at ``url``."""
    fails = 0
    often = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log keeps every state of the bar
    style = dict(desc=part.name.removesuffix(".part"), unit="B", unit_scale=True, unit_divisor=1000, mininterval=often)
    with open(part, "ab") as file, Bar(initial=file.tell(), **style) as bar:
        while True:
            before, why = file.tell(), "connection closed early"
            try:
                if _stream(url, file, bar):
                    break
            except urllib.error.HTTPError as answer:
                answer.close()
                why = f"the server says {answer.code} {answer.reason}"
                if answer.code < 500 and answer.code not in (408, 429):
                    raise RunError(f"{url}: {why}") from None
            except ConnectionError as error:
                why = str(error)
            fails = 0 if file.tell() > before else fails + 1
            if fails >= TRIES:
                raise RunError(f"{url}: {why}; the same command goes on from {file.tell()} bytes") from None
            time.sleep(PAUSE * 2 ** max(0, fails - 1))
        file.flush()
        os.fsync(file.fileno())


def _stream(url: str, file: IO[bytes], bar: tqdm) -> bool:
    """One connection; returns whether the file is whole."""
    start = file.tell()
    request = urllib.request.Request(url, headers={"User-Agent": "idmm", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        with _network():
            answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as refused:
        if refused.code != 416 or not start:
            raise
        refused.close()
        whole = (refused.headers.get("Content-Range") or "").rpartition("/")[2] == str(start)  # nothing is left to send
        if not whole:  # longer than the file
            _restart(file)
        return whole
    with answer:
        if start and answer.status != 206:  # it sends the whole file, whatever was asked for
            _restart(file)
            start = 0
        length = answer.headers.get("Content-Length")
        bar.total, bar.n = None if length is None else start + int(length), start
        bar.refresh()
        while True:
            with _network():
                block = answer.read1(_BLOCK)  # what has come, at least a byte; a full block would be lost in a break
            if not block:
                break
            file.write(block)
            bar.update(len(block))
    return length is None or file.tell() == start + int(length)


def _restart(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


@contextlib.contextmanager
def _network() -> Iterator[None]:
    """Makes a ConnectionError of all that a connection fails with; an OSError outside is the disk's."""
    try:
        yield
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(str(getattr(error, "reason", None) or error)) from error


def _checksum_fault(archive: Archive, path: Path) -> str | None:
    if archive.checksum is None:
        return None
    kind, _, wanted = archive.checksum.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, kind).hexdigest()
    return None if found == wanted else f"its {kind} is {found}, wanted {wanted}"


def _place(archive: Archive, path: Path, root: Path, hidden: Path) -> list[str]:
    """Unpacks an archive aside and moves what it holds into place; moves a plain file. Returns the files' places."""
    target = root / archive.into
    target.mkdir(parents=True, exist_ok=True)
    if not path.name.endswith(_ARCHIVES):
        os.replace(path, target / archive.name)
        return [os.path.join(archive.into, archive.name)]
    aside = hidden / f"{archive.name}.unpacking"
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    aside.mkdir()
    try:
        unpack(path, aside)
        files = [file for file in aside.rglob("*") if file.is_symlink() or not file.is_dir()]
        placed = [os.path.join(archive.into, file.relative_to(aside)) for file in files]
        _merge(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    path.unlink()
    return placed


def unpack(path: Path, folder: Path) -> None:
    """Unpacks a tar (of any compression) or zip archive.

    Raises:
        RunError: It is damaged, or a member of it would leave ``folder``, or is no file, folder or link inside it.
    """
    log.info("unpacking %s", path.name)
    try:
        if path.name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    _refuse_outside(path, member)
                archive.extractall(folder)
        else:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
                while archive.fileobj.read(_BLOCK):  # to the end, where a compressed file's own checksum is
                    pass
    except tarfile.FilterError as error:
        raise RunError(f"{path}: refused, {error}") from None
    except (*_DAMAGED, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the disk's fault
            raise
        why = (str(error) or type(error).__name__).splitlines()[0].rstrip(": ")
        raise RunError(f"{path}: damaged archive ({why}); remove it to fetch it again") from None


def _refuse_outside(path: Path, member: zipfile.ZipInfo) -> None:
    """zipfile would quietly put such a member elsewhere."""
    name = PurePosixPath(member.filename.replace("\\", "/"))
    if name.is_absolute() or ".." in name.parts or (name.parts and ":" in name.parts[0]):
        raise RunError(f"{path}: refused, '{member.filename}' would be unpacked outside of its folder")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise RunError(f"{path}: refused, '{member.filename}' is a link")


def _merge(source: Path, target: Path) -> None:
    """Moves a tree into another, file over file of the same name; a half-unpacked one is completed by it."""
    for path in sorted(source.iterdir()):
        place = target / path.name
        if path.is_dir() and not path.is_symlink() and place.is_dir():
            _merge(path, place)
        else:
            os.replace(path, place)
