"""Charts of accuracies: bars over seeds, curves over labels, parameters or epochs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from idmm.figures import COLOURS, look, plain_axis, save, shortened


class Point(NamedTuple):
    """An accuracy at a number."""

    x: float
    mean: float  # percent
    std: float = 0.0


Curves = Mapping[str, Sequence[Point]]  # label -> points


def comparison(
    scores: Mapping[str, Sequence[float]],
    path: Path,
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
    for x, (label, values) in enumerate(scores.items()):
        colour = "0.4" if label in grey else COLOURS[x]
        _bar(axis, x, values, colour)
    axis.set_xticks(range(len(scores)), list(scores))
    axis.set(xlim=(-0.6, len(scores) - 0.4), ylabel="top-1 accuracy on the test images (%)")
    _accuracy_axis(axis, title, largest_class)
    note = "one seed"
    if max(map(len, scores.values())) > 1:
        note = "bars: mean ± 1 standard deviation over seeds, dots: one seed each"
    figure.supxlabel(note, fontsize=8, color="0.4")
    save(figure, path)


def _bar(axis: Axes, x: float, values: Sequence[float], colour: str) -> None:
    """Draw the bar and the dots of a label."""
    mean = float(np.mean(values))
    spread = 0.0
    text = f"{mean:.1f}"
    if len(values) > 1:
        spread = float(np.std(values, ddof=1))
        text = f"{mean:.1f} ± {spread:.1f}"
    axis.bar(
        x,
        mean,
        yerr=spread,
        width=0.62,
        color=colour,
        alpha=0.35,
        edgecolor=colour,
        error_kw={"ecolor": "black", "capsize": 4},
    )
    axis.plot(
        [x - 0.18] * len(values),
        values,
        "o",
        color=colour,
        markeredgecolor="white",
        clip_on=False,
    )
    axis.annotate(
        text,
        (x, 0),
        (0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=11,
        weight="bold",
    )


def accuracy_curves(
    panels: Mapping[str, Curves],
    path: Path,
    labels: tuple[str, str],
    ticks: Mapping[float, str] | None = None,
    largest_class: float | None = None,
    note: str | None = None,
) -> None:
    """Draw accuracy over a number, with bars of one standard deviation.

    Args:
        panels: Title -> curves.
        path: PNG to write.
        labels: Names of the number and of the accuracy.
        ticks: Texts at numbers of a logarithmic axis. None: the axis is linear.
        largest_class: Accuracy of always predicting the largest class (percent), a dotted line.
        note: Above the legend.
    """
    numbers: dict[str, int] = {}  # of the curves' styles
    figure = Figure(figsize=(3.4 + 3.6 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    handles = {}
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        _draw_curves(axis, curves, numbers, spread=ticks is not None)
        axis.set(xlabel=labels[0])
        if ticks:
            axis.set(xscale="log", xlim=(min(ticks) / 1.2, max(ticks) * 1.2))
            axis.set_xticks(list(ticks), list(ticks.values()))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.tick_params("x", labelsize=8)
            if max(map(len, ticks.values())) > 5:
                axis.tick_params("x", rotation=30)
        else:
            axis.xaxis.get_major_locator().set_params(integer=True)
        _accuracy_axis(axis, title, largest_class)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    axes[0].set(ylabel=labels[1])
    figure.legend(
        handles.values(),
        handles.keys(),
        fontsize=9,
        title=note,
        title_fontsize=8,
        loc="outside right upper",
        frameon=False,
        alignment="left",
    )
    save(figure, path)


def _draw_curves(axis: Axes, curves: Curves, numbers: dict[str, int], spread: bool) -> None:
    """Draw the curves of a panel, and add the ``numbers`` of new ones.

    ``spread``: They are apart, so that their bars do not hide each other.
    """
    for place, (label, points) in enumerate(curves.items()):
        x, mean, std = np.array(sorted(points), dtype=float).T
        if spread:
            x = x * 1.02 ** (place - (len(curves) - 1) / 2)
        axis.errorbar(
            x,
            mean,
            std,
            label=shortened(label),
            linewidth=1.8,
            markeredgecolor="white",
            markersize=7,
            elinewidth=1,
            capsize=2,
            **look(numbers.setdefault(label, len(numbers))),
        )


class Network(NamedTuple):
    """A trained network."""

    data: str  # its panel
    start: str  # its curve: a method, weights or scratch
    name: str
    params: int  # without the classifier
    top1: float  # percent
    std: float = 0.0


def over_parameters(networks: list[Network], path: Path) -> bool:
    """Draw accuracy over parameters (IDMM, Figure 3), if there are several sizes.

    Returns:
        Whether there are.
    """
    ticks = {}
    panels: defaultdict[str, defaultdict[str, list[Point]]]
    panels = defaultdict(lambda: defaultdict(list))
    for network in networks:
        size = network.params / 1e6
        ticks[size] = f"{network.name}\n{size:.3g} M"
        panels[network.data][network.start].append(Point(size, network.top1, network.std))
    if len(ticks) < 2:
        return False
    labels = ("parameters without the classifier", "top-1 accuracy (%)")
    accuracy_curves(panels, path, labels, ticks)
    return True


def _accuracy_axis(axis: Axes, title: str, largest_class: float | None) -> None:
    """Add the title and the line of the largest class."""
    axis.set_title(title, fontsize=11)
    plain_axis(axis)
    if largest_class is None:
        return
    axis.set(ylim=(0, 100))
    axis.axhline(largest_class, color="0.4", linewidth=1, linestyle=":")
    axis.annotate(
        "largest class",
        (1, largest_class),
        (-2, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=8,
        ha="right",
    )
