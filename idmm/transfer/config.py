"""The keys of a transfer grid."""

from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from idmm.config import DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig, section
from idmm.config.base import REQUIRED

KINDS = {"pretrain": PretrainConfig, "finetune": FinetuneConfig, "detect": DetectConfig, "segment": SegmentConfig}
TRAINING = tuple(KINDS)
TUNING = TRAINING[1:]
Protocol = Literal["finetune", "probe", "detect", "segment"]
PROTOCOLS = get_args(Protocol)
Seed = Annotated[int, Field(ge=0)]


@section
class Ray:
    """The Ray cluster of ``engine ray``."""

    address: str | None = None
    """Address of a running cluster, or 'auto'; null: start one on this machine."""
    num_cpus: float = Field(1.0, gt=0)
    """Cores that a job takes."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs that a job takes; a fraction lets jobs share one."""


@section
class Target:
    """What a cell measures."""

    protocol: Protocol = "finetune"
    """'finetune': stage 2, whole; 'probe': kNN and a linear probe of the frozen backbone, minutes instead of hours;
    'detect' and 'segment': stage 2 for boxes and for masks. The protocol of a target's own entry comes first."""


@section
class GridConfig:
    """Stage 3: pretrain on every source, fine-tune on every target, and put the accuracies into a grid. A job that is
    done is never done again: the same command goes on, a changed option reruns what it touches."""

    STAGE: ClassVar[str] = "transfer"
    STAGES: ClassVar[dict[str, type]] = KINDS  # whose flags it takes, as --pretrain.train.lr

    out: str = REQUIRED
    """Folder for all runs and the grid."""
    sources: list[Any] = Field(default_factory=list)
    """Datasets to pretrain on: names, or mappings with name, root, label, subset, pretrain, finetune. A root without a
    name is a folder; without a label it is called by the last part of its path."""
    targets: list[Any] = Field(REQUIRED, min_length=1)
    """Datasets to fine-tune on, names or mappings like those of sources; 'protocol: detect' (or segment) makes one a
    folder of boxes (or masks)."""
    methods: list[Any] = Field(default_factory=lambda: ["idmm"])
    """Pretraining methods: names, or mappings with name, label, pretrain, finetune."""
    backbones: list[Any] = Field(default_factory=lambda: ["deit_tiny_patch16_224"], min_length=1)
    """Backbones: timm's names, or mappings with name, kwargs, label, pretrain, finetune."""
    weights: list[dict[str, Any]] = Field(default_factory=list)
    """Rows that start from given weights: mappings with label (e.g. 'IN supervised'), path (of a run or file, or
    timm:NAME or hf-hub:ORG/NAME), and backbone (its label)."""
    seeds: list[Seed] = Field(default_factory=lambda: [0], min_length=1)
    """Seeds; each drives both stages."""
    pretrain_seeds: list[Seed] | None = Field(None, min_length=1)
    """With finetune_seeds: every pair of the two instead of seeds; one alone is paired with the first of seeds."""
    finetune_seeds: list[Seed] | None = Field(None, min_length=1)
    """See pretrain_seeds."""
    pairs: Literal["all", "same"] = "all"
    """'all': every source with every target; 'same': only those of one label (Tables 2 and 3)."""
    scratch: bool = True
    """Add the row without pretraining."""
    roots: str | None = None
    """Folder that holds a folder for each dataset that has no root of its own: ROOTS/NAME."""
    pretrain: dict[str, Any] = field(default_factory=dict)
    """Stage 1: 'config' names the recipe (a file, or one of 'idmm configs'), every other key overrides it:
    '{config: idmm_fast, train: {epochs: 100}}', or --pretrain.train.epochs 100."""
    finetune: dict[str, Any] = field(default_factory=dict)
    """Stage 2, likewise."""
    detect: dict[str, Any] = field(default_factory=dict)
    """Stage 2 of the targets whose protocol is detect, likewise."""
    segment: dict[str, Any] = field(default_factory=dict)
    """Stage 2 of the targets whose protocol is segment, likewise."""
    target: Target = field(default_factory=Target)
    engine: Literal["local", "ray"] = "local"
    """'local': one job after the other in this process; 'ray': on a Ray cluster, or on all GPUs of this machine (needs
    the extra 'ray')."""
    ray: Ray = field(default_factory=Ray)
    plan: bool = False
    """Print the jobs and what they wait for, and run none."""
