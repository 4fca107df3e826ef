"""The finished runs in the folders that a user names: a run's own folder, or one that holds several."""

import os
from pathlib import Path

from idmm.errors import UserError, listed
from idmm.files import expand_home

TRAIN = (".", "scratch", "stage1")  # runs of 'idmm train', in order: the classifier first


def finished_runs(folders: list[str]) -> tuple[list[Path], list[str]]:
    """Return the folders of the finished runs in ``folders``, and a line on each unfinished one that was skipped.

    A folder of ``idmm train`` holds its stages and its comparison. Any other folder may hold runs or such folders. A
    run appears once.

    Raises:
        UserError: No finished run in a folder, with a line per folder.
    """
    runs: dict[str, Path] = {}  # real path -> path as given
    notes, faults = [], []
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
            names = listed([f"'{path}'" for path in unfinished])
            faults.append(f"runs: {names}: not finished. Repeat the command to resume it")
        else:
            faults.append(f"runs: '{folder}': expected the folder of a finished run, its --out, or one that holds some")
    if faults:
        raise UserError(*faults)
    return list(runs.values()), notes


def _begun(folder: Path) -> list[Path]:
    """Return the runs of a folder of ``idmm train``, in their order, or the folder if it is a run."""
    runs = [folder / name for name in TRAIN] if (folder / "train.json").is_file() else [folder]
    return [run for run in runs if (run / "config.yaml").is_file()]
