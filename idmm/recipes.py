"""The pretraining methods: what each reads, and what null in the config means to it. No torch: plans ask too."""

import importlib.util
from dataclasses import dataclass, field, fields, replace
from typing import Any

from idmm.config import COLOURS, DEFAULT_COLOURS, CropGroup, Method, PretrainConfig, Views
from idmm.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """A method as far as the config is concerned."""

    implementation: str
    """Module under ``idmm.methods`` and class."""
    reads: dict[str, Any]
    """Fields of ``method`` that it reads, with what null means; ``...`` where null waits for the data or the model."""
    crops: tuple[dict[str, Any], ...] = ({"count": 2, "scale": [0.2, 1.0]},)
    """Each group of crops, where ``views.crops`` is null."""
    colours: dict[str, Any] = field(default_factory=dict)
    """Colours of ``views`` that are not IDMM's, where they are null."""
    warmup_epochs: float | None = None
    """Length of the warm-up, where ``train.warmup_epochs`` is null; None: that of the backbone's family."""
    labelled: bool = False
    """Whether it learns from labels."""
    exactly: int | None = None
    """Crops of an image that it compares; None: any number."""
    at_least: int = 1
    """Crops that it needs."""
    within_pass: bool = False
    """Whether it compares the images of a pass with one another."""
    libraries: dict[str, str] = field(default_factory=dict)
    """Modules that must be there, with the names of their packages."""


_LIGHTLY = {"lightly": "lightly"}
_IDMM_CROPS = ({"count": 2, "scale": [0.14, 1.0]}, {"count": 4, "scale": [0.05, 0.4]})  # its release's
_BYOL = {"jitter": [0.4, 0.4, 0.2, 0.1]}  # BYOL's augmentations, which MoCo v3 and DINO take over


def _byol_crops(low: float) -> tuple[dict[str, Any], ...]:
    """The first global crop is always blurred; the second seldom, but it may be solarized."""
    first, second = {"blur_prob": 1.0}, {"blur_prob": 0.1, "solarize_prob": 0.2}
    return tuple({"count": 1, "scale": [low, 1.0], **colours} for colours in (first, second))


_MLP = {"hidden_dim": ..., "dim": 256}
_SIMCLR = {"projection": True, **_MLP, "temperature": 0.1}
_CLASSES = {"label_smoothing": 0.1, "cutmix_alpha": 0.5}
_N_WAY = ("classifier", "classifier_bias", "classifier_scale", "classifier_lr_scale", "classifier_init")
_N_WAY += ("classifier_init_std", "chunk_size")

# Widths and temperatures: Table 10 of the IDMM paper; what it leaves out: the methods' own papers and releases.
METHODS = {
    "idmm": Recipe(
        "idmm:IDMM",
        {**_CLASSES, **dict.fromkeys(_N_WAY, ...), "projection": False, "hidden_dim": ..., "dim": ...},
        crops=_IDMM_CROPS,
    ),
    "simclr": Recipe("simclr:SimCLR", _SIMCLR, exactly=2, within_pass=True, libraries=_LIGHTLY),
    "supcon": Recipe(
        "supcon:SupCon",
        _SIMCLR,
        labelled=True,
        within_pass=True,
    ),
    "mocov2": Recipe(
        "mocov2:MoCoV2",
        {**_SIMCLR, "temperature": 0.2, "momentum": 0.999, "queue": ...},
        colours={"jitter": [0.4, 0.4, 0.4, 0.1]},
        warmup_epochs=0,
        exactly=2,
        libraries=_LIGHTLY,
    ),
    "mocov3": Recipe(
        "mocov3:MoCoV3",
        {"hidden_dim": 4096, "dim": 256, "temperature": 0.2, "momentum": 0.99, "stop_grad_conv1": ...},
        crops=_byol_crops(0.08),
        colours=_BYOL,
        warmup_epochs=40,
        exactly=2,
        within_pass=True,
        libraries=_LIGHTLY,
    ),
    "dino": Recipe(
        "dino:DINO",
        {
            "hidden_dim": 2048,
            "dim": 256,
            "temperature": 0.1,
            "momentum": 0.996,
            "outputs": ...,
            "teacher_temperature": 0.07,
            "teacher_warmup_epochs": ...,
            "center_momentum": 0.9,
            "freeze_epochs": ...,
        },
        crops=(*_byol_crops(0.25), {"count": 4, "scale": [0.05, 0.25]}),
        colours=_BYOL,
        warmup_epochs=10,
        at_least=2,
        libraries=_LIGHTLY,
    ),
    "supervised": Recipe("supervised:Supervised", _CLASSES, labelled=True, crops=_IDMM_CROPS),
}


def default_crops(name: str) -> list[CropGroup]:
    """Returns a method's groups of crops."""
    return [CropGroup(**group) for group in METHODS[name].crops]


def _filled_views(views: Views, name: str) -> tuple[Views, list[str]]:
    """Fills in the crops and colours that are left to the method; a colour that is given holds for all its crops."""
    recipe, notes = METHODS[name], []
    given = {colour for colour in COLOURS if getattr(views, colour) is not None}
    crops = views.crops
    if crops is None:
        crops = [replace(group, **dict.fromkeys(given)) for group in default_crops(name)]
        shown = ", ".join(_shown(group) for group in crops)
        notes.append(f"views.crops: {shown} of the area, {name}'s")
    notes += [f"views.{key}: {value}, {name}'s" for key, value in recipe.colours.items() if key not in given]
    colours = {key: recipe.colours.get(key, getattr(DEFAULT_COLOURS, key)) for key in COLOURS if key not in given}
    return replace(views, crops=crops, **colours), notes


def _shown(group: CropGroup) -> str:
    own = {name: getattr(group, name) for name in COLOURS if getattr(group, name) is not None}
    colours = "".join(f", {name} {value:g}" for name, value in own.items())
    return f"{group.count} of {group.scale[0]:g} to {group.scale[1]:g}" + (f" ({colours[2:]})" if own else "")


def settle_method(config: PretrainConfig) -> tuple[PretrainConfig, list[str]]:
    """Fills in what ``method``, ``views`` and ``train.warmup_epochs`` leave to the method.

    Returns:
        The config, with null left only where the data or the model decide, and lines for the log.

    Raises:
        UserError: Fields that the method does not read, crops that it cannot take, a library that is missing.
    """
    method, recipe = config.method, _fitted(config.method)
    faults = [*_unread(method, recipe), *_missing(method, recipe)]
    views, view_notes = _filled_views(config.views, method.name)
    given, wanted = sum(group.count for group in views.crops), recipe.exactly or recipe.at_least
    if given < wanted or (recipe.exactly and given > wanted):
        exactness = "" if recipe.exactly else "at least "
        faults.append(f"views.crops: {given} crops an image, but {method.name} compares {exactness}{wanted}")
    small, few = pass_notes(config, config.train.batch_size)
    if faults + small:
        raise UserError(*faults, *small)
    null = {name: value for name, value in recipe.reads.items() if getattr(method, name) is None and value is not ...}
    notes = [f"method.{name}: {value}, {method.name}'s" for name, value in null.items() if value is not False]
    notes += view_notes
    train = config.train
    if train.warmup_epochs is None and recipe.warmup_epochs is not None:
        train = replace(train, warmup_epochs=recipe.warmup_epochs)
        notes.append(f"train.warmup_epochs: {recipe.warmup_epochs:g}, {method.name}'s")
    scaled = method.classifier_scale != Method().classifier_scale
    if "classifier_scale" in recipe.reads and method.classifier == "linear" and scaled:
        notes.append(f"method.classifier_scale: {method.classifier_scale:g} without effect, the classifier is linear")
    return replace(config, method=replace(method, **null), views=views, train=train), notes + few


def pass_notes(config: PretrainConfig, batch_size: int) -> tuple[list[str], list[str]]:
    """Returns faults, and lines for the log, of a method that compares the images of a pass where those are few.

    Args:
        config: The run's.
        batch_size: Images of a step, which may be fewer than asked for (images).
    """
    name, passes = config.method.name, config.train.accumulate
    images = batch_size // passes
    if not METHODS[name].within_pass or (passes == 1 and images > 1):
        return [], []
    shown = f"train.batch_size: {batch_size}" + (f", in train.accumulate's {passes} passes" if passes > 1 else "")
    if images < 2:
        return [f"{shown}: {name} compares the images of a pass with one another; wanted at least 2 of them"], []
    return [], [f"{shown}: {name} compares the {images} images of a pass with one another, not those of the batch"]


def _fitted(method: Method) -> Recipe:
    """Returns the method's recipe as the switch of the MLP leaves it: on, a library has it; off, it has no widths."""
    recipe = METHODS[method.name]
    on = recipe.reads.get("projection") if method.projection is None else method.projection
    if on and "projection" in recipe.reads:
        return replace(recipe, libraries={**_LIGHTLY, **recipe.libraries})
    without = {name: value for name, value in recipe.reads.items() if name not in _MLP}
    return replace(recipe, reads=without) if "projection" in recipe.reads else recipe


def _unread(method: Method, recipe: Recipe) -> list[str]:
    others = [item.name for item in fields(Method) if item.name != "name" and item.name not in recipe.reads]
    default, lines = Method(), []
    for name in others:
        if getattr(method, name) != getattr(default, name):
            where = " without method.projection" if name in METHODS[method.name].reads else ""
            lines.append(
                f"method.{name}: {getattr(method, name)!r}, but {method.name}{where} does not read it; leave it out"
            )
    return lines


def _missing(method: Method, recipe: Recipe) -> list[str]:
    missing = [package for module, package in recipe.libraries.items() if importlib.util.find_spec(module) is None]
    return [
        f"method.name: {method.name} needs {name}; install it with: pip install 'idmm[baselines]'" for name in missing
    ]
