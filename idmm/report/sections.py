"""A grid's findings as plain data, computed once for all formats: best sources, ranks, previews, size curves."""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import permutations, product

from idmm.report.stats import ENOUGH, Estimate, SeedStats, log_slope, over_targets, seed_stats, spearman
from idmm.report.table import (
    NO_BETTER,
    READOUTS,
    SCRATCH,
    Row,
    Table,
    TableCell,
    format_gain,
    format_interval,
    format_number,
    run_label,
)

SIZES = 6  # least number of sizes that make a curve


@dataclass(frozen=True)
class Block:
    """A part of the report after the tables, which every format prints in its own way; texts are free of markup."""

    title: str
    lines: list[str]  # said above the table
    heads: tuple[str, ...] = ()
    rows: list[tuple[str | Estimate, ...]] = field(default_factory=list)
    items: list[str] = field(default_factory=list)  # a list below it


# ------------------------------------------------------------------ sources
@dataclass(frozen=True)
class Pick:
    """The best row for a target among the pretrained ones, and the sources that it cannot be told from."""

    backbone: str
    target: str
    row: Row
    cell: TableCell
    second: Row | None  # the best of another source
    lead: Estimate | None  # over that
    tied: list[str]  # sources whose best row is no worse, as far as the runs show

    @property
    def verdict(self) -> str:
        if self.cell.no_better:
            return f"none better than the largest class {NO_BETTER}"
        if self.tied:
            return f"tie: {', '.join([self.row.source, *self.tied])}"
        return f"{self.row.label}{f': {format_gain(self.lead)} over {self.second.source}' if self.lead else ''}"


def picks(table: Table) -> list[Pick]:
    """Returns the best source of each target under each backbone."""
    found = []
    for backbone, target in product(table.backbones, table.targets):
        known = [row for row in table.rows if not row.is_scratch and table.mean(backbone, row, target) is not None]
        known.sort(key=lambda row: -table.mean(backbone, row, target))
        if known:
            best, cell = known[0], table.cells[backbone, known[0], target]
            leads: dict[Row, Estimate] = {}  # over the best row of each other source
            for row in known:
                if row.source not in {best.source, *(other.source for other in leads)}:
                    leads[row] = table.lead(backbone, target, best, row)
            tied = [row.source for row, lead in leads.items() if not lead.shown]
            second = next(iter(leads), None)
            found.append(Pick(backbone, target, best, cell, second, leads.get(second), tied))
    return found


def _picks_block(table: Table, found: list[Pick]) -> Block:
    heads, rows = ("target", "best source", "accuracy", "gain over scratch"), []
    for pick in found:
        accuracy = " ".join([pick.cell.mean, *pick.cell.notes])
        rows.append((pick.target, pick.verdict, accuracy, pick.cell.gain or ""))
    if len(table.backbones) > 1:
        heads, rows = ("backbone", *heads), [(pick.backbone, *row) for pick, row in zip(found, rows, strict=True)]
    lines = [table.intervals()]
    if any(pick.tied for pick in found):
        lines.append("Tie: no difference that these runs can show between these sources; the numbers are the first's.")
    return Block("Which source to pretrain on", lines, heads, rows)


@dataclass(frozen=True)
class SourceRank:
    """A source's rank, accuracy and gain over all targets, methods and backbones; intervals are over targets."""

    source: str
    pretrained: bool  # False for scratch and for weights that the user gave
    rank: Estimate  # 1 is best
    average: float  # accuracy
    gain: Estimate | None  # over scratch, None without it

    @property
    def label(self) -> str:
        return SCRATCH.label if self.source == SCRATCH.source else self.source


@dataclass(frozen=True)
class Ranking:
    """Sources from best to worst by their mean rank over comparisons: targets, methods and backbones.

    Only those comparisons count in which every source has a value, and the runs show a difference between two of them.
    """

    ranks: list[SourceRank]  # none for fewer than three sources, or targets among the comparisons used
    used: int  # comparisons
    total: int
    sources: int  # pretrained on, or given as weights
    targets: int  # among those used

    @property
    def caption(self) -> str:
        if not self.ranks:
            return _too_few("ranking of sources", "differ", self.sources, self.targets)
        left = self.total - self.used
        rest = f"; {left} of {self.total} left out, where a source has no value or none differ" if left else ""
        over = f"{self.used} comparisons on {self.targets} targets, with 95 % t-intervals over targets"
        return f"Mean rank (1 is best; sources that do not differ share theirs) over {over}{rest}."


def _too_few(what: str, differ: str, sources: int, targets: int) -> str:
    wanted = f"{ENOUGH} sources, and {ENOUGH} targets on which they {differ} by more than their intervals"
    return f"No {what}: it takes {wanted}; here are {sources} sources and {targets} such targets."


def ranking(table: Table) -> Ranking:
    """Ranks the sources under each target, method and backbone, scratch and given weights among them.

    A rank is 1, and 1 more for each source that is shown to be better, and a half more for each that is not told apart:
    where all differ these are the usual ranks.
    """
    cells = table.cells.items()
    pretrained = {row for (_, row, _), cell in cells if any(r["pretrain_seed"] is not None for r in cell.stats.runs)}
    methods = list(dict.fromkeys(row.method for row in table.rows if row in pretrained)) or [None]
    candidates = _candidates(table, pretrained)
    sources = len(candidates.keys() - {SCRATCH.source})
    comparisons = list(product(table.backbones, methods, table.targets))
    kept: dict[tuple, dict[str, Row]] = {}
    for backbone, method, target in comparisons:
        rows = {source: row or Row(source, method) for source, row in candidates.items()}
        known = all(table.mean(backbone, row, target) is not None for row in rows.values())
        if known and differ(table, backbone, target, rows.values()):
            kept[backbone, method, target] = rows
    targets = [target for *_, target in kept]
    if min(sources, len(set(targets))) < ENOUGH:
        return Ranking([], len(kept), len(comparisons), sources, len(set(targets)))
    ranks = [_source_rank(table, source, row, kept, targets) for source, row in candidates.items()]
    ranks.sort(key=lambda one: (one.rank.value, -one.average))
    return Ranking(ranks, len(kept), len(comparisons), sources, len(set(targets)))


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


def differ(table: Table, backbone: str, target: str, rows: Iterable[Row]) -> bool:
    """Whether the runs show a difference between two rows of a column, scratch left out."""
    rows = [row for row in rows if not row.is_scratch]
    return any(table.ahead(backbone, target, *pair) for pair in permutations(rows, 2))


def _source_rank(table: Table, source: str, fixed: Row | None, kept: dict, targets: list[str]) -> SourceRank:
    places, values, gains = [], [], []
    for (backbone, _, target), rows in kept.items():
        mine, others = rows[source], [row for name, row in rows.items() if name != source]
        behind = sum(table.ahead(backbone, target, row, mine) for row in others)
        before = sum(table.ahead(backbone, target, mine, row) for row in others)
        places.append(1 + behind + (len(others) - behind - before) / 2)
        values.append(table.mean(backbone, mine, target))
        gains.append(table.lead(backbone, target, mine, SCRATCH))
    known = fixed != SCRATCH and None not in gains
    gain = over_targets([one.value for one in gains], targets) if known else None
    rank = over_targets(places, targets, 1, len(rows))
    return SourceRank(source, fixed is None, rank, statistics.fmean(values), gain)


def _ranking_block(found: Ranking) -> Block:
    rows = []
    for one in found.ranks:
        rank = f"{format_number(one.rank.value)} ({format_interval(one.rank.interval)})"
        rows.append((one.label, rank, format_number(one.average), one.gain or ""))
    heads = ("source", "mean rank", "mean accuracy", "mean gain over scratch")
    return Block("Sources over all targets", [found.caption], heads, rows)


# ------------------------------------------------------------------ preview
@dataclass(frozen=True)
class Preview:
    """How well a probe of frozen features predicts fine-tuning within a target, over targets; scratch is left out."""

    label: str  # of the probe
    sources: int  # measured by both
    targets: int  # on which both show differences
    rho: Estimate | None = None  # Spearman's rank correlation over the rows of a target; its interval is over targets
    loss: Estimate | None = None  # points that fine-tuning of the probe's pick is below the best row

    @property
    def sentence(self) -> str:
        if self.rho is None:
            return f"{self.label}: {_too_few('rank correlation', 'differ under both', self.sources, self.targets)}"
        low, high = self.rho.interval
        rho = f"Spearman's ρ within a target {self.rho.value:.2f} ({low:.2f} to {high:.2f})"
        loss = f"its pick is {format_number(self.loss.value)} points below the best"
        return f"{self.label}: {rho} over {self.targets} targets; {loss}"


def preview(probed: Table, tuned: Table) -> Preview | None:
    """Compares a probe with fine-tuning where both exist, None where that is nowhere."""
    rhos, losses, targets, sources = [], [], [], set()
    for backbone, target in product(tuned.backbones, tuned.targets):
        means = {row: (probed.mean(backbone, row, target), tuned.mean(backbone, row, target)) for row in tuned.rows}
        both = {row: pair for row, pair in means.items() if None not in pair and not row.is_scratch}
        here = {row.source for row in both}
        sources |= here
        if len(here) >= ENOUGH and all(differ(table, backbone, target, both) for table in (probed, tuned)):
            top = max(before for before, _ in both.values())  # of rows that it cannot tell apart any may be picked
            picked = statistics.fmean(after for before, after in both.values() if before == top)
            losses.append(max(after for _, after in both.values()) - picked)
            rhos.append(spearman(list(both.values())))
            targets.append(target)
    if not sources:
        return None
    counts = probed.label, len(sources), len(set(targets))
    if counts[-1] < ENOUGH:
        return Preview(*counts)
    return Preview(*counts, over_targets(rhos, targets, -1, 1), over_targets(losses, targets))


# ------------------------------------------------------------------ test images
def test_sets(table: Table) -> list[str]:
    """Returns for each target in a sentence what its test images can show."""
    found = []
    for target in table.targets:
        cells = [cell for (_, _, name), cell in table.cells.items() if name == target and cell.stats.images]
        runs = [run for cell in cells for run in cell.stats.runs]
        parts = [f"{size} test images" for size in {run["test_size"]: 0 for run in runs if run.get("test_size")}]
        if cells:  # two rows as good as the one in the middle
            cells.sort(key=lambda cell: cell.stats.mean)
            least = math.hypot(*cells[len(cells) // 2].stats.images)
            parts.append(f"they can show differences from about {format_number(least)} points on")
        if target in table.largest:
            parts.append(f"the largest class is {format_number(table.largest[target])} % of them")
        pixels = [run["pixel_knn"] for run in runs if run.get("pixel_knn") is not None]
        if pixels:
            parts.append(f"kNN on raw pixels gets {format_number(statistics.fmean(pixels))} %")
        found += [f"{target}: {'; '.join(parts)}"] if parts else []
    return found


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


def _slopes_block(curves: list[SizeCurve]) -> Block:
    rows = [(c.dataset, c.backbone, c.method, c.target, c.slope) for c in curves if c.slope]
    lines = ["What ten times the images to pretrain on add (95 % interval of a straight line)."] if rows else []
    return Block("Size of the source", lines, ("dataset", "backbone", "method", "target", "points"), rows)


# ------------------------------------------------------------------ all
@dataclass(frozen=True)
class Sections:
    """What the reports of a grid say; ``ranking`` and ``curves`` are of the first table."""

    grid: dict  # as in grid.json
    own: Table  # of the grid's own protocol, which may be empty
    tables: list[Table]  # those that have something in them, ``own`` first
    ranking: Ranking
    curves: list[SizeCurve]
    blocks: list[Block]  # those that have something in them, in the order that every format prints


def sections(grid: dict) -> Sections:
    """Computes everything that is told of a grid."""
    found = [Table(grid, *readout) for readout in sorted(READOUTS, key=lambda one: one[0] != grid["protocol"])]
    shown = [t for t in found if t and (t.metric == "top1" or t.usual_n)]
    first = (shown or found)[0]
    tuned = next(t for t in found if t.protocol == "finetune")
    previews = [one for t in found if t.protocol == "probe" and (one := preview(t, tuned))]
    failed = [run for run in grid["cells"] if run["status"] == "failed"]
    best, order, curves = picks(first), ranking(first), size_curves(first)
    blocks = [
        _picks_block(first, best) if best else None,
        _ranking_block(order) if order.sources > 1 else None,
        _slopes_block(curves),
        Block("Preview against fine-tuning", [], items=[one.sentence for one in previews]),
        Block("What the test images can show", [], items=test_sets(first)),
        Block("Failed", [], items=[_failure(run) for run in failed]),
    ]
    blocks = [block for block in blocks if block and (block.lines or block.items)]
    return Sections(grid, found[0], shown, order, curves, blocks)


def _failure(run: dict) -> str:
    log = f" (log: {run['log']})" if run.get("log") else ""
    return f"{run_label(run)}: {run.get('error') or 'no reason kept'}{log}"
