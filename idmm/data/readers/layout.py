"""What the readers of official layouts share: finding the folder, reading lists, and naming what is missing."""

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from idmm import config
from idmm.data.split import Listing, Split
from idmm.errors import UserError, listed, reason
from idmm.files import home

Listed = Sequence[tuple[str, int]]  # images: path below the dataset's folder, '/' between, and label


class FilesMissing(UserError):
    """Files of a dataset are missing or damaged: a download may help."""


def root_folder(data: config.Data) -> Path:
    """Returns ``data.root``; FilesMissing where it is not given, missing, or no folder."""
    if not data.root:
        where = "a folder of images" if data.name == "folder" else f"its folder ('idmm data info {data.name}' shows it)"
        raise FilesMissing(f"data.root: not given; data.name '{data.name}' wants {where}")
    root = home(data.root)
    if not os.path.isdir(root):
        fault = "is not a folder" if os.path.exists(root) else "does not exist"
        wanted = "a folder of images" if data.name == "folder" else f"the folder that holds {data.name}"
        raise FilesMissing(f"data.root: '{data.root}' {fault}; wanted {wanted}")
    return root


def folder_of(name: str, root: Path, folder: str, *needed: str) -> Path:
    """Returns ROOT/FOLDER; FilesMissing if it lacks some of ``needed``."""
    base = root / folder
    if missing := [item for item in needed if not (base / item).exists()]:
        what = f"'{base}' lacks {listed(missing)}"
        raise FilesMissing(f"data.root: {what}; 'idmm data info {name}' shows what {name} looks like")
    return base


def lines(path: Path) -> list[str]:
    """Returns the lines of a list that are not blank, stripped; FilesMissing where there are none."""
    return [line for _, line in _numbered(path)]


def rows(path: Path, pattern: str, form: str) -> list[tuple[str, ...]]:
    """Returns the groups of a regular expression for each line of a list that is not blank.

    Raises:
        FilesMissing: The list is empty or cannot be read, or a line is not of the ``form``.
    """
    numbered = _numbered(path)
    matches = [re.fullmatch(pattern, line) for _, line in numbered]
    if None in matches:
        number, line = numbered[matches.index(None)]
        raise FilesMissing(f"data.root: '{path}' has '{line}' in line {number}, expected '{form}'")
    return [match.groups() for match in matches]


def _numbered(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")  # names of files are bytes
    except OSError as error:
        raise FilesMissing(f"data.root: '{path}' cannot be read ({reason(error)})") from None
    found = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not found:
        raise FilesMissing(f"data.root: '{path}' is empty")
    return found


def names_by_number(pairs: Iterable[tuple[int, str]]) -> list[str]:
    """Returns the names of classes in the order of their numbers; a number that no image has is its own name."""
    names = dict(pairs)
    return [names.get(number, f"class {number}") for number in range(max(names, default=-1) + 1)]


def listed_splits(base: Path, classes: list[str], train: Listed, test: Listed) -> Listing:
    """Returns the splits of listed images; FilesMissing where none is listed or some are not there."""
    return Listing(_listed(base, classes, train), None, _listed(base, classes, test))


def _listed(base: Path, classes: list[str], images: Listed) -> Split:
    names = [name for name, _ in images]
    if not names:
        raise FilesMissing(f"data.root: the lists in '{base}' name no image of a split")
    if gone := absent(base, names):
        raise FilesMissing(f"data.root: '{base}' lacks {len(gone)} listed images: {listed(gone, 3)}")
    items = [os.path.join(base, *name.split("/")) for name in names]
    return Split(items, names, np.array([label for _, label in images], dtype=np.int64), classes)


def absent(base: Path, paths: Sequence[str]) -> list[str]:
    """Returns those of the paths under a folder that are not there; each folder is listed once, which is quick."""

    @functools.cache
    def names_in(folder: str) -> set[str]:
        with contextlib.suppress(OSError):
            return set(os.listdir(base / folder))
        return set()

    return [path for path in paths if os.path.basename(path) not in names_in(os.path.dirname(path))]
