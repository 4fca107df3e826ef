"""Lists that people keep of their own images: classes, groups, images to leave out. Each bad line is a fault.

An image is named by its path under ``data.root`` with '/' between (as in ``check.json``), or by its absolute path.
"""

import csv
import io
import logging
import os
import posixpath
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from idmm.data.split import Split, Splits, counted
from idmm.errors import UserError, listed, nearest, reason

log = logging.getLogger(__name__)

_MOST_LISTED = 20  # bad lines named one by one
_HEADERS = {  # names that a header may give a column
    "path": {"path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path"},
    "class": {"class", "label", "category"},
    "split": {"split"},
    "group": {"group"},
}


class BadList(UserError):
    """A list that cannot be read, or has bad lines; :func:`refuse` makes one of many faults."""


class Row(NamedTuple):
    """A line of a CSV: its number, and what stands in the columns that are known."""

    line: int
    cells: dict[str, str]


class Names:
    """The images that a line may mean: ``names`` of a dataset, which lies in ``root`` if it is one of files."""

    def __init__(self, names: Iterable[str], root: str | None):
        self.root = None if root is None else os.path.abspath(os.path.expanduser(root))
        self._known = {composed(name): name for name in names}
        self._hints = _MOST_LISTED  # each is a look at all names

    def find(self, text: str) -> str | None:
        """Returns the image's name; None where there is none of that name."""
        forms = (self._relative(form) for form in (text, text.strip(), text.strip().replace("\\", "/")))
        return next((self._known[form] for form in forms if form in self._known), None)

    def elsewhere(self, text: str) -> bool:
        """Whether a file of that name lies in the root, though no image of the dataset: another split's, say."""
        return self.root is not None and os.path.lexists(os.path.join(self.root, text.strip()))

    def near(self, text: str) -> str:
        """Returns ``; did you mean 'x'?`` for the image in another folder, or of another name in that folder."""
        if not self._hints:
            return ""
        self._hints -= 1
        folder, name = posixpath.split(self._relative(text.strip().replace("\\", "/")))
        if same := [known for form, known in self._known.items() if posixpath.basename(form) == name]:
            return f"; did you mean '{same[0]}'?"
        return nearest(
            text.strip(), [known for form, known in self._known.items() if posixpath.dirname(form) == folder]
        )

    def _relative(self, text: str) -> str:
        if self.root is not None and os.path.isabs(text):
            text = os.path.relpath(text, self.root).replace(os.sep, "/")
        return composed(posixpath.normpath(text))


def composed(name: str) -> str:
    """Returns a name with composed letters: macOS may write the same name in another form."""
    return unicodedata.normalize("NFC", name)


def refuse(field: str, faults: list[str]) -> None:
    """Raises BadList with a line a fault, of which the first are named; nothing without faults."""
    if faults:
        more = len(faults) - _MOST_LISTED
        raise BadList(*faults[:_MOST_LISTED], *([f"{field}: and {counted(more, 'line')} more"] if more > 0 else []))


# ---------------------------------------------------------------------- CSV files
def read_table(field: str, file: str, wanted: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[Row]:
    """Reads a CSV with the columns ``wanted``, and ``optional`` ones where its header names them.

    Separated by commas, semicolons or tabs, as its first line is. Without a header the columns are the wanted ones in
    their order, and after them the first optional one.

    Raises:
        BadList: It cannot be read, is empty, or has rows with cells missing or empty.
    """
    form = ",".join(wanted)
    text = _text(field, file, f"a CSV file of {form}")
    first = text.lstrip().partition("\n")[0]
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise BadList(f"{field}: {file}:{reader.line_num}: is not CSV ({error}); wanted {form}") from None
    columns = {name: i for i, name in enumerate((*wanted, *optional[:1]))}
    if rows and (header := _header(rows[0][1], wanted, optional)):
        columns, rows = header, rows[1:]
    elif rows and len(rows[0][1]) <= len(wanted):
        columns = {name: columns[name] for name in wanted}
    if not rows:
        raise BadList(f"{field}: '{file}' has no rows; wanted {form}")
    faults = []
    for line, cells in rows:
        if lacking := [name for name, i in columns.items() if not "".join(cells[i : i + 1])]:
            faults.append(f"{field}: {file}:{line}: has no {' and no '.join(lacking)}; wanted {','.join(columns)}")
    refuse(field, faults)
    return [Row(line, {name: cells[i] for name, i in columns.items()}) for line, cells in rows]


def _header(cells: list[str], wanted: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, int] | None:
    """Returns the places of the columns by name; None where this is no header."""
    named = [cell.lower() for cell in cells]
    places = {name: next((i for i, c in enumerate(named) if c in _HEADERS[name]), None) for name in wanted + optional}
    if any(places[name] is None for name in wanted):
        return None
    return {name: place for name, place in places.items() if place is not None}


def _text(field: str, file: str, wanted: str, errors: str = "strict") -> str:
    try:
        return Path(file).expanduser().read_bytes().decode("utf-8-sig", errors)
    except OSError as error:
        why = reason(error)
    except UnicodeDecodeError:
        why = "not UTF-8 text"
    raise BadList(f"{field}: cannot read '{file}' ({why}); wanted {wanted}")


def no_image(field: str, file: str, line: int, text: str, names: Names) -> str:
    """Returns the fault of a line that names no image."""
    where = f" under '{names.root}'" if names.root else " of the dataset"
    hint = "; a header calls the column path" if line == 1 and file.lower().endswith((".csv", ".tsv")) else ""
    return f"{field}: {file}:{line}: '{text}' is no image{where}{names.near(text) or hint}"


# ---------------------------------------------------------------------- images to leave out
def leave_out(splits: Splits, file: str, root: str | None) -> Splits:
    """Returns the splits without the images that a file names, one a line; ``excluded`` counts them.

    Empty lines and those that begin with '#' say nothing ('./#1.png' names an image). A file in ``root`` that is in no
    split may be named, too: the list serves pretraining, which reads fewer of them.

    Raises:
        BadList: It cannot be read, names what is not there, or leaves a split without images.
    """
    field = "data.exclude"
    names = Names([name for part in splits.parts.values() for name in part.names], root)
    gone, faults = set(), []
    text = _text(field, file, "a file with the name of an image a line", "surrogateescape")  # file names are bytes
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if found := names.find(line):
            gone.add(found)
        elif not names.elsewhere(line):
            faults.append(no_image(field, file, number, line.strip(), names))
    refuse(field, faults)
    kept, counts = {}, {}
    for key, part in splits.parts.items():
        left = [i for i, name in enumerate(part.names) if name not in gone]
        if not left:
            raise BadList(f"{field}: '{file}' leaves no image of {key}; wanted one at least")
        out = sorted(set(part.names) & gone)
        drawn = f"{part.drawn} without {out!r}" if out else part.drawn
        kept[key], counts[key] = replace(part.take(left), drawn=drawn), len(out)
    total = sum(counts.values())
    where = ", ".join(f"{n} {key}" for key, n in counts.items() if n)
    log.info("%s: '%s' leaves out %s%s", field, file, counted(total, "image"), f" ({where})" if where else "")
    return replace(splits, **kept, excluded=total)


# ---------------------------------------------------------------------- groups
def with_groups(splits: Splits, how: str, root: str | None) -> Splits:
    """Returns the splits with each image's group: of a CSV (path,group), its folder's name, or a pattern's bracket.

    Raises:
        BadList: The file or the pattern is bad, or images are in no group.
    """
    names = [name for part in splits.parts.values() for name in part.names]
    if how == "folder":
        group = {name: posixpath.basename(posixpath.dirname(name)) for name in names}
    elif "(" in how and not os.path.exists(how):
        group = _by_pattern(how, names)
    else:
        group = _by_table(how, Names(names, root))
    if missing := [name for name in names if not group.get(name)]:
        what = f"'{how}' says of {counted(len(missing), 'image')} no group: {listed(missing, 3)}"
        raise BadList(f"data.groups: {what}; wanted one for each image")
    parts = {key: replace(part, groups=np.array([group[n] for n in part.names])) for key, part in splits.parts.items()}
    return replace(splits, **parts)


def _by_pattern(how: str, names: list[str]) -> dict[str, str]:
    wanted = "wanted 'folder', a CSV file of path,group, or a pattern with one bracket, e.g. '(patient\\d+)_'"
    try:
        pattern = re.compile(how)
    except re.error as error:
        raise BadList(f"data.groups: '{how}' is no file and no pattern ({error}); {wanted}") from None
    if pattern.groups != 1:
        raise BadList(f"data.groups: '{how}' has {pattern.groups} brackets that count; {wanted}")
    return {name: match[1] for name in names if (match := pattern.search(name))}


def _by_table(file: str, names: Names) -> dict[str, str]:
    field, group, faults = "data.groups", {}, []
    for line, cells in read_table(field, file, ("path", "group")):
        if (name := names.find(cells["path"])) is None:
            faults += [] if names.elsewhere(cells["path"]) else [no_image(field, file, line, cells["path"], names)]
        elif group.setdefault(name, cells["group"]) != cells["group"]:
            faults.append(f"{field}: {file}:{line}: '{name}' is of '{group[name]}' already; wanted one group an image")
    refuse(field, faults)
    return group


def shared_groups(splits: Splits) -> list[str]:
    """Returns the groups that have images both in train and in val or test."""
    held = [set(part.groups) for part in (splits.val, splits.test) if part is not None and part.groups is not None]
    return sorted(map(str, set(splits.train.groups) & set().union(*held))) if held else []


def groups_of(split: Split) -> str:
    """Returns ``12 groups``, or nothing where there are none."""
    return "" if split.groups is None else counted(len(np.unique(split.groups)), "group")
