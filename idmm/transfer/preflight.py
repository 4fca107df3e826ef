"""Finds what is wrong with a grid before its first job starts: entries, options, datasets that cannot be read, models
that cannot be built, methods without labels, a folder that is taken."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from idmm.config import parsing
from idmm.data.split import Listing
from idmm.distributed import pick_device
from idmm.errors import UserError
from idmm.models.spec import model_spec
from idmm.stages import STAGES, Stage, stage_of
from idmm.stages.images import check_val
from idmm.stages.resolve import RunSetup, fill_classifier_init
from idmm.stages.setup import try_model
from idmm.training.calibrate import choose_device
from idmm.transfer.config import GridConfig
from idmm.transfer.entries import SIDES, data_of, stage_of_target
from idmm.transfer.plan import Cell, GridPlan, Job


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
            checks.listed(stage(stage.build({"data": data_of(entry, grid)})), f"{name} '{entry['label']}'")
    if checks.faults:
        raise UserError(*dict.fromkeys(checks.faults))


def _backbone(cell: Cell, job: Job) -> str:
    """The entry that decides on a job's backbone, as messages name it."""
    return f"backbones '{cell.backbone}'" if job.config["init"] is None else f"weights '{cell.source}'"


class _Checks:
    """Does each check once, and adds its faults for every entry that needs it."""

    def __init__(self, grid: GridConfig, faults: list[str]):
        self.grid, self.faults = grid, faults
        self._found: dict[str, tuple[Any, tuple[str, ...]]] = {}

    def look(self, job: Job, side: str, backbone: str) -> None:
        """Checks what a job needs; ``side`` and ``backbone`` name the entries that its data and model come from."""
        config = STAGES[job.stage].build(job.config)
        stage = stage_of(config)
        splits = self.listed(stage, side)
        if splits:
            self.faults += [f"{side}: {fault}" for fault in stage.count_faults(len(splits.train))]
            self.once(["val", job.config["data"], stage.needs_val], side, check_val, stage, splits)
        if self.grid.engine == "local":
            train = getattr(config, "train", None)  # a probe has none
            device = (pick_device, stage.device, "train.device") if train is None else (choose_device, train)
            self.once([job.stage, device[1:]], job.stage, *device)
        drloc = job.config.get("drloc") or {}
        data = config.data
        model = [config.model.name, config.model.kwargs, data.in_chans, data.bands, data.range, config.init]
        # an empty field: lines on a checkpoint begin with the entry of weights
        spec = self.once([*model, data.mean, data.std, "spec"], backbone, model_spec, config, "")
        if spec is None:
            return
        if job.stage == "finetune":
            asked = [*model, "classifier", config.train.classifier_init]
            self.once(asked, backbone, fill_classifier_init, config, spec)
        setup = RunSetup(stage, spec, tuple(stage.phases))
        model += [job.stage == "pretrain", stage.LABELS, getattr(config.model, "pyramid_width", None)]
        for phase in setup.phases:
            asked = [*model, phase.size, phase.other_sizes, drloc if drloc.get("weight") else 0]
            self.once(asked, backbone, try_model, setup, phase, True)

    def listed(self, stage: Stage, side: str) -> Listing | None:
        """Returns the images of a stage, None where they are at fault."""
        needs = [stage.needs_labels, stage.needs_test, stage.uses_unlabelled, stage.LABELS]
        return self.once(["data", parsing.to_dict(stage.config.data), *needs], side, stage.list_images, True)

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
            return []
        if out.exists() and not out.is_dir():
            return [f"out: '{out}' is a file; name a folder"]
        elif out.is_dir() and any(not path.name.startswith(".") for path in out.iterdir()):
            return [f"out: '{out}' holds something that is no grid; name another folder"]
        elif not out.exists():
            above = next(path for path in out.absolute().parents if path.exists())
            if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
                return [f"out: cannot write to '{out}'; name a folder elsewhere"]
    except OSError as error:
        return [f"out: cannot read '{out}' ({error.strerror}); name another folder"]
    return []
