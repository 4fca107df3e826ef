"""``idmm report``: a page on finished runs; collects what their files hold, which ``report/`` draws."""

import itertools
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from idmm.config import RESUME_IGNORED, DenseConfig, FinetuneConfig, parsing
from idmm.config.commands import ProbeConfig
from idmm.config.reading import read_file
from idmm.config.usage import ReportConfig
from idmm.errors import UserError
from idmm.files import home, is_public, json_lines, made_folder
from idmm.inference.found_runs import PROBE, found_runs
from idmm.progress import log
from idmm.report.page import readable
from idmm.report.run_page import RunFacts, write
from idmm.stages import artifacts, stage_of

PROBED = "kNN and linear probe"
DENSE = {"detect": "detection", "segment": "segmentation"}


def report(given: ReportConfig) -> str:
    """Writes ``report.html`` and its pictures to ``given.out``; returns what to print.

    Raises:
        UserError: No run, one that is not finished, or ``out`` cannot be written.
    """
    folders, notes = found_runs(given.runs)
    for note in notes:
        log.warning(note)
    runs = [_facts(folder) for folder in folders]
    _name(runs)
    out = made_folder(given.out or str(home(given.runs[0]) / "report"))
    for run in runs:
        if run.detailed:
            log.info("%s: reading its files", run.path)
            _read_details(run)
    return f"{write(out, runs, _pairs(runs), notes)}, and its pictures beside it"


# ---------------------------------------------------------------------- small files
def _facts(folder: Path) -> RunFacts:
    """What is in a run's small files."""
    if not (folder / "result.json").is_file():
        result = _json(folder / PROBE)
        if not {"knn", "probe", "init", "dataset"} <= result.keys():
            raise UserError(f"runs: '{folder / PROBE}' is not what idmm probe writes; expected a run's folder")
        result["readouts"] = {name: result[name] for name in ("knn", "probe")}
        about = {"did": PROBED, "start": str(result["init"]), "model": "", "data": str(result["dataset"])}
        return RunFacts(folder, "probe", about, {}, result, [], group=str(folder), detailed=False)
    parts = _folds(folder)
    config = artifacts.config_of(parts[0], dense=True)
    return RunFacts(
        folder, stage_of(config).NAME, _about(config), parsing.flatten(read_file(folder / "config.yaml")),
        _json(folder / "result.json"), [json_lines(part / "metrics.jsonl") for part in parts],
        artifacts.environment(parts[0]),
        group=json.dumps(_signature(config)), detailed=not isinstance(config, ProbeConfig),
    )  # fmt: skip


def _folds(folder: Path) -> list[Path]:
    """The runs that a folder's result is of: its own, or those of its folds."""
    folds = sorted(folder.glob("fold-*"), key=lambda path: int(path.name[5:]) if path.name[5:].isdigit() else 0)
    return [fold for fold in folds if (fold / "result.json").is_file()] or [folder]


def _json(path: Path) -> dict:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"runs: '{path}' cannot be read ({error})") from None


def _about(config: Any) -> dict[str, str]:
    """What a run did, where it started, with which model, on which data."""
    start, where = config.init or "scratch", config.data.root
    if isinstance(config, ProbeConfig):
        did = PROBED
    elif isinstance(config, FinetuneConfig):
        did = "fine-tuning"
    elif isinstance(config, DenseConfig):
        did = DENSE[config.STAGE]
    else:
        did, start = f"pretraining by {config.method.name}", config.init or ""
    data = Path(where).name if where else config.data.name or "digits"
    return {"did": did, "start": start, "model": config.model.name or "", "data": data}


def _signature(config: Any) -> dict:
    """A config without seeds and folders; the run that it started from by its own."""
    values = parsing.flatten(parsing.to_dict(config))
    for key in (*RESUME_IGNORED, "seed", "data.subset.seed"):
        values.pop(key, None)
    with suppress(UserError):
        if config.init is not None:
            values["init"] = _signature(artifacts.config_of(home(config.init), dense=True))
    return values


def _name(runs: list[RunFacts]) -> None:
    """Gives runs short names, no two alike, and those that differ only in the seed a name together; the first of these
    is shown in detail."""
    paths = [Path(os.path.abspath(run.path)).parts for run in runs]
    depth = next(n for n in itertools.count(1) if len({path[-n:] for path in paths}) == len(paths))
    groups: dict[str, list[RunFacts]] = {}
    for run, path in zip(runs, paths, strict=True):
        run.label = readable("/".join(path[-depth:]))
        groups.setdefault(run.group, []).append(run)
    for first, *others in groups.values():
        name = f"{first.label} and {len(others)} more" if others else first.label
        for run in (first, *others):
            run.group, run.detailed = name, run.detailed and run is first
    labels = {os.path.realpath(run.path): run.label for run in runs}
    for run in runs:
        if os.sep in (init := run.about["start"]) and not is_public(init):
            run.about["start"] = labels.get(os.path.realpath(home(init)), Path(init).name)


# ---------------------------------------------------------------------- pictures, comparisons
def _read_details(run: RunFacts) -> None:
    """Reads what the page shows of a single run."""
    parts = _folds(run.path)
    files = {"Test images, the truth beside the prediction": run.path / "predictions.png"}
    for part in parts:
        files[f"Confusion matrix{f' of {part.name}' if len(parts) > 1 else ''}"] = part / "confusion.png"
    files |= {f"idmm explore: {path.stem}": path for path in sorted(run.path.glob("explore/*.png"))}
    run.pictures = {title: path for title, path in files.items() if path.is_file()}


def _pairs(runs: list[RunFacts]) -> list[tuple[str, str, dict]]:
    """Compares the first classifier with each other one on the same test images."""
    from idmm.stages.results import mcnemar

    right: dict[str, dict] = {}  # by the run's label, then by an image's name and class
    groups: dict[str, dict] = {}  # of these images
    for run in runs:
        if run.detailed and (run.path / artifacts.PREDICTIONS).is_file():
            found = artifacts.predictions(run.path)
            images = list(zip(found.paths, (found.classes[c] for c in found.truth), strict=True))
            right[run.label] = dict(zip(images, found.predicted == found.truth, strict=True))
            groups[run.label] = dict(zip(images, found.groups or [], strict=bool(found.groups)))
    first = next(iter(right), "")
    same = [label for label in right if label != first and right[label].keys() == right[first].keys()]
    return [(first, label, mcnemar(right[first], right[label], groups[first])) for label in same]
