"""A run's folder: its config, metrics, state and result. A kill leaves every file whole."""

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from idmm import distributed
from idmm.config import PATHS, RESUME_IGNORED, parsing
from idmm.config.reading import read_file
from idmm.config.schema import flatten
from idmm.data.fingerprint import image_changes, listing_fingerprint, refuse_changes
from idmm.data.split import Listing
from idmm.data.store import Stores
from idmm.errors import Fault, RunError, UserError
from idmm.files import (
    REWRITE,
    WITHOUT,
    AnyPath,
    Json,
    Lock,
    expand_home,
    holds_run,
    is_public,
    read_json,
    read_metrics,
    reading,
    replacing,
    sweep,
    write_json,
    write_text,
)
from idmm.text import listed
from idmm.training.plan import TrainingState

MOST_FAULTS = 20  # that a message lists


def check_resume(path: AnyPath, used: bool, resume: str) -> None:
    """Raise UserError if ``--resume`` forbids a folder that is used, or one that is not."""
    if used and resume == "never":
        raise UserError.of(
            "out", f"'{path}' holds a run already", "--resume never expects a new folder"
        )
    if not used and resume == "must":
        raise UserError.of("out", f"'{path}' holds no run to resume", "--resume must expects one")


class RunFolder:
    """The folder ``--out``: made if it is missing, locked against a second run, resumed if it holds
    a state.

    With several processes the first one writes and the others only read, so all must see the
    folder.

    Attributes:
        state: Content of the last checkpoint; None in a new or finished run.
        finished: Whether the run has ended and there is nothing to do.
        start_scores: What was measured before the first step, in percent, by its key in
            ``result.json``.

    Raises:
        UserError: The folder is in use, holds a run of another config, or --resume forbids it.
    """

    def __init__(self, path: str, config: Any, resume: str):
        self.path = Path(path)
        self.leader = distributed.rank() == 0
        last = self.path / "last"
        self._state_file = last / "state.pt"
        self._result_file = self.path / "result.json"
        self._images_file = last / "images.json"
        self._scores_file = last / "start.json"
        self._lock = Lock(last / "run.lock")
        self._opened_at = time.time()  # before any image is read
        faults: Sequence[Fault] = ()
        used = False
        self._made: list[Path] = []
        self._records: list[Json] | None = None
        self.finished = False
        self.state: TrainingState | None = None
        self._images: Json | None = None
        self.start_scores: dict[str, float] = {}
        try:
            if self.leader:
                try:
                    folders = (self.path, *self.path.parents)
                    self._made = [folder for folder in folders if not folder.exists()]
                    if not self._result_file.exists():  # a finished run may be read-only
                        self._check_files()
                        self._lock.acquire_output(self.path)
                    used = self._open(config, resume)
                except UserError as error:
                    faults = error.faults
                    self._remove()
            faults, used, self.finished = distributed.broadcast(
                (faults, used, self._result_file.exists())
            )
            if faults:
                raise UserError(*faults)
            if used and not self.finished:
                self.state = self._load()
            self._images = self._read_json(self._images_file)  # None in all processes but the first
            scores = self._read_json(self._scores_file) or {}
            with reading(self._scores_file, WITHOUT):
                if not all(isinstance(value, int | float) for value in scores.values()):
                    raise TypeError
            self.start_scores = distributed.broadcast(scores)
        except BaseException:
            self.close()  # else the folder stays locked as long as this process lives
            raise

    def _open(self, config: Any, resume: str) -> bool:
        used = holds_run(self.path)
        check_resume(self.path, used, resume)
        if used:
            old = read_file(self.path / "config.yaml")
            new = parsing.with_command(config)
            check_config(self.path, flatten(old), flatten(new))
        else:  # a run that died before its first checkpoint leaves nothing to this one
            for path in (self.path / "metrics.jsonl", *(self.path / "last").glob("*.json")):
                path.unlink(missing_ok=True)
            write_text(self.path / "config.yaml", parsing.dump(config))
        for folder in (self.path, self.path / "last"):
            with suppress(OSError):  # a finished run may be read-only
                sweep(folder)
        return used

    def _check_files(self) -> None:
        """Raise UserError if a folder in which no run began has files that a run would replace."""
        files = [name for name in ("config.yaml", "metrics.jsonl") if (self.path / name).exists()]
        if files and not self._state_file.parent.exists():
            raise UserError.of(
                "out",
                f"'{self.path}' has files that no run wrote ({listed(files)})",
                "Name a new folder",
            )

    def _load(self) -> TrainingState:
        with self.reading_state():
            return TrainingState(
                **torch.load(self._state_file, map_location="cpu", weights_only=True)
            )

    def reading_state(self) -> AbstractContextManager[None]:
        """Raise UserError if the checkpoint turns out to be damaged inside the block."""
        return reading(self._state_file, "Delete it to start over")

    def save_state(self, state: TrainingState) -> None:
        """Replace the checkpoint, in the first process. The previous one stays until the new one is
        whole.

        Raises:
            RunError: It cannot be written, e.g. on a full disk. The line names the file.
        """
        try:
            with replacing(self._state_file) as file:
                torch.save(vars(state), file)
        except RuntimeError as error:  # torch's writer hides the system's error
            hidden = error.__context__
            cause = str(error).splitlines()[0]
            if isinstance(hidden, OSError):
                cause = hidden.strerror or cause
            raise RunError(
                f"{self._state_file}: cannot be written ({cause}). The previous one is kept"
            ) from None

    def check_images(self, images: Stores) -> None:
        """Save the fingerprint of the images of a new run, or compare that of a resumed one with
        the saved one.

        Raises:
            UserError: Image i is no longer image i.
        """
        fingerprint = images.fingerprint()
        self._compare(fingerprint)
        if self.leader and not self._images:
            self._images = fingerprint | {"time": self._opened_at}
            write_text(self._images_file, json.dumps(self._images))

    def check_listing(self, listing: Listing) -> None:
        """Raise UserError if a finished run's images are others now. All processes must call
        together."""
        fingerprint = {}
        if self._images:
            with reading(self._images_file, WITHOUT):
                fingerprint = listing_fingerprint(listing, self._images)
        self._compare(fingerprint)

    def _compare(self, fingerprint: Json) -> None:
        faults: Sequence[Fault] = ()
        if self._images:
            try:
                with reading(self._images_file, WITHOUT):
                    refuse_changes(image_changes(self._images, fingerprint), self.path)
            except UserError as error:
                faults = error.faults
        faults = distributed.broadcast(faults)
        if faults:
            raise UserError(*faults)

    def image_values(self) -> Json | None:
        """Return ``range``, ``mean`` and ``std`` of the images that the run began with; None in a
        new run.

        All processes must call together.
        """
        values: Json | None = None
        if self._images:
            with reading(self._images_file, WITHOUT):
                values = {name: self._images[name] for name in ("range", "mean", "std")}
        shared: Json | None = distributed.broadcast(values)
        return shared

    def add_start_scores(self, scores: dict[str, float]) -> None:
        """Save scores from before the first step. All processes must pass the same ones."""
        self.start_scores |= scores
        if self.leader:
            write_json(self._scores_file, self.start_scores)

    def _read_json(self, path: Path) -> Json | None:
        if self.leader and path.exists():
            return read_json(path, WITHOUT)
        return None

    def take_back(self, stage: int, epoch: int) -> None:
        """Remove metrics from (stage, epoch) on. The resumed run writes them again."""
        earlier = [r for r in self.metrics() if (r["stage"], r["epoch"]) < (stage, epoch)]
        self._write_metrics(earlier)

    def metrics(self) -> list[Json]:
        """Return the records so far, one per epoch."""
        records = self._records
        if records is None or not self.leader:  # the first process writes them
            records = read_metrics(self.path / "metrics.jsonl")
            self._records = records
        return records

    def add_metrics(self, record: Json) -> None:
        """Add the record of an epoch."""
        self._write_metrics([*self.metrics(), record])

    def _write_metrics(self, records: list[Json]) -> None:
        if self.leader:
            self._records = records
            lines = [json.dumps(record) + "\n" for record in records]
            write_text(self.path / "metrics.jsonl", "".join(lines))

    def write_result(self, result: Json) -> None:
        """Write result.json, which marks the run as finished."""
        if self.leader:
            write_json(self._result_file, result)
        self.finished = True

    def result(self) -> Json:
        """Return the result of a finished run."""
        return read_json(self._result_file, REWRITE)

    @property
    def checkpoint_note(self) -> str:
        """The end of messages about a run that stops, if there is a checkpoint."""
        if self._state_file.exists():
            return ". The last checkpoint is kept"
        return ""

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None and issubclass(kind, UserError):
            self._remove()
        self.close()

    def _remove(self) -> None:
        """Remove a folder that this start made, if nothing was trained."""
        is_ours = self.path in self._made and self._lock.held
        if not is_ours or holds_run(self.path) or self.metrics():
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # a parent has other files
            for parent in self._made[1:]:
                parent.rmdir()

    def close(self) -> None:
        """Release the lock, as leaving a ``with`` block does."""
        self._lock.release()


def check_config(path: AnyPath, old: Json, new: Json) -> None:
    """Compare the config of the run in ``path`` with a command's, both flat.

    Keys in ``RESUME_IGNORED`` may differ.

    Raises:
        UserError: A line per key that differs. Another spelling of the same path is no difference.
    """
    faults = []
    for key in {**new, **old}:
        before = old.get(key)
        now = new.get(key)
        if key not in RESUME_IGNORED and not _same(key, before, now):
            text = f"the run in '{path}' has {_text(before)}, this command has {_text(now)}"
            faults.append(Fault(key, text))
    fields = {fault.field for fault in faults}
    # ``stages`` repeats them
    if fields & {"train.size", "train.epochs", "train.lr", "train.batch_size"}:
        faults = [fault for fault in faults if fault.field != "stages"]
    if not faults:
        return
    if len(faults) > MOST_FAULTS:
        faults[MOST_FAULTS:] = [Fault("", f"  and {len(faults) - MOST_FAULTS} more")]
    last = Fault("out", f"'{path}' belongs to another config", "Use a new --out")
    raise UserError(*faults, last)


def _same(key: str, old: Any, new: Any) -> bool:
    """Return whether two values of a key mean the same.

    A file or folder that is gone may have been moved with the run. The images' fingerprint shows if
    it is another, and weights keep their name.
    """
    if old == new or key not in PATHS or is_public(old) or is_public(new) or None in (old, new):
        return bool(old == new)
    before = expand_home(old)
    now = expand_home(new)
    is_moved = not before.exists() and (key != "init" or before.name == now.name)
    return is_moved or bool(before.resolve() == now.resolve())


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value)
