"""The grid's pictures, written as PNG: heat maps, mean ranks of sources, accuracy over the source's size.

Nothing is told by colour alone: numbers stand in the cells, gains have signs, what is missing is hatched, lines differ
in marker and dash. Colours are Okabe and Ito's and maps that colour-blind readers and grey printers keep in order.
"""

import warnings
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, NullLocator

from idmm.analysis.palette import COLOURS, MARKERS, STYLES
from idmm.files import replacing
from idmm.transfer.insight import Curve, Interval, Ranking, Standing
from idmm.transfer.summary import FAILED, MISSING, RANDOM, SCRATCH, Row, Shown, Table, called, fixed
from idmm.transfer.tables import ranked_by

DPI = 150
CELL = (0.74, 0.37)  # inches
LONGEST = 22  # letters of a label
ACCURACY, GAIN = "cividis", "PuOr"
HATCHES = {MISSING: "////", FAILED: "xxxx"}


# ------------------------------------------------------------------ heat maps
def heat_maps(table: Table, path: Path) -> None:
    """Draws accuracy and, where there is a row from scratch, gain over it, side by side; a row of panels a backbone."""
    kinds = ("accuracy", "gain") if SCRATCH in table.rows else ("accuracy",)
    rows = [len(table.rows_of(backbone)) for backbone in table.backbones]
    width = 2.1 + len(kinds) * (len(table.targets) * CELL[0] + 1.0)
    height = 1.5 + sum(count * CELL[1] + 1.0 for count in rows)
    figure = Figure(figsize=(max(width, 6.4), height), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)
    axes = figure.subplots(len(rows), len(kinds), squeeze=False, height_ratios=rows)
    norms = {kind: _norm(table, kind) for kind in kinds}
    for backbone, line in zip(table.backbones, axes, strict=True):
        for kind, axis in zip(kinds, line, strict=True):
            image = _heat_map(axis, table, backbone, kind, norms[kind])
            axis.set_title(
                f"{_label(backbone)}: {'accuracy' if kind == 'accuracy' else 'gain over scratch'}", fontsize=10
            )
            if kind != kinds[0]:
                axis.set_yticklabels([])
            bar = figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02, aspect=25)
            bar.set_label("%" if kind == "accuracy" else "points", fontsize=8)
            bar.ax.tick_params(labelsize=7)
            bar.outline.set_visible(False)
    figure.suptitle(_folded(table.caption(), figure.get_figwidth()), fontsize=9)
    handles = _heat_legend(table)
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=4 if width > 8 else 2, fontsize=8, frameon=False
        )
    _save(figure, path)


def _norm(table: Table, kind: str) -> Normalize:
    """One scale for all backbones; gains are centred at 0."""
    found = [table.gain(*place) if kind == "gain" else entry for place, entry in table.entries.items()]
    values = [value.mean for value in found if value is not None and value.mean is not None] or [0.0]
    if kind == "gain":
        most = max(1.0, *(abs(value) for value in values), 0.0)
        return Normalize(-most, most)
    low, high = min(values), max(values)
    return Normalize(low, high) if high > low else Normalize(low - 1, high + 1)


def _heat_map(axis, table: Table, backbone: str, kind: str, norm: Normalize):
    rows = table.rows_of(backbone)
    values = np.full((len(rows), len(table.targets)), np.nan)
    colours = colormaps[ACCURACY if kind == "accuracy" else GAIN]
    for y, row in enumerate(rows):
        for x, target in enumerate(table.targets):
            values[y, x], text, below = _content(table, backbone, row, target, kind)
            if np.isnan(values[y, x]):
                _hatched(axis, x, y, text)
                continue
            colour = "black" if _bright(colours(norm(values[y, x]))) else "white"
            shown = table.shown(backbone, row, target)
            best = kind == "accuracy" and shown.best_of_column
            weight = "bold" if best else "normal"
            axis.text(
                x, y - 0.16 * bool(below), text, ha="center", va="center", fontsize=9, color=colour, weight=weight
            )
            axis.text(x, y + 0.25, below, ha="center", va="center", fontsize=6.5, color=colour)
            if best:
                axis.add_patch(Rectangle((x - 0.45, y - 0.43), 0.9, 0.86, fill=False, edgecolor=colour, linewidth=1.4))
    image = axis.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    axis.set_xticks(
        range(len(table.targets)), [_label(t, 16) for t in table.targets], rotation=30, ha="right", fontsize=8
    )
    axis.set_yticks(range(len(rows)), _row_labels(table, rows), fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    for edge in np.arange(0.5, len(table.targets) - 1):
        axis.axvline(edge, color="white", linewidth=1)
    for y in range(1, len(rows)):
        axis.axhline(y - 0.5, color="white", linewidth=1 if rows[y].source == rows[y - 1].source else 4)
    return image


def _content(table: Table, backbone: str, row: Row, target: str, kind: str) -> tuple[float, str, str]:
    """A cell's value (NaN: none), its text, and the small text below."""
    shown = table.shown(backbone, row, target)
    entry = table.entries.get((backbone, row, target))
    if shown is None or entry.mean is None:
        return np.nan, shown.mean if shown else "", ""
    if kind == "accuracy":
        return entry.mean, shown.mean, _below(shown)
    if row == SCRATCH:
        return 0.0, fixed(0.0), ""
    gain = table.gain(backbone, row, target)
    if gain is None:
        return np.nan, MISSING, ""
    return gain.mean, fixed(gain.mean, sign=True), "" if gain.half is None else f"± {fixed(gain.half)}"


def _below(shown: Shown) -> str:
    spread = f"± {shown.std}" if shown.std else ""
    count = shown.n.replace(" ", "")
    return " ".join(filter(None, (spread, count))) + ("†" if shown.some_failed else "")


def _hatched(axis, x: int, y: int, text: str) -> None:
    hatch = HATCHES.get(text, "")
    axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="white", edgecolor="0.7", hatch=hatch, linewidth=0))
    if text:
        behind = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        axis.text(x, y, text, ha="center", va="center", fontsize=8, color="0.25", bbox=behind)


def _bright(colour: tuple) -> bool:
    """Whether black reads better on it than white, by WCAG's contrast."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear)) > 0.179


def _row_labels(table: Table, rows: list[Row]) -> list[str]:
    """The method is named where there is more than one."""
    methods = {row.method for row in rows} - {SCRATCH.method}
    names = [RANDOM if row == SCRATCH else _label(row.source) for row in rows]
    several = [len(methods) > 1 and row.method != SCRATCH.method for row in rows]
    return [
        f"{name} · {_label(row.method, 14)}" * more or name
        for name, row, more in zip(names, rows, several, strict=True)
    ]


def _heat_legend(table: Table) -> list[Patch]:
    shown = [table.shown(*place) for place in table.entries]
    handles = []
    if any(one.best_of_column for one in shown):
        handles.append(Patch(fill=False, edgecolor="black", linewidth=1.4, label="framed: best of a column"))
    for text, label in ((MISSING, "not run yet, or nothing to compare with"), (FAILED, "failed")):
        if any(one.mean == text for one in shown):
            handles.append(Patch(facecolor="white", edgecolor="0.7", hatch=HATCHES[text], label=label))
    if any(one.some_failed for one in shown):
        handles.append(Line2D([], [], linestyle="", marker="$†$", color="black", label="some runs failed, left out"))
    if SCRATCH in table.rows and any(
        gain and gain.half is not None for gain in map(lambda p: table.gain(*p), table.entries)
    ):
        handles.append(Patch(visible=False, label="± of a gain: 95 % interval"))
    return handles


# ------------------------------------------------------------------ sources
def source_ranks(ranked: Ranking, path: Path) -> None:
    """Draws mean rank, and gain over scratch where there is one, for each source, best on top, with intervals."""
    standings = ranked.standings
    gains = any(standing.gain is not None for standing in standings)
    figure = Figure(figsize=(9.2 if gains else 5.6, 1.7 + 0.42 * len(standings)), layout="constrained")
    axes = figure.subplots(1, 1 + gains, sharey=True, squeeze=False)[0]
    methods = list(dict.fromkeys(method for standing in standings for method in standing.by_method))
    for y, standing in enumerate(standings):
        _rank_marks(axes[0], y, standing, methods)
        if standing.gain is not None:
            text = fixed(standing.gain, sign=True)
            _bar(axes[1], y, standing.gain, standing.gain_interval, text, standing.pretrained)
    axes[0].set_yticks(range(len(standings)), [_label(called(standing.source)) for standing in standings], fontsize=9)
    axes[0].set_ylim(len(standings) - 0.4, -0.6)
    axes[0].set_xlim(0.7, len(standings) + 0.3)
    axes[0].set_xlabel("mean rank (1 is best)")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    if gains:
        axes[1].set_xlabel("mean gain over scratch (points)")
        axes[1].margins(x=0.12)
        low, high = axes[1].get_xlim()
        if low < 0 < high:
            axes[1].axvline(0, color="0.4", linewidth=1, linestyle=":")
    for axis in axes:
        _plain(axis, "x")
    if len(methods) > 1:
        handles = [_marker(number, method) for number, method in enumerate(methods)]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(_folded(ranked_by(ranked), figure.get_figwidth()), fontsize=9)
    _save(figure, path)


def _rank_marks(axis, y: int, standing: Standing, methods: list[str]) -> None:
    if len(methods) > 1:
        for method, rank in standing.by_method.items():
            number = methods.index(method)
            below = y + 0.2 + 0.2 * number / len(methods)  # one under the other: equal ranks hide nothing
            axis.plot(rank, below, linestyle="", **_style(number), markersize=5)
    _bar(axis, y, standing.rank, standing.rank_interval, fixed(standing.rank), standing.pretrained)


def _bar(axis, y: int, value: float, interval: Interval | None, text: str, full: bool) -> None:
    """A dot with its interval and its number; hollow for what this grid did not pretrain."""
    if interval is not None:
        axis.plot(interval, (y, y), color="black", linewidth=1.4, marker="|", markersize=7)
    axis.plot(value, y, marker="o", markersize=8, color="black", markerfacecolor="black" if full else "white", zorder=4)
    axis.annotate(text, (value, y), (0, 7), textcoords="offset points", ha="center", fontsize=8)


def _style(number: int) -> dict:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _marker(number: int, label: str) -> Line2D:
    return Line2D([], [], linestyle="", label=_label(label), markersize=6, **_style(number))


# ------------------------------------------------------------------ source size
def size_curves(table: Table, found: list[Curve], path: Path) -> None:
    """Draws accuracy over the number of images pretrained on, a panel a target (and backbone), a line a method."""
    panels: dict[tuple, list[Curve]] = {}
    for curve in found:
        panels.setdefault((curve.dataset, curve.backbone, curve.target), []).append(curve)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(0.6 + 3.9 * columns, 1.1 + 3.2 * lines), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    axes = np.ravel(figure.subplots(lines, columns, squeeze=False))
    methods = list(dict.fromkeys(curve.method for curve in found))
    for axis, ((dataset, backbone, target), curves) in zip(axes, panels.items(), strict=False):
        _size_panel(axis, curves, methods)
        several = len({curve.backbone for curve in found}) > 1
        axis.set_title(f"{_label(target)}{f', {_label(backbone)}' * several}", fontsize=10)
        axis.set_xlabel(f"images of {_label(dataset)} pretrained on", fontsize=9)
        axis.set_ylabel("accuracy (%)", fontsize=9)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    handles = [
        Line2D([], [], linestyle=STYLES[n % len(STYLES)], label=_label(m), **_style(n)) for n, m in enumerate(methods)
    ]
    if any(curve.scratch for curve in found):
        handles.append(Line2D([], [], color="0.35", linestyle=":", label=RANDOM))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(_folded(table.caption(spread="95 % t-interval"), figure.get_figwidth()), fontsize=9)
    _save(figure, path)


def _size_panel(axis, curves: list[Curve], methods: list[str]) -> None:
    sizes = sorted({point.size for curve in curves for point in curve.points})
    scratch = curves[0].scratch
    means = [point.found.mean for curve in curves for point in curve.points] + [scratch.mean] * bool(scratch)
    if scratch:
        axis.axhline(scratch.mean, color="0.35", linewidth=1.2, linestyle=":")
        if scratch.half is not None:
            axis.axhspan(scratch.mean - scratch.half, scratch.mean + scratch.half, color="0.85", zorder=0)
    for place, curve in enumerate(curves):
        number = methods.index(curve.method)
        shift = 1.025 ** (place - (len(curves) - 1) / 2)  # so that bars of several methods do not hide each other
        x = [point.size * shift for point in curve.points]
        y = [point.found.mean for point in curve.points]
        half = [0.0 if point.found.half is None else point.found.half for point in curve.points]
        style = {"linestyle": STYLES[number % len(STYLES)], "linewidth": 1.6, "capsize": 3, "elinewidth": 1}
        axis.errorbar(x, y, half if any(half) else None, markersize=5, **style, **_style(number))
    axis.set_xscale("log")
    axis.set_xticks(sizes, [_count(size) for size in sizes], fontsize=8, rotation=30, ha="right")
    axis.xaxis.set_minor_locator(NullLocator())
    reach = max(2.0, 1.5 * (max(means) - min(means)))  # two seeds may have intervals of any width: cut, not shown small
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, min(means) - reach), min(high, max(means) + reach))
    _plain(axis, "y")


def _count(size: int) -> str:
    return f"{size:,}" if size < 10_000 else f"{size / 1000:g}k"


# ------------------------------------------------------------------ all
def _label(text: str, most: int = LONGEST) -> str:
    """One line, its middle left out where it is long, and no formula."""
    text = " ".join(str(text).split())
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"
    return text.replace("$", r"\$")


def _folded(text: str, inches: float) -> str:
    """Breaks a sentence so that it fits the figure."""
    import textwrap

    return "\n".join(textwrap.wrap(text, max(40, int(inches * 13))))


def _plain(axis, grid: str) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)


def _save(figure: Figure, path: Path) -> None:
    with replacing(Path(path)) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a label in letters that the font lacks
        figure.savefig(file, format="png", dpi=DPI, facecolor="white")
