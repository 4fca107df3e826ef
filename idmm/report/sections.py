"""A grid's findings as plain data for all formats: best sources, ranks, baselines and failures."""

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
    """A part of the report after the tables. Its texts have no markup."""

    title: str
    lines: list[str]  # above the table
    heads: tuple[str, ...] = ()
    rows: list[tuple[str | Estimate, ...]] = field(default_factory=list)
    items: list[str] = field(default_factory=list)  # a list below it


# ------------------------------------------------------------------ sources
def best_sources(table: Table) -> Block | None:
    """Return, for each target and backbone, the best source, or those without a difference to it."""
    rows, has_ties = [], False
    for backbone, target in product(table.backbones, table.targets):
        best = _best_source(table, backbone, target)
        if best is not None:
            cell = table.cells[backbone, best.row, target]
            rows.append((backbone, target, best.verdict, " ".join([cell.mean, *cell.notes]), cell.gain or ""))
            has_ties = has_ties or best.is_tie
    if not rows:
        return None
    lines, heads = [table.intervals()], ("backbone", "target", "best source", table.unit, "gain over scratch")
    if has_ties:
        lines.append("Tie: these runs show no difference between the sources. The numbers are those of the first.")
    if len(table.backbones) == 1:
        heads, rows = heads[1:], [row[1:] for row in rows]
    return Block("Which source to pretrain on", lines, heads, rows)


class _Best(NamedTuple):
    """The best row of a column."""

    row: Row
    verdict: str
    is_tie: bool


def _best_source(table: Table, backbone: str, target: str) -> _Best | None:
    candidates = [row for row in table.rows if not row.is_scratch and table.mean(backbone, row, target) is not None]
    if not candidates:
        return None
    best_rows: dict[str, Row] = {}  # the best row of each source
    for row in sorted(candidates, key=lambda row: -table.mean(backbone, row, target)):
        best_rows.setdefault(row.source, row)
    best, *others = best_rows.values()
    leads = {row.source: table.lead(backbone, target, best, row) for row in others}
    tied = [best.source]
    for row in others:
        gain = table.cells[backbone, row, target].gain
        is_loss = gain is not None and gain.excludes_zero and gain.value < 0
        if not leads[row.source].excludes_zero and not is_loss:
            tied.append(row.source)
    cell = table.cells[backbone, best, target]
    has_gain = cell.gain is None or (cell.gain.excludes_zero and cell.gain.value > 0)
    if cell.no_better:
        return _Best(best, f"none better than the largest class {NO_BETTER}", False)
    if len(tied) > 1:
        verdict = f"tie: {', '.join(tied)}"
    elif not has_gain:
        verdict = f"highest: {best.label}"
    elif others:
        verdict = f"{best.label}: {leads[others[0].source]} over {others[0].source}"
    else:
        verdict = best.label
    return _Best(best, verdict if has_gain else f"none shown above scratch, {verdict}", len(tied) > 1)


class SourceRank(NamedTuple):
    """A source's rank, accuracy and gain over all targets, methods and backbones. Intervals are over targets."""

    source: str
    rank: Estimate  # 1 is best
    average: float  # accuracy
    gain: Estimate | None  # over scratch, None without it

    @property
    def label(self) -> str:
        return SCRATCH.label if self.source == SCRATCH.source else self.source


class Ranking(NamedTuple):
    """Sources from best to worst by their mean rank over comparisons: targets, methods and backbones.

    A comparison counts only if every source has a value, and if the runs show a difference between two of them.
    """

    ranks: list[SourceRank]  # none with too few sources or targets
    sources: int  # datasets or weights
    caption: str

    @property
    def block(self) -> Block:
        """The ranking as a part of the report."""
        rows = []
        for rank in self.ranks:
            mean_rank = f"{format_number(rank.rank.value)} ({format_interval(rank.rank.interval)})"
            rows.append((rank.label, mean_rank, format_number(rank.average), rank.gain or ""))
        heads = ("source", "mean rank", "mean accuracy", "mean gain over scratch")
        return Block("Sources over all targets", [self.caption], heads, rows)


def ranking(table: Table) -> Ranking:
    """Rank the sources, with scratch and given weights, for each target, method and backbone.

    A rank is 1, plus 1 for each source that is shown to be better, plus a half for each without a difference. If all
    differ these are the usual ranks.
    """
    cells = table.cells.items()
    pretrained = {row for (_, row, _), cell in cells if any(r["pretrain_seed"] is not None for r in cell.stats.runs)}
    methods = list(dict.fromkeys(row.method for row in table.rows if row in pretrained)) or [None]
    candidates = _candidates(table, pretrained)
    sources = len(candidates.keys() - {SCRATCH.source})
    comparisons = list(product(table.backbones, methods, table.targets))
    used: dict[tuple, dict[str, Row]] = {}  # comparison -> row of each source
    for backbone, method, target in comparisons:
        rows = {source: row or Row(source, method) for source, row in candidates.items()}
        is_complete = all(table.mean(backbone, row, target) is not None for row in rows.values())
        if is_complete and differ(table, backbone, target, rows.values()):
            used[backbone, method, target] = rows
    targets = len({target for *_, target in used})
    if min(sources, targets) < ENOUGH:
        required = f"{ENOUGH} sources, and {ENOUGH} targets on which the runs show a difference between them"
        line = f"No ranking of sources: it requires {required}. Here are {sources} sources and {targets} such targets."
        return Ranking([], sources, line)
    ranks = [_source_rank(table, source, row, used) for source, row in candidates.items()]
    ranks.sort(key=lambda rank: (rank.rank.value, -rank.average))
    caption = "Mean rank (1 is best, sources that do not differ share theirs) over "
    caption += f"{len(used)} comparisons on {targets} targets, with 95 % t-intervals over targets."
    if skipped := len(comparisons) - len(used):
        reason = "a source has no value there, or no two differ"
        caption += f" {skipped} of {len(comparisons)} comparisons are skipped: {reason}."
    return Ranking(ranks, sources, caption)


def _candidates(table: Table, pretrained: set[Row]) -> dict[str, Row | None]:
    """Return the sources that have any value -> None, or their row if it is the same under every method."""
    candidates: dict[str, Row | None] = {}
    for row in table.rows:
        backbones = set()
        for backbone in table.backbones:
            if any(table.mean(backbone, row, target) is not None for target in table.targets):
                backbones.add(backbone)
        if backbones and row in pretrained:
            candidates[row.source] = None
        elif backbones == set(table.backbones):  # weights of one backbone only compare if it is the only one
            candidates.setdefault(row.source, row)
    return candidates


def differ(table: Table, backbone: str, target: str, rows: Iterable[Row]) -> bool:
    """Return whether the runs show a difference between two rows of a column, without scratch."""
    rows = [row for row in rows if not row.is_scratch]
    return any(table.ahead(backbone, target, *pair) for pair in permutations(rows, 2))


def _source_rank(table: Table, source: str, fixed: Row | None, used: dict[tuple, dict[str, Row]]) -> SourceRank:
    ranks, values, gains, targets = [], [], [], [target for *_, target in used]
    for (backbone, _, target), rows in used.items():
        row, others = rows[source], [row for name, row in rows.items() if name != source]
        better = sum(table.ahead(backbone, target, other, row) for other in others)
        worse = sum(table.ahead(backbone, target, row, other) for other in others)
        ranks.append(1 + better + (len(others) - better - worse) / 2)
        values.append(table.mean(backbone, row, target))
        gains.append(table.lead(backbone, target, row, SCRATCH))
    has_gain = fixed != SCRATCH and None not in gains
    gain = over_targets([gain.value for gain in gains], targets) if has_gain else None
    rank = over_targets(ranks, targets, 1, 1 + len(others))
    return SourceRank(source, rank, statistics.fmean(values), gain)


# ------------------------------------------------------------------ test images
def baselines(table: Table) -> list[str]:
    """Return a line per target: its test images, the smallest difference that they can show, and its baselines."""
    lines = []
    for target in table.targets:
        cells = [cell for (_, _, name), cell in table.cells.items() if name == target and cell.stats.images]
        runs = [run for cell in cells for run in cell.stats.runs]
        facts = [
            f"{size} test images" for size in dict.fromkeys(run["test_size"] for run in runs if run.get("test_size"))
        ]
        if groups := [run["test_groups"] for run in runs if run.get("test_groups")]:
            facts.append(f"of {max(groups)} groups of similar images, so intervals are too narrow")
        if cells:  # of two rows as good as the one in the middle
            middle = sorted(cells, key=lambda cell: cell.stats.mean)[len(cells) // 2]
            smallest = format_number(math.hypot(*middle.stats.images))
            facts.append(f"differences under about {smallest} points may be chance")
        if target in table.largest:
            facts.append(f"the largest class is {format_number(table.largest[target])} % of them")
        if target in table.baseline:
            facts.append(f"the baseline reaches {format_number(table.baseline[target])} %")
        if facts:
            lines.append(f"{target}: {'; '.join(facts)}")
    return lines


# ------------------------------------------------------------------ all of a grid
class Sections(NamedTuple):
    """The content of a grid's reports."""

    grid: dict  # grid.json
    main: list[Table]  # the main table of each protocol
    tables: list[Table]  # those with values
    blocks: list[Block]  # those with content, in the order of every format


def sections(grid: dict) -> Sections:
    """Compute the content of a grid's reports."""
    protocols = grid.get("protocols", [grid["protocol"]])
    tables = [Table(grid, *key) for protocol in protocols for key in READOUTS if key[0] == protocol]
    with_values = [table for table in tables if table and (table.is_main or table.usual_n)]
    main = [table for table in with_values if table.is_main] or tables[:1]
    blocks = [(table, best_sources(table)) for table in main]
    ranks = ranking(main[0])
    if ranks.sources > 1:
        blocks.append((main[0], ranks.block))
    several = len(main) > 1
    named = [
        replace(block, title=f"{block.title}: {table.label}") if several else block for table, block in blocks if block
    ]
    named.append(Block("What the test images can show", [], items=baselines(main[0])))
    failures = [_failure(run) for run in grid["cells"] if run["status"] == "failed"]
    named.append(Block("Failed", [], items=failures))
    return Sections(grid, main, with_values, [block for block in named if block.lines or block.items])


def _failure(run: dict) -> str:
    log = f" (log: {run['log']})" if run.get("log") else ""
    return f"{run_label(run)}: {run.get('error') or 'unknown reason'}{log}"
