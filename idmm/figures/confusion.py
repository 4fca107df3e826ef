"""The picture of what a classifier takes for what: every cell of a few classes; of many, the whole."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from idmm.figures.style import COLOURS, shortened

LABELLED = 24  # classes up to which every one has its name, and every cell its number
CELL, LETTER = 0.34, 0.062  # inches
PLACES = 400  # rows and columns that the whole is drawn in, at most
RIGHT, WRONG = (LinearSegmentedColormap.from_list("", ("white", colour)) for colour in COLOURS[:2])


def confusion_figure(found, classes: Sequence[str]) -> Figure:
    """Returns the confusion matrix: a row for each true class, coloured by the share of its images.

    What is right is blue, what is wrong orange. Of more than :data:`LABELLED` classes the matrix has no names.

    Args:
        found: :class:`idmm.evaluation.evaluate.Predictions`.
        classes: Their names.
    """
    names = [shortened(" ".join(name.split()), 30) for name in classes]
    truth, predicted = found.truth, found.predicted
    right = int((truth == predicted).sum())
    title = f"{right:,} of {len(truth):,} test images right ({100 * right / len(truth):.1f} %)"
    if len(classes) > LABELLED:
        figure = Figure(figsize=(6.6, 6.2), layout="constrained")
        axis, order = figure.subplots(), f", 1 to {len(classes)} as in per_class.csv"
        axis.set(xticks=[], yticks=[])
    else:
        images = [f"{name} ({count:,})" for name, count in zip(names, found.per_class()[0], strict=True)]
        side = 0.9 + max(6, len(classes)) * CELL + max(map(len, images)) * LETTER
        figure = Figure(figsize=(side, side + 0.2), layout="constrained")
        axis, order = figure.subplots(), ""
        _names(axis, names, images)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("shade: share of the row's test images", fontsize=8, color="0.4")
    _matrix(axis, truth, predicted, len(classes))
    axis.set(xlabel=f"predicted class{order}", ylabel=f"true class{order or ' (test images)'}")
    return figure


def _matrix(axis, truth: np.ndarray, predicted: np.ndarray, classes: int) -> None:
    """Draws the cells, of many classes in blocks of some."""
    places = min(classes, PLACES)
    counts = np.zeros((places, places), dtype=np.int64)
    np.add.at(counts, (truth * places // classes, predicted * places // classes), 1)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    diagonal = np.eye(places, dtype=bool)
    shown = shares if classes <= LABELLED else np.sqrt(shares)  # small cells would be too pale to see
    axis.imshow(np.where(diagonal[..., None], RIGHT(shown), WRONG(shown)), interpolation="nearest")
    if classes <= LABELLED:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.6 else "0.15"
            axis.text(column, row, counts[row, column], ha="center", va="center", fontsize=7, color=colour)
    axis.spines[:].set_color("0.7")
    axis.tick_params(length=0)


def _names(axis, names: list[str], rows: list[str]) -> None:
    """Writes the names of columns below and of rows beside them, and thin lines between the cells."""
    text = {"fontsize": 8, "parse_math": False}
    axis.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) * LETTER > CELL else 0, **text)
    axis.set_yticks(range(len(names)), rows, **text)
    edges = np.arange(len(names) + 1) - 0.5
    axis.set_xticks(edges, minor=True)
    axis.set_yticks(edges, minor=True)
    axis.grid(which="minor", color="0.9", linewidth=0.6)
    axis.tick_params(which="minor", length=0)
