"""k-fold cross-validation: one run per fold, each in its own folder, and the pooled result."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from idmm.errors import UserError
from idmm.files import holds_run
from idmm.progress import log
from idmm.report.stats import group_interval, wilson_interval
from idmm.runs import stage_of
from idmm.runs.outputs import BASELINE_SIZE, remarks
from idmm.training import clock
from idmm.training.log import logging_to
from idmm.training.run_folder import RunFolder, check_resume
from idmm.training.stage import RunSetup

ACCURACIES = (
    "top1",
    "top5",
    "knn",
    "mean_per_class",
    "largest_class",
    "baseline_top1",
    "start_top1",
    "start_knn",
)
SIZES = ("train_size", BASELINE_SIZE)  # of a fold
# in those of all folds
SAME = ("top5", "num_classes", "seed", "excluded", "precision", "params", "backbone_params")


def run_folds(setup: RunSetup, run_one: Callable[[RunSetup], dict]) -> dict:
    """Run a stage by ``run_one`` once per fold of ``data.folds`` and pool the results.

    The runs are ordinary ones in ``out``/fold-1 and so on: an interrupted fold is resumed, a
    finished one is not repeated. Each gets a share of ``train.minutes``.

    Returns:
        The return value of :func:`pooled`, which ``out``/result.json holds.

    Raises:
        UserError: The images cannot be split, or ``out`` holds something else.
    """
    config = setup.config
    results = []
    configs = list(each_fold(config))
    used = [one.out for one in configs if holds_run(one.out)]
    if holds_run(config.out) and not used:
        raise UserError(f"out: '{config.out}' holds a run without folds. Name a new folder")
    check_resume(config.out, bool(used), getattr(config, "resume", "auto"))
    for number, one in enumerate(configs):
        started_at = setup.started_at if number == 0 else clock.now()
        results.append(run_one(replace(setup, stage=stage_of(one), started_at=started_at)))
    with RunFolder(config.out, config, "auto") as folder:
        if folder.finished:
            return folder.result()
        with logging_to(folder.path):
            result = pooled(results)
            folder.finish(result)
            low, high = result["top1_interval"]
            mean, std = (result[name]["top1"] for name in ("mean", "std"))
            line = "%s: top-1 %.2f on %d images, each tested once (95 %% interval %.1f to %.1f). "
            line += "Mean ± standard deviation over %d folds: %.2f ± %.2f"
            log.info(
                line,
                config.out,
                result["top1"],
                result["test_size"],
                low,
                high,
                len(results),
                mean,
                std,
            )
            for line in remarks(result):
                log.warning("%s", line)
        return result


def each_fold(config: Any) -> Iterator[Any]:
    """Yield the config of each fold's run: its folder under ``config.out``, if any, and its share
    of the minutes."""
    minutes = getattr(getattr(config, "train", None), "minutes", None)  # a probe has none
    if minutes is not None:
        config = replace(config, train=replace(config.train, minutes=minutes / config.data.folds))
    resume = {"resume": "auto"} if hasattr(config, "resume") else {}
    for fold in range(1, config.data.folds + 1):
        out = str(Path(config.out) / f"fold-{fold}")
        yield replace(config, out=out, data=replace(config.data, fold=fold), **resume)


def pooled(results: list[dict]) -> dict:
    """Return the content of ``result.json`` of all folds from those of each.

    Each image is tested once. Shares (percent) such as ``top1`` are over all images: the mean over
    folds, weighted by their images. ``mean_per_class`` and ``largest_class`` count each class's
    images and hits over all folds. ``top1_interval`` is that of all images, over groups if there
    are groups. ``mean`` and ``std`` are over folds. ``train_size`` and ``baseline_train_size`` are
    a fold's.
    """
    sizes = [result["test_size"] for result in results]
    total = sum(sizes)
    scores = {"mean": {}, "std": {}}
    for name in ACCURACIES:
        values = [result.get(name) for result in results]
        if None not in values:
            scores[name] = (
                sum(value * size for value, size in zip(values, sizes, strict=True)) / total
            )
            scores["mean"][name], scores["std"][name] = (
                statistics.mean(values),
                statistics.stdev(values),
            )
    images, correct = (
        np.sum([r["per_class"][name] for r in results], axis=0) for name in ("images", "correct")
    )
    scores["largest_class"] = float(100 * images.max() / total)
    if "mean_per_class" in scores:
        tested = images > 0
        scores["mean_per_class"] = float(100 * (correct[tested] / images[tested]).mean())
    interval = wilson_interval(correct.sum(), total)
    if "per_group" in results[0]:  # no group is in two folds
        counts = ([r["per_group"][name] for r in results] for name in ("correct", "images"))
        interval = group_interval(*map(np.concatenate, counts))
    return {
        **{name: results[0][name] for name in SAME if name in results[0]},
        **scores,
        "top1_interval": interval,
        **{
            name: round(statistics.mean(r[name] for r in results))
            for name in SIZES
            if name in results[0]
        },
        "test_size": total,
        **(
            {"test_groups": sum(r["test_groups"] for r in results)}
            if "test_groups" in results[0]
            else {}
        ),
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "folds": [{"fold": fold, **result} for fold, result in enumerate(results, start=1)],
    }
