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
NOTE = "The most frequent pair of class and answer comes first, in each the most confident answer"


def write_mistakes(
    folder: Path,
    predictions: Predictions,
    test: ImageStore,
    classes: list[str],
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
    rows: list[tuple[str, str, str, str]] = []
    by_pair: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in order.tolist():
        label = classes[predictions.truth[i]]
        answer = classes[predictions.predicted[i]]
        by_pair[label, answer].append(len(rows))
        rows.append((test.names[i], label, answer, f"{predictions.probability[i]:.6g}"))
    write_csv(folder / "mistakes.csv", [("path", "class", "answer", "confidence"), *rows])
    if not by_pair:
        return
    with drawing("mistakes.png"):
        drawn: list[int] = []  # numbers of rows
        for numbers in sorted(by_pair.values(), key=len, reverse=True):
            drawn += numbers[:COLUMNS]
        tiles = []
        for number in drawn[:DRAWN]:
            name, label, answer, confidence = rows[number]
            caption = f"{label}\nanswer: {answer}, {float(confidence):.2f}\n{name}"
            tiles.append(thumbnail(test.picture(order[number]), caption))
        title = f"{len(tiles)} of {counted(len(order), 'wrong answer')} on {len(test)} test images"
        caption_sheet(in_rows(tiles), folder / "mistakes.png", title, NOTE, LARGE)
