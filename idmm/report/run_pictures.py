"""Figures of finished runs: accuracies, features in a plane, calibration."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from idmm.pictures import COLOURS, MARKERS, look, names_legend, plain_axis, point, shortened
from idmm.report.pictures import TOP1
from idmm.report.stats import Calibration

SURENESS = {"too sure": {"color": COLOURS[1], "marker": "s"}, "not sure enough": {"color": COLOURS[0], "marker": "o"}}
FLOORS = {  # beside an accuracy, by their names in result.json
    "pixel_knn": ("kNN of raw pixels", {"marker": "D", "color": "0.4", "markerfacecolor": "white"}),
    "largest_class": ("largest class every time", {"marker": "|", "color": "0.4"}),
}


def scores_figure(runs: list) -> Figure:
    """Returns a line for each classifier (RunFacts): top-1 with its 95 % interval, and what it has to beat."""
    names, groups = [shortened(run.label, 34) for run in runs], list(dict.fromkeys(run.group for run in runs))
    height = 1.35 + 0.42 * len(runs)
    left = (0.35 + 0.082 * max(map(len, names))) / 7.6
    figure = Figure(figsize=(7.6, height))
    figure.subplots_adjust(left=left, right=0.96, bottom=0.62 / height, top=1 - 0.45 / height)
    axis = figure.subplots()
    for place, run in enumerate(runs):
        top1, style = run.result["top1"], look(groups.index(run.group), linestyle="")
        axis.plot(run.result["top1_interval"], [place, place], color=style["color"], linewidth=5, alpha=0.35)
        axis.plot(top1, place, markersize=8, zorder=4, **style)
        axis.annotate(f"{top1:.1f}", (top1, place), (0, 7), textcoords="offset points", ha="center", fontsize=8.5)
        for name, (_, floor) in FLOORS.items():
            if (value := run.result.get(name)) is not None:
                axis.plot(value, place, markersize=7, markeredgewidth=2, zorder=3, **floor)
    axis.set_yticks(range(len(runs)), names, fontsize=9, parse_math=False)
    axis.set(xlim=(0, 100), ylim=(len(runs) - 0.5, -0.6), xlabel=TOP1)
    axis.tick_params(axis="y", length=0)
    colour = COLOURS[0] if len(groups) == 1 else "0.6"
    key = [Line2D([], [], color=colour, marker="o", linewidth=5, alpha=0.8, label="top-1, 95 % interval")]
    for name, (label, floor) in FLOORS.items():
        if any(run.result.get(name) is not None for run in runs):
            key.append(Line2D([], [], linestyle="", markeredgewidth=2, label=label, **floor))
    figure.legend(handles=key, ncols=3, fontsize=8.5, frameon=False, loc="upper left", bbox_to_anchor=(left - 0.02, 1))
    plain_axis(axis, "x")
    axis.spines["left"].set_visible(False)
    return figure


def features_figure(places: dict[str, np.ndarray], labels: np.ndarray, classes: list[str]) -> Figure:
    """Returns a panel for each layout of the same images (title -> [M, 2]), with a colour and marker for each class of
    ``labels`` [M]; ten classes at most."""
    present = np.unique(labels)
    figure = Figure(figsize=(9.6, 5.0))
    figure.subplots_adjust(left=0.02, right=0.98, top=0.92, bottom=0.14, wspace=0.04)
    styles = [{"color": COLOURS[n % 10], "marker": MARKERS[n % len(MARKERS)]} for n in range(len(present))]
    for axis, (title, points) in zip(figure.subplots(1, len(places), squeeze=False)[0], places.items(), strict=True):
        for label, style in zip(present, styles, strict=True):
            axis.scatter(*points[labels == label].T, s=14, alpha=0.85, edgecolors="0.4", linewidths=0.3, **style)
        axis.set_title(title, fontsize=10.5, loc="left")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_color("0.7")
    key = [Line2D([], [], markersize=6, markeredgewidth=0, linestyle="", **style) for style in styles]
    names = [shortened(classes[label], 24) for label in present]
    names_legend(figure, key, names, ncols=5, loc="lower center", handletextpad=0.2)
    return figure


def calibration_figure(measured: Calibration) -> Figure:
    """Returns accuracy over confidence, with 95 % intervals, and below it how many images each bin has."""
    figure = Figure(figsize=(5.6, 5.4), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    top.plot([0, 100], [0, 100], color="0.6", linewidth=1, linestyle=":")
    for one in measured.bins:
        x, y = 100 * one.confidence, 100 * one.accuracy
        style = SURENESS["too sure" if one.confidence > one.accuracy else "not sure enough"]
        top.plot([x, x], [x, y], color=style["color"], linewidth=6, alpha=0.25, solid_capstyle="butt")
        interval = [100 * bound for bound in one.interval]
        point(top, x, y, interval, markersize=7, capsize=3, elinewidth=1.2, clip_on=False, zorder=4, **style)
        bar = bottom.bar(100 * one.low, one.images, 100 * (one.high - one.low), align="edge", color="#99c7e0")
        bottom.bar_label(bar, fontsize=7)
    key = [Line2D([], [], linestyle="", markersize=7, label=label, **style) for label, style in SURENESS.items()]
    figure.legend(handles=key, ncols=2, loc="outside upper left", frameon=False, fontsize=8.5)
    top.set(xlim=(0, 100), ylim=(0, 100), ylabel="accuracy (%)")
    bottom.set(xlabel="confidence: probability of the predicted class (%)", ylabel="images")
    bottom.margins(y=0.3)
    for axis in (top, bottom):
        plain_axis(axis)
    return figure
