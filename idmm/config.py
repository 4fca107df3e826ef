"""Every knob of every stage, in one read.

A YAML key is the flag without dashes (``train.lr`` is ``--train.lr``). Types, ranges and help texts are read from the
classes below; pydantic checks all fields of a config at once, so that every fault is reported in one go.
"""

from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

section = dataclass(
    config=ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True),
    kw_only=True,
)

# What may differ when a run is taken up again: results do not depend on it.
FREE = ("out", "resume", "data.workers", "data.cache", "data.cache_dir", "data.download", "data.allow_size_mismatch")
FREE += ("train.device", "train.save_minutes", "train.tensorboard", "train.monitor_every", "train.monitor_images")
FREE += ("device",)  # of a probe

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _range(values: list[float], low: float, high: float | None, name: str) -> None:
    """Raises ValueError unless values are two numbers, low < first <= second (<= high)."""
    first, second = values
    if not low < first <= second or (high is not None and second > high):
        bound = f" <= {high:g}" if high is not None else ""
        raise ValueError(f"{name} is {values}, wanted [min, max] with {low:g} < min <= max{bound}")


def _jitter(values: list[float]) -> None:
    if min(values) < 0 or values[3] > 0.5:
        raise ValueError(f"jitter is {values}, wanted four numbers >= 0, the last (hue) <= 0.5")


@section
class Subset:
    """A part of the training images. Give one of per_class, total and fraction."""

    per_class: int | None = Field(None, ge=1)
    """Images of each class."""
    total: int | None = Field(None, ge=1)
    """Images in all, drawn without regard to labels."""
    fraction: float | None = Field(None, gt=0, le=1)
    """Share of each class (of all images where there are no labels), in (0, 1]."""
    seed: int = Field(0, ge=0)
    """Seed of the draw; its own, so that the subset stays the same over training seeds."""

    @model_validator(mode="after")
    def _check(self):
        if sum(value is not None for value in (self.per_class, self.total, self.fraction)) != 1:
            raise ValueError("give exactly one of per_class, total and fraction")
        return self


@section
class Data:
    """The images."""

    name: str = "digits"
    """Dataset: 'folder' (your own images under data.root), one of 'idmm data list', or 'hfds:NAME' (Hugging Face)."""
    root: str | None = None
    """Folder of the dataset ('idmm data info NAME' shows how it is laid out). folder: ROOT/train/CLASS/* and
    ROOT/val/CLASS/* (or test); pretraining takes any tree."""
    download: bool = False
    """Fetch the dataset into data.root where it is not there yet and its source allows."""
    allow_size_mismatch: bool = False
    """Go on where a split has not as many images as the dataset's protocol; result.json then says so."""
    image_column: str | None = None
    """hfds: the column of images; null: the only one."""
    label_column: str | None = None
    """hfds: the column of classes; null: the only one."""
    workers: int | None = Field(None, ge=0)
    """Loader processes; 0 loads in the training process, null means one a core but one, 8 at most."""
    subset: Subset | None = None
    """Train on a part only, e.g. '{per_class: 10}', '{total: 10000}' or '{fraction: 0.1}'."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the training images held out to evaluate on, in [0, 1); 0 holds out none."""
    on_error: Literal["fail", "skip"] = "fail"
    """Unreadable, empty or bomb-sized files: 'fail' lists them and stops before training; 'skip' goes on without."""
    max_pixels: int = Field(100_000_000, ge=1)
    """Images with more pixels than this are refused as bombs (pixels)."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded images are kept: 'disk' (for later runs too, in data.cache_dir), 'ram', 'off' (decoded at every
    use), 'auto' (disk, else ram, where half of what is free holds them). Results are the same."""
    cache_dir: str | None = None
    """Folder of the cache on disk; null: $IDMM_CACHE, else ~/.cache/idmm. See 'idmm data cache' and its --clear."""
    mean: list[float] | None = Field(None, min_length=1, max_length=3)
    """Mean of each channel, on pixel values in [0, 1]; null: the init checkpoint's, else ImageNet's."""
    std: list[float] | None = Field(None, min_length=1, max_length=3)
    """Standard deviation of each channel, likewise."""
    in_chans: Literal[1, 3] | None = None
    """Channels the model sees: 3 (RGB) or 1 (grey); null: the init checkpoint's, else 3."""

    @model_validator(mode="after")
    def _check(self):
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and self.in_chans is not None and len(values) != self.in_chans:
                raise ValueError(f"{name} has {len(values)} values for in_chans {self.in_chans}, wanted one a channel")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std is {self.std}, wanted numbers > 0")
        return self


@section
class Model:
    """The backbone."""

    name: str | None = None
    """Any timm model; null: the init checkpoint's, else deit_tiny_patch16_224."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the model's constructor, e.g. '{embed_dim: 96, depth: 6, num_heads: 3}'."""
    drop_path: float = Field(0.1, ge=0, lt=1)
    """Stochastic depth rate, where the model has it (probability)."""
    strict: bool = False
    """Refuse init weights that the backbone does not have, and weights of it that init lacks."""


@section
class FinetuneModel(Model):
    """The backbone."""

    freeze: bool = False
    """Train the classifier alone, on a frozen backbone in evaluation mode."""


@section
class Train:
    """The training loop, common to both stages."""

    epochs: int = Field(800, ge=1)
    """Passes over the training images (epochs)."""
    batch_size: int = Field(256, ge=1)
    """Images per optimizer step, over all processes; the last, smaller batch is kept (images)."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate; null: the recipe's for the backbone's family (5e-4; PVTv2 and T2T-ViT 1e-3)."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum 0.9."""
    weight_decay: float = Field(1e-3, ge=0)
    """Weight decay: decoupled in AdamW, added to the gradient in SGD."""
    decay_all: bool = False
    """Decay biases, norms and position embeddings too, as the papers' released code does."""
    warmup_epochs: float | None = Field(None, ge=0)
    """Linear warm-up (epochs); null: the recipe's for the family (2; PVTv2 and T2T-ViT 10)."""
    schedule: Literal["cosine", "released"] = "cosine"
    """After the warm-up: a cosine to zero, or that of IDMM's released code, which short runs leave far from zero."""
    accumulate: int = Field(1, ge=1)
    """Splits each batch into this many forward and backward passes, to save memory (passes). Methods that compare the
    images of a batch (SimCLR, SupCon, MoCo v3) compare those of a pass alone."""
    clip_grad: float | None = Field(None, gt=0)
    """Clips the gradient to this norm; null: no clipping."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay per step of an average of the weights, which is then evaluated and exported; null: none."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic; 'auto': bf16 on GPUs that have it, on CPUs whichever of fp32 and bf16 a few timed steps favour."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; 'auto': cuda, else mps, else cpu."""
    compile: bool = False
    """Compile the model with torch.compile: slower to start, faster to run on GPUs."""
    save_minutes: float = Field(5.0, ge=0)
    """Write a checkpoint when the last is older than this, in mid-epoch too (minutes); 0: every step."""
    tensorboard: bool = False
    """Write TensorBoard event files under OUT/tensorboard (needs the extra 'tensorboard')."""


@section
class PretrainTrain(Train):
    """The training loop."""

    knn_every: int = Field(0, ge=0)
    """Measure kNN accuracy of the frozen features every so many epochs, where there are labels; 0: never (epochs)."""
    monitor_every: int = Field(1, ge=0)
    """Look for collapse and saturation every so many epochs, on a few training images; 0: never (epochs)."""
    monitor_images: int = Field(512, ge=2)
    """Training images that the monitor looks at, the same every time (images)."""


@section
class FinetuneTrain(Train):
    """The training loop."""

    epochs: int = Field(200, ge=1)
    """Passes over the training images (epochs)."""
    size: int = Field(224, ge=8)
    """Image side, when no stages are given (pixels)."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Each layer's lr is this factor times that of the layer above; null: one lr for all."""
    eval_every: int = Field(10, ge=1)
    """Evaluate every so many epochs, and always after a stage's last (epochs)."""


@section
class CropGroup:
    """Crops of one kind, mixed together and averaged in the loss."""

    count: int = Field(2, ge=1)
    """Crops an image."""
    scale: list[float] = Field(default_factory=lambda: [0.14, 1.0], min_length=2, max_length=2)
    """Smallest and largest share of the image's area that a crop covers, in (0, 1]."""

    @model_validator(mode="after")
    def _check(self):
        _range(self.scale, 0, 1, "scale")
        return self


@section
class Views:
    """Random crops and colours of stage 1, as in IDMM's released code."""

    size: int = Field(112, ge=8)
    """Side of every crop (pixels)."""
    crops: list[CropGroup] | None = Field(None, min_length=1)
    """Groups of crops, e.g. '[{count: 2, scale: [0.14, 1.0]}, {count: 4, scale: [0.05, 0.4]}]'; null: the method's."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    jitter: list[float] = Field(default_factory=lambda: [0.8, 0.8, 0.8, 0.2], min_length=4, max_length=4)
    """Strength of brightness, contrast, saturation (factors) and hue (turns, at most 0.5)."""
    jitter_prob: float = Field(0.8, ge=0, le=1)
    """Probability of the colour jitter."""
    grey_prob: float = Field(0.2, ge=0, le=1)
    """Probability of a grey image."""
    blur_prob: float = Field(0.5, ge=0, le=1)
    """Probability of a Gaussian blur."""
    blur_sigma: list[float] = Field(default_factory=lambda: [0.1, 2.0], min_length=2, max_length=2)
    """Smallest and largest sigma of the blur (pixels)."""

    @model_validator(mode="after")
    def _check(self):
        _jitter(self.jitter)
        _range(self.blur_sigma, 0, None, "blur_sigma")
        return self


@section
class Method:
    """What is learned in stage 1; a method refuses fields that it does not read."""

    name: Literal["idmm", "simclr", "supcon", "mocov2", "mocov3", "dino", "supervised"] = "idmm"
    """Pretraining method; all but idmm and supervised need the extra 'baselines', supcon and supervised labels."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """idmm: epsilon of Eq. 17, the target's share for the other N-1 instances; supervised: for the classes."""
    cutmix_alpha: float = Field(0.5, ge=0)
    """idmm, supervised: CutMix's lambda is drawn from Beta(alpha, alpha); 0: no CutMix."""
    classifier: Literal["linear", "cosine"] = "linear"
    """The N-way layer: 'linear' (the paper's) or 'cosine' (normalised features and rows, a learned scale)."""
    classifier_bias: bool = False
    """Give the N-way layer a bias (the paper's has none)."""
    classifier_scale: float = Field(16.0, gt=0)
    """Where the cosine layer's learned scale starts."""
    classifier_lr_scale: float = Field(1.0, gt=0)
    """The N-way layer's learning rate, as a multiple of train.lr."""
    classifier_init: Literal["random", "features"] = "random"
    """Start of the N-way layer's rows: 'random', or each image's own 'features', untrained, centred, normalised."""
    chunk_size: int | None = Field(None, ge=1)
    """Views whose N logits are held at a time; null: chosen from N and the batch (views)."""
    projection: bool | None = None
    """A two-layer MLP between the features and the loss; null: simclr, supcon and mocov2 have it, idmm has none."""
    hidden_dim: int | None = Field(None, ge=1)
    """Width of the MLP's hidden layers; null: the method's (mocov3 4096, dino 2048, else that of the features)."""
    dim: int | None = Field(None, ge=1)
    """Width of its outputs; null: 256."""
    temperature: float | None = Field(None, gt=0)
    """Temperature of the loss, of dino's student; null: the method's (mocov2 and mocov3 0.2, else 0.1)."""
    momentum: float | None = Field(None, ge=0, le=1)
    """mocov2, mocov3, dino: momentum of the second encoder; null: 0.999, 0.99 and 0.996, the last two rising to 1."""
    queue: int | None = Field(None, ge=1)
    """mocov2: keys of earlier batches; null: 2048, or fewer where there are few images."""
    outputs: int | None = Field(None, ge=2)
    """dino: width of the softmax; null: 65536, or the number of images where that is smaller."""
    teacher_temperature: float | None = Field(None, gt=0)
    """dino: temperature of the teacher after its warm-up from 0.04; null: 0.07."""
    teacher_warmup_epochs: int | None = Field(None, ge=0)
    """dino: length of that warm-up; null: 30, or a tenth of a shorter run (epochs)."""
    center_momentum: float | None = Field(None, ge=0, le=1)
    """dino: momentum of the centre of the teacher's outputs; null: 0.9. 1 leaves it at zero."""
    freeze_epochs: int | None = Field(None, ge=0)
    """dino: the last layer of the head is held still for so long; null: 1, or 0 in runs under 10 epochs (epochs)."""


@section
class Augment:
    """Augmentation and regularisation of stage 2, as in IDMM's released code."""

    scale: list[float] = Field(default_factory=lambda: [0.08, 1.0], min_length=2, max_length=2)
    """Smallest and largest share of the area that the random resized crop covers, in (0, 1]."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    jitter: list[float] = Field(default_factory=lambda: [0.4, 0.4, 0.4, 0.1], min_length=4, max_length=4)
    """Strength of brightness, contrast, saturation (factors) and hue (turns, at most 0.5)."""
    jitter_prob: float = Field(0.4, ge=0, le=1)
    """Probability of the colour jitter."""
    grey_prob: float = Field(0.2, ge=0, le=1)
    """Probability of a grey image."""
    randaugment: str | None = "rand-m9-mstd0.5-inc1"
    """timm's auto-augment string; null: none."""
    mixup_alpha: float = Field(0.5, ge=0)
    """Mixup's lambda is drawn from Beta(alpha, alpha), on even epochs (on all if cutmix_alpha is 0); 0: no Mixup."""
    cutmix_alpha: float = Field(0.5, ge=0)
    """CutMix's likewise, on odd epochs (on all if mixup_alpha is 0); 0: no CutMix."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """Share of the target spread over the classes."""
    crop_pct: float = Field(0.875, gt=0, le=1)
    """At test time the short side is resized to size / crop_pct, then the centre is cropped."""

    @model_validator(mode="after")
    def _check(self):
        _range(self.scale, 0, 1, "scale")
        _jitter(self.jitter)
        return self


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
    grid_size: int = Field(7, ge=2)
    """Grids of more places along a side are average-pooled to so many (places)."""
    units: Literal["normalized", "grid"] = "normalized"
    """Targets of l1: offsets over the grid's side, as in the paper, or in places, as the released code does."""
    warmup_epochs: int = Field(0, ge=0)
    """The weight grows linearly over so many epochs."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """After that the weight stays, or falls to zero by the end of the stage."""


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


@section
class Common:
    """What both stages take."""

    out: str | None = None
    """Folder for all that the run writes (required)."""
    seed: int = Field(0, ge=0)
    """Seed of every random choice."""
    init: str | None = None
    """Weights to start from: a run folder, or a .safetensors or .pth file in timm's format; null: from scratch."""
    resume: Literal["auto", "never", "must"] = "auto"
    """A used OUT: 'auto' goes on where it stopped, 'never' refuses it, 'must' refuses a new one."""
    data: Data = field(default_factory=Data)


@section
class PretrainConfig(Common):
    """Stage 1: learn a backbone from images alone, by parametric instance discrimination (IDMM) or another method."""

    model: Model = field(default_factory=Model)
    train: PretrainTrain = field(default_factory=PretrainTrain)
    method: Method = field(default_factory=Method)
    views: Views = field(default_factory=Views)
    drloc: DrLoc = field(default_factory=DrLoc)


@section
class FinetuneConfig(Common):
    """Stage 2: train a classifier on labels, from a pretrained backbone or from scratch."""

    stages: list[Stage] | None = Field(None, min_length=1)
    """Sizes one after the other, e.g. '[{size: 224}, {size: 448, epochs: 100, lr: 5e-5}]'; null: one, at train.size."""
    model: FinetuneModel = field(default_factory=FinetuneModel)
    train: FinetuneTrain = field(default_factory=FinetuneTrain)
    augment: Augment = field(default_factory=Augment)
    drloc: DrLoc = field(default_factory=DrLoc)

    @model_validator(mode="after")
    def _check(self):
        if self.drloc.weight and self.model.freeze:
            raise ValueError("drloc.weight trains the backbone and model.freeze forbids it; give one of them")
        return self


def resolved_stages(config: FinetuneConfig) -> list[Stage]:
    """Returns the stages with everything that they inherit from ``train`` filled in."""
    train = config.train

    def filled(stage: Stage) -> Stage:
        return Stage(
            size=stage.size,
            epochs=stage.epochs or train.epochs,
            lr=stage.lr or train.lr,
            batch_size=stage.batch_size or train.batch_size,
        )

    return [filled(stage) for stage in config.stages or [Stage(size=train.size)]]
