"""Pictures of one or several finished runs: accuracies, accuracy over size, features in a plane, calibration."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from idmm.pictures import COLOURS, MARKERS, arrange, log_axis, look, names_legend, plain_axis, point, shortened
from idmm.report.calibration import Bin, Calibration
from idmm.report.facts import Cloud, RunFacts
from idmm.report.pictures import TOP1

SURENESS = {"too sure": {"color": COLOURS[1], "marker": "s"}, "not sure enough": {"color": COLOURS[0], "marker": "o"}}
FLOORS = {  # beside an accuracy, by their names in result.json
    "pixel_knn": ("kNN of raw pixels", {"marker": "D", "color": "0.4", "markerfacecolor": "white"}),
    "largest_class": ("largest class every time", {"marker": "|", "color": "0.4"}),
}
POINT = 14.0  # area of a point of many (square points)


def scores_figure(runs: list[RunFacts], width: float = 7.6) -> Figure:
    """Returns a line for each classifier: top-1 with its 95 % interval, and what it has to beat. Width in inches."""
    names = [shortened(run.label, round(4.5 * width)) for run in runs]
    groups, across = list(dict.fromkeys(run.group for run in runs)), 3 if width > 6 else 1  # names in a line of the key
    height = 1.35 + 0.42 * len(runs) + 0.4 * (across == 1)
    left = (0.35 + 0.082 * max(map(len, names))) / width
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=left, right=0.96, bottom=0.62 / height, top=1 - (0.45 + 0.4 * (across == 1)) / height)
    axis = figure.subplots()
    for place, run in enumerate(runs):
        top1, style = run.result["top1"], look(groups.index(run.group), linestyle="")
        interval = {"linewidth": 5, "alpha": 0.35, "solid_capstyle": "round"}
        axis.plot(run.result["top1_interval"], [place, place], color=style["color"], **interval)
        axis.plot(top1, place, markersize=8, zorder=4, **style)
        axis.annotate(f"{top1:.1f}", (top1, place), (0, 7), textcoords="offset points", ha="center", fontsize=8.5)
        for name, (_, style) in FLOORS.items():
            if (value := run.result.get(name)) is not None:
                axis.plot(value, place, markersize=7, markeredgewidth=2, zorder=3, **style)
    axis.set_yticks(range(len(runs)), names, fontsize=9, parse_math=False)
    axis.set(xlim=(0, 100), ylim=(len(runs) - 0.5, -0.6), xlabel=TOP1)
    axis.tick_params(axis="y", length=0)
    colour = COLOURS[0] if len(groups) == 1 else "0.6"
    key = [Line2D([], [], color=colour, marker="o", linewidth=5, alpha=0.8, label="top-1, 95 % interval")]
    for name, (label, style) in FLOORS.items():
        if any(run.result.get(name) is not None for run in runs):
            key.append(Line2D([], [], linestyle="", markeredgewidth=2, label=label, **style))
    where = {"loc": "upper left", "bbox_to_anchor": (left - 0.02, 1)}
    figure.legend(handles=key, ncols=across, fontsize=8.5, frameon=False, **where)
    plain_axis(axis, "x")
    axis.spines["left"].set_visible(False)
    return figure


def sizes_figure(runs: list[RunFacts], width: float = 7.6) -> Figure:
    """Returns accuracy over the backbone's parameters, each run a point with its 95 % interval; ``width`` in inches."""
    figure = Figure(figsize=(width, 4.4), layout="constrained")
    axis = figure.subplots()
    groups = list(dict.fromkeys(run.group for run in runs))
    for run in runs:
        style = look(groups.index(run.group), linestyle="", capsize=3, elinewidth=1.2, markersize=8)
        point(axis, run.parameters / 1e6, run.result["top1"], run.result["top1_interval"], **style)
    for number, group in enumerate(groups):
        some = [run for run in runs if run.group == group]
        place = np.mean([run.parameters / 1e6 for run in some]), max(run.result["top1"] for run in some)
        text = {"fontsize": 9, "color": look(number)["color"], "parse_math": False}
        axis.annotate(shortened(group, 30), place, (9, 5), textcoords="offset points", **text)
    counts = [run.parameters / 1e6 for run in runs]
    if max(counts) > 5 * min(counts):
        ticks = sorted({float(f"{count:.2g}") for count in counts})
        log_axis(axis, ticks, [f"{tick:g}" for tick in ticks])
    axis.margins(x=0.18, y=0.12)
    axis.set(xlabel="parameters of the backbone (millions)", ylabel=TOP1)
    plain_axis(axis)
    return figure


def cloud_figure(cloud: Cloud, stacked: bool = False) -> Figure:
    """Returns a panel for each layout of the same images, a colour and a marker for each class, and its name where half
    of its images are left and half right of it, half below and half above, or with a line from there to its name."""
    shown = sorted(set(cloud.labels.tolist()))
    rows, columns = (len(cloud.places), 1) if stacked else (1, len(cloud.places))
    figure = Figure(figsize=(4.8, 9.6) if stacked else (9.6, 5.0))
    edges = {"top": 0.96, "bottom": 0.14, "hspace": 0.08} if stacked else {"top": 0.92, "bottom": 0.14, "wspace": 0.04}
    figure.subplots_adjust(left=0.02, right=0.98, **edges)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    names = [shortened(cloud.classes[label], 24) for label in shown]
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "boxstyle": "round,pad=0.15"}
    for axis, (title, places) in zip(axes, cloud.places.items(), strict=True):
        for number, label in enumerate(shown):
            style = _point(number)
            inside = cloud.labels == label
            dots = {"s": POINT, "color": style["color"], "marker": style["marker"], "alpha": 0.85}
            axis.scatter(*places[inside].T, edgecolors="0.4", linewidths=0.3, **dots)
        text = {"ha": "center", "va": "center", "fontsize": 8.5, "weight": "bold", "bbox": ground, "parse_math": False}
        text |= {"textcoords": "offset points", "arrowprops": {"arrowstyle": "-", "color": "0.4", "linewidth": 0.8}}
        middles = [np.median(places[cloud.labels == label], axis=0) for label in shown]
        for name, middle in zip(names, middles, strict=True):
            axis.annotate(shortened(name, 14), middle, (0, 0), **text)
        axis.set_title(title, fontsize=10.5, loc="left")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_color("0.7")
        axis.margins(0.04)
    arrange(figure)  # else where names lie is not known yet
    for axis in figure.axes:
        _apart(axis.texts)
    key = [Line2D([], [], markersize=6, markeredgewidth=0, **_point(n)) for n in range(len(shown))]
    across = 2 if stacked and max(map(len, names)) > 8 else 5
    names_legend(figure, key, names, ncols=across, loc="lower center", handletextpad=0.2)
    return figure


def _apart(names: list[Annotation]) -> None:
    """Moves names up that would cover one below them."""
    taken: list[Bbox] = []
    for name in sorted(names, key=lambda one: one.xy[1]):
        box = start = Text.get_window_extent(name)  # pixels, without the line
        for other in sorted(taken, key=lambda one: one.y0):
            if box.overlaps(other):
                box = box.translated(0, other.y1 - box.y0 + 1)
        taken.append(box)
        name.set_position((0, (box.y0 - start.y0) * 72 / name.figure.dpi))


def _point(number: int) -> dict:
    """The colour and marker of the n-th class: ten, as there are classes at most."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "linestyle": ""}


def reliability_figure(found: Calibration) -> Figure:
    """Returns accuracy over confidence, with 95 % intervals, and below it how many images each bin has."""
    figure = Figure(figsize=(5.6, 5.4), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    top.plot([0, 100], [0, 100], color="0.6", linewidth=1, linestyle=":")
    where = {"textcoords": "offset points", "rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
    top.annotate("as right as it says", (4, 4), (0, 4), fontsize=8, color="0.4", **where)
    for one in found.bins:
        _bin(top, bottom, one)
    key = [Line2D([], [], linestyle="", markersize=7, label=label, **style) for label, style in SURENESS.items()]
    figure.legend(handles=key, ncols=2, loc="outside upper left", frameon=False, fontsize=8.5)
    top.set(xlim=(0, 100), ylim=(0, 100), ylabel="accuracy (%)")
    bottom.set(xlabel="confidence: probability of the predicted class (%)", ylabel="images")
    bottom.margins(y=0.3)
    for axis in (top, bottom):
        plain_axis(axis)
    return figure


def _bin(top, bottom, one: Bin) -> None:
    """Draws a bin's accuracy, how far that is from its confidence, and its images."""
    x, y = 100 * one.confidence, 100 * one.accuracy
    style = SURENESS["too sure" if one.confidence > one.accuracy else "not sure enough"]
    top.plot([x, x], [x, y], color=style["color"], linewidth=6, alpha=0.25, solid_capstyle="butt")
    interval = [100 * bound for bound in one.interval]
    point(top, x, y, interval, markersize=7, capsize=3, elinewidth=1.2, clip_on=False, zorder=4, **style)
    left, width = 100 * one.low, 100 * (one.high - one.low)
    look = {"color": COLOURS[0], "alpha": 0.35, "edgecolor": COLOURS[0], "linewidth": 0.8}
    bottom.bar(left, one.images, width=width, align="edge", **look)
    middle = (left + width / 2, one.images)
    bottom.annotate(f"{one.images}", middle, (0, 2), textcoords="offset points", ha="center", fontsize=7)
