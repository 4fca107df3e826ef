"""``idmm report``: a page on finished runs. Their files are read here, ``report/`` draws them."""

import os
from pathlib import Path
from typing import Any

from idmm.config import PretrainConfig
from idmm.config.commands import ReportConfig
from idmm.config.reading import read_file
from idmm.config.schema import flatten
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
from idmm.report.charts import Point
from idmm.report.page import Picture, readable
from idmm.report.run_page import KINDS, RunComparison, RunFacts, compare, write
from idmm.report.stats import PREDICTIONS, compared, holm
from idmm.report.table import with_facts

PER_CLASS = "per_class.csv"
PICTURES = {
    "curves.png": "Curves",
    "confusion.png": "Confusion matrix",
    "mistakes.png": "Mistakes",
}


def report(config: ReportConfig) -> str:
    """Write ``report.html`` to ``config.out``, and return a line for the terminal.

    Raises:
        UserError: No run, an unfinished one, or ``out`` cannot be written.
    """
    folders, notes = finished_runs(config.runs)
    for note in notes:
        log.warning(note)
    labels = _labels(folders)
    runs = [_read_run(folder, labels) for folder in folders]
    first = expand_home(config.runs[0])
    out = made_folder(config.out or str(first / "report"))
    comparisons = _comparisons(runs)
    pictures = compare(runs, out)
    return str(write(out, runs, comparisons, notes, pictures))


def _comparisons(runs: list[RunFacts]) -> list[RunComparison]:
    """Compare the first classifier with each other one that has the same test images."""
    classifiers = [run for run in runs if (run.path / PREDICTIONS).is_file()]
    if not classifiers:
        return []
    first, *others = classifiers
    tests = {}
    for run in others:
        if run.data == first.data:
            test = compared(first.path, run.path)
            if test is not None:
                tests[run.label] = test
    adjusted = holm([test["p"] for test in tests.values()])
    comparisons = []
    for (label, test), p in zip(tests.items(), adjusted, strict=True):
        one = RunComparison(first.label, label, test["images"], test["points"], p)
        comparisons.append(one)
    return comparisons


def _read_run(folder: Path, labels: dict[str, str]) -> RunFacts:
    """Read a run. ``labels``: of all runs by their real paths."""
    config = read_config(_folds(folder)[0])
    kind = config.COMMAND
    task = KINDS[kind].lower()
    start = _start_name(config.init or "", labels)
    if isinstance(config, PretrainConfig):
        task += f" by {config.method.name}"
    elif not start:
        start = "scratch"
    per_class = []
    if (folder / PER_CLASS).is_file():
        per_class = read_csv(folder / PER_CLASS)
    return RunFacts(
        path=folder,
        label=labels[os.path.realpath(folder)],
        kind=kind,
        task=task,
        start=start,
        data=dataset_name(config.data),
        model=with_facts(config.model.name or "", config.model.kwargs),
        method=_method(config),
        config=flatten(read_file(folder / "config.yaml")),
        result=read_json(folder / "result.json", REWRITE),
        curve=_curve(folder / "metrics.jsonl"),
        per_class=per_class,
        pictures=_pictures(folder),
    )


def _method(config: Any) -> str:
    """Return the method of a run of pretraining, or of the one that a run started from.

    Other runs have the name of their weights, or ``scratch``.
    """
    start = expand_home(config.init or "")
    if not isinstance(config, PretrainConfig) and config.init and (start / "config.yaml").is_file():
        config = read_config(start)
    if isinstance(config, PretrainConfig):
        return config.method.name
    return config.init or "scratch"


def _curve(file: Path) -> list[Point]:
    """Return the top-1 accuracies in ``metrics.jsonl`` over epochs, if a run has it."""
    curve = []
    for epoch, record in enumerate(read_metrics(file), start=1):
        if "top1" in record:
            curve.append(Point(epoch, record["top1"]))
    return curve


def _folds(folder: Path) -> list[Path]:
    """Return the finished runs of a folder's folds, or the folder itself."""
    results = folder.glob("fold-*/result.json")
    in_order = sorted(results, key=lambda path: (len(str(path)), path))  # 10 after 9
    return [result.parent for result in in_order] or [folder]


def _labels(folders: list[Path]) -> dict[str, str]:
    """Return a short unique label of each run by its real path."""
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    depth = 1
    while len({path[-depth:] for path in paths}) < len(paths):
        depth += 1
    labels = {}
    for folder, path in zip(folders, paths, strict=True):
        labels[os.path.realpath(folder)] = readable("/".join(path[-depth:]))
    return labels


def _start_name(start: str, labels: dict[str, str]) -> str:
    """Return the label of the run that another started from, or the name of its folder."""
    if os.sep not in start or is_public(start):
        return start
    path = os.path.realpath(expand_home(start))
    return labels.get(path, Path(start).name)


def _pictures(run: Path) -> list[Picture]:
    """Return the pictures of a run and those of ``idmm explore``."""
    pictures = []
    folds = _folds(run)
    for fold in folds:
        for name, title in PICTURES.items():
            if len(folds) > 1:
                title += f" of {fold.name}"
            pictures.append(Picture(fold / name, title))
    for path in sorted(run.glob("explore/*.png")):
        pictures.append(Picture(path, f"idmm explore: {path.stem}"))
    return [picture for picture in pictures if picture.path.is_file()]
