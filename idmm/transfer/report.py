"""Everything that a grid's results are turned into: tables, pictures, a page, and a summary for the terminal."""

import json
import textwrap
from pathlib import Path

from idmm.files import write_text
from idmm.transfer import html
from idmm.transfer.insight import curves, picks, previews, ranking
from idmm.transfer.summary import Table, called, fixed, over_scratch, place, several, tables
from idmm.transfer.tables import csv_text, latex, markdown, preview_line, ranked_by

TEXTS = {"grid.csv": csv_text, "grid.md": markdown, "grid.tex": latex, "grid.html": html.page}
PICTURES = ("grid.png", "insight.png", "size.png")
WIDTH = 100  # letters of a terminal's line
MOST = 12  # lines of each part of the summary


def write(grid: dict, out: Path) -> None:
    """Writes ``grid.json``, its tables and its pictures, each whole or not at all.

    Pictures that the grid has nothing for are taken away: those of an earlier start would tell of another one.

    Raises:
        RunError: The folder cannot be written to.
    """
    out = Path(out)
    write_text(out / "grid.json", json.dumps(grid, indent=1) + "\n")
    for name, made in TEXTS.items():
        write_text(out / name, made(grid))
    drawn = _draw(grid, out)
    for name in PICTURES:
        if name not in drawn:
            (out / name).unlink(missing_ok=True)


def _draw(grid: dict, out: Path) -> list[str]:
    table = Table(grid, grid["protocol"])
    if not table:
        return []
    from idmm.transfer import figures  # matplotlib takes a second

    figures.heat_maps(table, out / "grid.png")
    drawn = ["grid.png"]
    if (ranked := ranking(table)).standings:
        figures.source_ranks(ranked, out / "insight.png")
        drawn.append("insight.png")
    if found := curves(table):
        figures.size_curves(table, found, out / "size.png")
        drawn.append("size.png")
    return drawn


def text(grid: dict) -> str:
    """Returns what a terminal shows of a grid, about a screen."""
    found = tables(grid)
    parts = [_counts(grid)]
    if found:
        parts += [_best(found[0]), _standings(found[0]), _sizes(found[0])]
    parts.append([part for one in previews(grid) for part in _folded(preview_line(one))])
    failed = several(grid["cells"], "failed")
    parts.append([f"failed: {place(cell)}: {_cut(cell['error'] or '', 240)} (log: {cell['log']})" for cell in failed])
    return "\n\n".join("\n".join(_short(lines)) for lines in parts if lines)


def _short(lines: list[str]) -> list[str]:
    more = len(lines) - MOST
    return lines[:MOST] + [f"  … and {more} more"] * (more > 0)


def _folded(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, subsequent_indent="  ")


def _cut(text: str, most: int) -> str:
    """One line, its end left out where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _counts(grid: dict) -> list[str]:
    lines = []
    for protocol in sorted({cell["protocol"] for cell in grid["cells"]}, key=lambda one: one != grid["protocol"]):
        cells = [cell for cell in grid["cells"] if cell["protocol"] == protocol]
        counts = {status: len(several(cells, status)) for status in ("ok", "failed", "missing")}
        rest = "".join(f", {counts[status]} {status}" for status in ("failed", "missing") if counts[status])
        lines.append(f"transfer grid, {protocol}: {counts['ok']} of {len(cells)} cells done{rest}")
    return lines or ["transfer grid: it has no cells"]


def _best(table: Table) -> list[str]:
    found = picks(table)
    if not found:
        return []
    rows = []
    for pick in found:
        spread = f" ± {fixed(pick.found.std)}" if pick.found.std is not None else ""
        gain = over_scratch(pick.gain)
        start = f"{pick.row.source}, {pick.row.method}"
        rows.append([pick.backbone, pick.target, start, f"{fixed(pick.found.mean)}{spread}", gain])
    return ["best source for each target, and its gain over scratch:", *_columns(rows)]


def _standings(table: Table) -> list[str]:
    ranked = ranking(table)
    rows = []
    for one in ranked.standings:
        span = "" if one.rank_interval is None else f"({' to '.join(map(fixed, one.rank_interval))})"
        gain = "" if one.gain is None else f"gain {fixed(one.gain, sign=True)}"
        rows.append([called(one.source), fixed(one.rank), span, f"average {fixed(one.average)}", gain])
    return [*_folded(ranked_by(ranked)), *_columns(rows)] if rows else []


def _sizes(table: Table) -> list[str]:
    rows = []
    for curve in curves(table):
        if curve.slope is not None:
            slope = f"{fixed(curve.slope.mean, sign=True)} ± {fixed(curve.slope.half)} points"
            rows.append([curve.dataset, curve.backbone, curve.method, curve.target, slope])
    return ["ten times the images to pretrain on (95 % interval of a straight line):", *_columns(rows)] if rows else []


def _columns(rows: list[list[str]]) -> list[str]:
    """Cells below each other."""
    cut = [[_cut(cell, 30) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    return ["  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cut]
