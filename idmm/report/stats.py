"""Statistics of runs: means and their differences with 95 % intervals over seeds and test
images."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from idmm.files import read_csv, reading

PREDICTIONS = "predictions.csv"  # of a run
DIGITS = 1  # after the point, as in the paper
NORMAL = statistics.NormalDist().inv_cdf(0.975)


def format_number(value: float, sign: bool = False) -> str:
    """Return a number as in all tables. Zero has no sign."""
    text = f"{value:{'+' if sign else ''}.{DIGITS}f}"
    if float(text) == 0:
        return f"{0:.{DIGITS}f}"
    return text.replace("-", "−") if sign else text


def wilson_interval(correct: float, count: float) -> list[float]:
    """Return the 95 % interval of an accuracy in percent, Wilson's (JASA 22, 1927): its lower and
    its upper limit.

    ``count`` need not be whole.
    """
    total = count + NORMAL**2
    middle = (correct + NORMAL**2 / 2) / total
    half = NORMAL * math.sqrt(correct * (count - correct) / count + NORMAL**2 / 4) / total
    return [100 * max(0.0, middle - half), 100 * min(1.0, middle + half)]


def group_interval(correct: Sequence[int], images: Sequence[int]) -> list[float]:
    """Return the 95 % interval of an accuracy in percent whose images come in groups of similar
    ones.

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
    effect = count / groups
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
    def excludes_zero(self) -> bool:
        """Whether the interval does not contain 0: the runs show that it is more, or less."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    def __str__(self) -> str:
        interval = (
            " to ".join(format_number(limit, sign=True) for limit in self.interval or ())
            or "no interval"
        )
        return f"{format_number(self.value, sign=True)} ({interval})"


@dataclass(frozen=True)
class SeedStats:
    """Accuracy in percent over the runs of one source, method, backbone and target. None if there
    are too few.

    Runs that share a pretraining are not independent draws. So with several pretrainings the
    interval is that of their means.
    """

    runs: tuple[dict, ...]  # ``cells`` of grid.json
    n: int = 0  # finished runs
    mean: float | None = None
    std: float | None = None  # sample standard deviation over runs
    units: int = 0  # independent draws
    variance: float | None = None  # of the mean
    freedom: int = 0  # degrees of freedom of the variance
    # from the mean down and up to its limits over test images
    images: tuple[float, float] | None = None

    @property
    def failed(self) -> int:
        return sum(run["status"] == "failed" for run in self.runs)


def seed_stats(runs: Iterable[dict]) -> SeedStats:
    """Return the statistics of runs that differ only in their seeds."""
    runs = tuple(runs)
    groups = defaultdict(list)
    distances = []
    for run in runs:
        value = run.get("top1") if run["status"] == "ok" else None
        if isinstance(value, (int, float)) and math.isfinite(value):
            groups[run["source"], run["pretrain_seed"]].append(float(value))
            distances.append(_image_distances(run))
    if not groups:
        return SeedStats(runs)
    values = [value for group in groups.values() for value in group]
    if len(groups) > 1:
        units = [statistics.fmean(group) for group in groups.values()]
    else:
        units = values
    if len(units) > 1:
        variance = statistics.variance(units) / len(units)
    else:
        variance = None
    return SeedStats(
        runs,
        n=len(values),
        # as in the interval: a pretraining counts once, whatever the number of its runs
        mean=statistics.fmean(units),
        std=statistics.stdev(values) if len(values) > 1 else None,
        units=len(units),
        variance=variance,
        freedom=len(units) - 1,
        images=None
        if None in distances
        else tuple(map(statistics.fmean, zip(*distances, strict=True))),
    )


def _image_distances(run: dict) -> tuple[float, float] | None:
    """Return the distances (points) from a run's accuracy to the limits of its interval, or
    Wilson's, over images."""
    value = run["top1"]
    interval = run.get("top1_interval")
    count = run.get("test_size")
    if not interval and count:
        interval = wilson_interval(value / 100 * count, count)
    if interval:
        return (value - interval[0], interval[1] - value)
    return None


def pooled(column: dict, moved: Iterable[SeedStats]) -> dict:
    """Return the cells of a column with the common variance over seeds of the cells that depend on
    them (``moved``).

    Two or three seeds per cell give a poor variance. So the squared deviations of all cells of a
    column are pooled as in a one-way analysis of variance (Fisher, Statistical Methods for Research
    Workers, 1925). Independent draws that are single runs are pooled separately from those that are
    means, unless only others have a variance.
    """
    groups = defaultdict(list)
    for stats in moved:
        if stats.variance is not None:
            groups[stats.n // stats.units].append(stats)
    everything = [stats for group in groups.values() for stats in group]
    result = {}
    for place, stats in column.items():
        if stats.units:
            group = groups.get(stats.n // stats.units) or everything
        else:
            group = []
        if freedom := sum(member.freedom for member in group):
            variance = (
                sum(member.variance * member.units * member.freedom for member in group) / freedom
            )
            stats = replace(stats, variance=variance / stats.units, freedom=freedom)
        result[place] = stats
    return result


def t_half(variance: float, freedom: float) -> float:
    """Return half of a 95 % t-interval."""
    return float(stdtrit(freedom, 0.975)) * math.sqrt(variance)


def difference(one: SeedStats, other: SeedStats) -> Estimate | None:
    """Return the mean of ``one`` less that of ``other`` with its interval, or None if one has no
    value.

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
    below = []
    above = []
    if one.variance is not None and other.variance is not None:
        half = t_half(one.variance + other.variance, min(one.freedom, other.freedom))
        below = [half]
        above = [half]
    if one.images and other.images:
        below += [one.images[0], other.images[1]]
        above += [one.images[1], other.images[0]]
    return Estimate(
        value, (value - math.hypot(*below), value + math.hypot(*above)) if below else None
    )


# ------------------------------------------------------------------- classifiers on the same images
def compared(run: Path, other: Path) -> dict[str, float] | None:
    """Return the :func:`mcnemar` of two finished runs on the ``images`` that both were tested on
    with the same label.

    Images whose label was corrected in between do not count. None: these are less than half of the
    larger test set.
    """
    correct, groups = _answers(run)
    other_correct, _ = _answers(other)
    images = len(correct.keys() & other_correct.keys())
    if 2 * images < max(len(correct), len(other_correct)):
        return None
    return mcnemar(correct, other_correct, groups) | {"images": images}


def _answers(run: Path) -> tuple[dict, dict]:
    """Return whether a run is correct for each test image, and the groups of those that have
    one."""
    path = run / PREDICTIONS
    with reading(path, "Delete it to leave out the comparison"):
        rows = {(row["path"], row["class"]): row for row in read_csv(path)}
        correct = {key: row["class"] == row["predicted"] for key, row in rows.items()}
        return correct, {key: row["group"] for key, row in rows.items() if "group" in row}


def holm(values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, adjusted so that any false finding has the usual risk.

    Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order = np.argsort(values)
    factors = np.arange(len(values), 0, -1)
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate(factors * np.asarray(values)[order]).clip(max=1)
    return adjusted.tolist()


def mcnemar(one: dict, other: dict, groups: dict | None = None) -> dict[str, float]:
    """Compare two classifiers on the same images.

    Args:
        one: Whether the first one is correct, by image.
        other: Whether the second one is.
        groups: The group of each image if images come in groups of similar ones.

    Returns:
        ``points``, by which the first accuracy is above the second, and ``p``, the probability of a
        difference as large between equals. ``p`` is McNemar's exact test (Psychometrika 12, 1947).
        With groups it is the sign-flip test of the images that each group wins less those that it
        loses, with 9,999 random flips from 14 groups on.
    """
    from scipy.stats import binomtest, permutation_test

    names = one.keys() & other.keys()
    # images that the first one wins less those that it loses, by group; without groups by image
    gains = Counter()
    for name in names:
        gains[groups[name] if groups else name] += int(one[name]) - int(other[name])
    gains = np.array([count for count in gains.values() if count])
    p = 1.0
    if groups and len(gains) > 1:
        p = permutation_test(
            (gains,), np.sum, permutation_type="samples", n_resamples=9999, rng=0
        ).pvalue
    elif len(gains) and not groups:
        p = binomtest(int((gains > 0).sum()), len(gains)).pvalue
    return {"points": 100 * float(gains.sum()) / len(names), "p": float(p)}
