"""Finished runs: those in the folders that a user names, and their files.

Only reading images or weights imports torch.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from idmm.config import (
    Data,
    DetectConfig,
    FinetuneConfig,
    PretrainConfig,
    SegmentConfig,
    parsing,
)
from idmm.config.commands import ProbeConfig
from idmm.config.reading import read_file
from idmm.errors import Fault, UserError
from idmm.files import expand_home, reading
from idmm.runs.images import list_run_images
from idmm.text import listed

if TYPE_CHECKING:
    from idmm.data.image_store import ImageStore
    from idmm.data.images import ValueRange
    from idmm.models.weights import Checkpoint

RunConfig = PretrainConfig | FinetuneConfig | DetectConfig | SegmentConfig | ProbeConfig
CONFIGS: dict[str, type[RunConfig]] = {  # by command
    kind.COMMAND: kind
    for kind in (PretrainConfig, FinetuneConfig, DetectConfig, SegmentConfig, ProbeConfig)
}
TRAIN = (".", "scratch", "stage1")  # runs of 'idmm train', in order: the classifier first


def finished_runs(folders: list[str]) -> tuple[list[Path], list[str]]:
    """Return the folders of finished runs, and a line on each unfinished one that was skipped.

    A folder of ``idmm train`` holds its stages and its comparison. Any other folder may hold runs
    or such folders. A run appears once.

    Raises:
        UserError: No finished run in a folder, with a line per folder.
    """
    runs: dict[str, Path] = {}  # real path -> path as given
    notes = []
    faults = []
    for folder in map(expand_home, folders):
        begun = _begun(folder)
        if not begun and folder.is_dir():
            begun = [run for inner in sorted(folder.iterdir()) for run in _begun(inner)]
        finished = [run for run in begun if (run / "result.json").is_file()]
        unfinished = [run for run in begun if run not in finished]
        for run in finished:
            runs.setdefault(os.path.realpath(run), run)
        if finished:
            notes += [f"{path} is skipped: it is not finished" for path in unfinished]
        elif unfinished:
            names = listed(f"'{path}'" for path in unfinished)
            faults.append(
                Fault("runs", f"{names}: not finished", "Repeat the command to resume it")
            )
        else:
            fault = "expected the folder of a finished run, its --out, or one that holds some"
            faults.append(Fault("runs", f"'{folder}': {fault}"))
    if faults:
        raise UserError(*faults)
    return list(runs.values()), notes


def _begun(folder: Path) -> list[Path]:
    """Return the runs of a folder of ``idmm train`` in order, or the folder if it is a run."""
    runs = [folder]
    if (folder / "train.json").is_file():
        runs = [folder / name for name in TRAIN]
    return [run for run in runs if (run / "config.yaml").is_file()]


def images_of(run: Path) -> "dict[str, ImageStore]":
    """Return the images of a run's splits as they were stored for training.

    Raises:
        UserError: No finished run, or its images are gone.
    """
    from idmm.data.image_store import store_split

    config = config_of(run)
    with reading(run / "config.yaml", "Restore it or train again"):
        size = config.train_side(max(phase.size for phase in config.phases))
    value_range: ValueRange = config.data.range
    if value_range == "auto":
        value_range = exported_weights(run).range
    stores: dict[str, ImageStore] = {}
    for part, split in list_run_images(config).parts.items():
        stores[part] = store_split(
            split, stored_size=size, data=config.data, part=part, value_range=value_range
        )
        value_range = stores["train"].value_range or value_range
    return stores


def config_of(run: Path) -> PretrainConfig | FinetuneConfig:
    """Return the config of a finished run of pretraining or fine-tuning from its ``config.yaml``.

    Raises:
        UserError: No such run, k-fold runs instead of one of them, or config.yaml cannot be read.
    """
    if (run / "fold-1").is_dir():
        raise UserError.of(str(run), "holds k-fold runs", f"Give one of them ('{run / 'fold-1'}')")
    if not (run / "result.json").is_file():
        hint = "Give the folder of a finished run"
        if (run / "last").is_dir():
            hint = "Repeat its command to finish it"
        raise UserError.of(str(run), "is no finished run, it has no result.json", hint)
    config = read_config(run)
    if not isinstance(config, PretrainConfig | FinetuneConfig):
        raise UserError.of(
            str(run),
            f"is a run of idmm {config.COMMAND}, expected one of pretraining or fine-tuning",
        )
    return config


def read_config(run: Path) -> RunConfig:
    """Return the config of a run that may not be finished.

    Raises:
        UserError: config.yaml cannot be read.
    """
    file = run / "config.yaml"
    try:
        command = read_file(file).get("command")
        if command not in CONFIGS:
            fault = f"got {command!r}, expected one of {', '.join(CONFIGS)}"
            raise UserError.of("command", fault)
        return parsing.build(CONFIGS[command], file)
    except UserError as error:
        first = error.faults[0]
        field = f"{run}: config.yaml cannot be read: {first.field}"
        raise UserError(replace(first, field=field)) from None


def dataset_name(data: Data) -> str:
    """Return a dataset's name. A folder of the user's own is named by the last part of its path."""
    if data.name == "folder" and data.root:
        return expand_home(data.root).resolve().name
    return data.name or "digits"


def exported_weights(run: Path, field: str = "") -> "Checkpoint":
    """Return the weights that a run wrote, with its classifier if it has one."""
    from idmm.models.weights import read_checkpoint

    stem = "model" if (run / "model.safetensors").is_file() else "backbone"
    return read_checkpoint(run, field, stem)
