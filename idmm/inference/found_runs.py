"""The finished runs that people mean by a folder: a run's own, or one that holds some."""

import os
from pathlib import Path

from idmm.errors import UserError, listed
from idmm.files import home

TRAIN = ("stage1", "teacher", ".", "scratch")  # runs of 'idmm train'
PROBE = "probe.json"


def found_runs(given: list[str]) -> tuple[list[Path], list[str]]:
    """Returns the folders of the runs that are meant, and a line on each that was passed over as it is not finished.

    A folder of ``idmm train`` means its stages and its comparison, one that holds runs or such folders, all of these;
    a run that several mean is named once.

    Raises:
        UserError: No finished run in a folder; a line a folder.
    """
    runs, notes, faults = {}, [], []  # a run's real path -> as it was given
    for path in map(home, given):
        meant = _meant(path)
        done = [one for one in meant if _is_finished(one)]
        begun = [one for one in meant if (one / "config.yaml").is_file() and one not in done]
        runs |= {os.path.realpath(run): run for run in done if os.path.realpath(run) not in runs}
        if done:
            notes += [f"{one} is left out: it is not finished" for one in begun]
        elif begun:
            names = listed([f"'{one}'" for one in begun])
            faults.append(f"runs: {names}: not finished; repeat the command that began it, which continues it")
        else:
            faults.append(f"runs: '{path}': expected the folder of a finished run, its --out, or one that holds some")
    if faults:
        raise UserError(*faults)
    return list(runs.values()), notes


def _is_finished(path: Path) -> bool:
    """Whether a folder holds a run that ended well, or what a probe measured."""
    return ((path / "result.json").is_file() and (path / "config.yaml").is_file()) or (path / PROBE).is_file()


def _meant(path: Path) -> list[Path]:
    if stages := _stages(path):
        return stages
    if _is_finished(path) or (path / "config.yaml").is_file() or not path.is_dir():
        return [path]
    folders = sorted(one for one in path.iterdir() if one.is_dir())
    return [run for one in folders for run in _stages(one) or [one]]


def _stages(path: Path) -> list[Path]:
    """The runs in a folder of ``idmm train``, in their order; none in any other."""
    return [path / name for name in TRAIN if (path / "train.json").is_file() and (path / name).is_dir()]
