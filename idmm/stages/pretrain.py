"""Stage 1: from images alone to a backbone."""

import functools
import logging

import numpy as np
import torch

from idmm import distributed
from idmm.config import PretrainConfig, parsing
from idmm.config.train import MONITORED
from idmm.data.image_store import ImageStore
from idmm.data.split import counted
from idmm.errors import RunError, UserError
from idmm.evaluation import evaluate
from idmm.evaluation.evaluators import Evaluator, KNNAccuracy
from idmm.evaluation.monitor import CollapseMonitor
from idmm.evaluation.network import extract_features
from idmm.methods import Method
from idmm.seeding import permutation
from idmm.stages import knn_every
from idmm.stages.assemble import Assembly, LoadedSplits, eval_batches, load_splits, resolve, say_length, session
from idmm.stages.folds import by_folds
from idmm.stages.results import (
    classifier_result,
    ending,
    export,
    length_result,
    measure_baseline,
    write_instances,
)
from idmm.stages.start import structure
from idmm.training.engine import Loop
from idmm.training.session import Session

log = logging.getLogger("idmm")
EVAL_BATCH = 256


@by_folds
def pretrain(config: PretrainConfig | dict | str) -> dict:
    """Pretrains a backbone by ``config.method.name`` and writes it to ``config.out``.

    Args:
        config: A PretrainConfig, a mapping of its keys ('idmm pretrain --help'), or the name of a YAML file or recipe.

    Returns:
        What ``result.json`` holds; ``loss`` of the last epoch, ``start_knn`` and ``knn`` (kNN accuracy in percent
        before the first step and after the last, where that is measured), ``train_size``, ``epochs``, ``minutes`` where
        given, ``seed``, ``seconds``, ``precision`` (fp32, bf16 or fp16: what was used). With ``method.label_weight``
        also what a result of :func:`idmm.finetune` says of accuracy, on the test split, and ``labelled_size``, the
        training images whose labels were used; of ``data.folds`` then what :func:`idmm.stages.folds.pooled` returns.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not go on (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    parts, notes = resolve(parsing.build(PretrainConfig, config))
    config, spec, (phase,) = parts.config, parts.spec, parts.phases
    with session(parts, notes) as run:
        if run.folder.finished:
            return run.folder.result()

        splits = load_splits(parts, run.folder)
        _check_count(parts, len(splits.train))
        classes = None if splits.train.classes is None else len(splits.train.classes)
        backbone, begun = parts.backbone(phase, classes), run.folder.state is not None
        if spec.init is not None and not begun:
            log.info("%s", spec.load(backbone))
        if not begun:
            structure(run, parts, phase, backbone, splits.train)
        labelled = _labelled(splits.train)
        if config.learns_labels:
            line = "method.label_weight: %d of %d training images are used with their labels"
            log.info(line, labelled, len(splits.train))
            measure_baseline(run, parts, splits)

        @functools.cache
        def features() -> torch.Tensor:
            whose = "the untrained network" if spec.init is None else f"the weights of '{config.init}'"
            return _features(run, parts, backbone, splits.train, label=f"features before training, by {whose}")

        say_length(run, parts, len(splits.train))
        method = parts.method(phase, backbone, len(splits.train), classes, labelled)
        if not begun:
            method.prepare(features)

        knn = _knn(run, parts, splits)
        evaluators = [*([] if knn is None else [knn]), *_monitor(run, parts, method, splits)]
        loop = Loop(run, method, parts.plan(phase, splits.train, evaluators, ending(parts, splits)))
        if knn is not None and not begun:
            run.folder.remember("start", {"start_knn": knn(loop.averaged)["knn"]})
        loop.fit()

        result = _result(run, parts, splits, loop)
        run.folder.finish(result)
        return result


def _result(run: Session, parts: Assembly, splits: LoadedSplits, loop: Loop) -> dict:
    """Exports what was learned; returns what ``result.json`` holds."""
    config, epochs = parts.config, loop.position.epoch
    tested = _tested(run, parts, splits, loop) if config.learns_labels else {}
    export(run, loop, parts, splits, splits.train.classes if tested else None)
    write_instances(run, loop.method, getattr(config.method, "classifier", None), splits.train)
    last, start = run.folder.last_metrics(), run.folder.remembered("start") or {}
    after = counted(epochs, "epoch")
    log.info("%s: loss %.4f after %s; backbone.safetensors written", config.out, last["loss"], after)
    if start:
        log.info("kNN accuracy: %.1f before the first step, %.1f at the end", start["start_knn"], last["knn"])
    return {
        **tested,
        "loss": last["loss"],
        **start,
        **{name: last[name] for name in ("knn",) if name in last},
        "train_size": len(splits.train),
        "epochs": epochs,
        **length_result(run, parts, splits),
        "seed": config.seed,
        "seconds": round(run.seconds, 1),
        "precision": run.precision,
        **splits.remarks,
    }


def _labelled(train: ImageStore) -> int | None:
    """Returns how many training images have a label; None where there are no labels at all."""
    return None if train.labels is None else int((train.labels >= 0).sum())


def _tested(run: Session, parts: Assembly, splits: LoadedSplits, loop: Loop) -> dict:
    """Returns what the result says of the classifier's accuracy on the test split."""
    held = eval_batches(run, parts, splits.test, parts.phases[0].size, EVAL_BATCH)
    found = evaluate.predict(loop.averaged, held, run.device, run.autocast)
    counts = {"num_classes": len(splits.train.classes), "labelled_size": _labelled(splits.train)}
    return {**classifier_result(run, parts, splits, found), **counts, "test_size": len(splits.test)}


def _check_count(parts: Assembly, images: int) -> None:
    """Raises UserError where there are too few images."""
    if images < 2:
        raise UserError("data.root: 1 image to train on; telling images apart needs at least 2")
    if parts.phases[0].batch_size > images and (small := parts.stage.faults(parts.config, images)):
        raise UserError(*small)


def _features(run: Session, parts: Assembly, backbone, store, images=None, label: str | None = None) -> torch.Tensor:
    """Features of a split's images, all or those of the given numbers, [N, d]; with a ``label`` it shows how far."""
    batches = eval_batches(run, parts, store, parts.phases[0].size, EVAL_BATCH, images=images, label=label)
    less = "a smaller --views.size, a smaller model or --train.device cpu, in a new --out"
    with distributed.enough_memory(RunError(f"out of memory with {EVAL_BATCH} images at a time; try {less}")):
        features = extract_features(backbone.to(run.device), batches, run.device, run.autocast)
    if not bool(torch.isfinite(features).all()):
        raise RunError(
            f"the images' features are not finite{run.folder.kept}: lower --train.lr, "
            "set --train.clip_grad 1 or --train.precision fp32, in a new --out",
            shared=True,
        )
    return features


def _monitor(run: Session, parts: Assembly, method: Method, splits: LoadedSplits) -> list[Evaluator]:
    """Looks for collapse, on the same few training images every time; nothing where it is off."""
    train = parts.config.train
    if not train.monitor_every:
        return []
    count = min(MONITORED, len(splits.train))
    images = np.sort(permutation(parts.config.seed, "monitor", len(splits.train))[:count])
    extract = functools.partial(_features, run, parts)
    return [CollapseMonitor(method, extract, splits.train, images, run.folder.metrics, train.monitor_every)]


def _knn(run: Session, parts: Assembly, splits: LoadedSplits) -> KNNAccuracy | None:
    """What measures the features; None where it is off or there are no labels."""
    if not knn_every(parts.config):
        return None
    if not _labelled(splits.train) or (splits.val or splits.test) is None:
        why = "no kNN accuracy, it needs labels and a val or test split"
        if parts.config.train.knn_every:
            log.warning("train.knn_every: %s", why)
        else:
            log.info("before the first step and after the last: %s", why)
        return None
    extract = functools.partial(_features, run, parts)
    return KNNAccuracy(extract, splits.train, splits.val or splits.test, knn_every(parts.config))
