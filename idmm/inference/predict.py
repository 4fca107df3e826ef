"""``idmm predict``: the classes of images, with probabilities."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from idmm.config.commands import PredictConfig
from idmm.config.dense import DENSE_LIBRARIES
from idmm.data.fingerprint import seen_in_training
from idmm.data.split import class_of
from idmm.errors import UserError, needed
from idmm.evaluation.inputs import inputs, print_bytes, report_unreadable
from idmm.files import csv_bytes, expand_home, saved_info, write_bytes
from idmm.progress import log
from idmm.text import counted

if TYPE_CHECKING:
    from idmm.evaluation.predictor import PredictionList

COLUMNS = ("path", "rank", "class", "probability")


def predict(config: PredictConfig) -> str | None:
    """Write a row for each image and rank, and return a summary if ``config.out`` is a file.

    Without it the rows go to standard output, as CSV. The accuracy is logged of images in folders
    named like the run's classes. For a run of boxes or masks see
    :func:`idmm.inference.predict_dense.predict_dense`. It needs a folder ``out``.

    Raises:
        UserError: No run with a classifier, no readable images, or ``out`` cannot be written.
        RunError: Memory ran out, or the disk is full.
    """
    if task := saved_info(config.init, "model").get("task"):
        if config.out is None:
            hint = f"For a run of idmm {task} name a folder, new or empty"
            raise UserError.of("out", "missing", hint)
        libraries = DENSE_LIBRARIES[task]
        _, images = inputs(config, "model", None, lambda: needed(config.init, libraries, "dense"))
        # torch takes seconds, a mistake is reported at once
        from idmm.inference.predict_dense import predict_dense

        return predict_dense(config, Path(config.out), images)
    _, images = inputs(config, "model", (".csv",))
    from idmm.evaluation.predictor import BATCH, PredictionList, load_classifier

    classifier = load_classifier(
        config.init,
        device=config.device,
        batch_size=config.batch_size or BATCH,
        precision=config.precision,
        field="init",
    )
    predictions = classifier.predict(images, config.top_k, on_error="skip")
    assert isinstance(predictions, PredictionList)  # images is a list
    report_unreadable(predictions.unreadable, len(images))
    _log_accuracy(predictions, config)
    rows: list[tuple[object, ...]] = [COLUMNS]
    for prediction in predictions:
        for rank, (label, probability) in enumerate(prediction.top, start=1):
            rows.append((prediction.path, rank, label, f"{probability:.6g}"))
    data = csv_bytes(rows)
    if config.out is None:
        print_bytes(data)
        return None
    write_bytes(Path(config.out), data)
    return f"{config.out}: {counted(len(predictions), 'image')}"


def _log_accuracy(predictions: "PredictionList", config: PredictConfig) -> None:
    """Log top-1, with its interval, of the images whose folders are named like classes.

    The folders are those from ``config.paths`` on. Warns of images that the run was trained on.
    """
    from idmm.evaluation.evaluate import score

    roots = set()
    for path in config.paths:
        root = Path(os.path.abspath(expand_home(path)))
        roots.add(root if root.is_dir() else root.parent)
    numbers = {name: number for number, name in enumerate(predictions.classes)}
    paths = list(map(str, predictions.paths))
    truth = np.array([_class_of_folders(path, roots, numbers) for path in paths])
    labelled = np.flatnonzero(truth >= 0)
    if not len(labelled):
        return
    scores = score(predictions.probabilities[labelled].argmax(axis=1), truth[labelled])
    images = counted(len(paths), "image")
    if len(labelled) < len(paths):
        images = f"{len(labelled)} of {images}"
    low, high = scores["top1_interval"]
    log.info(
        f"accuracy: top-1 {scores['top1']:.2f} %, 95 % interval {low:.2f} to {high:.2f}, "
        f"on {images} in folders named like classes"
    )
    seen = seen_in_training(config.init, [paths[number] for number in labelled])
    if seen:
        log.warning(
            f"accuracy: the run was trained on {seen} of these, so new images have a lower one"
        )


def _class_of_folders(path: str, roots: set[Path], numbers: dict[str, int]) -> int:
    """Return the number of the innermost folder's class, up to one of ``roots``, or -1."""
    for folder in Path(os.path.abspath(path)).parents:
        name = class_of(folder.name)
        if name in numbers:
            return numbers[name]
        if folder in roots:
            break
    return -1
