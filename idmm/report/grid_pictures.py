"""A grid's heat maps, with numbers in the cells. The colour maps keep their order in grey print."""

import textwrap
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from idmm.figures import save, shortened
from idmm.report.table import SCRATCH, Row, Table

CELL = (0.9, 0.37)  # inches
LONGEST = 22  # letters of a label
LEAST = 10.0  # least number of points from the darkest colour to the brightest
MAP = "cividis"


def heat_maps(table: Table, path: Path) -> None:
    """Draw the accuracies, a panel for each backbone."""
    rows = [len(table.rows_of(backbone)) for backbone in table.backbones]
    width = 3.1 + len(table.targets) * CELL[0]
    height = 1.5 + sum(count * CELL[1] + 1.0 for count in rows)
    figure = Figure(figsize=(max(width, 6.4), height), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)
    axes = figure.subplots(len(rows), squeeze=False, height_ratios=rows)[:, 0]
    means = [cell.stats.mean for cell in table.cells.values() if cell.stats.n] or [0.0]
    wider = max(0.0, LEAST - (max(means) - min(means))) / 2  # so that small differences do not look large
    norm = Normalize(min(means) - wider, max(means) + wider)  # one scale for all backbones
    for backbone, axis in zip(table.backbones, axes, strict=True):
        image = _heat_map(axis, table, backbone, norm)
        axis.set_title(f"{_label(backbone)}: accuracy", fontsize=10)
        bar = figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02, aspect=25)
        bar.set_label("%", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        bar.outline.set_visible(False)
    figure.suptitle(textwrap.fill(table.caption(), max(40, int(figure.get_figwidth() * 13))), fontsize=9)
    save(figure, path)


def _heat_map(axis, table: Table, backbone: str, norm: Normalize):
    rows, targets, colours = table.rows_of(backbone), table.targets, colormaps[MAP]
    values = np.full((len(rows), len(targets)), np.nan)
    for y, row in enumerate(rows):
        for x, cell in enumerate(table.cells_of(backbone, row)):
            if cell is None:
                continue
            style = {"ha": "center", "va": "center"}
            if cell.stats.mean is None:
                axis.text(x, y, cell.mean, fontsize=8, color="0.25", **style)
                continue
            values[y, x], notes = cell.stats.mean, " ".join(cell.notes)
            brightness = np.dot((0.299, 0.587, 0.114), colours(norm(values[y, x]))[:3])
            style["color"] = "black" if brightness > 0.46 else "white"
            weight = "bold" if cell.best_of_column else "normal"
            axis.text(x, y - 0.16 if notes else y, cell.mean, fontsize=9, weight=weight, **style)
            axis.text(x, y + 0.25, notes, fontsize=6.5, **style)
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


def _row_labels(rows: list[Row]) -> list[str]:
    """Return the rows' labels, with the method if there are several."""
    several = len({row.method for row in rows} - {SCRATCH.method}) > 1
    methods = [f" · {_label(row.method, 14)}" if several and row.method != SCRATCH.method else "" for row in rows]
    return [_label(row.heads[0]) + method for row, method in zip(rows, methods, strict=True)]


def _label(text: str, most: int = LONGEST) -> str:
    """Return a label on one line."""
    return shortened(" ".join(text.split()), most)
