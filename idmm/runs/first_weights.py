"""The start of a run's weights: a structured transformer, and a fitted classifier."""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.modules.batchnorm import _BatchNorm

from idmm import distributed
from idmm.batch import Batch
from idmm.config import FinetuneConfig
from idmm.config.phases import Phase
from idmm.data.image_store import ImageStore
from idmm.data.split import Split
from idmm.data.store import Stores
from idmm.evaluation.evaluate import (
    LinearHead,
    Predictions,
    choose_strength,
    evaluating,
    fit_linear,
    fit_temperature,
)
from idmm.evaluation.monitor import FLOORS, spread
from idmm.models.base import Backbone
from idmm.models.build import linear_classifiers, one_image_norms
from idmm.models.hog import Hog
from idmm.models.hog_conv import IMAGES, HogConv
from idmm.models.vit_init import can_init_vit, init_vit
from idmm.progress import log
from idmm.runs.measure import build_accuracy, enough_for, eval_batches, image_features
from idmm.runs.networks import LabelledRun
from idmm.runs.resolve import CLASSIFIER_INIT
from idmm.seeding import numpy_rng
from idmm.training.run import Run

NORM_IMAGES = 4096  # enough for the statistics of batch norms
PATCH_IMAGES = 512  # at most, whose patches are whitened


def start_weights(run: LabelledRun, phase: Phase, model: Backbone, train: ImageStore) -> None:
    """Load the weights of ``init`` in a new run, or start fresh ones from some training images.

    The latter is by ``model.start``, or as hog_conv does. All processes must call together, and get
    the same weights.
    """
    name = run.spec.name
    seed = run.config.seed
    batch_size = min(phase.batch_size, PATCH_IMAGES)
    report = run.spec.load(model)
    if report is not None:
        log.info(str(report))
    elif isinstance(model, HogConv):  # whatever model.start: random features are of no use
        numbers = numpy_rng(seed, "features").permutation(len(train))[:IMAGES]
        images = np.repeat(numbers, distributed.world())
        model.learn_start(eval_batches(run, train, phase.size, batch_size, images=images), seed)
        log.info(f"{name}: mixtures and centre from {len(numbers)} training images")
    elif run.config.model.start != "timm" and can_init_vit(model):
        images = mixed_images(len(train), batch_size, seed)[: PATCH_IMAGES * distributed.world()]
        init_vit(model, eval_batches(run, train, phase.size, batch_size, images=images), seed)
        log.info(
            f"model.start: attention, positions and the patch embedding of {name} are structured"
        )


def mixed_images(count: int, batch_size: int, seed: int) -> NDArray[np.int64]:
    """Return some of ``count`` image numbers in whole batches of mixed classes, as in training.

    Every process gets the same numbers, each once per process, because processes take turns.
    """
    order = numpy_rng(seed, "batch norms").permutation(count)[: max(NORM_IMAGES, batch_size)]
    whole_batches = len(order) // batch_size * batch_size or len(order)
    return np.repeat(order[:whole_batches], distributed.world())


def init_classifier(
    run: Run[FinetuneConfig],
    phase: Phase,
    model: Backbone,
    images: Stores,
    head: LinearHead | None = None,
) -> Predictions | None:
    """Fit the classifier of a new run to the training images' features, and save its accuracy.

    All processes must call together. ``head`` of the first one is the classifier if it is given.

    Returns:
        The predictions for the test images. None: the features hardly differ, and the classifier
        keeps its fresh weights.

    Raises:
        RunError: The features are not finite, or memory ran out.
    """
    train = images.train
    config = run.config
    size = phase.size
    batch_size = phase.batch_size
    with enough_for(batch_size):
        model.to(run.device)
        # a frozen backbone stays in evaluation mode, and the classifier of hog_conv starts without
        # the features of its network
        if not (config.model.freeze or isinstance(model, HogConv)):
            numbers = mixed_images(len(train), batch_size, config.seed)
            batches = eval_batches(run, train, size, batch_size, images=numbers)
            set_batch_norms(model, batches, run)
        if distributed.broadcast(head is not None):
            set_classifier(model, head)
        elif not _fit_to_features(run, phase, model, train):
            return None
        accuracy = build_accuracy(run, phase, images.tested)
        predictions = accuracy.predict(model, "accuracy before the first step, on test")
    top1 = predictions.scores()["top1"]
    run.folder.add_start_scores({"start_top1": top1})
    log.info(f"before the first step: top-1 {top1:.2f} on {len(images.tested)} test images")
    return predictions


def _fit_to_features(
    run: Run[FinetuneConfig], phase: Phase, model: Backbone, train: ImageStore
) -> bool:
    """Fit the classifier to the training images' features. Return False if they hardly differ."""
    config = run.config
    label = "features for the classifier, of train"
    features = image_features(
        run, model, train, size=phase.size, batch_size=phase.batch_size, label=label
    )
    deviation = spread(features)
    # a fit to such features has weights so large that the first steps would destroy the backbone
    if deviation < FLOORS["feature_std"] and not config.model.freeze:
        log.warning(
            f"{CLASSIFIER_INIT}: the features of the training images hardly differ "
            f"(feature_std {deviation:.2g}), so the classifier starts from fresh weights"
        )
        return False
    fit_classifier(model, features.numpy(), train, config)
    return True


def set_batch_norms(model: Backbone, batches: Iterable[Batch], run: LabelledRun) -> None:
    """Set the running statistics of batch norms to the mean over batches of images.

    They are the same in all processes.

    In training, batch norms take the statistics of each batch. A classifier fitted in evaluation
    mode then still sees the features that it was fitted to. After a short pretraining the running
    statistics are close to those of fresh weights. (Wu and Johnson, Rethinking "Batch" in
    BatchNorm, 2021, section 3.1.)
    """
    momenta = {}
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            momenta[module] = module.momentum
    if not momenta:
        return
    with evaluating(model), torch.no_grad():
        for norm in momenta:
            norm.train()
            norm.momentum = None  # the plain mean, from the first batch on
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.zero_()
        for batch in batches:
            images = batch["images"].to(run.device, non_blocking=True)
            with run.autocast(), one_image_norms(model, images):
                model.forward_features(images)
    for norm, momentum in momenta.items():
        norm.momentum = momentum


def fit_classifier(
    model: Backbone,
    features: NDArray[np.float32],
    train: ImageStore | Split,
    config: FinetuneConfig,
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
    fixed = features
    if isinstance(model, HogConv):
        fixed = features[:, : model.fixed]  # others are worth nothing before training
    head = None
    if distributed.rank() == 0:
        head = _fitted(fixed, train, config, model.num_classes, isinstance(model, Hog))
    set_classifier(model, head)


def set_classifier(model: Backbone, head: LinearHead | None) -> None:
    """Set the model's classifier to that of the first process. All must call together.

    Features beyond those of ``head`` [K, d] get the weight 0.
    """
    weight, bias = map(torch.from_numpy, distributed.broadcast(head))  # [K, d], [K]
    with torch.no_grad():
        for layer in linear_classifiers(model):
            width = layer.weight[0].numel()
            padded = F.pad(weight, (0, width - weight.shape[1]))
            layer.weight.copy_(padded.view_as(layer.weight))
            assert layer.bias is not None
            layer.bias.copy_(bias)


def _fitted(
    features: NDArray[np.float32],
    train: ImageStore | Split,
    config: FinetuneConfig,
    classes: int,
    one_scale: bool,
) -> LinearHead:
    """Return the weight [K, d] and bias [K] of the classifier of :func:`fit_classifier`."""
    labels = train.known_labels
    groups = train.groups
    balanced = "balanced" if config.train.class_weights == "balanced" else None
    choice = choose_strength(
        features,
        labels,
        config.seed,
        None,
        balanced,
        groups=groups,
        classes=train.classes,
        one_scale=one_scale,
    )
    temperature = fit_temperature(
        features,
        labels,
        choice.strength,
        seed=config.seed,
        smoothing=config.augment.label_smoothing,
        class_weight=balanced,
        groups=groups,
        one_scale=one_scale,
    )
    weight, bias = fit_linear(features, labels, classes, choice.strength, balanced, one_scale)
    weight = weight / temperature
    bias = bias / temperature
    unseen = np.isneginf(bias)
    if unseen.any():  # on each image, classes without one get at most 1/N of the softmax
        largest = (features @ weight[~unseen].T + bias[~unseen]).max(axis=1)  # [N]
        bias = np.where(unseen, largest.min() - np.log(len(features) * unseen.sum()), bias)
    log.info(
        f"classifier: logistic regression on the features of {len(labels)} training images, "
        f"C = {choice.strength:g}, chosen by {choice.by}, temperature {temperature:.2g}"
    )
    return weight, bias
