"""The wrong answers of a classifier, as a table and as a sheet of thumbnails."""

from collections import defaultdict
from pathlib import Path

from idmm.data.image_store import ImageStore
from idmm.evaluation.evaluate import Predictions
from idmm.files import write_csv
from idmm.progress import drawing
from idmm.report.sheets import COLUMNS, LARGE, caption_sheet, in_rows, thumbnail
from idmm.text import counted

DRAWN = 7 * COLUMNS  # images on the sheet at most. A row per pair of classes at most


def write_mistakes(
    folder: Path, predictions: Predictions, test: ImageStore, classes: list[str]
) -> None:
    """Write ``mistakes.csv``, the most confident first, and ``mistakes.png`` if there are mistakes.

    Args:
        folder: Of the run.
        predictions: For the test images.
        test: The test images.
        classes: Their names.
    """
    wrong = (predictions.predicted != predictions.truth).nonzero()[0]
    order = wrong[(-predictions.probability[wrong]).argsort(kind="stable")]
    rows = [("path", "class", "answer", "confidence")]
    by_pair = defaultdict(list)
    for i in order.tolist():
        pair = classes[predictions.truth[i]], classes[predictions.predicted[i]]
        row = (test.names[i], *pair, f"{predictions.probability[i]:.6g}")
        rows.append(row)
        by_pair[pair].append((i, row))
    write_csv(folder / "mistakes.csv", rows)
    if not by_pair:
        return
    tiles = []
    with drawing("mistakes.png"):
        for images in sorted(by_pair.values(), key=len, reverse=True):
            for i, (name, label, answer, confidence) in images[:COLUMNS]:
                caption = f"{label}\nanswer: {answer}, {float(confidence):.2f}\n{name}"
                if len(tiles) < DRAWN:
                    tiles.append(thumbnail(test.picture(i), caption))
        title = f"{len(tiles)} of {counted(len(order), 'wrong answer')} on {len(test)} test images"
        note = "The most frequent pair of class and answer comes first, in each the most confident answer"
        caption_sheet(in_rows(tiles), folder / "mistakes.png", title, note, LARGE)
