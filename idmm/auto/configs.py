"""The configs of the steps of ``idmm train``: a recipe each, on its images at the plan's size."""

import math
from dataclasses import replace
from pathlib import Path

from idmm.auto.data import by_list, data_of, labelled_part
from idmm.auto.plan import (
    ALL_JOINED,
    FEATURES,
    HELD_OUT,
    HOG_CONV,
    PSEUDOLABELS,
    TRIAL,
    Classifier,
    TrainState,
)
from idmm.config import Data, FinetuneConfig, PretrainConfig, Train, parsing
from idmm.config.commands import TrainCommand, TrainModel
from idmm.config.reading import recipe
from idmm.config.schema import merged
from idmm.files import Json
from idmm.models.hog_conv import CONVNET

# Recipes, the first two for stage 1: from fresh weights, from weights of --init, from the start of
# a run, from scratch
IDMM = "idmm_fast"
ADAPT = "adapt"
FAST = "fast"
SCRATCH = "fast_scratch"
JITTER_PROB = 0.8
# Small batches at a high learning rate, with which the few-label accuracy of the small ConvNet was
# measured
QUICK = {"train.lr": 2e-3, "train.batch_size": 32, "method.classifier_scale": 10.0}
# Many passes over all labels gain from mixing. With few labels the ConvNet lost by it
MIXED = {"augment.mixup_alpha": 0.2, "augment.cutmix_alpha": 1.0}
# hog_conv starts from logistic regression on hand-made features, and sees whole images when it is
# tested
FROM_FEATURES = {"train.classifier_init": "features", "augment.crop_pct": 1.0}
FRESH_CONVNET = MIXED | {"train.layer_decay": 1.0, "train.lr": 2e-3}
# The classifier stays the linear fit on frozen features
LINEAR_FIT_ONLY = {"model.freeze": True, "train.epochs": 0, "train.minutes": None}
# With it many passes of IDMM by light crops go on learning what classes have in common; few have no
# use for it (benchmarks/results/pretraining.md)
CUTMIX = 1.0
# Of the small ConvNet in stage 1. With more it tells all images apart, and its features lose the
# classes
MOST_EPOCHS = 75
MANY_LABELS = 20  # a class
# of a step's minutes, after which it writes a checkpoint, if not before (train.save_minutes)
SAVED = 0.1


def step_config(command: TrainCommand, state: TrainState, step: str, minutes: float) -> Json:
    """Return the config of a step: a recipe with the changes of the plan and the command."""
    if step == "stage1":
        return _pretraining(command, state, minutes)
    return _finetuning(command, state, step, minutes)


def _pretraining(command: TrainCommand, state: TrainState, minutes: float) -> Json:
    plan = state.plan
    init = command.init
    images = state.counts.images
    keys = _common(command, "stage1", minutes, init, plan.model)
    keys |= {f"views.{key}": value for key, value in recipe(PretrainConfig, IDMM)["views"].items()}
    keys |= {"views.size": plan.size, "views.flip": command.flip, "views.jitter_prob": JITTER_PROB}
    keys["views.jitter"] = [command.jitter, command.jitter, 0.0, 0.0]
    keys["method.cutmix_alpha"] = 0.0
    shipped = recipe(PretrainConfig, ADAPT if init else IDMM)
    if not init and plan.model["name"] == CONVNET["name"]:  # the small ConvNet, from fresh weights
        shipped = merged(shipped, QUICK)
        keys["train.max_epochs"] = MOST_EPOCHS
        if plan.many_passes(images, plan.size, minutes):
            keys["method.cutmix_alpha"] = CUTMIX
    keys["train.batch_size"] = _batch_size(images, shipped)
    keys["data"] = parsing.to_dict(replace(data_of(command, state), labelled=None))
    return merged(shipped, keys)


def _finetuning(command: TrainCommand, state: TrainState, step: str, minutes: float) -> Json:
    name, init = _start(command, state, step)
    data, images = _images(command, state, step)
    size = state.size(step)
    keys = _common(command, step, minutes, init, _model(state, step))
    keys |= {"train.size": size, "augment.flip": command.flip}
    if state.uses_hog_conv(step):
        keys |= FROM_FEATURES
        if state.is_fitted(step):
            keys |= LINEAR_FIT_ONLY
        elif state.best != Classifier.JOINED:
            keys |= FRESH_CONVNET
    elif name == SCRATCH:
        keys["train.classifier_init"] = "random"  # its weights change more than a fitted one allows
        has_many_labels = images >= MANY_LABELS * state.counts.classes
        guessed = step == "last" and state.used_pseudolabels
        if has_many_labels and not guessed and state.plan.many_passes(images, size, minutes):
            keys |= MIXED
    shipped = recipe(FinetuneConfig, name)
    keys["train.batch_size"] = _batch_size(images, shipped)
    keys["data"] = parsing.to_dict(data)
    return merged(shipped, keys)


def _common(
    command: TrainCommand, step: str, minutes: float, init: str | None, model: Json
) -> Json:
    """Return the keys of all steps."""
    out = Path(command.out)
    if step != "last":
        out /= step
    keys = {
        "seed": command.seed,
        "out": str(out),
        "train.minutes": minutes,
        "train.save_minutes": min(Train().save_minutes, SAVED * minutes),
        "train.device": command.device,
    }
    if not init:
        return keys | {"model": model}
    keys["init"] = init
    if init == command.init:
        default = vars(TrainModel())
        for key, value in vars(command.model).items():
            if value != default[key]:
                keys[f"model.{key}"] = value
    return keys


def _batch_size(images: int, shipped: Json) -> int:
    """Return the recipe's batch size, less for few images: networks learn by steps."""
    few: int = 2 ** int(math.log2(max(8, images / 8)))
    return min(int(shipped["train"]["batch_size"]), few)


def _model(state: TrainState, step: str) -> Json:
    """Return the model of a step, if it does not start from weights."""
    if step == "last" and state.best == Classifier.BASELINE:
        return {"name": "hog"}
    if not state.uses_hog_conv(step):
        return state.plan.model
    learned = CONVNET | {"size": state.network_size(step)}
    return {"name": HOG_CONV, "kwargs": {"learned": {} if state.is_fitted(step) else learned}}


def _images(command: TrainCommand, state: TrainState, step: str) -> tuple[Data, int]:
    """Return the images that a step learns from labels by, and their number."""
    data = data_of(command, state)
    out = Path(command.out)
    if step == "trial":
        return by_list(data, out / TRIAL), round((1 - HELD_OUT) * state.counts.labelled)
    used = state.used_pseudolabels
    if step == "last" and used:
        return by_list(data, out / PSEUDOLABELS), used.given + used.added
    return labelled_part(data), state.counts.labelled


def _start(command: TrainCommand, state: TrainState, step: str) -> tuple[str, str | None]:
    """Return the recipe of a step that learns from labels, and the weights that it starts from."""
    out = Path(command.out)
    if step in ("scratch", "teacher"):
        return SCRATCH, None
    if state.uses_hog_conv(step):
        return FAST, str(out / FEATURES) if state.best in ALL_JOINED else None
    # fresh weights learn more from pseudo-labels than those that found them
    if state.used_pseudolabels and not command.init:
        return SCRATCH, None
    weights = command.init
    if state.plan.way == "pretrain":
        weights = str(out / "stage1")
    if command.init or state.best == Classifier.PRETRAINED:
        return FAST, weights
    return SCRATCH, weights
