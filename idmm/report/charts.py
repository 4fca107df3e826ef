"""Charts of accuracies: bars over seeds, curves over the number of labels, of parameters or of
epochs."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from idmm.figures import COLOURS, look, plain_axis, save, shortened

Points = list[tuple[float, float, float]]  # a number, mean, standard deviation (percent)


def comparison(
    scores: dict[str, Sequence[float]],
    path: str | Path,
    title: str,
    largest_class: float,
    grey: Sequence[str] = (),
) -> None:
    """Draw a bar for each label's mean with its standard deviation, and a dot for each seed.

    Args:
        scores: Label -> a score for each seed, in percent.
        path: PNG to write.
        title: Above the picture.
        largest_class: Accuracy of always predicting the largest class (percent), a dotted line.
        grey: Labels that are drawn in grey.
    """
    figure = Figure(figsize=(1.6 + 1.5 * len(scores), 4.2), layout="constrained")
    axis = figure.subplots()
    seeds = max(map(len, scores.values()))
    for place, (label, values) in enumerate(scores.items()):
        colour = "0.4" if label in grey else COLOURS[place]
        mean = float(np.mean(values))
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        line = {"ecolor": "black", "capsize": 4}
        axis.bar(
            place,
            mean,
            yerr=spread,
            width=0.62,
            color=colour,
            alpha=0.35,
            edgecolor=colour,
            error_kw=line,
        )
        axis.plot(
            [place - 0.18] * len(values),
            values,
            "o",
            color=colour,
            markeredgecolor="white",
            clip_on=False,
        )
        if len(values) > 1:
            text = f"{mean:.1f} ± {spread:.1f}"
        else:
            text = f"{mean:.1f}"
        axis.annotate(
            text,
            (place, 0),
            (0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=11,
            weight="bold",
        )
    axis.set_xticks(range(len(scores)), list(scores))
    axis.set(xlim=(-0.6, len(scores) - 0.4), ylabel="top-1 accuracy on the test images (%)")
    _accuracy_axis(axis, title, largest_class)
    if seeds > 1:
        note = "bars: mean ± 1 standard deviation over seeds, dots: one seed each"
    else:
        note = "one seed"
    figure.supxlabel(note, fontsize=8, color="0.4")
    save(figure, path)


def accuracy_curves(
    panels: dict[str, dict[str, Points]],
    path: Path,
    labels: tuple[str, str],
    ticks: dict[float, str] | None = None,
    largest_class: float | None = None,
    note: str | None = None,
) -> None:
    """Draw accuracy over a number, with bars of one standard deviation.

    Args:
        panels: Title -> label -> points.
        path: PNG to write.
        labels: Names of the number and of the accuracy.
        ticks: Texts at numbers of a logarithmic axis. None: the axis is linear.
        largest_class: Accuracy of always predicting the largest class (percent), a dotted line.
        note: Above the legend.
    """
    names = dict.fromkeys(label for curves in panels.values() for label in curves)
    styles = {label: look(n) for n, label in enumerate(names)}
    figure = Figure(figsize=(3.4 + 3.6 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for place, (label, points) in enumerate(curves.items()):
            x, mean, std = np.array(sorted(points), dtype=float).T
            if ticks:
                # so that the bars of curves do not hide each other
                x = x * 1.02 ** (place - (len(curves) - 1) / 2)
            style = {
                "linewidth": 1.8,
                "markeredgecolor": "white",
                "markersize": 7,
                "elinewidth": 1,
                "capsize": 2,
            }
            axis.errorbar(x, mean, std, label=shortened(label), **style, **styles[label])
        axis.set(xlabel=labels[0])
        axis.xaxis.get_major_locator().set_params(integer=True)
        if ticks:
            axis.set(xscale="log", xlim=(min(ticks) / 1.2, max(ticks) * 1.2))
            axis.set_xticks(list(ticks), ticks.values())
            axis.xaxis.set_minor_locator(NullLocator())
            axis.tick_params(
                "x", rotation=30 * any(len(text) > 5 for text in ticks.values()), labelsize=8
            )
        _accuracy_axis(axis, title, largest_class)
    axes[0].set(ylabel=labels[1])
    legend = {
        text: line
        for axis in axes
        for line, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    place = {"loc": "outside right upper", "frameon": False, "alignment": "left"}
    figure.legend(legend.values(), legend.keys(), fontsize=9, title=note, title_fontsize=8, **place)
    save(figure, path)


class Network(NamedTuple):
    """A trained network."""

    data: str  # its panel
    start: str  # its curve: a method, weights or scratch
    name: str
    params: int  # without the classifier
    top1: float  # percent
    std: float = 0.0


def over_parameters(networks: list[Network], path: Path) -> bool:
    """Draw accuracy over parameters (IDMM, Figure 3) if there are several sizes, and return whether
    there are."""
    ticks = {}
    panels = defaultdict(lambda: defaultdict(list))
    for network in networks:
        size = network.params / 1e6
        ticks[size] = f"{network.name}\n{size:.3g} M"
        panels[network.data][network.start].append((size, network.top1, network.std))
    if len(ticks) > 1:
        accuracy_curves(
            panels, path, ("parameters without the classifier", "top-1 accuracy (%)"), ticks
        )
    return len(ticks) > 1


def _accuracy_axis(axis, title: str, largest_class: float | None) -> None:
    """Add the title and the line of the largest class."""
    axis.set_title(title, fontsize=11)
    plain_axis(axis)
    if largest_class is None:
        return
    axis.set(ylim=(0, 100))
    axis.axhline(largest_class, color="0.4", linewidth=1, linestyle=":")
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axis.annotate("largest class", (1, largest_class), (-2, 3), fontsize=8, ha="right", **place)
