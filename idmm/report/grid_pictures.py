"""A grid's pictures: heat maps, mean ranks of sources, accuracy over the source's size.

Numbers stand in the cells, gains have signs; colour maps keep their order in grey print.
"""

import textwrap
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from idmm.pictures import log_axis, look, plain_axis, save
from idmm.report.sections import Ranking, SizeCurve
from idmm.report.stats import Estimate, format_interval, format_number
from idmm.report.table import MISSING, SCRATCH, Row, Table, TableCell, legend

CELL = (0.9, 0.37)  # inches
LONGEST = 22  # letters of a label
LEAST = 10.0  # points from the darkest colour to the brightest
KINDS = {"value": "%", "gain": "points"}  # unit of a heat map
MAPS = {"value": "cividis", "gain": "PuOr"}
BELOW = {"loc": "outside lower center", "fontsize": 8, "frameon": False}  # a legend


# ------------------------------------------------------------------ heat maps
def heat_maps(tables: list[Table], path: Path) -> None:
    """Draws values and, where there is a row from scratch, gain over it, side by side; a row of panels for each table
    and backbone."""
    kinds = list(KINDS)[: 1 + any(table.has_scratch for table in tables)]
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
            title = table.unit if kind == "value" else "gain over scratch"
            axis.set_title(f"{_label(backbone)}: {title}", fontsize=10)
            if kind != kinds[0]:
                axis.set_yticklabels([])
            bar = figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02, aspect=25)
            bar.set_label(KINDS[kind], fontsize=8)
            bar.ax.tick_params(labelsize=7)
            bar.outline.set_visible(False)
    figure.supxlabel(_filled(legend(tables, picture=True), figure), fontsize=8)
    _save_with_title(figure, " ".join(table.caption() for table in tables), path)


def _norm(table: Table, kind: str) -> Normalize:
    """One scale for all backbones, no narrower than ``LEAST``, so that small differences do not look large; gains are
    centred at 0."""
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
                _number(axis, (x, y), text, below, colour, framed=kind == "value" and cell.best_of_column)
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
    """A cell's value for its colour (NaN: none), its text, and the small text below."""
    if cell is None or cell.stats.mean is None:
        return np.nan, cell.mean if cell else "", ""
    if kind == "value":
        return cell.stats.mean, cell.mean, " ".join(cell.notes)
    if row.is_scratch:
        return 0.0, format_number(0.0), ""
    if cell.gain is None:
        return np.nan, MISSING, ""
    interval = format_interval(cell.gain.interval, sign=True) if cell.gain.interval else ""
    coloured = cell.gain.interval is None or cell.gain.shown  # what may be chance has no colour
    return cell.gain.value * coloured, format_number(cell.gain.value, sign=True), interval


def _number(axis, place: tuple[int, int], text: str, below: str, colour: str, framed: bool) -> None:
    x, y = place
    centred = {"ha": "center", "va": "center", "color": colour}
    axis.text(x, y - 0.16 * bool(below), text, fontsize=9, weight="bold" if framed else "normal", **centred)
    axis.text(x, y + 0.25, below, fontsize=6.5, **centred)
    if framed:
        axis.add_patch(Rectangle((x - 0.45, y - 0.43), 0.9, 0.86, fill=False, edgecolor=colour, linewidth=1.4))


def _row_labels(rows: list[Row]) -> list[str]:
    """The method is named where there is more than one."""
    several = len({row.method for row in rows} - {SCRATCH.method}) > 1
    methods = [f" · {_label(row.method, 14)}" if several and row.method != SCRATCH.method else "" for row in rows]
    return [_label(row.heads[0]) + method for row, method in zip(rows, methods, strict=True)]


# ------------------------------------------------------------------ sources
def source_ranks(ranking: Ranking, path: Path) -> None:
    """Draws mean rank, and gain over scratch where there is one, for each source, best on top, with intervals."""
    ranks = ranking.ranks
    gains = any(one.gain is not None for one in ranks)
    figure = Figure(figsize=(9.2 if gains else 5.6, 1.7 + 0.42 * len(ranks)), layout="constrained")
    axes = figure.subplots(1, 1 + gains, sharey=True, squeeze=False)[0]
    for y, one in enumerate(ranks):
        _mark(axes[0], y, one.rank)
        if one.gain is not None:
            _mark(axes[1], y, one.gain, sign=True)
    axes[0].set_yticks(range(len(ranks)), [_label(one.label) for one in ranks], fontsize=9)
    axes[0].set(xlim=(0.7, len(ranks) + 0.3), ylim=(len(ranks) - 0.4, -0.6), xlabel="mean rank (1 is best)")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    if gains:
        axes[1].set_xlabel("mean gain over scratch (points)")
        axes[1].margins(x=0.12)
        low, high = axes[1].get_xlim()
        if low < 0 < high:
            axes[1].axvline(0, color="0.4", linewidth=1, linestyle=":")
    for axis in axes:
        plain_axis(axis, "x")
        axis.tick_params(labelsize=8)
    _save_with_title(figure, ranking.caption, path)


def _mark(axis, y: int, mean: Estimate, sign: bool = False) -> None:
    """A dot with its interval and its number."""
    value, interval = mean
    if interval:
        axis.plot(interval, (y, y), color="black", linewidth=1.4, marker="|", markersize=7)
    axis.plot(value, y, marker="o", markersize=8, color="black", zorder=4)
    text = format_number(value, sign)
    axis.annotate(text, (value, y), (0, 7), textcoords="offset points", ha="center", fontsize=8)


# ------------------------------------------------------------------ source size
def size_curves(table: Table, curves: list[SizeCurve], path: Path) -> None:
    """Draws accuracy over the number of images pretrained on, a panel a target (and backbone), a line a method."""
    panels: dict[tuple, list[SizeCurve]] = {}
    for curve in curves:
        panels.setdefault((curve.dataset, curve.backbone, curve.target), []).append(curve)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(0.6 + 3.9 * columns, 1.1 + 3.2 * lines), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    axes = np.ravel(figure.subplots(lines, columns, squeeze=False))
    methods = list(dict.fromkeys(curve.method for curve in curves))
    several = len({curve.backbone for curve in curves}) > 1
    for axis, ((dataset, backbone, target), found) in zip(axes, panels.items(), strict=False):
        _size_panel(axis, found, methods)
        axis.set_title(_label(target) + (f", {_label(backbone)}" if several else ""), fontsize=10)
        axis.set_xlabel(f"images of {_label(dataset)} pretrained on", fontsize=9)
        axis.set_ylabel(f"{table.unit} (%)", fontsize=9)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    handles = [Line2D([], [], label=_label(name), markersize=6, **look(n)) for n, name in enumerate(methods)]
    if any(curve.scratch for curve in curves):
        handles.append(Line2D([], [], color="0.35", linestyle=":", label=SCRATCH.label))
    figure.legend(handles=handles, ncols=4, **BELOW)
    _save_with_title(figure, table.caption(spread="95 % t-interval"), path)


def _size_panel(axis, curves: list[SizeCurve], methods: list[str]) -> None:
    sizes = sorted({size for curve in curves for size in curve.points})
    scratch = curves[0].scratch
    means = [stats.mean for curve in curves for stats in curve.points.values()] + ([scratch.mean] if scratch else [])
    if scratch:
        axis.axhline(scratch.mean, color="0.35", linewidth=1.2, linestyle=":")
        if scratch.half is not None:
            axis.axhspan(scratch.mean - scratch.half, scratch.mean + scratch.half, color="0.85", zorder=0)
    for place, curve in enumerate(curves):
        number = methods.index(curve.method)
        shift = 1.025 ** (place - (len(curves) - 1) / 2)  # so that bars of several methods do not hide each other
        x, y = [size * shift for size in curve.points], [stats.mean for stats in curve.points.values()]
        half = [stats.half or 0.0 for stats in curve.points.values()]
        line = look(number, linewidth=1.6, capsize=3, elinewidth=1, markersize=5)
        axis.errorbar(x, y, half if any(half) else None, **line)
    ticks = [f"{size:,}" if size < 10_000 else f"{size / 1000:g}k" for size in sizes]
    log_axis(axis, sizes, ticks, fontsize=8, rotation=30, ha="right")
    reach = max(2.0, 1.5 * (max(means) - min(means)))  # two seeds may have intervals of any width: cut, not shown small
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, min(means) - reach), min(high, max(means) + reach))
    plain_axis(axis)
    axis.tick_params(labelsize=8)


# ------------------------------------------------------------------ all
def _label(text: str, most: int = LONGEST) -> str:
    """One line, its middle left out where it is long, and no formula."""
    text = " ".join(str(text).split())
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"
    return text.replace("$", r"\$")


def _save_with_title(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(_filled(title, figure), fontsize=9)
    save(figure, path)


def _filled(text: str, figure: Figure) -> str:
    """Breaks a text so that it fits the figure."""
    return textwrap.fill(text, max(40, int(figure.get_figwidth() * 13)))
