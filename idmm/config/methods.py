"""A class for each pretraining method: the keys it reads, with its own defaults, and what it wants of a run.

A new method is a class here, one of that name in a module NAME of ``idmm/methods``, and a
``configs/pretrain/NAME.yaml``, NAME in small letters. Widths and temperatures: Table 10 of the IDMM paper; what it
leaves out: the methods' own papers and releases.
"""

from collections.abc import Collection
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from idmm.config.base import section

_BYOL = {"jitter": [0.4, 0.4, 0.2, 0.1]}  # BYOL's augmentations, which MoCo v3 and DINO take over


def _byol_crops(low: float) -> tuple[dict[str, Any], ...]:
    """The first global crop is always blurred; the second seldom, but it may be solarized."""
    first, second = {"blur_prob": 1.0}, {"blur_prob": 0.1, "solarize_prob": 0.2}
    return tuple({"count": 1, "scale": [low, 1.0], **colours} for colours in (first, second))


@section
class MethodKeys:
    """Keys of a method. A default of None waits for the data or the model."""

    # Each group of crops, where ``views.crops`` is null
    crops: ClassVar[tuple[dict[str, Any], ...]] = ({"count": 2, "scale": [0.2, 1.0]},)
    colours: ClassVar[dict[str, Any]] = {}  # colours of ``views`` that are not IDMM's, where they are null
    # Length of the warm-up, where ``train.warmup_epochs`` is null; None: that of the backbone's family
    warmup_epochs: ClassVar[float | None] = None
    labelled: ClassVar[bool] = False  # whether it learns from labels
    exactly: ClassVar[int | None] = None  # crops of an image that it compares; None: any number
    at_least: ClassVar[int] = 1  # crops that it needs
    within_pass: ClassVar[bool] = False  # whether it compares the images of a pass with one another
    libraries: ClassVar[tuple[str, ...]] = ()  # modules that must be there; an MLP wants lightly beside them


@section
class _Smoothed(MethodKeys):
    crops: ClassVar = ({"count": 2, "scale": [0.14, 1.0]}, {"count": 4, "scale": [0.05, 0.4]})  # of IDMM's release

    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """epsilon of Eq. 17, the share of the target that goes to the other N-1 instances (supervised: to the classes)."""
    cutmix_alpha: float = Field(0.5, ge=0)
    """CutMix's lambda is drawn from Beta(alpha, alpha); 0: no CutMix."""


@section
class _Projection(MethodKeys):
    projection: bool = True
    """A two-layer MLP between the features and the loss; without it there are no widths to give."""
    hidden_dim: int | None = Field(None, ge=1)
    """Width of the MLP's hidden layers; null but where the method has its own: that of the features."""
    dim: int | None = Field(256, ge=1)
    """Width of its outputs."""


@section
class _Contrastive(_Projection):
    temperature: float = Field(0.1, gt=0)
    """Temperature of the loss, of dino's student."""


@section
class IDMM(_Projection, _Smoothed):
    """Parametric instance discrimination with multi-crop and CutMix."""

    projection: bool = False
    dim: int | None = Field(None, ge=1)
    classifier: Literal["linear", "cosine"] = "linear"
    """The N-way layer: 'linear' (the paper's) or 'cosine' (normalised features and rows, a learned scale)."""
    classifier_scale: float = Field(16.0, gt=0)
    """Where the cosine layer's learned scale starts."""
    classifier_lr_scale: float = Field(1.0, gt=0)
    """The N-way layer's learning rate, as a multiple of train.lr."""
    classifier_init: Literal["random", "features"] = "random"
    """Start of the N-way layer's rows: 'random', or each image's own 'features', untrained, centred, normalised."""
    label_weight: float = Field(0.0, ge=0)
    """Joint training with what labels there are (data.labelled): weight of the cross-entropy of a classifier, beside
    the N-way loss that runs on all images. On the global crops (the groups of the first one's scale), with
    method.label_smoothing and method.cutmix_alpha as the N-way loss has them. The run then needs images to test on, and
    exports the classifier, too; 0: no labels."""
    instance_decay: Literal["none", "linear", "cosine"] = "none"
    """With label_weight: the weight of the N-way loss stays 1, or falls to zero by the end of the run."""


@section
class SimCLR(_Contrastive):
    """Two crops of an image against all other crops of the batch."""

    exactly: ClassVar = 2
    within_pass: ClassVar = True
    libraries: ClassVar = ("lightly",)


@section
class SupCon(_Contrastive):
    """Crops of a class against those of the others."""

    labelled: ClassVar = True
    within_pass: ClassVar = True


@section
class MoCoV2(_Contrastive):
    """A queue of keys from a momentum encoder."""

    colours: ClassVar = {"jitter": [0.4, 0.4, 0.4, 0.1]}
    warmup_epochs: ClassVar = 0
    exactly: ClassVar = 2
    libraries: ClassVar = ("lightly",)

    temperature: float = Field(0.2, gt=0)
    momentum: float = Field(0.999, ge=0, le=1)
    """Momentum of the second encoder; mocov3's and dino's rises to 1."""
    queue: int | None = Field(None, ge=1)
    """Keys of earlier batches; null: 2048, or fewer where there are few images."""


@section
class MoCoV3(MethodKeys):
    """A predictor of a momentum encoder's keys, both crops in both parts."""

    crops: ClassVar = _byol_crops(0.08)
    colours: ClassVar = _BYOL
    warmup_epochs: ClassVar = 40
    exactly: ClassVar = 2
    within_pass: ClassVar = True
    libraries: ClassVar = ("lightly",)

    hidden_dim: int = Field(4096, ge=1)
    dim: int = Field(256, ge=1)
    temperature: float = Field(0.2, gt=0)
    momentum: float = Field(0.99, ge=0, le=1)


@section
class DINO(MethodKeys):
    """The student's softmax follows that of a momentum teacher, centred and sharpened."""

    crops: ClassVar = (*_byol_crops(0.25), {"count": 4, "scale": [0.05, 0.25]})
    colours: ClassVar = _BYOL
    warmup_epochs: ClassVar = 10
    at_least: ClassVar = 2
    libraries: ClassVar = ("lightly",)

    hidden_dim: int = Field(2048, ge=1)
    dim: int = Field(256, ge=1)
    temperature: float = Field(0.1, gt=0)
    momentum: float = Field(0.996, ge=0, le=1)
    outputs: int | None = Field(None, ge=2)
    """Width of the softmax; null: 65536, or the number of images where that is smaller."""
    teacher_temperature: float = Field(0.07, gt=0)
    """Temperature of the teacher after its warm-up from 0.04."""
    teacher_warmup_epochs: int | None = Field(None, ge=0)
    """Length of that warm-up; null: 30, or a tenth of a shorter run (epochs)."""
    center_momentum: float = Field(0.9, ge=0, le=1)
    """Momentum of the centre of the teacher's outputs; 1 leaves it at zero."""
    freeze_epochs: int | None = Field(None, ge=0)
    """The last layer of the head is held still for so long; null: 1, or 0 in runs under 10 epochs (epochs)."""


@section
class Supervised(_Smoothed):
    """Cross-entropy with classes."""

    labelled: ClassVar = True


METHODS = {keys.__name__.lower(): keys for keys in (IDMM, SimCLR, SupCon, MoCoV2, MoCoV3, DINO, Supervised)}
DEFAULT = next(iter(METHODS))


def defaults_of(name: str) -> dict[str, Any]:
    """Returns the keys that a method reads, with its defaults."""
    keys = METHODS[name]()
    return {item.name: getattr(keys, item.name) for item in fields(keys)}


def _flag(key: str) -> tuple[Any, Any]:
    """Type and default of a key where the method is not known yet: null, the method's own, unless all that read it, the
    default method among them, have the same."""
    infos = {name: cls.__pydantic_fields__[key] for name, cls in METHODS.items() if key in cls.__pydantic_fields__}
    described = next(info.description for info in infos.values() if info.description)
    first, defaults = next(iter(infos.values())), {name: info.default for name, info in infos.items()}
    text, kind, default = f"{', '.join(infos)}: {described}", first.annotation | None, None
    if DEFAULT in infos and len(set(defaults.values())) == 1:
        kind, default = first.annotation, first.default
    elif any(value is not None for value in defaults.values()):
        own = dict.fromkeys(value for value in defaults.values() if value is not None)
        readers = [f"{value} ({', '.join(n for n in defaults if defaults[n] == value)})" for value in own]
        text += f" Null: {', '.join(readers).lower()}."
    return Annotated[kind, Field(), *first.metadata], Field(default, description=text)  # metadata may be empty


_KEYS = {key: _flag(key) for name in METHODS for key in defaults_of(name)}
_NAME = "Pretraining method; all but idmm and supervised need the extra 'baselines', supcon and supervised labels."

# The keys of all methods, for files and flags: which of them count is known when all are read (idmm.config.recipes).
Method = section(
    type(
        "Method",
        (),
        {
            "__doc__": "What is learned in stage 1; a method refuses fields that it does not read.",
            "__module__": __name__,
            "__annotations__": {"name": Literal[*METHODS], **{key: kind for key, (kind, _) in _KEYS.items()}},
            "MAIN": "name",
            "name": Field(DEFAULT, description=_NAME),
            **{key: default for key, (_, default) in _KEYS.items()},
        },
    )
)


def keys_read(method: Method) -> dict[str, Any]:
    """Returns the keys that a method reads, with its defaults; without its MLP there are no widths."""
    reads = defaults_of(method.name)
    if "projection" in reads and not projects(method, reads):
        return {name: value for name, value in reads.items() if name not in ("hidden_dim", "dim")}
    return reads


def projects(method: Method, reads: dict[str, Any]) -> bool:
    """Whether there is an MLP between the features and the loss."""
    return bool(reads.get("projection") if method.projection is None else method.projection)


def unread(method: Method, given: Collection[str]) -> list[str]:
    """Returns a line for each of the given keys that the method does not read."""
    own, reads, lines = defaults_of(method.name), keys_read(method), []
    for name in given:
        if name not in ("name", *reads):
            where = f"{method.name} without method.projection" if name in own else method.name
            lines.append(f"method.{name}: {getattr(method, name)!r}, but {where} does not read it; leave it out")
    return lines
