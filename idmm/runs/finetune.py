"""Stage 2: from labels, and a backbone or none, to a classifier."""

import gc

from torch import nn

from idmm.config import FinetuneConfig, parsing
from idmm.data.store import Stores
from idmm.data.views import TrainTransform
from idmm.evaluation.evaluators import Accuracy
from idmm.methods.finetune import Finetune, balanced_weights
from idmm.models.build import backbone_state, parameter_counts
from idmm.models.weights import Checkpoint
from idmm.progress import log
from idmm.runs import common
from idmm.runs.first_weights import init_classifier, start_weights
from idmm.runs.outputs import classifier_result, common_result, export, load_best, write_split
from idmm.runs.resolve import run_stage
from idmm.seeding import derive
from idmm.training.loop import Loop
from idmm.training.run_context import RunContext
from idmm.training.stage import Phase, RunSetup


def finetune(config: FinetuneConfig | dict | str) -> dict:
    """Fine-tune on labels, one size after the other, and write the classifier and its accuracy to
    ``config.out``.

    Args:
        config: A FinetuneConfig, a mapping of its keys ('idmm finetune --help'), or the name of a
            YAML file or recipe.

    Returns:
        The content of ``result.json``. Accuracies are in percent, on the test split, of the last
        epoch or, with ``train.keep`` best, of ``kept_epoch`` of the last stage: ``top1``, ``top5``,
        ``mean_per_class``, ``top1_interval`` (95 %, over groups if images come in groups),
        ``largest_class`` (of always answering the largest class), ``baseline_top1`` and
        ``baseline_train_size`` (see :func:`idmm.runs.common.measure_baseline`). ``start_top1`` is
        top-1 before the first step, if the classifier started from a fit on features. Also
        ``num_classes``, ``train_size``, ``test_size``, ``test_groups`` if images come in groups,
        ``seed``, ``seconds`` over all resumes, ``precision`` of training (accuracies are those of
        fp32), ``params`` and, without the classifier, ``backbone_params``, ``excluded`` if
        ``data.exclude`` left images out; with ``train.minutes`` ``minutes``, the ``epochs`` of all
        stages and ``whole_epochs``. With ``data.folds`` the return value of
        :func:`idmm.runs.folds.pooled`.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or another stop signal. The state is saved.
    """
    return run_stage(parsing.build(FinetuneConfig, config))


def run_one(setup: RunSetup) -> dict:
    """Fine-tune by a resolved config, on one split of the images. Otherwise as :func:`finetune`."""
    with common.open_run(setup) as run:
        if run.folder.finished:
            return run.folder.result()
        listing = setup.stage.list_images()
        setup, images = common.store_run_images(setup, listing, run.folder)
        write_split(run, setup, listing)
        common.measure_baseline(run, setup, images)
        loop = None
        for phase in setup.phases[run.first_phase - 1 :]:  # from that of the checkpoint on
            images = images.at(phase.size)  # val and test
            model = build_model(run, setup, phase, images, loop)
            loop = None  # frees the memory of the last phase's model and optimizer
            if run.accelerator is not None:
                run.accelerator.free_memory()
                gc.collect()  # accelerate collects before it lets go of its models
            accuracy = common.build_accuracy(run, setup, phase, images.val or images.test)
            loop = build_loop(run, setup, phase, images, model, accuracy)
            loop.fit()
        result = write_outputs(run, setup, images, loop, accuracy)
        run.folder.finish(result)
        return result


def build_model(
    run: RunContext, setup: RunSetup, phase: Phase, images: Stores, loop_before: Loop | None
) -> nn.Module:
    """Build the model of a phase. It goes on with the weights of the phase before, trained by
    ``loop_before``.

    The first phase of a new run loads the weights of ``init`` and fits the classifier.
    """
    model = common.build_backbone(setup, phase, len(images.train.classes))
    if loop_before is not None:
        state = {name: tensor.cpu() for name, tensor in loop_before.exported.state_dict().items()}
        weights = Checkpoint(state, f"weights of stage {phase.number - 1}")
        log.info("%s", weights.load_into(model, drop_classifier=False))
    elif run.is_new:  # else the loop loads its state
        start_weights(run, setup, phase, model, images.train)
        if setup.config.train.classifier_init == "features":
            init_classifier(run, setup, phase, model, images)
    return model


def build_loop(
    run: RunContext,
    setup: RunSetup,
    phase: Phase,
    images: Stores,
    model: nn.Module,
    accuracy: Accuracy,
) -> Loop:
    """Build the training loop of a phase."""
    config = setup.config
    train = images.train
    method = Finetune(model, config.augment, config.model.freeze)
    method.localization = common.build_localization(setup, phase, model)
    if config.train.class_weights == "balanced":
        method.class_weight = balanced_weights(train.labels, len(train.classes))
    key = derive(config.seed, "stage", phase.number)
    transform = TrainTransform(
        train, config.augment, phase.size, setup.spec.mean, setup.spec.std, key
    )
    return Loop(run, method, common.plan_phase(setup, phase, images, transform, [accuracy], "top1"))


def write_outputs(
    run: RunContext, setup: RunSetup, images: Stores, loop: Loop, accuracy: Accuracy
) -> dict:
    """Evaluate and write the classifier; return the result."""
    best = load_best(loop, "top-1")
    predictions = accuracy.latest
    # evaluated on val, or by a process that was killed
    if images.val is not None or predictions is None:
        predictions = common.build_accuracy(run, setup, setup.phases[-1], images.test).predict(
            loop.exported
        )
    export(
        run, loop, setup, images, backbone_state(loop.exported), {"classes": images.train.classes}
    )
    result = {
        **classifier_result(run, setup, images, predictions),
        **best,
        **common_result(run, setup, images),
    }
    result |= parameter_counts(loop.exported)
    if (start := run.folder.start_scores.get("start_top1")) is None:
        return result
    if result["top1"] < start:
        line = "top-1 fell from %.1f before the first step to %.1f. More epochs, a smaller --train.lr or "
        line += "--model.drop_path 0 may help. idmm probe evaluates the features as they are"
        log.warning(line, start, result["top1"])
    return {**result, "start_top1": start}
