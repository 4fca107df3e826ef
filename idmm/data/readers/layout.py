"""What the readers of official layouts share: finding the folder, reading lists, and saying what is wrong with them."""

import codecs
import contextlib
import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from idmm import config
from idmm.data.split import Split, Splits, counted
from idmm.errors import UserError, listed, reason
from idmm.files import home

HALF = "the archive may be half-unpacked"


class FilesMissing(UserError):
    """Files are not where they are looked for: a download may help."""


class NotAsPublished(UserError):
    """A file or folder, or files that were read together, are not as their publishers made them.

    Args:
        source: Which.
        found: What it is, as the rest of a sentence: ``is empty``.
        wanted: What it should be; None: the archive may be half-unpacked.
    """

    def __init__(self, source: Path | Sequence[Path], found: str, wanted: str | None = None):
        super().__init__(f"data.root: {_quoted(source)} {found}; {f'wanted {wanted}' if wanted else HALF}")


def _quoted(source: Path | Sequence[Path]) -> str:
    return " and ".join(f"'{path}'" for path in ([source] if isinstance(source, os.PathLike) else source))


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


def folder_with(name: str, folders: Sequence[Path], *needed: str) -> Path:
    """Returns the first of the folders that holds all that is needed; else FilesMissing: what the best one lacks."""
    missing = {folder: [item for item in needed if not (folder / item).exists()] for folder in folders}
    best = min(folders, key=lambda folder: len(missing[folder]))
    if missing[best]:
        what = f"'{best}' lacks {listed(missing[best])}"
        raise FilesMissing(f"data.root: {what}; 'idmm data info {name}' shows what {name} looks like")
    return best


def lines(path: Path) -> list[str]:
    """Returns the lines of a list file that are not blank, stripped; NotAsPublished where there are none."""
    return [line for _, line in _numbered(path)]


def rows(path: Path, pattern: str, form: str) -> list[tuple[str, ...]]:
    """Returns the groups of a regular expression for each line of a list file that is not blank.

    NotAsPublished where there are none, or one does not match; ``form`` says in words what is wanted.
    """
    found = []
    for number, line in _numbered(path):
        match = re.fullmatch(pattern, line)
        if match is None:
            raise NotAsPublished(path, f"has '{line}' in line {number}", f"'{form}'")
        found.append(match.groups())
    return found


def _numbered(path: Path) -> list[tuple[int, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotAsPublished(path, f"cannot be read ({reason(error)})", "a list") from None
    text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")  # file names are bytes
    found = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not found:
        raise NotAsPublished(path, "is empty")
    return found


def numbers_from(path: Path, values: Iterable, low: int, high: int) -> np.ndarray:
    """Returns a file's values, counted from ``low``, int64 [N]; NotAsPublished: one is no integer in [low, high]."""
    result = []
    for place, value in enumerate(values, start=1):
        try:
            number = int(value)
            right = low <= number <= high and not (isinstance(value, np.floating) and number != value)
        except (TypeError, ValueError, OverflowError):
            right = False
        if not right:
            raise NotAsPublished(path, f"has '{value}' as value {place}", f"a whole number from {low} to {high}")
        result.append(number - low)
    return np.array(result, dtype=np.int64)


def mat(path: Path, *keys: str) -> list[np.ndarray]:
    """Returns variables of a .mat file, without dimensions of size 1, but with one at least; else NotAsPublished."""
    from scipy.io import loadmat

    wanted = f"a .mat file with {listed(keys)}"
    try:
        with open(path, "rb") as file:
            content = loadmat(file, squeeze_me=True)
    except Exception as error:  # scipy raises a dozen types on broken files
        why = reason(error) if isinstance(error, OSError) and error.strerror else "damaged, or another format"
        raise NotAsPublished(path, f"cannot be read ({why})", wanted) from None
    if absent := [key for key in keys if key not in content]:
        raise NotAsPublished(path, f"lacks the variable {listed(absent)}", wanted)
    return [np.atleast_1d(content[key]) for key in keys]


def listed_splits(base: Path, classes: list[str], train: tuple, test: tuple) -> Splits:
    """Returns training and test images; ``train`` and ``test`` are the last three arguments of :func:`listed_split`."""
    splits = Splits(listed_split(base, classes, *train), None, listed_split(base, classes, *test))
    sources = [path for source, *_ in (train, test) for path in ([source] if isinstance(source, Path) else source)]
    no_repeats(sources, [*splits.train.names, *splits.test.names])
    return splits


def listed_split(
    base: Path, classes: list[str], source: Path | Sequence[Path], paths: Sequence[str], labels: Sequence[int]
) -> Split:
    """Returns a split of listed images: ``paths`` under ``base`` ('/' between), ``labels`` int [N], as ``source`` says.

    Raises:
        FilesMissing: Images that are listed are not there.
        NotAsPublished: None is listed, or one twice.
    """
    if not len(paths):
        raise NotAsPublished(source, "leaves a split without images")
    no_repeats(source, paths)
    if gone := absent(base, paths):
        what = "names an image that is not there" if len(gone) == 1 else f"names {len(gone)} images not there"
        raise FilesMissing(f"data.root: {_quoted(source)} {what}: {listed(gone, 3)} (under '{base}'); {HALF}")
    items = [os.path.join(base, *path.split("/")) for path in paths]
    return Split(items, list(paths), np.asarray(labels, dtype=np.int64), classes)


def no_repeats(source: Path | Sequence[Path], names: Sequence[str]) -> None:
    """Raises NotAsPublished where a list, or lists together, name the same image twice."""
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = [name for name in names if name in seen or seen.add(name)]
        raise NotAsPublished(source, f"names {counted(len(twice), 'image')} twice: {listed(twice, 3)}", "each once")


def absent(base: Path, paths: Sequence[str]) -> list[str]:
    """Returns those of the paths under a folder that are not there.

    Each folder is listed once, which is quicker than asking for each file.
    """

    @functools.cache
    def names_in(folder: str) -> set[str]:
        with contextlib.suppress(OSError):
            return set(os.listdir(base / folder))
        return set()

    return [path for path in paths if os.path.basename(path) not in names_in(os.path.dirname(path))]
