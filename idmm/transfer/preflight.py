"""Finds what is wrong with a grid before its first job starts: entries, options, datasets that cannot be read, models
that cannot be built, methods without labels, a folder that is taken."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from idmm.calibrate import choose_device
from idmm.config import parsing
from idmm.data.cache import file_digest
from idmm.data.dense import DenseSplits
from idmm.data.images import BadImage
from idmm.data.split import Splits, counted
from idmm.distributed import pick_device
from idmm.errors import UserError
from idmm.stages import STAGES
from idmm.stages.assemble import Assembly, assemble, check_val
from idmm.stages.handover import decide
from idmm.transfer.config import TRAINING, GridConfig
from idmm.transfer.entries import SIDES, data_of, stage_of_target
from idmm.transfer.plan import Cell, GridPlan, Job
from idmm.transfer.run import absolute


def check(grid: GridConfig, plan: GridPlan) -> None:
    """Opens every dataset of a plan and builds every backbone once. UserError with all faults, those of the plan first,
    a line each."""
    checks = _Checks(grid, plan.faults + folder_faults(grid))
    if grid.engine == "ray":
        from idmm.transfer.cluster import require

        checks.once("ray", "", require)
    for cell, key in plan.cells.items():
        job = plan.jobs[key]
        if job.needs is not None:
            checks.look(plan.jobs[job.needs], f"sources '{cell.source}'", _backbone(cell, job))
        checks.look(job, f"targets '{cell.target}'", _backbone(cell, job))
    for name in SIDES:  # entries that other faults keep out of all jobs
        seen = {getattr(cell, name[:-1]) for cell in plan.cells}
        for entry in [entry for entry in plan.entries[name] if entry["label"] not in seen]:
            stage = STAGES["pretrain" if name == "sources" else stage_of_target(entry, grid)]
            checks.listed(stage.build({"data": data_of(entry, grid)}), f"{name} '{entry['label']}'")
    checks.faults += [
        f"{side}: its images changed since {counted(len(keys), 'run')} in '{grid.out}' began; name another out"
        for side, keys in checks.changed.items()
    ]
    if checks.faults:
        raise UserError(*dict.fromkeys(checks.faults))


def _backbone(cell: Cell, job: Job) -> str:
    """The entry that decides on a job's backbone, as messages name it."""
    return f"backbones '{cell.backbone}'" if job.config["init"] is None else f"weights '{cell.source}'"


class _Checks:
    """Does each check once, and adds its faults for every entry that needs it."""

    def __init__(self, grid: GridConfig, faults: list[str]):
        self.grid, self.faults = grid, faults
        self.changed: dict[str, list[str]] = {}  # jobs that were begun with other images, by the dataset's entry
        self._found: dict[str, tuple[Any, tuple[str, ...]]] = {}
        self._runs: dict[str, Assembly] = {}

    def look(self, job: Job, side: str, backbone: str) -> None:
        """Checks what a job needs; ``side`` and ``backbone`` name the entries that its data and model come from."""
        stage, new = STAGES[job.stage], job.key not in self._runs
        if new:  # lines on a checkpoint begin with the entry of weights
            self._runs[job.key] = assemble(stage.build(job.config), init_field="")
        parts = self._runs[job.key]
        config = parts.config
        found = self.listed(config, side)
        if found:
            splits, known = found
            self.faults += [f"{side}: {fault}" for fault in stage.faults(config, len(splits.train))]
            self.once(["val", job.config["data"], stage.needs_val(config)], side, check_val, parts, splits)
            if new and _changed(Path(self.grid.out), job.key, splits, known, config.data.on_error == "skip"):
                self.changed.setdefault(side, []).append(job.key)
        if self.grid.engine == "local":
            train = getattr(config, "train", None)  # a probe has none
            device = (pick_device, parts.device, "train.device") if train is None else (choose_device, train)
            self.once([job.stage, device[1:]], job.stage, *device)
        drloc = job.config.get("drloc") or {}
        data = config.data
        model = [config.model.name, config.model.kwargs, data.in_chans, data.bands, data.range, config.init]
        if job.stage == "finetune":
            asked = [*model, "classifier", config.train.classifier_init]
            self.once(asked, backbone, lambda: decide(config, parts.spec))
        model += [parts.learns, getattr(config.model, "pyramid_width", None)]
        for phase in parts.phases:
            asked = [*model, phase.size, phase.others, drloc if drloc.get("weight") else 0]
            self.once(asked, backbone, parts.try_model, phase, True)

    def listed(self, config: Any, side: str) -> tuple[Splits, DenseSplits | None] | None:
        """Returns what :meth:`Assembly.listed` does of a config's images, None where they are at fault."""
        parts = assemble(config)
        asked = ["data", parsing.plain(config.data), *parts.stage.images(config)[1:], parts.learns]
        return self.once(asked, side, parts.listed)

    def once(self, what: Any, where: str, call: Callable, *args) -> Any:
        """Returns ``call(*args)``, None where that is a user's mistake; ``where`` begins its lines."""
        name = json.dumps(what, sort_keys=True, default=str)
        if name not in self._found:
            try:
                self._found[name] = call(*args), ()
            except UserError as error:
                self._found[name] = None, error.faults
        value, faults = self._found[name]
        self.faults += [f"{where}: {fault}" if where else fault for fault in faults]
        return value


# ------------------------------------------------------------------ the grid's folder
def folder_faults(config: GridConfig) -> list[str]:
    """Returns what keeps a grid from being written to ``out``: something else is in it, say."""
    out = Path(config.out)
    known = out / "grid.yaml"
    try:
        if known.exists():
            if not _related(parsing.read_file(known), parsing.plain(absolute(config))):
                return [f"out: '{out}' holds a grid of other sources and targets; name another folder"]
        elif out.exists() and not out.is_dir():
            return [f"out: '{out}' is a file; name a folder"]
        elif out.is_dir() and any(not path.name.startswith(".") for path in out.iterdir()):
            return [f"out: '{out}' holds something that is no grid; name another folder"]
        elif not out.exists():
            above = next(path for path in out.absolute().parents if path.exists())
            if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
                return [f"out: cannot write to '{out}'; name a folder elsewhere"]
    except UserError as error:
        return [f"out: '{out}': {fault.removeprefix('--config: ')}" for fault in error.faults]
    except OSError as error:
        return [f"out: cannot read '{out}' ({error.strerror}); name another folder"]
    return []


def _related(before: dict, now: dict) -> bool:
    """Whether two grids have a source or a target in common: then they may share runs."""
    then, new = ([(side, _dataset(one)) for side in SIDES for one in grid.get(side) or []] for grid in (before, now))
    return any(dataset in new for dataset in then)


def _dataset(entry: str | dict) -> dict:
    """What an entry says of its images, whichever way it is written."""
    entry = dict(entry) if isinstance(entry, dict) else {"name": entry}
    kept = {
        key: value for key, value in entry.items() if key not in ("label", "protocol", *TRAINING) and value is not None
    }
    return {"name": "folder", **kept}  # a root alone is a folder


# ------------------------------------------------------------------ images that changed
def _changed(out: Path, key: str, splits: Splits, known: DenseSplits | None, skips: bool) -> bool:
    """Whether a run of this grid read other images, by their names, and by the bytes of files that are younger, or
    other boxes or masks of them."""
    path = min(out.glob(f"runs/*/*-{key}/**/last/images.json"), default=None)  # of folds the first one's
    if path is None or not (path.with_name("state.pt").exists() or (path.parent.parent / "result.json").exists()):
        return False  # what was not saved is begun anew
    then, since = json.loads(path.read_text()), path.stat().st_mtime_ns
    for part, split in splits.parts.items():
        kept = then.get(part)
        if kept is None:
            continue
        before, now = kept["images"], set(split.names)
        if before.keys() - now or (now - before.keys() and not skips):
            return True
        files = zip(split.names, split.items, strict=True) if isinstance(split.items, list) else ()
        if any(name in before and _younger(file, since, before[name].partition(" ")[0]) for name, file in files):
            return True
        learnt = then.get("targets", {}).get(part, {})
        drawn = zip(split.names, known.targets[part], strict=True) if known else ()
        if any(target.digest != learnt.get(name, target.digest) for name, target in drawn):
            return True
    return False


def _younger(file: str, since: int, digest: str) -> bool:
    """Whether a file was written ``since`` (ns) and has another digest, or cannot be read."""
    try:
        time = os.stat(file).st_mtime_ns
        return time > since and _read_digest(file, time) != digest
    except (OSError, BadImage):
        return True


@functools.lru_cache(maxsize=2**16)
def _read_digest(file: str, time: int) -> str:
    return file_digest(file)
