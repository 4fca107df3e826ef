"""What can be found wrong with a grid before its first job starts: entries, options, datasets that cannot be read,
models that cannot be built, methods without labels, a folder that is taken."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from idmm import options
from idmm.config import PretrainConfig
from idmm.data.cache import file_digest
from idmm.data.datasets import open_splits
from idmm.data.images import BadImage
from idmm.data.split import Splits, counted
from idmm.distributed import pick_device
from idmm.errors import UserError
from idmm.stages import STAGES
from idmm.stages.assemble import assemble
from idmm.transfer.config import GridConfig
from idmm.transfer.entries import data_of, read_entries
from idmm.transfer.plan import Job, Layout, lay_out
from idmm.transfer.run import folder_faults


def check(grid: GridConfig) -> dict[str, int]:
    """Plans the grid, opens every dataset and builds every backbone once.

    Returns:
        Training images of each job, by key.

    Raises:
        UserError: All faults, a line each.
    """
    laid, faults = lay_out(grid)
    checks = _Checks(faults + folder_faults(grid))
    if grid.engine == "ray":
        from idmm.transfer.cluster import require

        checks.once("ray", "", require)
    counts, changed = {}, {}
    for key, (job, side, backbone) in _named(laid).items():
        parts = assemble(STAGES[job.stage].build(job.config), init_field="")  # lines begin with the entry of weights
        config, stage = parts.config, parts.stage
        asked = (config.data, stage.labelled(config), stage.needs_test)
        splits = checks.once(["data", job.config["data"], *asked[1:]], side, open_splits, *asked)
        counts[key] = len(splits.train) if splits else 0
        if splits and _changed(Path(grid.out), key, splits, config.data.on_error == "skip"):
            changed.setdefault(side, []).append(key)
        if splits:
            checks.faults += [f"{side}: {fault}" for fault in stage.faults(config, counts[key])]
        if grid.engine == "local":
            checks.once(parts.device, job.stage, pick_device, parts.device, "train.device")
        for phase in parts.phases:
            model = [config.model.name, config.model.kwargs, config.data.in_chans, config.init, phase.size]
            drloc = job.config.get("drloc") or {"weight": 0}
            checks.once([*model, drloc if drloc["weight"] else 0], backbone, parts.try_model, phase, True)
    _look_at_the_rest(grid, laid, checks)
    checks.faults += [
        f"{side}: its images changed since {counted(len(keys), 'run')} in '{grid.out}' began; name another out"
        for side, keys in changed.items()
    ]
    if checks.faults:
        raise UserError(*dict.fromkeys(checks.faults))
    return counts


def _changed(out: Path, key: str, splits: Splits, skips: bool) -> bool:
    """Whether a run of this grid had other images: by their names, and by the bytes of files that are younger."""
    path = next(out.glob(f"runs/*/*-{key}/last/images.json"), None)
    if path is None or not (path.with_name("state.pt").exists() or (path.parent.parent / "result.json").exists()):
        return False  # what was not saved is begun anew
    try:
        then, since = json.loads(path.read_text()), path.stat().st_mtime_ns
    except OSError:
        return False  # another runner is beginning it anew
    for part, kept in then.items():
        split = getattr(splits, part)
        if kept is None or split is None:
            continue
        before, now = kept["images"], set(split.names)
        if before.keys() - now or (now - before.keys() and not skips):
            return True
        files = zip(split.names, split.items, strict=True) if isinstance(split.items, list) else ()
        if any(name in before and _younger(file, since, before[name].partition(" ")[0]) for name, file in files):
            return True
    return False


def _younger(file: str, since: int, digest: str) -> bool:
    """Whether a file was written since (ns) and holds something else, or cannot be read."""
    try:
        time = os.stat(file).st_mtime_ns
        return time > since and _read_digest(file, time) != digest
    except (OSError, BadImage):
        return True


@functools.lru_cache(maxsize=2**16)
def _read_digest(file: str, time: int) -> str:
    return file_digest(file)


def _look_at_the_rest(grid: GridConfig, laid: Layout, checks: "_Checks") -> None:
    """Opens the datasets of entries that other faults keep out of every job."""
    entries = read_entries(grid, [])
    for name, labelled in (("sources", False), ("targets", True)):
        seen = {getattr(cell, name[:-1]) for cell in laid.cells}
        for entry in entries[name]:
            if entry["label"] not in seen:
                data = options.build(PretrainConfig, {"data": data_of(entry, grid)}).data
                checks.once([name, entry["label"]], f"{name} '{entry['label']}'", open_splits, data, labelled)


class _Checks:
    """Does a thing once, and keeps what is wrong with it."""

    def __init__(self, faults: list[str]):
        self.faults, self._found = faults, {}

    def once(self, what: Any, where: str, call: Callable, *args) -> Any:
        """Returns ``call(*args)``, None where that is a user's mistake; ``where`` begins its lines."""
        name = json.dumps(what, sort_keys=True, default=str)
        if name not in self._found:
            self._found[name] = None
            try:
                self._found[name] = call(*args)
            except UserError as error:
                self.faults += [f"{where}: {fault}" if where else fault for fault in error.faults]
        return self._found[name]


def _named(laid: Layout) -> dict[str, tuple[Job, str, str]]:
    """Jobs by key, with the entries that they are of as messages name them."""
    found: dict[str, tuple[Job, str, str]] = {}
    for cell, key in laid.cells.items():
        job, backbone = laid.jobs[key], f"backbones '{cell.backbone}'"
        if job.config["init"] is not None:
            backbone = f"weights '{cell.source}'"
        found.setdefault(key, (job, f"targets '{cell.target}'", backbone))
        if job.needs is not None:
            found.setdefault(job.needs, (laid.jobs[job.needs], f"sources '{cell.source}'", backbone))
    return found
