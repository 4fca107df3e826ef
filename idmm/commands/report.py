"""``idmm report``: a page on finished runs; collects what their files and images tell, which ``report/`` draws."""

import json
import os
import re
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from idmm.commands.found_runs import PROBE, found_runs, records
from idmm.commands.recipe_of import nearest_recipe
from idmm.config import FREE, DenseConfig, FinetuneConfig, parsing
from idmm.config.commands import ProbeConfig
from idmm.config.reading import read_file
from idmm.config.usage import ReportConfig
from idmm.errors import RunError, UserError
from idmm.files import home, is_public, made_folder, saved_info
from idmm.intervals import wilson
from idmm.progress import log
from idmm.report.calibration import calibration
from idmm.report.facts import Cloud, Mistake, RunFacts, readable
from idmm.stages import artifacts, stage_of

MISTAKES = 18
PAIRS = 10  # comparisons, at most: of more runs each is compared with the best
PERPLEXITY = 30.0  # of t-SNE
PROBED = "kNN and linear probe"
DENSE = {"detect": "detection", "segment": "segmentation"}
NO_IMAGES = "The images cannot be read: {}"


def report(given: ReportConfig) -> str:
    """Writes ``report.html`` and its pictures to ``given.out``; returns what to print.

    Raises:
        UserError: No run, one that is not finished, one that is given twice, or ``out`` cannot be written.
    """
    folders, notes = found_runs(given.runs)
    for note in notes:
        log.warning(note)
    runs = [_facts(folder, number) for number, folder in enumerate(folders, start=1)]
    _name(runs)
    out = made_folder(given.out or str(home(given.runs[0]) / "report"))
    for run in runs:
        if run.detailed:
            log.info("%s: looking at its files and images", run.path)
            _look_closer(run)
    from idmm.report.run_page import write  # matplotlib takes a second

    return f"{write(out, runs, _pairs(runs), notes)}, and its pictures beside it"


# ---------------------------------------------------------------------- what files tell
def _facts(folder: Path, number: int) -> RunFacts:
    """What is in a run's small files."""
    if not (folder / "result.json").is_file():
        result = _json(folder / PROBE)
        if not {"knn", "probe", "init", "dataset"} <= result.keys():
            raise UserError(f"runs: '{folder / PROBE}' is not what idmm probe writes; wanted is a run's folder")
        shown = {"readouts": {name: result[name] for name in ("knn", "probe")}, **result}
        about = {"did": PROBED, "start": str(result["init"]), "data": str(result["dataset"])}
        return RunFacts("", number, folder, "probe", about, "", {}, shown, [], detailed=False)
    result, parts = _json(folder / "result.json"), _folds(folder)
    config = artifacts.config_of(parts[0], dense=True)
    if "top1" in result and result.get("test_size") and "top1_interval" not in result:  # of 0.1.0
        low, high = wilson(round(result["top1"] * result["test_size"] / 100), result["test_size"])
        result["top1_interval"] = [100 * float(low), 100 * float(high)]
    return RunFacts(
        label="", number=number, path=folder, kind=stage_of(config).name, about=_about(config),
        group=json.dumps(_signature(config)),
        config=parsing.flatten(read_file(folder / "config.yaml")), result=result, records=[records(p) for p in parts],
        environment=artifacts.environment(parts[0]), parameters=_parameters(parts[0]), recipe=nearest_recipe(config),
        detailed=not isinstance(config, ProbeConfig),
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


def _parameters(folder: Path) -> int | None:
    """Counts the numbers in the exported backbone, without what is no parameter but counted while training."""
    from safetensors import SafetensorError, safe_open

    with suppress(OSError, SafetensorError), safe_open(folder / "backbone.safetensors", "np") as file:
        names = [name for name in file.keys() if not name.endswith(("running_mean", "running_var", "_tracked"))]
        return sum(int(np.prod(file.get_slice(name).get_shape())) for name in names)
    return None


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


# ---------------------------------------------------------------------- names
def _name(runs: list[RunFacts]) -> None:
    """Gives runs short names, no two alike, and those that differ in the seed alone a name together; the first of
    these is the one that is shown in detail."""
    together: dict[str, list[RunFacts]] = {}
    for run, name in zip(runs, _short([run.path for run in runs]), strict=True):
        run.label = readable(name)
        together.setdefault(run.group or run.label, []).append(run)
    taken = {some[0].label for some in together.values() if len(some) == 1}
    for some in together.values():
        name = re.sub(r"[\W_]*(seed)?[\W_]*$", "", os.path.commonprefix([run.label for run in some]))
        if len(some) == 1:
            name = some[0].label
        elif not name or name in taken:
            name = f"{some[0].label} and {len(some) - 1} more"
        taken.add(name)
        for number, run in enumerate(some):
            run.group = name
            run.detailed = run.detailed and number == 0
    known = {os.path.realpath(run.path): run.label for run in runs}
    for run in runs:
        if os.sep in (init := run.about["start"]) and not is_public(init):
            run.about["start"] = known.get(os.path.realpath(home(init)), Path(init).name)


def _short(paths: list[Path]) -> list[str]:
    """The ends of paths, no two alike, as short as that allows."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    depths = [2 if re.match(r"stage1$|scratch$|fold-\d", path.name) else 1 for path in paths]
    while True:
        names = ["/".join(own[-depth:]) for own, depth in zip(parts, depths, strict=True)]
        alike = [n for n, name in enumerate(names) if names.count(name) > 1 and depths[n] < len(parts[n])]
        if not alike:
            return names
        for n in alike:
            depths[n] += 1


# ---------------------------------------------------------------------- what images tell
@contextmanager
def _or_says(run: RunFacts, name: str, line: str = "{}"):
    """Keeps why something is missing."""
    try:
        yield
    except (UserError, RunError) as error:
        run.missing[name] = line.format(str(error).splitlines()[0])


def _look_closer(run: RunFacts) -> None:
    """Reads, and for older runs makes, what the page shows of a run alone."""
    parts = _folds(run.path)
    if run.kind in DENSE:
        with suppress(OSError), Image.open(run.path / "predictions.png") as picture:  # gone, or none
            run.drawn = np.asarray(picture.convert("RGB"))
        return
    with _or_says(run, "crops", NO_IMAGES):
        run.crops, run.shown = _crops(parts[0], artifacts.config_of(parts[0]))
    if run.classifies:
        with _or_says(run, "cloud"):
            run.cloud = _cloud(parts[0])
        with _or_says(run, "predicted"):
            _predictions(run, parts)
    _explored(run, parts[0])


def _crops(folder: Path, config: Any) -> tuple[list, str]:
    """Makes the views of some training images, and says what pictures show of them."""
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


def _cloud(folder: Path) -> Cloud | None:
    """Lays the features before and after a run out in a plane."""
    from sklearn.manifold import TSNE
    from sklearn.metrics.pairwise import cosine_similarity

    found = artifacts.features(folder)
    if len(found.labels) < 4:
        raise UserError(f"There are {len(found.labels)} test images: too few to lay their features out.")
    places, nearest = {}, {}
    paired = np.bincount(found.labels)[found.labels] > 1  # others have no image that could be the right one
    for title, rows in (("before", found.before), ("after", found.after)):  # [M, d]
        like = cosine_similarity(rows)  # [M, M]
        np.fill_diagonal(like, -np.inf)
        if paired.any():
            nearest[title] = 100 * float(np.mean((found.labels[like.argmax(1)] == found.labels)[paired]))
        perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
        places[title] = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(rows)  # [M, 2]
    return Cloud(found.labels, [readable(name) for name in found.classes], places, nearest)


def _predictions(run: RunFacts, parts: list[Path]) -> None:
    """Reads what the test images are taken for, and how sure of it, and looks for the surest mistakes among them."""
    from idmm.evaluate import Predictions

    found = [artifacts.predictions(part) for part in parts]
    truth, predicted = (np.concatenate([getattr(one, name) for one in found]) for name in ("truth", "predicted"))
    known = all(one.probability is not None for one in found)
    probability = np.concatenate([one.probability for one in found]) if known else None
    run.classes = [readable(name) for name in found[0].classes]
    run.paths = [path for one in found for path in one.paths]
    run.predicted = Predictions(truth, predicted[:, None], len(run.classes), probability)
    if not known:
        why = "predictions.csv is of an older version, without probabilities, and the images or weights are gone."
        run.missing |= {"mistakes": why, "calibration": why}
        return
    run.calibration = calibration(probability, truth == predicted)
    wrong = np.flatnonzero(truth != predicted)
    surest = wrong[np.argsort(-probability[wrong], kind="stable")][:MISTAKES]
    run.mistakes = [
        Mistake(run.paths[i], run.classes[truth[i]], run.classes[predicted[i]], float(probability[i])) for i in surest
    ]
    with _or_says(run, "mistakes", NO_IMAGES):
        for part, one in zip(parts, found, strict=True):
            if wanted := [mistake for mistake in run.mistakes if mistake.path in one.paths]:
                from idmm.data.composite import picture, shown_of  # torch takes seconds

                store = artifacts.images(part, "test")
                run.shown, place = shown_of(store), {name: i for i, name in enumerate(store.names)}
                for mistake in (one for one in wanted if one.path in place):
                    mistake.image = picture(store, place[mistake.path])


def _explored(run: RunFacts, folder: Path) -> None:
    """Reads what ``idmm explore`` left, with its sheets."""
    place = folder / "explore"
    if not (place / "explore.json").is_file():
        if run.kind == "pretrain":
            run.missing["explored"] = f"idmm explore {folder} shows which training images are alike."
        return
    with _or_says(run, "explored"):
        run.explored = _json(place / "explore.json")
        for section in run.explored.get("sections", ()):
            section["pictures"] = []
            for name in section.get("sheets", ()):
                with suppress(OSError), Image.open(place / name) as sheet:  # gone, or no picture
                    section["pictures"].append(np.asarray(sheet.convert("RGB")))


# ---------------------------------------------------------------------- runs against each other
def _pairs(runs: list[RunFacts]) -> list[tuple[str, str, dict]]:
    """Compares classifiers on the same test images, all, or of many each with the best."""
    from idmm.stages.results import mcnemar

    some = [run for run in runs if run.detailed and run.predicted is not None]
    truth, right = {}, {}
    for run in some:
        found = run.predicted
        truth[run.label] = dict(zip(run.paths, (run.classes[c] for c in found.truth), strict=True))
        right[run.label] = dict(zip(run.paths, found.predicted == found.truth, strict=True))
    pairs = list(combinations(some, 2))
    if len(pairs) > PAIRS:
        best = max(some, key=lambda run: run.result["top1"])
        pairs = [(best, run) for run in some if run is not best]
    labels = [(one.label, other.label) for one, other in pairs if truth[one.label] == truth[other.label]]
    return [(one, other, mcnemar(right[one], right[other])) for one, other in labels]
