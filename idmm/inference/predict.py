"""``idmm predict``: the classes of images, with probabilities."""

import functools
import os

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

COLUMNS = ("path", "rank", "class", "probability")


def predict(config: PredictConfig) -> str | None:
    """Write a row for each image and rank to ``config.out`` and return a summary, or write CSV to
    standard output.

    The accuracy is logged of images in folders named like the run's classes. For a run of boxes or
    masks see :func:`idmm.inference.predict_dense.predict_dense`. It needs a folder ``out``.

    Raises:
        UserError: No run with a classifier, no readable images, or ``out`` cannot be written.
        RunError: Memory ran out, or the disk is full.
    """
    if task := saved_info(config.init, "model").get("task"):
        if config.out is None:
            raise UserError(f"out: missing. For a run of idmm {task} name a folder, new or empty")
        libraries = functools.partial(needed, config.init, DENSE_LIBRARIES[task], "dense")
        out, images = inputs(config, "model", None, libraries)
        # torch takes seconds, a mistake is reported at once
        from idmm.inference.predict_dense import predict_dense

        return predict_dense(config, out, images)
    out, images = inputs(config, "model", (".csv",))
    from idmm.evaluation.predictor import BATCH, load_classifier

    classifier = load_classifier(
        config.init, device=config.device, batch_size=config.batch_size or BATCH, field="init"
    )
    predictions = classifier.predict(images, config.top_k, on_error="skip")
    report_unreadable(predictions.unreadable, len(images))
    _log_accuracy(predictions, config)
    rows = [COLUMNS]
    for prediction in predictions:
        for rank, (label, probability) in enumerate(prediction.top, start=1):
            rows.append((prediction.path, rank, label, f"{probability:.6g}"))
    if out is None:
        print_bytes(csv_bytes(rows))
        return None
    write_bytes(out, csv_bytes(rows))
    return f"{out}: {counted(len(predictions), 'image')}"


def _log_accuracy(predictions, config: PredictConfig) -> None:
    """Log top-1, with its interval, of the images whose folders are named like classes, from
    ``config.paths`` on.

    Warns of images that the run was trained on.
    """
    from idmm.evaluation.evaluate import score

    numbers = {name: number for number, name in enumerate(predictions.classes)}
    roots = [os.path.abspath(expand_home(path)) for path in config.paths]
    roots = {root if os.path.isdir(root) else os.path.dirname(root) for root in roots}
    folders = []  # of each image, the innermost first
    for path in map(os.path.abspath, predictions.paths):
        names = []
        while path not in roots and path != os.path.dirname(path):
            path = os.path.dirname(path)
            names.append(class_of(os.path.basename(path)))
        folders.append(names)
    truth = np.array(
        [next((numbers[name] for name in names if name in numbers), -1) for names in folders]
    )
    labelled = np.flatnonzero(truth >= 0)
    if not len(labelled):
        return
    scores = score(predictions.probabilities[labelled].argmax(axis=1), truth[labelled])
    low, high = scores["top1_interval"]
    if len(labelled) == len(predictions):
        share = ""
    else:
        share = f"{len(labelled)} of "
    line = "accuracy: top-1 %.2f %%, 95 %% interval %.2f to %.2f, on %s%s in folders named like classes"
    log.info(line, scores["top1"], low, high, share, counted(len(predictions), "image"))
    seen = seen_in_training(config.init, [predictions.paths[number] for number in labelled])
    if seen:
        log.warning(
            "accuracy: the run was trained on %d of these, so new images have a lower one", seen
        )
