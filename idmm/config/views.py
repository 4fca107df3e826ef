"""Crops and colours of pretraining, augmentation of fine-tuning."""

from dataclasses import field, fields
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_serializer

from idmm.config.base import rising, section

Share = rising(1.0)  # smallest and largest, of an image's area


def _strengths(jitter: list[float] | None) -> list[float] | None:
    if jitter is not None and (min(jitter) < 0 or jitter[3] > 0.5):
        raise ValueError(f"got {jitter}, expected four numbers >= 0, the last (hue) <= 0.5")
    return jitter


@section
class Colours:
    """How crops are turned and coloured. Null means the method's own value."""

    flip: float | None = Field(None, ge=0, le=1)
    """Probability of a horizontal flip. Default: 0.5."""
    jitter: Annotated[list[float] | None, AfterValidator(_strengths)] = Field(None, min_length=4, max_length=4)
    """Strength of brightness, contrast, saturation, hue. Default: [0.8, 0.8, 0.8, 0.2], less for MoCo and DINO."""
    jitter_prob: float | None = Field(None, ge=0, le=1)
    """Probability of the colour jitter. Default: 0.8."""
    grey_prob: float | None = Field(None, ge=0, le=1)
    """Probability of a grey image. Default: 0.2."""
    blur_prob: float | None = Field(None, ge=0, le=1)
    """Probability of a Gaussian blur (sigma 0.1 to 2 px). Default: 0.5, for global crops of mocov3, dino 1 and 0.1."""
    solarize_prob: float | None = Field(None, ge=0, le=1)
    """Probability of inverting bright values (solarization). Default: 0, for the second crop of mocov3, dino 0.2."""
    vflip: float | None = Field(None, ge=0, le=1)
    """Probability of a vertical flip, for images without a right way up. Default: 0."""
    rotate90: bool | None = None
    """Turn each crop by a random multiple of 90 degrees, for images without a right way up. Default: false."""


# Of IDMM's release, and SimCLR's own. Nothing is solarized.
DEFAULT_COLOURS = Colours(
    flip=0.5, jitter=[0.8, 0.8, 0.8, 0.2], jitter_prob=0.8, grey_prob=0.2, blur_prob=0.5, solarize_prob=0.0,
    vflip=0.0, rotate90=False,
)  # fmt: skip
COLOURS = tuple(item.name for item in fields(Colours))


@section
class CropGroup(Colours):
    """Crops that are mixed together and averaged in the loss. Null colours are those of ``views``."""

    count: int = Field(2, ge=1)
    """Crops per image."""
    scale: Share = field(default_factory=lambda: [0.14, 1.0])
    """Smallest and largest share of the image's area that a crop covers, in (0, 1]."""

    @model_serializer(mode="wrap")
    def _without_null(self, serialize: Any) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}

    def __str__(self):
        set_colours = {name: getattr(self, name) for name in COLOURS if getattr(self, name) is not None}
        colours = ", ".join(f"{name} {value}" for name, value in set_colours.items())
        return f"{self.count} of {self.scale[0]:g} to {self.scale[1]:g}" + (f" ({colours})" if set_colours else "")


@section
class Views(Colours):
    """Random crops and colours of pretraining. Null means the method's own value."""

    size: int = Field(112, ge=8)
    """Side of the crops and of evaluated images (pixels)."""
    crops: list[CropGroup] | None = Field(None, min_length=1)
    """Groups of crops, e.g. '[{count: 2}, {count: 4, scale: [0.05, 0.4]}]'. Default: the method's."""


def colours_of(*levels: Colours) -> Colours:
    """Return each colour of the first level that has it, else IDMM's: a group of crops, ``views``, the method."""
    values = {name: [getattr(level, name) for level in (*levels, DEFAULT_COLOURS)] for name in COLOURS}
    return Colours(**{name: next(v for v in options if v is not None) for name, options in values.items()})


def global_groups(crops: list[CropGroup]) -> int:
    """Return how many groups hold global crops: the first ones, as long as their scale is the first group's."""
    return next((n for n, group in enumerate(crops) if group.scale != crops[0].scale), len(crops))


@section
class Augment:
    """Augmentation and regularisation of fine-tuning, as in IDMM's release except that RandAugment is timm's."""

    scale: Share = field(default_factory=lambda: [0.08, 1.0])
    """Smallest and largest share of the area that the random resized crop covers, in (0, 1]."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    jitter: Annotated[list[float], AfterValidator(_strengths)] = Field(
        default_factory=lambda: [0.4, 0.4, 0.4, 0.1], min_length=4, max_length=4
    )
    """Strength of brightness, contrast, saturation (factors) and hue (turns, at most 0.5)."""
    jitter_prob: float = Field(0.4, ge=0, le=1)
    """Probability of the colour jitter."""
    grey_prob: float = Field(0.2, ge=0, le=1)
    """Probability of a grey image."""
    vflip: float = Field(0.0, ge=0, le=1)
    """Probability of a vertical flip, for images without a right way up."""
    rotate90: bool = False
    """Turn each image by a random multiple of 90 degrees, for images without a right way up."""
    randaugment: str | None = "rand-m9-mstd0.5-inc1"
    """timm's auto-augment string. Null: none."""
    mixup_alpha: float = Field(0.5, ge=0)
    """Mixup draws its weight from Beta(alpha, alpha), on even epochs (on all if cutmix_alpha is 0). 0: no Mixup."""
    cutmix_alpha: float = Field(0.5, ge=0)
    """CutMix draws its area from Beta(alpha, alpha), on odd epochs (on all if mixup_alpha is 0). 0: no CutMix."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """Share of the target that is spread over the classes."""
    crop_pct: float = Field(0.875, gt=0, le=1)
    """Share of a test image's side that its centre crop keeps. The short side is first resized to size / crop_pct."""
