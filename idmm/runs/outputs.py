"""The files that a run leaves: weights, pictures, the accuracy of a classifier and its baseline."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from idmm.config import FinetuneConfig
from idmm.data.image_store import ImageStore
from idmm.data.split import Listing
from idmm.data.store import Stores
from idmm.data.user_lists import SPLIT, class_rows
from idmm.evaluation import evaluate
from idmm.evaluation.baseline import BASELINE, BASELINE_SIZE, largest_class, remarks
from idmm.evaluation.mistakes import write_mistakes
from idmm.files import write_csv
from idmm.models.base import Backbone, Tensors
from idmm.models.build import export_kwargs
from idmm.models.spec import ModelSpec
from idmm.models.weights import save_model
from idmm.progress import drawing, log
from idmm.report.stats import PREDICTIONS
from idmm.runs.networks import LabelledRun
from idmm.training.loop import Loop
from idmm.training.run import Run, TrainConfig

Entries = dict[str, Any]  # of the JSON next to weights

COLUMNS = ("class", "images", "correct", "accuracy", "most_confused_with", "times")


# ---------------------------------------------------------------------- weights
def load_best(loop: Loop, score: str) -> dict[str, int]:
    """Load the weights of the best epoch on val by ``score``, with ``train.keep`` best.

    Returns:
        ``kept_epoch``, or nothing if the last epoch is reported.
    """
    if loop.plan.keep is None:
        return {}
    best = loop.best
    assert best is not None  # the last epoch is always evaluated
    loop.exported.load_state_dict(best.weights)
    log.info(
        f"train.keep: the weights of epoch {best.epoch} of {loop.position.epoch}, {score} "
        f"{best.value:.2f} on val"
    )
    return {"kept_epoch": best.epoch}


def export(
    run: Run[TrainConfig],
    images: Stores,
    loop: Loop,
    backbone: Tensors,
    entries: Entries | None,
    title: str,
) -> None:
    """Write the weights of a trained run, see :func:`save_weights`, and its curves.

    ``title`` is what the run did.
    """
    save_weights(run, images, loop.exported, backbone, entries, has_ema=loop.ema is not None)
    if not run.folder.leader:
        return
    with drawing("curves.png"):
        from idmm.figures import curves_figure, save  # matplotlib takes a second

        path = run.folder.path
        figure = curves_figure(run.folder.metrics(), f"{path.name}: {title}, {run.spec.name}")
        save(figure, path / "curves.png")


def image_entries(spec: ModelSpec, images: Stores) -> dict[str, Any]:
    """Return the entries of a model's JSON about values and channels of its images."""
    entries: dict[str, Any] = {}
    if images.value_range is not None:
        entries["range"] = images.value_range
    if spec.bands is not None:
        entries["bands"] = spec.bands
        if images.train.bands is not None and spec.bands:
            entries["file_channels"] = images.train.bands.count
    return entries


def save_weights(
    run: Run[TrainConfig],
    images: Stores,
    model: Backbone,
    backbone: Tensors,
    entries: Entries | None,
    has_ema: bool = False,
) -> None:
    """Write the backbone, and the model with its further layers if there are any.

    Args:
        run: Open.
        images: Of the run.
        model: The whole network.
        backbone: State of the backbone.
        entries: Of the model's JSON beyond its backbone's. None: the model is the backbone.
        has_ema: Whether the weights are averaged ones.
    """
    if not run.folder.leader:
        return
    spec = run.spec
    size = run.phases[-1].size
    extra = {"ema": has_ema, **image_entries(spec, images)}

    def save(name: str, state: Tensors, kwargs: dict[str, Any], more: Entries) -> None:
        save_model(
            run.folder.path,
            name,
            state,
            name=spec.name,
            kwargs=kwargs,
            mean=spec.mean,
            std=spec.std,
            size=size,
            crop_pct=run.config.crop_pct,
            crop_mode=run.crop_mode,
            extra=extra | more,
        )

    kwargs = export_kwargs(spec.name, spec.kwargs, size, spec.in_chans)
    save("backbone", backbone, kwargs, {})
    if entries is None:
        return
    if "task" not in entries:  # the layers for boxes and masks are not timm's
        kwargs = kwargs | {"num_classes": len(entries["classes"])}
    save("model", model.state_dict(), kwargs, entries)


# ---------------------------------------------------------------------- a classifier's accuracy
def write_split(run: Run[FinetuneConfig], listing: Listing) -> None:
    """Write ``split.csv``, a list for ``data.labels``.

    Labels in the run's own folder are a list of ``idmm train``, which wrote the split itself.
    """
    labels = run.config.data.labels
    is_list_of_train = labels is not None and Path(labels).parent == run.folder.path
    if run.folder.leader and not is_list_of_train:
        write_csv(run.folder.path / SPLIT, class_rows(listing.parts))


def classifier_result(
    run: LabelledRun, images: Stores, predictions: evaluate.Predictions
) -> dict[str, Any]:
    """Write tables and pictures of the predictions, and log the accuracy beside its baselines.

    All processes must call together. The first one writes.

    Returns:
        The part of ``result.json`` about accuracy, in percent: ``top1``, ``top5``,
        ``mean_per_class``, ``top1_interval``, ``largest_class``, ``baseline_top1``,
        ``baseline_train_size``, and the counts of classes, images and groups.
    """
    folder = run.folder
    classes = images.train.class_names
    test = images.tested
    if folder.leader:
        write_csv(folder.path / "per_class.csv", _class_rows(predictions, classes))
        write_csv(folder.path / PREDICTIONS, _image_rows(predictions, test, classes))
        with drawing("confusion.png"):
            from idmm.evaluation.confusion import confusion_figure  # matplotlib takes a second
            from idmm.figures import save

            save(confusion_figure(predictions, classes), folder.path / "confusion.png")
        write_mistakes(folder.path, predictions, test, classes)
    scores: dict[str, Any] = {
        **predictions.scores(test.groups),
        "largest_class": largest_class(predictions.truth),
        BASELINE: folder.start_scores[BASELINE],
        BASELINE_SIZE: folder.start_scores[BASELINE_SIZE],
        "num_classes": len(classes),
        "test_size": len(test),
    }
    if test.groups is not None:
        scores["test_groups"] = len(set(test.groups))
    if run.config.data.fold is not None:
        scores |= evaluate.hit_counts(
            predictions.predicted, predictions.truth, len(classes), test.groups
        )
    _log_scores(run.config.out, scores)
    for remark in remarks(scores | {"train_size": len(images.train)}):
        log.warning(remark)
    return scores


def _log_scores(out: str | None, scores: dict[str, Any]) -> None:
    log.info(
        f"{out}: top-1 {scores['top1']:.2f}, top-5 {scores['top5']:.2f} "
        f"on {scores['test_size']} test images"
    )
    low, high = scores["top1_interval"]
    log.info(
        f"top-1's 95 % interval {low:.2f} to {high:.2f}, "
        f"mean over classes {scores['mean_per_class']:.2f}, "
        f"largest class {scores['largest_class']:.2f}, "
        f"the baseline {scores[BASELINE]:.2f} by {scores[BASELINE_SIZE]} images"
    )
    if "test_groups" in scores:
        log.info(
            f"the interval is over the {scores['test_groups']} groups of the test images, as "
            "images of one group are alike"
        )


def _class_rows(predictions: evaluate.Predictions, classes: list[str]) -> list[Sequence[Any]]:
    """Return a row per class.

    It has test images, correct ones, their share (percent) and the most frequent confusion.
    """
    rows: list[Sequence[Any]] = [COLUMNS]
    for number, times in enumerate(predictions.confusion(len(classes))):
        images = times.sum()
        hits = times[number]
        times[number] = 0
        accuracy = round(100 * hits / images, 2) if images else ""
        row = [classes[number], images, hits, accuracy, "", ""]
        if times.any():
            row[-2:] = [classes[times.argmax()], times.max()]
        rows.append(row)
    return rows


def _image_rows(
    predictions: evaluate.Predictions, test: ImageStore, classes: list[str]
) -> list[Sequence[Any]]:
    """Return a row per test image.

    It has name, class, likeliest class and its probability, and the group if there are any.
    """
    columns: dict[str, Iterable[Any]] = {
        "path": test.names,
        "class": [classes[c] for c in predictions.truth],
        "predicted": [classes[c] for c in predictions.predicted],
        "probability": [f"{probability:.6g}" for probability in predictions.probability],
    }
    if test.groups is not None:
        columns["group"] = test.groups
    return [list(columns), *zip(*columns.values(), strict=True)]


# ---------------------------------------------------------------------- what all runs report
def common_result(run: Run[TrainConfig], images: Stores) -> dict[str, Any]:
    """Return the entries that the results of all trained runs share.

    They are training images, seed, time, precision and remarks. With ``train.minutes`` they are
    also ``minutes``, the ``epochs`` begun and the ``whole_epochs``. Logs a warning if there is no
    whole epoch.
    """
    length: dict[str, Any] = {}
    minutes = run.config.train.minutes
    if minutes is not None:
        whole_epochs = _whole_epochs(run, len(images.train))
        epochs = len(run.folder.metrics())
        length = {"minutes": minutes, "epochs": epochs, "whole_epochs": whole_epochs}
        if not whole_epochs:
            log.warning(
                f"train.minutes {minutes:g}: training ended before it had seen every image once. "
                "Try more minutes"
            )
    return {
        **length,
        "train_size": len(images.train),
        "seed": run.config.seed,
        "seconds": round(run.seconds, 1),
        "precision": run.precision,
        "views": run.views,
        **images.remarks,
    }


def _whole_epochs(run: Run[TrainConfig], images: int) -> int:
    """Return how often training saw every image, over all phases."""
    whole_epochs = 0
    earlier_steps = 0
    records = run.folder.metrics()
    for phase in run.phases:
        last_step = max(record["step"] for record in records if record["stage"] == phase.number)
        steps_per_epoch = phase.steps(images) // phase.epochs
        whole_epochs += (last_step - earlier_steps) // steps_per_epoch
        earlier_steps = last_step
    return whole_epochs
