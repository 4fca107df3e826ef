"""The wrong answers of a classifier, as a table and as a sheet of thumbnails."""

from collections import defaultdict
from pathlib import Path

from idmm.data.image_store import ImageStore
from idmm.data.split import counted
from idmm.evaluation.evaluate import Predictions
from idmm.figures import shortened
from idmm.files import write_csv
from idmm.progress import drawing
from idmm.report.sheets import caption_sheet, thumbnail

PAIRS, IMAGES = 12, 8  # pairs of classes on the sheet, and images of each at most
LETTERS = 20  # of a class's name


def write_mistakes(folder: Path, predictions: Predictions, test: ImageStore, classes: list[str]) -> None:
    """Write ``mistakes.csv``, the most confident first, and ``mistakes.png`` if there are mistakes.

    Args:
        folder: Of the run.
        predictions: For the test images.
        test: The test images.
        classes: Their names.
    """
    wrong = (predictions.predicted != predictions.truth).nonzero()[0]
    order = wrong[(-predictions.probability[wrong]).argsort(kind="stable")].tolist()
    rows = [("path", "class", "answer", "confidence")]
    by_pair = defaultdict(list)
    for i in order:
        pair = classes[predictions.truth[i]], classes[predictions.predicted[i]]
        by_pair[pair].append(i)
        rows.append((test.names[i], *pair, f"{predictions.probability[i]:.6g}"))
    write_csv(folder / "mistakes.csv", rows)
    if not order:
        return
    with drawing("mistakes.png"):
        sheet = []
        drawn = 0
        for (label, answer), images in sorted(by_pair.items(), key=lambda item: -len(item[1]))[:PAIRS]:
            text = f"{shortened(label, LETTERS)}\nanswer: {shortened(answer, LETTERS)}\n{counted(len(images), 'image')}"
            chosen = images[:IMAGES]
            captions = [f"{test.names[i]}\n{predictions.probability[i]:.2f}" for i in chosen]
            sheet.append((text, [thumbnail(test.picture(i), of) for i, of in zip(chosen, captions, strict=True)]))
            drawn += len(chosen)
        title = f"{drawn} of {counted(len(order), 'wrong answer')} on {len(test)} test images"
        note = "A row has a class and the answer instead of it. The most confident come first, with their confidence"
        caption_sheet(sheet, folder / "mistakes.png", title, note)
