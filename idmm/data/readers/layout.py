"""What the readers of official layouts share: finding the folder, reading lists, and saying what is wrong with them."""

import codecs
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from idmm import config
from idmm.data.split import Split, counted
from idmm.errors import UserError, listed

HALF = "the archive may be half-unpacked"


class NotThere(UserError):
    """The files are not where they are looked for: a download may help."""


def root_folder(data: config.Data) -> Path:
    """Returns ``data.root``.

    Raises:
        NotThere: It is not given, missing, or no folder.
    """
    if data.root is None:
        where = "a folder of images" if data.name == "folder" else f"its folder ('idmm data info {data.name}' shows it)"
        raise NotThere(f"data.root: not given; data.name '{data.name}' wants {where}")
    root = Path(data.root).expanduser()
    if not root.is_dir():
        fault = "is not a folder" if root.exists() else "does not exist"
        wanted = "a folder of images" if data.name == "folder" else f"the folder that holds {data.name}"
        raise NotThere(f"data.root: '{data.root}' {fault}; wanted {wanted}")
    return root


def base_folder(root: Path, name: str, folders: Sequence[str], needed: Sequence[str]) -> Path:
    """Returns the first of ROOT and ROOT/FOLDERS that holds all that is needed.

    Raises:
        NotThere: None does; the line names what is missing from the one that holds most.
    """
    candidates = [root / folder for folder in ("", *folders)]
    missing = [[item for item in needed if not (folder / item).exists()] for folder in candidates]
    fewest = min(range(len(candidates)), key=lambda i: len(missing[i]))
    if not missing[fewest]:
        return candidates[fewest]
    what = f"lacks {listed(missing[fewest])}"
    if len(missing[fewest]) == len(needed) > 1:
        what = f"holds none of {listed(needed)}"
    raise NotThere(f"data.root: '{candidates[fewest]}' {what}; 'idmm data info {name}' shows what {name} looks like")


def lines(path: Path) -> list[str]:
    """Returns the lines of a list file that are not blank, stripped.

    Raises:
        UserError: It is missing, cannot be read, or is empty.
    """
    return [line for _, line in numbered(path)]


def numbered(path: Path) -> list[tuple[int, str]]:
    """Returns the same with the number of each line in the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"data.root: cannot read the list '{path}' ({why})") from None
    text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")  # file names are bytes
    found = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not found:
        raise UserError(f"data.root: the list '{path}' is empty; {HALF}")
    return found


def rows(path: Path, parts: int, form: str) -> list[list[str]]:
    """Returns the lines of a list file, each split at white space into so many parts; the last takes the rest.

    Raises:
        UserError: As :func:`lines`, or a line has fewer parts; ``form`` says what is wanted.
    """
    found = []
    for number, line in numbered(path):
        found.append(line.split(maxsplit=parts - 1))
        if len(found[-1]) < parts:
            raise malformed(path, number, line, form)
    return found


def malformed(path: Path, number: int, line: str, form: str) -> UserError:
    """The error of a line that is not as it should be."""
    return UserError(f"data.root: '{path}', line {number} is '{line}', wanted '{form}'")


def labels_in(path: Path, values: Iterable, low: int, high: int) -> np.ndarray:
    """Returns labels counted from 0, int64 [N].

    Args:
        path: The file that they come from, for the error.
        values: Numbers, or text that should be.
        low: The smallest that is right.
        high: The largest.

    Raises:
        UserError: One is no number or out of range.
    """
    result = []
    for i, value in enumerate(values):
        try:
            number = int(value)
            if isinstance(value, np.floating) and number != value:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"data.root: '{path}', entry {i + 1}: label '{value}', wanted a whole number") from None
        if not low <= number <= high:
            wanted = f"wanted {low} to {high}"
            raise UserError(f"data.root: '{path}', entry {i + 1}: label {number} is out of range, {wanted}")
        result.append(number - low)
    return np.array(result, dtype=np.int64)


def mat(path: Path, *keys: str) -> list[np.ndarray]:
    """Returns variables of a .mat file, without dimensions of size 1, but with one at least.

    Raises:
        UserError: It is missing, damaged, or lacks one.
    """
    from scipy.io import loadmat

    try:
        with open(path, "rb") as file:
            content = loadmat(file, squeeze_me=True)
    except Exception as error:  # scipy raises a dozen types on broken files
        why = (getattr(error, "strerror", None) or "damaged, or not a .mat file").lower()
        raise UserError(f"data.root: cannot read '{path}' ({why})") from None
    if absent := [key for key in keys if key not in content]:
        raise UserError(f"data.root: '{path}' lacks the variable {listed(absent)}")
    return [np.atleast_1d(content[key]) for key in keys]


def listed_split(base: Path, source: Path | Sequence[Path], paths: list[str], labels, classes: list[str]) -> Split:
    """Returns a split of listed images.

    Args:
        base: Folder of the dataset.
        source: The list file or files, for the error.
        paths: Relative to ``base``, with '/' for separator.
        labels: int [N].
        classes: Name of each label.

    Raises:
        NotThere: Images that are listed are not there.
        UserError: None is listed.
    """
    if not paths:
        raise UserError(f"data.root: {_quoted(source)} leaves a split without images; {HALF}")
    absent = _absent(base, paths)
    if absent:
        what = "names an image that is not there" if len(absent) == 1 else f"names {len(absent)} images not there"
        raise NotThere(f"data.root: {_quoted(source)} {what}: {listed(absent, 3)} (under '{base}'); {HALF}")
    items = [os.path.join(base, *path.split("/")) for path in paths]
    return Split(items, paths, np.asarray(labels, dtype=np.int64), classes)


def _absent(base: Path, paths: list[str]) -> list[str]:
    """Those of the paths that are not there; each folder is listed once, which is quicker than asking for each file."""
    there: dict[str, set[str]] = {}
    absent = []
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in there:
            try:
                there[folder] = set(os.listdir(base / folder))
            except OSError:
                there[folder] = set()
        if name not in there[folder]:
            absent.append(path)
    return absent


def no_repeats(source: Path | Sequence[Path], names: Sequence[str]) -> None:
    """Raises UserError where a list, or lists together, name the same image twice."""
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = [name for name in names if name in seen or seen.add(name)]
        raise UserError(f"data.root: {_quoted(source)} names {counted(len(twice), 'image')} twice: {listed(twice, 3)}")


def _quoted(source: Path | Sequence[Path]) -> str:
    return " and ".join(f"'{path}'" for path in ([source] if isinstance(source, Path) else source))


def beside(name: str, file: str, *folders: Path) -> Path:
    """Returns the file in the first folder that has it.

    Raises:
        NotThere: None has.
    """
    for folder in folders:
        if (folder / file).exists():
            return folder / file
    raise NotThere(f"data.root: '{folders[0]}' lacks {file}; 'idmm data info {name}' shows what {name} looks like")
