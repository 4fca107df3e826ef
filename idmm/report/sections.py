"""A grid's findings for all formats: best pretrainings, their lengths, baselines and failures."""

from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from idmm.report.page import Cell
from idmm.report.stats import Grid, format_number
from idmm.report.table import MISSING, NO_BETTER, SCRATCH, Place, Table, run_label

UNDECIDED = (
    "Undecided: these runs show no difference between them. The numbers are those of the first."
)

BlockRow = dict[str, str | Cell]  # head of a column -> cell


@dataclass(frozen=True)
class Block:
    """A part of the report after the tables. Its texts have no markup."""

    title: str
    lines: list[str] = field(default_factory=list)  # above the table
    rows: list[BlockRow] = field(default_factory=list)
    items: list[str] = field(default_factory=list)  # a list below it


def best_pretrainings(table: Table) -> Block | None:
    """Return the best pretraining for each target and backbone, or those that are level with it."""
    lines = [table.intervals()]
    rows = []
    for backbone, target in product(table.backbones, table.targets):
        best = _best_pretraining(table, backbone, target)
        if best is None:
            continue
        cell = table.cells[best.place]
        row: BlockRow = {"backbone": backbone, "target": target}
        if len(table.backbones) == 1:
            row = {"target": target}
        row["best pretraining"] = best.verdict
        row["accuracy"] = cell.text
        row["gain over scratch"] = ""
        if cell.gain is not None:
            row["gain over scratch"] = Cell(str(cell.gain), tone=cell.gain.direction)
        rows.append(row)
        if best.is_undecided:
            lines[1:] = [UNDECIDED]
    if not rows:
        return None
    return Block("Which pretraining is best", lines, rows)


class Best(NamedTuple):
    """The best place of a column without scratch."""

    place: Place
    verdict: str  # names the pretraining, or those that are level with it
    is_undecided: bool


def _best_pretraining(table: Table, backbone: str, target: str) -> Best | None:
    means = {}
    for row in table.rows:
        mean = table.mean(backbone, row, target)
        if mean is not None and row != SCRATCH:
            means[row] = mean
    if not means:
        return None
    best, *others = sorted(means, key=lambda row: -means[row])
    place = Place(backbone, best, target)
    cell = table.cells[place]
    if cell.no_better:
        return Best(place, f"none better than the largest class {NO_BETTER}", False)
    level = [best.label]
    for row in others:
        lead = table.lead(place, row)
        gain = table.cells[place._replace(row=row)].gain
        is_loss = gain is not None and gain.direction == "down"
        if lead is not None and lead.direction == "level" and not is_loss:
            level.append(row.label)
    has_gain = cell.gain is None or cell.gain.direction == "up"
    is_undecided = len(level) > 1
    if is_undecided:
        verdict = f"undecided: {'; '.join(level)}"
    elif not has_gain:
        verdict = f"highest: {best.label}"
    elif others:
        verdict = f"{best.label}: {table.lead(place, others[0])} over {others[0].label}"
    else:
        verdict = best.label
    if not has_gain:
        verdict = f"none shown above scratch, {verdict}"
    return Best(place, verdict, is_undecided)


def baselines(table: Table) -> list[str]:
    """Return a line per target with the accuracies that need no network."""
    lines = []
    for target in table.targets:
        shares = []
        if target in table.largest:
            shares.append(f"the largest class {format_number(table.largest[target])} %")
        if target in table.baseline:
            baseline = format_number(table.baseline[target])
            share = f"the baseline {baseline} %"
            if target in table.baseline_sizes:
                fitted = table.baseline_sizes[target]
                share = f"the baseline, fitted to {fitted:,} images, {baseline} %"
            shares.append(share)
        if shares:
            lines.append(f"{target}: {', '.join(shares)}")
    return lines


def pretrainings(grid: Grid) -> Block:
    """Return a row per source, method and backbone with the length of its pretraining.

    Equal epochs can be very different numbers of optimizer steps.
    """
    rows: dict[tuple[str, str, str], BlockRow] = {}  # of the first seed
    for run in grid["cells"]:
        start = (run["source"], run["method"], run["backbone"])
        images = run.get("source_size")
        config = run.get("pretrain_config")
        if not images or not config or start in rows:
            continue
        train = config["train"]
        size = config["views"]["size"]
        crops = sum(group["count"] for group in config["views"]["crops"])
        epochs = train["epochs"]
        steps = epochs * -(-images // train["batch_size"])
        if train["minutes"] is not None:
            epochs = f"{train['minutes']:g} min"
            steps = MISSING
        rows[start] = {
            "source": run["source"],
            "method": run["method"],
            "backbone": run["backbone"],
            "images": str(images),
            "epochs": str(epochs),
            "batch size": str(train["batch_size"]),
            "steps": str(steps),
            "optimizer": train["optimizer"],
            "crops": f"{crops} at {size} px",
            "seconds": format_number(run["pretrain_seconds"]),
        }
    return Block("Pretraining", rows=list(rows.values()))


def failures(grid: Grid) -> list[str]:
    """Return a line per failed run, with the reason and the log."""
    lines = []
    for run in grid["cells"]:
        if run["status"] == "failed":
            line = f"{run_label(run)}: {run.get('error') or 'unknown reason'}"
            if run.get("log"):
                line += f" (log: {run['log']})"
            lines.append(line)
    return lines


class Sections(NamedTuple):
    """The content of a grid's reports."""

    grid: Grid
    table: Table
    blocks: list[Block]  # those with content, in the order of every format


def sections(grid: Grid) -> Sections:
    """Compute the content of a grid's reports."""
    table = Table(grid)
    blocks = [
        best_pretrainings(table),
        pretrainings(grid),
        Block("Without a network", items=baselines(table)),
        Block("Failed", items=failures(grid)),
    ]
    return Sections(
        grid, table, [block for block in blocks if block and (block.rows or block.items)]
    )
