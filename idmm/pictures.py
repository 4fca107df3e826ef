"""The style of all pictures, and the curves of one run, of its folds and of a probe.

There is no pyplot, so that no window opens and a user's own figures and settings stay as they are. Nothing is told by
colour alone: colours are Okabe and Ito's, which colour-blind readers tell apart, and line styles and markers tell the
same in grey print.
"""

import math
import warnings
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from idmm.files import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LOOKS = [(COLOURS[n % 7], STYLES[n % 4], MARKERS[n % 7]) for n in range(28)]  # no two alike
DPI = 150
BOOKKEEPING = ("epoch", "stage", "step", "seconds", "images_per_s")  # of a record, not drawn
TOLD, SCORES = "training images told from all others (%)", "accuracy on images not trained on (%)"
PERCENTS = (TOLD, SCORES)
PANELS = {  # title -> what of a record is drawn there, by label; None: no legend
    "loss, mean over the epoch": {"loss": None},
    "learning rate": {"lr": None},
    SCORES: {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean over classes", "knn": "kNN"},
    TOLD: {"instance_accuracy": None},
    "spread (0: all alike, 1: even)": {"feature_std": "features", "embedding_std": "what the loss compares"},
    "directions that the features use": {"feature_rank": None},
    "scale of the cosine classifier": {"scale": None},
    "localization": {"drloc": "loss", "drloc_weight": "its weight"},
}
COLUMNS = (3, 4)

Records = list[dict]  # of metrics.jsonl, an epoch each


def look(number: int, **changes) -> dict:
    """Returns matplotlib's keywords for the colour, line style and marker of the n-th curve."""
    return dict(zip(("color", "linestyle", "marker"), LOOKS[number % len(LOOKS)], strict=True)) | changes


def plain_axis(axis, grid: str = "y") -> None:
    """Takes away what carries no information."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)


def shortened(name: str, most: int = 40) -> str:
    """Keeps the end of each line, where names differ."""
    return "\n".join(line if len(line) <= most else f"…{line[1 - most :]}" for line in name.split("\n"))


def save(figure: Figure, path: str | Path) -> None:
    """Writes a PNG, whole or not at all."""
    with replacing(Path(path)) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a label in letters that the font lacks
        figure.savefig(file, format="png", dpi=DPI, facecolor="white")


def epochs_axis(axis) -> None:
    """Labels an axis over epochs, with whole numbers."""
    axis.set_xlabel("epoch")
    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], nbins=6))


def stage_ends(axis, records: Records) -> None:
    """Draws a line between the epochs of one stage and the next."""
    stages = [record.get("stage", 1) for record in records]
    for epoch in (i for i in range(1, len(stages)) if stages[i] != stages[i - 1]):
        axis.axvline(epoch + 0.5, color="0.6", linewidth=0.8, linestyle=":")


# ---------------------------------------------------------------------- the curves of a run
def run_curves(records: Records, path: str | Path, title: str = "") -> None:
    """Draws a panel each of what a run logged, over its epochs: loss, learning rate, accuracies, the monitor's values.

    Args:
        records: Of ``metrics.jsonl``, stages one after the other; values that few epochs have are joined by lines.
        path: PNG to write.
        title: Above the panels.
    """
    fold_curves([records], path, title)


def fold_curves(folds: list[Records], path: str | Path, title: str = "") -> None:
    """Draws the same of several runs that differ by their images alone, a thin line each."""
    panels = _panels([record for records in folds for record in records])
    columns = min(len(panels), min(COLUMNS, key=lambda n: -len(panels) % n))  # with which the fewest places stay empty
    rows = math.ceil(len(panels) / columns)
    width, height, head, gap = 3.7 * columns, 2.65 * rows + 0.45, 0.45, 0.66  # inches
    figure = Figure(figsize=(width, height))
    # by hand: matplotlib's own layouts take as long as all the rest
    figure.subplots_adjust(
        left=0.62 / width, right=1 - 0.42 / width, bottom=0.5 / height, top=1 - (head + 0.4) / height,
        wspace=0.3, hspace=gap / 1.8,
    )  # fmt: skip
    figure.text(0.2 / width, 1 - 0.24 / height, title, fontsize=11, weight="bold", va="center")
    for number, (name, values) in enumerate(panels.items()):
        axis = figure.add_subplot(rows, columns, number + 1)
        for place, (key, label) in enumerate(values.items()):
            for records in folds:
                _curve(axis, records, key, label if records is folds[0] else None, place, len(folds) == 1)
        _finish(axis, name, percent=name in PERCENTS)
        stage_ends(axis, folds[0])
        if any(values.values()):
            axis.legend(frameon=False, fontsize=7.5, handlelength=2.2)
    save(figure, path)


def probe_curves(probes: list[dict], path: str | Path, title: str = "") -> None:
    """Draws how a probe chose its strength, and what both readouts score on the test images.

    Args:
        probes: The ``readouts`` of a result of :func:`idmm.probe`, or those of several folds.
        path: PNG to write.
        title: Above the panels.
    """
    figure = Figure(figsize=(7.4, 3.2))
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.16, top=0.76, wspace=0.22)
    figure.text(0.025, 0.93, title, fontsize=11, weight="bold", va="center")
    chosen, scores = figure.subplots(1, 2)
    for found in (readouts["probe"] for readouts in probes):
        strengths, accuracies = np.array([(float(c), value) for c, value in found["accuracies"].items()]).T
        chosen.semilogx(strengths, accuracies, linewidth=1.7 if len(probes) == 1 else 0.9, **look(0, marker=""))
        best = accuracies[np.isclose(strengths, found["strength"])]
        chosen.plot([found["strength"]], best, markersize=6, **look(0, linestyle=""))
    for place, (name, label) in enumerate({"knn": "kNN", "probe": "linear probe"}.items()):
        for number, readouts in enumerate(probes):
            score, x = readouts[name], place + 0.5 * ((number + 0.5) / len(probes) - 0.5)
            below, above = (abs(bound - score["top1"]) for bound in score["top1_interval"])
            scores.errorbar(x, score["top1"], [[below], [above]], capsize=3, **look(place, linestyle=""))
        scores.text(place, 0, label, fontsize=8, ha="center", va="bottom")
    _finish(chosen, "accuracy on images held out of training (%)", percent=True, epochs=False)
    chosen.set_xticks(strengths, [f"{c:g}" for c in strengths], minor=False)
    chosen.minorticks_off()
    chosen.set_xlabel("C of the linear probe (dot: the one chosen)", fontsize=8)
    _finish(scores, "top-1 on test images (%), 95 % interval", percent=True, epochs=False)
    scores.set(xticks=[], xlim=(-0.6, 1.6))
    save(figure, path)


def _panels(records: Records) -> dict[str, dict[str, str | None]]:
    """What there is of PANELS, and a panel for each value that belongs to none of them."""
    known = list(dict.fromkeys(key for record in records for key in record if key not in BOOKKEEPING))
    panels = {
        title: present for title, values in PANELS.items()
        if (present := {key: label for key, label in values.items() if key in known})
    }  # fmt: skip
    placed = {key for values in panels.values() for key in values}
    return panels | {key: {key: None} for key in known if key not in placed}


def _curve(axis, records: Records, key: str, label: str | None, place: int, alone: bool) -> None:
    points = [(epoch, record[key]) for epoch, record in enumerate(records, start=1) if key in record]
    if not points:
        return
    x, y = np.array(points, dtype=float).T
    marker = {} if len(points) < len(records) or len(points) == 1 else {"marker": ""}
    axis.plot(x, y, label=label, linewidth=1.7 if alone else 0.9, markersize=4, **look(place, **marker))
    if key == "lr" or not alone:  # it ends at zero; the ends of several would lie on each other
        return
    axis.annotate(
        f"{y[-1]:.3g}", (x[-1], y[-1]), (4, 0), textcoords="offset points", fontsize=8, va="center",
        color=look(place)["color"], annotation_clip=False,
    )  # fmt: skip


def _finish(axis, title: str, percent: bool, epochs: bool = True) -> None:
    axis.set_title(title, fontsize=9.5, loc="left")
    axis.tick_params(labelsize=8)
    axis.margins(x=0.02, y=0.1)
    if percent:
        axis.set_ylim(0, 102)
    if epochs:
        epochs_axis(axis)
        axis.xaxis.label.set_size(8)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    plain_axis(axis)
