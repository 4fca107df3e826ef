"""The configs of whole runs."""

from dataclasses import field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from idmm.config.base import section
from idmm.config.data import Data
from idmm.config.methods import Method
from idmm.config.train import FinetuneTrain, PretrainTrain
from idmm.config.views import Augment, Views


@section
class Backbone:
    """The backbone."""

    name: str | None = None
    """Any timm model; null: the init checkpoint's, else deit_tiny_patch16_224."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the model's constructor, e.g. '{embed_dim: 96, depth: 6, num_heads: 3}'."""
    drop_path: float = Field(0.1, ge=0, lt=1)
    """Stochastic depth rate, where the model has it (probability)."""


@section
class Model(Backbone):
    """The backbone."""

    start: Literal["timm", "structured", "auto"] = "timm"
    """Fresh weights: as timm draws them, or (structured) with attention that looks at like patches, positions of sines
    and cosines and a whitening patch embedding, for timm's vision transformers; auto: structured for these alone."""


@section
class FinetuneModel(Model):
    """The backbone."""

    freeze: bool = False
    """Train the classifier alone, on a frozen backbone in evaluation mode."""


@section
class DrLoc:
    """Dense relative localization, an extra loss on the grid of final embeddings (Liu et al., NeurIPS 2021)."""

    weight: float = Field(0.0, ge=0)
    """Weight of the extra loss; 0: none. The paper's: Swin 0.5, T2T-ViT and CvT 0.1, ViT-B 0.01."""
    mode: Literal["l1", "l1_signed", "ce", "reg", "l1_all"] = "l1"
    """Target and loss: distances (l1), signed offsets, offsets as classes (ce) or as a distribution (reg), or l1 at
    every transformer block."""
    pairs: int = Field(64, ge=1)
    """Random pairs of positions an image."""
    hidden_dim: int = Field(512, ge=1)
    """Width of the head's two hidden layers."""


@section
class Stage:
    """One size of fine-tuning; what is left out is taken from train."""

    size: int = Field(ge=8)
    """Image side (pixels)."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the training images (epochs)."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate."""
    batch_size: int | None = Field(None, ge=1)
    """Images per optimizer step."""


INHERITED = ("epochs", "lr", "batch_size")


@section
class Common:
    """What both stages take."""

    out: str | None = None
    """Folder for all that the run writes (required)."""
    seed: int = Field(0, ge=0)
    """Seed of every random choice."""
    init: str | None = None
    """Weights to start from: a run folder, a file of weights (.safetensors, .pth, .ckpt), or public ones, timm:NAME or
    hf-hub:ORG/NAME, which are downloaded once; null: from scratch."""
    resume: Literal["auto", "never", "must"] = "auto"
    """A used OUT: 'auto' goes on where it stopped, 'never' refuses it, 'must' refuses a new one."""
    data: Data = field(default_factory=Data)


@section
class PretrainConfig(Common):
    """Stage 1: learn a backbone from images alone, by parametric instance discrimination (IDMM) or another method."""

    STAGE: ClassVar[str] = "pretrain"

    model: Model = field(default_factory=Model)
    train: PretrainTrain = field(default_factory=PretrainTrain)
    method: Method = field(default_factory=Method)
    views: Views = field(default_factory=Views)
    drloc: DrLoc = field(default_factory=DrLoc)


@section
class FinetuneConfig(Common):
    """Stage 2: train a classifier on labels, from a pretrained backbone or from scratch."""

    STAGE: ClassVar[str] = "finetune"

    stages: list[Stage] | None = Field(None, min_length=1)
    """Sizes one after the other, e.g. '[{size: 224}, {size: 448, epochs: 100, lr: 5e-5}]'; null: one, at train.size."""
    model: FinetuneModel = field(default_factory=FinetuneModel)
    train: FinetuneTrain = field(default_factory=FinetuneTrain)
    augment: Augment = field(default_factory=Augment)
    drloc: DrLoc = field(default_factory=DrLoc)

    @model_validator(mode="after")
    def _check(self):
        most, stages = self.train.max_epochs, len(self.stages or [])
        if most is not None and most < stages:
            raise ValueError(f"train.max_epochs {most} is less than an epoch for each of {stages} stages; give more")
        if self.drloc.weight and self.model.freeze:
            raise ValueError("drloc.weight trains the backbone and model.freeze forbids it; give one of them")
        return self


def resolved_stages(config: FinetuneConfig) -> list[Stage]:
    """Returns the stages with everything that they inherit from ``train`` filled in."""
    return [
        replace(stage, **{name: getattr(stage, name) or getattr(config.train, name) for name in INHERITED})
        for stage in config.stages or [Stage(size=config.train.size)]
    ]
