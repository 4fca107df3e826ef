"""A run's folder: its config, metrics, state and results, written so that a kill at any moment leaves them whole."""

import contextlib
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from idmm import distributed
from idmm.config import PATHS, RESUME_IGNORED, parsing
from idmm.errors import RunError, UserError
from idmm.files import (
    Lock,
    begun,
    home,
    is_public,
    json_lines,
    missing_folders,
    remove_empty,
    replacing,
    sweep,
    write_text,
)
from idmm.training import environment

log = logging.getLogger("idmm")

# What a checkpoint holds.
PARTS = ("stage", "epoch", "step", "epoch_seconds", "seconds", "sums", "precision", "channels_last")
PARTS += ("method", "optimizer", "ema", "scaler", "kept")


def check_resume(path: str | os.PathLike, used: bool, resume: str) -> None:
    """Raises UserError where ``--resume`` forbids a folder that is used, or one that is not."""
    if used and resume == "never":
        raise UserError(f"out: '{path}' holds a run already; --resume never wants a new folder")
    if not used and resume == "must":
        raise UserError(f"out: '{path}' holds no run to go on with; --resume must wants one")


class RunFolder:
    """The folder ``--out``: made where it is missing, opened by one run at a time, taken up where the last one stopped.

    With several processes the first one writes; the others only read, so the folder must be one that all see.

    Attributes:
        state: What the last checkpoint holds, or None for a new run.
        finished: Whether the run ended before; then there is nothing to do.
        anew: Whether a run was begun here that saved nothing to go on from (told by the first process).

    Raises:
        UserError: The folder is in use, or holds a run of another config, or --resume forbids it.
    """

    def __init__(self, path: str, config: Any, resume: str):
        self.path = Path(path)
        self.leader = distributed.rank() == 0
        self._opened, self._device = environment.now(), getattr(getattr(config, "train", config), "device", "auto")
        self._state_file, self._result_file = self.path / "last" / "state.pt", self.path / "result.json"
        self._lock = Lock(self.path / "last" / "run.lock")
        faults, used, self._made = None, False, []
        try:
            if self.leader:
                try:
                    self._made = missing_folders(self.path)
                    self._acquire()
                    used = self._open(config, resume)
                except UserError as error:
                    faults = error.faults
                    self._remove()
            faults, used, self.finished = distributed.broadcast((faults, used, self._result_file.exists()))
            if faults:
                raise UserError(*faults)
            self.state = self._load() if used and not self.finished else None
            self.anew = self.leader and not used and bool(environment.read(self.path))
        except BaseException:
            self.close()  # else the folder stays locked for this process's life
            raise

    def _open(self, config: Any, resume: str) -> bool:
        used = begun(self.path)
        check_resume(self.path, used, resume)
        if used:
            self._compare(config)
        else:  # what a run left that died before its first checkpoint
            for path in (self.path / "metrics.jsonl", *(self.path / "last").glob("*.json")):  # all that it remembered
                path.unlink(missing_ok=True)
            self.write_config(config)
        for folder in (self.path, self.path / "last"):
            with contextlib.suppress(OSError):  # a finished run may be read-only
                sweep(folder)
        return used

    def write_config(self, config: Any) -> None:
        """Writes config.yaml, to which the run is held when it is taken up again."""
        if self.leader:
            write_text(self.path / "config.yaml", parsing.dump(config))

    def _acquire(self) -> None:
        try:
            free = self._lock.acquire()
        except OSError as error:
            if self._result_file.exists():  # finished: there is nothing to write
                return
            raise UserError(f"out: cannot write to '{self.path}' ({error.strerror}); wanted a folder") from None
        if not os.access(self.path, os.W_OK | os.X_OK) and not self._result_file.exists():  # 'last' alone can be
            raise UserError(f"out: cannot write to '{self.path}'; make the folder writable or name another")
        if not free:
            raise UserError(f"out: '{self.path}' is in use by another run; wait for it or name another folder")

    def _compare(self, config: Any) -> None:
        try:
            old = parsing.flatten(yaml.safe_load((self.path / "config.yaml").read_text()) or {})
        except (OSError, yaml.YAMLError):
            raise UserError(f"out: '{self.path}' holds a run without a readable config.yaml") from None
        new = parsing.flatten(parsing.to_dict(config))
        check_config(self.path, old, new)

    def _load(self) -> dict:
        try:
            state = torch.load(self._state_file, map_location="cpu", weights_only=True)
            why = ", ".join(f"lacks {name}" for name in PARTS if name not in state)
        except Exception as error:  # torch raises many kinds; none of them is the user's to read
            why = type(error).__name__
        if why:
            raise UserError(f"{self._state_file}: cannot be read ({why}); remove it to start over")
        return state

    def save_state(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint; the previous one stays whole until the new one is (a full disk included).

        Raises:
            RunError: It could not be written; the line names the file.
        """
        if not self.leader:
            return
        try:
            with replacing(self._state_file) as file:
                torch.save(state, file)
        except RuntimeError as error:  # torch's writer hides the system's error
            hidden = error.__context__
            what = hidden.strerror if isinstance(hidden, OSError) else str(error).splitlines()[0]
            raise RunError(f"{self._state_file}: cannot be written ({what}); the previous one is kept") from None

    def check_images(self, fingerprint: Any, compare: Callable[[Any, Any], list[str]]) -> None:
        """Keeps the images' fingerprint with a new run, and holds a resumed one to it; ``environment.json`` then says
        that the run has started.

        Raises:
            UserError: Image i is no longer image i; the lines of ``compare(old, new)`` say how.
        """
        lines = compare(self._images, fingerprint) if self._images else []
        lines = distributed.broadcast(lines)
        if lines:
            what = f"the images changed since the run in '{self.path}' began"
            raise UserError(*lines, f"data.root: {what}; restore them or use a new --out")
        if not self._images:
            self.remember("images", fingerprint)
        if self.leader:
            environment.started(self.path, self._device, self._opened)

    @functools.cached_property
    def _images(self) -> dict | None:
        """The fingerprint that the run began with; None where it begins now, and in processes but the first."""
        return self._remembered("images")

    def remember(self, name: str, value: Any) -> None:
        """Keeps a value for when the run is taken up again, in ``last/NAME.json``."""
        if self.leader:
            write_text(self.path / "last" / f"{name}.json", json.dumps(value))

    def remembered(self, name: str) -> Any:
        """Returns what was kept by that name or None, in every process; all must ask together."""
        return distributed.broadcast(self._remembered(name))

    def _remembered(self, name: str) -> Any:
        path = self.path / "last" / f"{name}.json"
        return json.loads(path.read_text()) if self.leader and path.exists() else None

    def scale(self, asked: Any) -> Any:
        """Returns what images deeper than 8 bits are scaled by: what the run began with, or ``asked`` where it begins
        now.

        It is None if no image was deep; ``asked`` serves then too.
        """
        return distributed.broadcast((self._images or {}).get("range") or asked)

    def statistics(self) -> tuple[list[float], list[float]] | None:
        """Returns the mean and std that the run began with, in every process; None where it begins now."""
        known = self._images
        return distributed.broadcast((known["mean"], known["std"]) if known else None)

    def take_back(self, stage: int, epoch: int) -> None:
        """Removes metrics from (stage, epoch) on, and a torn last line: they will be written again."""
        if self.leader:
            kept = [r for r in self.metrics() if (r["stage"], r["epoch"]) < (stage, epoch)]
            write_text(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))

    def metrics(self) -> list[dict]:
        """Returns the records so far, an epoch each."""
        return json_lines(self.path / "metrics.jsonl")

    def last_metrics(self) -> dict:
        """Returns the last record, in every process; all must ask together."""
        return distributed.broadcast(self.metrics()[-1] if self.leader else None)

    def add_metrics(self, record: dict) -> None:
        """Appends an epoch's record."""
        if not self.leader:
            return
        try:
            with open(self.path / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.path / 'metrics.jsonl'}: cannot be written ({error.strerror})") from None

    def finish(self, result: dict) -> None:
        """Writes result.json, which marks the run as finished."""
        if self.leader:
            environment.finished(self.path)
            write_text(self._result_file, json.dumps(result, indent=2) + "\n")
        self.finished = True

    def result(self) -> dict:
        """Returns the finished run's result."""
        return json.loads(self._result_file.read_text())

    @property
    def kept(self) -> str:
        """What messages on the end of a run say of its checkpoint; nothing where there is none."""
        return "; the last checkpoint is kept" if self._state_file.exists() else ""

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is not None and issubclass(kind, UserError):
            self._remove()
        self.close()

    def _remove(self) -> None:
        """Removes what this start wrote into a folder that it made, where nothing was trained; what others put there by
        now stays, and so do folders that are not empty then."""
        if self.path not in self._made or not self._lock.held or begun(self.path) or self.metrics():
            return
        shutil.rmtree(self.path / "last", ignore_errors=True)
        with contextlib.suppress(OSError):
            for name in ("config.yaml", "metrics.jsonl", "log.txt", environment.FILE):
                (self.path / name).unlink(missing_ok=True)
        remove_empty(self._made)

    def close(self) -> None:
        """Lets another run have the folder, as the end of a block does, which removes it after a user's mistake."""
        self._lock.release()


def check_config(path: str | os.PathLike, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises UserError with a line for each key that the run in ``path`` has otherwise than a command, by dotted keys;
    results do not depend on those in ``RESUME_IGNORED`` or on how paths are written."""
    faults = [
        f"{key}: the run in '{path}' has {_shown(old.get(key))}, this command has {_shown(new.get(key))}"
        for key in dict.fromkeys([*new, *old])
        if key not in RESUME_IGNORED and not _same(key, old.get(key), new.get(key))
    ]
    if faults:
        raise UserError(*faults, f"out: '{path}' belongs to another config; use a new --out")


def _same(key: str, old: Any, new: Any) -> bool:
    """Whether two values of a key mean the same. A file or folder that is gone may have been moved with the run: the
    images' fingerprint tells whether it is another."""
    if old == new or key not in PATHS or is_public(old) or is_public(new) or None in (old, new):
        return old == new
    return not home(old).exists() or home(old).resolve() == home(new).resolve()


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
