"""``idmm tune``: which views, learning rate and N-way scale suit these images, by short runs on held-out ones."""

import contextlib
import importlib.util
import json
import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from idmm.config import FREE, PretrainConfig, parsing
from idmm.config.commands import TuneConfig
from idmm.data.split import counted
from idmm.errors import Interrupted, UserError, install
from idmm.files import made_folder, write_text
from idmm.locks import Lock
from idmm.progress import brief, duration, log, logging_to
from idmm.stages import beginning

HELD_OUT = 0.2  # share of the training images that trials are judged on, where data.val_fraction does not say
TRIALS = 20  # that fit into the time, if none is ended early
LEAST = 4  # trials that must fit
SHORTEST = 3  # epochs of a trial that are worth looking at
TIMING = 8.0  # seconds for the steps that are timed before the first trial


def tune(given: TuneConfig) -> str:
    """Compares settings of a recipe and writes the best to OUT/tuned.yaml; returns what to print, the table of options
    first.

    Raises:
        UserError: A mistake in the flags, no labels, or too little time.
        RunError: The recipe's own run failed.
        Interrupted: Ctrl-C; the same command goes on.
    """
    began = time.time() - (time.monotonic() - beginning())  # that of the command
    _check(given)
    from idmm.tuning import results, search  # torch takes seconds, mistakes in the flags are told at once

    out, asked = Path(given.out), [given.minutes, given.trials]
    _same_as_before(given)
    study = search.opened(out) if (out / search.STUDY).exists() else None
    known = study.user_attrs if study else {}
    if known.get("done") == asked:
        with logging_to(out):
            log.info("%s: finished already, nothing to do", out)
        return known["said"]
    base, notes, about = _prepared(given, known, began)
    lock = Lock(made_folder(given.out) / "tune")
    if not lock.acquire("silent"):
        raise UserError(f"out: '{out}' is in use by another run; wait for it or name another folder")
    with contextlib.closing(lock), logging_to(out):
        for line in notes:
            log.info("%s", line)
        write_text(out / "tune.yaml", parsing.dump(given))
        study = study or search.opened(out)
        for name, value in about.items():
            study.set_user_attr(name, value)
        plan = search.Search(given, base, study, began)
        try:
            (_on_ray if given.engine == "ray" else _here)(plan)
        except (Interrupted, KeyboardInterrupt):
            ended = sum(trial.state.is_finished() for trial in study.trials)
            what = f"{counted(ended, 'trial')} that ended {'is' if ended == 1 else 'are'} kept"
            raise Interrupted(f"interrupted; {what}, the same command goes on") from None
        said = results.written(plan)
        study.set_user_attr("said", said)
        study.set_user_attr("done", asked)
        return said


def _check(given: TuneConfig) -> None:
    faults = []
    if importlib.util.find_spec("optuna") is None:
        faults.append(f"tune: needs optuna; install it with: {install('tune')}")
    if given.data.folds is not None:
        faults.append("data.folds: leave it out; trials are judged on held-out training images (--data.val_fraction)")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        faults.append("tune: runs in one process; --engine ray has several trials at a time")
    if given.engine == "ray" and not given.ray.shared:
        faults.append("ray.shared: got False, but trials share the study in OUT; wanted a folder that all nodes see")
    if faults:
        raise UserError(*faults)
    if given.engine == "ray":
        from idmm.transfer import cluster

        cluster.require()


def _same_as_before(given: TuneConfig) -> None:
    """Refuses a folder that holds a comparison by other settings, and what --resume forbids."""
    from idmm.checkpoint import check_resume

    path = Path(given.out, "tune.yaml")
    check_resume(given.out, path.exists(), given.resume)
    if not path.exists():
        return
    old, new = (parsing.flatten(config) for config in (parsing.read_file(path), parsing.plain(given)))
    free = {*FREE, "minutes", "trials", "engine", *(key for key in new if key.startswith("ray."))}
    differ = [key for key in new if key not in free and old.get(key, new[key]) != new[key]]
    if differ:
        lines = [f"{key}: is {new[key]!r}, but '{given.out}' was begun with {old[key]!r}" for key in differ]
        raise UserError(*lines, f"out: '{given.out}' goes on with the settings that it began with; name a new folder")


# ---------------------------------------------------------------------- before the first trial
def _prepared(given: TuneConfig, known: dict, began: float) -> tuple[PretrainConfig, list[str], dict]:
    """Returns the recipe, resolved, lines for the log, and what the study is to remember: the images, and how long a
    trial is. Of what is ``known`` from an earlier call the length stays.

    Raises:
        UserError: The images have no labels, are others than before, or there is too little time.
    """
    from idmm.data.cache import fingerprint
    from idmm.data.datasets import open_splits
    from idmm.data.images import digest
    from idmm.stages.assemble import load_splits, resolve

    config = PretrainConfig(**{item.name: getattr(given, item.name) for item in fields(PretrainConfig)})
    config = replace(config, init=known.get("init", config.init))  # public weights of the commit that it began with
    data = replace(config.data, val_fraction=config.data.val_fraction or HELD_OUT)
    train = replace(config.train, minutes=None, knn_every=1, monitor_every=0, tensorboard=False)
    parts, notes = resolve(replace(config, data=data, train=train, resume="auto"))
    splits = load_splits(parts)
    held, labels = splits.val or splits.test, splits.train.labels
    if labels is None or held is None or len(np.unique(labels[labels >= 0])) < 2:
        raise UserError(_no_labels(parts.config.data, labels))
    own = open_splits(replace(data, val_fraction=0.0), labelled=False).val is not None
    images = digest(json.dumps([fingerprint(splits.train), fingerprint(held)]).encode()).hex()
    if known.get("images", images) != images:
        raise UserError(f"data: the images are not those that '{given.out}' was begun with; name a new folder")
    about = {"images": images, "held": len(held), "init": parts.config.init}
    about["where"] = "images of the val split" if own else "held-out training images"
    if "epochs" not in known:
        about |= _length(given, parts, len(splits.train), len(held), began)
    line = "trials of %d epochs on %d training images, judged by %d %s"
    notes.append(line % ({**known, **about}["epochs"], len(splits.train), len(held), about["where"]))
    return parts.config, notes, about


def _no_labels(data: Any, labels: Any) -> str:
    key = "labels" if data.labels is not None else "root" if data.root is not None else "name"
    lack = "has no labels for its training images" if labels is None else "has training images of one class only"
    wanted = "wanted a class for each of them (DIR/train/CLASS/*, or --data.labels FILE with a row for each)"
    return f"data.{key}: '{getattr(data, key)}' {lack}; tune compares by accuracy on held-out ones, {wanted}"


def _length(given: TuneConfig, parts: Any, train: int, held: int, began: float) -> dict:
    """Chooses the epochs of a trial by a few timed steps; returns them, and the seconds that a trial should take."""
    from idmm.transfer.estimate import AROUND, training_rates
    from idmm.tuning.search import RUNGS, SEARCH

    (phase,) = parts.phases
    rate = training_rates(parts, phase, TIMING)
    epoch = phase.steps(train) / phase.epochs * rate.step
    around = rate.start + AROUND + RUNGS * (train + held) * rate.image
    seconds = began + 60 * given.minutes - time.time()
    share = SEARCH * seconds / given.trials if given.trials else seconds / TRIALS
    most = parts.config.train.epochs
    epochs = given.epochs or int(min(most, max(min(SHORTEST, most), (share - around) / epoch)))
    estimate, least = around + epochs * epoch, min(LEAST, given.trials or LEAST)
    if least * estimate > seconds:
        spent = time.time() - began
        need = f"{least} trials of {epochs} epochs want about {duration(1.1 * (least * estimate + spent))}"
        what = f"minutes: {given.minutes:g} is too short, an epoch takes about {brief(epoch)} s here and {need}"
        raise UserError(f"{what}; give more of them, or smaller images, models or data (--data.subset)")
    return {"epochs": epochs, "estimate": estimate}


# ---------------------------------------------------------------------- engines
def _here(plan) -> None:
    from idmm.tuning.search import run

    while job := plan.next():
        run(job)
        plan.tell(job)


def _on_ray(plan) -> None:
    """Several trials at a time; each worker reports to the study in OUT, which all nodes see."""
    from idmm.transfer import cluster

    wanted, home = plan.given.ray, os.getcwd()
    with cluster.connected(wanted):
        import ray

        size = ray.cluster_resources()
        slots = size.get("CPU", 1) // wanted.num_cpus
        slots = int(min(slots, size.get("GPU", 0) // wanted.num_gpus) if wanted.num_gpus else slots)
        send = ray.remote(max_retries=0, num_cpus=wanted.num_cpus, num_gpus=wanted.num_gpus)(_on_a_node)
        running: dict[Any, Any] = {}
        try:
            while True:
                while len(running) < max(1, slots) and (job := plan.next()):
                    running[send.remote(job, home)] = job
                if not running:
                    return
                for future in ray.wait(list(running), timeout=1.0)[0]:
                    job, why = running.pop(future), ""
                    try:
                        ray.get(future)
                    except ray.exceptions.RayError as error:
                        why = cluster.reason(error)
                    plan.tell(job, why)
        finally:
            for future in running:
                ray.cancel(future, force=True)


def _on_a_node(job, home: str) -> None:
    from idmm.tuning.search import run

    os.chdir(home)  # what relative paths start from
    run(job)
