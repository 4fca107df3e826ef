"""The finished runs that people mean by a folder: a run's own, or one that holds some."""

import os
from contextlib import suppress
from pathlib import Path

from idmm.errors import UserError, listed
from idmm.files import home, json_lines
from idmm.stages import artifacts, stage_of

TRAIN = ("stage1", "teacher", ".", "scratch")  # runs of 'idmm train'
PROBE = "probe.json"


def found_runs(given: list[str]) -> tuple[list[Path], list[str]]:
    """Returns the folders of the runs that are meant, and a line on each that was passed over as it is not finished.

    A folder of ``idmm train`` means its stages and its comparison, one that holds runs or such folders, all of these;
    a run that several mean is named once.

    Raises:
        UserError: No run, or one that is not finished; a line a fault.
    """
    runs, notes, faults = {}, [], []  # a run's real path -> as it was given
    for name in given:
        path = home(name)
        try:
            meant, passed_over = _meant(path)
        except UserError as error:
            faults += error.faults
            continue
        notes += passed_over
        for run in meant:
            runs.setdefault(os.path.realpath(run), run)
    if faults:
        raise UserError(*faults)
    return list(runs.values()), notes


def is_finished(path: Path) -> bool:
    """Whether a folder holds a run that ended well, or what a probe measured."""
    return ((path / "result.json").is_file() and (path / "config.yaml").is_file()) or (path / PROBE).is_file()


def _meant(path: Path) -> tuple[list[Path], list[str]]:
    if not path.is_dir():
        raise UserError(
            f"runs: '{path}' {'is a file' if path.exists() else 'does not exist'}; wanted is a run's folder"
        )
    if (path / "grid.json").is_file():
        raise UserError(f"runs: '{path}' holds a grid, whose page is '{path / 'grid.html'}'; wanted are run folders")
    if stages := _stages(path):
        inner = stages
    elif is_finished(path):
        return [path], []
    elif _begun(path):
        raise UserError(f"runs: '{path}' is not finished: {_so_far(path)}; the command that began it goes on with it")
    else:
        folders = sorted(one for one in path.iterdir() if one.is_dir())
        inner = [run for one in folders for run in _stages(one) or [one]]
    done = [one for one in inner if is_finished(one)]
    if not done:
        open_ = [f"{one.name}: {_so_far(one)}" for one in inner if _begun(one)]
        what = f"runs that are not finished ({listed(open_)})" if open_ else "no config.yaml and no result.json"
        raise UserError(f"runs: '{path}' has {what}; wanted is the folder of a finished run, its --out")
    goes_on = "the command that began it goes on with it"
    open_ = [one for one in inner if _begun(one) and one not in done]
    return done, [f"{one} is left out, it is not finished: {_so_far(one)}; {goes_on}" for one in open_]


def _stages(path: Path) -> list[Path]:
    """The runs in a folder of ``idmm train``, in their order; none in any other."""
    return [path / name for name in TRAIN if (path / "train.json").is_file() and (path / name).is_dir()]


def _begun(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "last").is_dir()


def _so_far(path: Path) -> str:
    """How far an unfinished run has come."""
    done, planned = records(path), ""
    with suppress(UserError):
        config = artifacts.begun_config(path)
        if getattr(config.train, "minutes", None) is None:  # which decide on the epochs when the run begins
            planned = f" of {sum(phase.epochs for phase in stage_of(config).phases(config))}"
    if not done:
        return "no epoch yet"
    loss = f", loss {done[-1]['loss']:.4g}" if "loss" in done[-1] else ""
    return f"{len(done)}{planned} epoch{'' if (planned or len(done)) == 1 else 's'} done{loss}"


def records(folder: Path) -> list[dict]:
    """What a run logged, an epoch each."""
    with suppress(OSError):
        return json_lines(folder / "metrics.jsonl")
    return []
