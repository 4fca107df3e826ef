"""From a config to a run: resolve() fills its gaps, run_stage() runs its stage.

Names are checked before torch is imported.
"""

import importlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from idmm.config import DenseConfig, DetectConfig, FinetuneConfig, SegmentConfig
from idmm.config.commands import ProbeConfig
from idmm.data.formats import PICTURE_CHANNELS
from idmm.data.registry import check_folder
from idmm.errors import UserError, checked
from idmm.files import weights_file
from idmm.notebook import Result
from idmm.runs import stage_of
from idmm.training import clock
from idmm.training.stage import RunSetup

if TYPE_CHECKING:
    from idmm.models.spec import ModelSpec

CLASSIFIER_INIT = "train.classifier_init"


def resolve(config: Any, started_at: float | None = None) -> RunSetup:
    """Fill in nulls of any stage's config from the dataset, the method, the checkpoint and the
    backbone's family.

    ``started_at`` is when the command began (``clock.now()``), None: now.

    Raises:
        UserError: A line per fault. Faults of names come first, without torch.
    """
    started_at = clock.now() if started_at is None else started_at
    (filled, notes), *_ = checked(
        stage_of(config).fill_names,
        lambda: check_folder(config.data, config.out),
        lambda: _check_out(config),
        lambda: config.init and weights_file(config.init, "init"),
    )

    from idmm.models.spec import model_spec

    spec = model_spec(filled)
    if isinstance(filled, DenseConfig) and (
        spec.bands is not None or spec.in_chans not in PICTURE_CHANNELS
    ):
        line = f"has weights for {spec.in_chans} channels of files, but this command reads grey or RGB pictures"
        raise UserError(f"init: '{config.init}' {line}")
    model = replace(filled.model, name=spec.name, kwargs=spec.kwargs)
    data = replace(filled.data, mean=spec.mean, std=spec.std, in_chans=spec.in_chans)
    if spec.bands is not None:  # images with boxes or masks have none
        data = replace(data, bands=spec.bands)
    config = replace(filled, model=model, data=data)
    if isinstance(config, FinetuneConfig):
        config, more = fill_classifier_init(config, spec)
        notes += more
        size = config.resolved_stages()[0].size
        if trained_size(spec) and size != default_size(spec):
            notes.append(
                f"train.size: {size} px. The weights of init come from images of {default_size(spec)} px"
            )
    if not isinstance(config, ProbeConfig):
        for name, value in zip(("lr", "warmup_epochs"), family_rates(spec.name), strict=True):
            if getattr(config.train, name) is None:
                config = replace(config, train=replace(config.train, **{name: value}))
                notes.append(f"train.{name}: {value:g}, the default for {spec.name}")
    elif config.size is None:
        config = replace(config, size=default_size(spec))
        notes.append(f"size: {config.size} px, the default for {spec.name}. --size sets another")
    phases = stage_of(config).phases  # they name the keys that the user gave
    if isinstance(config, FinetuneConfig):
        config = replace(config, stages=config.resolved_stages())
    return RunSetup(stage_of(config), spec, tuple(phases), tuple(notes), started_at)


def family_rates(name: str) -> tuple[float, int]:
    """Return the papers' peak learning rate and warm-up (epochs) for the family of a timm model."""
    if name.startswith(("pvt_v2", "t2t")):
        return (1e-3, 10)
    return (5e-4, 2)


def trained_size(spec: "ModelSpec") -> Any:
    """Return the image size of the weights of init (pixels, or a pair of them), None if there is
    none."""
    return spec.init and (spec.init.kwargs.get("img_size") or spec.init.size)


def default_size(spec: "ModelSpec") -> int:
    """Return the size of the weights of init, or timm's for the name if any size fits or their JSON
    has none."""
    from timm.layers import to_2tuple
    from timm.models import get_pretrained_cfg_value

    return to_2tuple(
        trained_size(spec)
        or (get_pretrained_cfg_value(spec.name, "input_size") or (3, 224, 224))[-2:]
    )[0]


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
    has_features = config.init is not None or spec.name == "hog_conv"
    value = requested or ("features" if has_features else "random")
    if value == "random" and spec.name == "hog_conv":
        line = "hog_conv uses its hand-made features only by a fitted classifier, expected features"
        raise UserError(f"{CLASSIFIER_INIT}: random, but {line}")
    if value == "features" and not has_linear_classifier(spec.name, spec.kwargs):
        line = f"the classifier of {spec.name} is not linear in"
        if requested:
            raise UserError(f"{CLASSIFIER_INIT}: features, but {line} them, expected random")
        value = "random"
        notes = [f"{CLASSIFIER_INIT}: random, as {line} its features"]
    elif requested is None and config.init is not None:
        how = f"--{CLASSIFIER_INIT} random starts from fresh weights"
        notes = [f"{CLASSIFIER_INIT}: features, the default with an init. {how}"]
    return replace(config, train=replace(config.train, classifier_init=value)), notes


def _check_out(config: Any) -> None:
    """Raise UserError if ``out`` is missing, lies among the images, or is the place of ``init``."""
    if config.out is None:
        raise UserError("out: missing. Name a folder for all that the run writes (--out runs/a)")
    check_place(config)
    written = [
        os.path.join(config.out, name) for name in ("", "backbone.safetensors", "model.safetensors")
    ]
    if config.init is not None and os.path.realpath(config.init) in map(os.path.realpath, written):
        raise UserError(
            f"out: '{config.out}' is where init is. Name a new folder for all that this run writes"
        )


def check_place(config: Any) -> None:
    """Raise UserError if a new ``out`` lies in a folder of images: a later run would read its
    pictures as images.

    A run that began there before may be resumed.
    """
    has_run = os.path.exists(os.path.join(config.out, "config.yaml"))
    has_list = isinstance(config, DetectConfig)  # a file lists the images
    if has_run or has_list or config.data.root is None or config.data.name not in (None, "folder"):
        return
    root, out = (
        os.path.realpath(os.path.expanduser(path)) for path in (config.data.root, config.out)
    )
    masked = isinstance(config, SegmentConfig)
    if masked:
        names = ("images", "masks", "annotations")
    else:
        names = ("train", "unlabelled", "val", "test")
    if os.path.isdir(os.path.join(root, names[0])):
        folders = [os.path.join(root, name) for name in names]
    else:
        folders = [root]
    for folder in folders:
        if os.path.commonpath([folder, out]) == folder:
            line = f"'{config.out}' lies among the images of '{folder}' and would become one of their classes"
            raise UserError(f"out: {line}. Name another place")


def run_stage(config: Any, started_at: float | None = None) -> dict:
    """Run the stage that a config belongs to, once per fold of ``data.folds``; return the content
    of ``result.json``.

    ``train.minutes`` and ``seconds`` count from ``started_at``, when the command began
    (``clock.now()``).

    Raises:
        UserError: A mistake in the config or the data. Faults of names come first, before torch is
            imported.
        RunError: Training could not continue.
        Interrupted: Ctrl-C or another stop signal.
    """
    setup = resolve(config, started_at)
    if isinstance(config, DenseConfig):
        module = "dense.stage"
    else:
        module = f"runs.{setup.stage.NAME}"
    run_one = importlib.import_module(f"idmm.{module}").run_one
    data = setup.config.data
    if data.folds is None or data.fold is not None or not setup.stage.needs.test:
        return Result(run_one(setup))
    return Result(importlib.import_module("idmm.runs.folds").run_folds(setup, run_one))
