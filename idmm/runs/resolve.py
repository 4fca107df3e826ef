"""From a config to a run: all nulls are filled in once. Names are checked before torch is
imported."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from idmm.config import DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig
from idmm.config.commands import ProbeConfig, SuggestConfig, TrainCommand
from idmm.config.dense import DENSE_LIBRARIES
from idmm.data.formats import PICTURE_CHANNELS
from idmm.data.registry import check_folder, resolve_name
from idmm.errors import UserError, checked, needed
from idmm.files import weights_file

if TYPE_CHECKING:
    from idmm.models.spec import ModelSpec
    from idmm.training.run import Run

CLASSIFIER_INIT = "train.classifier_init"

AnyConfig = PretrainConfig | FinetuneConfig | DetectConfig | SegmentConfig | ProbeConfig
C = TypeVar("C", PretrainConfig, FinetuneConfig, DetectConfig, SegmentConfig, ProbeConfig)
T = TypeVar("T", PretrainConfig, FinetuneConfig, DetectConfig, SegmentConfig)
Dense = TypeVar("Dense", DetectConfig, SegmentConfig)


# ---------------------------------------------------------------------- the commands
def resolve_pretrain(
    config: PretrainConfig, started_at: float | None = None
) -> "Run[PretrainConfig]":
    """Resolve a run of pretraining. UserError: a fault of names, first those without torch."""
    config, notes = check_names(config, fill_pretrain_names)
    from idmm.training.run import Run

    config, spec = fill_network(config)
    config, rate_notes = fill_rates(config, spec)
    return Run(config, spec, notes=notes + rate_notes, started_at=started_at)


def resolve_finetune(
    config: FinetuneConfig, started_at: float | None = None
) -> "Run[FinetuneConfig]":
    """Resolve a run of fine-tuning. UserError: a fault of names, first those without torch."""
    config, notes = check_names(config, fill_data_name)
    from idmm.training.run import Run

    config, spec = fill_network(config)
    config, classifier_notes = fill_classifier_init(config, spec)
    if config.phases[0].epochs == 0 and config.train.classifier_init != "features":
        raise UserError.of(
            "train.epochs",
            f"0 only fits the classifier, but {CLASSIFIER_INIT} is random, expected features",
        )
    size = config.resolved_stages()[0].size
    if trained_size(spec) and size != default_size(spec):
        classifier_notes.append(
            f"train.size: {size} px. "
            f"The weights of init come from images of {default_size(spec)} px"
        )
    config, rate_notes = fill_rates(config, spec)
    phases = config.phases  # they name the keys that the user gave
    config = replace(config, stages=config.resolved_stages())
    return Run(config, spec, phases, notes + classifier_notes + rate_notes, started_at)


def resolve_dense(config: Dense, started_at: float | None = None) -> "Run[Dense]":
    """Resolve a run on boxes or masks. UserError: a fault of names, first those without torch."""
    command = config.COMMAND
    needed(command, DENSE_LIBRARIES[command], "dense")
    config, notes = check_names(config, fill_data_name)
    from idmm.training.run import Run

    config, spec = fill_network(config)
    if spec.bands is not None or spec.in_chans not in PICTURE_CHANNELS:
        raise UserError.of(
            "init",
            f"'{config.init}' has weights for {spec.in_chans} channels of files, "
            "but this command reads grey or RGB pictures",
        )
    config, rate_notes = fill_rates(config, spec)
    return Run(config, spec, notes=notes + rate_notes, started_at=started_at)


def resolve_probe(config: ProbeConfig) -> "Run[ProbeConfig]":
    """Resolve a measurement. UserError: a fault of names, first those without torch."""
    config, notes = check_names(config, fill_data_name)
    from idmm.training.run import Run

    config, spec = fill_network(config)
    if config.size is None:
        config = replace(config, size=default_size(spec))
        notes.append(f"size: {config.size} px, the default for {spec.name}. --size sets another")
    return Run(config, spec, notes=notes)


# ---------------------------------------------------------------------- names
def check_names(config: C, fill: Callable[[C], tuple[C, list[str]]]) -> tuple[C, list[str]]:
    """Fill in names without torch, and check all paths of the config.

    Returns:
        The config, and lines for the log.

    Raises:
        UserError: The faults of all checks.
    """
    (filled, notes), *_ = checked(
        lambda: fill(config),
        lambda: check_folder(config.data, config.out),
        lambda: _check_out(config),
        lambda: config.init and weights_file(config.init, "init"),
    )
    return filled, notes


def fill_data_name(config: C) -> tuple[C, list[str]]:
    """Fill in the dataset's name. UserError: there is none of that name."""
    data, notes = resolve_name(config.data)
    if data.labelled is not None:  # type: ignore[operator]  # mypy takes it for a method
        raise UserError.of(
            "data.labelled",
            f"is for pretraining, data.subset draws the images of a {config.COMMAND}",
        )
    return replace(config, data=data), notes


def fill_pretrain_names(config: PretrainConfig) -> tuple[PretrainConfig, list[str]]:
    """Fill in what the dataset's name and the method decide."""
    data, notes = resolve_name(config.data)
    config, method_notes = replace(config, data=data).fill_from_method()
    return config, notes + method_notes


def _check_out(config: AnyConfig) -> None:
    """Raise UserError if ``out`` is missing, lies among the images, or is the place of ``init``."""
    out = config.out
    if out is None:
        raise UserError.of(
            "out", "missing", "Name a folder for all that the run writes (--out runs/a)"
        )
    check_out_of_images(config)
    if config.init is None:
        return
    init = os.path.realpath(config.init)
    for name in ("", "backbone.safetensors", "model.safetensors"):
        if os.path.realpath(os.path.join(out, name)) == init:
            raise UserError.of(
                "out",
                f"'{out}' is where init is",
                "Name a new folder for all that this run writes",
            )


def check_out_of_images(config: AnyConfig | TrainCommand | SuggestConfig) -> None:
    """Raise UserError if a new ``out`` lies among images: a later run would read its pictures.

    A run that began there before may be resumed.
    """
    assert config.out is not None
    has_run = os.path.exists(os.path.join(config.out, "config.yaml"))
    has_list = isinstance(config, DetectConfig)  # a file lists the images
    data = config.data
    if has_run or has_list or data.root is None or data.name not in (None, "folder"):
        return
    root = os.path.realpath(os.path.expanduser(data.root))
    out = os.path.realpath(os.path.expanduser(config.out))
    names = ["train", "unlabelled", "val", "test"]
    if isinstance(config, SegmentConfig):
        names = ["images", "masks", "annotations"]
    folders = [root]
    if os.path.isdir(os.path.join(root, names[0])):
        folders = [os.path.join(root, name) for name in names]
    for folder in folders:
        if os.path.commonpath([folder, out]) == folder:
            raise UserError.of(
                "out",
                f"'{config.out}' lies among the images of '{folder}' "
                "and would become one of their classes",
                "Name another place",
            )


# ---------------------------------------------------------------------- the network
def fill_network(config: C) -> tuple[C, "ModelSpec"]:
    """Fill in the model and the channels from the weights of ``init``."""
    from idmm.models.public import resolved_source
    from idmm.models.spec import model_spec

    config = replace(config, init=resolved_source(config.init))
    spec = model_spec(config)
    model = replace(config.model, name=spec.name, kwargs=spec.kwargs)
    in_chans: Any = spec.in_chans  # of dense runs 1 or 3
    data = replace(config.data, mean=spec.mean, std=spec.std, in_chans=in_chans)
    if spec.bands is not None:  # images with boxes or masks have none
        data = replace(data, bands=spec.bands)
    return replace(config, model=model, data=data), spec


def fill_rates(config: T, spec: "ModelSpec") -> tuple[T, list[str]]:
    """Fill in the papers' peak learning rate and warm-up for the network's family."""
    lr, warmup_epochs = family_rates(spec.name)
    notes: list[str] = []
    train = config.train
    if train.lr is None:
        train = replace(train, lr=lr)
        notes.append(f"train.lr: {lr:g}, the default for {spec.name}")
    if train.warmup_epochs is None:
        train = replace(train, warmup_epochs=warmup_epochs)
        notes.append(f"train.warmup_epochs: {warmup_epochs:g}, the default for {spec.name}")
    return replace(config, train=train), notes


def family_rates(name: str) -> tuple[float, int]:
    """Return the papers' peak learning rate and warm-up (epochs) for the family of a timm model."""
    if name.startswith(("pvt_v2", "t2t")):
        return 1e-3, 10
    return 5e-4, 2


def trained_size(spec: "ModelSpec") -> Any:
    """Return the image size of the weights of init (pixels, or a pair), None if there is none."""
    if spec.init is None:
        return None
    return spec.init.kwargs.get("img_size") or spec.init.size


def default_size(spec: "ModelSpec") -> int:
    """Return the size of the weights of init, else timm's for the name, else 224 (pixels)."""
    from timm.layers import to_2tuple
    from timm.models import get_pretrained_cfg_value

    size = trained_size(spec)
    if not size:
        size = (get_pretrained_cfg_value(spec.name, "input_size") or (3, 224, 224))[-2:]
    return int(to_2tuple(size)[0])


def fill_classifier_init(
    config: FinetuneConfig, spec: "ModelSpec"
) -> tuple[FinetuneConfig, list[str]]:
    """Fill in ``train.classifier_init``, with lines for the log.

    Raises:
        UserError: The model cannot start as the config asks for.
    """
    from idmm.models.build import has_linear_classifier

    requested = config.train.classifier_init
    notes = []
    value = requested
    if value is None:
        has_features = config.init is not None or spec.name == "hog_conv"
        value = "features" if has_features else "random"
    if value == "random" and spec.name == "hog_conv":
        raise UserError.of(
            CLASSIFIER_INIT,
            "random, but hog_conv uses its hand-made features only by a fitted classifier, "
            "expected features",
        )
    if value == "features" and not has_linear_classifier(spec.name, spec.kwargs):
        if requested:
            raise UserError.of(
                CLASSIFIER_INIT,
                f"features, but the classifier of {spec.name} is not linear in them, "
                "expected random",
            )
        value = "random"
        notes.append(
            f"{CLASSIFIER_INIT}: random, as the classifier of {spec.name} is not linear in its "
            "features"
        )
    elif requested is None and config.init is not None:
        notes.append(
            f"{CLASSIFIER_INIT}: features, the default with an init. "
            f"--{CLASSIFIER_INIT} random starts from fresh weights"
        )
    return replace(config, train=replace(config.train, classifier_init=value)), notes
