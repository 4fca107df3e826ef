"""The confusion matrix of a classifier, as a picture."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from idmm.evaluation import Floats, Integers
from idmm.evaluation.evaluate import Predictions
from idmm.figures import COLOURS, shortened

NAMED_CLASSES = 24  # most classes of a confusion matrix with names and numbers
CELL = 0.34  # side (inches)
LETTER = 0.062  # width (inches)
CORRECT = LinearSegmentedColormap.from_list("", ["white", COLOURS[0]])
WRONG = LinearSegmentedColormap.from_list("", ["white", COLOURS[1]])


def confusion_figure(predictions: Predictions, classes: Sequence[str]) -> Figure:
    """Return the confusion matrix: a row for each true class, coloured by the share of its images.

    Correct predictions are blue, others orange. With more than :data:`NAMED_CLASSES` classes there
    are no names.

    Args:
        predictions: Of the test images.
        classes: Names of the classes.
    """
    names = [shortened(" ".join(name.split()), 30) for name in classes]
    counts = predictions.confusion(len(classes))  # [K, K]
    images = counts.sum(axis=1)
    shares = counts / np.maximum(1, images[:, None])
    are_named = len(classes) <= NAMED_CLASSES
    if are_named:
        rows = [f"{name} ({count:,})" for name, count in zip(names, images, strict=True)]
        side = 0.9 + max(6, len(classes)) * CELL + max(map(len, rows)) * LETTER
        shades = shares
        order = ""
    else:
        side = 6.4
        shades = np.sqrt(shares)  # small cells would be too pale
        order = f", 1 to {len(classes)} as in per_class.csv"
    figure = Figure(figsize=(side, side + 0.2), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=f"predicted class{order}", ylabel=f"true class{order}", xticks=[], yticks=[])
    axis.spines[:].set_color("0.7")
    diagonal = np.eye(len(classes), dtype=bool)[..., None]
    axis.imshow(np.where(diagonal, CORRECT(shades), WRONG(shades)), interpolation="nearest")
    if are_named:
        _name_cells(axis, names, rows, counts, shares)
    count = counts.sum()
    correct = counts.trace()
    figure.suptitle(
        f"{correct:,} of {count:,} test images correct ({100 * correct / count:.1f} %)", fontsize=11
    )
    figure.supxlabel("shade: share of the row's test images", fontsize=8, color="0.4")
    return figure


def _name_cells(
    axis: Axes,
    columns: list[str],
    rows: list[str],
    counts: Integers,
    shares: Floats,
) -> None:
    """Add the names of columns and rows, lines between them, and the counts [K, K]."""
    rotation = 90 if max(map(len, columns)) * LETTER > CELL else 0
    numbers = range(len(columns))
    axis.set_xticks(numbers, columns, rotation=rotation, fontsize=8, parse_math=False)
    axis.set_yticks(numbers, rows, fontsize=8, parse_math=False)
    axis.tick_params(length=0)
    for edge in np.arange(len(columns) + 1) - 0.5:
        axis.axhline(edge, color="0.9", linewidth=0.6)
        axis.axvline(edge, color="0.9", linewidth=0.6)
    for row, column in np.argwhere(counts):
        colour = "white" if shares[row, column] > 0.6 else "0.15"
        axis.text(
            column, row, counts[row, column], ha="center", va="center", fontsize=7, color=colour
        )
