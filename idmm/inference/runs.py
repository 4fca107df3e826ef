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
        candidates = _candidates(folder)
        finished = [path for path in candidates if _is_finished(path)]
        unfinished = [path for path in candidates if (path / "config.yaml").is_file() and path not in finished]
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


def _is_finished(path: Path) -> bool:
    return (path / "result.json").is_file() and (path / "config.yaml").is_file()


def _candidates(path: Path) -> list[Path]:
    if stages := _stages(path):
        return stages
    if _is_finished(path) or (path / "config.yaml").is_file() or not path.is_dir():
        return [path]
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    return [run for folder in folders for run in _stages(folder) or [folder]]


def _stages(path: Path) -> list[Path]:
    """Return the runs in a folder of ``idmm train``, in their order, and none for any other folder."""
    return [path / name for name in TRAIN if (path / "train.json").is_file() and (path / name).is_dir()]
