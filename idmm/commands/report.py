"""``idmm report``: a page on finished runs; collects what their files and images hold, which ``report/`` draws."""

import itertools
import json
import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from idmm.commands.found_runs import PROBE, found_runs, records
from idmm.config import FREE, DenseConfig, FinetuneConfig, parsing
from idmm.config.commands import ProbeConfig
from idmm.config.reading import read_file
from idmm.config.usage import ReportConfig
from idmm.errors import RunError, UserError
from idmm.files import home, is_public, made_folder, saved_info
from idmm.progress import log
from idmm.report.page import readable
from idmm.report.run_page import Features, RunFacts, write
from idmm.report.sheets import Tile
from idmm.report.stats import calibration
from idmm.stages import artifacts, stage_of

MISTAKES = 18
PAIRS = 10  # comparisons, at most: of more runs each is compared with the best
PERPLEXITY = 30.0  # of t-SNE
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
            log.info("%s: reading its files and images", run.path)
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
        folder, stage_of(config).name, _about(config), parsing.flatten(read_file(folder / "config.yaml")),
        _json(folder / "result.json"), [records(part) for part in parts], artifacts.environment(parts[0]),
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
    values = parsing.flatten(parsing.plain(config))
    for key in (*FREE, "seed", "data.subset.seed"):
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
    taken = {some[0].label for some in groups.values() if len(some) == 1}
    for first, *others in groups.values():
        name = first.label
        if others:
            name = re.sub(r"[\W_]*(seed)?[\W_]*$", "", os.path.commonprefix([name, *(run.label for run in others)]))
            name = name if name and name not in taken else f"{first.label} and {len(others)} more"
        taken.add(name)
        for run in (first, *others):
            run.group, run.detailed = name, run.detailed and run is first
    labels = {os.path.realpath(run.path): run.label for run in runs}
    for run in runs:
        if os.sep in (init := run.about["start"]) and not is_public(init):
            run.about["start"] = labels.get(os.path.realpath(home(init)), Path(init).name)


# ---------------------------------------------------------------------- predictions, features, images
@contextmanager
def _or_missing(run: RunFacts, what: str):
    """Keeps the reason if a part cannot be shown."""
    try:
        yield
    except (UserError, RunError) as error:
        run.missing.append(f"No {what}: {str(error).splitlines()[0]}")


def _read_details(run: RunFacts) -> None:
    """Reads what the page shows of a single run."""
    parts = _folds(run.path)
    sheets = {"Test images, the truth beside the prediction": run.path / "predictions.png"}
    sheets |= {f"idmm explore: {path.stem}": path for path in sorted(run.path.glob("explore/*.png"))}
    run.pictures = {title: path for title, path in sheets.items() if path.is_file()}
    if run.kind in DENSE:
        return
    with _or_missing(run, "crops"):
        run.crops, run.shown = _crops(parts[0], artifacts.config_of(parts[0]))
    if run.classifies:
        with _or_missing(run, "features"):
            run.features = _features(parts[0])
        with _or_missing(run, "predictions"):
            _predictions(run, parts)


def _crops(folder: Path, config: Any) -> tuple[list, str]:
    """Makes the views of some training images, and names the bands that pictures show of them."""
    from idmm.commands.crops import augmented_blocks, crop_blocks
    from idmm.data.composite import shown_of
    from idmm.seeding import derive
    from idmm.stages import STAGES

    saved = saved_info(folder)  # the config may leave mean and std to the images
    store, norm = artifacts.images(folder, "train"), {name: saved[name] for name in ("mean", "std")}
    if isinstance(config, FinetuneConfig):
        last = STAGES["finetune"].phases(config)[-1]
        norm["key"] = derive(config.seed, "stage", last.number)
        return augmented_blocks(store, config.augment, last.size, last.epochs, **norm), shown_of(store)
    norm |= {"cutmix_alpha": config.method.cutmix_alpha, "seed": config.seed}
    return crop_blocks(store, config.views, **norm), shown_of(store)


def _features(folder: Path) -> Features:
    """Lays the features before and after a run out in a plane."""
    from sklearn.manifold import TSNE
    from sklearn.metrics.pairwise import cosine_similarity

    found = artifacts.features(folder)
    if len(found.labels) < 4:
        raise UserError(f"{len(found.labels)} test images are too few to lay their features out.")
    places, nearest = {}, {}
    paired = np.bincount(found.labels)[found.labels] > 1  # others have no image that could be the right one
    for title, rows in (("before", found.before), ("after", found.after)):  # [M, d]
        cosines = cosine_similarity(rows)  # [M, M]
        np.fill_diagonal(cosines, -np.inf)
        if paired.any():
            nearest[title] = 100 * float(np.mean((found.labels[cosines.argmax(1)] == found.labels)[paired]))
        perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
        places[title] = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(rows)  # [M, 2]
    return Features(found.labels, [readable(name) for name in found.classes], places, nearest)


def _predictions(run: RunFacts, parts: list[Path]) -> None:
    """Reads the predictions of the test images, and the images of the surest mistakes among them."""
    from idmm.evaluate import Predictions

    found = [artifacts.predictions(part) for part in parts]
    truth, predicted, probability = (
        np.concatenate([getattr(one, name) for one in found]) for name in ("truth", "predicted", "probability")
    )
    run.classes = [readable(name) for name in found[0].classes]
    run.paths = [path for one in found for path in one.paths]
    run.predicted = Predictions(truth, predicted[:, None], len(run.classes), probability)
    run.calibration = calibration(probability, truth == predicted)
    wrong = np.flatnonzero(truth != predicted)
    surest = wrong[np.argsort(-probability[wrong], kind="stable")][:MISTAKES].tolist()
    with _or_missing(run, "pictures of mistakes"):
        from idmm.data.composite import picture

        stores = [artifacts.images(part, "test") for part in parts] if surest else []
        places = {path: (store, i) for store in stores for i, path in enumerate(store.names)}
        for i in surest:
            caption = f"taken for {run.classes[predicted[i]]} ({100 * probability[i]:.0f} %)\n"
            caption += f"is {run.classes[truth[i]]}\n{run.paths[i]}"
            run.mistakes.append(Tile(picture(*places[run.paths[i]]), caption))


# ---------------------------------------------------------------------- runs against each other
def _pairs(runs: list[RunFacts]) -> list[tuple[str, str, dict]]:
    """Compares classifiers on the same test images: all pairs, or of many runs each with the best."""
    from idmm.stages.results import mcnemar

    some = [run for run in runs if run.detailed and run.predicted is not None]
    truth, right = {}, {}
    for run in some:
        found = run.predicted
        truth[run.label] = dict(zip(run.paths, (run.classes[c] for c in found.truth), strict=True))
        right[run.label] = dict(zip(run.paths, found.predicted == found.truth, strict=True))
    pairs = list(itertools.combinations(some, 2))
    if len(pairs) > PAIRS:
        best = max(some, key=lambda run: run.result["top1"])
        pairs = [(best, run) for run in some if run is not best]
    labels = [(one.label, other.label) for one, other in pairs if truth[one.label] == truth[other.label]]
    return [(one, other, mcnemar(right[one], right[other])) for one, other in labels]
