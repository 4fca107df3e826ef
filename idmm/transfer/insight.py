"""What a grid tells beyond its table: which source is best, whether a preview was right, what more images bring."""

import json
import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from idmm.seeding import numpy_rng
from idmm.transfer.summary import READOUTS, SCRATCH, Entry, Gain, Row, Table, difference, entry, t_half

DRAWS = 4000  # of a bootstrap
SIZES = 6  # least number of sizes that make a curve
ENOUGH = 3  # rows whose order can be compared


class Interval(NamedTuple):
    low: float
    high: float


def bootstrap(values: np.ndarray, groups: list) -> list[Interval | None]:
    """95 % percentile intervals of the mean of each column, when whole groups are drawn again.

    Targets are what is drawn: a source that is good for one of them need not be for the next. With few of them such
    intervals are too narrow; with less than two there are none.

    Args:
        values: [R, K].
        groups: To which group a row belongs, R of them.
    """
    kinds = list(dict.fromkeys(groups))
    if len(kinds) < 2:
        return [None] * values.shape[1]
    member = np.array([[group == kind for group in groups] for kind in kinds], dtype=float)  # [G, R]
    often = numpy_rng(0, "transfer bootstrap").multinomial(len(kinds), [1 / len(kinds)] * len(kinds), DRAWS)
    means = (often @ (member @ values)) / (often @ member.sum(axis=1))[:, None]  # [DRAWS, K]
    return [Interval(*map(float, bounds)) for bounds in np.quantile(means, (0.025, 0.975), axis=0).T]


# ------------------------------------------------------------------ sources
@dataclass(frozen=True)
class Standing:
    """How a source does over all targets.

    Attributes:
        source: Its label.
        pretrained: False for scratch and for weights that the user gave.
        rank: Mean rank, 1 is best; equals share theirs.
        rank_interval: Over targets.
        by_method: Mean rank for each method.
        average: Mean accuracy over targets, methods and backbones.
        gain: Mean gain over scratch, None without it.
        gain_interval: Over targets.
    """

    source: str
    pretrained: bool
    rank: float
    rank_interval: Interval | None
    by_method: dict[str, float]
    average: float
    gain: float | None
    gain_interval: Interval | None


@dataclass(frozen=True)
class Ranking:
    """Sources from best to worst.

    Attributes:
        standings: By mean rank.
        used: Comparisons (a target, a method and a backbone each) in which every source has a value.
        total: All of them; the others are left out, a rank among fewer would be another number.
        targets: Targets among those used.
    """

    standings: list[Standing]
    used: int
    total: int
    targets: int


def ranking(table: Table) -> Ranking:
    """Ranks the sources under each target, method and backbone, scratch and given weights among them."""
    methods = list(dict.fromkeys(row.method for row in table.rows if _pretrained(table, row))) or [None]
    candidates = _candidates(table)
    places = [(b, method, target) for b in table.backbones for method in methods for target in table.targets]
    found = [
        [_value(table, source, refers, *place) for source, refers in candidates.items()] for place in places
    ]  # [places][sources]
    kept = [n for n, values in enumerate(found) if None not in values and len(candidates) > 1]
    if not kept:
        return Ranking([], 0, len(places), 0)
    values = np.array([found[n] for n in kept], dtype=float)  # [P, S]
    places_kept = [places[n] for n in kept]
    ranks = np.array([_ranks(row) for row in values])
    targets = [target for _, _, target in places_kept]
    scratch = [table.mean(b, SCRATCH, target) for b, _, target in places_kept]
    gains = None if None in scratch else values - np.array(scratch)[:, None]
    rank_intervals = bootstrap(ranks, targets)
    gain_intervals = [None] * len(candidates) if gains is None else bootstrap(gains, targets)
    standings = []
    for column, (source, refers) in enumerate(candidates.items()):
        by_method = {}
        for method in methods:
            chosen = [n for n, (_, other, _) in enumerate(places_kept) if other == method]
            if method is not None and chosen and refers is None:
                by_method[method] = float(ranks[chosen, column].mean())
        gained = None if gains is None or refers == SCRATCH else float(gains[:, column].mean())
        standings.append(
            Standing(
                source,
                refers is None,
                float(ranks[:, column].mean()),
                rank_intervals[column],
                by_method,
                float(values[:, column].mean()),
                gained,
                None if gained is None else gain_intervals[column],
            )
        )
    standings.sort(key=lambda standing: (standing.rank, -standing.average))
    return Ranking(standings, len(kept), len(places), len(set(targets)))


def _pretrained(table: Table, row: Row) -> bool:
    """Whether this grid pretrained the row, as opposed to scratch and given weights."""
    return any(cell["pretrain_seed"] is not None for cell in _cells(table, row))


def _cells(table: Table, row: Row) -> list[dict]:
    return [cell for (_, other, _), found in table.entries.items() if other == row for cell in found.cells]


def _candidates(table: Table) -> dict[str, Row | None]:
    """Sources that have any value -> None, and rows that stand for themselves under every method -> that row."""
    found: dict[str, Row | None] = {}
    for row in table.rows:
        known = [b for (b, other, _), e in table.entries.items() if other == row and e.mean is not None]
        if known and _pretrained(table, row):
            found[row.source] = None
        elif set(known) == set(table.backbones):  # weights of one backbone can only be compared where it is alone
            found.setdefault(row.source, row)
    return found


def _value(table: Table, source: str, refers: Row | None, backbone: str, method: str, target: str) -> float | None:
    return table.mean(backbone, refers or Row(source, method), target)


def _ranks(values: np.ndarray) -> np.ndarray:
    """1 for the largest; equals share the mean of their ranks."""
    from scipy.stats import rankdata

    return rankdata(-values)


@dataclass(frozen=True)
class Pick:
    """The best row for a target among the pretrained ones, and how far it is ahead of the best of another source."""

    backbone: str
    target: str
    row: Row
    found: Entry
    gain: Gain | None
    second: Row | None
    lead: Gain | None


def picks(table: Table) -> list[Pick]:
    """The best source of each target under each backbone."""
    found = []
    for backbone in table.backbones:
        for target in table.targets:
            known = [row for row in table.rows if row != SCRATCH and table.mean(backbone, row, target) is not None]
            known.sort(key=lambda row: -table.mean(backbone, row, target))
            if known:
                best = known[0]
                second = next((row for row in known if row.source != best.source), None)
                one = table.entries[backbone, best, target]
                lead = difference(one, table.entries[backbone, second, target]) if second else None
                found.append(Pick(backbone, target, best, one, table.gain(backbone, best, target), second, lead))
    return found


# ------------------------------------------------------------------ preview
@dataclass(frozen=True)
class Preview:
    """How well probes of frozen features foretell fine-tuning.

    Attributes:
        label: The probe.
        rho: Spearman's rank correlation over the rows of a target, mean over targets and backbones; scratch is no
            row here, all would agree on it.
        interval: Over targets.
        groups: Targets and backbones that it is the mean of.
        pooled: Over all cells together, which also tells which targets are hard.
        cells: How many those are.
        loss: Points that fine-tuning of the probe's pick is below the best row, mean over targets and backbones.
    """

    label: str
    rho: float | None
    interval: Interval | None
    groups: int
    pooled: float | None
    cells: int
    loss: float | None


def previews(grid: dict) -> list[Preview]:
    """Compares each probe with fine-tuning where both exist."""
    tuned = Table(grid, "finetune")
    found = []
    for metric in ("top1", "knn"):
        probed = Table(grid, "probe", metric)
        rhos, targets, losses, pairs = [], [], [], []
        for backbone in tuned.backbones:
            for target in tuned.targets:
                both = [
                    (before, after)
                    for row in tuned.rows
                    if row != SCRATCH
                    and (before := probed.mean(backbone, row, target)) is not None
                    and (after := tuned.mean(backbone, row, target)) is not None
                ]
                pairs += both
                if len(both) >= 2:
                    top = max(before for before, _ in both)  # of rows that it cannot tell apart any may be picked
                    picked = statistics.fmean(after for before, after in both if before == top)
                    losses.append(max(after for _, after in both) - picked)
                if (rho := _spearman(both)) is not None:
                    rhos.append(rho)
                    targets.append(target)
        if pairs:
            rho = statistics.fmean(rhos) if rhos else None
            (interval,) = bootstrap(np.array(rhos)[:, None], targets) if rhos else (None,)
            loss = statistics.fmean(losses) if losses else None
            label = READOUTS["probe", metric]
            found.append(Preview(label, rho, interval, len(rhos), _spearman(pairs), len(pairs), loss))
    return found


def _spearman(pairs: list[tuple[float, float]]) -> float | None:
    """None where there is no order to compare."""
    from scipy.stats import spearmanr

    if len(pairs) < ENOUGH or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


# ------------------------------------------------------------------ source size
class Point(NamedTuple):
    size: int
    found: Entry


@dataclass(frozen=True)
class Curve:
    """Accuracy over the size of the source.

    Attributes:
        dataset: What the sources are subsets of.
        points: By size; sources of one size (draws of the subset) are put together.
        scratch: The same backbone on the same target without pretraining.
        slope: Points that ten times the images bring, by a straight line through the means, with half its interval.
    """

    dataset: str
    backbone: str
    method: str
    target: str
    points: list[Point]
    scratch: Entry | None
    slope: Gain | None


def curves(table: Table) -> list[Curve]:
    """A curve for each backbone, method and target where sources are six or more sizes of one dataset."""
    found = []
    for name, sizes in _families(table):
        for backbone in table.backbones:
            for method in dict.fromkeys(row.method for row in table.rows):
                for target in table.targets:
                    cells: dict[int, list[dict]] = {}
                    for source, size in sizes.items():
                        known = table.entries.get((backbone, Row(source, method), target))
                        if known and known.n:
                            cells.setdefault(size, []).extend(known.cells)
                    points = [Point(size, entry(cells[size], table.metric)) for size in sorted(cells)]
                    if points:
                        scratch = table.entries.get((backbone, SCRATCH, target))
                        scratch = scratch if scratch and scratch.n else None
                        found.append(Curve(name, backbone, method, target, points, scratch, _slope(points)))
    return found


def _families(table: Table) -> list[tuple[str, dict[str, int]]]:
    """Dataset, source -> size; of datasets whose subsets make up six or more sources of different sizes."""
    found: dict[tuple, dict[str, tuple[int, str]]] = {}
    for place in table.entries.values():
        for cell in place.cells:
            # the cell's own run reads the target; the images of the source are those of its pretraining
            data = (cell.get("pretrain_config") or cell.get("config") or {}).get("data") or {}
            if cell["pretrain_seed"] is not None and cell.get("source_size"):
                subset = json.dumps(data.get("subset"), sort_keys=True, default=str)
                whole = (str(data.get("name")), str(data.get("root")))
                found.setdefault(whole, {})[cell["source"]] = (int(cell["source_size"]), subset)
    return [
        (name, {source: size for source, (size, _) in sources.items()})
        for (name, _), sources in found.items()
        if all(len({known[part] for known in sources.values()}) >= SIZES for part in (0, 1))
    ]


def _slope(points: list[Point]) -> Gain | None:
    from scipy.stats import linregress

    if len(points) < ENOUGH:
        return None
    line = linregress([math.log10(point.size) for point in points], [point.found.mean for point in points])
    return Gain(float(line.slope), t_half(float(line.stderr) ** 2, len(points) - 2))
