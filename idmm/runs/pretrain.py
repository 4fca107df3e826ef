"""Stage 1: from images to a backbone."""

import functools

import numpy as np
import torch

from idmm import distributed
from idmm.config import PretrainConfig, global_groups, parsing
from idmm.data.image_store import ImageStore
from idmm.data.store import Stores
from idmm.data.views import MultiCropTransform
from idmm.evaluation import evaluate
from idmm.evaluation.evaluators import Extract, KNNAccuracy
from idmm.evaluation.monitor import CollapseMonitor
from idmm.methods import Method, RunInfo, create_method
from idmm.models.build import backbone_state, parameter_counts
from idmm.progress import log
from idmm.runs import common
from idmm.runs.first_weights import start_weights
from idmm.runs.outputs import classifier_result, common_result, export
from idmm.runs.resolve import run_stage
from idmm.seeding import derive, numpy_rng, seeded
from idmm.text import counted
from idmm.training.loop import Loop
from idmm.training.run_context import RunContext
from idmm.training.stage import RunSetup

EVAL_BATCH = 256  # images at a time
MONITORED = 512  # training images at most that the collapse monitor uses, the same every time


def pretrain(config: PretrainConfig | dict | str) -> dict:
    """Pretrain a backbone by ``config.method.name`` and write it to ``config.out``.

    Args:
        config: A PretrainConfig, a mapping of its keys ('idmm pretrain --help'), or the name of a
            YAML file or recipe.

    Returns:
        The content of ``result.json``: ``loss`` of the last epoch, ``start_knn`` and ``knn`` if
        measured (kNN accuracy in percent before the first step and after the last), ``train_size``,
        ``epochs``, ``minutes`` if given, ``seed``, ``seconds``, and the ``precision`` that was used
        (fp32, bf16 or fp16). With ``method.label_weight`` also the accuracies of
        :func:`idmm.finetune` on the test split, and ``labelled_size``, the training images whose
        labels were used. With ``data.folds`` the return value of :func:`idmm.runs.folds.pooled`.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or another stop signal. The state is saved.
    """
    return run_stage(parsing.build(PretrainConfig, config))


def run_one(setup: RunSetup) -> dict:
    """Pretrain by a resolved config, on one split of the images. Otherwise as :func:`pretrain`."""
    with common.open_run(setup) as run:
        if run.folder.finished:
            return run.folder.result()
        listing = setup.stage.list_images()
        setup, images = common.store_run_images(setup, listing, run.folder)
        if setup.config.trains_classifier:
            common.measure_baseline(run, setup, images)
        backbone = build_model(run, setup, images)
        method = build_method(run, setup, images, backbone)
        loop = build_loop(run, setup, images, method)
        loop.fit()
        result = write_outputs(run, setup, images, loop)
        run.folder.finish(result)
        return result


# ---------------------------------------------------------------------- building
def build_model(run: RunContext, setup: RunSetup, images: Stores) -> torch.nn.Module:
    """Build the backbone of a run. A new run loads the weights of ``init`` or gives it a structured
    start."""
    config, (phase,) = setup.config, setup.phases
    if config.trains_classifier:
        classes = len(images.train.classes)
    else:
        classes = 0
    backbone = common.build_backbone(setup, phase, classes)
    if run.is_new:  # else the loop loads its state
        start_weights(run, setup, phase, backbone, images.train)
    if config.trains_classifier:
        line = "method.label_weight: %d of %d training images are used with their labels"
        log.info(line, _count_labels(images.train), len(images.train))
    return backbone


def build_method(
    run: RunContext, setup: RunSetup, images: Stores, backbone: torch.nn.Module
) -> Method:
    """Build the method on the backbone. In a new run it may start from the features of all training
    images."""
    config, (phase,), count = setup.config, setup.phases, len(images.train)
    info = RunInfo(
        images=count,
        batch_size=min(phase.batch_size, count),
        epochs=phase.epochs,
        steps=phase.steps(count),
        classes=None if images.train.classes is None else len(images.train.classes),
        global_groups=global_groups(config.views.crops),
        labelled=_count_labels(images.train),
    )
    with seeded(derive(config.seed, "method")):
        method = create_method(backbone, info, config.method)
    method.localization = common.build_localization(setup, phase, backbone)
    if run.is_new and method.starts_from_features:
        if setup.spec.init is None:
            network = "the untrained network"
        else:
            network = f"the weights of '{config.init}'"
        label = f"features before training, by {network}"
        method.prepare(_feature_extractor(run, setup)(backbone, images.train, label=label))
    return method


def build_loop(run: RunContext, setup: RunSetup, images: Stores, method: Method) -> Loop:
    """Build the training loop, and measure kNN accuracy before the first step of a new run."""
    config, (phase,), extract = setup.config, setup.phases, _feature_extractor(run, setup)
    evaluators = []
    knn = None
    knn_every = setup.stage.knn_every
    held_out = images.val or images.test
    if knn_every and _count_labels(images.train) and held_out is not None:
        knn = KNNAccuracy(extract, images.train, held_out, knn_every)
        evaluators.append(knn)
    elif knn_every:
        log.info("no kNN accuracy, it needs labels and a val or test split")
    if config.train.monitor_every:  # it measures the same few training images every time
        numbers = np.sort(
            numpy_rng(config.seed, "monitor").permutation(len(images.train))[:MONITORED]
        )
        batches = list(
            common.eval_batches(run, setup, images.train, phase.size, EVAL_BATCH, images=numbers)
        )
        features = functools.partial(
            common.batch_features, run, batches=batches, batch_size=EVAL_BATCH
        )
        every = config.train.monitor_every
        evaluators.append(CollapseMonitor(method, features, numbers, run.folder.metrics, every))
    transform = MultiCropTransform(
        images.train, config.views, setup.spec.mean, setup.spec.std, config.seed
    )
    loop = Loop(run, method, common.plan_phase(setup, phase, images, transform, evaluators))
    if run.is_new and knn is not None:
        run.folder.add_start_scores({"start_knn": knn(loop.exported)["knn"]})
    return loop


def _count_labels(train: ImageStore) -> int | None:
    """Return how many training images have a label; None if there are no labels."""
    if train.labels is None:
        return None
    return int((train.labels >= 0).sum())


def _feature_extractor(run: RunContext, setup: RunSetup) -> Extract:
    """Return the function that computes the features of images, for evaluators."""
    return functools.partial(
        common.image_features, run, setup, size=setup.phases[0].size, batch_size=EVAL_BATCH
    )


# ---------------------------------------------------------------------- the end
def write_outputs(run: RunContext, setup: RunSetup, images: Stores, loop: Loop) -> dict:
    """Write the backbone, the classifier if there is one, and the pictures; return the result."""
    # finished ones
    config = setup.config
    epochs = loop.position.epoch
    accuracy = {}
    entries = None
    if config.trains_classifier:
        batches = common.eval_batches(run, setup, images.test, setup.phases[0].size, EVAL_BATCH)
        predictions = evaluate.predict(loop.exported, batches, run.device)
        accuracy = {
            **classifier_result(run, setup, images, predictions),
            "labelled_size": _count_labels(images.train),
        }
        entries = {"classes": images.train.classes}
    export(run, loop, setup, images, backbone_state(loop.exported), entries)
    last = distributed.broadcast(run.folder.metrics()[-1] if run.folder.leader else None)
    log.info(
        "%s: loss %.4f after %s, backbone.safetensors written",
        config.out,
        last["loss"],
        counted(epochs, "epoch"),
    )
    scores = {**run.folder.start_scores, **last}
    if "start_knn" in scores:
        log.info(
            "kNN accuracy: %.1f before the first step, %.1f at the end",
            scores["start_knn"],
            scores["knn"],
        )
    return {
        **accuracy,
        "loss": last["loss"],
        **{name: scores[name] for name in ("start_knn", "knn") if name in scores},
        "epochs": epochs,
        **common_result(run, setup, images),
        **parameter_counts(loop.exported),
    }
