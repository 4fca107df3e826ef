"""Pictures of several runs: a comparison over seeds, accuracy over labels."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from idmm.figures.style import STYLES, log_axis, look, plain_axis, save, shortened

TOP1 = "top-1 accuracy on the test images (%)"


# ---------------------------------------------------------------------- accuracies
def comparison(
    scores: dict[str, Sequence[float]], path: str | Path, title: str, one_class: float, untaught: Sequence[str] = ()
) -> None:
    """Draws a bar for each label's mean with its standard deviation, and a dot for each seed.

    Args:
        scores: Label -> a score for each seed, in percent.
        path: PNG to write.
        title: Above the picture.
        one_class: What naming the largest class every time would reach (percent), a dotted line.
        untaught: Labels of what no network learned, drawn in grey.
    """
    figure = Figure(figsize=(1.6 + 1.5 * len(scores), 4.2), layout="constrained")
    axis = figure.subplots()
    table = [np.asarray(values, dtype=float) for values in scores.values()]
    for place, (label, values) in enumerate(zip(scores, table, strict=True)):
        style = look(place, **({"color": "0.4"} if label in untaught else {}))
        colour, mean = style["color"], values.mean()
        spread = values.std(ddof=1) if len(values) > 1 else 0.0
        axis.bar(place, mean, width=0.62, color=colour, alpha=0.35, edgecolor=colour, linewidth=1.2)
        axis.errorbar(place, mean, spread, color="black", capsize=4, linewidth=1.2, marker="_", zorder=4)
        dots = {**style, "linestyle": "", "markeredgecolor": "white", "markersize": 7, "zorder": 3, "clip_on": False}
        axis.plot(np.full(len(values), place - 0.18), values, **dots)
        text = f"{mean:.1f} ± {spread:.1f}" if len(values) > 1 else f"{mean:.1f}"
        axis.annotate(text, (place, 0), (0, 6), textcoords="offset points", ha="center", fontsize=11, weight="bold")
    axis.set_xticks(range(len(scores)), list(scores))
    axis.set(xlim=(-0.6, len(scores) - 0.4), ylim=(0, 100), ylabel=TOP1)
    _accuracy_axis(axis, title, one_class)
    key = [Patch(color="0.8", label="mean"), Line2D([], [], label="one seed", **look(6, linestyle="", marker="o"))]
    if any(len(values) > 1 for values in table):
        lines = {"color": "black", "linestyle": "", "marker": "|", "markersize": 12}
        key.append(Line2D([], [], label="± 1 standard deviation over seeds", **lines))
    figure.legend(handles=key, ncols=len(key), loc="outside lower center", fontsize=8, frameon=False)
    save(figure, path)


def label_curves(
    panels: dict[str, dict[str, list[tuple[float, float, float]]]], path: str | Path, *, one_class: float,
    ylabel: str = TOP1, seeds: int = 1, untaught: Sequence[str] = (),
) -> None:  # fmt: skip
    """Draws accuracy over the labelled images per class, with bars of one standard deviation over draws.

    Args:
        panels: Title -> label -> points (images a class, mean, standard deviation), in percent.
        path: PNG to write.
        one_class: What naming the largest class every time would reach (percent), a dotted line.
        ylabel: Of the accuracies.
        seeds: Draws that the mean is of.
        untaught: Labels of networks with fresh weights, drawn in grey.
    """
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    taught = [label for label in labels if label not in untaught]
    looks = {label: look(n) for n, label in enumerate(taught)}
    grey = {"color": "0.45", "marker": "*"}
    looks |= {label: {**grey, "linestyle": STYLES[3 - n % 4]} for n, label in enumerate(untaught)}
    figure = Figure(figsize=(3.4 + 3.6 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for place, (label, points) in enumerate(curves.items()):
            x, mean, std = np.array(points, dtype=float).T
            x = x * 1.02 ** (place - (len(curves) - 1) / 2)  # so that bars of several curves do not hide each other
            line = {"linewidth": 1.8, "markeredgecolor": "white", "markersize": 7, **looks[label]}
            axis.plot(x, mean, label=shortened(label), **line)
            axis.errorbar(x, mean, std, fmt="none", ecolor=line["color"], elinewidth=1, capsize=2)
        ticks = sorted({x for points in curves.values() for x, _, _ in points})
        log_axis(axis, ticks, [f"{x:g}" for x in ticks])
        axis.set(xlim=(ticks[0] / 1.2, ticks[-1] * 1.2), xlabel="labelled images a class")
        _accuracy_axis(axis, title, one_class)
    axes[0].set(ylim=(0, 100), ylabel=ylabel)
    bars = f"mean, bars: ± 1 standard\ndeviation over {seeds} draws" if seeds > 1 else None
    lines = {line.get_label(): line for axis in axes for line in axis.lines if not line.get_label().startswith("_")}
    where = {"loc": "outside right upper", "frameon": False, "alignment": "left"}
    figure.legend(lines.values(), lines, fontsize=9, title=bars, title_fontsize=8, **where)
    save(figure, path)


def _accuracy_axis(axis, title: str, one_class: float) -> None:
    """The title, and the line of the largest class."""
    axis.set_title(title, fontsize=11)
    axis.axhline(one_class, color="0.4", linewidth=1, linestyle=":")
    where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axis.annotate("largest class", (1, one_class), (-2, 3), fontsize=8, ha="right", **where)
    plain_axis(axis)
