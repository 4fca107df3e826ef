"""The search of ``idmm tune``: which trial comes next, and what the trials have shown.

Optuna's study is all that is remembered. Trials with the seed of the config are the search. Then the recipe and the two
best settings are repeated with further seeds, in rounds, so that the best is not merely the luckiest.
"""

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from idmm.config import PretrainConfig
from idmm.config.commands import TuneConfig
from idmm.errors import RunError
from idmm.progress import duration
from idmm.seeding import derive
from idmm.tuning.options import applied, options_of

log = logging.getLogger("idmm")
LEAST = 4  # trials that must fit, to compare anything
SEARCH = 0.75  # share of the time after which no new settings are tried, but the best ones repeated
ROUNDS = 4  # of repeats, at most
REST = 4.0  # seconds for the picture and the importances, at most a twentieth of the time
TRIES = 30  # draws of settings until one is new


class Search:
    """The trials of a study: which comes next, and what they have shown.

    Args:
        given: The command's config.
        base: The recipe, resolved.
        study: With what the command found in its ``user_attrs``.
        began: When the command was called (seconds, as time.time()).
    """

    def __init__(self, given: TuneConfig, base: PretrainConfig, study, began: float):
        from optuna.distributions import CategoricalDistribution
        from optuna.samplers import TPESampler

        self.given, self.base, self.study, self.out = given, base, study, Path(given.out)
        self.options = options_of(base)
        self.usual = {option.name: option.usual for option in self.options}
        self._spaces = {option.name: CategoricalDistribution(option.values) for option in self.options}
        self.spent = study.user_attrs.get("seconds", 0.0)  # before this call
        self.began, whole = began, 60 * given.minutes
        self.until = began + whole - self.spent - min(REST, whole / 20)
        # another seed after each start: the first draws would be those of the start before
        study.sampler = TPESampler(n_startup_trials=8, seed=derive(base.seed, "tune", len(study.trials)) % 2**32)
        self.precision = study.user_attrs.get("precision", base.train.precision)

    # ------------------------------------------------------------------ what there is
    def trials(self, *ended: str) -> list:
        """Returns the trials that have ended, in one of these ways if any are given."""
        found = [t for t in self.study.get_trials(deepcopy=False) if "ended" in t.user_attrs]
        return [t for t in found if not ended or t.user_attrs["ended"] in ended]

    def settings(self) -> dict[str, tuple[dict, list[float]]]:
        """Returns options and accuracies, in order of the seeds from the config's on, of those that were finished; the
        recipe's come first."""
        found: dict[str, dict] = {}
        for t in self.trials("finished"):
            found.setdefault(key_of(t.params), {"options": t.params})[t.user_attrs["seed"]] = t.value
        ordered = {}
        for key, of in sorted(found.items(), key=lambda item: item[0] != key_of(self.usual)):
            seeds = list(range(self.base.seed, self.base.seed + ROUNDS + 1))
            values = [of[s] for s in seeds[: next((n for n, s in enumerate(seeds) if s not in of), len(seeds))]]
            if values:
                ordered[key] = of["options"], values
        return ordered

    def best(self) -> tuple[dict, float, float, int]:
        """Returns the best options, their accuracy, the recipe's, and over how many seeds both are means.

        Over as many as the recipe and another setting have; the recipe is one of those compared.
        """
        found = self.settings()
        recipe = found.get(key_of(self.usual), (None, []))[1]
        if not recipe:
            raise RunError("minutes: there was not even time for the recipe's own trial; give more of them")
        others = [len(values) for key, (_, values) in found.items() if key != key_of(self.usual)]
        depth = min(len(recipe), max(others, default=1))
        means = [(options, mean(values[:depth])) for options, values in found.values() if len(values) >= depth]
        options, value = max(means, key=lambda item: item[1])  # of equals the first, which is the recipe
        return options, value, mean(recipe[:depth]), depth

    # ------------------------------------------------------------------ one after the other
    def begin(self) -> None:
        """Puts the recipe first, and what was killed in the middle."""
        for t in self.study.get_trials(deepcopy=False):
            if not t.state.is_finished() and "seed" in t.user_attrs:  # killed in the middle
                self.study.tell(t.number, state=state("FAIL"))
                self.study.enqueue_trial(t.params, user_attrs={"seed": t.user_attrs["seed"]})
        if not self.study.trials:
            self.study.enqueue_trial(self.usual, user_attrs={"seed": self.base.seed})

    def next(self, running: list):
        """Returns the next job beside those that are ``running``; None where there is none, or none yet."""
        waiting = [t for t in self.study.get_trials(deepcopy=False) if t.state == state("WAITING")]
        left, full = self.until - time.time(), self._full()
        if waiting:
            return self._job(self.study.ask(self._spaces)) if left > 0 else None
        tried = [t for t in self.study.get_trials(deepcopy=False) if t.user_attrs.get("seed") == self.base.seed]
        tried = [t for t in tried if t.state != state("FAIL") or "ended" in t.user_attrs]
        wanted = self.given.trials is None or len(tried) < self.given.trials
        if wanted and left > (1 - SEARCH) * 60 * self.given.minutes and left > full:
            if found := self._another({key_of(t.params) for t in tried}):
                return self._job(found)
        if left < 1.05 * full:
            return None
        return self._repeat(running)

    def _full(self) -> float:
        """Seconds that a whole trial takes, the longest so far; before the first as was estimated."""
        seen = [t.user_attrs["seconds"] for t in self.trials("finished")]
        return max(seen, default=self.study.user_attrs["estimate"])

    def _another(self, tried: set[str]):
        """A trial of new settings, as Optuna chooses them."""
        for _ in range(TRIES):
            found = self.study.ask(self._spaces)
            if key_of(found.params) not in tried:
                found.set_user_attr("seed", self.base.seed)
                return found
            self.study.tell(found, state=state("FAIL"))
        return None

    def _repeat(self, running: list):
        """A trial of the recipe or one of the two best settings with a seed that it has not had."""
        asked = {(key_of(t.params), t.user_attrs.get("seed")) for t in self.study.get_trials(deepcopy=False)}
        found = self.settings()
        for depth in range(1, ROUNDS + 1):
            seed = self.base.seed + depth
            if any(job.config.seed < seed for job in running):
                return None  # which settings are the best is not known yet
            ranked = sorted((k for k in found if len(found[k][1]) >= depth), key=lambda k: -mean(found[k][1][:depth]))
            contenders = [key for key in ranked if key != key_of(self.usual)][:2]
            contenders.insert(1, key_of(self.usual))
            for key in contenders:
                if key in found and (key, seed) not in asked:
                    self.study.enqueue_trial(found[key][0], user_attrs={"seed": seed})
                    return self._job(self.study.ask(self._spaces))
        return None

    def _job(self, asked):
        from idmm.tuning.trial import RUNGS, Job

        seed = asked.user_attrs["seed"]
        config = applied(self.base, asked.params, self.study.user_attrs["epochs"])
        every = max(1, -(-config.train.epochs // RUNGS))
        train = replace(config.train, knn_every=every, precision=self.precision)
        config = replace(config, train=train, seed=seed, out=str(self.out / "trials" / str(asked.number)))
        searched = seed == self.base.seed and asked.params != self.usual
        storage = str(self.out / "study.log")
        return Job(storage, asked.number, asked._trial_id, config, self.given.measure, self.until, searched)

    def tell(self, job, outcome) -> None:
        """Notes how a trial ended, and says so."""
        from optuna.trial import Trial

        asked = Trial(self.study, job.identity)
        for name in ("ended", "seconds"):
            asked.set_user_attr(name, getattr(outcome, name))
        finished = outcome.ended == "finished"
        # a run that diverged is as bad as one that was ended early, and no gap in what Optuna knows
        self.study.tell(asked, outcome.value if finished else None, state("COMPLETE" if finished else "PRUNED"))
        if finished and self.precision == "auto":
            self.precision = outcome.precision
            self.study.set_user_attr("precision", self.precision)
        self.study.set_user_attr("seconds", self.spent + time.time() - self.began)
        if outcome.ended == "failed" and asked.params == self.usual and job.config.seed == self.base.seed:
            raise RunError(f"the recipe's own trial failed: {outcome.why}")
        self._say(job, asked.params, outcome)

    def _say(self, job, params: dict, outcome) -> None:
        what = ", ".join(f"{n} {shown(v)}" for n, v in params.items() if v != self.usual[n]) or "the recipe as it is"
        again = f", again with seed {job.config.seed}" if job.config.seed != self.base.seed else ""
        how = "" if outcome.value is None else f"{outcome.value:.1f} %"
        if outcome.ended != "finished":
            how = f"{how}{', ' if how else ''}{outcome.ended}{f' ({outcome.why})' if outcome.why else ''}"
        found = {key: mean(values) for key, (_, values) in self.settings().items()}
        recipe = found.get(key_of(self.usual))
        beside = "" if recipe is None else f"; best {max(found.values()):.1f} %, the recipe {recipe:.1f} %"
        left = duration(max(0.0, self.until - time.time()))
        log.info("trial %d (%s%s): %s%s; %s left", job.number, what, again, how, beside, left)


def shown(value: Any) -> str:
    """Returns a value of an option for people."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value:g}"


def key_of(params: dict) -> str:
    """Returns what tells settings apart."""
    return json.dumps(params, sort_keys=True)


def state(name: str):
    """Returns Optuna's state of a trial by its name."""
    from optuna.trial import TrialState

    return TrialState[name]
