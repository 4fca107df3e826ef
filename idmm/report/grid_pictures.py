"""A grid's heat maps, with numbers in the cells. The colour maps keep their order in grey print."""

import textwrap
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from idmm.figures import save
from idmm.report.stats import format_interval, format_number
from idmm.report.table import MISSING, SCRATCH, Row, Table, TableCell

CELL = (0.9, 0.37)  # inches
LONGEST = 22  # letters of a label
LEAST = 10.0  # least number of points from the darkest colour to the brightest
UNITS = {"value": "%", "gain": "points"}
MAPS = {"value": "cividis", "gain": "PuOr"}


def heat_maps(tables: list[Table], path: Path) -> None:
    """Draw the values and, if there is a row from scratch, the gain over it, in a row of panels for each table and
    backbone."""
    kinds = ["value", "gain"] if any(table.has_scratch for table in tables) else ["value"]
    lines = [(table, backbone) for table in tables for backbone in table.backbones]
    rows = [len(table.rows_of(backbone)) for table, backbone in lines]
    width = 2.1 + len(kinds) * (max(len(table.targets) for table in tables) * CELL[0] + 1.0)
    height = 1.5 + sum(count * CELL[1] + 1.0 for count in rows)
    figure = Figure(figsize=(max(width, 6.4), height), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)
    axes = figure.subplots(len(rows), len(kinds), squeeze=False, height_ratios=rows)
    norms = {(table.protocol, kind): _norm(table, kind) for table in tables for kind in kinds}
    for (table, backbone), line in zip(lines, axes, strict=True):
        for kind, axis in zip(kinds, line, strict=True):
            image = _heat_map(axis, table, backbone, kind, norms[table.protocol, kind])
            title = "accuracy" if kind == "value" else "gain over scratch"
            axis.set_title(f"{_label(backbone)}: {title}", fontsize=10)
            if kind != kinds[0]:
                axis.set_yticklabels([])
            bar = figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02, aspect=25)
            bar.set_label(UNITS[kind], fontsize=8)
            bar.ax.tick_params(labelsize=7)
            bar.outline.set_visible(False)
    title = " ".join(table.caption() for table in tables)
    figure.suptitle(textwrap.fill(title, max(40, int(figure.get_figwidth() * 13))), fontsize=9)
    save(figure, path)


def _norm(table: Table, kind: str) -> Normalize:
    """Return one scale for all backbones, at least ``LEAST`` points wide, so that small differences do not look large.
    Gains are centred at 0."""
    cells = table.cells.values()
    if kind == "gain":
        most = max([LEAST / 2, *(abs(cell.gain.value) for cell in cells if cell.gain)])
        return Normalize(-most, most)
    values = [cell.stats.mean for cell in cells if cell.stats.n] or [0.0]
    wider = max(0.0, LEAST - (max(values) - min(values))) / 2
    return Normalize(min(values) - wider, max(values) + wider)


def _heat_map(axis, table: Table, backbone: str, kind: str, norm: Normalize):
    rows, targets, colours = table.rows_of(backbone), table.targets, colormaps[MAPS[kind]]
    values = np.full((len(rows), len(targets)), np.nan)
    for y, row in enumerate(rows):
        for x, cell in enumerate(table.cells_of(backbone, row)):
            values[y, x], text, below = _content(cell, row, kind)
            if np.isnan(values[y, x]):
                axis.text(x, y, text, ha="center", va="center", fontsize=8, color="0.25")
            else:
                brightness = np.dot((0.299, 0.587, 0.114), colours(norm(values[y, x]))[:3])
                colour = "black" if brightness > 0.46 else "white"
                style = {"ha": "center", "va": "center", "color": colour}
                weight = "bold" if kind == "value" and cell.best_of_column else "normal"
                axis.text(x, y - 0.16 if below else y, text, fontsize=9, weight=weight, **style)
                axis.text(x, y + 0.25, below, fontsize=6.5, **style)
    image = axis.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    axis.set_xticks(range(len(targets)), [_label(t, 16) for t in targets], rotation=30, ha="right", fontsize=8)
    axis.set_yticks(range(len(rows)), _row_labels(rows), fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    for edge in np.arange(0.5, len(targets) - 1):
        axis.axvline(edge, color="white", linewidth=1)
    for y in range(1, len(rows)):
        axis.axhline(y - 0.5, color="white", linewidth=1 if rows[y].source == rows[y - 1].source else 4)
    return image


def _content(cell: TableCell | None, row: Row, kind: str) -> tuple[float, str, str]:
    """Return a cell's value for its colour (NaN: none), its text, and the small text below."""
    if cell is None or cell.stats.mean is None:
        return np.nan, cell.mean if cell else "", ""
    if kind == "value":
        return cell.stats.mean, cell.mean, " ".join(cell.notes)
    if row.is_scratch:
        return 0.0, format_number(0.0), ""
    if cell.gain is None:
        return np.nan, MISSING, ""
    interval = format_interval(cell.gain.interval, sign=True) if cell.gain.interval else ""
    may_be_chance = cell.gain.interval is not None and not cell.gain.excludes_zero
    return 0.0 if may_be_chance else cell.gain.value, format_number(cell.gain.value, sign=True), interval


def _row_labels(rows: list[Row]) -> list[str]:
    """Return the rows' labels, with the method if there are several."""
    several = len({row.method for row in rows} - {SCRATCH.method}) > 1
    labels = []
    for row in rows:
        label = _label(row.heads[0])
        labels.append(f"{label} · {_label(row.method, 14)}" if several and row.method != SCRATCH.method else label)
    return labels


def _label(text: str, most: int = LONGEST) -> str:
    """Return one line without formulas. A long text loses its middle."""
    text = " ".join(str(text).split())
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"
    return text.replace("$", r"\$")
