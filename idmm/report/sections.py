"""What a grid tells, as plain data computed once for all formats: best sources, ranks, previews, size curves."""

import json
import statistics
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from idmm.report.stats import Estimate, Interval, SeedStats, bootstrap, difference, log_slope, seed_stats, spearman
from idmm.report.table import SCRATCH, Row, Table, TableCell, format_number, source_label, tables

SIZES = 6  # least number of sizes that make a curve


# ------------------------------------------------------------------ sources
@dataclass(frozen=True)
class SourceRank:
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

    @property
    def label(self) -> str:
        return source_label(self.source)


@dataclass(frozen=True)
class Ranking:
    """Sources from best to worst.

    Attributes:
        ranks: By mean rank.
        used: Comparisons (a target, a method and a backbone each) in which every source has a value.
        total: All of them; the others are left out, a rank among fewer would be another number.
        targets: Targets among those used.
    """

    ranks: list[SourceRank]
    used: int
    total: int
    targets: int

    @property
    def caption(self) -> str:
        """What mean ranks are the mean of."""
        left = self.total - self.used
        rest = f"; {left} of {self.total} left out, where some source has no value yet" if left else ""
        counts = [
            f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((self.used, "comparison"), (self.targets, "target"))
        ]
        spans = ", 95 % bootstrap intervals over targets" if self.targets > 1 else ""
        return f"Mean rank (1 is best) over {' on '.join(counts)}{spans}{rest}."


def ranking(table: Table) -> Ranking:
    """Ranks the sources under each target, method and backbone, scratch and given weights among them."""
    pretrained = {
        row for (_, row, _), cell in table.cells.items() if any(r["pretrain_seed"] is not None for r in cell.stats.runs)
    }
    methods = list(dict.fromkeys(row.method for row in table.rows if row in pretrained)) or [None]
    candidates = _candidates(table, pretrained)
    comparisons = list(product(table.backbones, methods, table.targets))
    found = [
        [table.mean(backbone, row or Row(source, method), target) for source, row in candidates.items()]
        for backbone, method, target in comparisons
    ]  # [comparisons][sources]
    kept = [n for n, values in enumerate(found) if None not in values and len(candidates) > 1]
    if not kept:
        return Ranking([], 0, len(comparisons), 0)
    values = np.array([found[n] for n in kept], dtype=float)  # [P, S]
    ranks = rankdata(-values, axis=1)  # 1 for the largest; equals share the mean of their ranks
    chosen = [comparisons[n] for n in kept]
    targets = [target for _, _, target in chosen]
    scratch = [table.mean(backbone, SCRATCH, target) for backbone, _, target in chosen]
    gains = None if None in scratch else values - np.array(scratch)[:, None]
    rank_intervals = bootstrap(ranks, targets)
    gain_intervals = None if gains is None else bootstrap(gains, targets)
    of_method = {name: [m == name for _, m, _ in chosen] for name in methods if name in {m for _, m, _ in chosen}}
    out = []
    for n, (source, row) in enumerate(candidates.items()):
        gained = gains is not None and row != SCRATCH
        out.append(
            SourceRank(
                source,
                pretrained=row is None,
                rank=float(ranks[:, n].mean()),
                rank_interval=rank_intervals[n],
                by_method={name: float(ranks[which, n].mean()) for name, which in of_method.items() if row is None},
                average=float(values[:, n].mean()),
                gain=float(gains[:, n].mean()) if gained else None,
                gain_interval=gain_intervals[n] if gained else None,
            )
        )
    out.sort(key=lambda one: (one.rank, -one.average))
    return Ranking(out, len(kept), len(comparisons), len(set(targets)))


def _candidates(table: Table, pretrained: set[Row]) -> dict[str, Row | None]:
    """Sources that have any value -> None, and rows that stand for themselves under every method -> that row."""
    found: dict[str, Row | None] = {}
    for row in table.rows:
        known = {b for b in table.backbones if any(table.mean(b, row, target) is not None for target in table.targets)}
        if known and row in pretrained:
            found[row.source] = None
        elif known == set(table.backbones):  # weights of one backbone can only be compared where it is alone
            found.setdefault(row.source, row)
    return found


@dataclass(frozen=True)
class Pick:
    """The best row for a target among the pretrained ones, and how far it is ahead of the best of another source."""

    backbone: str
    target: str
    row: Row
    cell: TableCell
    second: Row | None
    lead: Estimate | None


def picks(table: Table) -> list[Pick]:
    """Returns the best source of each target under each backbone."""
    found = []
    for backbone, target in product(table.backbones, table.targets):
        known = [row for row in table.rows if not row.is_scratch and table.mean(backbone, row, target) is not None]
        if known:
            known.sort(key=lambda row: -table.mean(backbone, row, target))
            best, second = known[0], next((row for row in known if row.source != known[0].source), None)
            cell = table.cells[backbone, best, target]
            lead = difference(cell.stats, table.cells[backbone, second, target].stats) if second else None
            found.append(Pick(backbone, target, best, cell, second, lead))
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
        pooled: Over all pairs together, which also tells which targets are hard.
        pairs: Places where both have a value.
        loss: Points that fine-tuning of the probe's pick is below the best row, mean over targets and backbones.
    """

    label: str
    rho: float | None
    interval: Interval | None
    groups: int
    pooled: float | None
    pairs: int
    loss: float | None

    @property
    def sentence(self) -> str:
        parts = []
        if self.rho is not None:
            span = "" if self.interval is None else f" ({self.interval.low:.2f} to {self.interval.high:.2f})"
            parts.append(f"Spearman's ρ within a target {self.rho:.2f}{span}")
        if self.pooled is not None:
            parts.append(f"over all {self.pairs} cells {self.pooled:.2f}")
        if self.loss is not None:
            parts.append(f"its pick is {format_number(self.loss)} points below the best")
        return f"{self.label}: {'; '.join(parts) or f'too few cells to compare ({self.pairs})'}"


def preview(probed: Table, tuned: Table) -> Preview | None:
    """Compares a probe with fine-tuning where both exist, None where that is nowhere."""
    rhos, targets, losses, pairs = [], [], [], []
    for backbone, target in product(tuned.backbones, tuned.targets):
        rows = [row for row in tuned.rows if not row.is_scratch]
        means = [(probed.mean(backbone, row, target), tuned.mean(backbone, row, target)) for row in rows]
        both = [pair for pair in means if None not in pair]
        pairs += both
        if len(both) >= 2:
            top = max(before for before, _ in both)  # of rows that it cannot tell apart any may be picked
            picked = statistics.fmean(after for before, after in both if before == top)
            losses.append(max(after for _, after in both) - picked)
        if (rho := spearman(both)) is not None:
            rhos.append(rho)
            targets.append(target)
    if not pairs:
        return None
    rho, loss = (statistics.fmean(values) if values else None for values in (rhos, losses))
    (interval,) = bootstrap(np.array(rhos)[:, None], targets) if rhos else (None,)
    return Preview(probed.label, rho, interval, len(rhos), spearman(pairs), len(pairs), loss)


# ------------------------------------------------------------------ source size
class Point(NamedTuple):
    size: int
    stats: SeedStats


@dataclass(frozen=True)
class SizeCurve:
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
    scratch: SeedStats | None
    slope: Estimate | None


def size_curves(table: Table) -> list[SizeCurve]:
    """A curve for each backbone, method and target where sources are six or more sizes of one dataset."""
    found = []
    methods = dict.fromkeys(row.method for row in table.rows)
    for (dataset, sizes), *place in product(_families(table), table.backbones, methods, table.targets):
        backbone, method, target = place
        runs: dict[int, list[dict]] = {}
        for source, size in sizes.items():
            cell = table.cells.get((backbone, Row(source, method), target))
            if cell and cell.stats.n:
                runs.setdefault(size, []).extend(cell.stats.runs)
        if runs:
            points = [Point(size, seed_stats(runs[size], table.metric)) for size in sorted(runs)]
            scratch = table.cells.get((backbone, SCRATCH, target))
            slope = log_slope([point.size for point in points], [point.stats.mean for point in points])
            found.append(
                SizeCurve(dataset, *place, points, scratch.stats if scratch and scratch.stats.n else None, slope)
            )
    return found


def _families(table: Table) -> list[tuple[str, dict[str, int]]]:
    """Dataset, source -> size; of datasets whose subsets make up six or more sources of different sizes."""
    found: dict[tuple, dict[str, tuple[int, str]]] = {}
    for run in (run for cell in table.cells.values() for run in cell.stats.runs):
        # the run's own config reads the target; the images of the source are those of its pretraining
        data = (run.get("pretrain_config") or run.get("config") or {}).get("data") or {}
        if run["pretrain_seed"] is not None and run.get("source_size"):
            subset = json.dumps(data.get("subset"), sort_keys=True, default=str)
            whole = (str(data.get("name")), str(data.get("root")))
            found.setdefault(whole, {})[run["source"]] = (int(run["source_size"]), subset)
    return [
        (name, {source: size for source, (size, _) in sources.items()})
        for (name, _), sources in found.items()
        if all(len({known[part] for known in sources.values()}) >= SIZES for part in (0, 1))
    ]


# ------------------------------------------------------------------ all
@dataclass(frozen=True)
class Sections:
    """What the reports of a grid say.

    Attributes:
        grid: What grid.json holds.
        own: The table of the grid's own protocol, which may be empty.
        tables: Those that have something in them, ``own`` first; what follows is of the first.
        picks: The best source of each target.
        ranking: Of the sources.
        curves: Accuracy over the source's size.
        previews: Of fine-tuning by probes.
        failed: Runs.
    """

    grid: dict
    own: Table
    tables: list[Table]
    picks: list[Pick]
    ranking: Ranking
    curves: list[SizeCurve]
    previews: list[Preview]
    failed: list[dict]


def sections(grid: dict) -> Sections:
    """Computes everything that is told of a grid."""
    found = tables(grid)
    shown = [t for t in found if t and (t.metric == "top1" or t.usual_n)]
    first = (shown or found)[0]
    tuned = next(t for t in found if t.protocol == "finetune")
    previews = [preview(t, tuned) for t in found if t.protocol == "probe"]
    return Sections(
        grid,
        found[0],
        shown,
        picks(first),
        ranking(first),
        size_curves(first),
        [one for one in previews if one],
        [run for run in grid["cells"] if run["status"] == "failed"],
    )
