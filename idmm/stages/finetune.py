"""Stage 2: from labels, and a backbone or none, to a classifier."""

import functools
import logging
from collections.abc import Iterator

from idmm import evaluate
from idmm.config import FinetuneConfig, parsing
from idmm.data.cache import ImageStore
from idmm.data.registry import spec_of
from idmm.engine import Evaluation, Loop, Session
from idmm.methods.finetune import balanced_weights
from idmm.models.weights import Checkpoint
from idmm.stages import Phase, documented
from idmm.stages.assemble import Assembly, LoadedSplits, eval_batches, export, load_splits, resolve, say_length, session
from idmm.stages.budget import length_result, within_minutes
from idmm.stages.folds import by_folds, seen_by_init
from idmm.stages.results import classifier_result, ending_seconds, say_balance

log = logging.getLogger("idmm")


@documented
@by_folds
def finetune(config: FinetuneConfig | dict | str) -> dict:
    """Fine-tunes on labels, one size after the other, and writes the classifier and its accuracy to ``config.out``.

    Args:
        config: A FinetuneConfig, a mapping of its keys (see below), or the name of a YAML file or a recipe.

    Returns:
        What ``result.json`` holds: ``top1``, ``top5`` and ``mean_per_class`` (percent, on the test split, of the last
        epoch or, with ``train.keep`` best, of ``kept_epoch`` of the last stage); ``top1_interval`` (Wilson's, 95 %);
        ``largest_class`` (percent: what naming the largest class every time would score); where it is cheap
        ``pixel_knn`` (percent, see :func:`idmm.stages.results.pixel_knn`); ``num_classes``, ``train_size``,
        ``test_size``, ``test_groups`` where images come in groups, ``seed``, ``seconds`` over all resumes; where
        ``train.minutes`` is given ``minutes`` and the ``epochs`` of all stages; ``precision`` (fp32, bf16 or fp16: what
        training and evaluation ran in); ``size_mismatch`` where a split has not as many images as its protocol:
        ``{"train": [found, wanted]}``; ``excluded`` where ``data.exclude`` left images out. ``per_class.csv`` and
        ``confusion.png`` show it class by class. Of ``data.folds`` what :func:`idmm.stages.folds.pooled` returns.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not go on (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    parts, notes = resolve(parsing.build(FinetuneConfig, config))
    config = parts.config
    with session(parts, notes + seen_by_init(config)) as run:
        if run.folder.finished:
            return run.folder.result()
        first = 1 if run.folder.state is None else run.folder.state["stage"]

        # ------------------------------------------------------------------ images
        splits = load_splits(parts, run.folder)
        classes = len(splits.train.classes)
        parts = within_minutes(run, parts, splits, functools.partial(_looked_at, run, parts), ending_seconds)
        say_length(run, parts, len(splits.train))
        say_balance(splits.train, config.train.class_weights)

        # ------------------------------------------------------------------ stages
        loop = None
        for phase in parts.phases:
            if phase.number < first:  # done before the run was taken up again
                run.steps += phase.steps(len(splits.train))
                continue
            model = parts.backbone(phase, classes)
            if run.folder.state is None:
                _start_from(loop, model, parts, phase)
            splits = splits.at(phase.size)
            held = _Evaluator(run, splits.val or splits.test, phase, parts)
            method = parts.method(phase, model, len(splits.train), classes)
            if config.train.class_weights == "balanced":
                method.class_weight = balanced_weights(splits.train.labels, classes)
            look = Evaluation(held.measure, config.train.eval_every, len(held.store))
            plan = parts.plan(phase, splits.train, [look])
            if config.train.keep == "best" and phase is parts.phases[-1]:
                plan.keep = "top1"
            loop = Loop(run, method, plan)
            loop.fit()

        # ------------------------------------------------------------------ results
        kept = {}
        if plan.keep:  # the weights that scored best on val
            kept["kept_epoch"], best = loop.kept["epoch"], loop.kept["value"]
            loop.averaged.load_state_dict(loop.kept["weights"])
            line = "train.keep: the weights of epoch %d of %d, top-1 %.2f on val"
            log.info(line, kept["kept_epoch"], phase.epochs, best)
        found = held.latest  # what was evaluated between epochs was val, and nothing was where the run ended before
        if splits.val is not None or found is None:
            found = _Evaluator(run, splits.test, phase, parts).predict(loop.averaged)
        export(run, loop, parts, splits, splits.train.classes)
        result = {
            **classifier_result(run, parts, splits, found),
            **kept,
            **length_result(parts),
            "num_classes": classes,
            "train_size": len(splits.train),
            "test_size": len(splits.test),
            "seed": config.seed,
            "seconds": round(run.seconds, 1),
            "precision": run.precision,
            **splits.remarks,
        }
        run.folder.finish(result)
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


def _looked_at(run: Session, parts: Assembly, phase: Phase, splits: LoadedSplits) -> Iterator[dict]:
    """Yields what is evaluated between the epochs of a phase."""
    store = splits.val or splits.test
    return eval_batches(run, store, phase.size, parts.crop_pct, parts.spec, phase.batch_size)


class _Evaluator:
    """Evaluates the classifier of a phase on a split, and keeps the latest predictions."""

    def __init__(self, run: Session, store: ImageStore, phase: Phase, parts: Assembly):
        self.run, self.store, self.phase, self.parts = run, store, phase, parts
        self.latest: evaluate.Predictions | None = None

    def predict(self, model) -> evaluate.Predictions:
        run, crop = self.run, self.parts.crop_pct
        batches = eval_batches(run, self.store, self.phase.size, crop, self.parts.spec, self.phase.batch_size)
        self.latest = evaluate.predict(model, batches, run.device, run.autocast)
        return self.latest

    def measure(self, model) -> dict:
        """Returns the values for metrics.jsonl: the mean over classes where the dataset's literature reports it."""
        wanted = ("top1", "top5", spec_of(self.parts.config.data.name).metric)
        return {name: score for name, score in self.predict(model).scores().items() if name in wanted}
