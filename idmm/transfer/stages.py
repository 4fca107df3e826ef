"""The stages that a grid's jobs are of: how each is configured, run and counted. No torch."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from idmm import options
from idmm.config import FinetuneConfig, PretrainConfig, resolved_stages, section
from idmm.recipes import METHODS, pass_notes, settle_method


@dataclass(frozen=True)
class StageSpec:
    """A kind of job; functions take its config."""

    config: type
    """Class of its config."""
    function: str
    """What runs it, 'module:function', called with the config as plain data."""
    flags: str
    """The grid's key that holds its options: ``pretrain`` or ``finetune``."""
    evaluated: bool
    """Whether it needs test images."""
    labelled: Callable[[Any], bool]
    """Whether it needs labels."""
    sizes: Callable[[Any], list[int]]
    """Sides of the images that its model is built at (pixels)."""
    passes: Callable[[Any], list[tuple[int, int]]]
    """Of each part that is timed on its own: how often it sees the training images, and how many at a time."""
    resolve: Callable[[Any], Any] = lambda config: config
    """Fills in what is left to the method; raises UserError."""
    faults: Callable[[Any, int], list[str]] = lambda config, images: []
    """What is wrong with so many training images."""

    def build(self, job: dict) -> Any:
        """Makes the config from a job's plain one."""
        return options.build(self.config, {**job, "out": "-"})

    def run(self, config: dict) -> dict:
        """Runs it; returns its result."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(config)


@section
class _Probe(FinetuneConfig):
    """Of a fine-tuning, what a probe reads."""

    size: int
    """Side of the images (pixels)."""


STAGES = {
    "pretrain": StageSpec(
        PretrainConfig,
        "idmm.stages.pretrain:pretrain",
        flags="pretrain",
        evaluated=False,
        labelled=lambda config: METHODS[config.method.name].labelled,
        sizes=lambda config: [config.views.size],
        passes=lambda config: [(config.train.epochs, config.train.batch_size)],
        resolve=lambda config: settle_method(config)[0],
        faults=lambda config, images: pass_notes(config, min(config.train.batch_size, images))[0],
    ),
    "finetune": StageSpec(
        FinetuneConfig,
        "idmm.stages.finetune:finetune",
        flags="finetune",
        evaluated=True,
        labelled=lambda config: True,
        sizes=lambda config: [stage.size for stage in resolved_stages(config)],
        passes=lambda config: [(stage.epochs, stage.batch_size) for stage in resolved_stages(config)],
    ),
    "probe": StageSpec(
        _Probe,
        "idmm.transfer.preview:probe",
        flags="finetune",
        evaluated=True,
        labelled=lambda config: True,
        sizes=lambda config: [config.size],
        passes=lambda config: [(2, 1)],  # training and test images, each once
    ),
}
