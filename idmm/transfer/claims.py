"""Who runs which job: a file a claim, kept fresh by its owner, taken over when it has gone stale."""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from idmm.errors import RunError

BEAT = 5.0  # seconds between signs of life
STALE = 60.0  # seconds without one, after which an owner elsewhere counts as dead
FREE = {"free": True}  # what stands in the file by which an owner lets go


class Claims:
    """Claims on jobs in a folder that several runners share, on one machine or over a network file system.

    The files of a job are numbered, KEY.1.claim and so on, and the last one counts: an owner's, or one by which it let
    go. Taking a job, taking it over and letting go of it all make the next number, which succeeds for one only, and
    no file is ever removed: whoever decides by an old look at the folder comes too late for the number he wants.

    An owner on this machine is dead when its process is gone; elsewhere, when it has not touched its file for
    ``STALE`` seconds.

    Args:
        folder: Made by the first claim.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.owner = {"id": uuid.uuid4().hex, "host": socket.gethostname(), **asdict(_Process.this())}

    @contextlib.contextmanager
    def held(self, key: str) -> Iterator[bool]:
        """Claims a job for the block; yields False where another runner has it.

        Raises:
            RunError: The folder cannot be written.
        """
        last, claim = self._last(key)
        if not (claim is None or self._dead(claim)) or not self._put(key, last + 1, self.owner):
            yield False
            return
        over = threading.Event()
        beating = threading.Thread(target=self._beat, args=(self._file(key, last + 1), over), daemon=True)
        beating.start()
        try:
            yield True
        finally:
            over.set()
            beating.join()
            self._put(key, last + 2, FREE)

    def held_by_others(self) -> dict[str, dict]:
        """Returns the owners of live claims by job, this one's own left out."""
        keys = sorted({path.name.split(".")[0] for path in self.folder.glob("*.claim")})
        claims = {key: self._last(key)[1] for key in keys}
        return {
            key: claim.owner
            for key, claim in claims.items()
            if claim and claim.owner.get("id") != self.owner["id"] and not self._dead(claim)
        }

    def _file(self, key: str, number: int) -> Path:
        return self.folder / f"{key}.{number}.claim"

    def _last(self, key: str) -> tuple[int, "_Claim | None"]:
        """The last number that is taken, and what stands there."""
        last = max((int(path.name.split(".")[1]) for path in self.folder.glob(f"{key}.*.claim")), default=0)
        try:
            with open(self._file(key, last)) as file:  # opened, a network file system looks up its time anew
                text, beaten = file.read(), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return last, None
        try:
            owner = json.loads(text)
        except ValueError:
            owner = {}  # being written, or its writer was killed before it was
        return last, _Claim(owner, beaten)

    def _put(self, key: str, number: int, content: dict) -> bool:
        """Makes a job's next file; False where another runner was quicker."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self._file(key, number), "x") as file:
                file.write(json.dumps(content))
            return True
        except FileExistsError:
            return False
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be written ({error.strerror})") from None

    def _dead(self, claim: "_Claim") -> bool:
        if claim.owner == FREE:
            return True
        here = _Process.this()
        if claim.owner.get("place") == here.place and claim.owner.get("born") is not None:
            there = _Process.of(claim.owner["pid"])
            return there is None or there.born != claim.owner["born"]  # a number is given to another process in time
        return self._now() - claim.beaten > STALE

    def _now(self) -> float:
        """The time by the clock that stamps the folder's files, which may be another machine's."""
        with contextlib.suppress(OSError):
            clock = self.folder / f".{self.owner['id']}"
            clock.touch()
            try:
                return clock.stat().st_mtime
            finally:
                clock.unlink(missing_ok=True)
        return time.time()

    def _beat(self, path: Path, over: threading.Event) -> None:
        while not over.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(path)


@dataclass(frozen=True)
class _Claim:
    owner: dict
    """Empty where it cannot be read."""
    beaten: float
    """When the owner last gave a sign of life."""


@dataclass(frozen=True)
class _Process:
    """A process as far as others can tell it from one that has its number later."""

    pid: int
    place: str
    """Where numbers mean the same processes: a machine since it was started, or a container in it."""
    born: str | None
    """When it was started, by that place's clock; None where the system does not say."""

    @staticmethod
    def this() -> "_Process":
        return _Process.of(os.getpid()) or _Process(os.getpid(), socket.gethostname(), None)

    @staticmethod
    def of(pid: int) -> "_Process | None":
        """None if it is gone, a zombie, or the system has no /proc."""
        try:
            place = os.readlink("/proc/self/ns/pid") + " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if state in "ZX" else _Process(pid, place, rest[18])
