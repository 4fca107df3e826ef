"""What a finished run says of its images, for those who draw it or search it: test predictions, a row of W for each
training image, and what it ran on.

Each is read from the run's files, whose formats are here. torch is imported only to read images.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from idmm.config import DenseConfig, PretrainConfig
from idmm.errors import UserError
from idmm.files import read_csv
from idmm.stages import STAGES, stage_of
from idmm.training.environment import read as environment  # noqa: F401 (what a run ran on, for those who read the rest here)

PREDICTIONS = "predictions.csv"
ROWS, NAMES = "instances.safetensors", "instances.json"


@dataclass(frozen=True)
class Predicted:
    """What a run's classifier says of its M test images, in the split's order."""

    paths: list[str]  # names as in the split, [M]
    classes: list[str]  # names of all K classes, by number
    truth: np.ndarray  # int64 [M], numbers of the true classes
    predicted: np.ndarray  # int64 [M], numbers of the likeliest classes
    probability: np.ndarray  # float64 [M], of the likeliest class
    groups: list[str] | None  # of each image, [M]; None: images are in no groups


@dataclass(frozen=True)
class Instances:
    """The rows of the N-way layer of pretraining, one for each training image, and those images."""

    weight: np.ndarray  # float32 [N, d], as learned: of any length, also where the layer is a cosine one
    classifier: str  # "cosine" or "linear"
    images: list[str]  # names as in the split, [N]
    labels: list[str | None] | None  # name of each image's class, None where it has none; None: there are no labels
    digests: list[str]  # BLAKE2b of each file's bytes, 32 hexadecimal digits


def about_rows(classifier: str, train) -> dict:
    """Returns what ``instances.json`` says: the kind of the layer, and of each training image name, class, digest.

    Args:
        classifier: "cosine" or "linear".
        train: Images, an :class:`idmm.data.image_store.ImageStore`.
    """
    labels = None if train.labels is None else [train.classes[c] if c >= 0 else None for c in train.labels]
    return {"classifier": classifier, "images": train.names, "labels": labels, "digests": train.digests}


# ---------------------------------------------------------------------- what a run says
def predictions(run: str | Path) -> Predicted:
    """Returns what a finished run of fine-tuning or joint pretraining takes its test images for.

    Raises:
        UserError: No finished run, one without a classifier or without ``predictions.csv``.
    """
    run = Path(run)
    config_of(run)
    path, classes = _present(run / PREDICTIONS), _classes(run)
    numbers = {name: number for number, name in enumerate(classes)}
    with _reading(path):
        rows = read_csv(path)
        truth, predicted = (np.array([numbers[row[key]] for row in rows]) for key in ("class", "predicted"))
        probability = np.array([float(row["probability"]) for row in rows])
        groups = [row["group"] for row in rows] if "group" in rows[0] else None
        return Predicted([row["path"] for row in rows], classes, truth, predicted, probability, groups)


def instances(run: str | Path) -> Instances:
    """Returns the rows of W of a finished pretraining run, each with its image.

    Raises:
        UserError: No finished run, a method without such rows, or ``instances.safetensors`` or ``instances.json`` is
            not there.
    """
    run, config = Path(run), config_of(run)
    if not isinstance(config, PretrainConfig):
        raise UserError(f"{run}: has no rows of training images; wanted a pretraining run of idmm")
    if not (run / ROWS).exists():
        from idmm.methods import method_class  # torch

        if method_class(config.method.name).instance_rows is None:
            line = f"{config.method.name} learns no row for each training image; wanted a run of idmm"
            raise UserError(f"{run}: {ROWS}: {line}")
    _present(run / ROWS), _present(run / NAMES)
    from safetensors.numpy import load_file

    with _reading(run / NAMES):
        found = json.loads((run / NAMES).read_text())
        about = {name: found[name] for name in ("classifier", "images", "labels", "digests")}
    with _reading(run / ROWS):
        return Instances(load_file(run / ROWS)["weight"], **about)


def images(run: str | Path):
    """Returns a run's training images as they were trained on, with their short side bounded, an
    :class:`idmm.data.image_store.ImageStore`.

    Raises:
        UserError: No finished run, or its images are gone or have changed since.
    """
    run, config = Path(run), config_of(run)
    try:
        return _images(run, config)
    except UserError as error:
        raise UserError(*(f"{run}: the train images: {fault}" for fault in error.faults)) from None


def config_of(run: str | Path, dense: bool = False) -> Any:
    """Returns the config of a finished run, by its ``config.yaml``: PretrainConfig, FinetuneConfig or ProbeConfig; with
    ``dense`` DetectConfig or SegmentConfig, too.

    Raises:
        UserError: No finished run, k-fold runs (one of them is wanted), one of boxes or masks, or config.yaml cannot
            be read.
    """
    run = Path(run)
    if not run.is_dir():
        raise UserError(f"{run}: does not exist; wanted a run folder" if not run.exists() else f"{run}: is no folder")
    if (run / "fold-1").is_dir():
        raise UserError(f"{run}: holds k-fold runs; give one of them ('{run / 'fold-1'}')")
    if not (run / "result.json").is_file():
        begun = (run / "last").is_dir()
        what = "is a run that is not finished (no result.json yet)" if begun else "is no run: it has no result.json"
        raise UserError(f"{run}: {what}; wanted a finished run's folder")
    config = begun_config(run)
    if isinstance(config, DenseConfig) and not dense:
        what = f"is a run of idmm {config.STAGE}, without classes of images"
        raise UserError(f"{run}: {what}; wanted one of pretraining or fine-tuning")
    return config


def begun_config(run: Path) -> Any:
    """Returns the config of a run that may not be finished; UserError where config.yaml cannot be read."""
    faults = ()
    for stage in STAGES.values():
        try:
            return stage.build(run / "config.yaml")
        except UserError as error:  # of another stage
            faults = min(faults or error.faults, error.faults, key=len)
    raise UserError(*(f"{run}: config.yaml cannot be read: {fault}" for fault in faults[:1]))


def _classes(run: Path) -> list[str]:
    """The names of a run's classes, by number."""
    path = run / "model.json"
    if not path.exists():
        wanted = "wanted a run of fine-tuning or of joint pretraining (method.label_weight)"
        raise UserError(f"{run}: has no classifier; {wanted}")
    with _reading(path):
        return json.loads(path.read_text())["classes"]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Names the file that cannot be read."""
    try:
        yield
    except Exception as error:  # a damaged file fails in any way it likes
        raise UserError(f"{path}: cannot be read ({type(error).__name__})") from None


def _present(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path}: does not exist; the log says why the run has not written it")
    return path


# ---------------------------------------------------------------------- weights and images
def exported_weights(run: Path, field: str = ""):
    """Reads the weights that a run wrote, with its classifier where it has one, an
    :class:`idmm.models.weights.Checkpoint`; see :func:`idmm.models.weights.read_checkpoint`."""
    from idmm.models.weights import read_checkpoint

    return read_checkpoint(run, field, "model" if (run / "model.safetensors").is_file() else "backbone")


def _images(run: Path, config: Any):
    """Reads the training split; UserError if image i is no longer image i."""
    from idmm.data.image_store import store_split
    from idmm.data.store import compare, fingerprint

    stage = stage_of(config)
    split = stage.list_images().train
    size = stage.stored_size(max(phase.size for phase in stage.phases))
    value_range = exported_weights(run).range if config.data.range == "auto" else config.data.range
    options = dict(data=config.data, part="train", progress=True, value_range=value_range)
    store = store_split(split, stored_size=size, **options)
    file = run / "last" / "images.json"
    saved = json.loads(file.read_text()).get("train") if file.exists() else None
    if lines := compare(saved, fingerprint(store)) if saved else []:
        raise UserError(*(f"data.root: the images changed since the run: {line}" for line in lines))
    return store
