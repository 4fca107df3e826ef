"""The images, and their random views: crops and colours of pretraining, augmentation of
fine-tuning."""

import math
from dataclasses import field, fields
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_serializer,
    model_validator,
)

from idmm.config.base import (
    PAIR,
    Count,
    CropMode,
    FieldErrors,
    Fraction,
    Probability,
    Side,
    rising,
    section,
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@section
class Subset:
    """A part of the training images. Give one of per_class, total and fraction."""

    per_class: Count | None = None
    """Images per class. Default: all."""
    total: Count | None = None
    """Images in total, drawn without regard to labels. Default: all."""
    fraction: Fraction | None = None
    """Share of each class, or of all images if there are no labels, in (0, 1]. Default: all."""
    seed: NonNegativeInt = 0
    """Seed of the draw. It does not depend on --seed, so that all training seeds use the same
    subset."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(value is not None for value in (self.per_class, self.total, self.fraction)) != 1:
            raise ValueError("expected exactly one of per_class, total, fraction")
        return self


def _range(value: Any) -> Any:
    """Refuse what is not 'auto', [low, high] or one such pair per channel."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
        pairs = value
    else:
        pairs = [value]
    pairs = [
        pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        for pair in pairs
    ]
    real = all(
        type(number) in (int, float) and math.isfinite(number) for pair in pairs for number in pair
    )
    if value != "auto" and not (real and all(low < high for low, high in pairs)):
        raise ValueError(f"got {value!r}, expected auto or [low, high] with low < high")
    return value


@section
class Data:
    """The images."""

    name: str | None = None
    """Dataset: 'folder' (your own images), or one of 'idmm data list'. Default: folder with
    data.root, else digits."""
    root: str | None = None
    """Folder with train/CLASS/* and val/CLASS/* (or test). Pretraining takes any tree of images.
    Default: none."""
    workers: NonNegativeInt | None = None
    """Loader processes. Default: one per core but one, at most 16. 0: load in the training
    process."""
    subset: Subset | None = None
    """Train on a part, e.g. '{per_class: 10}', '{total: 10000}' or '{fraction: 0.1}'. Default:
    all."""
    exclude: str | None = None
    """File of images to skip, one path under data.root per line. 'idmm data check' writes one.
    Default: none."""
    groups: str | None = None
    """Images to keep in one split: a CSV file of path,group or a pattern, e.g. '(patient[0-9]+)_'.
    Default: none."""
    val_fraction: float | None = Field(None, ge=0, lt=1)
    """Share of the training images to hold out for evaluation. Default: none, in idmm train 0.2
    without test images."""
    range: Annotated[Literal["auto"] | list[float] | list[list[float]], BeforeValidator(_range)] = (
        "auto"
    )
    """Values of 16-bit images that become black and white: [low, high], or a pair per channel.
    'auto': measured."""
    cache: Literal["auto", "off"] = "auto"
    """Decoded images: 'auto' stores them in data.cache_dir if they fit into half of the free disk.
    'off': no store."""
    cache_dir: str | None = None
    """Folder for decoded images. You can delete it at any time. Default: $IDMM_CACHE, else
    ~/.cache/idmm."""
    in_chans: Count | None = None
    """Channels of the model. 3 and 1 read pictures, others the files' channels. Default: those of
    --init, else 3."""
    mean: list[float] | None = Field(None, min_length=1)
    """Mean per channel, of values in [0, 1]. Default: that of --init, else ImageNet's for RGB, else
    measured."""
    std: list[PositiveFloat] | None = Field(None, min_length=1)
    """Standard deviation per channel. Default: as for data.mean."""
    labelled: Subset | None = None
    """Use only some labels, e.g. '{per_class: 5}'. The other images count as unlabelled. Default:
    all."""
    labels: str | None = None
    """CSV file of path,class (also split, group) with paths under data.root, or a folder of such.
    Default: folders are the classes."""
    folds: int | None = Field(None, ge=2)
    """Folds of a cross-validation, each one run in OUT/fold-N. Default: one run on the dataset's
    own test split."""
    fold: Count | None = None
    """Run only this fold, from 1. Default: all."""
    bands: list[NonNegativeInt] | None = Field(None, min_length=1)
    """Channels of the files to use, from 0, e.g. '[0, 3, 4]'. Default: all."""

    @property
    def channels(self) -> int | None:
        """Channels that the config asks for. None: the init checkpoint's, else 3."""
        if self.bands is None:
            return self.in_chans
        return len(self.bands)

    @model_validator(mode="after")
    def _check(self) -> Self:
        faults = {}
        used = self.channels
        if self.in_chans not in (None, used):
            faults["in_chans"] = (
                f"got {self.in_chans} for {used} bands, expected {used}, or no in_chans"
            )
        if self.fold is not None and self.fold > (self.folds or 0):
            faults["fold"] = f"got {self.fold}, expected data.folds of at least {self.fold}"
        if faults:
            raise FieldErrors(faults)
        return self


# ---------------------------------------------------------------------- views of the images
# smallest and largest, of an image's area
Share = Annotated[list[float], PAIR, rising(1.0)]


def _strengths(jitter: list[float]) -> list[float]:
    if min(jitter) < 0 or jitter[3] > 0.5:
        raise ValueError(f"got {jitter}, expected four numbers >= 0, the last (hue) <= 0.5")
    return jitter


Jitter = Annotated[list[float], Field(min_length=4, max_length=4), AfterValidator(_strengths)]


@section
class Colours:
    """How crops are turned and coloured. Null means the method's own value."""

    flip: Probability | None = None
    """Probability of a horizontal flip. Default: 0.5."""
    jitter: Jitter | None = None
    """Strength of brightness, contrast, saturation, hue. Default: [0.8, 0.8, 0.8, 0.2], less for
    MoCo and DINO."""
    jitter_prob: Probability | None = None
    """Probability of the colour jitter. Default: 0.8."""
    grey_prob: Probability | None = None
    """Probability of a grey image. Default: 0.2."""
    blur_prob: Probability | None = None
    """Probability of a Gaussian blur (sigma 0.1 to 2 px). Default: 0.5, for global crops of mocov3,
    dino 1 and 0.1."""
    solarize_prob: Probability | None = None
    """Probability of inverting bright values (solarization). Default: 0, for the second crop of
    mocov3, dino 0.2."""
    vflip: Probability | None = None
    """Probability of a vertical flip, for images without a right way up. Default: 0."""
    rotate90: bool | None = None
    """Turn each crop by a random multiple of 90 degrees, for images without a right way up.
    Default: false."""


# Of IDMM's release, and SimCLR's own. Nothing is solarized.
DEFAULT_COLOURS = Colours(
    flip=0.5,
    jitter=[0.8, 0.8, 0.8, 0.2],
    jitter_prob=0.8,
    grey_prob=0.2,
    blur_prob=0.5,
    solarize_prob=0.0,
    vflip=0.0,
    rotate90=False,
)
COLOURS = tuple(item.name for item in fields(Colours))


@section
class CropGroup(Colours):
    """Crops that are mixed together and averaged in the loss. Null colours are those of
    ``views``."""

    count: Count = 2
    """Crops per image."""
    scale: Share = field(default_factory=lambda: [0.14, 1.0])
    """Smallest and largest share of the image's area that a crop covers, in (0, 1]."""

    @model_serializer(mode="wrap")
    def _without_null(self, serialize: Any) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}

    def __str__(self) -> str:
        colours = []
        for name in COLOURS:
            value = getattr(self, name)
            if value is not None:
                colours.append(f"{name} {value}")
        crops = f"{self.count} of {self.scale[0]:g} to {self.scale[1]:g}"
        if colours:
            return f"{crops} ({', '.join(colours)})"
        return crops


@section
class Views(Colours):
    """Random crops and colours of pretraining. Null means the method's own value."""

    size: Side = 112
    """Side of the crops and of evaluated images (pixels)."""
    crops: list[CropGroup] | None = Field(None, min_length=1)
    """Groups of crops, e.g. '[{count: 2}, {count: 4, scale: [0.05, 0.4]}]'. Default: the
    method's."""


def colours_of(*levels: Colours) -> Colours:
    """Return each colour of the first level that has it, else IDMM's: a group of crops, ``views``,
    the method."""
    values = {
        name: [getattr(level, name) for level in (*levels, DEFAULT_COLOURS)] for name in COLOURS
    }
    return Colours(
        **{name: next(v for v in options if v is not None) for name, options in values.items()}
    )


def global_groups(crops: list[CropGroup]) -> int:
    """Return how many groups hold global crops: the first ones, as long as their scale is the first
    group's."""
    return next((n for n, group in enumerate(crops) if group.scale != crops[0].scale), len(crops))


@section
class Augment:
    """Augmentation and regularisation of fine-tuning, as in IDMM's release except that RandAugment
    is timm's."""

    scale: Share = field(default_factory=lambda: [0.08, 1.0])
    """Smallest and largest share of the area that the random resized crop covers, in (0, 1]."""
    flip: Probability = 0.5
    """Probability of a horizontal flip."""
    jitter: Jitter = field(default_factory=lambda: [0.4, 0.4, 0.4, 0.1])
    """Strength of brightness, contrast, saturation (factors) and hue (turns, at most 0.5)."""
    jitter_prob: Probability = 0.4
    """Probability of the colour jitter."""
    grey_prob: Probability = 0.2
    """Probability of a grey image."""
    vflip: Probability = 0.0
    """Probability of a vertical flip, for images without a right way up."""
    rotate90: bool = False
    """Turn each image by a random multiple of 90 degrees, for images without a right way up."""
    randaugment: str | None = "rand-m9-mstd0.5-inc1"
    """timm's auto-augment string. Null: none."""
    mixup_alpha: NonNegativeFloat = 0.5
    """Mixup draws its weight from Beta(alpha, alpha), on even epochs (on all if cutmix_alpha is 0).
    0: no Mixup."""
    cutmix_alpha: NonNegativeFloat = 0.5
    """CutMix draws its area from Beta(alpha, alpha), on odd epochs (on all if mixup_alpha is 0). 0:
    no CutMix."""
    mixing: Literal["epochs", "batches"] = "epochs"
    """Mixup and CutMix take turns by 'epochs', or each of the 'batches' draws one of them, as in
    timm."""
    random_erasing: Probability = 0.0
    """Probability of noise in a rectangle of 2 to 33 % of the image: timm's RandomErasing, mode
    pixel."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """Share of the target that is spread over the classes."""
    crop_mode: CropMode = "crop"
    """Test images: 'crop' their centre, 'pad' them with a border, or 'squash' them to a square.
    'auto': by the shapes of the training images."""
    crop_pct: Fraction = 0.875
    """Share of a test image's side that its centre crop keeps. The short side is first resized to
    size / crop_pct."""
