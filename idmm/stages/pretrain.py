"""Stage 1: from images alone to a backbone."""

import logging
from collections.abc import Callable

import numpy as np
import torch

from idmm import evaluate
from idmm.config import METHODS, PretrainConfig, parsing
from idmm.data.cache import ImageStore
from idmm.data.split import LabelsMissing
from idmm.engine import Evaluation, Loop, Session
from idmm.errors import RunError, UserError
from idmm.features import extract_features
from idmm.methods import Method
from idmm.monitor import Monitor
from idmm.progress import counting
from idmm.seeding import permutation
from idmm.stages import documented
from idmm.stages.assemble import Assembly, LoadedSplits, eval_batches, export, load_splits, resolve, say_length, session

log = logging.getLogger("idmm")
EVAL_BATCH = 256
Judge = Callable[[torch.Tensor, ImageStore, torch.Tensor, ImageStore], dict]


def _by_knn(seen: torch.Tensor, train: ImageStore, held: torch.Tensor, test: ImageStore) -> dict:
    return {"knn": evaluate.knn_accuracy(seen, train.labels, held, test.labels)}


@documented
def pretrain(config: PretrainConfig | dict | str, judge: Judge = _by_knn) -> dict:
    """Pretrains a backbone by ``config.method.name`` and writes it to ``config.out``.

    Args:
        config: A PretrainConfig, a mapping of its keys (see below), or the name of a YAML file or a recipe.
        judge: What measures the frozen features every ``train.knn_every`` epochs and after the last: called with those
            of the training images [N, d] and of the held-out ones [M, d], each with its images, it returns values for
            ``metrics.jsonl``; what it raises ends the run.

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
        evaluations = [*_knn(run, parts, splits, judge), *_monitor(run, parts, method, splits)]
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


def _knn(run: Session, parts: Assembly, splits: LoadedSplits, judge: Judge) -> list[Evaluation]:
    """Measures the features; nothing where it is off or there are no labels."""
    every = parts.config.train.knn_every
    if not every:
        return []
    train, test = splits.train, splits.val or splits.test
    if train.labels is None or test is None:
        log.warning("train.knn_every: no kNN accuracy, it needs labels and a val or test split")
        return []

    def measure(backbone) -> dict:
        seen, held = (_features(run, parts, backbone, store) for store in (train, test))
        return judge(seen, train, held, test)

    return [Evaluation(measure, every, len(train) + len(test))]
