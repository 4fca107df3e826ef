"""The style of all figures, and the curves of runs.

pyplot is not used, so that no window opens and a user's own figures and settings stay as they are.
Colours are Okabe and Ito's, which colour-blind readers can tell apart, the last two Paul Tol's.
Line styles and markers distinguish the same curves in grey print.
"""

import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from idmm.files import Json, replacing

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#F0E442",
    "#882255",
    "#332288",
)
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DPI = 150
NOT_DRAWN = ("epoch", "stage", "step", "seconds", "images_per_s")  # keys of a record
INSTANCES = "correct instances among training images (%)"
SCORES = "accuracy on images not trained on (%)"
OVERLAP = "AP and IoU on images not trained on (%)"
PANELS: dict[str, dict[str, str | None]] = {  # title -> key of a record -> label. None: no legend
    "loss, mean over the epoch": {"loss": None},
    "learning rate": {"lr": None},
    SCORES: {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean over classes", "knn": "kNN"},
    OVERLAP: {
        "ap": "AP",
        "ap50": "AP50",
        "ap75": "AP75",
        "mask_ap": "AP of masks",
        "miou": "mean IoU",
        "macc": "mean class accuracy",
        "pixel_accuracy": "pixel accuracy",
    },
    "parts of the loss": {
        "rpn_objectness": "proposals",
        "rpn_box": "their boxes",
        "classifier": "classes",
        "box": "boxes",
        "mask": "masks",
    },
    INSTANCES: {"instance_accuracy": None},
    "spread (0: all the same, 1: even)": {
        "feature_std": "features",
        "embedding_std": "input of the loss",
    },
    "directions that the features use": {"feature_rank": None},
    "scale of the cosine classifier": {"scale": None},
    "localization": {"drloc": "loss"},
}

Records = Sequence[Json]  # of metrics.jsonl, one per epoch


# ---------------------------------------------------------------------- style
def look(number: int, **changes: Any) -> dict[str, Any]:
    """Return matplotlib's keywords for the colour, line style and marker of the n-th curve."""
    return {
        "color": COLOURS[number % 7],
        "linestyle": STYLES[number % 4],
        "marker": MARKERS[number % 7],
    } | changes


def plain_axis(axis: Axes) -> None:
    """Remove the parts of an axis without information."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)


def drawable(name: str) -> str:
    """Return a name with question marks for bytes that Python could not decode as UTF-8.

    matplotlib fails on them. Names on an axis must be drawable from the start, as an axis sets its
    texts late.
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def shortened(name: str, most: int = 40) -> str:
    """Return a drawable name of at most ``most`` letters per line, without the beginning of longer
    lines, as names differ at their end."""
    lines = drawable(name).split("\n")
    return "\n".join(f"…{line[1 - most :]}" if len(line) > most else line for line in lines)


def save(figure: Figure, path: str | Path) -> None:
    """Write a PNG atomically. Names of files and classes are no formulas."""
    for text in figure.findobj(Text):
        content = text.get_text()
        if not content.isascii():
            text.set_text(drawable(content))
        # matplotlib writes numbers with that
        if is_math_text(content) and r"\mathdefault" not in content:
            text.set_parse_math(False)
    with replacing(Path(path)) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # from the font
        figure.savefig(file, format="png", dpi=DPI, facecolor="white")


# ---------------------------------------------------------------------- the curves of a run
def curves_figure(records: Records, title: str = "") -> Figure:
    """Return a figure with a panel for each value of a run: loss, learning rate, accuracies.

    Args:
        records: With stages one after the other.
        title: Above the panels.
    """
    keys: list[str] = []
    for record in records:
        for key, value in record.items():
            if value is not None and key not in (*NOT_DRAWN, *keys):
                keys.append(key)
    panels = {}
    others = dict.fromkeys(keys)  # each has a panel of its own
    for name, labels in PANELS.items():
        drawn = {key: label for key, label in labels.items() if key in keys}
        if drawn:
            panels[name] = drawn
        for key in drawn:
            del others[key]
    panels |= {key: {key: None} for key in others}
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    # inches
    width = 3.7 * columns
    height = 2.65 * rows + 0.45
    figure = Figure(figsize=(width, height))
    # matplotlib's own layouts take as long as all the rest
    figure.subplots_adjust(
        left=0.62 / width,
        bottom=0.5 / height,
        right=1 - 0.42 / width,
        top=1 - 0.85 / height,
        wspace=0.3,
        hspace=0.66 / 1.8,
    )
    figure.text(
        0.2 / width,
        1 - 0.24 / height,
        title,
        fontsize=11,
        weight="bold",
        va="center",
        parse_math=False,
    )
    for number, (name, labels) in enumerate(panels.items(), start=1):
        _draw_panel(figure.add_subplot(rows, columns, number), records, name, labels)
    return figure


def _draw_panel(axis: Axes, records: Records, title: str, labels: dict[str, str | None]) -> None:
    """Draw a run's values of a panel over epochs (from 1), with a dotted line between stages."""
    for number, (key, label) in enumerate(labels.items()):
        epochs = []
        values = []
        for epoch, record in enumerate(records, start=1):
            if record.get(key) is not None:
                epochs.append(epoch)
                values.append(record[key])
        style = look(number)
        if len(records) == len(epochs) > 1:  # a marker shows which epochs have a value
            style["marker"] = ""
        axis.plot(epochs, values, label=label, linewidth=1.7, markersize=4, **style)
        if key != "lr":
            axis.annotate(
                f"{values[-1]:.3g}",
                (epochs[-1], values[-1]),
                (4, 0),
                color=style["color"],
                textcoords="offset points",
                fontsize=8,
                va="center",
                annotation_clip=False,
            )
    stages = [record.get("stage", 1) for record in records]
    for epoch, (before, after) in enumerate(pairwise(stages), start=1):
        if before != after:
            axis.axvline(epoch + 0.5, color="0.6", linewidth=0.8, linestyle=":")
    if any(labels.values()):
        axis.legend(frameon=False, fontsize=7.5, handlelength=2.2)
    axis.set_title(title, fontsize=9.5, loc="left")
    axis.tick_params(labelsize=8)
    axis.margins(x=0.02, y=0.1)
    if title in (INSTANCES, SCORES, OVERLAP):
        axis.set_ylim(0, 102)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    plain_axis(axis)
    axis.set_xlabel("epoch", fontsize=8)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], nbins=6))
