"""Stage 2: from labels, and a backbone or none, to a classifier."""

import logging
from collections.abc import Callable

from idmm import evaluate
from idmm.config import FinetuneConfig, parsing
from idmm.data.cache import ImageStore
from idmm.data.registry import spec_of
from idmm.engine import Evaluation, Loop, Session
from idmm.models.weights import Checkpoint
from idmm.stages import Phase
from idmm.stages.assemble import Assembly, eval_batches, export, load_splits, resolve, say_length, session

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
    parts, notes = resolve(parsing.build(FinetuneConfig, config))
    config = parts.config
    with session(parts, notes) as run:
        if run.folder.finished:
            return run.folder.result()
        first = 1 if run.folder.state is None else run.folder.state["stage"]

        # ------------------------------------------------------------------ images
        splits = load_splits(parts, run.folder)
        classes = len(splits.train.classes)
        say_length(run, parts, len(splits.train))

        # ------------------------------------------------------------------ stages
        loop = None
        for phase in parts.phases:
            if phase.number < first:  # done before the run was taken up again
                run.steps += phase.steps(len(splits.train))
                continue
            model = parts.backbone(phase, classes)
            if run.folder.state is None:
                _start_from(loop, model, parts, phase)
            held = splits.val or splits.test
            look = Evaluation(_accuracy(run, held, phase, parts), config.train.eval_every, len(held))
            method = parts.method(phase, model, len(splits.train), classes)
            loop = Loop(run, method, parts.plan(phase, splits.train, [look]))
            loop.fit()

        # ------------------------------------------------------------------ results
        last = run.folder.last_metrics()
        if splits.val is not None:  # what was evaluated between epochs was val
            last = _accuracy(run, splits.test, phase, parts)(loop.averaged)
        export(run, loop, parts, splits.train.classes)
        result = {
            **{name: last[name] for name in ("top1", "top5", "mean_per_class") if name in last},
            "num_classes": classes,
            "train_size": len(splits.train),
            "test_size": len(splits.test),
            "seed": config.seed,
            "seconds": round(run.seconds, 1),
            **splits.remarks,
        }
        run.folder.finish(result)
        scores = f"top-1 {last['top1']:.2f}, top-5 {last['top5']:.2f}"
        log.info("%s: %s on %d test images", config.out, scores, len(splits.test))
        return result


def _start_from(before: Loop | None, model, parts: Assembly, phase: Phase) -> None:
    """Loads the weights of the phase before, else those of ``init``, if there are any."""
    strict = parts.config.model.strict
    if before is None:
        report = parts.spec.load(model, strict)
    else:
        last = parts.phases[phase.number - 2]
        source = f"weights of stage {last.number}"
        made = Checkpoint(before.averaged.state_dict(), source, kwargs={"img_size": last.size})
        report = made.load_into(model, strict=strict, drop_classifier=False)
    if report is not None:
        log.info("%s", report)


def _accuracy(run: Session, store: ImageStore, phase: Phase, parts: Assembly) -> Callable[..., dict]:
    wanted = ("top1", "top5", spec_of(parts.config.data.name).metric)

    def measure(model) -> dict:
        crop = parts.config.augment.crop_pct
        batches = eval_batches(run, store, phase.size, crop, parts.spec, phase.batch_size)
        scores = evaluate.accuracy(model, batches, run.device, run.autocast)
        return {name: score for name, score in scores.items() if name in wanted}

    return measure
