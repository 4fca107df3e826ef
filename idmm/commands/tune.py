"""``idmm tune``: which views, learning rate and N-way scale suit these images, by short runs on held-out ones."""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from idmm.config import PretrainConfig, parsing
from idmm.config.commands import TuneConfig
from idmm.errors import UserError
from idmm.files import made_folder, write_text
from idmm.locks import Lock
from idmm.progress import duration, logging_to
from idmm.stages import beginning
from idmm.tuning.search import LEAST, SEARCH, Search

log = logging.getLogger("idmm")
HELD_OUT = 0.2  # share of the training images that trials are judged on, where data.val_fraction does not say
TRIALS = 20  # that fit into the time, if none is ended early
SHORTEST = 3  # epochs of a trial that are worth looking at
TIMING = 8.0  # seconds for the steps that are timed before the first trial
FREE = ("out", "resume", "minutes", "trials", "engine")  # what may differ when a study goes on


def tune(given: TuneConfig) -> str:
    """Compares settings of a recipe and writes the best to OUT/tuned.yaml.

    Returns:
        What is to be printed: the table of options, and what was written.

    Raises:
        UserError: A mistake in the flags, no labels, or too little time.
        RunError: The recipe's own run failed.
        Interrupted: Ctrl-C; the same command goes on.
    """
    began = time.time() - (time.monotonic() - beginning())  # that of the command
    storage = Path(given.out, "study.log")
    _check(given)
    _not_another(given)
    from idmm.tuning import results, trial  # torch takes seconds, mistakes are told at once

    study = trial.opened(str(storage)) if storage.exists() else None
    known = study.user_attrs if study else {}
    done = known.get("done", 0) >= given.minutes
    base, notes, about = _prepared(given, known, done, began)
    out = made_folder(given.out)
    with _alone(out), logging_to(out):
        for line in [f"{out}: finished already, nothing to do"] if done else notes:
            log.info("%s", line)
        write_text(out / "tune.yaml", parsing.dump(given))
        study = study or trial.opened(str(storage))
        for name, value in about.items():
            study.set_user_attr(name, value)
        search = Search(given, base, study, began)
        if not done:
            search.begin()
            (_on_ray if given.engine == "ray" else _here)(search)
        text = results.written(search, out)
        if not done:
            study.set_user_attr("done", given.minutes)
        return text


def _check(given: TuneConfig) -> None:
    faults = []
    if importlib.util.find_spec("optuna") is None:
        faults.append("tune: needs optuna; install it with: pip install 'idmm[tune]'")
    if given.data.folds is not None:
        faults.append("data.folds: leave it out; trials are judged on held-out training images (--data.val_fraction)")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        faults.append("tune: runs in one process; --engine ray has several trials at a time")
    if given.engine == "ray":
        if importlib.util.find_spec("ray") is None:
            faults.append("engine: ray needs ray; install it with: pip install 'idmm[ray]'")
        if not given.ray.shared:
            faults.append(
                "ray.shared: got False, but trials share the study in OUT; wanted a folder that all nodes see"
            )
    if faults:
        raise UserError(*faults)


def _not_another(given: TuneConfig) -> None:
    """Refuses a folder that holds another comparison, and what --resume forbids."""
    path = Path(given.out, "tune.yaml")
    if given.resume == "never" and path.exists():
        raise UserError(f"out: '{given.out}' holds a comparison already; --resume never wants a new folder")
    if given.resume == "must" and not path.exists():
        raise UserError(f"out: '{given.out}' holds no comparison to go on with; --resume must wants one")
    if not path.exists():
        return
    old, new = (parsing.flatten(config) for config in (yaml.safe_load(path.read_text()), parsing.plain(given)))
    free = (*FREE, *(key for key in {*old, *new} if key.startswith(("ray.", "data.cache", "data.workers"))))
    differ = [key for key in new if key not in free and old.get(key, new[key]) != new[key]]
    if differ:
        lines = [f"{key}: is {new[key]!r}, but '{given.out}' was begun with {old[key]!r}" for key in differ]
        raise UserError(*lines, f"out: '{given.out}' goes on with the settings that it began with; name a new folder")


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    lock = Lock(out / "tune")
    if not lock.acquire("silent"):
        raise UserError(f"out: '{out}' is in use by another run; wait for it or name another folder")
    with contextlib.closing(lock):
        yield


# ---------------------------------------------------------------------- before the first trial
def _prepared(given: TuneConfig, known: dict, done: bool, began: float) -> tuple[PretrainConfig, list[str], dict]:
    """Returns the recipe, resolved, lines for the log, and what the study is to remember: how many images are held
    out, and how long a trial is. Of what is ``known`` from an earlier call the length stays.

    Raises:
        UserError: The images have no labels, are others than before, or there is too little time.
    """
    from idmm.stages.assemble import load_splits, resolve

    config = PretrainConfig(**{item.name: getattr(given, item.name) for item in fields(PretrainConfig)})
    data = replace(config.data, val_fraction=config.data.val_fraction or HELD_OUT)
    train = replace(config.train, minutes=None, knn_every=1, monitor_every=0, tensorboard=False)
    parts, notes = resolve(replace(config, data=data, train=train, resume="auto"))
    if done:
        return parts.config, notes, {}
    splits = load_splits(parts)
    held = splits.val or splits.test
    labels = splits.train.labels
    if labels is None or held is None or len(np.unique(labels[labels >= 0])) < 2:
        raise UserError(_no_labels(parts.config.data, labels))
    about = {"held": len(held), "where": _where(data), "images": _digest(splits.train, held)}
    if known.get("images", about["images"]) != about["images"]:
        raise UserError(f"data: the images are not those that '{given.out}' was begun with; name a new folder")
    length = {} if "epochs" in known else _length(given, parts, len(splits.train), len(held), began)
    epochs = {**known, **length}["epochs"]
    line = "trials of %d epochs on %d training images, judged by %d %s"
    notes.append(line % (epochs, len(splits.train), len(held), about["where"]))
    return parts.config, notes, about | length


def _no_labels(data: Any, labels: Any) -> str:
    key = "labels" if data.labels is not None else "root" if data.root is not None else "name"
    lack = "has no labels for its training images" if labels is None else "has training images of one class only"
    wanted = "wanted a class for each of them (DIR/train/CLASS/*, or --data.labels FILE with a row for each)"
    return f"data.{key}: '{getattr(data, key)}' {lack}; tune compares by accuracy on held-out ones, {wanted}"


def _where(data: Any) -> str:
    from idmm.data.datasets import open_splits

    own = open_splits(replace(data, val_fraction=0.0), labelled=False).val is not None
    return "images of the val split" if own else "held-out training images"


def _digest(*stores: Any) -> str:
    from idmm.data.cache import fingerprint

    return hashlib.blake2b(json.dumps([fingerprint(s) for s in stores]).encode(), digest_size=16).hexdigest()


def _length(given: TuneConfig, parts: Any, train: int, held: int, began: float) -> dict:
    """Chooses the epochs of a trial by a few timed steps; returns them, and the seconds that a trial should take."""
    from idmm.transfer.estimate import AROUND, training_rates
    from idmm.tuning.trial import RUNGS

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
        what = f"minutes: {given.minutes:g} is too short, an epoch takes about {epoch:.2g} s here and {need}"
        raise UserError(f"{what}; give more of them, or smaller images, models or data (--data.subset)")
    return {"epochs": epochs, "estimate": estimate}


# ---------------------------------------------------------------------- engines
def _here(search: Search) -> None:
    from idmm.tuning import trial

    while job := search.next([]):
        search.tell(job, trial.run(job))


def _on_ray(search: Search) -> None:
    """Several trials at a time; each worker reports to the study in OUT, which all nodes see."""
    from idmm.transfer import cluster

    wanted, home = search.given.ray, os.getcwd()
    with cluster.connected(wanted):
        import ray

        size = ray.cluster_resources()
        slots = size.get("CPU", 1) // wanted.num_cpus
        slots = int(min(slots, size.get("GPU", 0) // wanted.num_gpus) if wanted.num_gpus else slots)
        send = ray.remote(max_retries=0, num_cpus=wanted.num_cpus, num_gpus=wanted.num_gpus)(_on_a_node)
        running: dict[Any, Any] = {}
        try:
            while True:
                while len(running) < max(1, slots) and (job := search.next(list(running.values()))):
                    running[send.remote(job, home)] = job
                if not running:
                    return
                for future in ray.wait(list(running), timeout=1.0)[0]:
                    search.tell(running.pop(future), _collected(ray, future))
        finally:
            for future in running:
                ray.cancel(future, force=True)


def _on_a_node(job, home: str):
    from idmm.tuning import trial

    os.chdir(home)  # what relative paths start from
    return trial.run(job)


def _collected(ray, future):
    from idmm.tuning.trial import FAILED, Outcome

    try:
        return ray.get(future)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, UserError):
            raise UserError(*cause.faults) from None
        return Outcome(FAILED, None, 0.0, why=" ".join(str(cause or error).split())[:300])
