"""The files that a run leaves: weights, pictures, the accuracy of a classifier and its baseline."""

from pathlib import Path

from idmm.data.image_store import ImageStore
from idmm.data.split import Listing
from idmm.data.store import Stores
from idmm.data.user_lists import SPLIT, class_rows
from idmm.evaluation import evaluate
from idmm.evaluation.baseline import BASELINE, BASELINE_SIZE, largest_class, remarks
from idmm.evaluation.mistakes import write_mistakes
from idmm.files import write_csv
from idmm.models.build import export_kwargs
from idmm.models.weights import save_model
from idmm.progress import drawing, log
from idmm.report.stats import PREDICTIONS
from idmm.training.loop import Loop
from idmm.training.run_context import RunContext
from idmm.training.stage import RunSetup

FIGURE_SECONDS = 2.0  # to import matplotlib, and to draw the curves and the confusion matrix
COLUMNS = ("class", "images", "correct", "accuracy", "most_confused_with", "times")


# ---------------------------------------------------------------------- weights
def load_best(loop: Loop, score: str) -> dict[str, int]:
    """Load the weights of the best epoch on val by ``score`` (its name for the log), with
    ``train.keep`` best.

    Returns:
        ``kept_epoch``, or nothing if the last epoch is reported.
    """
    if loop.plan.keep is None:
        return {}
    best = loop.best
    loop.exported.load_state_dict(best["weights"])
    line = "train.keep: the weights of epoch %d of %d, %s %.2f on val"
    log.info(line, best["epoch"], loop.position.epoch, score, best["value"])
    return {"kept_epoch": best["epoch"]}


def export(
    run: RunContext,
    loop: Loop,
    setup: RunSetup,
    images: Stores,
    backbone: dict,
    entries: dict | None = None,
) -> None:
    """Write the backbone, the model with its further layers if there are any, and the run's curves.

    Args:
        run: The open run.
        loop: After training.
        setup: Of the run.
        images: Of the run.
        backbone: State of the backbone.
        entries: Of the model's JSON beyond its backbone's. None: the model is the backbone.
    """
    if not run.folder.leader:
        return
    spec = setup.spec
    size = setup.phases[-1].size
    extra = {"ema": loop.ema is not None}
    if images.value_range is not None:
        extra["range"] = images.value_range
    if spec.bands is not None:
        extra["bands"] = spec.bands
        if spec.bands:
            extra["file_channels"] = images.train.bands.count
    about = dict(
        name=spec.name, mean=spec.mean, std=spec.std, size=size, crop_pct=setup.stage.crop_pct
    )
    kwargs = export_kwargs(spec.name, spec.kwargs, size, spec.in_chans)
    save_model(run.folder.path, "backbone", backbone, kwargs=kwargs, extra=extra, **about)
    if entries is not None:
        if "task" not in entries:  # the layers for boxes and masks are not timm's
            kwargs = kwargs | {"num_classes": len(entries["classes"])}
        save_model(
            run.folder.path,
            "model",
            loop.exported.state_dict(),
            kwargs=kwargs,
            extra=extra | entries,
            **about,
        )
    records = run.folder.metrics()
    # a fitted classifier, which has no curve
    if getattr(setup.config.model, "freeze", False) and len(records) == 1:
        return
    method = getattr(setup.config, "method", None)
    if method is None:
        kind = setup.stage.NAME
    else:
        kind = f"{setup.stage.NAME} by {method.name}"
    with drawing("curves.png"):
        from idmm.figures import curves_figure, save  # matplotlib takes a second

        figure = curves_figure(records, f"{run.folder.path.name}: {kind}, {spec.name}")
        save(figure, run.folder.path / "curves.png")


# ---------------------------------------------------------------------- a classifier's accuracy
def write_split(run: RunContext, setup: RunSetup, listing: Listing) -> None:
    """Write ``split.csv``, a list for ``data.labels``.

    Labels in the run's own folder are a list of ``idmm train``, which wrote the split itself.
    """
    labels = setup.config.data.labels
    is_list_of_train = labels is not None and Path(labels).parent == run.folder.path
    if run.folder.leader and not is_list_of_train:
        write_csv(run.folder.path / SPLIT, class_rows(listing.parts))


def classifier_result(
    run: RunContext, setup: RunSetup, images: Stores, predictions: evaluate.Predictions
) -> dict:
    """Write tables and pictures of the predictions, and log the accuracy beside its baselines.

    All processes must call together. The first one writes.

    Returns:
        The part of ``result.json`` about accuracy, in percent: ``top1``, ``top5``,
        ``mean_per_class``, ``top1_interval``, ``largest_class``, ``baseline_top1``,
        ``baseline_train_size``, and the counts of classes, images and groups.
    """
    folder = run.folder
    classes = images.train.classes
    test = images.test
    if folder.leader:
        write_csv(folder.path / "per_class.csv", _class_rows(predictions, classes))
        write_csv(folder.path / PREDICTIONS, _image_rows(predictions, test, classes))
        with drawing("confusion.png"):
            from idmm.evaluation.confusion import confusion_figure  # matplotlib takes a second
            from idmm.figures import save

            save(confusion_figure(predictions, classes), folder.path / "confusion.png")
        write_mistakes(folder.path, predictions, test, classes)
    scores = predictions.scores(test.groups) | {"largest_class": largest_class(predictions.truth)}
    scores |= {name: folder.start_scores[name] for name in (BASELINE, BASELINE_SIZE)}
    scores |= {"num_classes": len(classes), "test_size": len(test)}
    if test.groups is not None:
        scores["test_groups"] = len(set(test.groups))
    if setup.config.data.fold is not None:
        scores |= evaluate.hit_counts(
            predictions.predicted, predictions.truth, len(classes), test.groups
        )
    line = "%s: top-1 %.2f, top-5 %.2f on %d test images"
    log.info(line, setup.config.out, scores["top1"], scores["top5"], len(test))
    line = "top-1's 95 % interval {0:.2f} to {1:.2f}, mean over classes {mean_per_class:.2f}, "
    line += "largest class {largest_class:.2f}, the baseline {baseline_top1:.2f} by {baseline_train_size} images"
    log.info("%s", line.format(*scores["top1_interval"], **scores))
    if "test_groups" in scores:
        log.info(
            "the interval is over the %d groups of the test images, as images of one group are alike",
            scores["test_groups"],
        )
    for line in remarks(scores | {"train_size": len(images.train)}):
        log.warning("%s", line)
    return scores


def _class_rows(predictions: evaluate.Predictions, classes: list[str]) -> list:
    """Return a row per class: test images, correct ones, their share (percent), the most frequent
    confusion."""
    counts = predictions.confusion(len(classes))
    rows = [COLUMNS]
    for c, times in enumerate(counts):
        images, hits, times[c] = times.sum(), times[c], 0
        accuracy = round(100 * hits / images, 2) if images else ""
        if times.any():
            confused = (classes[times.argmax()], times.max())
        else:
            confused = ("", "")
        rows.append([classes[c], images, hits, accuracy, *confused])
    return rows


def _image_rows(predictions: evaluate.Predictions, test: ImageStore, classes: list[str]) -> list:
    """Return a row per test image: name, class, likeliest class and its probability, and the group
    if there are any."""
    columns = {
        "path": test.names,
        "class": [classes[c] for c in predictions.truth],
        "predicted": [classes[c] for c in predictions.predicted],
        "probability": [f"{probability:.6g}" for probability in predictions.probability],
    }
    if test.groups is not None:
        columns["group"] = test.groups
    return [list(columns), *zip(*columns.values(), strict=True)]


# ---------------------------------------------------------------------- the length of a run
def ending(setup: RunSetup, images: Stores) -> tuple[int, float]:
    """Return the images to evaluate after the last step's evaluation, and the seconds of everything
    else then."""
    if not setup.stage.needs.test:  # no classifier
        return 0, FIGURE_SECONDS
    count = len(images.test)
    if images.test.labels is None:  # boxes or masks
        passes = sum(scale**2 for scale in getattr(setup.config, "eval_scales", [1.0]))
        return round(count * passes), FIGURE_SECONDS
    # by the evaluation after the last step
    is_evaluated = setup.stage.NAME == "finetune" and images.val is None
    return 0 if is_evaluated else count, FIGURE_SECONDS


def common_result(run: RunContext, setup: RunSetup, images: Stores) -> dict:
    """Return the entries that the results of all stages share: training images, seed, time,
    precision, remarks.

    With ``train.minutes`` they are also ``minutes``, the ``epochs`` begun and the ``whole_epochs``.
    Logs a warning if there is no whole epoch.
    """
    minutes = setup.config.train.minutes
    records = run.folder.metrics()
    whole_epochs = 0
    earlier_steps = 0
    length = {}
    if minutes is not None:
        for phase in setup.phases:
            last_step = max(record["step"] for record in records if record["stage"] == phase.number)
            whole_epochs += (last_step - earlier_steps) // (
                phase.steps(len(images.train)) // phase.epochs
            )
            earlier_steps = last_step
        length = {"minutes": minutes, "epochs": len(records), "whole_epochs": whole_epochs}
        if not whole_epochs:
            log.warning(
                "train.minutes %g: training ended before it had seen every image once. Try more minutes",
                minutes,
            )
    return {
        **length,
        "train_size": len(images.train),
        "seed": setup.config.seed,
        "seconds": round(run.seconds, 1),
        "precision": run.precision,
        "views": run.views,
        **images.remarks,
    }
