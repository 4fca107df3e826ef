"""A grid's pictures: its accuracies as bars (IDMM, Figure 4), and over the number of parameters
(Figure 3)."""

import textwrap
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure

from idmm.figures import COLOURS, plain_axis, save, shortened
from idmm.report.charts import Network, over_parameters
from idmm.report.table import SCRATCH, Row, Table, TableCell

# height of a bar and width of a panel (inches)
BAR = 0.3
PANEL = 2.2


def bars(table: Table, path: Path) -> None:
    """Draw the accuracies: a row of panels for each backbone, a panel for each target, a bar for
    each pretraining."""
    counts = [
        max(len(_rows(table, backbone, target)) for target in table.targets)
        for backbone in table.backbones
    ]
    size = (
        max(6.4, 2.4 + PANEL * len(table.targets)),
        sum(BAR * count + 0.9 for count in counts) + 0.6,
    )
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(len(counts), len(table.targets), squeeze=False, height_ratios=counts)
    for backbone, axes in zip(table.backbones, places, strict=True):
        named = []  # rows of the panel to the left
        for target, axis in zip(table.targets, axes, strict=True):
            rows = _rows(table, backbone, target)
            for y, row in enumerate(rows):
                _bar(axis, y, table, row, table.cells[backbone, row, target])
            labels = list(rows.values())
            axis.set_yticks(range(len(rows)), labels)
            axis.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 100))
            axis.set_title(_label(target), fontsize=9, loc="left")
            axis.tick_params(labelleft=labels != named, labelsize=8, left=False)
            named = labels
            plain_axis(axis)
            axis.grid(visible=False)
        title = f"{_label(table.name_of(backbone), 44)}\n{_label(table.targets[0])}"
        axes[0].set_title(title, fontsize=9, loc="left")
    figure.suptitle(textwrap.fill(table.caption(), max(40, int(size[0] * 13))), fontsize=9)
    save(figure, path)


def parameters(table: Table, path: Path) -> None:
    """Draw the accuracies over the backbones' parameters, if there are several sizes."""
    networks = []
    for backbone, target in product(table.params, table.targets):
        for row, label in _rows(table, backbone, target).items():
            stats = table.cells[backbone, row, target].stats
            if stats.mean is not None:
                network = Network(
                    target, label, backbone, table.params[backbone], stats.mean, stats.std or 0.0
                )
                networks.append(network)
    over_parameters(networks, path)


def _bar(axis, y: int, table: Table, row: Row, cell: TableCell) -> None:
    methods = list(dict.fromkeys(row.method for row in table.rows if not row.is_scratch))
    if row.is_scratch:
        colour = "0.55"
    else:
        colour = COLOURS[methods.index(row.method) % len(COLOURS)]
    if cell.stats.mean is not None:
        spread = {"ecolor": "0.2", "capsize": 2}
        axis.barh(
            y, cell.stats.mean, xerr=cell.stats.std, color=colour, alpha=0.45, error_kw=spread
        )
    weight = "bold" if cell.best_of_column else "normal"
    axis.text(
        1, y, " ".join([cell.mean, *cell.notes]), fontsize=8, weight=weight, va="center_baseline"
    )


def _rows(table: Table, backbone: str, target: str) -> dict[Row, str]:
    """Return the rows that have a cell, with their labels: the methods if all have one source."""
    rows = [row for row in table.rows if (backbone, row, target) in table.cells]
    sources = {row.source for row in rows if row.method != SCRATCH.method}
    return {row: _label(row.method if sources == {row.source} else row.label) for row in rows}


def _label(text: str, most: int = 24) -> str:
    """Return a label on one line."""
    return shortened(" ".join(text.split()), most)
