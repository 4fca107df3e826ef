"""The configs of the steps of ``idmm train``: a recipe each, on its images at the plan's size."""

import math
from dataclasses import replace
from pathlib import Path

from idmm.auto.data import by_list, data_of, labelled_part
from idmm.auto.plan import FEATURES, NETWORK, Classifier, TrainState
from idmm.config import FinetuneConfig, PretrainConfig, Train, parsing
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
# The fixed features see whole images
WHOLE = {"train.classifier_init": "features", "augment.crop_pct": 1.0}
FRESH_NETWORK = {"train.layer_decay": 1.0, "train.lr": 2e-3}
# The classifier stays the linear fit on fixed features
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
    if step == "scratch":
        return _scratch(command, state, minutes)
    return _classifier(command, state, step, minutes)


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


def _classifier(command: TrainCommand, state: TrainState, step: str, minutes: float) -> Json:
    """Return the config of the classifier, or of a fold of the trial."""
    out = Path(command.out)
    plan = state.plan
    data = data_of(command, state)
    if step == "last":
        data = labelled_part(data)
    else:
        data = by_list(data, out / f"{step}.csv")
    is_linear = step == "last" and state.best == Classifier.LINEAR
    init = out / (FEATURES if is_linear else NETWORK)
    keys = _common(command, step, minutes, str(init), plan.model)
    keys |= WHOLE | {"train.size": plan.size_together, "augment.flip": command.flip}
    keys["augment.crop_mode"] = state.counts.crop_mode
    if is_linear:
        keys |= LINEAR_FIT_ONLY | {"train.size": plan.features_size}
    elif not command.init and plan.way != "pretrain":
        keys |= FRESH_NETWORK
        if state.counts.labelled >= MANY_LABELS * state.counts.classes:
            keys |= MIXED
    shipped = recipe(FinetuneConfig, FAST)
    keys["train.batch_size"] = _batch_size(state.counts.labelled, shipped)
    keys["data"] = parsing.to_dict(data)
    return merged(shipped, keys)


def _scratch(command: TrainCommand, state: TrainState, minutes: float) -> Json:
    """Return the config of training from scratch, for comparison."""
    plan = state.plan
    images = state.counts.labelled
    keys = _common(command, "scratch", minutes, None, plan.model)
    keys |= {"train.size": plan.scratch_size, "augment.flip": command.flip}
    keys["train.classifier_init"] = "random"
    has_many_labels = images >= MANY_LABELS * state.counts.classes
    if has_many_labels and plan.many_passes(images, plan.scratch_size, minutes):
        keys |= MIXED
    shipped = recipe(FinetuneConfig, SCRATCH)
    keys["train.batch_size"] = _batch_size(images, shipped)
    keys["data"] = parsing.to_dict(labelled_part(data_of(command, state)))
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
