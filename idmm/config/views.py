"""What training sees of an image: stage 1's crops and colours, stage 2's augmentation."""

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, ClassVar

from pydantic import Field, model_validator

from idmm.config.base import FieldError, check_range, check_strengths, section


@section
class Colours:
    """How crops are turned and coloured."""

    flip: float | None = Field(None, ge=0, le=1)
    """Probability of a horizontal flip; null: 0.5."""
    jitter: list[float] | None = Field(None, min_length=4, max_length=4)
    """Strength of brightness, contrast, saturation (factors) and hue (turns, at most 0.5); null: the method's (mocov2
    0.4, 0.4, 0.4, 0.1; mocov3 and dino 0.4, 0.4, 0.2, 0.1; else 0.8, 0.8, 0.8, 0.2)."""
    jitter_prob: float | None = Field(None, ge=0, le=1)
    """Probability of the colour jitter; null: 0.8."""
    grey_prob: float | None = Field(None, ge=0, le=1)
    """Probability of a grey image; null: 0.2."""
    blur_prob: float | None = Field(None, ge=0, le=1)
    """Probability of a Gaussian blur with sigma from 0.1 to 2.0 pixels; null: 0.5, in mocov3's and dino's two global
    crops 1.0 and 0.1."""
    solarize_prob: float | None = Field(None, ge=0, le=1)
    """Probability of solarization (values of half the range and more are inverted); null: 0, in the second of mocov3's
    and dino's global crops 0.2."""
    vflip: float | None = Field(None, ge=0, le=1)
    """Probability of a vertical flip, for images without a right way up; null: 0."""
    rotate90: bool | None = None
    """Turn each crop by a random multiple of 90 degrees, for images without a right way up; null: false."""

    @model_validator(mode="after")
    def _check_colours(self):
        check_strengths(self)
        return self


# Of IDMM's release, and SimCLR's own: what null means in the end. Nothing is solarized.
DEFAULT_COLOURS = Colours(
    flip=0.5, jitter=[0.8, 0.8, 0.8, 0.2], jitter_prob=0.8, grey_prob=0.2, blur_prob=0.5, solarize_prob=0.0,
    vflip=0.0, rotate90=False,
)  # fmt: skip
COLOURS = tuple(item.name for item in fields(Colours))


@section
class CropGroup(Colours):
    """Crops of one kind, mixed together and averaged in the loss; colours that it leaves out are those of ``views``."""

    SPARSE: ClassVar[bool] = True  # what is null is not written down

    count: int = Field(2, ge=1)
    """Crops an image."""
    scale: list[float] = Field(default_factory=lambda: [0.14, 1.0], min_length=2, max_length=2)
    """Smallest and largest share of the image's area that a crop covers, in (0, 1]."""
    size: int | None = Field(None, ge=8)
    """Side of these crops (pixels); null: views.size."""

    @model_validator(mode="after")
    def _check(self):
        check_range(self.scale, 0, 1, "scale")
        return self


@section
class Views(Colours):
    """Random crops and colours of stage 1. Null colours are the method's own, or those of IDMM's released code."""

    size: int = Field(112, ge=8)
    """Side of the crops (pixels), but for groups with a size of their own, and of the images that are evaluated."""
    crops: list[CropGroup] | None = Field(None, min_length=1)
    """Groups of crops, e.g. '[{count: 2, scale: [0.14, 1.0]}, {count: 4, scale: [0.05, 0.4]}]'; null: the method's.
    A group may have colours and a size (pixels) of its own, e.g. '{count: 4, scale: [0.05, 0.4], size: 64}'; dino's
    teacher sees the groups of the first one's scale and size."""


def colours_of(views: Views, group: CropGroup) -> Colours:
    """Returns the colours of a group's crops: its own, else those of ``views``, else IDMM's."""
    levels = (group, views, DEFAULT_COLOURS)
    found = {name: [getattr(level, name) for level in levels] for name in COLOURS}
    return Colours(**{name: next(v for v in values if v is not None) for name, values in found.items()})


def group_sizes(views: Views) -> list[int]:
    """Returns the side of each group's crops (pixels)."""
    return [views.size if group.size is None else group.size for group in views.crops]


def global_groups(crops: list[CropGroup], size: int | None = None) -> int:
    """Returns how many groups, from the first on, are of the first one's scale and size: those of global crops.

    ``size``: of groups without one of their own, that of the views (pixels).
    """
    kinds = [(group.scale, size if group.size is None else group.size) for group in crops]
    return next((n for n, kind in enumerate(kinds) if kind != kinds[0]), len(crops))


@section
class Augment:
    """Augmentation and regularisation of stage 2, as in IDMM's released code but for RandAugment, which is timm's."""

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
    vflip: float = Field(0.0, ge=0, le=1)
    """Probability of a vertical flip, for images without a right way up."""
    rotate90: bool = False
    """Turn each image by a random multiple of 90 degrees, for images without a right way up."""
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
        check_range(self.scale, 0, 1, "scale")
        check_strengths(self)
        return self


# ------------------------------------------------------------------ images that are not RGB
_RGB_ONLY = {"jitter": "saturation and hue are", "grey_prob": "grey is", "randaugment": "RandAugment is"}


def is_rgb(in_chans: int | None, bands: list[int] | None) -> bool:
    """Whether channels are colours: those of pictures, also where the model sees them in grey, and three bands."""
    return in_chans in (None, 1, 3) if bands is None else len(bands) == 3


def without_rgb(config: Any) -> tuple[Any, list[str]]:
    """Returns a stage's config without what only RGB images have, where its images are not RGB, and lines for the log
    on that."""
    data = config.data
    plain, asked = _plain(config)
    if is_rgb(data.in_chans, data.bands) or not asked:
        return config, []
    becomes = ", ".join(f"{key} becomes {_shown(wanted)}" for key, (_, wanted) in asked.items())
    what = f"data.in_chans: images of {data.in_chans} channels have no saturation, hue, grey and RandAugment"
    return plain, [f"{what}; {becomes}"]


def rgb_faults(config: Any, flags: Collection[str], in_chans: int | None, bands: list[int] | None) -> list[str]:
    """Returns a line for each of the keys given as ``flags`` that asks for what only RGB images have, where the images
    are not RGB."""
    channels, lines = in_chans if bands is None else len(bands), []
    for key, (got, wanted) in {} if is_rgb(in_chans, bands) else _plain(config)[1].items():
        if key in flags or key.partition("[")[0] in flags:  # views.crops, for one of its groups
            what = f"{_RGB_ONLY[key.rpartition('.')[2]]} for RGB images, and these have {channels} channels"
            lines.append(str(FieldError(key, f"got {got!r}, but {what}; wanted {_shown(wanted)}")))
    return lines


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value}"


def _plain(config: Any) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """Returns a stage's config without what only RGB images have, and by key what was there and is there now."""
    found = {
        name: _plain_section(section, name)
        for name in ("views", "augment")
        if hasattr(section := getattr(config, name, None), "jitter")
    }
    asked = {key: values for _, changes in found.values() for key, values in changes.items()}
    return replace(config, **{name: section for name, (section, _) in found.items()}), asked


def _plain_section(section: Any, place: str) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """The same of a section, or of a group of crops, whose keys begin with ``place``."""
    new: dict[str, Any] = {}
    if section.jitter is not None and any(section.jitter[2:]):
        new["jitter"] = [*section.jitter[:2], 0.0, 0.0]
    if section.grey_prob:
        new["grey_prob"] = 0.0
    if getattr(section, "randaugment", None):
        new["randaugment"] = None
    asked = {f"{place}.{key}": (getattr(section, key), value) for key, value in new.items()}
    if getattr(section, "crops", None):
        groups = [_plain_section(group, f"{place}.crops[{n}]") for n, group in enumerate(section.crops)]
        new["crops"] = [group for group, _ in groups]
        asked |= {key: values for _, changes in groups for key, values in changes.items()}
    return replace(section, **new), asked
