"""Stage 2: from labels, and a backbone or none, to a classifier."""

import functools
import gc
from typing import Any

from idmm.config import FinetuneConfig
from idmm.config.phases import Phase
from idmm.data.store import Stores
from idmm.data.views import TrainTransform
from idmm.evaluation.evaluate import LinearHead, Predictions
from idmm.evaluation.evaluators import Accuracy
from idmm.methods.finetune import Finetune, balanced_weights
from idmm.models.base import Backbone
from idmm.models.build import backbone_state, parameter_counts
from idmm.models.weights import Checkpoint
from idmm.progress import log
from idmm.runs.first_weights import init_classifier, start_weights
from idmm.runs.images import list_run_images
from idmm.runs.measure import build_accuracy, measure_baseline
from idmm.runs.networks import build_backbone, build_localization, try_sizes, try_start
from idmm.runs.outputs import (
    classifier_result,
    common_result,
    export,
    load_best,
    save_weights,
    write_split,
)
from idmm.runs.plan import plan_phase
from idmm.seeding import derive
from idmm.training.loop import Loop
from idmm.training.run import Run

FinetuneRun = Run[FinetuneConfig]


def train_classifier(run: FinetuneRun, head: LinearHead | None = None) -> dict[str, Any]:
    """Fine-tune on one split of the images. Return the content of ``result.json``.

    ``head``: The classifier to start from, on the features of the new run. None: one is fitted, or
    random.
    """
    list_images = functools.partial(list_run_images, run.config)
    try_sizes(run, functools.partial(try_start, run))
    with run.opened():
        if run.folder.finished:
            return run.finished_result(list_images)
        listing = list_images()
        images = run.store(listing, run.folder)
        write_split(run, listing)
        measure_baseline(run, images)
        if run.phases[0].epochs == 0:
            result = fit_classifier_only(run, images, head)
        else:
            result = train_phases(run, images, head)
        run.folder.write_result(result)
        return result


def fit_classifier_only(
    run: FinetuneRun, images: Stores, head: LinearHead | None
) -> dict[str, Any]:
    """Fit the classifier to the features of the backbone, and train nothing."""
    (phase,) = run.phases
    run.precision = "fp32"
    run.folder.take_back(1, 1)  # metrics.jsonl has no epoch
    model = build_backbone(run, phase, len(images.train.class_names)).eval()
    start_weights(run, phase, model, images.train)
    predictions = init_classifier(run, phase, model, images, head)
    assert predictions is not None  # the backbone is frozen
    save_weights(run, images, model, backbone_state(model), {"classes": images.train.class_names})
    return {
        **classifier_result(run, images, predictions),
        **common_result(run, images),
        **parameter_counts(model),
        **run.folder.start_scores,
    }


def train_phases(run: FinetuneRun, images: Stores, head: LinearHead | None) -> dict[str, Any]:
    """Train at one image size after the other, from that of the checkpoint on."""
    loop: Loop | None = None
    for phase in run.phases[run.first_phase - 1 :]:
        images = images.at(phase.size)  # val and test
        model = build_network(run, phase, images, loop, head)
        loop = None  # frees the memory of the last phase's model and optimizer
        if run.accelerator is not None:
            run.accelerator.free_memory()
            gc.collect()  # accelerate collects before it lets go of its models
        accuracy = build_accuracy(run, phase, images.val or images.tested)
        loop = build_loop(run, phase, images, model, accuracy)
        loop.start()
        loop.fit()
    assert loop is not None  # there is a phase at least
    return write_outputs(run, images, loop, accuracy)


def build_network(
    run: FinetuneRun,
    phase: Phase,
    images: Stores,
    loop_before: Loop | None,
    head: LinearHead | None,
) -> Backbone:
    """Build the model of a phase. It continues with the weights that ``loop_before`` trained.

    The first phase of a new run loads the weights of ``init`` and fits the classifier.
    """
    model = build_backbone(run, phase, len(images.train.class_names))
    if loop_before is not None:
        state = {}
        for name, tensor in loop_before.exported.state_dict().items():
            state[name] = tensor.cpu()
        weights = Checkpoint(state, f"weights of stage {phase.number - 1}")
        log.info(str(weights.load_into(model, drop_classifier=False)))
    elif run.is_new:  # else the loop loads its state
        start_weights(run, phase, model, images.train)
        if run.config.train.classifier_init == "features":
            init_classifier(run, phase, model, images, head)
    return model


def build_loop(
    run: FinetuneRun, phase: Phase, images: Stores, model: Backbone, accuracy: Accuracy
) -> Loop:
    """Build the training loop of a phase."""
    config = run.config
    train = images.train
    method = Finetune(model, config.augment, config.model.freeze)
    method.localization = build_localization(run, phase, model)
    if config.train.class_weights == "balanced":
        method.class_weight = balanced_weights(train.known_labels, len(train.class_names))
    key = derive(config.seed, "stage", phase.number)
    transform = TrainTransform(train, config.augment, phase.size, run.mean, run.std, key)
    keep = "top1" if config.train.keep == "best" else None
    # without val the evaluation after the last step is the one that is reported
    final_images = 0 if images.val is None else len(images.tested)
    plan = plan_phase(run, phase, len(train), transform, [accuracy], keep, final_images)
    return Loop(run, method, plan)


def write_outputs(
    run: FinetuneRun, images: Stores, loop: Loop, accuracy: Accuracy
) -> dict[str, Any]:
    """Evaluate and write the classifier; return the result."""
    best = load_best(loop, "top-1")
    exported = loop.exported
    predictions = reported_predictions(run, images, exported, accuracy)
    entries = {"classes": images.train.class_names}
    export(run, images, loop, backbone_state(exported), entries, "finetune")
    result = {
        **classifier_result(run, images, predictions),
        **best,
        **common_result(run, images),
        **parameter_counts(exported),
    }
    start = run.folder.start_scores.get("start_top1")
    if start is None:
        return result
    if result["top1"] < start:
        log.warning(
            f"top-1 fell from {start:.1f} before the first step to {result['top1']:.1f}. More "
            "epochs, a smaller --train.lr or --model.drop_path 0 may help. idmm probe evaluates "
            "the features as they are"
        )
    return {**result, "start_top1": start}


def reported_predictions(
    run: FinetuneRun, images: Stores, exported: Backbone, accuracy: Accuracy
) -> Predictions:
    """Return the predictions for the test images."""
    latest = accuracy.latest
    # evaluated on val, or by a process that was killed
    if images.val is not None or latest is None:
        return build_accuracy(run, run.phases[-1], images.tested).predict(exported)
    return latest
