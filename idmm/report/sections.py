"""A grid's findings as plain data, computed once for all formats: best sources and ranks."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from typing import NamedTuple

from idmm.report.stats import ENOUGH, Estimate, format_interval, format_number, over_targets
from idmm.report.table import NO_BETTER, READOUTS, SCRATCH, Row, Table, run_label


@dataclass(frozen=True)
class Block:
    """A part of the report after the tables, which every format prints in its own way; texts are free of markup."""

    title: str
    lines: list[str]  # said above the table
    heads: tuple[str, ...] = ()
    rows: list[tuple[str | Estimate, ...]] = field(default_factory=list)
    items: list[str] = field(default_factory=list)  # a list below it


# ------------------------------------------------------------------ sources
def best_sources(table: Table) -> Block | None:
    """Returns for each target under each backbone the best source, or those that cannot be told from it."""
    heads, rows, ties = ("target", "best source", table.unit, "gain over scratch"), [], False
    for backbone, target in product(table.backbones, table.targets):
        known = [row for row in table.rows if not row.is_scratch and table.mean(backbone, row, target) is not None]
        if not known:
            continue
        others: dict[str, Row] = {}  # the best row of each source
        for row in sorted(known, key=lambda row: -table.mean(backbone, row, target)):
            others.setdefault(row.source, row)
        best = others.pop(next(iter(others)))
        leads = {source: table.lead(backbone, target, best, row) for source, row in others.items()}
        gains = {source: table.cells[backbone, row, target].gain for source, row in others.items()}
        worse = {source for source, gain in gains.items() if gain and gain.shown and gain.value < 0}
        tied = [source for source, lead in leads.items() if not lead.shown and source not in worse]
        cell = table.cells[backbone, best, target]
        gained = cell.gain is None or (cell.gain.shown and cell.gain.value > 0)
        if cell.no_better:
            verdict = f"none better than the largest class {NO_BETTER}"
        elif tied:
            verdict, ties = f"tie: {', '.join([best.source, *tied])}", True
        elif not gained:
            verdict = f"highest: {best.label}"
        else:
            verdict = best.label + "".join(f": {leads[name]} over {name}" for name in list(leads)[:1])
        if not gained and not cell.no_better:
            verdict = f"none shown above scratch; {verdict}"
        rows.append((backbone, target, verdict, " ".join([cell.mean, *cell.notes]), cell.gain or ""))
    if not rows:
        return None
    heads, rows = (("backbone", *heads), rows) if len(table.backbones) > 1 else (heads, [row[1:] for row in rows])
    said = "Tie: no difference that these runs can show between these sources; the numbers are those of the first."
    return Block("Which source to pretrain on", [table.intervals(), *([said] if ties else [])], heads, rows)


class SourceRank(NamedTuple):
    """A source's rank, accuracy and gain over all targets, methods and backbones; intervals are over targets."""

    source: str
    rank: Estimate  # 1 is best
    average: float  # accuracy
    gain: Estimate | None  # over scratch, None without it

    @property
    def label(self) -> str:
        return SCRATCH.label if self.source == SCRATCH.source else self.source


class Ranking(NamedTuple):
    """Sources from best to worst by their mean rank over comparisons: targets, methods and backbones.

    Only those comparisons count in which every source has a value, and the runs show a difference between two of them.
    """

    ranks: list[SourceRank]  # none for fewer than three sources, or targets among the comparisons used
    sources: int  # pretrained on, or given as weights
    caption: str

    @property
    def block(self) -> Block:
        rows = [
            (one.label, f"{format_number(one.rank.value)} ({format_interval(one.rank.interval)})",
             format_number(one.average), one.gain or "")
            for one in self.ranks
        ]  # fmt: skip
        heads = ("source", "mean rank", "mean accuracy", "mean gain over scratch")
        return Block("Sources over all targets", [self.caption], heads, rows)


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
    targets = len({target for *_, target in kept})
    if min(sources, targets) < ENOUGH:
        wanted = f"{ENOUGH} sources, and {ENOUGH} targets on which the runs show a difference between them"
        said = f"No ranking of sources: it takes {wanted}; here are {sources} sources and {targets} such targets."
        return Ranking([], sources, said)
    ranks = [_source_rank(table, source, row, kept) for source, row in candidates.items()]
    ranks.sort(key=lambda one: (one.rank.value, -one.average))
    left = len(comparisons) - len(kept)
    rest = f"; {left} of {len(comparisons)} left out: a source has no value there, or no two differ" if left else ""
    over = f"{len(kept)} comparisons on {targets} targets, with 95 % t-intervals over targets"
    caption = f"Mean rank (1 is best; sources that do not differ share theirs) over {over}{rest}."
    return Ranking(ranks, sources, caption)


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


def _source_rank(table: Table, source: str, fixed: Row | None, kept: dict) -> SourceRank:
    places, values, gains, targets = [], [], [], [target for *_, target in kept]
    for (backbone, _, target), rows in kept.items():
        mine, others = rows[source], [row for name, row in rows.items() if name != source]
        behind = sum(table.ahead(backbone, target, row, mine) for row in others)
        before = sum(table.ahead(backbone, target, mine, row) for row in others)
        places.append(1 + behind + (len(others) - behind - before) / 2)
        values.append(table.mean(backbone, mine, target))
        gains.append(table.lead(backbone, target, mine, SCRATCH))
    known = fixed != SCRATCH and None not in gains
    gain = over_targets([one.value for one in gains], targets) if known else None
    rank = over_targets(places, targets, 1, 1 + len(others))
    return SourceRank(source, rank, statistics.fmean(values), gain)


# ------------------------------------------------------------------ test images
def baselines(table: Table) -> list[str]:
    """Returns a line per target: its test images, the smallest difference that they can show, and its baselines."""
    lines = []
    for target in table.targets:
        cells = [cell for (_, _, name), cell in table.cells.items() if name == target and cell.stats.images]
        runs = [run for cell in cells for run in cell.stats.runs]
        parts = [f"{size} test images" for size in {run["test_size"]: 0 for run in runs if run.get("test_size")}]
        if groups := [run["test_groups"] for run in runs if run.get("test_groups")]:
            parts.append(f"of {max(groups)} groups, whose images are alike: intervals are too narrow")
        if cells:  # of two rows as good as the one in the middle
            middle = sorted(cells, key=lambda cell: cell.stats.mean)[len(cells) // 2]
            least = format_number(math.hypot(*middle.stats.images))
            parts.append(f"differences under about {least} points cannot be told from chance")
        if target in table.largest:
            parts.append(f"the largest class is {format_number(table.largest[target])} % of them")
        if target in table.baseline:
            parts.append(f"the baseline gets {format_number(table.baseline[target])} %")
        lines += [f"{target}: {'; '.join(parts)}"] if parts else []
    return lines


class Sections(NamedTuple):
    """What the reports of a grid say."""

    grid: dict  # as in grid.json
    own: list[Table]  # one of each protocol
    tables: list[Table]  # those that have something in them
    blocks: list[Block]  # those that have something in them, in the order that every format prints


def sections(grid: dict) -> Sections:
    """Computes everything that is told of a grid."""
    protocols = grid.get("protocols", [grid["protocol"]])
    readouts = [(protocol, name) for protocol in protocols for of, name in READOUTS if of == protocol]
    found = [Table(grid, *readout) for readout in readouts]
    shown = [table for table in found if table and (table.is_main or table.usual_n)]
    own = [table for table in shown if table.is_main] or found[:1]
    failed = [run for run in grid["cells"] if run["status"] == "failed"]
    ranks = ranking(own[0])
    blocks = [
        *(_of(table, best_sources(table), own) for table in own),
        _of(own[0], ranks.block, own) if ranks.sources > 1 else None,
        Block("What the test images can show", [], items=baselines(own[0])),
        Block("Failed", [], items=[_failure(run) for run in failed]),
    ]
    return Sections(grid, own, shown, [block for block in blocks if block and (block.lines or block.items)])


def _of(table: Table, block: Block | None, own: list[Table]) -> Block | None:
    """Returns a block whose title names its table, where there are several."""
    return replace(block, title=f"{block.title}: {table.label}") if block and len(own) > 1 else block


def _failure(run: dict) -> str:
    log = f" (log: {run['log']})" if run.get("log") else ""
    return f"{run_label(run)}: {run.get('error') or 'no reason kept'}{log}"
