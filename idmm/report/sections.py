"""A grid's findings as plain data for all formats: best pretrainings, their lengths, baselines and
failures."""

from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from idmm.report.stats import Estimate, format_number
from idmm.report.table import MISSING, NO_BETTER, Row, Table, run_label


@dataclass(frozen=True)
class Block:
    """A part of the report after the tables. Its texts have no markup."""

    title: str
    lines: list[str]  # above the table
    heads: tuple[str, ...] = ()
    rows: list[tuple[str | Estimate, ...]] = field(default_factory=list)
    items: list[str] = field(default_factory=list)  # a list below it


def best_pretrainings(table: Table) -> Block | None:
    """Return, for each target and backbone, the best pretraining, or those without a difference to
    it."""
    rows = []
    is_open = False
    for backbone, target in product(table.backbones, table.targets):
        best = _best_pretraining(table, backbone, target)
        if best is not None:
            row, verdict, undecided = best
            cell = table.cells[backbone, row, target]
            rows.append(
                (backbone, target, verdict, " ".join([cell.mean, *cell.notes]), cell.gain or "")
            )
            is_open = is_open or undecided
    if not rows:
        return None
    lines = [table.intervals()]
    heads = ("backbone", "target", "best pretraining", "accuracy", "gain over scratch")
    if is_open:
        lines.append(
            "Undecided: these runs show no difference between them. The numbers are those of the first."
        )
    if len(table.backbones) == 1:
        heads = heads[1:]
        rows = [row[1:] for row in rows]
    return Block("Which pretraining is best", lines, heads, rows)


def _best_pretraining(table: Table, backbone: str, target: str) -> tuple[Row, str, bool] | None:
    """Return the best row of a column without scratch, a sentence on it, and whether it is
    undecided."""
    candidates = [
        row
        for row in table.rows
        if not row.is_scratch and table.mean(backbone, row, target) is not None
    ]
    if not candidates:
        return None
    best, *others = sorted(candidates, key=lambda row: -table.mean(backbone, row, target))
    leads = {row: table.lead(backbone, target, best, row) for row in others}
    level = [best.label]
    for row in others:
        gain = table.cells[backbone, row, target].gain
        is_loss = gain is not None and gain.excludes_zero and gain.value < 0
        if not leads[row].excludes_zero and not is_loss:
            level.append(row.label)
    cell = table.cells[backbone, best, target]
    has_gain = cell.gain is None or (cell.gain.excludes_zero and cell.gain.value > 0)
    if cell.no_better:
        return best, f"none better than the largest class {NO_BETTER}", False
    if len(level) > 1:
        verdict = f"undecided: {'; '.join(level)}"
    elif not has_gain:
        verdict = f"highest: {best.label}"
    elif others:
        verdict = f"{best.label}: {leads[others[0]]} over {others[0].label}"
    else:
        verdict = best.label
    return best, verdict if has_gain else f"none shown above scratch, {verdict}", len(level) > 1


def baselines(table: Table) -> list[str]:
    """Return a line per target with the accuracies that need no network."""
    lines = []
    for target in table.targets:
        fitted = table.baseline_sizes.get(target)
        if fitted is None:
            baseline = "the baseline"
        else:
            baseline = f"the baseline, fitted to {fitted:,} images,"
        facts = {
            "the largest class": table.largest.get(target),
            baseline: table.baseline.get(target),
        }
        shares = [
            f"{name} {format_number(value)} %" for name, value in facts.items() if value is not None
        ]
        if shares:
            lines.append(f"{target}: {', '.join(shares)}")
    return lines


def pretrainings(grid: dict) -> Block:
    """Return a row per source, method and backbone with the length of its pretraining.

    Equal epochs can be very different numbers of optimizer steps.
    """
    heads = (
        "source",
        "method",
        "backbone",
        "images",
        "epochs",
        "batch size",
        "steps",
        "optimizer",
        "crops",
        "seconds",
    )
    rows = {}  # of the first seed
    for run in grid["cells"]:
        place = run["source"], run["method"], run["backbone"]
        if (
            place not in rows
            and (images := run.get("source_size"))
            and (config := run.get("pretrain_config"))
        ):
            train = config["train"]
            views = config["views"]
            epochs = train["epochs"]
            steps = train["epochs"] * -(-images // train["batch_size"])
            if train["minutes"] is not None:
                epochs = f"{train['minutes']:g} min"
                steps = MISSING
            crops = f"{sum(group['count'] for group in views['crops'])} at {views['size']} px"
            seconds = format_number(run["pretrain_seconds"])
            length = (
                images,
                epochs,
                train["batch_size"],
                steps,
                train["optimizer"],
                crops,
                seconds,
            )
            rows[place] = (*place, *map(str, length))
    return Block("Pretraining", [], heads, list(rows.values()))


class Sections(NamedTuple):
    """The content of a grid's reports."""

    grid: dict  # grid.json
    table: Table
    blocks: list[Block]  # those with content, in the order of every format


def sections(grid: dict) -> Sections:
    """Compute the content of a grid's reports."""
    table = Table(grid)
    failures = []
    blocks = [
        best_pretrainings(table),
        pretrainings(grid),
        Block("Without a network", [], items=baselines(table)),
    ]
    for run in grid["cells"]:
        if run["status"] == "failed":
            log = f" (log: {run['log']})" if run.get("log") else ""
            failures.append(f"{run_label(run)}: {run.get('error') or 'unknown reason'}{log}")
    blocks.append(Block("Failed", [], items=failures))
    return Sections(
        grid,
        table,
        [block for block in blocks if block and (block.lines or block.rows or block.items)],
    )
