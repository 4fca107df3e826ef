"""The configs of pretraining and fine-tuning."""

import sys
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from idmm.config.base import Count, CropMode, Device, FieldErrors, Fraction, Side, section
from idmm.config.data import COLOURS, Augment, Colours, Data, Views, colours_of
from idmm.config.methods import IDMM, MethodOptions
from idmm.config.phases import Needs, Phase, short_side_bound
from idmm.errors import Fault, UserError, checked


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
    """Initialisation: timm's, 'structured' (mimetic attention, sin-cos positions, whitened patches)
    for timm's ViTs, or 'auto': structured for them."""


@section
class FinetuneModel(Model):
    """The backbone."""

    freeze: bool = False
    """Freeze the backbone in evaluation mode and train only the classifier."""


@section
class Train:
    """The training loop."""

    # after the warm-up. Only detection and segmentation can choose it
    schedule: ClassVar[str] = "cosine"

    lr_steps: ClassVar[Sequence[float]] = ()  # likewise

    epochs: Count = 800
    """Passes over the training images (epochs)."""
    minutes: PositiveFloat | None = None
    """Time for the whole run instead of epochs (minutes). Schedules follow the clock. Default:
    epochs count."""
    max_epochs: Count | None = None
    """With minutes: most epochs over all stages, so that few images are not overfitted. Default: no
    limit."""
    batch_size: Count = 256
    """Images per optimizer step, over all processes. The last, smaller batch is kept."""
    lr: PositiveFloat | None = None
    """Peak learning rate. Default: that of the backbone's family (5e-4, for PVTv2 and T2T-ViT
    1e-3)."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """AdamW, SGD with momentum 0.9, or Muon for hidden matrices and AdamW for the rest."""
    weight_decay: NonNegativeFloat = 1e-3
    """Weight decay: decoupled in AdamW and Muon, added to the gradient in SGD."""
    weight_decay_end: NonNegativeFloat | None = None
    """Weight decay at the end of the run, reached along half a cosine. Default: constant."""
    layer_decay: Fraction | None = None
    """Layer-wise lr decay: each layer's lr is this times that of the layer above. Heads use the
    full lr. Default: 1."""
    warmup_epochs: NonNegativeFloat | None = None
    """Linear warm-up (epochs). Default: 2, for PVTv2 and T2T-ViT 10."""
    accumulate: Count = 1
    """Passes that a batch is split into, to save memory. Contrastive methods then compare images
    within a pass."""
    clip_grad: PositiveFloat | None = None
    """Largest norm of the gradient. Default: no clipping."""
    clip_grad_mode: Literal["norm", "tensor"] = "norm"
    """Norm that clip_grad limits: the whole gradient's, or each 'tensor's own as in DINO's
    release."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay per step of averaged weights (EMA), which are then evaluated and exported. It warms up.
    Default: no EMA."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic. 'auto': bf16 on GPUs that have it, the faster of fp32 and bf16 on CPUs, measured
    once."""
    device: Device = "auto"
    """Device to train on. 'auto': cuda, else mps, else cpu."""
    compile: bool | None = None
    """Compile model and loss with torch.compile, which takes a minute. Default: on a GPU, if 5
    minutes are expected."""
    save_minutes: NonNegativeFloat = 5.0
    """Time between checkpoints (minutes). 0: every step."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_epochs is not None and self.minutes is None:
            what = f"got {self.max_epochs} without minutes, expected minutes, or epochs instead"
            raise FieldErrors({"max_epochs": what})
        return self


@section
class PretrainTrain(Train):
    """The training loop."""

    warmup_epochs: NonNegativeFloat | None = None
    """Linear warm-up (epochs). Default: mocov2 0, mocov3 40, dino 10, others 2, or 10 for PVTv2 and
    T2T-ViT."""
    knn_every: NonNegativeInt = 0
    """Epochs between kNN accuracies on val or test. 0: only at the start and end of runs with
    --init, else never."""
    monitor_every: NonNegativeInt = 1
    """Epochs between checks for collapse, on up to 512 training images. 0: never."""


@section
class FinetuneTrain(Train):
    """The training loop."""

    epochs: NonNegativeInt = 200
    """Passes over the training images (epochs). 0: fit the classifier, which needs model.freeze."""
    size: Side = 224
    """Image side, if no stages are given (pixels)."""
    classifier_init: Literal["random", "features"] | None = None
    """Initial classifier: random, or a logistic regression on features. Default: features with
    --init or hog_conv."""
    eval_every: Count = 10
    """Epochs between evaluations. Each stage's last epoch is always evaluated."""
    keep: Literal["last", "best"] = "last"
    """Weights to report and export: the last epoch's, or the best on 'val' in the last stage."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of images in the loss. 'balanced': all classes count the same, however many images
    they have."""


@section
class DrLoc:
    """Dense relative localization, an extra loss on the grid of final embeddings (Liu et al.,
    NeurIPS 2021)."""

    weight: NonNegativeFloat = 0.0
    """Weight of the loss. The paper uses 0.5 for Swin, 0.1 for T2T-ViT and CvT, 0.01 for ViT-B. 0:
    off."""
    mode: Literal["l1", "l1_signed", "ce", "reg", "l1_all"] = "l1"
    """Loss on distances (l1), signed offsets, offsets as classes (ce) or distribution (reg), or l1
    at every block."""
    pairs: Count = 64
    """Random pairs of positions per image."""
    hidden_dim: Count = 512
    """Width of the head's two hidden layers."""
    grid_size: int = Field(7, ge=2)
    """Positions per side. Finer grids are average-pooled to it. 56 keeps all grids of l1_all (Eq.
    7) at 224 px."""


@section
class Stage:
    """One image size of fine-tuning. Keys that are left out are taken from ``train``."""

    size: Side
    """Image side (pixels)."""
    epochs: NonNegativeInt | None = None
    """Passes over the training images (epochs)."""
    lr: PositiveFloat | None = None
    """Peak learning rate."""
    batch_size: Count | None = None
    """Images per optimizer step."""


@section
class Common:
    """Keys of all commands that train."""

    COMMAND: ClassVar[str]

    out: str | None = None
    """Folder for all files of the run. Required."""
    seed: NonNegativeInt = 0
    """Seed of every random choice."""
    init: str | None = None
    """Initial weights: a run folder, a weights file, timm:NAME, or imagenet, a small network.
    Default: none."""
    resume: Literal["auto", "never", "must"] = "auto"
    """If OUT holds a run: 'auto' resumes it, 'never' refuses it. 'must' requires one."""
    data: Data = field(default_factory=Data)


@section
class PretrainConfig(Common):
    """Stage 1: learn a backbone from images without labels, by IDMM or another method."""

    COMMAND: ClassVar = "pretrain"

    crop_mode: ClassVar = "crop"
    crop_pct: ClassVar = 0.875

    model: Model = field(default_factory=Model)
    train: PretrainTrain = field(default_factory=PretrainTrain)
    method: MethodOptions = field(default_factory=IDMM)
    views: Views = field(default_factory=Views)
    drloc: DrLoc = field(default_factory=DrLoc)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The one part of the run."""
        train = self.train
        size = self.views.size
        return (Phase(1, "views.size", "pretrain", size, train.epochs, train.batch_size, train.lr),)

    @property
    def needs(self) -> Needs:
        """The images that the run needs."""
        return Needs(
            labels=self.method.NEEDS_LABELS or self.trains_classifier,
            test=self.trains_classifier,
            unlabelled=not self.method.NEEDS_LABELS,
            eval_pixels=self.knn_every > 0 or self.trains_classifier,
            several=True,
        )

    @property
    def knn_every(self) -> int:
        """The epochs from one kNN measurement to the next. 0: none.

        A run that starts from weights is measured before the first step and after the last one.
        """
        if self.train.knn_every or self.init is None:
            return self.train.knn_every
        return sys.maxsize

    @property
    def trains_classifier(self) -> bool:
        """Whether a classifier is trained next to the backbone, on the labels that exist."""
        return isinstance(self.method, IDMM) and self.method.label_weight > 0

    def train_side(self, size: int) -> int:
        """Return the short side of training images to store for views of ``size`` (pixels)."""
        crops = self.views.crops or ()
        return max(short_side_bound(size, group.scale[0]) for group in crops)

    def eval_side(self, size: int) -> None:
        """Return None: images to evaluate on are stored as centre crops of ``size`` (pixels)."""

    def fill_from_method(self) -> tuple["PretrainConfig", list[str]]:
        """Fill in crops, colours and warm-up from the method.

        Returns:
            The config, and lines for the log.

        Raises:
            UserError: Crops or labels that the method cannot use, or a missing library.
        """
        method = self.method
        notes = []
        # these count for all crops
        fixed = {name for name in COLOURS if getattr(self.views, name) is not None}
        crops = self.views.crops
        if crops is None:
            own: Any = dict.fromkeys(fixed)
            crops = [replace(group, **own) for group in method.CROPS]
            notes.append(f"views.crops: {', '.join(map(str, crops))} of the area, {method.name}'s")
        for key, value in method.COLOURS.items():
            if key not in fixed:
                notes.append(f"views.{key}: {value}, {method.name}'s")
        colours = vars(colours_of(self.views, Colours(**method.COLOURS)))
        config = replace(self, views=replace(self.views, crops=crops, **colours))
        warmup = method.WARMUP_EPOCHS
        if self.train.warmup_epochs is None and warmup is not None:
            config = replace(config, train=replace(self.train, warmup_epochs=warmup))
            notes.append(f"train.warmup_epochs: {warmup:g}, {method.name}'s")
        checked(method.check_libraries, lambda: method.check_crops(crops), self._check_labelled)
        return config, notes

    def _check_labelled(self) -> None:
        if self.data.labelled is None or self.trains_classifier:
            return
        if self.method.NEEDS_LABELS:
            raise UserError(
                Fault(
                    "data.labelled",
                    f"{self.method.name} cannot use images without labels",
                    "Draw the images with data.subset instead.",
                )
            )
        raise UserError(
            Fault(
                "data.labelled",
                "no label is used, as method.label_weight is 0, expected a weight > 0, "
                "or no labelled",
            )
        )


@section
class FinetuneConfig(Common):
    """Stage 2: train a classifier on labels, from a pretrained backbone or from scratch."""

    COMMAND: ClassVar = "finetune"

    stages: list[Stage] | None = Field(None, min_length=1)
    """Image sizes one after the other, e.g. '[{size: 224}, {size: 448, epochs: 100}]'. Default:
    one, train.size."""
    model: FinetuneModel = field(default_factory=FinetuneModel)
    train: FinetuneTrain = field(default_factory=FinetuneTrain)
    augment: Augment = field(default_factory=Augment)
    drloc: DrLoc = field(default_factory=DrLoc)

    @model_validator(mode="after")
    def _check(self) -> Self:
        epochs = self.train.max_epochs
        stages = len(self.stages or [])
        is_plain = self.model.freeze and stages <= 1 and self.train.minutes is None
        planned = [stage.epochs for stage in self.resolved_stages()]
        if 0 in planned and not is_plain:
            raise FieldErrors(
                {"train.epochs": "got 0, expected model.freeze true, one stage and no minutes"}
            )
        if epochs is not None and epochs < stages:
            what = f"got {epochs}, expected at least one epoch for each of {stages} stages"
            raise FieldErrors({"train.max_epochs": what})
        return self

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The parts of the run, one per image size."""
        phases = []
        for number, part in enumerate(self.resolved_stages()):
            field = "train.size" if self.stages is None else f"stages[{number}].size"
            label = f"finetune {part.size} px"
            assert part.epochs is not None and part.batch_size is not None  # filled in from train
            phases.append(
                Phase(number + 1, field, label, part.size, part.epochs, part.batch_size, part.lr)
            )
        return tuple(phases)

    @property
    def needs(self) -> Needs:
        """The images that the run needs."""
        return Needs(val=self.train.keep == "best")

    @property
    def crop_pct(self) -> float:
        """Share of the resized short side that the centre crop of evaluation covers."""
        return self.augment.crop_pct

    @property
    def crop_mode(self) -> CropMode:
        """What is done to images that are not square, see :class:`Augment`."""
        return self.augment.crop_mode

    def train_side(self, size: int) -> int:
        """Return the short side of training images to store for views of ``size`` (pixels)."""
        return short_side_bound(size, self.augment.scale[0])

    def eval_side(self, size: int) -> None:
        """Return None: images to evaluate on are stored as centre crops of ``size`` (pixels)."""

    def resolved_stages(self) -> list[Stage]:
        """Return the stages, with null filled in from ``train``."""
        train = self.train
        stages = []
        for stage in self.stages or [Stage(size=train.size)]:
            epochs = train.epochs if stage.epochs is None else stage.epochs
            lr = stage.lr or train.lr
            batch_size = stage.batch_size or train.batch_size
            stages.append(replace(stage, epochs=epochs, lr=lr, batch_size=batch_size))
        return stages
