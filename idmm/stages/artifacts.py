"""What a finished run says of its images, for those who draw it or search it: test predictions, features before and
after, a row of W for each training image, and what it ran on.

Each is read from the run's files; what an older run lacks is made from its weights and images, and not kept. torch is
imported only then.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from idmm.errors import UserError
from idmm.files import being_written  # noqa: F401
from idmm.stages import STAGES

PREDICTIONS, FEATURES, ENVIRONMENT = "predictions.csv", "features.npz", "environment.json"
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


def predictions(run: str | Path, device: str = "auto") -> Predicted:
    """Returns what a finished run of fine-tuning or joint pretraining takes its test images for.

    From ``predictions.csv``. Runs that wrote it without probabilities, or not at all, evaluate their test images again,
    in the precision that they ran in, on ``device`` (auto, cpu, cuda or mps). Where that cannot be and there is a file
    without probabilities, ``probability`` is None and the log says why.

    Raises:
        UserError: No finished run, one without a classifier, or there is no file and the images cannot be read.
    """
    raise NotImplementedError


def features(run: str | Path, device: str = "auto") -> Features:
    """Returns features of test images before and after a finished run of fine-tuning or joint pretraining.

    From ``features.npz``; older runs take them now, on ``device``.

    Raises:
        UserError: No finished run, one without a classifier, or it is older than the file and its images, or the
            weights that it started from, are gone or have changed.
        RunError: They are not finite.
    """
    raise NotImplementedError


def instances(run: str | Path) -> Instances:
    """Returns the rows of W of a finished pretraining run, each with its image.

    From ``instances.safetensors`` and ``instances.json``; older runs have the rows in ``last/state.pt``, and their
    images are read for the names.

    Raises:
        UserError: No finished run, a method without such rows, or the run is older than the files and its images or
            ``last/state.pt`` are gone or have changed.
    """
    raise NotImplementedError


def environment(run: str | Path) -> dict[str, Any]:
    """Returns what a run ran on, see :mod:`idmm.environment`; an empty dict of runs that are older than the file."""
    raise NotImplementedError


def config_of(run: str | Path) -> Any:
    """Returns the config of a finished run, by its ``config.yaml``: PretrainConfig, FinetuneConfig or ProbeConfig.

    Raises:
        UserError: No finished run, k-fold runs (one of them is wanted), or config.yaml cannot be read.
    """
    raise NotImplementedError


def images(run: str | Path, part: str = "train"):
    """Returns a run's images, an :class:`idmm.data.cache.ImageStore`: ``train`` as they were trained on, with their
    short side bounded, ``val`` or ``test`` as centre crops of the last stage's size.

    Raises:
        UserError: No finished run, no such split, or its images are gone or have changed since.
    """
    raise NotImplementedError
