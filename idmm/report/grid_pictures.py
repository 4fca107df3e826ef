"""A grid's pictures: its accuracies as bars (IDMM, Figure 4), and over parameters (Figure 3)."""

import textwrap
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from idmm.figures import COLOURS, plain_axis, save, shortened
from idmm.report.charts import Network, over_parameters
from idmm.report.table import SCRATCH, Place, Row, Table, TableCell

BAR = 0.3  # height of a bar (inches)
PANEL = 2.2  # width of a panel (inches)


def bars(table: Table, path: Path) -> None:
    """Draw the accuracies: panels for each backbone and target, with a bar for each pretraining."""
    counts = []  # bars of the longest panel of each backbone
    for backbone in table.backbones:
        counts.append(max(len(_rows(table, backbone, target)) for target in table.targets))
    width = max(6.4, 2.4 + PANEL * len(table.targets))
    height = sum(BAR * count + 0.9 for count in counts) + 0.6
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(counts), len(table.targets), squeeze=False, height_ratios=counts)
    for backbone, axes in zip(table.backbones, panels, strict=True):
        left_labels: list[str] = []  # of the panel to the left
        for target, axis in zip(table.targets, axes, strict=True):
            labels = _draw_panel(axis, table, backbone, target)
            axis.tick_params(labelleft=labels != left_labels, labelsize=8, left=False)
            left_labels = labels
        title = f"{_label(table.name_of(backbone), 44)}\n{_label(table.targets[0])}"
        axes[0].set_title(title, fontsize=9, loc="left")
    figure.suptitle(textwrap.fill(table.caption(), max(40, int(width * 13))), fontsize=9)
    save(figure, path)


def parameters(table: Table, path: Path) -> None:
    """Draw the accuracies over the backbones' parameters, if there are several sizes."""
    networks = []
    for backbone, target in product(table.params, table.targets):
        size = table.params[backbone]
        for row, label in _rows(table, backbone, target).items():
            stats = table.cells[Place(backbone, row, target)].stats
            if stats.mean is not None:
                std = stats.std or 0.0
                networks.append(Network(target, label, backbone, size, stats.mean, std))
    over_parameters(networks, path)


def _draw_panel(axis: Axes, table: Table, backbone: str, target: str) -> list[str]:
    """Draw the bars of a backbone on a target, and return their labels."""
    rows = _rows(table, backbone, target)
    labels = list(rows.values())
    colours = _colours(table)
    for y, row in enumerate(rows):
        _bar(axis, y, table.cells[Place(backbone, row, target)], colours[row.method])
    axis.set_yticks(range(len(rows)), labels)
    axis.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 100))
    axis.set_title(_label(target), fontsize=9, loc="left")
    plain_axis(axis)
    axis.grid(visible=False)
    return labels


def _colours(table: Table) -> dict[str, str]:
    """Return the colour of each method."""
    methods = dict.fromkeys(row.method for row in table.rows if row != SCRATCH)
    colours = {method: COLOURS[n % len(COLOURS)] for n, method in enumerate(methods)}
    return colours | {SCRATCH.method: "0.55"}


def _bar(axis: Axes, y: int, cell: TableCell, colour: str) -> None:
    if cell.stats.mean is not None:
        axis.barh(
            y,
            cell.stats.mean,
            xerr=cell.stats.std,
            color=colour,
            alpha=0.45,
            error_kw={"ecolor": "0.2", "capsize": 2},
        )
    weight = "bold" if cell.best_of_column else "normal"
    axis.text(1, y, cell.text, fontsize=8, weight=weight, va="center_baseline")


def _rows(table: Table, backbone: str, target: str) -> dict[Row, str]:
    """Return the rows that have a cell, with their labels: the methods if all have one source."""
    rows = [row for row in table.rows if Place(backbone, row, target) in table.cells]
    sources = {row.source for row in rows if row.method != SCRATCH.method}
    labels = {}
    for row in rows:
        text = row.method if sources == {row.source} else row.label
        labels[row] = _label(text)
    return labels


def _label(text: str, most: int = 24) -> str:
    """Return a label on one line."""
    return shortened(" ".join(text.split()), most)
