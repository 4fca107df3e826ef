"""What the classifier of fine-tuning starts from: fresh weights, or a linear fit on the features of the backbone."""

import logging
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from idmm import distributed
from idmm.config import FinetuneConfig
from idmm.errors import UserError
from idmm.evaluation.evaluate import choose_strength, evaluating, fit_linear, fit_temperature
from idmm.models.build import has_linear_classifier, linear_classifiers, one_image_norms
from idmm.models.spec import ModelSpec
from idmm.seeding import numpy_rng

log = logging.getLogger("idmm")
KEY = "train.classifier_init"
NORM_IMAGES = 4096  # are enough for the statistics of batch norms


def decide(config: FinetuneConfig, spec: ModelSpec) -> tuple[FinetuneConfig, list[str]]:
    """Fills in ``train.classifier_init`` where it is null and there is an init, with lines for the log on it.

    Raises:
        UserError: Features are asked for, and the model's classifier is not linear in them.
    """
    asked = config.train.classifier_init
    if asked == "random":
        return config, []
    linear = has_linear_classifier(spec.name, spec.kwargs)
    if asked == "features":
        if not linear:
            raise UserError(f"{KEY}: features, but the classifier of {spec.name} is not linear in them; wanted random")
        return config, []
    if linear:
        found, why = "features", "the default with an init; --train.classifier_init random starts from fresh weights"
    else:
        found, why = "random", f"as the classifier of {spec.name} is not linear in its features"
    return replace(config, train=replace(config.train, classifier_init=found)), [f"{KEY}: {found}, {why}"]


def check_classes(labels: np.ndarray, classes: list[str]) -> None:
    """Raises UserError where all training images are of one class, by their ``labels`` [N] and the classes' names."""
    if len(seen := np.unique(labels)) < 2:
        what = f"the training images are all of one class, '{classes[seen[0]]}'"
        raise UserError(f"{KEY}: features, but {what}; wanted two classes or more, or random")


def set_batch_norms(model: nn.Module, batches: Iterable[dict], device, autocast) -> None:
    """Sets the running statistics of batch norms to the mean over batches of images, in all processes alike.

    A classifier that was fitted in evaluation mode then meets such features in training, too, where batch norms take
    each batch's own statistics. Those that a short pretraining leaves behind are still near those of fresh weights.
    (Wu and Johnson, Rethinking "Batch" in BatchNorm, 2021, section 3.1.)
    """
    norms = {m: m.momentum for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}
    if not norms:
        return
    with evaluating(model), torch.no_grad():
        for norm in norms:
            norm.train()
            norm.momentum = None  # the plain mean, from the first batch on
            norm.num_batches_tracked.zero_()
        for batch in batches:
            with autocast(), one_image_norms(model, images := batch["images"].to(device, non_blocking=True)):
                model.forward_features(images)
    for norm, momentum in norms.items():
        norm.momentum = momentum


def norm_images(count: int, batch_size: int, seed: int) -> np.ndarray:
    """Returns which of ``count`` images :func:`set_batch_norms` and structured starts see, the same in each process:
    whole batches of classes mixed, as in training, where there are enough."""
    order = numpy_rng(seed, "batch norms").permutation(count)[: max(NORM_IMAGES, batch_size)]
    whole = len(order) // batch_size * batch_size or len(order)
    return np.repeat(order[:whole], distributed.world())  # processes share them out in turn


def _finite(features: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Returns the bias [K] with numbers for classes without a training image: on each of the N images [N, d] these
    have at most 1/N of the softmax together, as classes that were never seen."""
    unseen = np.isneginf(bias)
    if not unseen.any():
        return bias
    largest = (features @ weight[~unseen].T + bias[~unseen]).max(axis=1)  # [N]
    return np.where(unseen, largest.min() - np.log(len(features) * unseen.sum()), bias)


def fit_classifier(model: nn.Module, features: np.ndarray, labels: np.ndarray, config: FinetuneConfig) -> None:
    """Sets the model's classifier to a logistic regression on the features of the training images.

    Its strength is chosen on stratified folds of them, and the logits are divided by a temperature that is fitted to
    one: the strength of the best accuracy is often far too sure of itself, and training would first unlearn that, at
    the backbone's cost. The first process fits; all must call together.

    Args:
        model: With :func:`idmm.models.build.linear_classifiers`, all of which are set alike.
        features: Of the frozen backbone [N, d].
        labels: Classes of the images [N].
        config: Says whether classes weigh the same, and the seed of the folds.
    """
    layers, fitted = linear_classifiers(model), None
    if distributed.rank() == 0:
        balanced = "balanced" if config.train.class_weights == "balanced" else None
        choice = choose_strength(features, labels, config.seed, class_weight=balanced)
        loss = dict(seed=config.seed, smoothing=config.augment.label_smoothing, class_weight=balanced)
        heat = fit_temperature(features, labels, choice.strength, **loss)
        weight, bias = fit_linear(features, labels, model.num_classes, choice.strength, balanced)
        fitted = weight / heat, _finite(features, weight / heat, bias / heat)
        line = "classifier: logistic regression on the features of %d training images, C = %g, chosen by %s; "
        log.info(line + "temperature %.2g", len(labels), choice.strength, choice.by, heat)
    weight, bias = (torch.from_numpy(values) for values in distributed.broadcast(fitted))  # [K, d], [K]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(weight.view_as(layer.weight))
            layer.bias.copy_(bias)
