"""Statistics of runs: means and differences with 95 % intervals over seeds and test images."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np
from scipy.special import stdtrit

from idmm.files import read_csv, reading

PREDICTIONS = "predictions.csv"  # of a run
DIGITS = 1  # after the point, as in the paper
NORMAL = statistics.NormalDist().inv_cdf(0.975)

Grid = dict[str, Any]  # grid.json
Run = dict[str, Any]  # one of its ``cells``
Key = TypeVar("Key", bound=Hashable)


def format_number(value: float, sign: bool = False) -> str:
    """Return a number as in all tables. Zero has no sign."""
    text = f"{value:.{DIGITS}f}"
    if float(text) == 0:
        return text.removeprefix("-")
    return f"{value:+.{DIGITS}f}".replace("-", "−") if sign else text


def wilson_interval(correct: float, count: float) -> list[float]:
    """Return the 95 % interval of an accuracy in percent: its lower and its upper limit.

    It is Wilson's (JASA 22, 1927). ``count`` need not be whole.
    """
    total = count + NORMAL**2
    middle = (correct + NORMAL**2 / 2) / total
    half = NORMAL * math.sqrt(correct * (count - correct) / count + NORMAL**2 / 4) / total
    return [100 * max(0.0, middle - half), 100 * min(1.0, middle + half)]


def group_interval(correct: Sequence[int], images: Sequence[int]) -> list[float]:
    """Return the 95 % interval of an accuracy (percent) on images in groups of similar ones.

    It is Wilson's with the effective number of images: their number over the design effect (Rao and
    Scott, Biometrics 48, 1992) and less for few groups, by the t-distribution (Korn and Graubard,
    Survey Methodology 24, 1998). The design effect is at least 1. If all images are right, or all
    are wrong, a group counts as one image. With one group the interval is [0, 100].

    Args:
        correct: Number of correct images in each group, [G].
        images: Number of images in each group, [G].
    """
    groups = len(images)
    count = sum(images)
    hits = sum(correct)
    if groups < 2:
        return [0.0, 100.0]
    effect = count / groups  # the design effect
    if 0 < hits < count:
        residuals = np.asarray(correct) - np.asarray(images) * hits / count
        square = float(residuals @ residuals) * groups / (groups - 1)
        effect = max(1.0, square * count / (hits * (count - hits)))
    shrinkage = (NORMAL / float(stdtrit(groups - 1, 0.975))) ** 2 / effect
    return wilson_interval(hits * shrinkage, count * shrinkage)


class Estimate(NamedTuple):
    """A number with its 95 % interval, or None if no interval is known."""

    value: float
    interval: tuple[float, float] | None = None

    @property
    def direction(self) -> str:
        """``up`` or ``down`` if the runs show it, ``level`` if the interval contains 0."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "level"
        return "up" if self.value > 0 else "down"

    def __str__(self) -> str:
        value = format_number(self.value, sign=True)
        if self.interval is None:
            return f"{value} (no interval)"
        low, high = (format_number(limit, sign=True) for limit in self.interval)
        return f"{value} ({low} to {high})"


class Distances(NamedTuple):
    """How far the limits of an interval are from its value (points)."""

    below: float
    above: float


@dataclass(frozen=True)
class SeedStats:
    """Accuracy in percent over the runs of one source, method, backbone and target.

    A value is None if there are too few runs. Runs that share a pretraining are not independent
    draws. So with several pretrainings the interval is that of their means.
    """

    runs: tuple[Run, ...]
    n: int = 0  # finished runs
    mean: float | None = None
    std: float | None = None  # sample standard deviation over runs
    units: int = 0  # independent draws
    variance: float | None = None  # of the mean
    freedom: int = 0  # degrees of freedom of the variance
    images: Distances | None = None  # of the interval over test images

    @property
    def failed(self) -> int:
        """Number of failed runs."""
        return sum(run["status"] == "failed" for run in self.runs)


def seed_stats(runs: Iterable[Run]) -> SeedStats:
    """Return the statistics of runs that differ only in their seeds."""
    runs = tuple(runs)
    by_pretraining = defaultdict(list)
    distances = []
    for run in runs:
        value = run.get("top1")
        if run["status"] == "ok" and isinstance(value, int | float) and math.isfinite(value):
            by_pretraining[run["source"], run["pretrain_seed"]].append(float(value))
            if distance := _image_distances(run):
                distances.append(distance)
    if not by_pretraining:
        return SeedStats(runs)
    values = list(chain(*by_pretraining.values()))
    draws = values
    # as in the interval: a pretraining counts once, whatever the number of its runs
    if len(by_pretraining) > 1:
        draws = list(map(statistics.fmean, by_pretraining.values()))
    count = len(draws)
    mean = statistics.fmean(draws)
    stats = SeedStats(runs, len(values), mean, units=count, freedom=count - 1)
    if len(values) > 1:
        stats = replace(stats, std=statistics.stdev(values))
    if count > 1:
        stats = replace(stats, variance=statistics.variance(draws) / count)
    if len(distances) == len(values):
        means = map(statistics.fmean, zip(*distances, strict=True))
        stats = replace(stats, images=Distances._make(means))
    return stats


def _image_distances(run: Run) -> Distances | None:
    """Return the distances to the limits of a run's interval over images, or of Wilson's."""
    value = run["top1"]
    interval = run.get("top1_interval")
    count = run.get("test_size")
    if not interval and count:
        interval = wilson_interval(value / 100 * count, count)
    return Distances(value - interval[0], interval[1] - value) if interval else None


def pooled(column: Mapping[Key, SeedStats], moved: Iterable[SeedStats]) -> dict[Key, SeedStats]:
    """Return the cells of a column with a common variance over seeds.

    It is that of the cells that depend on the seeds (``moved``). Two or three seeds per cell give a
    poor variance. So the squared deviations of all cells of a column are pooled as in a one-way
    analysis of variance (Fisher, Statistical Methods for Research Workers, 1925). Independent draws
    that are single runs are pooled separately from those that are means, unless only others have a
    variance.
    """
    by_runs = defaultdict(list)  # number of runs in a draw -> cells
    for stats in moved:
        if stats.freedom:
            by_runs[stats.n // stats.units].append(stats)
    everything = list(chain(*by_runs.values()))
    result = {}
    for key, stats in column.items():
        result[key] = stats
        if stats.units and everything:
            group = by_runs.get(stats.n // stats.units, everything)
            freedom = sum(member.freedom for member in group)
            squares = [(one.variance or 0.0) * one.units * one.freedom for one in group]
            variance = sum(squares) / freedom
            result[key] = replace(stats, variance=variance / stats.units, freedom=freedom)
    return result


def t_half(variance: float, freedom: float) -> float:
    """Return half of a 95 % t-interval."""
    return float(stdtrit(freedom, 0.975)) * math.sqrt(variance)


def difference(one: SeedStats, other: SeedStats) -> Estimate | None:
    """Return the mean of ``one`` less that of ``other`` with its interval, None without a value.

    Over seeds it is a t-interval with the :func:`pooled` variance, and with the fewer degrees of
    freedom of the two. Over test images it is Newcombe's, from the Wilson intervals of both
    (Statistics in Medicine 17, 1998, method 10). The two are independent, so their lengths add up
    as standard errors do (Zou and Donner, Statistics in Medicine 27, 2008). If no cell of a column
    has two runs, there is only the part of the test images. Both rows were tested on the same
    images and mostly fail on the same ones. This is not known here, so the interval is rather too
    wide. It holds for a single comparison: a row that leads many others must be ahead of each of
    them.
    """
    if one.mean is None or other.mean is None:
        return None
    value = one.mean - other.mean
    distances = []  # of the limits below and above
    if one.variance is not None and other.variance is not None:
        half = t_half(one.variance + other.variance, min(one.freedom, other.freedom))
        distances.append((half, half))
    if one.images and other.images:
        distances += [one.images, other.images[::-1]]
    if not distances:
        return Estimate(value)
    below, above = map(math.hypot, *distances)
    return Estimate(value, (value - below, value + above))


# ------------------------------------------------------------------- classifiers on the same images
class Comparison(TypedDict):
    """Two classifiers on the images that both were tested on."""

    images: int
    points: float  # by which the first accuracy is above the second
    p: float  # probability of a difference as large between equals


class Answers(NamedTuple):
    """A run's answers on its test images, by path and class."""

    correct: dict[tuple[str, str], bool]
    groups: dict[tuple[str, str], str]  # of images that have one


def compared(run: Path, other: Path) -> Comparison | None:
    """Compare two finished runs on the test images that both have, with the same label in both.

    Images whose label was corrected in between do not count.

    Returns:
        None if these are less than half of the larger test set.
    """
    answers = read_answers(run)
    other_correct = read_answers(other).correct
    images = answers.correct.keys() & other_correct.keys()
    if 2 * len(images) < max(len(answers.correct), len(other_correct)):
        return None
    return mcnemar(answers.correct, other_correct, answers.groups)


def read_answers(run: Path) -> Answers:
    """Read a run's answers."""
    path = run / PREDICTIONS
    answers = Answers({}, {})
    rows = read_csv(path)
    with reading(path, "Delete it to leave out the comparison"):  # a column may be missing
        for row in rows:
            image = (row["path"], row["class"])
            answers.correct[image] = row["class"] == row["predicted"]
            if "group" in row:
                answers.groups[image] = row["group"]
    return answers


def holm(values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, adjusted so that any false finding has the usual risk.

    Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order = np.argsort(values)
    factors = np.arange(len(values), 0, -1)
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate(factors * np.asarray(values)[order]).clip(max=1)
    return adjusted.tolist()


def mcnemar(
    one: Mapping[Key, bool], other: Mapping[Key, bool], groups: Mapping[Any, str] = {}
) -> Comparison:
    """Compare two classifiers on the same images.

    Args:
        one: Whether the first one is correct, by image.
        other: Whether the second one is.
        groups: The group of each image if images come in groups of similar ones. Else none.

    Returns:
        ``p`` is of McNemar's exact test (Psychometrika 12, 1947). With groups it is of the
        sign-flip test of the images that each group wins less those that it loses, with 9,999
        random flips from 14 groups on.
    """
    from scipy.stats import binomtest, permutation_test

    names = one.keys() & other.keys()
    # images that the first one wins less those that it loses, by group, without groups by image
    balance: Counter[Hashable] = Counter()
    for name in names:
        balance[groups.get(name, name)] += one[name] - other[name]
    gains = np.array([gain for gain in balance.values() if gain])
    p = 1.0
    if groups and len(gains) > 1:
        p = permutation_test(
            (gains,), np.sum, permutation_type="samples", n_resamples=9999, rng=0
        ).pvalue
    elif len(gains) and not groups:
        p = binomtest(int((gains > 0).sum()), len(gains)).pvalue
    points = 100 * float(gains.sum()) / len(names)
    return {"images": len(names), "points": points, "p": float(p)}
