"""The pretraining methods: the keys that each reads, with its own defaults, and what it needs of a run.

A new method is an entry here, its keys in :class:`Method`, a class of that name in a module NAME of ``idmm/methods``,
and a ``configs/pretrain/NAME.yaml``, NAME in small letters. Widths and temperatures: Table 10 of the IDMM paper; what
it leaves out: the methods' own papers and releases.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from idmm.config.base import section


@dataclass(frozen=True)
class Recipe:
    """What a method is beside its loss."""

    keys: dict[str, Any]  # that it reads, with its defaults; None waits for the data or the model
    crops: tuple[dict[str, Any], ...] = ({"count": 2, "scale": [0.2, 1.0]},)  # groups, if ``views.crops`` is null
    colours: dict[str, Any] = field(default_factory=dict)  # colours of ``views`` that are not IDMM's, if they are null
    warmup_epochs: float | None = None  # if ``train.warmup_epochs`` is null; None: that of the backbone's family
    labelled: bool = False  # whether it learns from labels
    exactly: int | None = None  # crops of an image that it compares; None: any number
    at_least: int = 1  # crops that it needs
    within_pass: bool = False  # whether it compares the images of a pass with one another
    libraries: tuple[str, ...] = ()  # modules that must be there; an MLP needs lightly too


SMOOTHED = {"label_smoothing": 0.1, "cutmix_alpha": 0.5}
PROJECTION = {"projection": True, "hidden_dim": None, "dim": 256}
IDMM_CROPS = ({"count": 2, "scale": [0.14, 1.0]}, {"count": 4, "scale": [0.05, 0.4]})  # of its release
LIGHTLY = ("lightly",)
BYOL = {"jitter": [0.4, 0.4, 0.2, 0.1]}  # BYOL's augmentations, which MoCo v3 and DINO take over


def byol_crops(low: float) -> tuple[dict[str, Any], ...]:
    """The first global crop is always blurred; the second seldom, but it may be solarized."""
    first, second = {"blur_prob": 1.0}, {"blur_prob": 0.1, "solarize_prob": 0.2}
    return tuple({"count": 1, "scale": [low, 1.0], **colours} for colours in (first, second))


METHODS = {
    "idmm": Recipe(
        {
            **SMOOTHED, **PROJECTION, "projection": False, "dim": None, "classifier": "linear",
            "classifier_scale": 16.0, "classifier_lr_scale": 1.0, "classifier_init": "random",
            "label_weight": 0.0, "instance_decay": "none",
        },
        crops=IDMM_CROPS,
    ),
    "simclr": Recipe({**PROJECTION, "temperature": 0.1}, exactly=2, within_pass=True, libraries=LIGHTLY),
    "supcon": Recipe({**PROJECTION, "temperature": 0.1}, labelled=True, within_pass=True),
    "mocov2": Recipe(
        {**PROJECTION, "temperature": 0.2, "momentum": 0.999, "queue": None},
        colours={"jitter": [0.4, 0.4, 0.4, 0.1]}, warmup_epochs=0, exactly=2, libraries=LIGHTLY,
    ),
    "mocov3": Recipe(
        {"hidden_dim": 4096, "dim": 256, "temperature": 0.2, "momentum": 0.99},
        byol_crops(0.08), BYOL, warmup_epochs=40, exactly=2, within_pass=True, libraries=LIGHTLY,
    ),
    "dino": Recipe(
        {
            "hidden_dim": 2048, "dim": 256, "temperature": 0.1, "momentum": 0.996, "outputs": None,
            "teacher_temperature": 0.07, "teacher_warmup_epochs": None, "center_momentum": 0.9, "freeze_epochs": None,
        },
        (*byol_crops(0.25), {"count": 4, "scale": [0.05, 0.25]}), BYOL, warmup_epochs=10, at_least=2, libraries=LIGHTLY,
    ),
    "supervised": Recipe(SMOOTHED, crops=IDMM_CROPS, labelled=True),
}  # fmt: skip


@section
class Method:
    """What is learned in stage 1; a method refuses fields that it does not read."""

    name: Literal[*METHODS] = "idmm"
    """Pretraining method; all but idmm and supervised need the extra 'baselines', supcon and supervised labels."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """idmm, supervised: epsilon of Eq. 17, the share of the target that goes to the other N-1 instances (supervised: to
    the classes)."""
    cutmix_alpha: float = Field(0.5, ge=0)
    """idmm, supervised: CutMix's lambda is drawn from Beta(alpha, alpha); 0: no CutMix."""
    projection: bool | None = None
    """idmm, simclr, supcon, mocov2: A two-layer MLP between the features and the loss; without it there are no widths
    to give. Null: false (idmm), true (simclr, supcon, mocov2)."""
    hidden_dim: int | None = Field(None, ge=1)
    """idmm, simclr, supcon, mocov2, mocov3, dino: Width of the MLP's hidden layers. Null: 4096 (mocov3), 2048 (dino),
    of the others that of the features."""
    dim: int | None = Field(None, ge=1)
    """idmm, simclr, supcon, mocov2, mocov3, dino: Width of its outputs. Null: 256."""
    classifier: Literal["linear", "cosine"] = "linear"
    """idmm: The N-way layer: 'linear' (the paper's) or 'cosine' (normalised features and rows, a learned scale)."""
    classifier_scale: float = Field(16.0, gt=0)
    """idmm: Where the cosine layer's learned scale starts."""
    classifier_lr_scale: float = Field(1.0, gt=0)
    """idmm: The N-way layer's learning rate, as a multiple of train.lr."""
    classifier_init: Literal["random", "features"] = "random"
    """idmm: Start of the N-way layer's rows: 'random', or each image's own 'features', untrained, centred,
    normalised."""
    label_weight: float = Field(0.0, ge=0)
    """idmm: Joint training with what labels there are (data.labelled): weight of the cross-entropy of a classifier,
    beside the N-way loss that runs on all images. On the global crops (the groups of the first one's scale), with
    method.label_smoothing and method.cutmix_alpha as the N-way loss has them. The run then needs images to test on, and
    exports the classifier, too; 0: no labels."""
    instance_decay: Literal["none", "cosine"] = "none"
    """idmm: With label_weight: the weight of the N-way loss stays 1, or falls to zero along half a cosine."""
    temperature: float | None = Field(None, gt=0)
    """simclr, supcon, mocov2, mocov3, dino: Temperature of the loss, of dino's student. Null: 0.1 (simclr, supcon,
    dino), 0.2 (mocov2, mocov3)."""
    momentum: float | None = Field(None, ge=0, le=1)
    """mocov2, mocov3, dino: Momentum of the second encoder; mocov3's and dino's rises to 1. Null: 0.999 (mocov2), 0.99
    (mocov3), 0.996 (dino)."""
    queue: int | None = Field(None, ge=1)
    """mocov2: Keys of earlier batches; null: 2048, or fewer where there are few images."""
    outputs: int | None = Field(None, ge=2)
    """dino: Width of the softmax; null: 65536, or the number of images where that is smaller."""
    teacher_temperature: float | None = Field(None, gt=0)
    """dino: Temperature of the teacher after its warm-up from 0.04. Null: 0.07."""
    teacher_warmup_epochs: int | None = Field(None, ge=0)
    """dino: Length of that warm-up; null: 30, or a tenth of a shorter run (epochs)."""
    center_momentum: float | None = Field(None, ge=0, le=1)
    """dino: Momentum of the centre of the teacher's outputs; 1 leaves it at zero. Null: 0.9."""
    freeze_epochs: int | None = Field(None, ge=0)
    """dino: The last layer of the head is held still for so long; null: 1, or 0 in runs under 10 epochs (epochs)."""


def keys_read(method: Method) -> dict[str, Any]:
    """Returns the keys that a method reads, with its defaults; without its MLP there are no widths."""
    reads = METHODS[method.name].keys
    if "projection" in reads and not projects(method):
        return {name: value for name, value in reads.items() if name not in ("hidden_dim", "dim")}
    return reads


def projects(method: Method) -> bool:
    """Whether ``method.projection`` puts an MLP between the features and the loss."""
    usual = METHODS[method.name].keys.get("projection")
    return bool(usual if method.projection is None else method.projection)


def unread(method: Method, given: Collection[str]) -> list[str]:
    """Returns a line for each of the given keys that the method does not read."""
    reads, lines = keys_read(method), []
    for name in given:
        if name not in ("name", *reads):
            without = name in METHODS[method.name].keys
            where = f"{method.name} without method.projection" if without else method.name
            lines.append(f"method.{name}: {getattr(method, name)!r}, but {where} does not read it; leave it out")
    return lines
