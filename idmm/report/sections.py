"""A grid's findings as plain data, computed once for all formats: best sources, ranks, previews, size curves."""

import json
import statistics
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.stats import rankdata

from idmm.report.stats import BootstrapMean, Estimate, SeedStats, bootstrap, difference, log_slope, seed_stats, spearman
from idmm.report.table import RANDOM, READOUTS, SCRATCH, Row, Table, TableCell, format_number

SIZES = 6  # least number of sizes that make a curve


# ------------------------------------------------------------------ sources
@dataclass(frozen=True)
class SourceRank:
    """A source's rank, accuracy and gain over all targets, methods and backbones; intervals are over targets."""

    source: str
    pretrained: bool  # False for scratch and for weights that the user gave
    rank: BootstrapMean  # 1 is best; equals share theirs
    by_method: dict[str, float]  # mean rank
    average: float  # accuracy
    gain: BootstrapMean | None  # over scratch, None without it

    @property
    def label(self) -> str:
        return RANDOM if self.source == SCRATCH.source else self.source


@dataclass(frozen=True)
class Ranking:
    """Sources from best to worst by their mean rank over comparisons: targets, methods and backbones.

    Only those comparisons count in which every source has a value: a rank among fewer would be another number.
    """

    ranks: list[SourceRank]
    used: int  # comparisons
    total: int
    targets: int  # among those used

    @property
    def caption(self) -> str:
        left = self.total - self.used
        rest = f"; {left} of {self.total} left out, where some source has no value yet" if left else ""
        counts = ((self.used, "comparison"), (self.targets, "target"))
        over = " on ".join(f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts)
        spans = ", 95 % bootstrap intervals over targets" if self.targets > 1 else ""
        return f"Mean rank (1 is best) over {over}{spans}{rest}."


def ranking(table: Table) -> Ranking:
    """Ranks the sources under each target, method and backbone, scratch and given weights among them."""
    cells = table.cells.items()
    pretrained = {row for (_, row, _), cell in cells if any(r["pretrain_seed"] is not None for r in cell.stats.runs)}
    methods = list(dict.fromkeys(row.method for row in table.rows if row in pretrained)) or [None]
    candidates = _candidates(table, pretrained)
    comparisons = list(product(table.backbones, methods, table.targets))
    found = {
        place: [table.mean(place[0], row or Row(source, place[1]), place[2]) for source, row in candidates.items()]
        for place in comparisons
    }
    kept = [place for place, values in found.items() if None not in values and len(candidates) > 1]
    if not kept:
        return Ranking([], 0, len(comparisons), 0)
    values = np.array([found[place] for place in kept], dtype=float)  # [comparisons, sources]
    places = rankdata(-values, axis=1)  # 1 for the largest; equals share the mean of their ranks
    _, method_of, targets = zip(*kept, strict=True)
    scratch = [table.mean(backbone, SCRATCH, target) for backbone, _, target in kept]
    gains = [None] * len(candidates) if None in scratch else bootstrap(values - np.array(scratch)[:, None], targets)
    masks = {method: [other == method for other in method_of] for method in method_of}
    columns = zip(candidates.items(), bootstrap(places, targets), gains, places.T, values.T, strict=True)
    ranks = []
    for (source, row), rank, gain, place, value in columns:
        by_method = {method: float(place[mask].mean()) for method, mask in masks.items()} if row is None else {}
        over_scratch = None if row == SCRATCH else gain
        ranks.append(SourceRank(source, row is None, rank, by_method, float(value.mean()), over_scratch))
    ranks.sort(key=lambda one: (one.rank.value, -one.average))
    return Ranking(ranks, len(kept), len(comparisons), len(set(targets)))


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
    """How well a probe of frozen features predicts fine-tuning, over targets and backbones; scratch is left out."""

    label: str  # of the probe
    rho: BootstrapMean | None  # Spearman's rank correlation over the rows of a target; its interval is over targets
    groups: int  # targets and backbones that it is the mean of
    pooled: float | None  # over all pairs together, which also tells which targets are hard
    pairs: int  # places where both have a value
    loss: float | None  # points that fine-tuning of the probe's pick is below the best row

    @property
    def sentence(self) -> str:
        parts = []
        if self.rho is not None:
            value, interval = self.rho
            span = " ({:.2f} to {:.2f})".format(*interval) if interval else ""
            parts.append(f"Spearman's ρ within a target {value:.2f}{span}")
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
    (rho,) = bootstrap(np.array(rhos)[:, None], targets) if rhos else (None,)
    loss = statistics.fmean(losses) if losses else None
    return Preview(probed.label, rho, len(rhos), spearman(pairs), len(pairs), loss)


# ------------------------------------------------------------------ source size
@dataclass(frozen=True)
class SizeCurve:
    """Accuracy over the size of the source."""

    dataset: str  # that the sources are subsets of
    backbone: str
    method: str
    target: str
    points: dict[int, SeedStats]  # by size; sources of one size (draws of the subset) are put together
    scratch: SeedStats | None  # the same backbone on the same target without pretraining
    slope: Estimate | None  # points that ten times the images bring


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
            points = {size: seed_stats(runs[size], table.metric) for size in sorted(runs)}
            cell = table.cells.get((backbone, SCRATCH, target))
            scratch = cell.stats if cell and cell.stats.n else None
            slope = log_slope(list(points), [stats.mean for stats in points.values()])
            found.append(SizeCurve(dataset, *place, points, scratch, slope))
    return found


def _families(table: Table) -> list[tuple[str, dict[str, int]]]:
    """Datasets whose subsets are sources of six or more sizes, each with its sources' sizes."""
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
    """What the reports of a grid say; ``picks``, ``ranking`` and ``curves`` are of the first table."""

    grid: dict  # as in grid.json
    own: Table  # of the grid's own protocol, which may be empty
    tables: list[Table]  # those that have something in them, ``own`` first
    picks: list[Pick]
    ranking: Ranking
    curves: list[SizeCurve]
    previews: list[Preview]
    failed: list[dict]


def sections(grid: dict) -> Sections:
    """Computes everything that is told of a grid."""
    found = [Table(grid, *readout) for readout in sorted(READOUTS, key=lambda one: one[0] != grid["protocol"])]
    shown = [t for t in found if t and (t.metric == "top1" or t.usual_n)]
    first = (shown or found)[0]
    tuned = next(t for t in found if t.protocol == "finetune")
    previews = [one for t in found if t.protocol == "probe" and (one := preview(t, tuned))]
    failed = [run for run in grid["cells"] if run["status"] == "failed"]
    return Sections(grid, found[0], shown, picks(first), ranking(first), size_curves(first), previews, failed)
