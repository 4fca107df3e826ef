"""What a run leaves: weights, pictures, rows of W, a classifier's figures and what they are read beside."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from idmm import distributed
from idmm.data.image_store import ImageStore
from idmm.data.store import Stores
from idmm.errors import Interrupted, RunError
from idmm.evaluation import baseline, evaluate
from idmm.files import read_csv, replacing, write_csv
from idmm.intervals import too_narrow
from idmm.methods import Method
from idmm.models.build import backbone_state, export_kwargs
from idmm.models.weights import save_model
from idmm.progress import drawing, log
from idmm.stages.artifacts import NAMES, PREDICTIONS, ROWS, about_rows
from idmm.stages.evaluators import eval_batches
from idmm.stages.resolve import RunSetup
from idmm.training.loop import Loop
from idmm.training.run_context import RunContext

BATCH = 64  # images whose hand-made features are taken at a time
FIGURES = 2.0  # seconds to import what draws, and to draw the curves and the confusion matrix
COLUMNS = ("class", "images", "correct", "accuracy", "most_confused_with", "times")


def load_best(loop: Loop, score: str) -> dict[str, int]:
    """Load the weights of the best epoch on val by ``score`` (its name for the log), with ``train.keep`` best.

    Returns:
        ``kept_epoch``, or nothing if the last epoch is reported.
    """
    if loop.plan.keep is None:
        return {}
    epoch, best = loop.best["epoch"], loop.best["value"]
    loop.averaged.load_state_dict(loop.best["weights"])
    log.info("train.keep: the weights of epoch %d of %d, %s %.2f on val", epoch, loop.position.epoch, score, best)
    return {"kept_epoch": epoch}


def export(run: RunContext, loop: Loop, setup: RunSetup, splits: Stores, classes: list[str] | None = None) -> None:
    """Writes the backbone, where there are ``classes`` the model with its classifier, and the curves of the run."""
    if not run.folder.leader:
        return
    state, ema = loop.averaged.state_dict(), loop.ema is not None
    bare = state if classes is None else backbone_state(loop.averaged)
    _save(run.folder.path, "backbone", bare, setup, splits, {"ema": ema})
    if classes is not None:
        _save(run.folder.path, "model", state, setup, splits, {"ema": ema, "classes": classes}, len(classes))
    _draw_curves(run, setup)


def export_dense(run: RunContext, loop: Loop, setup: RunSetup, splits: Stores, about: dict) -> None:
    """Writes the plain backbone of a network for boxes or masks, the whole network with what its JSON says ``about`` it
    beyond its backbone, and the curves of the run."""
    if not run.folder.leader:
        return
    whole, ema = loop.averaged, loop.ema is not None
    _save(run.folder.path, "backbone", whole.backbone.state_dict(), setup, splits, {"ema": ema})
    _save(run.folder.path, "model", whole.state_dict(), setup, splits, {"ema": ema, **about})
    _draw_curves(run, setup)


def _save(folder: Path, stem: str, state: dict, setup: RunSetup, splits: Stores, more: dict, classes: int = 0) -> None:
    spec, size = setup.spec, setup.phases[-1].size
    about = dict(name=spec.name, mean=spec.mean, std=spec.std, size=size, crop_pct=setup.stage.crop_pct)
    about["kwargs"] = export_kwargs(spec.name, spec.kwargs, size, classes, spec.in_chans)
    known = {"range": splits.value_range, "bands": spec.bands}
    known["file_channels"] = splits.train.bands.count if spec.bands else None
    extra = {**more, **{name: value for name, value in known.items() if value is not None}}
    save_model(folder, stem, state, extra=extra, **about)


def _draw_curves(run: RunContext, setup: RunSetup) -> None:
    what = getattr(setup.config, "method", None)
    title = f"{run.folder.path.name}: {setup.stage.NAME}{f' by {what.name}' if what else ''}, {setup.spec.name}"
    with drawing("curves.png"):
        from idmm.figures import curves_figure, save  # matplotlib takes a second

        save(curves_figure({"": [run.folder.metrics()]}, title), run.folder.path / "curves.png")


# ---------------------------------------------------------------------- what others draw and search
def write_instances(run: RunContext, method: Method, classifier: str, train: ImageStore) -> None:
    """Write ``instances.safetensors`` and ``.json``, the method's row for each training image."""
    if not run.folder.leader:
        return
    rows = method.get_parameter(method.instance_rows)  # [N, d]
    with drawing(ROWS, "written", fatal=(Interrupted, RunError)):  # a full disk: the same command ends the run
        about = json.dumps(about_rows(classifier, train)) + "\n"
        rows = rows.detach().float().cpu().contiguous()
        path = run.folder.path
        with replacing(path / NAMES) as names, replacing(path / ROWS) as file:
            names.write(about.encode())
            save_file({"weight": rows}, file.name)  # by its name, no other copy is made of what may be gigabytes


# ---------------------------------------------------------------------- a classifier's accuracy
def classifier_result(run: RunContext, setup: RunSetup, splits: Stores, found: evaluate.Predictions) -> dict:
    """Writes ``per_class.csv``, ``predictions.csv`` and ``confusion.png``, logs the accuracy and what it must not
    be read without.

    All processes must call together; the first one writes.

    Returns:
        The part of ``result.json`` that is about accuracy, in percent: ``top1``, ``top5``, ``mean_per_class``,
        ``top1_interval``, ``largest_class``, ``baseline_top1``, and the count ``test_groups``.
    """
    folder, classes = run.folder, splits.train.classes
    floor = measure_baseline(run, setup, splits)
    if folder.leader:
        write_per_class(found, classes, folder.path / "per_class.csv")
        write_predictions(found, splits.test, classes, folder.path / PREDICTIONS)
        with drawing("confusion.png"):
            from idmm.figures import confusion_figure, save  # matplotlib takes a second

            save(confusion_figure(found, classes), folder.path / "confusion.png")
    scores = found.scores() | {
        "top1_interval": evaluate.score(found.predicted, found.truth)["top1_interval"],
        "largest_class": evaluate.largest_class(found.truth)[1],
        **floor,
    }
    if setup.config.data.fold is not None:
        scores["per_class"] = evaluate.class_counts(found.predicted, found.truth, len(classes))
    top1, top5 = scores["top1"], scores["top5"]
    log.info("%s: top-1 %.2f, top-5 %.2f on %d test images", setup.config.out, top1, top5, len(splits.test))
    beside = "top-1's 95 % interval {0:.2f} to {1:.2f}, mean over classes {mean_per_class:.2f}, "
    beside += "largest class {largest_class:.2f}" + (", the baseline {baseline_top1:.2f}" if floor else "")
    log.info("%s", beside.format(*scores["top1_interval"], **scores))
    for line in evaluate.remarks(scores, found.truth, classes, **floor):
        log.warning("%s", line)
    if splits.test.groups is not None:
        scores["test_groups"] = len(set(splits.test.groups))
        log.warning("%s", too_narrow(len(splits.test), scores["test_groups"]))
    return scores


# ---------------------------------------------------------------------- what needs no network
def measure_baseline(run: RunContext, setup: RunSetup, splits: Stores) -> dict[str, float]:
    """Returns ``baseline_top1`` (percent): the accuracy of :func:`idmm.evaluation.baseline.measured` on centre
    crops of the run's images; nothing if the training images are all of one class. A run measures it once, before its
    first step.

    All processes must call together.
    """
    began, name = time.monotonic(), "baseline_top1"
    if name in run.folder.start_scores:
        return {name: run.folder.start_scores[name]}
    train, test, size = splits.train, splits.test, setup.phases[-1].size
    most = baseline.DECODED if train.decodes or test.decodes else baseline.MOST
    numbers = baseline.drawn_to_fit(train.labels, most), baseline.drawn(test.labels, most)
    labels, truth = train.labels[numbers[0]], test.labels[numbers[1]]
    if len(np.unique(labels)) < 2:
        return {}
    crops = (eval_batches(run, setup, s, size, BATCH, images=n) for s, n in zip((train, test), numbers, strict=True))
    seen, held = (baseline.features(batches, setup.spec.mean, setup.spec.std) for batches in crops)
    first = baseline.measured(seen, labels, held, truth, began).top1 if run.folder.leader else None
    scores = {name: distributed.broadcast(first)}
    run.folder.add_start_scores(scores)
    return scores


def ending(setup: RunSetup, splits: Stores) -> tuple[int, float]:
    """Returns what comes after a run's last step and the evaluation that follows it: how many images are evaluated, and
    the time of all else (seconds)."""
    if not setup.stage.needs_test:  # there is no classifier
        return 0, FIGURES
    test = len(splits.test)
    if splits.test.labels is None:  # boxes or masks
        return round(test * sum(scale**2 for scale in getattr(setup.config, "eval_scales", [1.0]))), FIGURES
    evaluated = setup.stage.NAME == "finetune" and splits.val is None  # by the evaluation after the last step
    return 0 if evaluated else test, FIGURES


def length_result(run: RunContext, setup: RunSetup, splits: Stores) -> dict:
    """Returns what ``result.json`` says of a run with ``train.minutes``: those, the ``epochs`` that it began, and the
    ``whole_epochs`` among them; warns where there is none."""
    minutes, records, whole, before = setup.config.train.minutes, run.folder.metrics(), 0, 0
    if minutes is None:
        return {}
    for phase in setup.phases:
        last = max(record["step"] for record in records if record["stage"] == phase.number)
        whole += (last - before) // (phase.steps(len(splits.train)) // phase.epochs)
        before = last
    if not whole:
        line = "train.minutes %g: training ended before it had seen every image once; try more minutes"
        log.warning(line, minutes)
    return {"minutes": minutes, "epochs": len(records), "whole_epochs": whole}


# ---------------------------------------------------------------------- class by class
def write_per_class(found: evaluate.Predictions, classes: list[str], path: Path) -> None:
    """Writes a row for each class: test images, those named right, their share (percent; empty where there is none),
    the class most often named instead, and how often."""
    images, right = found.per_class()
    instead = {true: (classes[named], often) for true, (named, often) in found.confusions().items()}
    rows = [COLUMNS]
    for c, (name, n, hits) in enumerate(zip(classes, images, right, strict=True)):
        rows.append([name, n, hits, round(100 * hits / n, 2) if n else "", *instead.get(c, ("", ""))])
    write_csv(path, rows)


# ---------------------------------------------------------------------- image by image
def write_predictions(found: evaluate.Predictions, test: ImageStore, classes: list[str], path: Path) -> None:
    """Writes the name, the class, the likeliest class and its probability of each test image, and the image's group if
    there are groups."""
    rows = zip(test.names, found.truth, found.predicted, found.probability, strict=True)
    lines = [[name, classes[c], classes[p], f"{share:.6g}"] for name, c, p, share in rows]
    if test.groups is not None:
        lines = [[*line, group] for line, group in zip(lines, test.groups, strict=True)]
    write_csv(path, [("path", "class", "predicted", "probability", "group")[: len(lines[0])], *lines])


def compared(run: Path, other: Path) -> dict[str, float]:
    """Returns the :func:`mcnemar` of two finished runs on the same test images."""
    rows, others = (read_csv(folder / PREDICTIONS) for folder in (run, other))
    right = ({row["path"]: row["class"] == row["predicted"] for row in each} for each in (rows, others))
    return mcnemar(*right, {row["path"]: row["group"] for row in rows if "group" in row})


def mcnemar(one: dict[Any, bool], other: dict[Any, bool], groups: dict[Any, str] | None = None) -> dict[str, float]:
    """Compares two classifiers on the same images.

    Args:
        one: Whether the first one is right, by image.
        other: Whether the second one is.
        groups: The group of each image if images come in groups of similar ones.

    Returns:
        ``points``, by which the first accuracy is above the second, and ``p``, the chance of a difference as large if
        both were equally good: McNemar's exact test (Psychometrika 12, 1947), or with groups the sign-flip test of each
        group's images won less those lost, with 9,999 random flips from 14 groups on.
    """
    from scipy.stats import binomtest, permutation_test

    names = one.keys() & other.keys()
    won = Counter()  # by group, less those lost; without groups each image is one
    for name in names:
        won[groups[name] if groups else name] += int(one[name]) - int(other[name])
    moved = np.array([count for count in won.values() if count])
    p = 1.0
    if len(moved) and groups:
        p = permutation_test((moved,), np.sum, permutation_type="samples", n_resamples=9999, rng=0).pvalue
    elif len(moved):
        p = binomtest(int((moved > 0).sum()), len(moved)).pvalue
    return {"points": 100 * float(moved.sum()) / len(names), "p": float(p)}
