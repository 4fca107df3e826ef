"""Stage 2: from labels, and a backbone or none, to a classifier."""

import logging
from collections.abc import Callable
from dataclasses import replace

from idmm import evaluate, options
from idmm.config import FinetuneConfig, Stage, resolved_stages
from idmm.data.augment import TrainTransform
from idmm.data.cache import ImageStore
from idmm.data.registry import spec_of
from idmm.data.views import short_side_bound
from idmm.engine import Evaluation, Loop, Session, StagePlan
from idmm.methods.finetune import Finetune
from idmm.models.build import backbone_state, export_kwargs
from idmm.models.weights import load_weights, save_model
from idmm.seeding import derive
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


def finetune(config: FinetuneConfig | dict | str) -> dict:
    """Fine-tunes on labels, one size after the other, and writes the classifier and its accuracy to ``config.out``.

    Args:
        config: A FinetuneConfig, a mapping of its keys, or the path of a YAML file.

    Returns:
        What ``result.json`` holds: ``top1`` and ``top5`` (percent, of the last epoch, on the test split),
        ``num_classes``, ``train_size``, ``test_size``, ``seed``, ``seconds`` over all resumes; ``mean_per_class``
        (percent) where the dataset's literature reports that; ``size_mismatch`` where a split has not as many images
        as its protocol: ``{"train": [found, wanted]}``.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not go on (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    config, described, notes = settle(options.build(FinetuneConfig, config))
    sizes = [f"stages[{number}].size" for number in range(len(config.stages or []))] or ["train.size"]
    config = replace(config, stages=resolved_stages(config))
    with session(config) as run:
        if run.run.finished:
            log.info("%s: finished already, nothing to do", config.out)
            return run.run.result()
        for note in notes:
            log.info("%s", note)

        stages = config.stages
        if run.run.state is None:
            check_sizes(config, described, dict(zip(sizes, [stage.size for stage in stages], strict=True)))

        # ------------------------------------------------------------------ images
        bound = short_side_bound(max(stage.size for stage in stages), config.augment.scale[0])
        stores = load_images(config, run.run, bound, labelled=True)

        # ------------------------------------------------------------------ stages
        classes = len(stores.train.classes)
        weights = None if described.init is None else described.init.state
        source = None if described.init is None else described.init.source
        size = None if described.init is None else described.init.img_size
        first = 1 if run.run.state is None else run.run.state["stage"]
        for number, stage in enumerate(stages, start=1):
            if number < first:  # done before the run was taken up again
                run.steps += stage.epochs * -(-len(stores.train) // stage.batch_size)
                continue
            model = described.build(stage.size, config.seed, classes)
            if weights is not None and run.run.state is None:
                report = load_weights(
                    model,
                    weights,
                    source=source,
                    drop_classifier=number == 1,
                    img_size=size,
                    strict=config.model.strict,
                )
                log.info("%s", report)
            extra = localization(config, model, stage.size, described, stage.epochs)
            method = Finetune(model, config.augment, config.model.freeze, extra)
            loop = Loop(run, method, _plan(run, number, stage, stores, config, described))
            loop.fit()
            weights, source, size = loop.averaged.state_dict(), f"stage {number}", stage.size

        # ------------------------------------------------------------------ results
        last = run.run.last_metrics()
        if stores.val is not None:  # what was evaluated between epochs was val
            last = _evaluate(run, stores.test, stages[-1], config, described)(loop.averaged)
        _export(run, loop, stages[-1].size, stores, described)
        result = {
            **{name: last[name] for name in ("top1", "top5", "mean_per_class") if name in last},
            "num_classes": classes,
            "train_size": len(stores.train),
            "test_size": len(stores.test),
            "seed": config.seed,
            "seconds": round(run.seconds, 1),
            **stores.remarks,
        }
        run.run.finish(result)
        scores = f"top-1 {last['top1']:.2f}, top-5 {last['top5']:.2f}"
        log.info("%s: %s on %d test images", config.out, scores, len(stores.test))
        return result


def _plan(
    run: Session,
    number: int,
    stage: Stage,
    stores: LoadedSplits,
    config: FinetuneConfig,
    described: Backbone,
) -> StagePlan:
    seed = derive(config.seed, "stage", number)
    held = stores.val or stores.test
    return StagePlan(
        number=number,
        label=f"finetune {stage.size} px",
        batches=batch_plan(config.train, len(stores.train), stage.epochs, stage.batch_size, seed),
        maker=TrainTransform(stores.train, config.augment, stage.size, described.mean, described.std, seed),
        lr=stage.lr,
        warmup_epochs=config.train.warmup_epochs,
        layer_decay=config.train.layer_decay,
        evaluations=[Evaluation(_evaluate(run, held, stage, config, described), config.train.eval_every, len(held))],
    )


def _evaluate(
    run: Session, store: ImageStore, stage: Stage, config: FinetuneConfig, described: Backbone
) -> Callable[..., dict]:
    wanted = ("top1", "top5", spec_of(config.data.name).metric)

    def measure(model) -> dict:
        batches = test_batches(run, store, stage.size, config.augment.crop_pct, described, stage.batch_size)
        scores = evaluate.accuracy(model, batches, run.accelerator.device, run.autocast)
        return {name: score for name, score in scores.items() if name in wanted}

    return measure


def _export(run: Session, loop: Loop, size: int, stores: LoadedSplits, described: Backbone) -> None:
    """Writes the model with its classifier, and the backbone without."""
    if not run.run.leader:
        return
    classes = stores.train.classes
    common = dict(name=described.name, mean=described.mean, std=described.std)
    for stem, state, outputs, extra in (
        ("backbone", backbone_state(loop.averaged), 0, {}),
        ("model", loop.averaged.state_dict(), len(classes), {"classes": classes}),
    ):
        kwargs = export_kwargs(described.name, described.kwargs, size, outputs, described.in_chans)
        extra = {"ema": loop.ema is not None, **extra}
        save_model(run.run.path, stem, state, kwargs=kwargs, extra=extra, **common)
