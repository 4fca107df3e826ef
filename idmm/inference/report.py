"""``idmm report``: a page on finished runs. Their files are read here, ``report/`` draws them."""

import itertools
import os
from pathlib import Path
from typing import Any

from idmm.config import PretrainConfig, parsing
from idmm.config.commands import ReportConfig
from idmm.config.reading import read_file
from idmm.files import (
    REWRITE,
    expand_home,
    is_public,
    made_folder,
    read_csv,
    read_json,
    read_metrics,
)
from idmm.inference.runs import dataset_name, finished_runs, read_config
from idmm.progress import log
from idmm.report.page import readable
from idmm.report.run_page import KINDS, RunFacts, write
from idmm.report.run_pictures import compare
from idmm.report.stats import PREDICTIONS, compared, format_number, holm
from idmm.report.table import with_facts
from idmm.runs import stage_of

PER_CLASS = "per_class.csv"
CHANCE = 0.05  # a difference with this p or more may be chance


def report(config: ReportConfig) -> str:
    """Write ``report.html`` to ``config.out``, and return a line for the terminal.

    Raises:
        UserError: No run, an unfinished one, or ``out`` cannot be written.
    """
    folders, notes = finished_runs(config.runs)
    for note in notes:
        log.warning(note)
    runs = [_read_run(folder) for folder in folders]
    _set_labels(runs)
    out = made_folder(config.out or str(expand_home(config.runs[0]) / "report"))
    # the first classifier with each other one on the same test images
    first, *others = [run for run in runs if (run.path / PREDICTIONS).is_file()] or [None]
    tests = {}
    for run in others:
        if run.data == first.data and (test := compared(first.path, run.path)):
            tests[run.label] = test
    comparisons = []
    for (label, test), p in zip(
        tests.items(), holm([test["p"] for test in tests.values()]), strict=True
    ):
        verdict = "the difference may be chance"
        if p < CHANCE:
            verdict = f"{first.label if test['points'] > 0 else label} is better"
        points = format_number(test["points"], sign=True)
        comparisons.append([first.label, label, f"{test['images']:,}", points, f"{p:.2g}", verdict])
    return str(write(out, runs, comparisons, notes, compare(runs, out)))


def _read_run(folder: Path) -> RunFacts:
    folds = _folds(folder)
    config = read_config(folds[0])
    kind = stage_of(config).NAME
    if isinstance(config, PretrainConfig):
        without_init = ""
    else:
        without_init = "scratch"
    return RunFacts(
        path=folder,
        kind=kind,
        task=KINDS[kind].lower() + (f" by {config.method.name}" if kind == "pretrain" else ""),
        start=config.init or without_init,
        model=with_facts(config.model.name or "", config.model.kwargs),
        method=_method(config),
        curve=_curve(folder / "metrics.jsonl"),
        data=dataset_name(config.data),
        pictures=_pictures(folder),
        per_class=read_csv(folder / PER_CLASS) if (folder / PER_CLASS).is_file() else [],
        config=parsing.flatten(read_file(folder / "config.yaml")),
        result=read_json(folder / "result.json", REWRITE),
    )


def _method(config: Any) -> str:
    """Return the method that trained a backbone, or of the run that a classifier started from, else
    the weights."""
    start = expand_home(config.init or "")
    if not isinstance(config, PretrainConfig) and config.init and (start / "config.yaml").is_file():
        config = read_config(start)
    if isinstance(config, PretrainConfig):
        return config.method.name
    return config.init or "scratch"


def _curve(file: Path) -> list[tuple[int, float, float]]:
    """Return the epochs and top-1 accuracies in ``metrics.jsonl``, if a run has it."""
    curve = []
    for epoch, record in enumerate(read_metrics(file), start=1):
        if "top1" in record:
            curve.append((epoch, record["top1"], 0.0))
    return curve


def _folds(folder: Path) -> list[Path]:
    """Return the finished runs of a folder's folds, or the folder itself."""
    folds = sorted(
        folder.glob("fold-*"), key=lambda path: int(path.name[5:]) if path.name[5:].isdigit() else 0
    )
    return [fold for fold in folds if (fold / "result.json").is_file()] or [folder]


def _set_labels(runs: list[RunFacts]) -> None:
    """Give each run a short unique label, and name the run that it started from by its label."""
    paths = [Path(os.path.abspath(run.path)).parts for run in runs]
    depth = next(n for n in itertools.count(1) if len({path[-n:] for path in paths}) == len(paths))
    for run, path in zip(runs, paths, strict=True):
        run.label = readable("/".join(path[-depth:]))
    labels = {os.path.realpath(run.path): run.label for run in runs}
    for run in runs:
        if os.sep in run.start and not is_public(run.start):
            run.start = labels.get(os.path.realpath(expand_home(run.start)), Path(run.start).name)


def _pictures(run: Path) -> dict[str, Path]:
    """Return the pictures of a run by their titles."""
    files = {}
    folds = _folds(run)
    for fold in folds:
        of_fold = "" if len(folds) == 1 else f" of {fold.name}"
        for title, stem in (
            ("Curves", "curves"),
            ("Confusion matrix", "confusion"),
            ("Mistakes", "mistakes"),
        ):
            files[f"{title}{of_fold}"] = fold / f"{stem}.png"
    files |= {f"idmm explore: {path.stem}": path for path in sorted(run.glob("explore/*.png"))}
    return {title: path for title, path in files.items() if path.is_file()}
