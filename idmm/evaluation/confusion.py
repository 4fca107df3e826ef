"""The confusion matrix of a classifier, as a picture."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from idmm.evaluation.evaluate import Predictions
from idmm.figures import COLOURS, shortened

NAMED_CLASSES = 24  # most classes of a confusion matrix with names and numbers
# of a confusion matrix (inches)
CELL = 0.34
LETTER = 0.062
CORRECT, WRONG = (
    LinearSegmentedColormap.from_list("", ["white", colour]) for colour in COLOURS[:2]
)


def confusion_figure(predictions: Predictions, classes: Sequence[str]) -> Figure:
    """Return the confusion matrix: a row for each true class, coloured by the share of its images.

    Correct predictions are blue, others orange. With more than :data:`NAMED_CLASSES` classes there
    are no names.

    Args:
        predictions: Of the test images.
        classes: Names of the classes.
    """
    names = [shortened(" ".join(name.split()), 30) for name in classes]
    are_named = len(classes) <= NAMED_CLASSES
    counts = predictions.confusion(len(classes))
    rows = [f"{name} ({images:,})" for name, images in zip(names, counts.sum(axis=1), strict=True)]
    if are_named:
        side = 0.9 + max(6, len(classes)) * CELL + max(map(len, rows)) * LETTER
    else:
        side = 6.4
    figure = Figure(figsize=(side, side + 0.2), layout="constrained")
    axis = figure.subplots()
    if are_named:
        order = ""
    else:
        order = f", 1 to {len(classes)} as in per_class.csv"
    axis.set(xlabel=f"predicted class{order}", ylabel=f"true class{order}", xticks=[], yticks=[])
    axis.spines[:].set_color("0.7")
    count = counts.sum()
    correct = counts.trace()
    figure.suptitle(
        f"{correct:,} of {count:,} test images correct ({100 * correct / count:.1f} %)", fontsize=11
    )
    figure.supxlabel("shade: share of the row's test images", fontsize=8, color="0.4")
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    # small cells would be too pale
    if are_named:
        shades = shares
    else:
        shades = np.sqrt(shares)
    diagonal = np.eye(len(classes), dtype=bool)[..., None]
    axis.imshow(np.where(diagonal, CORRECT(shades), WRONG(shades)), interpolation="nearest")
    if are_named:
        text = {"fontsize": 8, "parse_math": False}
        axis.set_xticks(
            range(len(names)),
            names,
            rotation=90 if max(map(len, names)) * LETTER > CELL else 0,
            **text,
        )
        axis.set_yticks(range(len(names)), rows, **text)
        axis.tick_params(length=0)
        for edge in np.arange(len(names) + 1) - 0.5:
            axis.axhline(edge, color="0.9", linewidth=0.6)
            axis.axvline(edge, color="0.9", linewidth=0.6)
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.6 else "0.15"
            axis.text(
                column, row, counts[row, column], ha="center", va="center", fontsize=7, color=colour
            )
    return figure
