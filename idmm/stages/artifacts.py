"""What a finished run says of its images, for those who draw it or search it: test predictions, features before and
after, a row of W for each training image, and what it ran on.

Each is read from the run's files; what an older run lacks is made from its weights and images, and not kept. torch is
imported only then.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idmm.config import PretrainConfig
from idmm.environment import read as read_environment
from idmm.errors import RunError, UserError
from idmm.stages import STAGES
from idmm.stages.formats import (
    FEATURES,
    NAMES,
    PREDICTIONS,
    ROWS,
    Features,
    Instances,
    Predicted,
    read_features,
    read_instances,
    read_predictions,
    reading,
)

log = logging.getLogger("idmm")
WITH_CLASSIFIER = "wanted a run of fine-tuning or of joint pretraining (method.label_weight)"


def predictions(run: str | Path, device: str = "auto") -> Predicted:
    """Returns what a finished run of fine-tuning or joint pretraining takes its test images for.

    From ``predictions.csv``. Runs that wrote it without probabilities, or not at all, evaluate their test images again,
    in the precision that they ran in, on ``device`` (auto, cpu, cuda or mps). Where that cannot be and there is a file
    without probabilities, ``probability`` is None and the log says why.

    Raises:
        UserError: No finished run, one without a classifier, or there is no file and the images cannot be read.
        RunError: Memory ran out.
    """
    run, config = Path(run), config_of(run)
    classes, found = _classes(run), None
    if (run / PREDICTIONS).exists():
        found = read_predictions(run / PREDICTIONS, classes)
        if found.probability is not None:
            return found
    try:
        with _making(run, "probabilities of test images" if found else PREDICTIONS) as remake:
            return remake.predictions(run, config, classes, device)
    except UserError as error:
        if found is None:
            raise
        log.warning("%s", error)
        return found


def features(run: str | Path, device: str = "auto") -> Features:
    """Returns features of test images before and after a finished run of fine-tuning or joint pretraining.

    From ``features.npz``; older runs take them now, on ``device``.

    Raises:
        UserError: No finished run, one without a classifier, or it is older than the file and its images, or the
            weights that it started from, are gone or have changed.
        RunError: They are not finite, or memory ran out.
    """
    run, config = Path(run), config_of(run)
    classes = _classes(run)
    if (run / FEATURES).exists():
        return read_features(run / FEATURES)
    with _making(run, FEATURES) as remake:
        return remake.features(run, config, classes, device)


def instances(run: str | Path) -> Instances:
    """Returns the rows of W of a finished pretraining run, each with its image.

    From ``instances.safetensors`` and ``instances.json``; older runs have the rows in ``last/state.pt``, and their
    images are read for the names.

    Raises:
        UserError: No finished run, a method without such rows, or the run is older than the files and its images or
            ``last/state.pt`` are gone or have changed.
    """
    run, config = Path(run), config_of(run)
    if not isinstance(config, PretrainConfig):
        raise UserError(f"{run}: has no rows of training images; wanted a pretraining run of idmm")
    if (run / ROWS).exists() and (run / NAMES).exists():
        return read_instances(run)
    with _making(run, ROWS) as remake:
        return remake.instances(run, config)


def environment(run: str | Path) -> dict[str, Any]:
    """Returns what a run ran on, see :mod:`idmm.environment`; an empty dict of runs that are older than the file."""
    return read_environment(Path(run))


def config_of(run: str | Path) -> Any:
    """Returns the config of a finished run, by its ``config.yaml``: PretrainConfig, FinetuneConfig or ProbeConfig.

    Raises:
        UserError: No finished run, k-fold runs (one of them is wanted), or config.yaml cannot be read.
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
    faults = ()
    for stage in STAGES.values():
        try:
            return stage.build(run / "config.yaml")
        except UserError as error:  # of another stage
            faults = min(faults or error.faults, error.faults, key=len)
    raise UserError(*(f"{run}: config.yaml cannot be read: {fault}" for fault in faults[:1]))


def images(run: str | Path, part: str = "train"):
    """Returns a run's images, an :class:`idmm.data.cache.ImageStore`: ``train`` as they were trained on, with their
    short side bounded, ``val`` or ``test`` as centre crops of the last stage's size.

    Raises:
        UserError: No finished run, no such split, or its images are gone or have changed since.
    """
    run, config = Path(run), config_of(run)
    with _making(run, f"the {part} images") as remake:
        return remake.images(run, config, part)


def _classes(run: Path) -> list[str]:
    """The names of a run's classes, by number."""
    path = run / "model.json"
    if not path.exists():
        raise UserError(f"{run}: has no classifier; {WITH_CLASSIFIER}")
    with reading(path, ""):
        return json.loads(path.read_text())["classes"]


@contextlib.contextmanager
def _making(run: Path, what: str) -> Iterator[Any]:
    """Yields the module that makes what a run has no file of; where it cannot, the message says so."""
    from idmm.stages import remake

    try:
        yield remake
    except UserError as error:
        raise UserError(*(f"{run}: {what}: {fault}" for fault in error.faults)) from None
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "out of memory" not in str(error):
            raise
        raise RunError(f"{run}: {what}: out of memory with {remake.BATCH} images at a time") from None
