"""The keys of a transfer grid."""

from dataclasses import field
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config.base import REQUIRED, section
from idmm.config.commands import ProbeConfig

KINDS = {"pretrain": PretrainConfig, "finetune": FinetuneConfig}
TRAINING = tuple(KINDS)
CONFIGS: dict[str, type] = {**KINDS, "probe": ProbeConfig}  # of the jobs


@section
class Ray:
    """The Ray cluster of --engine ray."""

    address: str | None = None
    """Address of a running cluster, or 'auto'. Default: start one on this machine."""
    num_cpus: PositiveFloat = 1.0
    """Cores per job."""
    num_gpus: NonNegativeFloat | None = None
    """GPUs per job. A fraction lets jobs share one. Default: 1 if the cluster has any, else 0."""


@section
class Target:
    """The measurement of a cell."""

    protocol: Literal["finetune", "probe"] = "finetune"
    """Measurement per target: fine-tuning, or a probe of frozen features (minutes)."""


@section
class GridConfig:
    """Stage 3: pretrain on every source, fine-tune on every target and write a grid of accuracies.
    Repeat the command to resume. A changed option reruns only the jobs that depend on it. See also:
    idmm transfer status OUT."""

    COMMAND: ClassVar = "transfer"
    STAGES: ClassVar = KINDS  # whose flags it takes, as --pretrain.train.lr

    out: str = REQUIRED
    """Folder for all runs and the grid."""
    sources: list[Any] = Field(default_factory=list)
    """Datasets to pretrain on: names, or mappings with name, root, label, subset, pretrain,
    finetune. A folder needs only its root."""
    targets: list[Any] = Field(REQUIRED, min_length=1)
    """Datasets to fine-tune on, like sources."""
    methods: list[Any] = Field(default_factory=lambda: ["idmm"])
    """Pretraining methods: names, or mappings with name, label, pretrain, finetune."""
    backbones: list[Any] = Field(default_factory=lambda: ["deit_tiny_patch16_224"], min_length=1)
    """Backbones: timm's names, or mappings with name, kwargs, label, pretrain, finetune."""
    weights: list[dict[str, Any]] = Field(default_factory=list)
    """Rows that start from weights: mappings with label, path (as --init), backbone."""
    seeds: list[NonNegativeInt] = Field(default_factory=lambda: [0], min_length=1)
    """Seeds. Each drives both stages."""
    pretrain_seeds: list[NonNegativeInt] | None = Field(None, min_length=1)
    """Seeds of pretraining, each paired with each of finetune_seeds. Default: the first of seeds,
    or seeds."""
    finetune_seeds: list[NonNegativeInt] | None = Field(None, min_length=1)
    """Seeds of fine-tuning. Default: the first of seeds if pretrain_seeds are given, else seeds."""
    pairs: Literal["all", "same"] = "all"
    """'all': every source with every target. 'same': only pairs with the same label (Tables 2 and
    3)."""
    scratch: bool = True
    """Add the row without pretraining."""
    roots: str | None = None
    """Folder with a folder ROOTS/NAME for each dataset without a root. Default: none."""
    pretrain: dict[str, Any] = field(default_factory=dict)
    """Recipe of pretraining and keys that override it, e.g. '{config: idmm_fast, train: {epochs:
    100}}'. They are also flags: --pretrain.train.epochs 100."""
    finetune: dict[str, Any] = field(default_factory=dict)
    """Recipe of fine-tuning, and keys that override it."""
    target: Target = field(default_factory=Target)
    engine: Literal["local", "ray"] = "local"
    """'local': one job after the other. 'ray': on a Ray cluster or all GPUs of this machine (needs
    the extra 'ray')."""
    ray: Ray = field(default_factory=Ray)
    plan: bool = False
    """Print the jobs and their dependencies without running them."""


@section
class StatusConfig:
    """Print the progress of a grid: its finished and failed cells, and its running jobs."""

    out: str = REQUIRED
    """Folder of the grid."""
