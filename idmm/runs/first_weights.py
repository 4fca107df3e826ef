"""The start of a run's weights: a structured transformer, see :mod:`idmm.models.vit_init`, and a
fitted classifier."""

from collections.abc import Iterable

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from idmm import distributed
from idmm.config import FinetuneConfig
from idmm.data.image_store import ImageStore
from idmm.data.split import Split
from idmm.data.store import Stores
from idmm.evaluation.evaluate import choose_strength, evaluating, fit_linear, fit_temperature
from idmm.evaluation.monitor import FLOORS, spread
from idmm.models.base import Backbone, PartlyFixed
from idmm.models.build import linear_classifiers, one_image_norms
from idmm.models.vit_init import can_init_vit, init_vit
from idmm.progress import log
from idmm.runs import common
from idmm.runs.resolve import CLASSIFIER_INIT
from idmm.seeding import numpy_rng
from idmm.training.run_context import RunContext
from idmm.training.stage import Phase, RunSetup

NORM_IMAGES = 4096  # enough for the statistics of batch norms
PATCH_IMAGES = 512  # at most, whose patches are whitened


def start_weights(
    run: RunContext, setup: RunSetup, phase: Phase, model: Backbone, train: ImageStore
) -> None:
    """Load the weights of ``init`` in a new run, or start fresh ones from some of the training
    images.

    The latter is by ``model.start``, or as hog_conv does. All processes must call together, and get
    the same weights.
    """
    name = setup.spec.name
    seed = setup.config.seed
    count = len(train)
    batch_size = min(phase.batch_size, PATCH_IMAGES)
    if report := setup.spec.load(model):
        log.info("%s", report)
    elif isinstance(model, PartlyFixed):  # whatever model.start: random features are of no use
        numbers = numpy_rng(seed, "features").permutation(count)[: model.start_images]
        images = np.repeat(numbers, distributed.world())
        model.learn_start(
            common.eval_batches(run, setup, train, phase.size, batch_size, images=images), seed
        )
        log.info("%s: filters and components from %d training images", name, len(numbers))
    elif setup.config.model.start != "timm" and can_init_vit(model):
        images = mixed_images(count, batch_size, seed)[: PATCH_IMAGES * distributed.world()]
        init_vit(
            model,
            common.eval_batches(run, setup, train, phase.size, batch_size, images=images),
            seed,
        )
        log.info(
            "model.start: attention, positions and the patch embedding of %s are structured", name
        )


def mixed_images(count: int, batch_size: int, seed: int) -> np.ndarray:
    """Return some of ``count`` image numbers in whole batches of mixed classes, as in training.

    Every process gets the same numbers, each once per process, because processes take turns.
    """
    order = numpy_rng(seed, "batch norms").permutation(count)[: max(NORM_IMAGES, batch_size)]
    whole_batches = len(order) // batch_size * batch_size or len(order)
    return np.repeat(order[:whole_batches], distributed.world())


def init_classifier(
    run: RunContext, setup: RunSetup, phase: Phase, model: Backbone, images: Stores
) -> None:
    """Fit the classifier of a new run to the training images' features, and save its accuracy on
    the test split.

    All processes must call together.

    Raises:
        RunError: The features are not finite, or memory ran out.
    """
    train = images.train
    config = setup.config
    with common.enough_for(phase.batch_size):
        model.to(run.device)
        if not config.model.freeze:  # a frozen backbone stays in evaluation mode
            numbers = mixed_images(len(train), phase.batch_size, config.seed)
            norm_batches = common.eval_batches(
                run, setup, train, phase.size, phase.batch_size, images=numbers
            )
            set_batch_norms(model, norm_batches, run.device, run.autocast)
        label = "features for the classifier, of train"
        features = common.image_features(
            run, setup, model, train, size=phase.size, batch_size=phase.batch_size, label=label
        )
        if (deviation := spread(features)) < FLOORS["feature_std"] and not config.model.freeze:
            # a fit to such features has weights so large that the first steps would destroy the
            # backbone
            line = (
                f"the features of the training images hardly differ (feature_std {deviation:.2g})"
            )
            log.warning(
                "%s: %s, so the classifier starts from fresh weights", CLASSIFIER_INIT, line
            )
            return
        fit_classifier(model, features.numpy(), train, config)
        accuracy = common.build_accuracy(run, setup, phase, images.test)
        top1 = accuracy.predict(model, "accuracy before the first step, on test").scores()["top1"]
    run.folder.add_start_scores({"start_top1": top1})
    log.info("before the first step: top-1 %.2f on %d test images", top1, len(images.test))


def set_batch_norms(model: Backbone, batches: Iterable[dict], device, autocast) -> None:
    """Set the running statistics of batch norms to the mean over batches of images, the same in all
    processes.

    In training, batch norms take the statistics of each batch. A classifier fitted in evaluation
    mode then still sees the features that it was fitted to. After a short pretraining the running
    statistics are close to those of fresh weights. (Wu and Johnson, Rethinking "Batch" in
    BatchNorm, 2021, section 3.1.)
    """
    norms = {
        m: m.momentum
        for m in model.modules()
        if isinstance(m, _BatchNorm) and m.running_mean is not None
    }
    if not norms:
        return
    with evaluating(model), torch.no_grad():
        for norm in norms:
            norm.train()
            norm.momentum = None  # the plain mean, from the first batch on
            norm.num_batches_tracked.zero_()
        for batch in batches:
            with (
                autocast(),
                one_image_norms(model, images := batch["images"].to(device, non_blocking=True)),
            ):
                model.forward_features(images)
    for norm, momentum in norms.items():
        norm.momentum = momentum


def fit_classifier(
    model: Backbone, features: np.ndarray, train: ImageStore | Split, config: FinetuneConfig
) -> None:
    """Set the model's classifier to a logistic regression on the features of the training images.

    Its strength is chosen on stratified folds. The logits are divided by a fitted temperature: the
    strength with the best accuracy is often overconfident, and training would spend its first steps
    on the backbone to undo that. The first process fits. All must call together.

    Args:
        model: With :func:`idmm.models.build.linear_classifiers`, which are all set to the same
            weights.
        features: Of the frozen backbone, [N, d].
        train: The images, with their labels.
    """
    layers = linear_classifiers(model)
    fit = None
    partly_fixed = model if isinstance(model, PartlyFixed) else None
    width = features.shape[1]
    labels = train.labels
    groups = train.groups
    if partly_fixed is not None:  # the others are worth nothing before training
        features = features[:, : partly_fixed.fixed]
    if distributed.rank() == 0:
        if config.train.class_weights == "balanced":
            balanced = "balanced"
        else:
            balanced = None
        choice = choose_strength(
            features, labels, config.seed, None, balanced, groups=groups, classes=train.classes
        )
        loss = dict(smoothing=config.augment.label_smoothing, class_weight=balanced, groups=groups)
        temperature = 1.0
        # else training does not see these logits, and others are scaled to them
        if partly_fixed is None or not partly_fixed.weighs_learned:
            temperature = fit_temperature(
                features, labels, choice.strength, seed=config.seed, **loss
            )
        weight, bias = fit_linear(features, labels, model.num_classes, choice.strength, balanced)
        weight = weight / temperature
        bias = bias / temperature
        # on each image, classes without one get at most 1/N of the softmax
        if (unseen := np.isneginf(bias)).any():
            largest = (features @ weight[~unseen].T + bias[~unseen]).max(axis=1)  # [N]
            bias = np.where(unseen, largest.min() - np.log(len(features) * unseen.sum()), bias)
        fit = np.pad(weight, ((0, 0), (0, width - weight.shape[1]))), bias
        line = "classifier: logistic regression on the features of %d training images, C = %g, chosen by %s, "
        log.info(line + "temperature %.2g", len(labels), choice.strength, choice.by, temperature)
    # [K, d], [K]
    weight, bias = (torch.from_numpy(values) for values in distributed.broadcast(fit))
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(weight.view_as(layer.weight))
            layer.bias.copy_(bias)
    if partly_fixed is not None:
        fixed_weight = weight.float()[:, : partly_fixed.fixed]
        logits = torch.from_numpy(features) @ fixed_weight.T + bias.float()  # [N, K]
        smoothing = config.augment.label_smoothing
        partly_fixed.weigh_learned(logits, torch.from_numpy(labels), smoothing)
