"""Stage 1: from images to a backbone."""

import functools
from typing import Any

import numpy as np

from idmm import distributed
from idmm.config import PretrainConfig, global_groups
from idmm.data.image_store import ImageStore
from idmm.data.store import Stores
from idmm.data.views import MultiCropTransform
from idmm.evaluation import evaluate
from idmm.evaluation.evaluators import Evaluator, Extract, KNNAccuracy
from idmm.evaluation.monitor import CollapseMonitor
from idmm.methods import create_method
from idmm.methods.base import Method, RunInfo
from idmm.models.base import Backbone
from idmm.models.build import backbone_state, parameter_counts
from idmm.progress import log
from idmm.runs.first_weights import start_weights
from idmm.runs.images import list_run_images
from idmm.runs.measure import batch_features, eval_batches, image_features, measure_baseline
from idmm.runs.networks import build_backbone, build_localization, try_sizes, try_start
from idmm.runs.outputs import classifier_result, common_result, export
from idmm.runs.plan import plan_phase
from idmm.seeding import derive, numpy_rng, seeded
from idmm.text import counted
from idmm.training.loop import Loop
from idmm.training.run import Run

EVAL_BATCH = 256  # images at a time
# training images at most that the collapse monitor uses, the same every time
MONITORED = 512
PretrainRun = Run[PretrainConfig]


def train_backbone(run: PretrainRun) -> dict[str, Any]:
    """Pretrain on one split of the images. Return the content of ``result.json``."""
    list_images = functools.partial(list_run_images, run.config)
    try_sizes(run, functools.partial(try_start, run))
    with run.opened():
        if run.folder.finished:
            return run.finished_result(list_images)
        images = run.store(list_images(), run.folder)
        if run.config.trains_classifier:
            measure_baseline(run, images)
        backbone = build_network(run, images)
        method = build_method(run, images, backbone)
        knn = build_knn(run, images)
        loop = build_loop(run, images, method, knn)
        loop.start()
        measure_before(run, loop, knn)
        loop.fit()
        result = write_outputs(run, images, loop)
        run.folder.write_result(result)
        return result


# ---------------------------------------------------------------------- building
def build_network(run: PretrainRun, images: Stores) -> Backbone:
    """Build the backbone. A new run loads the weights of ``init`` or gives it a structured
    start."""
    (phase,) = run.phases
    train = images.train
    classes = 0
    if run.config.trains_classifier:
        classes = len(train.class_names)
    backbone = build_backbone(run, phase, classes)
    if run.is_new:  # else the loop loads its state
        start_weights(run, phase, backbone, train)
    if run.config.trains_classifier:
        log.info(
            f"method.label_weight: {count_labels(train)} of {len(train)} training images are used "
            "with their labels"
        )
    return backbone


def build_method(run: PretrainRun, images: Stores, backbone: Backbone) -> Method:
    """Build the method on the backbone. In a new run it may start from all images' features."""
    config = run.config
    (phase,) = run.phases
    train = images.train
    info = RunInfo(
        images=len(train),
        batch_size=min(phase.batch_size, len(train)),
        epochs=phase.epochs,
        steps=phase.steps(len(train)),
        classes=None if train.classes is None else len(train.classes),
        global_groups=global_groups(config.views.crops or []),
        labelled=count_labels(train),
    )
    with seeded(derive(config.seed, "method")):
        method = create_method(backbone, info, config.method)
    method.localization = build_localization(run, phase, backbone)
    if run.is_new and method.starts_from_features:
        network = "the untrained network"
        if run.spec.init is not None:
            network = f"the weights of '{config.init}'"
        label = f"features before training, by {network}"
        method.prepare(feature_extractor(run)(backbone, train, label=label))
    return method


def build_knn(run: PretrainRun, images: Stores) -> KNNAccuracy | None:
    """Return the evaluator of kNN accuracy, if the run has what it needs."""
    knn_every = run.config.knn_every
    if not knn_every:
        return None
    held_out = images.val or images.test
    if held_out is None or not count_labels(images.train):
        log.info("no kNN accuracy, it needs labels and a val or test split")
        return None
    return KNNAccuracy(feature_extractor(run), images.train, held_out, knn_every)


def build_loop(run: PretrainRun, images: Stores, method: Method, knn: KNNAccuracy | None) -> Loop:
    """Build the training loop."""
    config = run.config
    (phase,) = run.phases
    train = images.train
    evaluators: list[Evaluator] = []
    if knn is not None:
        evaluators.append(knn)
    if config.train.monitor_every:  # it measures the same few training images every time
        order = numpy_rng(config.seed, "monitor").permutation(len(train))
        numbers = np.sort(order[:MONITORED])
        batches = list(eval_batches(run, train, phase.size, EVAL_BATCH, images=numbers))
        features = functools.partial(batch_features, run, batches=batches, batch_size=EVAL_BATCH)
        every = config.train.monitor_every
        evaluators.append(CollapseMonitor(method, features, numbers, run.folder.metrics, every))
    transform = MultiCropTransform(train, config.views, run.mean, run.std, config.seed)
    final_images = 0
    if config.trains_classifier:
        final_images = len(images.tested)
    plan = plan_phase(run, phase, len(train), transform, evaluators, final_images=final_images)
    return Loop(run, method, plan)


def measure_before(run: PretrainRun, loop: Loop, knn: KNNAccuracy | None) -> None:
    """Measure kNN accuracy before the first step of a new run."""
    if run.is_new and knn is not None:
        run.folder.add_start_scores({"start_knn": knn(loop.exported)["knn"]})


def count_labels(train: ImageStore) -> int | None:
    """Return how many training images have a label; None if there are no labels."""
    if train.labels is None:
        return None
    return int((train.labels >= 0).sum())


def feature_extractor(run: PretrainRun) -> Extract:
    """Return the function that computes the features of images, for evaluators."""
    size = run.phases[0].size
    return functools.partial(image_features, run, size=size, batch_size=EVAL_BATCH)


# ---------------------------------------------------------------------- the end
def write_outputs(run: PretrainRun, images: Stores, loop: Loop) -> dict[str, Any]:
    """Write the backbone, the classifier if there is one, and the pictures; return the result."""
    config = run.config
    epochs = loop.position.epoch  # finished ones
    exported = loop.exported
    accuracy = {}
    entries = None
    if config.trains_classifier:
        batches = eval_batches(run, images.tested, run.phases[0].size, EVAL_BATCH)
        predictions = evaluate.predict(exported, batches, run.device)
        accuracy = classifier_result(run, images, predictions)
        accuracy["labelled_size"] = count_labels(images.train)
        entries = {"classes": images.train.classes}
    title = f"pretrain by {config.method.name}"
    export(run, images, loop, backbone_state(exported), entries, title)
    last = None
    if run.folder.leader:
        last = run.folder.metrics()[-1]
    last = distributed.broadcast(last)
    log.info(
        f"{config.out}: loss {last['loss']:.4f} after {counted(epochs, 'epoch')}, "
        "backbone.safetensors written"
    )
    scores = {**run.folder.start_scores, **last}
    knn = {name: scores[name] for name in ("start_knn", "knn") if name in scores}
    if "start_knn" in knn:
        log.info(
            f"kNN accuracy: {knn['start_knn']:.1f} before the first step, "
            f"{knn['knn']:.1f} at the end"
        )
    return {
        **accuracy,
        "loss": last["loss"],
        **knn,
        "epochs": epochs,
        **common_result(run, images),
        **parameter_counts(exported),
    }
