"""The configs of pretraining and fine-tuning."""

from dataclasses import field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from idmm.config.base import FieldErrors, section
from idmm.config.data import Data
from idmm.config.methods import IDMM, MethodOptions
from idmm.config.train import FinetuneTrain, PretrainTrain
from idmm.config.views import COLOURS, Augment, Colours, Views, colours_of
from idmm.errors import UserError


@section
class Backbone:
    """The backbone."""

    name: str | None = None
    """Any timm model. Default: the model of --init, else deit_tiny_patch16_224."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model's constructor, e.g. '{embed_dim: 96, depth: 6, num_heads: 3}'."""
    drop_path: float = Field(0.1, ge=0, lt=1)
    """Stochastic depth rate, if the model has it (probability)."""


@section
class Model(Backbone):
    """The backbone."""

    start: Literal["timm", "structured", "auto"] = "timm"
    """Initialisation: timm's, 'structured' (mimetic attention, sin-cos positions, whitened patches) for timm's ViTs, or
    'auto': structured for them."""


@section
class FinetuneModel(Model):
    """The backbone."""

    freeze: bool = False
    """Freeze the backbone in evaluation mode and train only the classifier."""


@section
class DrLoc:
    """Dense relative localization, an extra loss on the grid of final embeddings (Liu et al., NeurIPS 2021)."""

    weight: float = Field(0.0, ge=0)
    """Weight of the loss. The paper uses 0.5 for Swin, 0.1 for T2T-ViT and CvT, 0.01 for ViT-B. 0: off."""
    mode: Literal["l1", "l1_signed", "ce", "reg", "l1_all"] = "l1"
    """Loss on distances (l1), signed offsets, offsets as classes (ce) or distribution (reg), or l1 at every block."""
    pairs: int = Field(64, ge=1)
    """Random pairs of positions per image."""
    hidden_dim: int = Field(512, ge=1)
    """Width of the head's two hidden layers."""


@section
class Stage:
    """One image size of fine-tuning. Keys that are left out are taken from ``train``."""

    size: int = Field(ge=8)
    """Image side (pixels)."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the training images (epochs)."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate."""
    batch_size: int | None = Field(None, ge=1)
    """Images per optimizer step."""


@section
class Common:
    """Keys of all training stages."""

    out: str | None = None
    """Folder for all files of the run. Required."""
    seed: int = Field(0, ge=0)
    """Seed of every random choice."""
    init: str | None = None
    """Initial weights: a run folder, a weights file or timm:NAME. Default: none."""
    resume: Literal["auto", "never", "must"] = "auto"
    """If OUT holds a run: 'auto' resumes it, 'never' refuses it. 'must' requires one."""
    data: Data = field(default_factory=Data)


@section
class PretrainConfig(Common):
    """Stage 1: learn a backbone from images without labels, by IDMM or another method."""

    STAGE: ClassVar[str] = "pretrain"

    model: Model = field(default_factory=Model)
    train: PretrainTrain = field(default_factory=PretrainTrain)
    method: MethodOptions = field(default_factory=IDMM)
    views: Views = field(default_factory=Views)
    drloc: DrLoc = field(default_factory=DrLoc)

    @property
    def learns_labels(self) -> bool:
        """Whether a classifier is trained next to the backbone, on the labels that exist."""
        return getattr(self.method, "label_weight", 0) > 0

    def resolve(self) -> tuple["PretrainConfig", list[str]]:
        """Fill in crops, colours and warm-up from the method.

        Returns:
            The config, and lines for the log.

        Raises:
            UserError: Crops or labels that the method cannot use, or a missing library.
        """
        method, notes = self.method, []
        fixed = {name for name in COLOURS if getattr(self.views, name) is not None}  # these count for all crops
        crops = self.views.crops
        if crops is None:
            crops = [replace(group, **dict.fromkeys(fixed)) for group in method.CROPS]
            notes.append(f"views.crops: {', '.join(map(str, crops))} of the area, {method.name}'s")
        notes += [f"views.{key}: {value}, {method.name}'s" for key, value in method.COLOURS.items() if key not in fixed]
        colours = vars(colours_of(self.views, Colours(**method.COLOURS)))
        config, warmup = replace(self, views=replace(self.views, crops=crops, **colours)), method.WARMUP_EPOCHS
        if self.train.warmup_epochs is None and warmup is not None:
            config = replace(config, train=replace(self.train, warmup_epochs=warmup))
            notes.append(f"train.warmup_epochs: {warmup:g}, {method.name}'s")
        faults = [*method.missing_libraries(), *method.crop_faults(crops)]
        if self.data.labelled is not None and not self.learns_labels:
            unused = "no label is used, as method.label_weight is 0, expected a weight > 0, or no labelled"
            needs = f"{method.name} cannot use images without labels. Draw the images with data.subset instead."
            faults.append(f"data.labelled: {needs if method.NEEDS_LABELS else unused}")
        if faults:
            raise UserError(*faults)
        return config, notes


@section
class FinetuneConfig(Common):
    """Stage 2: train a classifier on labels, from a pretrained backbone or from scratch."""

    STAGE: ClassVar[str] = "finetune"

    stages: list[Stage] | None = Field(None, min_length=1)
    """Image sizes one after the other, e.g. '[{size: 224}, {size: 448, epochs: 100}]'. Default: one, train.size."""
    model: FinetuneModel = field(default_factory=FinetuneModel)
    train: FinetuneTrain = field(default_factory=FinetuneTrain)
    augment: Augment = field(default_factory=Augment)
    drloc: DrLoc = field(default_factory=DrLoc)

    @model_validator(mode="after")
    def _check(self):
        epochs, stages = self.train.max_epochs, len(self.stages or [])
        if epochs is not None and epochs < stages:
            what = f"got {epochs}, expected at least one epoch for each of {stages} stages"
            raise FieldErrors({"train.max_epochs": what})
        return self

    def resolved_stages(self) -> list[Stage]:
        """Return the stages, with null filled in from ``train``."""
        inherited = ("epochs", "lr", "batch_size")
        return [
            replace(stage, **{name: getattr(stage, name) or getattr(self.train, name) for name in inherited})
            for stage in self.stages or [Stage(size=self.train.size)]
        ]
