"""The search of ``idmm tune``: which trial comes next, how one is run and judged, and what all have shown.

Optuna's study is all that is remembered. Trials of the same settings differ in their seeds. At the end the recipe and
the two best settings are repeated, so that the best is not merely the luckiest.
"""

import contextlib
import math
import os
import shutil
import time
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from idmm import evaluate
from idmm.checkpoint import START
from idmm.config import PretrainConfig
from idmm.config.commands import TuneConfig
from idmm.errors import RunError
from idmm.progress import duration, log
from idmm.seeding import derive, permutation
from idmm.stages.pretrain import pretrain
from idmm.tuning.options import applied, options_of, shown

STUDY = "study.log"  # of OUT
SEARCH = 0.75  # share of the time after which no new settings are tried, but the best ones repeated
ROUNDS = 4  # of repeats, at most
REST = 4.0  # seconds for the picture and the importances, at most a twentieth of the time
RUNGS = 4  # times that a trial is judged, the last at its end
KEPT = ("config.yaml", "metrics.jsonl", "log.txt")  # of a trial's folder
LABELS, DRAWS = 5, 5  # labels a class, and draws of them, of the measure fewlabel
FINISHED, WORSE, LATE, FAILED = "finished", "worse than the others", "out of time", "failed"


@dataclass(frozen=True)
class Job:
    """What a trial needs to be told, wherever it runs."""

    trial: optuna.Trial
    config: PretrainConfig
    measure: str
    until: float  # when it must have ended (seconds, as time.time())
    prunable: bool  # whether it may be ended for being worse than the others


def opened(out: Path) -> optuna.Study:
    """Opens the study in a folder, or begins it; trials in the worse half at a time are ended, after the first few."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of Optuna's parts call themselves experimental
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str((out / STUDY).absolute()))),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
            study_name="tune", direction="maximize", load_if_exists=True,
        )  # fmt: skip


class Search:
    """The trials of a study: which comes next, and what they have shown.

    Args:
        given: The command's config.
        base: The recipe, resolved.
        study: With what the command found in its ``user_attrs``. A trial's have ``seed`` and, when it has ended,
            ``ended`` (FINISHED, WORSE, LATE or FAILED) and ``seconds``; its value is the accuracy measured last.
        began: When the command was called (seconds, as time.time()).
    """

    def __init__(self, given: TuneConfig, base: PretrainConfig, study: optuna.Study, began: float):
        self.given, self.base, self.study, self.out = given, base, study, Path(given.out)
        self.options = options_of(base)
        self.usual = {option.name: option.usual for option in self.options}
        self._spaces = {option.name: CategoricalDistribution(option.values) for option in self.options}
        self.began, self.spent, whole = began, study.user_attrs.get("seconds", 0.0), 60 * given.minutes
        self.until = began + whole - self.spent - min(REST, whole / 20)
        # another seed after each start: the first draws would be those of the start before
        seed = derive(base.seed, "tune", len(study.trials)) % 2**32
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=8, seed=seed)
        again = [t for t in self._all() if t.state == TrialState.RUNNING]  # killed in the middle
        for t in again:
            study.tell(t.number, state=TrialState.FAIL)
        if self.key(self.usual) not in self.finished():
            study.enqueue_trial(self.usual)
        for t in again:
            if t.params != self.usual:
                study.enqueue_trial(t.params)

    def _all(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def key(self, params: dict) -> tuple:
        """Returns the values of settings, in order of the options."""
        return tuple(params[name] for name in self.usual)

    # ------------------------------------------------------------------ what there is
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Returns the trials that have ended."""
        return [t for t in self._all() if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]

    def finished(self) -> dict[tuple, dict[int, float]]:
        """Returns the accuracies of those that were finished, by settings and seed."""
        found: dict[tuple, dict[int, float]] = {}
        for t in self.trials():
            if t.state == TrialState.COMPLETE:
                found.setdefault(self.key(t.params), {})[t.user_attrs["seed"]] = t.value
        return found

    def best(self) -> tuple[dict, float, float, int]:
        """Returns the best options, their accuracy, the recipe's, and over how many seeds both are means.

        The recipe is one of those compared; the others must have as many seeds in common with it as any.
        """
        found = self.finished()
        recipe = found.pop(self.key(self.usual), None)
        if recipe is None:
            raise RunError("minutes: there was not even time for the recipe's own trial; give more of them")
        shared = {key: recipe.keys() & values.keys() for key, values in found.items()}
        most = max(map(len, shared.values()), default=0)
        if not most:
            value = next(iter(recipe.values()))
            return self.usual, value, value, 1
        deep = [key for key, seeds in shared.items() if len(seeds) == most]
        best = max(deep, key=lambda key: mean(found[key][s] - recipe[s] for s in shared[key]))
        value, usual = (mean(values[s] for s in shared[best]) for values in (found[best], recipe))
        if value <= usual:
            return self.usual, usual, usual, most
        return dict(zip(self.usual, best, strict=True)), value, usual, most

    # ------------------------------------------------------------------ one after the other
    def next(self) -> Job | None:
        """Returns the next job; None where there is none, or none while others are running."""
        left, full, tried = self.until - time.time(), self._full(), self._tried()
        if any(t.state == TrialState.WAITING for t in self._all()):
            if left <= 0:
                return None
        elif len(tried) >= (self.given.trials or math.inf) or left <= max(full, (1 - SEARCH) * 60 * self.given.minutes):
            again = self._to_repeat(tried)
            if again is None or left < 1.05 * full:
                return None
            self.study.enqueue_trial(dict(zip(self.usual, again, strict=True)))
        return self._job(self.study.ask(self._spaces), tried)

    def _tried(self) -> Counter:
        """How often settings were tried; what was killed or had no time does not count."""
        apart = TrialState.FAIL, TrialState.WAITING
        trials = [t for t in self._all() if t.state not in apart and t.user_attrs.get("ended") != LATE]
        return Counter(self.key(t.params) for t in trials)

    def _full(self) -> float:
        """Seconds that a whole trial takes, the longest so far; before the first as was estimated."""
        seen = [t.user_attrs["seconds"] for t in self.trials() if t.state == TrialState.COMPLETE]
        return max(seen, default=self.study.user_attrs["estimate"])

    def _to_repeat(self, tried: Counter) -> tuple | None:
        """The recipe or one of the two best settings, which should have another seed."""
        usual, seed = self.key(self.usual), self.base.seed
        first = {key: seeds[seed] for key, seeds in self.finished().items() if key != usual and seed in seeds}
        best = sorted(first, key=first.get, reverse=True)[:2]
        some = [key for key in [*best[:1], usual, *best[1:]] if tried[key] <= ROUNDS]
        return min(some, key=lambda key: tried[key], default=None) if best else None

    def _job(self, trial: optuna.Trial, tried: Counter) -> Job:
        """What is to be run, by a seed that its settings have not had."""
        seed = self.base.seed + tried[self.key(trial.params)]
        trial.set_user_attr("seed", seed)
        config = applied(self.base, trial.params, self.study.user_attrs["epochs"])
        # what the first run has found to be the fastest, all others take
        precisions = [t.user_attrs["precision"] for t in self.trials() if t.state == TrialState.COMPLETE]
        precision = next(iter(precisions), config.train.precision)
        train = replace(config.train, knn_every=-(-config.train.epochs // RUNGS), precision=precision)
        config = replace(config, train=train, seed=seed, out=str(self.out / "trials" / str(trial.number)))
        searched = seed == self.base.seed and trial.params != self.usual
        return Job(trial, config, self.given.measure, self.until, searched)

    def tell(self, job: Job, why: str = "") -> None:
        """Notes that a trial has ended, and says so; ``why`` its worker died, where it did."""
        if why:
            _note(job.trial, ended=FAILED, seconds=0.0, why=why)
        found = self._all()[job.trial.number]
        # a run that diverged is as bad as one that was ended early, and no gap in what Optuna knows
        finished = found.user_attrs["ended"] == FINISHED
        value = found.intermediate_values[RUNGS] if finished else None
        self.study.tell(job.trial, value, TrialState.COMPLETE if finished else TrialState.PRUNED)
        self.study.set_user_attr("seconds", self.spent + time.time() - self.began)
        self._say(self._all()[job.trial.number])

    def _say(self, t: optuna.trial.FrozenTrial) -> None:
        seed, why, found = t.user_attrs["seed"], t.user_attrs.get("why", ""), self.key(self.usual) in self.finished()
        if why and t.params == self.usual and not found:
            raise RunError(f"the recipe's own trial failed: {why}")
        what = ", ".join(f"{n} {shown(v)}" for n, v in t.params.items() if v != self.usual[n]) or "the recipe as it is"
        what += f", again with seed {seed}" if seed != self.base.seed else ""
        how = [] if t.value is None else [f"{t.value:.1f} %"]
        how += [] if t.state == TrialState.COMPLETE else [f"{t.user_attrs['ended']}{f' ({why})' if why else ''}"]
        beside = "; best {1:.1f} %, the recipe {2:.1f} %".format(*self.best()) if found else ""
        left = duration(max(0.0, self.until - time.time()))
        log.info("trial %d (%s): %s%s; %s left", t.number, what, ", ".join(how), beside, left)


# ---------------------------------------------------------------------- a trial
def fewlabel(seen, labels, held, truth) -> float:
    """Returns the accuracy of a linear probe on :data:`LABELS` of each class, the mean of :data:`DRAWS` (percent)."""
    shares = []
    for draw in range(DRAWS):
        order = permutation(0, "tune", len(labels), draw)
        some = np.concatenate([order[labels[order] == c][:LABELS] for c in np.unique(labels)])
        shares.append(np.mean(evaluate.probe_predict(seen[some], labels[some], held) == truth))
    return 100 * float(np.mean(shares))


MEASURES = {"knn": evaluate.knn_accuracy, "fewlabel": fewlabel}


def run(job: Job) -> None:
    """Runs a trial and notes how it ended; of its folder what it logged is kept, the weights are not."""
    trial, train, out, times = job.trial, job.config.train, Path(job.config.out), [time.time()]

    def judge(seen, labels, held, truth) -> dict:
        value = MEASURES[job.measure](seen.numpy(), labels, held.numpy(), truth)
        times.append(time.time())
        epoch = min(train.epochs, (len(times) - 1) * train.knn_every)
        trial.report(value, RUNGS * epoch // train.epochs)
        if epoch < train.epochs:
            if 2 * times[-1] - times[-2] > job.until:  # the next part would be late
                raise optuna.TrialPruned(LATE)
            if job.prunable and trial.should_prune():
                raise optuna.TrialPruned(WORSE)
        return {job.measure: value}

    shutil.rmtree(out, ignore_errors=True)  # of a trial that was killed
    try:
        with _quietly():
            found = {"ended": FINISHED, "precision": pretrain(job.config, judge)["precision"]}
    except optuna.TrialPruned as reason:
        found = {"ended": str(reason)}
    except RunError as error:
        found = {"ended": FAILED, "why": str(error)}
    _note(trial, **found, seconds=time.time() - times[0])
    for name in ("last", START):
        shutil.rmtree(out / name, ignore_errors=True)
    for path in out.glob("*"):  # nothing that looks like a backbone
        if path.name not in KEPT:
            path.unlink()


def _note(trial: optuna.Trial, **about) -> None:
    for name, value in about.items():
        trial.set_user_attr(name, value)


@contextlib.contextmanager
def _quietly():
    """Keeps what a run logs to its own log.txt."""
    handlers, log.handlers = log.handlers, []
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            yield
    finally:
        log.handlers = handlers
