"""The style of all figures, and the curves of runs.

pyplot is not used, so that no window opens and a user's own figures and settings stay as they are.
Colours are Okabe and Ito's, which colour-blind readers can tell apart, the last two Paul Tol's.
Line styles and markers distinguish the same curves in grey print.
"""

import math
import warnings
from pathlib import Path

from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from idmm.files import replacing

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
PANELS = {  # title -> key of a record -> label. None: no legend
    "loss, mean over the epoch": {"loss": None},
    "learning rate": {"lr": None},
    SCORES: {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean over classes", "knn": "kNN"},
    OVERLAP: dict(ap="AP", ap50="AP50", ap75="AP75", mask_ap="AP of masks", miou="mean IoU")
    | dict(macc="mean class accuracy", pixel_accuracy="pixel accuracy"),
    "parts of the loss": dict(
        rpn_objectness="proposals", rpn_box="their boxes", classifier="classes"
    )
    | dict(box="boxes", mask="masks"),
    INSTANCES: {"instance_accuracy": None},
    "spread (0: all the same, 1: even)": {
        "feature_std": "features",
        "embedding_std": "input of the loss",
    },
    "directions that the features use": {"feature_rank": None},
    "scale of the cosine classifier": {"scale": None},
    "localization": {"drloc": "loss"},
}

Records = list[dict]  # of metrics.jsonl, one per epoch


# ---------------------------------------------------------------------- style
def look(number: int, **changes) -> dict:
    """Return matplotlib's keywords for the colour, line style and marker of the n-th curve."""
    return {
        "color": COLOURS[number % 7],
        "linestyle": STYLES[number % 4],
        "marker": MARKERS[number % 7],
    } | changes


def plain_axis(axis) -> None:
    """Remove the parts of an axis without information."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)


def drawable(name: str) -> str:
    """Return a name whose bytes Python could not decode as UTF-8. Other bytes become question
    marks.

    matplotlib fails on them. Names on an axis must be drawable from the start, as an axis sets its
    texts late.
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def shortened(name: str, most: int = 40) -> str:
    """Return a drawable name of at most ``most`` letters per line. The end of each is kept, in
    which names differ."""
    return "\n".join(
        line if len(line) <= most else f"…{line[1 - most :]}" for line in drawable(name).split("\n")
    )


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
    """Return a figure with a panel for each value in a run's records: loss, learning rate,
    accuracies, the monitor's.

    Args:
        records: With stages one after the other.
        title: Above the panels.
    """
    records = [
        {key: value for key, value in record.items() if value is not None} for record in records
    ]
    keys = list(dict.fromkeys(key for record in records for key in record if key not in NOT_DRAWN))
    panels = {}
    for name, values in PANELS.items():
        if drawn := {key: label for key, label in values.items() if key in keys}:
            panels[name] = drawn
    placed = {key for values in panels.values() for key in values}
    panels |= {key: {key: None} for key in keys if key not in placed}
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    # inches
    width = 3.7 * columns
    height = 2.65 * rows + 0.45
    figure = Figure(figsize=(width, height))
    # matplotlib's own layouts take as long as all the rest
    figure.subplots_adjust(
        0.62 / width,
        0.5 / height,
        1 - 0.42 / width,
        1 - 0.85 / height,
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
    for number, (name, values) in enumerate(panels.items(), start=1):
        _draw_panel(figure.add_subplot(rows, columns, number), records, name, values)
    return figure


def _draw_panel(axis, records: Records, title: str, values: dict[str, str | None]) -> None:
    """Draw a run's values of a panel over epochs (from 1), with a dotted line between stages."""
    for place, (key, label) in enumerate(values.items()):
        x, y = zip(
            *((epoch, record[key]) for epoch, record in enumerate(records, 1) if key in record),
            strict=True,
        )
        # only some epochs
        if len(x) < len(records) or len(x) == 1:
            style = look(place)
        else:
            style = look(place, marker="")
        axis.plot(x, y, label=label, linewidth=1.7, markersize=4, **style)
        if key != "lr":
            text = {
                "textcoords": "offset points",
                "fontsize": 8,
                "va": "center",
                "annotation_clip": False,
            }
            axis.annotate(f"{y[-1]:.3g}", (x[-1], y[-1]), (4, 0), color=style["color"], **text)
    stages = [record.get("stage", 1) for record in records]
    for epoch in range(1, len(stages)):
        if stages[epoch] != stages[epoch - 1]:
            axis.axvline(epoch + 0.5, color="0.6", linewidth=0.8, linestyle=":")
    if any(values.values()):
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
