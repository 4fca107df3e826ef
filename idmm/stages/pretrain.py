"""Stage 1: from images alone to a backbone."""

import logging

import numpy as np
import torch

from idmm import evaluate, options
from idmm.config import PretrainConfig
from idmm.data.split import LabelsMissing
from idmm.data.views import MultiCropTransform, short_side_bound
from idmm.engine import Evaluation, Loop, Session, StagePlan
from idmm.errors import RunError, UserError
from idmm.methods import Facts, Method, create_method
from idmm.models.build import export_kwargs
from idmm.models.weights import load_weights, save_model
from idmm.monitor import Monitor
from idmm.recipes import METHODS, pass_notes, settle_method
from idmm.seeding import derive, permutation, seeded
from idmm.stages.common import (
    Backbone,
    LoadedSplits,
    batch_plan,
    check_sizes,
    load_images,
    localization,
    session,
    settle,
    test_batches,
)

log = logging.getLogger("idmm")
EVAL_CROP = 0.875  # features are measured on the centre crop
EVAL_BATCH = 256


def pretrain(config: PretrainConfig | dict | str) -> dict:
    """Pretrains a backbone by ``config.method.name`` and writes it to ``config.out``.

    Args:
        config: A PretrainConfig, a mapping of its keys, or the path of a YAML file.

    Returns:
        What ``result.json`` holds: ``loss`` of the last epoch, ``train_size``, ``epochs``, ``seed``, ``seconds``.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not go on (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    config, chosen = settle_method(options.build(PretrainConfig, config))
    config, described, notes = settle(config)
    with session(config) as run:
        if run.run.finished:
            log.info("%s: finished already, nothing to do", config.out)
            return run.run.result()
        for note in chosen + notes:
            log.info("%s", note)

        if run.run.state is None:
            check_sizes(config, described, {"views.size": config.views.size})

        # ------------------------------------------------------------------ images
        smallest = min(group.scale[0] for group in config.views.crops)
        bound = short_side_bound(config.views.size, smallest)
        stores = _load(config, run, bound)
        if len(stores.train) < 2:
            raise UserError("data.root: 1 image to train on; telling images apart needs at least 2")

        # ------------------------------------------------------------------ model
        backbone = described.build(config.views.size, config.seed)
        if described.init is not None and run.run.state is None:
            report = load_weights(
                backbone,
                described.init.state,
                source=described.init.source,
                img_size=described.init.img_size,
                strict=config.model.strict,
            )
            log.info("%s", report)
        train = config.train
        order = derive(config.seed, "stage", 1)
        batches = batch_plan(train, len(stores.train), train.epochs, train.batch_size, order)
        with seeded(derive(config.seed, "method")):
            extra = localization(config, backbone, config.views.size, described, train.epochs)
            method = create_method(backbone, _facts(stores, config, batches.steps_per_epoch), config.method, extra)
        if run.run.state is None:
            method.prepare(lambda: _features(run, backbone, stores.train, config, described))

        # ------------------------------------------------------------------ training
        plan = StagePlan(
            number=1,
            label="pretrain",
            batches=batches,
            maker=MultiCropTransform(stores.train, config.views, described.mean, described.std, config.seed),
            lr=train.lr,
            warmup_epochs=train.warmup_epochs,
            evaluations=[
                *_knn(run, stores, config, described),
                *_monitor(run, method, stores, config, described),
            ],
        )
        loop = Loop(run, method, plan)
        loop.fit()

        # ------------------------------------------------------------------ results
        _export(run, loop, config, described)
        last = run.run.last_metrics()
        result = {
            "loss": last["loss"],
            **{name: last[name] for name in ("knn",) if name in last},
            "train_size": len(stores.train),
            "epochs": train.epochs,
            "seed": config.seed,
            "seconds": round(run.seconds, 1),
            **stores.remarks,
        }
        run.run.finish(result)
        log.info("%s: loss %.4f after %d epochs; backbone.safetensors written", config.out, last["loss"], train.epochs)
        return result


def _load(config: PretrainConfig, run: Session, bound: int) -> LoadedSplits:
    """Reads the images; where labels are missing, says that it is the method which wants them."""
    labelled, measured = METHODS[config.method.name].labelled, config.train.knn_every > 0
    try:
        return load_images(config, run.run, bound, labelled=labelled, evaluated=measured, needed=False)
    except LabelsMissing as error:
        if not labelled:
            raise
        free = ", ".join(name for name, recipe in METHODS.items() if not recipe.labelled)
        why = f"method.name: {config.method.name} learns from labels; {free} need none"
        raise UserError(*error.faults, why) from None


def _facts(stores: LoadedSplits, config: PretrainConfig, steps_per_epoch: int) -> Facts:
    """What methods may need to know; a batch larger than the data is said."""
    images, train = len(stores.train), config.train
    if train.batch_size > images:
        log.warning("train.batch_size: %d, but there are %d images: an epoch is one step", train.batch_size, images)
        small, _ = pass_notes(config, images)
        if small:
            raise UserError(*small)
    classes = None if stores.train.classes is None else len(stores.train.classes)
    return Facts(images, min(train.batch_size, images), train.epochs, train.epochs * steps_per_epoch, classes)


def _features(run: Session, backbone, store, config: PretrainConfig, described: Backbone, images=None):
    """Features of a split's images, all or those of the given numbers, [N, d]."""
    batches = test_batches(run, store, config.views.size, EVAL_CROP, described, EVAL_BATCH, images)
    device = run.device if run.accelerator is None else run.accelerator.device
    features = evaluate.extract_features(backbone.to(device), batches, device, run.autocast)
    if not bool(torch.isfinite(features).all()):
        raise RunError(
            "the images' features are not finite; the last checkpoint is kept: lower --train.lr, "
            "set --train.clip_grad 1 or --train.precision fp32, in a new --out",
            shared=True,
        )
    return features


def _monitor(
    run: Session, method: Method, stores: LoadedSplits, config: PretrainConfig, described: Backbone
) -> list[Evaluation]:
    """Looks for collapse and saturation, on the same few training images every time; nothing where it is off."""
    if not config.train.monitor_every:
        return []
    count = min(config.train.monitor_images, len(stores.train))
    images = np.sort(permutation(config.seed, "monitor", len(stores.train))[:count])

    def extract(backbone):
        return _features(run, backbone, stores.train, config, described, images)

    watch = Monitor(
        method, extract, torch.from_numpy(images), run.run.metrics, config.train.epochs, config.train.warmup_epochs
    )
    return [Evaluation(watch.measure, config.train.monitor_every, count)]


def _knn(run: Session, stores: LoadedSplits, config: PretrainConfig, described: Backbone) -> list[Evaluation]:
    """Measures kNN accuracy; nothing where it is off or there are no labels."""
    if not config.train.knn_every:
        return []
    test = stores.val or stores.test
    if stores.train.labels is None or test is None:
        log.warning("train.knn_every: no kNN accuracy, it needs labels and a val or test split")
        return []

    def measure(backbone) -> dict:
        train = _features(run, backbone, stores.train, config, described)
        held = _features(run, backbone, test, config, described)
        return {"knn": evaluate.knn_accuracy(train, stores.train.labels, held, test.labels)}

    return [Evaluation(measure, config.train.knn_every, len(stores.train) + len(test))]


def _export(run: Session, loop: Loop, config: PretrainConfig, described: Backbone) -> None:
    if run.run.leader:
        kwargs = export_kwargs(described.name, described.kwargs, config.views.size, 0, described.in_chans)
        save_model(
            run.run.path,
            "backbone",
            loop.averaged.state_dict(),
            name=described.name,
            kwargs=kwargs,
            mean=described.mean,
            std=described.std,
            extra={"ema": loop.ema is not None},
        )
