"""k-fold cross-validation: one run per fold, each in its own folder, and the pooled result."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config.commands import ProbeConfig
from idmm.errors import UserError
from idmm.evaluation.baseline import BASELINE_SIZE, remarks
from idmm.files import holds_run
from idmm.notebook import Result
from idmm.progress import log
from idmm.report.stats import group_interval, wilson_interval
from idmm.training import clock
from idmm.training.log import logging_to
from idmm.training.run import Run
from idmm.training.run_folder import RunFolder, check_resume

F = TypeVar("F", PretrainConfig, FinetuneConfig, ProbeConfig)

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


def per_fold(run: Run[F], train_one: Callable[[Run[F]], dict[str, Any]]) -> Result:
    """Train one run, or one per fold of ``data.folds``; return the content of ``result.json``.

    The runs of folds are ordinary ones in ``out``/fold-1 and so on: an interrupted fold is resumed,
    a finished one is not repeated. Each gets a share of ``train.minutes``. Their results are
    pooled, see :func:`pooled`.

    Raises:
        UserError: The images cannot be split, or ``out`` holds something else.
    """
    config = run.config
    folds = config.data.folds
    if folds is None or config.data.fold is not None or not config.needs.test:
        return Result(train_one(run))
    assert config.out is not None  # of a resolved config
    configs = [config_of_fold(config, fold, folds) for fold in range(1, folds + 1)]
    is_used = any(one.out is not None and holds_run(one.out) for one in configs)
    if holds_run(config.out) and not is_used:
        raise UserError.of("out", f"'{config.out}' holds a run without folds", "Name a new folder")
    check_resume(config.out, is_used, config.resume)
    results = []
    started_at = run.started_at
    for one in configs:
        results.append(train_one(Run(one, run.spec, run.phases, run.notes, started_at)))
        started_at = clock.now()
    with RunFolder(config.out, config, "auto") as folder:
        if folder.finished:
            return Result(folder.result())
        with logging_to(folder.path):
            result = pooled(results)
            folder.write_result(result)
            _log_result(config.out, result)
    return Result(result)


def config_of_fold(config: F, fold: int, folds: int) -> F:
    """Return the config of a fold's run: its folder under ``out`` and its share of the minutes."""
    out = str(Path(config.out or "") / f"fold-{fold}")
    data = replace(config.data, fold=fold)
    if isinstance(config, ProbeConfig):
        return replace(config, out=out, data=data)
    train = config.train
    if train.minutes is not None:
        train = replace(train, minutes=train.minutes / folds)
    return replace(config, out=out, data=data, train=train, resume="auto")


def _log_result(out: str, result: dict[str, Any]) -> None:
    low, high = result["top1_interval"]
    log.info(
        f"{out}: top-1 {result['top1']:.2f} on {result['test_size']} images, each tested once "
        f"(95 % interval {low:.1f} to {high:.1f}). Mean ± standard deviation over "
        f"{len(result['folds'])} folds: {result['mean']['top1']:.2f} ± {result['std']['top1']:.2f}"
    )
    for remark in remarks(result):
        log.warning(remark)


def pooled(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of ``result.json`` of all folds from those of each.

    Each image is tested once. Shares (percent) such as ``top1`` are over all images: the mean over
    folds, weighted by their images. ``mean_per_class`` and ``largest_class`` count each class's
    images and hits over all folds. ``top1_interval`` is that of all images, over groups if there
    are groups. ``mean`` and ``std`` are over folds. ``train_size`` and ``baseline_train_size`` are
    a fold's.
    """
    first = results[0]
    sizes = [result["test_size"] for result in results]
    total = sum(sizes)
    scores: dict[str, Any] = {"mean": {}, "std": {}}
    for name in ACCURACIES:
        values = [result[name] for result in results if result.get(name) is not None]
        if len(values) == len(results):
            weighted = [value * size for value, size in zip(values, sizes, strict=True)]
            scores[name] = sum(weighted) / total
            scores["mean"][name] = statistics.mean(values)
            scores["std"][name] = statistics.stdev(values)
    images = np.sum([result["per_class"]["images"] for result in results], axis=0)  # [K]
    correct = np.sum([result["per_class"]["correct"] for result in results], axis=0)  # [K]
    scores["largest_class"] = float(100 * images.max() / total)
    if "mean_per_class" in scores:
        is_tested = images > 0
        scores["mean_per_class"] = float(100 * (correct[is_tested] / images[is_tested]).mean())
    pool = {name: first[name] for name in SAME if name in first} | scores
    pool["top1_interval"] = wilson_interval(correct.sum(), total)
    for name in SIZES:
        if name in first:
            pool[name] = round(statistics.mean(result[name] for result in results))
    pool["test_size"] = total
    if "per_group" in first:  # no group is in two folds
        group_correct = np.concatenate([result["per_group"]["correct"] for result in results])
        group_images = np.concatenate([result["per_group"]["images"] for result in results])
        pool["top1_interval"] = group_interval(group_correct.tolist(), group_images.tolist())
    if "test_groups" in first:
        pool["test_groups"] = sum(result["test_groups"] for result in results)
    pool["seconds"] = round(sum(result["seconds"] for result in results), 1)
    pool["folds"] = [{"fold": fold, **result} for fold, result in enumerate(results, start=1)]
    return pool
