"""Statistics of runs: means and their differences with 95 % intervals over seeds and test images."""

import math
import statistics
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from scipy.special import stdtrit

from idmm.intervals import wilson

SHARES = ("top1", "knn")  # metrics that are a share of the test images: chance among these is Wilson's
ENOUGH = 3  # sources, targets or sizes that can be put in an order
DIGITS = 1  # after the point, as the paper prints


def format_number(value: float, sign: bool = False) -> str:
    """Prints a number as all tables do; zero has no sign."""
    text = f"{value:{'+' if sign else ''}.{DIGITS}f}"
    return f"{0:.{DIGITS}f}" if float(text) == 0 else text.replace("-", "−") if sign else text


def format_interval(interval: tuple[float, float], sign: bool = False) -> str:
    return " to ".join(format_number(bound, sign) for bound in interval)


class Estimate(NamedTuple):
    """A number with its 95 % interval, None where nothing tells how far it may be off."""

    value: float
    interval: tuple[float, float] | None = None

    @property
    def shown(self) -> bool:
        """Whether the interval leaves 0 out: the runs show that it is more, or less."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    def __str__(self) -> str:
        interval = format_interval(self.interval, sign=True) if self.interval else "no interval"
        return f"{format_number(self.value, sign=True)} ({interval})"


@dataclass(frozen=True)
class SeedStats:
    """Accuracy in percent over the runs of one source, method, backbone and target; None where there are too few.

    Runs that share a pretraining are no independent draws: with several pretrainings the interval is that of their
    means.
    """

    runs: tuple[dict, ...]  # as grid.json lists them under ``cells``
    n: int = 0  # runs that are done
    mean: float | None = None
    std: float | None = None  # sample standard deviation over runs
    half: float | None = None  # of the mean's 95 % t-interval
    units: int = 0  # independent draws
    variance: float | None = None  # of the mean
    freedom: int = 0  # degrees of freedom that the variance is known with
    images: tuple[float, float] | None = None  # from the mean down and up to the Wilson interval of the test images

    @property
    def failed(self) -> int:
        return sum(run["status"] == "failed" for run in self.runs)

    @property
    def status(self) -> str:
        return "ok" if self.n else "failed" if self.failed else "missing"


def seed_stats(runs: Iterable[dict], metric: str) -> SeedStats:
    """Returns the statistics of runs that differ in their seeds alone."""
    runs = tuple(runs)
    groups: dict[tuple, list[float]] = {}
    reaches = []
    for run in runs:
        value = run.get(metric) if run["status"] == "ok" else None
        if isinstance(value, (int, float)) and math.isfinite(value):
            groups.setdefault((run["source"], run["pretrain_seed"]), []).append(float(value))
            reaches.append(_image_reach(run, metric))
    if not groups:
        return SeedStats(runs)
    values = [value for group in groups.values() for value in group]
    units = [statistics.fmean(group) for group in groups.values()] if len(groups) > 1 else values
    variance = statistics.variance(units) / len(units) if len(units) > 1 else None
    return SeedStats(
        runs,
        n=len(values),
        mean=statistics.fmean(units),  # as of the interval, so that a pretraining counts once however many runs it has
        std=statistics.stdev(values) if len(values) > 1 else None,
        half=None if variance is None else t_half(variance, len(units) - 1),
        units=len(units),
        variance=variance,
        freedom=len(units) - 1,
        images=None if None in reaches else tuple(map(statistics.fmean, zip(*reaches, strict=True))),
    )


def _image_reach(run: dict, metric: str) -> tuple[float, float] | None:
    """How far (points) a run's interval over test images, else Wilson's, reaches below its accuracy and above it."""
    value, bounds, count = run[metric], run.get(f"{metric}_interval"), run.get("test_size")
    if not bounds and count and metric in SHARES:
        bounds = [100 * float(bound) for bound in wilson(value / 100 * count, count)]
    return (value - bounds[0], bounds[1] - value) if bounds else None


def pooled(column: dict[Hashable, SeedStats], moved: Iterable[SeedStats]) -> dict[Hashable, SeedStats]:
    """Returns the cells of a column with the variance over seeds that those which seeds ``moved`` have in common.

    Two or three seeds a cell tell little of how far seeds move a number, all cells of a column together tell more:
    their squared deviations are put together as in a one-way analysis of variance (Fisher, Statistical Methods
    for Research Workers, 1925). Independent draws that are single runs are kept apart from those that are means, unless
    only others tell anything.
    """
    groups: dict[int, list[SeedStats]] = {}
    for stats in moved:
        if stats.variance is not None:
            groups.setdefault(stats.n // stats.units, []).append(stats)
    found = {}
    for place, stats in column.items():
        others = [one for kind in groups.values() for one in kind]
        group = stats.units and (groups.get(stats.n // stats.units) or others)
        if freedom := sum(one.freedom for one in group or ()):
            of_one = sum(one.variance * one.units * one.freedom for one in group) / freedom
            stats = replace(stats, variance=of_one / stats.units, freedom=freedom)
        found[place] = stats
    return found


def t_half(variance: float, freedom: float) -> float:
    """Returns half of a 95 % t-interval."""
    return float(stdtrit(freedom, 0.975)) * math.sqrt(variance)


def difference(one: SeedStats, other: SeedStats) -> Estimate | None:
    """Returns the mean of ``one`` less that of ``other`` with its interval; None where one has no value.

    Over seeds that is a t-interval (the variance is :func:`pooled`; where it comes from different runs, with the fewer
    degrees of freedom of the two), over test images Newcombe's, put together from the Wilson intervals of both
    (Statistics in Medicine 17, 1998, method 10). The two are independent, so their lengths add up as standard errors
    do (Zou and Donner, Statistics in Medicine 27, 2008). Where no cell of a column has two runs, the seeds' part is not
    known, and the test images' stands alone. Both sides see the same images and mostly err on the same ones: without
    each image's answers this cannot be counted, so the interval is rather too wide. It is that of a single comparison;
    who leads many others has to be ahead of each of them.
    """
    if one.mean is None or other.mean is None:
        return None
    value, below, above = one.mean - other.mean, [], []
    if one.variance is not None and other.variance is not None:
        half = t_half(one.variance + other.variance, min(one.freedom, other.freedom))
        below, above = [half], [half]
    if one.images and other.images:
        below += [one.images[0], other.images[1]]
        above += [one.images[1], other.images[0]]
    return Estimate(value, (value - math.hypot(*below), value + math.hypot(*above)) if below else None)


def over_targets(values: Iterable[float], targets: list, low: float = -math.inf, high: float = math.inf) -> Estimate:
    """Returns the mean over targets of ``values`` [R] with its t-interval, cut to what is possible.

    Targets [R] are the independent draws: a source that is good for one need not be for the next, and the rows of a
    target go together. There is no interval for fewer than three.
    """
    groups: dict = {}
    for value, target in zip(values, targets, strict=True):
        groups.setdefault(target, []).append(float(value))
    means = [statistics.fmean(group) for group in groups.values()]
    mean = statistics.fmean(means)
    if len(means) < ENOUGH:
        return Estimate(mean)
    half = t_half(statistics.variance(means) / len(means), len(means) - 1)
    return Estimate(mean, (max(low, mean - half), min(high, mean + half)))
