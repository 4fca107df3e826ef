"""The configs of the stages of ``idmm train``: a recipe each, on the images and at the size of the
plan."""

import math
from dataclasses import replace
from pathlib import Path

from idmm.auto.data import by_list, data_of, labelled_part, trial_split
from idmm.auto.plan import (
    ALL_JOINED,
    FEATURES,
    HELD_OUT,
    HOG_CONV,
    PSEUDOLABELS,
    Kept,
    TrainState,
)
from idmm.config import FinetuneConfig, PretrainConfig, Train, parsing
from idmm.config.commands import TrainCommand, TrainModel
from idmm.config.reading import recipe
from idmm.config.schema import merged
from idmm.data import user_lists
from idmm.files import write_csv
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
# of a stage's minutes, after which it writes a checkpoint, if not before (train.save_minutes)
SAVED = 0.1


def _common(
    command: TrainCommand, part: str, minutes: float, init: str | None, model: dict
) -> dict:
    """Return the keys of all stages."""
    out = Path(command.out)
    keys = {"seed": command.seed, "out": str(out if part == "last" else out / part)}
    keys |= {
        "train.minutes": minutes,
        "train.save_minutes": min(Train().save_minutes, SAVED * minutes),
    }
    keys |= {"train.device": command.device} | ({"init": init} if init else {"model": model})
    if init and init == command.init:
        default = vars(TrainModel())
        keys |= {
            f"model.{key}": value
            for key, value in vars(command.model).items()
            if value != default[key]
        }
    return keys


def _batch_size(images: int, recipe_size: int) -> int:
    """Return the recipe's batch size, less for few images: networks learn by steps."""
    return min(recipe_size, max(8, 2 ** int(math.log2(max(1, images / 8)))))


def _pretraining(command: TrainCommand, state: TrainState, minutes: float) -> dict:
    plan = state.plan
    init = command.init
    images = state.counts.images
    shipped = recipe(PretrainConfig, ADAPT if init else IDMM)
    keys = _common(command, "stage1", minutes, init, plan.model)
    keys |= {f"views.{key}": value for key, value in recipe(PretrainConfig, IDMM)["views"].items()}
    keys |= {"views.size": plan.size, "views.flip": command.flip, "views.jitter_prob": JITTER_PROB}
    keys |= {"views.jitter": [command.jitter, command.jitter, 0.0, 0.0]}
    # the small ConvNet, from fresh weights
    quick = not init and plan.model["name"] == CONVNET["name"]
    if quick:
        shipped = merged(shipped, QUICK)
    keys["method.cutmix_alpha"] = CUTMIX * (quick and plan.many_passes(images, plan.size, minutes))
    keys["train.max_epochs"] = MOST_EPOCHS if quick else None
    keys["train.batch_size"] = _batch_size(images, shipped["train"]["batch_size"])
    return merged(
        shipped, {**keys, "data": parsing.to_dict(replace(data_of(command, state), labelled=None))}
    )


def stage_config(command: TrainCommand, state: TrainState, part: str, minutes: float) -> dict:
    """Return the config of a stage: a recipe, with what the plan and the command change."""
    if part == "stage1":
        return _pretraining(command, state, minutes)
    plan = state.plan
    data = data_of(command, state)
    out = Path(command.out)
    size = state.size(part)
    images = state.counts.labelled
    last = part == "last"
    uses_hog_conv = state.uses_hog_conv(part)
    name, init = _start(command, state, part)
    if state.is_fitted(part):
        learned = {}
    else:
        learned = CONVNET | {"size": state.network_size(part)}
    if uses_hog_conv:
        model = {"name": HOG_CONV, "kwargs": {"learned": learned}}
    else:
        model = plan.model
    if last and state.best == Kept.BASELINE:
        model = {"name": "hog"}
    if last and state.learns_pseudolabels:
        images = state.pseudolabels.given + state.pseudolabels.added
        data = by_list(data, out / PSEUDOLABELS)
    elif part == "trial":
        images = round((1 - HELD_OUT) * images)
        write_csv(out / "trial.csv", user_lists.class_rows(trial_split(data).parts))
        data = by_list(data, out / "trial.csv")
    keys = _common(command, part, minutes, init, model) | {
        "train.size": size,
        "augment.flip": command.flip,
    }
    if uses_hog_conv:
        keys |= FROM_FEATURES
        if state.is_fitted(part):
            keys |= LINEAR_FIT_ONLY
        elif state.best != Kept.JOINED:
            keys |= FRESH_CONVNET
    elif name == SCRATCH:
        keys["train.classifier_init"] = "random"  # its weights change more than a fitted one allows
        many = images >= MANY_LABELS * state.counts.classes
        if (
            many
            and not (last and state.learns_pseudolabels)
            and plan.many_passes(images, size, minutes)
        ):
            keys |= MIXED
    shipped = recipe(FinetuneConfig, name)
    keys["train.batch_size"] = _batch_size(images, shipped["train"]["batch_size"])
    return merged(shipped, {**keys, "data": parsing.to_dict(labelled_part(data))})


def _start(command: TrainCommand, state: TrainState, part: str) -> tuple[str, str | None]:
    """Return the recipe of a stage that learns from labels, and the weights that it starts from."""
    plan = state.plan
    out = Path(command.out)
    if plan.way == "pretrain":
        weights = str(out / "stage1")
    else:
        weights = command.init
    if part in ("scratch", "teacher"):
        return SCRATCH, None
    if state.uses_hog_conv(part):
        return FAST, str(out / FEATURES) if state.best in ALL_JOINED else None
    # fresh weights learn more from pseudo-labels than those that found them
    if state.learns_pseudolabels and not command.init:
        return SCRATCH, None
    if command.init or state.best == Kept.PRETRAINED:
        return FAST, weights
    return SCRATCH, weights
