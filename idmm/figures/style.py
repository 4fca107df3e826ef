"""The style of all pictures, and the curves of runs.

There is no pyplot, so that no window opens and a user's own figures and settings stay as they are. Nothing is told by
colour alone: colours are Okabe and Ito's, which colour-blind readers tell apart, the last two Paul Tol's (wine,
indigo); line styles and markers tell the same in grey print.
"""

import math
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, NullLocator

from idmm.files import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442", "#882255", "#332288")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LOOKS = [(COLOURS[n % 7], STYLES[n % 4], MARKERS[n % 7]) for n in range(28)]  # no two alike; yellow lines are faint
DPI = 150
BOOKKEEPING = ("epoch", "stage", "step", "seconds", "images_per_s")  # of a record, not drawn
TOLD, SCORES = "training images told from all others (%)", "accuracy on images not trained on (%)"
OVERLAP = "AP and IoU on images not trained on (%)"
PERCENTS = tuple(title.partition(" (")[0] for title in (TOLD, SCORES, OVERLAP))  # their titles begin so
PANELS = {  # title -> what of a record is drawn there, by label; None: no legend
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
    TOLD: {"instance_accuracy": None},
    "spread (0: all alike, 1: even)": {"feature_std": "features", "embedding_std": "what the loss compares"},
    "directions that the features use": {"feature_rank": None},
    "scale of the cosine classifier": {"scale": None},
    "localization": {"drloc": "loss"},
}

Records = list[dict]  # of metrics.jsonl, an epoch each


def look(number: int, **changes) -> dict:
    """Returns matplotlib's keywords for the colour, line style and marker of the n-th curve."""
    return dict(zip(("color", "linestyle", "marker"), LOOKS[number % len(LOOKS)], strict=True)) | changes


def plain_axis(axis, grid: str = "y") -> None:
    """Takes away what carries no information."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)


def log_axis(axis, places: Iterable[float], labels: Iterable[str], **text) -> None:
    """Makes the axis across logarithmic, with ticks and labels at these places alone."""
    axis.set_xscale("log")
    axis.set_xticks(list(places), list(labels), **text)
    axis.xaxis.set_minor_locator(NullLocator())


def shortened(name: str, most: int = 40) -> str:
    """Keeps the end of each line, where names differ."""
    return "\n".join(line if len(line) <= most else f"…{line[1 - most :]}" for line in name.split("\n"))


def save(figure: Figure, path: str | Path, dpi: float = DPI) -> None:
    """Writes a PNG, or a JPEG where the path ends in .jpg, whole or not at all."""
    _plain_letters(figure)
    with replacing(Path(path)) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # from the font
        kind = "jpg" if Path(path).suffix == ".jpg" else "png"
        figure.savefig(file, format=kind, dpi=dpi, facecolor="white")


def _plain_letters(figure: Figure) -> None:
    """Draws names of files and classes as they are: a formula that is none and bytes that are no letters, which become
    question marks, would stop matplotlib."""
    for text in figure.findobj(Text):
        said = text.get_text()
        if not said.isascii():
            text.set_text(said.encode("utf-8", "replace").decode())
        if is_math_text(said) and r"\mathdefault" not in said:  # which matplotlib writes numbers with
            text.set_parse_math(False)


# ---------------------------------------------------------------------- the curves of runs
def curves_figure(runs: dict[str, list[Records]], title: str = "") -> Figure:
    """Returns a panel each of what runs logged: loss, learning rate, accuracies, the monitor's values.

    Args:
        runs: Label -> records of each seed or fold, stages one after the other; values that few epochs have are joined
            by lines. Of one run, values that belong together share a panel; of several, every value has a panel of its
            own, and every label a colour. Of several seeds or folds each is a thin line and the mean, as far as all
            have come, a thick one.
        title: Above the panels.
    """
    alone = len(runs) == 1 and len(next(iter(runs.values()))) == 1
    panels = _panels([record for seeds in runs.values() for records in seeds for record in records])
    if not alone:  # a panel for each value
        panels = {
            f"{title.partition(' (')[0]}: {label}" if label else title: {key: None}
            for title, values in panels.items()
            for key, label in values.items()
        }
    across = 2 if len(panels) == 4 else min(3, len(panels))
    rows = math.ceil(len(panels) / across)
    keys = round(across * 1.4)  # names of runs in a line
    head = 0.45 + (0.0 if alone else 0.24 * math.ceil(len(runs) / keys))
    width, height, gap = 3.7 * across, 2.65 * rows + head, 0.66  # inches
    figure = Figure(figsize=(width, height))
    # by hand: matplotlib's own layouts take as long as all the rest
    figure.subplots_adjust(
        left=0.62 / width, right=1 - 0.42 / width, bottom=0.5 / height, top=1 - (head + 0.4) / height,
        wspace=0.3, hspace=gap / 1.8,
    )  # fmt: skip
    figure.text(0.2 / width, 1 - 0.24 / height, title, fontsize=11, weight="bold", va="center", parse_math=False)
    for number, (name, values) in enumerate(panels.items()):
        axis = figure.add_subplot(rows, across, number + 1)
        if alone:
            _values(axis, next(iter(runs.values()))[0], values)
        else:
            for place, seeds in enumerate(runs.values()):
                _seeds(axis, seeds, next(iter(values)), place)
        _finish(axis, name, percent=name.startswith(PERCENTS))
        axis.set_xlabel("epoch", fontsize=8)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], nbins=6))
    if not alone:
        lines = [Line2D([], [], linewidth=1.8, markersize=4, **look(place)) for place in range(len(runs))]
        means = [f" (mean of {len(seeds)})" if len(seeds) > 1 else "" for seeds in runs.values()]
        labels = [f"{shortened(name, 32)}{mean}".strip() for name, mean in zip(runs, means, strict=True)]
        labels = [f" {label}" if label.startswith("_") else label for label in labels]  # matplotlib hides the others
        where = {"loc": "upper left", "bbox_to_anchor": (0.12 / width, 1 - 0.4 / height), "ncols": keys}
        figure.legend(lines, labels, fontsize=8.5, frameon=False, handlelength=2.6, **where)
    return figure


def _panels(records: Records) -> dict[str, dict[str, str | None]]:
    """What there is of PANELS, and a panel for each value that belongs to none of them."""
    known = list(dict.fromkeys(key for record in records for key in record if key not in BOOKKEEPING))
    panels = {
        title: present for title, values in PANELS.items()
        if (present := {key: label for key, label in values.items() if key in known})
    }  # fmt: skip
    placed = {key for values in panels.values() for key in values}
    return panels | {key: {key: None} for key in known if key not in placed}


def _points(records: Records, key: str) -> np.ndarray:
    """What there is of a value, [points, 2]: epochs from 1 on, and the value."""
    points = [(epoch, record[key]) for epoch, record in enumerate(records, start=1) if key in record]
    return np.array(points, dtype=float).reshape(-1, 2)


def _values(axis, records: Records, values: dict[str, str | None]) -> None:
    """Draws a run's values of a panel, each with its label, if any."""
    for place, (key, label) in enumerate(values.items()):
        _curve(axis, _points(records, key), len(records), label, place, named=key != "lr")
    stages = [record.get("stage", 1) for record in records]
    for epoch in range(1, len(stages)):
        if stages[epoch] != stages[epoch - 1]:
            axis.axvline(epoch + 0.5, color="0.6", linewidth=0.8, linestyle=":")
    if any(values.values()):
        axis.legend(frameon=False, fontsize=7.5, handlelength=2.2)


def _seeds(axis, seeds: list[Records], key: str, place: int) -> None:
    """Draws a thin line for each seed and their mean, or the one that there is."""
    points = [found for records in seeds if len(found := _points(records, key))]
    if len(points) > 1:
        for found in points:
            axis.plot(*found.T, **look(place, linestyle="-", marker="", linewidth=0.7, alpha=0.45))
        shortest = min(map(len, points))
        points = [np.mean([found[:shortest] for found in points], axis=0)]
    for found in points:
        _curve(axis, found, max(map(len, seeds)), None, place, named=False)


def _curve(axis, points: np.ndarray, epochs: int, label: str | None, place: int, named: bool) -> None:
    """Draws a curve, with markers where few epochs have a value, and its last value where it is ``named``."""
    x, y = points.T
    marker = {} if len(points) < epochs or len(points) == 1 else {"marker": ""}
    axis.plot(x, y, label=label, linewidth=1.7, markersize=4, **look(place, **marker))
    if not named:  # the learning rate ends at zero
        return
    axis.annotate(
        f"{y[-1]:.3g}", (x[-1], y[-1]), (4, 0), textcoords="offset points", fontsize=8, va="center",
        color=look(place)["color"], annotation_clip=False,
    )  # fmt: skip


def _finish(axis, title: str, percent: bool) -> None:
    axis.set_title(title, fontsize=9.5, loc="left")
    axis.tick_params(labelsize=8)
    axis.margins(x=0.02, y=0.1)
    if percent:
        axis.set_ylim(0, 102)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    plain_axis(axis)
