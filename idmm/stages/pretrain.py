"""Stage 1: from images alone to a backbone."""

import logging

import numpy as np
import torch

from idmm import evaluate
from idmm.config import METHODS, PretrainConfig, parsing
from idmm.data.split import LabelsMissing
from idmm.engine import Evaluation, Loop, Session
from idmm.errors import RunError, UserError
from idmm.features import extract_features
from idmm.methods import Method
from idmm.monitor import Monitor
from idmm.progress import counting
from idmm.seeding import permutation
from idmm.stages.assemble import Assembly, LoadedSplits, eval_batches, export, load_splits, resolve, say_length, session

log = logging.getLogger("idmm")
EVAL_BATCH = 256


def pretrain(config: PretrainConfig | dict | str) -> dict:
    """Pretrains a backbone by ``config.method.name`` and writes it to ``config.out``.

    Args:
        config: A PretrainConfig, a mapping of its keys, or the path of a YAML file.

    A key ``train.lr`` is ``{"train": {"lr": 1e-3}}``. These are used most; ``idmm pretrain --help`` explains all, with
    defaults and what None means::

        out: folder for all that the run writes (required)
        seed: of every random choice
        init: weights to start from: a run folder, or a .safetensors or .pth file in timm's format
        resume: a used out: auto goes on where it stopped, never refuses it, must refuses a new one
        data.root, data.name: folder of your own images, or of a dataset; its name in ``idmm data list``
        data.subset: part of the training images: {per_class: 10}, {total: 500} or {fraction: 0.1}
        data.val_fraction, data.folds: share of the training images held out, 0 to 1; parts to hold out in turn
        data.labels, data.groups, data.exclude: CSV files of path,class and of path,group; paths to leave out
        data.workers, data.cache: loader processes; where decoded images are kept: auto, disk, ram or off
        data.mean, data.std, data.in_chans: a number a channel, on values in [0, 1]; 3 channels or 1 (grey)
        data.range: what black and white stand for in grey images of more than 8 bits: auto, full or [low, high]
        model.name, model.kwargs: a timm model; for its constructor, {embed_dim: 96, depth: 6, num_heads: 3}
        model.drop_path: stochastic depth rate, 0 to 1
        train.epochs, train.batch_size, train.accumulate: epochs; images a step; parts that a batch is split into
        train.lr, train.weight_decay, train.warmup_epochs: peak learning rate; decay; linear warm-up (epochs)
        train.optimizer, train.clip_grad, train.ema: adamw or sgd; norm of the gradient; decay of a mean of weights
        train.precision, train.device: auto, fp32, bf16 or fp16; auto, cuda, mps or cpu
        train.save_minutes: minutes between checkpoints
        train.knn_every: epochs between measurements of kNN accuracy, where there are labels; 0: never
        method.name: idmm, simclr, supcon, mocov2, mocov3, dino or supervised
        method.classifier, method.classifier_init: idmm's N-way layer: linear or cosine; from random or features
        method.classifier_lr_scale: its learning rate as a multiple of train.lr
        method.label_smoothing: share of the target that goes to the other classes, 0 to 1
        method.cutmix_alpha: CutMix's lambda is drawn from Beta(alpha, alpha); 0: no CutMix
        views.size: side of the crops (pixels)
        views.crops: groups of random crops, [{count: 2, scale: [0.14, 1.0]}]; scale: shares of the image's area
        views.jitter, views.blur_prob, views.grey_prob, views.flip: strengths of colour jitter; probabilities
        drloc.weight, drloc.mode: of dense relative localization, an extra loss, 0: none; l1, ce, reg ...

    Returns:
        What ``result.json`` holds: ``loss`` of the last epoch, ``train_size``, ``epochs``, ``seed``, ``seconds``,
        ``precision`` (fp32, bf16 or fp16: what was used).

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

        # ------------------------------------------------------------------ images
        splits = _load(parts, run)
        _check_count(parts, len(splits.train))
        say_length(run, parts, len(splits.train))
        classes = None if splits.train.classes is None else len(splits.train.classes)

        # ------------------------------------------------------------------ model
        backbone = parts.backbone(phase)
        if run.folder.state is None and spec.init is not None:
            log.info("%s", spec.load(backbone, config.model.strict))
        method = parts.method(phase, backbone, len(splits.train), classes)
        if run.folder.state is None:
            method.prepare(lambda: _features(run, parts, backbone, splits.train, label="features before training"))

        # ------------------------------------------------------------------ training
        evaluations = [*_knn(run, parts, splits), *_monitor(run, parts, method, splits)]
        loop = Loop(run, method, parts.plan(phase, splits.train, evaluations))
        loop.fit()

        # ------------------------------------------------------------------ results
        export(run, loop, parts, splits)
        last = run.folder.last_metrics()
        result = {
            "loss": last["loss"],
            **{name: last[name] for name in ("knn",) if name in last},
            "train_size": len(splits.train),
            "epochs": phase.epochs,
            "seed": config.seed,
            "seconds": round(run.seconds, 1),
            "precision": run.precision,
            **splits.remarks,
        }
        run.folder.finish(result)
        log.info("%s: loss %.4f after %d epochs; backbone.safetensors written", config.out, last["loss"], phase.epochs)
        return result


def _load(parts: Assembly, run: Session) -> LoadedSplits:
    """Reads the images; where labels are missing, says that it is the method which wants them."""
    try:
        return load_splits(parts, run.folder)
    except LabelsMissing as error:
        if not parts.stage.labelled(parts.config):
            raise
        free = ", ".join(name for name, recipe in METHODS.items() if not recipe.labelled)
        why = f"method.name: {parts.config.method.name} learns from labels; {free} need none"
        raise UserError(*error.faults, why) from None


def _check_count(parts: Assembly, images: int) -> None:
    """Raises UserError where there are too few images."""
    if images < 2:
        raise UserError("data.root: 1 image to train on; telling images apart needs at least 2")
    if parts.phases[0].batch_size > images and (small := parts.stage.faults(parts.config, images)):
        raise UserError(*small)


def _features(run: Session, parts: Assembly, backbone, store, images=None, label: str | None = None) -> torch.Tensor:
    """Features of a split's images, all or those of the given numbers, [N, d]; with a ``label`` it shows how far."""
    batches = eval_batches(run, store, parts.phases[0].size, parts.crop_pct, parts.spec, EVAL_BATCH, images)
    if label is not None and run.folder.leader:
        log.info("%s: of %d images, by the untrained network", label, len(store))
        batches = counting(batches, len(store), label)
    features = extract_features(backbone.to(run.device), batches, run.device, run.autocast)
    if not bool(torch.isfinite(features).all()):
        raise RunError(
            f"the images' features are not finite{run.folder.kept}: lower --train.lr, "
            "set --train.clip_grad 1 or --train.precision fp32, in a new --out",
            shared=True,
        )
    return features


def _monitor(run: Session, parts: Assembly, method: Method, splits: LoadedSplits) -> list[Evaluation]:
    """Looks for collapse and saturation, on the same few training images every time; nothing where it is off."""
    train = parts.config.train
    if not train.monitor_every:
        return []
    count = min(train.monitor_images, len(splits.train))
    images = np.sort(permutation(parts.config.seed, "monitor", len(splits.train))[:count])

    def extract(backbone):
        return _features(run, parts, backbone, splits.train, images)

    watch = Monitor(method, extract, torch.from_numpy(images), run.folder.metrics, train.epochs, train.warmup_epochs)
    return [Evaluation(watch.measure, train.monitor_every, count)]


def _knn(run: Session, parts: Assembly, splits: LoadedSplits) -> list[Evaluation]:
    """Measures kNN accuracy; nothing where it is off or there are no labels."""
    every = parts.config.train.knn_every
    if not every:
        return []
    train, test = splits.train, splits.val or splits.test
    if train.labels is None or test is None:
        log.warning("train.knn_every: no kNN accuracy, it needs labels and a val or test split")
        return []

    def measure(backbone) -> dict:
        seen, held = (_features(run, parts, backbone, store) for store in (train, test))
        return {"knn": evaluate.knn_accuracy(seen, train.labels, held, test.labels)}

    return [Evaluation(measure, every, len(train) + len(test))]
