"""The files of a run that others draw and search, and what is read of them. No torch."""

import contextlib
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from idmm.errors import UserError

PREDICTIONS, FEATURES = "predictions.csv", "features.npz"
ROWS, NAMES = "instances.safetensors", "instances.json"
CLASSES, EACH = 10, 100  # of features: classes, and images of each


@dataclass(frozen=True)
class Predicted:
    """What a run's classifier says of its M test images, in the split's order."""

    paths: list[str]  # names as in the split, [M]
    classes: list[str]  # names of all K classes, by number
    truth: np.ndarray  # int64 [M], numbers of the true classes
    predicted: np.ndarray  # int64 [M], numbers of the likeliest classes
    probability: np.ndarray | None  # float64 [M], of the likeliest class; None where it is not known (see predictions)


@dataclass(frozen=True)
class Features:
    """Pooled features of some test images, at most :data:`EACH` of each of at most :data:`CLASSES` classes."""

    paths: list[str]  # names as in the split, [M]
    labels: np.ndarray  # int64 [M], numbers of the classes
    classes: list[str]  # names of all K classes, by number
    before: np.ndarray  # float32 [M, d], of the backbone as the run started: init's weights, or fresh ones
    after: np.ndarray  # float32 [M, d2], of the backbone as it was exported


@dataclass(frozen=True)
class Instances:
    """The rows of the N-way layer of pretraining, one for each training image, and those images."""

    weight: np.ndarray  # float32 [N, d], as learned: of any length, also where the layer is a cosine one
    classifier: str  # "cosine" or "linear"
    images: list[str]  # names as in the split, [N]
    labels: list[str | None] | None  # name of each image's class, None where it has none; None: there are no labels
    digests: list[str]  # BLAKE2b of each file's bytes, 32 hexadecimal digits


def shown(labels: np.ndarray) -> np.ndarray:
    """Returns the numbers of the images whose features are kept, in order, by the labels [M] of a split.

    They are of the first :data:`CLASSES` classes by number that have images; :data:`EACH` at most of each, evenly
    spread over those that it has.
    """
    chosen = []
    for label in np.unique(labels[labels >= 0])[:CLASSES]:
        members = np.flatnonzero(labels == label)
        count = min(EACH, len(members))
        chosen.append(members[np.arange(count) * len(members) // count])
    return np.sort(np.concatenate(chosen))


def about_rows(classifier: str, train) -> dict:
    """Returns what ``instances.json`` says: the kind of the layer, and of each training image name, class, digest.

    Args:
        classifier: "cosine" or "linear".
        train: Images, an :class:`idmm.data.cache.ImageStore`.
    """
    labels = None if train.labels is None else [train.classes[c] if c >= 0 else None for c in train.labels]
    return {"classifier": classifier, "images": train.names, "labels": labels, "digests": train.digests}


# ---------------------------------------------------------------------- reading
def read_predictions(path: Path, classes: list[str]) -> Predicted:
    """Reads ``predictions.csv``, with the run's classes by number; UserError where it is damaged."""
    numbers = {name: number for number, name in enumerate(classes)}
    with reading(path), open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(csv.DictReader(file))
        truth, predicted = (np.array([numbers[row[key]] for row in rows]) for key in ("class", "predicted"))
        known = bool(rows) and all(row.get("probability") for row in rows)  # older runs have no such column
        probability = np.array([float(row["probability"]) for row in rows]) if known else None
        return Predicted([row["path"] for row in rows], classes, truth, predicted, probability)


def read_features(path: Path) -> Features:
    """Reads ``features.npz``; UserError where it is damaged."""
    with reading(path), np.load(path, allow_pickle=False) as found:
        paths, classes = found["paths"].tolist(), found["classes"].tolist()
        return Features(paths, found["labels"], classes, found["before"], found["after"])


def read_instances(folder: Path) -> Instances:
    """Reads ``instances.safetensors`` and ``.json``; UserError where one is damaged."""
    from safetensors.numpy import load_file

    with reading(folder / NAMES):
        found = json.loads((folder / NAMES).read_text())
        about = {name: found[name] for name in ("classifier", "images", "labels", "digests")}
    with reading(folder / ROWS):
        return Instances(load_file(folder / ROWS)["weight"], **about)


@contextlib.contextmanager
def reading(path: Path, wanted: str = "; remove it to have it made again") -> Iterator[None]:
    """Says which file it is that cannot be read, and what to do."""
    try:
        yield
    except Exception as error:  # a damaged file fails in any way it likes
        raise UserError(f"{path}: cannot be read ({type(error).__name__}){wanted}") from None
