"""What training sees of an image: stage 1's crops and colours, stage 2's augmentation."""

from dataclasses import field, fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from idmm.config.base import rising, section

Share = rising(1.0)  # smallest and largest, of an image's area


def _strengths(jitter: list[float] | None) -> list[float] | None:
    if jitter is not None and (min(jitter) < 0 or jitter[3] > 0.5):
        raise ValueError(f"got {jitter}, wanted four numbers >= 0, the last (hue) <= 0.5")
    return jitter


@section
class Colours:
    """How crops are turned and coloured."""

    flip: float | None = Field(None, ge=0, le=1)
    """Probability of a horizontal flip; null: 0.5."""
    jitter: Annotated[list[float] | None, AfterValidator(_strengths)] = Field(None, min_length=4, max_length=4)
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
    scale: Share = field(default_factory=lambda: [0.14, 1.0])
    """Smallest and largest share of the image's area that a crop covers, in (0, 1]."""
    size: int | None = Field(None, ge=8)
    """Side of these crops (pixels); null: views.size."""


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
    """timm's auto-augment string; null: none."""
    mixup_alpha: float = Field(0.5, ge=0)
    """Mixup's lambda is drawn from Beta(alpha, alpha), on even epochs (on all if cutmix_alpha is 0); 0: no Mixup."""
    cutmix_alpha: float = Field(0.5, ge=0)
    """CutMix's likewise, on odd epochs (on all if mixup_alpha is 0); 0: no CutMix."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """Share of the target spread over the classes."""
    crop_pct: float = Field(0.875, gt=0, le=1)
    """At test time the short side is resized to size / crop_pct, then the centre is cropped."""


# ------------------------------------------------------------------ images that are not RGB
def is_rgb(in_chans: int | None, bands: list[int] | None) -> bool:
    """Whether channels are colours: those of pictures, also where the model sees them in grey, and three bands."""
    return in_chans in (None, 1, 3) if bands is None else len(bands) == 3


def without_rgb(config: Any) -> tuple[Any, list[str]]:
    """Returns a stage's config without what only RGB images have, where its images are not RGB, and lines for the log
    on that."""
    data = config.data
    found = {
        name: _plain(section, name)
        for name in ("views", "augment")
        if hasattr(section := getattr(config, name, None), "jitter")
    }
    changes = {key: value for _, own in found.values() for key, value in own.items()}
    if is_rgb(data.in_chans, data.bands) or not changes:
        return config, []
    becomes = ", ".join(f"{key} becomes {'null' if value is None else value}" for key, value in changes.items())
    what = f"data.in_chans: images of {data.in_chans} channels have no saturation, hue, grey and RandAugment"
    return replace(config, **{name: section for name, (section, _) in found.items()}), [f"{what}; {becomes}"]


def _plain(section: Any, place: str) -> tuple[Any, dict[str, Any]]:
    """Returns a section, or a group of crops, without what only RGB images have, and by key what is there now."""
    new: dict[str, Any] = {}
    if section.jitter is not None and any(section.jitter[2:]):
        new["jitter"] = [*section.jitter[:2], 0.0, 0.0]
    if section.grey_prob:
        new["grey_prob"] = 0.0
    if getattr(section, "randaugment", None):
        new["randaugment"] = None
    changes = {f"{place}.{key}": value for key, value in new.items()}
    if getattr(section, "crops", None):
        groups = [_plain(group, f"{place}.crops[{n}]") for n, group in enumerate(section.crops)]
        new["crops"] = [group for group, _ in groups]
        changes |= {key: value for _, own in groups for key, value in own.items()}
    return replace(section, **new), changes
