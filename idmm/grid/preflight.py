"""The checks of a grid before its first job: entries, options, datasets, models, labels, and the
folder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from idmm.config import FinetuneConfig, parsing
from idmm.config.commands import ProbeConfig
from idmm.config.phases import Phase
from idmm.errors import Fault, UserError, needed
from idmm.files import output_path
from idmm.grid.config import CONFIGS, GridConfig
from idmm.grid.plan import GridPlan, Job
from idmm.models.base import Backbone
from idmm.models.spec import ModelSpec, model_spec
from idmm.runs.images import ListConfig, list_run_images
from idmm.runs.networks import try_phase, try_start
from idmm.runs.resolve import check_out_of_images, fill_classifier_init
from idmm.training.device import choose_device, pick_device
from idmm.training.run import Run

T = TypeVar("T")


def check(grid: GridConfig, plan: GridPlan) -> None:
    """Open every dataset of a plan and build every backbone once.

    Raises:
        UserError: All faults, those of the plan first.
    """
    checks = _Checks(grid, list(plan.faults))
    # of a grid, or one that starts
    if not any((Path(grid.out) / name).exists() for name in ("grid.yaml", ".lock")):
        checks.once("out", "", output_path, grid.out, None)
    if grid.engine == "ray":
        checks.once("ray", "", needed, "engine: ray", ["ray"], "ray")
    for cell, key in plan.cells.items():
        job = plan.jobs[key]
        backbone = f"backbones '{cell.backbone}'"
        if job.config["init"]:
            backbone = f"weights '{cell.source}'"
        if job.needs is not None:
            checks.check_job(plan.jobs[job.needs], f"sources '{cell.source}'", backbone)
        checks.check_job(job, f"targets '{cell.target}'", backbone)
    if checks.faults:
        raise UserError(*checks.faults)


class _Checks:
    """Checks that are done once for all jobs that need them.

    Attributes:
        faults: Those that were found, with repetitions.
    """

    def __init__(self, grid: GridConfig, faults: list[Fault]):
        self.grid = grid
        self.faults = faults
        self._results: dict[str, tuple[Any, tuple[Fault, ...]]] = {}  # of each check
        self._reported: set[Fault] = set()  # without their entries

    def check_job(self, job: Job, side: str, backbone: str) -> None:
        """Check the needs of a job. ``side`` and ``backbone`` name the entries of its data and
        model."""
        config: ListConfig = parsing.build(CONFIGS[job.command], job.config)
        data = ["data", parsing.to_dict(config.data), config.needs]
        self.once(["out", *data], "", check_out_of_images, replace(config, out=self.grid.out))
        self.once(data, side, list_run_images, config)
        if self.grid.engine == "local":
            try:
                if isinstance(config, ProbeConfig):
                    pick_device(config.device, "train.device")
                else:
                    choose_device(config.train)
            except UserError as error:
                self.faults += [fault.within(job.command) for fault in error.faults]
        self._check_model(job, config, backbone)

    def _check_model(self, job: Job, config: ListConfig, backbone: str) -> None:
        data = config.data
        drloc = job.config.get("drloc") or {}
        model: list[object] = [
            config.model.name,
            config.model.kwargs,
            data.in_chans,
            data.bands,
            data.range,
            config.init,
        ]
        # without a field, as lines on a checkpoint begin with the entry of weights
        spec = self.once([*model, data.mean, data.std, "spec"], backbone, model_spec, config, "")
        if spec is None:
            return
        if isinstance(config, FinetuneConfig):
            key = [*model, "classifier", config.train.classifier_init]
            self.once(key, backbone, fill_classifier_init, config, spec)
        model.append(job.command == "pretrain")
        for phase in config.phases:
            key = [*model, phase.size, phase.other_sizes, drloc if drloc.get("weight") else 0]
            self.once(key, backbone, _try, config, spec, phase)

    def once(self, key: Any, entry: str, call: Callable[..., T], *args: Any) -> T | None:
        """Return ``call(*args)``, or None after a user's mistake. Its faults belong to ``entry``.

        A fault of a source that is a target as well is reported once.
        """
        name = json.dumps(key, sort_keys=True, default=str)
        if name not in self._results:
            try:
                self._results[name] = call(*args), ()
            except UserError as error:
                self._results[name] = None, error.faults
        value: T | None
        value, faults = self._results[name]
        for fault in faults:
            if entry and fault not in self._reported:
                self._reported.add(fault)
                self.faults.append(fault.within(entry))
            elif not entry:
                self.faults.append(fault)
        return value


def _try(config: ListConfig, spec: ModelSpec, phase: Phase) -> None:
    """Build the network of a phase with its weights."""

    def build_rest(phase: Phase, backbone: Backbone) -> None:
        spec.load(backbone)
        if not isinstance(config, ProbeConfig):
            try_start(Run(config, spec), phase, backbone)

    try_phase(Run(config, spec), phase, build_rest)
