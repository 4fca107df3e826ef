"""One lock for everything that several processes share: a run's folder, a grid's jobs, decoded images, downloads.

It needs nothing of a file system but that a file is created once. (``flock`` and ``lockf``, and so most libraries, do
nothing or fail on some network file systems; a plain lock file outlives an owner that was killed.)
"""

import contextlib
import errno
import json
import os
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BEAT = 5.0  # seconds between an owner's heartbeats
STALE = 60.0  # seconds without one, after which an owner elsewhere counts as dead
POLL = (0.05, 2.0)  # seconds between a waiting process's attempts, at first and after a while
_OWNER = {"id": str, "host": str, "pid": int, "place": str, "born": str | None, "token": str}  # what a file says of it


class Lock:
    """A lock that one owner holds at a time, over processes, machines and network file systems.

    While it is held there is a file PATH.NUMBER.lock that names the owner, who touches it every ``BEAT`` seconds and
    removes it at the end. To acquire the lock is to create the file of the next number, which succeeds for one only,
    then to list the folder again and withdraw if another living owner is there: numbers are used again, so a process
    that chose one from an outdated listing may get it though the lock is held. The next owner removes dead ones' files.

    An owner on this machine is dead when its process is gone; elsewhere, when it has not touched its file for
    ``STALE`` seconds by the clock of the folder's file system.

    ``left`` is when the last dead owner whose file it removed gave its last sign of life, by the clock of the folder's
    file system (seconds); 0: there was none.

    Args:
        path: Its folder, made when it is acquired, and its name.
        owner: Identifies an owner of several locks; None: a new one.
    """

    def __init__(self, path: Path, owner: str | None = None):
        self.path, pid = Path(path), os.getpid()
        self.owner = {"id": owner or uuid.uuid4().hex, "host": socket.gethostname(), "pid": pid}
        self.owner |= {"place": _place(), "born": _born(pid)}
        self.left = 0.0
        self._file: Path | None = None
        self._beating: tuple[threading.Thread, threading.Event] | None = None

    def acquire(
        self, wait: Literal["never", "silent", "always"] = "never", waiting: Callable[[dict], None] | None = None
    ) -> bool:
        """Takes the lock; returns whether it could.

        Args:
            wait: ``never``; ``silent``: only for a heartbeat of an owner elsewhere, who may have been killed;
                ``always``: until the lock is free.
            waiting: Called with the owner when there is one to wait for, once.

        Raises:
            OSError: The folder cannot be written.
        """
        first, pause = None, POLL[0]
        while not self._created():
            if wait == "never":
                return False
            held = _holder(self.path)
            if held and wait == "silent" and (_lives(held.owner) or first and held.beat != first.beat):
                return False
            if held and first is None:
                first = held
                if waiting is not None:
                    waiting(held.owner)
            time.sleep(pause)
            pause = min(2 * pause, POLL[1])
        return True

    @property
    def held(self) -> bool:
        """Whether this owner has it still: one that was stopped for long may have been taken for dead."""
        return self._file is not None and _read(self._file).owner.get("token") == self.owner["token"]

    def release(self) -> None:
        """Lets the next owner have it; nothing if it is not held."""
        if self._beating is not None:
            thread, over = self._beating
            over.set()
            thread.join()
        with contextlib.suppress(OSError):  # then it is let go of when this process ends
            if self.held:
                self._file.unlink(missing_ok=True)
        self._file = self._beating = None

    close = release  # for contextlib.closing

    def _created(self) -> bool:
        before = _held(self.path)
        if any(held.alive for held in before):
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.owner["token"] = uuid.uuid4().hex
        last = max((int(held.file.name.split(".")[-2]) for held in before), default=0)
        path = Path(f"{self.path}.{last + 1}.lock")
        try:
            with open(path, "x") as file:
                self._file = path
                file.write(json.dumps(self.owner))
            others = [held for held in _held(self.path) if held.file != path]
            if any(held.alive for held in others) or not self.held:
                self.release()
                return False
            for held in others:
                self.left = max(self.left, held.beat)
                held.file.unlink(missing_ok=True)
            over = threading.Event()
            self._beating = threading.Thread(target=self._beat, args=(over,), daemon=True), over
            self._beating[0].start()
            return True
        except FileExistsError:
            return False
        except BaseException:  # a full disk, Ctrl-C
            if self._file is not None:
                self._file.unlink(missing_ok=True)
            self._file = self._beating = None
            raise

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT):
            with contextlib.suppress(OSError):
                if self.held:
                    os.utime(self._file)


def holders(folder: Path) -> dict[str, dict]:
    """Returns the living owners of the locks in a folder, by the locks' names."""
    paths = sorted({path.with_name(path.name.rsplit(".", 2)[0]) for path in Path(folder).glob("*.*.lock")})
    return {path.name: held.owner for path in paths if (held := _holder(path))}


@dataclass(frozen=True)
class _Held:
    """A lock's file."""

    file: Path
    owner: dict  # empty while it is being written, where its writer was killed before it was, or of a foreign file
    beat: float  # time of the owner's last heartbeat; 0: the file is gone

    @property
    def alive(self) -> bool:
        lives = _lives(self.owner)
        return bool(self.beat) and (_now(self.file.parent) - self.beat <= STALE if lives is None else lives)


def _held(path: Path) -> list[_Held]:
    """What is there of a lock."""
    name = re.compile(re.escape(path.name) + r"\.\d+\.lock")
    with contextlib.suppress(FileNotFoundError):
        return [_read(path.with_name(entry)) for entry in os.listdir(path.parent) if name.fullmatch(entry)]
    return []


def _holder(path: Path) -> _Held | None:
    return next((held for held in _held(path) if held.alive), None)


def _read(file: Path) -> _Held:
    owner, beat = {}, 0.0
    try:
        with open(file) as opened:  # opened, a network file system looks up its time anew
            beat, text = os.fstat(opened.fileno()).st_mtime, opened.read()
        found = json.loads(text)
        if isinstance(found, dict) and all(key in found and isinstance(found[key], _OWNER[key]) for key in _OWNER):
            owner = found
    except (ValueError, RecursionError):
        pass
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        beat = 0.0
    return _Held(file, owner, beat)


def _now(folder: Path) -> float:
    """The time by the clock that stamps the folder's files, which may be another machine's."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        os.utime(file.fileno())
        return os.fstat(file.fileno()).st_mtime
    return time.time()


# ------------------------------------------------------------------ processes
def _place() -> str:
    """Where numbers mean the same processes: a machine since it was started, or a container in it."""
    try:
        return os.readlink("/proc/self/ns/pid") + " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _born(pid: int) -> str | None:
    """When a process was started, by its machine's clock; empty: it is a zombie; None where the system does not say."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if state in "ZX" else rest[18]


def _lives(owner: dict) -> bool | None:
    """Whether an owner's process is there; None where that cannot be known: it is elsewhere, say."""
    if owner.get("place") != _place():
        return None
    try:
        os.kill(owner["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    born = _born(owner["pid"])  # a number is given to another process in time
    return None if born is None or owner["born"] is None else born == owner["born"]
