"""A grid's pictures: its accuracies as bars (IDMM, Figure 4), and over the number of parameters (Figure 3)."""

import textwrap
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure

from idmm.figures import COLOURS, plain_axis, save, shortened
from idmm.report.charts import Points, accuracy_curves
from idmm.report.table import SCRATCH, Row, Table, TableCell, millions

BAR, PANEL = 0.3, 2.2  # height of a bar and width of a panel (inches)


def bars(table: Table, path: Path) -> None:
    """Draw the accuracies: a row of panels for each backbone, a panel for each target, a bar for each pretraining."""
    counts = []
    for backbone in table.backbones:
        counts.append(max(len(_rows(table, backbone, target)) for target in table.targets))
    width = 2.4 + PANEL * len(table.targets)
    height = 0.6 + sum(BAR * count + 0.7 for count in counts)
    figure = Figure(figsize=(max(width, 6.4), height), layout="constrained")
    places = figure.subplots(len(counts), len(table.targets), squeeze=False, height_ratios=counts)
    for backbone, axes in zip(table.backbones, places, strict=True):
        named: list[str] = []  # rows of the panel to the left
        for target, axis in zip(table.targets, axes, strict=True):
            rows = _rows(table, backbone, target)
            labels = _row_labels(rows)
            for y, row in enumerate(rows):
                _bar(axis, y, table, row, table.cells[backbone, row, target])
            axis.set_yticks(range(len(rows)), labels)
            axis.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 100))
            axis.set_title(_label(target), fontsize=9)
            axis.tick_params(labelleft=labels != named, labelsize=8, left=False)
            named = labels
            plain_axis(axis)
            axis.grid(visible=False)
        axes[0].set_ylabel("\n".join(textwrap.wrap(table.name_of(backbone), 30)), fontsize=9)
    figure.suptitle(textwrap.fill(table.caption(), max(40, int(figure.get_figwidth() * 13))), fontsize=9)
    save(figure, path)


def _bar(axis, y: int, table: Table, row: Row, cell: TableCell) -> None:
    methods = list(dict.fromkeys(row.method for row in table.rows if not row.is_scratch))
    colour = "0.55" if row.is_scratch else COLOURS[methods.index(row.method) % len(COLOURS)]
    if cell.stats.mean is not None:
        spread = {"ecolor": "0.2", "capsize": 2, "elinewidth": 1}
        axis.barh(y, cell.stats.mean, 0.8, xerr=cell.stats.std, color=colour, alpha=0.45, error_kw=spread)
    weight = "bold" if cell.best_of_column else "normal"
    axis.text(1, y, " ".join([cell.mean, *cell.notes]), fontsize=8, weight=weight, va="center_baseline")


def _rows(table: Table, backbone: str, target: str) -> list[Row]:
    """Return the rows that have a cell."""
    return [row for row in table.rows if (backbone, row, target) in table.cells]


def parameters(table: Table, path: Path) -> None:
    """Draw the accuracies over the backbones' parameters, if there are several sizes."""
    sizes = {params / 1e6: f"{_label(name)}\n{millions(params)}" for name, params in table.params.items()}
    if len(sizes) < 2:
        return
    panels: dict[str, dict[str, Points]] = {}
    for backbone, target in product(table.params, table.targets):
        curves = panels.setdefault(target, {})
        rows = _rows(table, backbone, target)
        for row, label in zip(rows, _row_labels(rows), strict=True):
            stats = table.cells[backbone, row, target].stats
            if stats.mean is not None:
                curves.setdefault(label, []).append((table.params[backbone] / 1e6, stats.mean, stats.std or 0.0))
    accuracy_curves(panels, path, ("parameters without the classifier", "top-1 accuracy (%)"), sizes)


def _row_labels(rows: list[Row]) -> list[str]:
    """Return the rows' labels: the methods if all have one source."""
    pretrained = [row.source for row in rows if row.method != SCRATCH.method]
    several = len(set(pretrained)) > 1
    return [_label(row.label if several or row.source not in pretrained else row.method) for row in rows]


def _label(text: str) -> str:
    """Return a label on one line."""
    return shortened(" ".join(text.split()), 24)
