"""One trial of ``idmm tune``: a short pretraining run, judged by its frozen features a few times on its way."""

import contextlib
import logging
import os
import shutil
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
from optuna.storages.journal import JournalFileBackend

from idmm import evaluate
from idmm.config import PretrainConfig
from idmm.errors import RunError
from idmm.seeding import permutation
from idmm.stages.pretrain import pretrain

log = logging.getLogger("idmm")
RUNGS = 4  # times that a trial is judged, the last at its end
KEPT = ("config.yaml", "metrics.jsonl", "log.txt")  # of a trial's folder
LABELS, DRAWS = 5, 5  # labels a class, and draws of them, of the measure fewlabel
FINISHED, WORSE, LATE, FAILED = "finished", "worse than the others", "out of time", "failed"


@dataclass(frozen=True)
class Job:
    """What a trial needs to be told, wherever it runs."""

    storage: str  # the study's file
    number: int  # of the trial
    identity: int  # Optuna's own of it
    config: PretrainConfig
    measure: str
    until: float  # when it must have ended (seconds, as time.time())
    prunable: bool  # whether it may be ended for being worse than the others


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    ended: str  # FINISHED, WORSE, LATE or FAILED
    value: float | None  # the accuracy measured last (percent)
    seconds: float
    precision: str | None = None  # that the run found best
    why: str = ""  # it failed


class _Ended(Exception):
    """A trial is not worth going on with."""


def opened(storage: str, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
    """Opens the study in a file, or begins it; trials in the worse half at a time are ended, after the first few."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of Optuna's parts call themselves experimental
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(storage)), study_name="tune", sampler=sampler,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4), direction="maximize", load_if_exists=True,
        )  # fmt: skip


def knn(seen, labels, held, truth) -> float:
    """Returns the accuracy of the 20 nearest neighbours' vote (percent)."""
    return evaluate.knn_accuracy(seen, labels, held, truth)


def fewlabel(seen, labels, held, truth) -> float:
    """Returns the accuracy of a linear probe on :data:`LABELS` of each class, the mean of :data:`DRAWS` (percent)."""
    shares = []
    for draw in range(DRAWS):
        order = permutation(0, "tune", len(labels), draw)
        some = np.concatenate([order[labels[order] == c][:LABELS] for c in np.unique(labels)])
        shares.append(np.mean(evaluate.probe_predict(seen[some], labels[some], held) == truth))
    return 100 * float(np.mean(shares))


MEASURES = {"knn": knn, "fewlabel": fewlabel}


def run(job: Job) -> Outcome:
    """Runs a trial; of its folder what it logged is kept, the weights are not."""
    trial = optuna.trial.Trial(opened(job.storage), job.identity)
    began, train, measured = time.time(), job.config.train, []

    def judge(seen, labels, held, truth) -> dict:
        value = MEASURES[job.measure](seen.numpy(), labels, held.numpy(), truth)
        measured.append((time.time(), value))
        epoch = min(train.epochs, len(measured) * train.knn_every)
        trial.report(value, RUNGS * epoch // train.epochs)
        if epoch < train.epochs:
            now, before = measured[-1][0], measured[-2][0] if len(measured) > 1 else began
            if now + (now - before) > job.until:
                raise _Ended(LATE)
            if job.prunable and trial.should_prune():
                raise _Ended(WORSE)
        return {job.measure: value}

    ended, precision, why = FINISHED, None, ""
    shutil.rmtree(job.config.out, ignore_errors=True)  # of a trial that was killed
    try:
        with _quietly():
            precision = pretrain(job.config, judge)["precision"]
    except _Ended as reason:
        ended = str(reason)
    except RunError as error:
        ended, why = FAILED, str(error)
    _tidied(Path(job.config.out))
    return Outcome(ended, measured[-1][1] if measured else None, time.time() - began, precision, why)


@contextlib.contextmanager
def _quietly():
    """Keeps what a run logs to its own log.txt."""
    handlers, log.handlers = log.handlers, []
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            yield
    finally:
        log.handlers = handlers


def _tidied(folder: Path) -> None:
    """Leaves of a run what tells how it went: no weights, and no result that looks like a backbone's."""
    shutil.rmtree(folder / "last", ignore_errors=True)
    for path in folder.glob("*"):
        if path.name not in KEPT:
            path.unlink()
