"""Stage 2: from labels, and a backbone or none, to a classifier."""

import logging

import torch

from idmm import distributed
from idmm.config import FinetuneConfig, parsing
from idmm.data.image_store import ImageStore
from idmm.data.registry import spec_of
from idmm.errors import RunError
from idmm.evaluation.evaluators import Accuracy
from idmm.evaluation.monitor import FLOORS, spread
from idmm.evaluation.network import extract_features
from idmm.methods.finetune import balanced_weights
from idmm.models.weights import Checkpoint
from idmm.stages import Phase
from idmm.stages.assemble import Assembly, LoadedSplits, eval_batches, load_splits, resolve, say_length, session
from idmm.stages.folds import by_folds
from idmm.stages.handover import check_classes, fit_classifier, norm_images, set_batch_norms
from idmm.stages.results import classifier_result, ending, export, length_result, measure_baseline, take_best
from idmm.stages.start import structure
from idmm.training.engine import Loop
from idmm.training.session import Session

log = logging.getLogger("idmm")


@by_folds
def finetune(config: FinetuneConfig | dict | str) -> dict:
    """Fine-tunes on labels, one size after the other, and writes the classifier and its accuracy to ``config.out``.

    Args:
        config: A FinetuneConfig, a mapping of its keys ('idmm finetune --help'), or the name of a YAML file or recipe.

    Returns:
        What ``result.json`` holds; ``top1``, ``top5`` and ``mean_per_class`` (percent, on the test split, of the last
        epoch or, with ``train.keep`` best, of ``kept_epoch`` of the last stage); ``top1_interval`` (Wilson's, 95 %);
        ``largest_class`` (percent: what naming the largest class every time would score); ``baseline_top1`` (percent,
        see :func:`idmm.stages.results.measure_baseline`); ``num_classes``, ``train_size``,
        ``test_size``, ``test_groups`` where images come in groups, ``seed``, ``seconds`` over all resumes; where
        ``train.minutes`` is given ``minutes``, the ``epochs`` of all stages and ``whole_epochs``; ``precision`` (what
        training and evaluation ran in); ``excluded`` where ``data.exclude`` left images out; ``start_top1`` (percent:
        top-1 on the test split before the first step) where the classifier started from a fit on features
        (``train.classifier_init``). ``per_class.csv`` and ``confusion.png`` show it class by class. Of ``data.folds``
        what :func:`idmm.stages.folds.pooled` returns.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not go on (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    parts, notes = resolve(parsing.build(FinetuneConfig, config))
    with session(parts, notes) as run:
        if run.folder.finished:
            return run.folder.result()
        splits = load_splits(parts, run.folder)
        begun = run.folder.state is not None
        measure_baseline(run, parts, splits)
        model = None if begun else _first_model(run, parts, splits)
        say_length(run, parts, len(splits.train))
        loop, held, splits = _train(run, parts, splits, model)
        result = _result(run, parts, splits, loop, held)
        run.folder.finish(result)
        return result


def _train(run: Session, parts: Assembly, splits: LoadedSplits, model) -> tuple[Loop, Accuracy, LoadedSplits]:
    """Trains all phases that are left, the first one from ``model`` (None: as ``last/`` has it); returns the last
    one's loop, evaluator and images."""
    first, classes = 1 if run.folder.state is None else run.folder.state["stage"], len(splits.train.classes)
    loop = held = None
    for phase in parts.phases:
        if phase.number < first:  # done before the run was taken up again
            continue
        if model is None:
            model = parts.backbone(phase, classes)
        if loop is not None:
            _carry_over(loop, model, parts, phase)
            loop = held = None
            run.accelerator.free_memory()  # else it holds the last phase's model and optimizer to the end
        splits = splits.at(phase.size)
        held = _accuracy(run, splits.val or splits.test, phase, parts)
        loop, model = _loop(run, parts, splits, phase, model, held), None
        loop.fit()
    return loop, held, splits


def _result(run: Session, parts: Assembly, splits: LoadedSplits, loop: Loop, held: Accuracy) -> dict:
    """Evaluates and exports the classifier; returns what ``result.json`` holds."""
    kept = take_best(loop, "top-1")
    found, phase, classes = held.latest, parts.phases[-1], len(splits.train.classes)
    # what was evaluated between epochs was val, and nothing was where the run ended before
    if splits.val is not None or found is None:
        found = _accuracy(run, splits.test, phase, parts).predict(loop.averaged)
    export(run, loop, parts, splits, splits.train.classes)
    start = run.folder.remembered("start") or {}
    return {
        **classifier_result(run, parts, splits, found),
        **start,
        **kept,
        **length_result(run, parts, splits),
        "num_classes": classes,
        "train_size": len(splits.train),
        "test_size": len(splits.test),
        "seed": parts.config.seed,
        "seconds": round(run.seconds, 1),
        "precision": run.precision,
        **splits.remarks,
    }


def _first_model(run: Session, parts: Assembly, splits: LoadedSplits):
    """Builds what a new run starts from: the weights of ``init``, if there are any, with the classifier that is
    wanted."""
    phase = parts.phases[0]
    model = parts.backbone(phase, len(splits.train.classes))
    if report := parts.spec.load(model):
        log.info("%s", report)
    structure(run, parts, phase, model, splits.at(phase.size).train)
    if parts.config.train.classifier_init == "features":
        _start_from_features(run, parts, phase, model, splits.at(phase.size))
    return model


def _loop(run: Session, parts: Assembly, splits: LoadedSplits, phase: Phase, model, held: Accuracy) -> Loop:
    """Returns the training of a phase, evaluated by ``held`` in between."""
    train, classes = parts.config.train, len(splits.train.classes)
    method = parts.method(phase, model, len(splits.train), classes)
    if train.class_weights == "balanced":
        method.class_weight = balanced_weights(splits.train.labels, classes)
    after = ending(parts, splits) if phase is parts.phases[-1] else (0, 0.0)
    plan = parts.plan(phase, splits.train, [held], after)
    if train.keep == "best" and phase is parts.phases[-1]:
        plan.keep = "top1"
    return Loop(run, method, plan)


def _carry_over(before: Loop, model, parts: Assembly, phase: Phase) -> None:
    """Loads the weights of the phase before."""
    last = parts.phases[phase.number - 2]
    made = Checkpoint(before.averaged.state_dict(), f"weights of stage {last.number}", kwargs={"img_size": last.size})
    log.info("%s", made.load_into(model, drop_classifier=False))


def _start_from_features(run: Session, parts: Assembly, phase: Phase, model, splits: LoadedSplits) -> None:
    """Fits the classifier of a new run to the training images' features, and keeps what it scores on the test split."""
    train, config = splits.train, parts.config
    check_classes(train.labels, train.classes)
    label = "features for the classifier, of train"
    batches = eval_batches(run, parts, train, phase.size, phase.batch_size, label=label)
    less = "a smaller --train.batch_size, in a new --out"
    with distributed.enough_memory(RunError(f"out of memory with {phase.batch_size} images at a time; try {less}")):
        model.to(run.device)
        if not config.model.freeze:  # a frozen backbone stays in evaluation mode
            order = norm_images(len(train), phase.batch_size, config.seed)
            seen = eval_batches(run, parts, train, phase.size, phase.batch_size, images=order)
            set_batch_norms(model, seen, run.device, run.autocast)
        features = extract_features(model, batches, run.device, run.autocast)  # [N, d]
        if not bool(torch.isfinite(features).all()):
            source = "" if parts.spec.init is None else f"; the run that wrote '{config.init}' has diverged"
            raise RunError(f"the images' features are not finite{source}", shared=True)
        if (alike := spread(features)) < FLOORS["feature_std"] and not config.model.freeze:
            # the weights that tell them apart are so large that the first steps would tear the backbone's apart
            what = f"the features of the training images hardly differ (feature_std {alike:.2g})"
            log.warning("train.classifier_init: %s, so the classifier starts from fresh weights", what)
            return
        fit_classifier(model, features.numpy(), train.labels, config)
        found = _accuracy(run, splits.test, phase, parts).predict(model, "accuracy before the first step, on test")
    top1 = found.scores()["top1"]
    run.folder.remember("start", {"start_top1": top1})
    log.info("before the first step: top-1 %.2f on %d test images", top1, len(splits.test))


def _accuracy(run: Session, store: ImageStore, phase: Phase, parts: Assembly) -> Accuracy:
    """Returns what evaluates the classifier of a phase on a split."""

    def batches(label: str | None):
        return eval_batches(run, parts, store, phase.size, phase.batch_size, label=label)

    # the mean over classes where the dataset's literature reports it
    metrics = ("top1", "top5", spec_of(parts.config.data.name).metric)
    return Accuracy(batches, len(store), parts.config.train.eval_every, run.device, run.autocast, metrics)
