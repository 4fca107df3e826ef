"""Read the files of finished runs, for figures, search and reports. Only reading images imports torch."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from idmm.config import DenseConfig
from idmm.errors import UserError
from idmm.files import read_csv
from idmm.stages import STAGES, stage_of

PREDICTIONS = "predictions.csv"


def images(run: str | Path):
    """Return a run's training images as they were stored for training, an :class:`idmm.data.image_store.ImageStore`.

    Raises:
        UserError: No finished run, or its images are gone or have changed since.
    """
    from idmm.data.image_store import store_split
    from idmm.data.store import compare, fingerprint

    run, config = Path(run), config_of(run)
    stage, file = stage_of(config), run / "last" / "images.json"
    value_range = exported_weights(run).range if config.data.range == "auto" else config.data.range
    try:
        size = stage.stored_size(max(phase.size for phase in stage.phases))
        options = dict(data=config.data, part="train", progress=True, value_range=value_range)
        store = store_split(stage.list_images().train, stored_size=size, **options)
        saved = json.loads(file.read_text()).get("train") if file.exists() else None
        if lines := compare(saved, fingerprint(store)) if saved else []:
            raise UserError(*(f"data.root: the images changed since the run: {line}" for line in lines))
        return store
    except UserError as error:
        raise UserError(*(f"{run}: the train images: {fault}" for fault in error.faults)) from None


def config_of(run: str | Path, dense: bool = False) -> Any:
    """Return the config of a finished run from its ``config.yaml``.

    Args:
        run: Its folder.
        dense: Whether runs of boxes or masks are accepted, too.

    Raises:
        UserError: No finished run, k-fold runs instead of one of them, or config.yaml cannot be read.
    """
    run = Path(run)
    if (run / "fold-1").is_dir():
        raise UserError(f"{run}: holds k-fold runs. Give one of them ('{run / 'fold-1'}')")
    if not (run / "result.json").is_file():
        is_run = (run / "last").is_dir()
        how = "Repeat its command to finish it" if is_run else "Give the folder of a finished run"
        raise UserError(f"{run}: is no finished run, it has no result.json. {how}")
    config = read_config(run)
    if isinstance(config, DenseConfig) and not dense:
        what = f"is a run of idmm {config.STAGE}, without classes of images"
        raise UserError(f"{run}: {what}, expected one of pretraining or fine-tuning")
    return config


def read_config(run: Path) -> Any:
    """Return the config of a run that may not be finished, or raise UserError if config.yaml cannot be read."""
    faults = ()
    for stage in STAGES.values():
        try:
            return stage.build(run / "config.yaml")
        except UserError as error:  # of another stage
            faults = min(faults or error.faults, error.faults, key=len)
    raise UserError(*(f"{run}: config.yaml cannot be read: {fault}" for fault in faults[:1]))


def exported_weights(run: Path, field: str = ""):
    """Return the weights that a run wrote, with its classifier if it has one, an
    :class:`idmm.models.weights.Checkpoint`. See :func:`idmm.models.weights.read_checkpoint`."""
    from idmm.models.weights import read_checkpoint

    return read_checkpoint(run, field, "model" if (run / "model.safetensors").is_file() else "backbone")


def compared(run: Path, other: Path) -> dict[str, float] | None:
    """Return the :func:`mcnemar` of two finished runs, or None if their test images or classes differ."""
    rows, others = (read_csv(folder / PREDICTIONS) for folder in (run, other))
    correct, other_correct = (
        {(row["path"], row["class"]): row["class"] == row["predicted"] for row in each} for each in (rows, others)
    )
    if correct.keys() != other_correct.keys():
        return None
    return mcnemar(correct, other_correct, {(r["path"], r["class"]): r["group"] for r in rows if "group" in r})


def mcnemar(one: dict[Any, bool], other: dict[Any, bool], groups: dict[Any, str] | None = None) -> dict[str, float]:
    """Compare two classifiers on the same images.

    Args:
        one: Whether the first one is correct, by image.
        other: Whether the second one is.
        groups: The group of each image if images come in groups of similar ones.

    Returns:
        ``points``, by which the first accuracy is above the second, and ``p``, the probability of a difference as large
        between equals. ``p`` is McNemar's exact test (Psychometrika 12, 1947). With groups it is the sign-flip test of
        the images that each group wins less those that it loses, with 9,999 random flips from 14 groups on.
    """
    from scipy.stats import binomtest, permutation_test

    names = one.keys() & other.keys()
    gains = Counter()  # images that the first one wins less those that it loses, by group; without groups by image
    for name in names:
        gains[groups[name] if groups else name] += int(one[name]) - int(other[name])
    gains = np.array([count for count in gains.values() if count])
    p = 1.0
    if len(gains) and groups:
        p = permutation_test((gains,), np.sum, permutation_type="samples", n_resamples=9999, rng=0).pvalue
    elif len(gains):
        p = binomtest(int((gains > 0).sum()), len(gains)).pvalue
    return {"points": 100 * float(gains.sum()) / len(names), "p": float(p)}
