"""Stage 1: from images alone to a backbone."""

import logging

from idmm import evaluate, options
from idmm.config import PretrainConfig
from idmm.data.views import ViewMaker, short_side_bound
from idmm.engine import Loop, Session, StagePlan
from idmm.errors import UserError
from idmm.methods.idmm import IDMM
from idmm.models.build import export_kwargs
from idmm.models.weights import load_weights, save_model
from idmm.seeding import derive, seeded
from idmm.stages.common import (
    Backbone,
    Stores,
    batch_plan,
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
    """Pretrains a backbone by instance discrimination and writes it to ``config.out``.

    Args:
        config: A PretrainConfig, a mapping of its keys, or the path of a YAML file.

    Returns:
        What ``result.json`` holds: ``loss`` of the last epoch, ``train_size``, ``epochs``, ``seed``, ``seconds``.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not go on (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    config, described, notes = settle(options.build(PretrainConfig, config))
    with session(config) as run:
        if run.run.finished:
            log.info("%s: finished already, nothing to do", config.out)
            return run.run.result()
        for note in notes:
            log.info("%s", note)

        # ------------------------------------------------------------------ images
        smallest = min(group.scale[0] for group in config.views.crops)
        bound = short_side_bound(config.views.size, smallest)
        stores = load_images(config, run.run, bound, labelled=False, evaluated=config.train.knn_every > 0)
        if len(stores.train) < 2:
            raise UserError("data.root: 1 image to train on; instance discrimination needs at least 2")

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
        with seeded(derive(config.seed, "method")):
            extra = localization(config, backbone, config.views.size, described, config.train.epochs)
            method = IDMM(backbone, len(stores.train), backbone.num_features, config.method, extra)
        if config.method.classifier_init == "features" and run.run.state is None:
            method.classifier.start_from(_features(run, backbone, stores.train, config, described))

        # ------------------------------------------------------------------ training
        train = config.train
        order = derive(config.seed, "stage", 1)
        plan = StagePlan(
            number=1,
            label="pretrain",
            batches=batch_plan(train, len(stores.train), train.epochs, train.batch_size, order),
            maker=ViewMaker(stores.train, config.views, described.mean, described.std, config.seed),
            lr=train.lr,
            warmup_epochs=train.warmup_epochs,
            **_knn(run, stores, config, described),
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


def _features(run: Session, backbone, store, config: PretrainConfig, described: Backbone):
    """Features of all images of a split, [N, d]."""
    batches = test_batches(run, store, config.views.size, EVAL_CROP, described, EVAL_BATCH)
    device = run.device if run.accelerator is None else run.accelerator.device
    return evaluate.extract_features(backbone.to(device), batches, device, run.autocast)


def _knn(run: Session, stores: Stores, config: PretrainConfig, described: Backbone) -> dict:
    """What a stage plan needs to measure kNN accuracy; nothing where it is off or there are no labels."""
    if not config.train.knn_every:
        return {}
    test = stores.val or stores.test
    if stores.train.labels is None or test is None:
        log.warning("train.knn_every: no kNN accuracy, it needs labels and a val or test split")
        return {}

    def measure(backbone) -> dict:
        train = _features(run, backbone, stores.train, config, described)
        held = _features(run, backbone, test, config, described)
        return {"knn": evaluate.knn_accuracy(train, stores.train.labels, held, test.labels)}

    images = len(stores.train) + len(test)
    return {"evaluate": measure, "evaluate_every": config.train.knn_every, "evaluate_images": images}


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
