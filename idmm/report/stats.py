"""Statistics of a grid's runs: mean and interval over seeds, differences of means, bootstrap over targets."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit
from scipy.stats import linregress, spearmanr

from idmm.seeding import numpy_rng

DRAWS = 4000  # of a bootstrap
ENOUGH = 3  # values whose order can be compared


class BootstrapMean(NamedTuple):
    """A mean over groups with its 95 % bootstrap interval, where there are several groups."""

    value: float
    interval: tuple[float, float] | None


class Estimate(NamedTuple):
    """A mean difference or a slope, with half its 95 % t-interval, where there are several independent draws."""

    mean: float
    half: float | None


@dataclass(frozen=True)
class SeedStats:
    """Accuracy in percent over the runs of one source, method, backbone and target; None where there are too few.

    Runs that share a pretraining are no independent draws: with several pretrainings the interval is that of their
    means.
    """

    runs: tuple[dict, ...]  # as grid.json lists them under ``cells``
    values: tuple[float, ...] = ()  # of those that are done
    mean: float | None = None
    std: float | None = None  # sample standard deviation over runs
    half: float | None = None  # of the mean's 95 % t-interval
    units: int = 0  # independent draws
    variance: float | None = None  # of the mean

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def failed(self) -> int:
        return sum(run["status"] == "failed" for run in self.runs)

    @property
    def status(self) -> str:
        return "ok" if self.values else "failed" if self.failed else "missing"


def seed_stats(runs: Iterable[dict], metric: str) -> SeedStats:
    """Returns the statistics of runs that differ in their seeds alone."""
    runs = tuple(runs)
    groups: dict[tuple, list[float]] = {}
    for run in runs:
        if (value := accuracy(run, metric)) is not None:
            groups.setdefault((run["source"], run["pretrain_seed"]), []).append(value)
    values = tuple(value for group in groups.values() for value in group)
    if not values:
        return SeedStats(runs)
    units = [statistics.fmean(group) for group in groups.values()] if len(groups) > 1 else values
    variance = statistics.variance(units) / len(units) if len(units) > 1 else None
    std = statistics.stdev(values) if len(values) > 1 else None
    half = None if variance is None else t_half(variance, len(units) - 1)
    return SeedStats(runs, values, statistics.fmean(values), std, half, len(units), variance)


def accuracy(run: dict, metric: str) -> float | None:
    """Returns a run's accuracy in percent, None where there is none."""
    value = run.get(metric) if run["status"] == "ok" else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def t_half(variance: float, freedom: float) -> float:
    """Returns half of a 95 % t-interval."""
    return float(stdtrit(freedom, 0.975)) * math.sqrt(variance)


def difference(one: SeedStats, other: SeedStats) -> Estimate | None:
    """Returns the mean of ``one`` less that of ``other`` with Welch's interval; None where one has no value."""
    if one.mean is None or other.mean is None:
        return None
    mean = one.mean - other.mean
    if one.variance is None or other.variance is None:
        return Estimate(mean, None)
    total = one.variance + other.variance
    if total == 0:
        return Estimate(mean, 0.0)
    freedom = total**2 / (one.variance**2 / (one.units - 1) + other.variance**2 / (other.units - 1))
    return Estimate(mean, t_half(total, freedom))


def bootstrap(values: np.ndarray, groups: list) -> list[BootstrapMean]:
    """Returns the mean of each column of ``values`` [R, K] with a percentile interval over resampled ``groups`` [R].

    Groups are targets: a source that is good for one of them need not be for the next. With few of them such intervals
    are too narrow; with less than two there are none.
    """
    kinds, intervals = list(dict.fromkeys(groups)), [None] * values.shape[1]
    if len(kinds) > 1:
        member = np.array([[group == kind for group in groups] for kind in kinds], dtype=float)  # [G, R]
        often = numpy_rng(0, "transfer bootstrap").multinomial(len(kinds), [1 / len(kinds)] * len(kinds), DRAWS)
        means = (often @ (member @ values)) / (often @ member.sum(axis=1))[:, None]  # [DRAWS, K]
        intervals = [tuple(map(float, bounds)) for bounds in np.quantile(means, (0.025, 0.975), axis=0).T]
    return [BootstrapMean(float(column.mean()), one) for column, one in zip(values.T, intervals, strict=True)]


def spearman(pairs: list[tuple[float, float]]) -> float | None:
    """Returns the rank correlation, None where there is no order to compare."""
    if len(pairs) < ENOUGH or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def log_slope(sizes: list[int], means: list[float]) -> Estimate | None:
    """Returns what ten times the size adds, by a straight line over log10 of the size; None for less than three."""
    if len(sizes) < ENOUGH:
        return None
    line = linregress([math.log10(size) for size in sizes], means)
    return Estimate(float(line.slope), t_half(float(line.stderr) ** 2, len(sizes) - 2))
