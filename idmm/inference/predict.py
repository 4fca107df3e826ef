"""``idmm predict``: the classes of images, with probabilities."""

import numpy as np

from idmm.config.usage import PredictConfig
from idmm.data.folder import FoundImage
from idmm.data.split import counted
from idmm.errors import UserError
from idmm.evaluation.inputs import inputs, network_options, print_bytes, say_unreadable
from idmm.files import csv_bytes, saved_info, write_bytes
from idmm.progress import log

COLUMNS = ("path", "rank", "class", "probability")


def predict(given: PredictConfig) -> str | None:
    """Writes a row for each image and rank to ``given.out``, and returns a line on it, or CSV to standard output.

    Of a run for boxes or masks see :func:`idmm.inference.predict_dense.predict_dense`.

    Where images lie in folders named like the run's classes, their accuracy is logged.

    Raises:
        UserError: A key of boxes was given, no run with a classifier, no images, none that can be read, or ``out``
            cannot be written.
        RunError: The network has diverged, memory ran out, or the disk is full.
    """
    if saved_info(given.init, "model").get("task"):
        from idmm.inference.predict_dense import predict_dense

        return predict_dense(given)
    out, images = inputs(given, "model", (".csv",), lambda: _check(given))
    from idmm.evaluation.predictor import load_classifier  # torch takes seconds, a mistake is told at once

    classifier = load_classifier(given.init, **network_options(given))
    paths = [image.path for image in images]
    found = classifier.predict(paths, given.top_k, on_error="skip", progress=True)
    say_unreadable(found.unreadable, len(images))
    _say_accuracy(found, images)
    rows = [
        (one.path, rank, label, f"{share:.6g}")
        for one in found
        for rank, (label, share) in enumerate(one.top, start=1)
    ]  # fmt: skip
    if out is None:
        print_bytes(csv_bytes([COLUMNS, *rows]))
        return None
    write_bytes(out, csv_bytes([COLUMNS, *rows]))
    return f"{out}: {counted(len(found), 'image')}"


def _check(given: PredictConfig) -> None:
    if given.min_score is not None:
        wanted = "leave it out for a run that has classes of images"
        raise UserError(f"min_score: got {given.min_score:g}, which is of boxes; {wanted}")


def _say_accuracy(found, images: list[FoundImage]) -> None:
    """Logs top-1, with its interval, of the images whose folders are named like classes."""
    from idmm.evaluation.evaluate import score

    numbers, folders = {name: n for n, name in enumerate(found.classes)}, {one.path: one.folders for one in images}
    truth = np.array([next((numbers[name] for name in folders[path] if name in numbers), -1) for path in found.paths])
    known = np.flatnonzero(truth >= 0)
    if not len(known):
        return
    scores = score(found.probabilities[known].argmax(axis=1), truth[known])
    low, high = scores["top1_interval"]
    text = f"top-1 {scores['top1']:.2f} %, 95 % interval {low:.2f} to {high:.2f}"
    which = "" if len(known) == len(found) else f"{len(known)} of "
    log.info("accuracy: %s, on %s%s in folders named like classes", text, which, counted(len(found), "image"))
