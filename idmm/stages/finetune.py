"""Stage 2: from labels, and a backbone or none, to a classifier."""

import logging

from idmm import evaluate
from idmm.config import FinetuneConfig, parsing
from idmm.data.cache import ImageStore
from idmm.data.registry import spec_of
from idmm.engine import Evaluation, Loop, Session
from idmm.methods.finetune import balanced_weights
from idmm.models.weights import Checkpoint
from idmm.stages import Phase
from idmm.stages.assemble import Assembly, eval_batches, export, load_splits, resolve, say_length, session
from idmm.stages.folds import by_folds, seen_by_init
from idmm.stages.results import classifier_result, say_balance

log = logging.getLogger("idmm")


@by_folds
def finetune(config: FinetuneConfig | dict | str) -> dict:
    """Fine-tunes on labels, one size after the other, and writes the classifier and its accuracy to ``config.out``.

    Args:
        config: A FinetuneConfig, a mapping of its keys, or the path of a YAML file.

    A key ``train.lr`` is ``{"train": {"lr": 1e-3}}``. These are used most; ``idmm finetune --help`` explains all, with
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
        model.freeze: train the classifier alone
        train.epochs, train.batch_size, train.accumulate: epochs; images a step; parts that a batch is split into
        train.lr, train.weight_decay, train.warmup_epochs: peak learning rate; decay; linear warm-up (epochs)
        train.optimizer, train.clip_grad, train.ema: adamw or sgd; norm of the gradient; decay of a mean of weights
        train.precision, train.device: auto, fp32, bf16 or fp16; auto, cuda, mps or cpu
        train.save_minutes: minutes between checkpoints
        train.size: side of the images (pixels), where there are no stages
        train.eval_every, train.keep: epochs between evaluations; weights to report: last, or best on a val split
        train.class_weights: of the loss: none, or balanced where classes are unequal
        train.layer_decay: each layer's learning rate is this times that of the layer above
        stages: sizes one after the other, [{size: 224, epochs: 200}, {size: 448, epochs: 100, lr: 5e-5}]
        augment.scale, augment.flip: shares of the area that the random crop covers; probability
        augment.randaugment, augment.jitter: timm's string or None; strengths of colour jitter
        augment.mixup_alpha, augment.cutmix_alpha: lambda is drawn from Beta(alpha, alpha); 0: none
        augment.label_smoothing: share of the target spread over the classes, 0 to 1
        augment.crop_pct: to evaluate, the short side is resized to size / crop_pct, then the centre is cropped
        drloc.weight, drloc.mode: of dense relative localization, an extra loss, 0: none; l1, ce, reg ...

    Returns:
        What ``result.json`` holds: ``top1``, ``top5`` and ``mean_per_class`` (percent, on the test split, of the last
        epoch or, with ``train.keep`` best, of ``kept_epoch`` of the last stage); ``top1_interval`` (Wilson's, 95 %);
        ``largest_class`` (percent: what naming the largest class every time would score); where it is cheap
        ``pixel_knn`` (percent, see :func:`idmm.stages.results.pixel_knn`); ``num_classes``, ``train_size``,
        ``test_size``, ``seed``, ``seconds`` over all resumes; ``precision`` (fp32, bf16 or fp16: what training and
        evaluation ran in); ``size_mismatch`` where a split has not as many images as its protocol: ``{"train": [found,
        wanted]}``; ``excluded`` where ``data.exclude`` left images out. ``per_class.csv`` and ``confusion.png`` show
        it class by class. Of ``data.folds`` what :func:`idmm.stages.folds.pooled` returns.

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
        kept = {"kept_epoch": _load_best(loop)} if plan.keep else {}
        found = held.latest  # what was evaluated between epochs was val, and nothing was where the run ended before
        if splits.val is not None or found is None:
            found = _Evaluator(run, splits.test, phase, parts).predict(loop.averaged)
        export(run, loop, parts, splits, splits.train.classes)
        result = {
            **classifier_result(run, parts, splits, found),
            **kept,
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


def _load_best(loop: Loop) -> int:
    """Takes the weights that scored best on val for the rest of the run; returns their epoch."""
    epoch, best = loop.load_kept()
    log.info("train.keep: the weights of epoch %d of %d, top-1 %.2f on val", epoch, loop.batches.epochs, best)
    return epoch


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
