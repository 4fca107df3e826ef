"""Lists that people keep of their own images: classes, groups, images to leave out. Each bad line is a fault.

An image is named by its path under ``data.root`` with '/' between (as in ``check.json``), or by its absolute path.
"""

import contextlib
import csv
import io
import json
import logging
import os
import posixpath
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from idmm.data.split import Listing, Split, counted
from idmm.errors import UserError, capped, listed, reason
from idmm.files import home

log = logging.getLogger(__name__)


class BadList(UserError):
    """A list that cannot be read, or has bad lines."""


class UserList:
    """A file whose lines name images; what is wrong with lines is collected, to be refused together.

    Args:
        field: Of the config, that names the file.
        file: Its path.
        images: Names of the dataset's images.
        root: Where they lie, if it is a dataset of files.
    """

    def __init__(self, field: str, file: str, images: Iterable[str], root: str | None):
        self.field, self.file = field, file
        self.root = None if root is None else os.path.abspath(os.path.expanduser(root))
        self._known = {composed(name): name for name in images}
        self._faults = []

    def text(self, wanted: str) -> str:
        """Returns the whole file; bytes of names that are not UTF-8 become surrogates. BadList: it cannot be read."""
        try:
            return home(self.file).read_bytes().decode("utf-8-sig", "surrogateescape")
        except OSError as error:
            raise BadList(f"{self.field}: cannot read '{self.file}' ({reason(error)}); wanted {wanted}") from None

    def table(self, wanted: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[tuple[int, dict[str, str]]]:
        """Reads a CSV whose header names the columns ``wanted``, and may name ``optional`` ones.

        Returns:
            Each row's number of the line and its cells by column.

        Raises:
            BadList: It cannot be read, has no rows or no such header, or has rows with cells missing or empty.
        """
        form, rows = ",".join(wanted), []
        reader = csv.DictReader(io.StringIO(self.text(f"a CSV file of {form}"), newline=""), strict=True)
        try:
            header = [name.strip() for name in reader.fieldnames or ()]
            if missing := [name for name in wanted if name not in header]:
                what = f"lacks {listed(missing)}" if header else "is empty"
                shown = f"; its first line is '{','.join(header)}'" if header else ""
                raise BadList(f"{self.field}: the header of '{self.file}' {what}, expected {form}{shown}")
            reader.fieldnames = header
            columns = [name for name in (*wanted, *optional) if name in header]
            for row in reader:
                rows.append((reader.line_num, {name: (row[name] or "").strip() for name in columns}))
        except csv.Error as error:
            self.fault(reader.reader.line_num, f"is not CSV ({error}); wanted {form}")
            self.refuse()
        if not rows:
            raise BadList(f"{self.field}: '{self.file}' has no rows under the header {form}")
        for line, cells in rows:
            if lacking := [name for name, cell in cells.items() if not cell]:
                self.fault(line, f"has no {' and no '.join(lacking)}; wanted {','.join(columns)}")
        self.refuse()
        return rows

    def find(self, line: int, text: str, elsewhere: bool = False) -> str | None:
        """Returns the name of the image that a line means; None, and that is a fault, where there is none.

        It is no fault where ``elsewhere`` allows files in the root that are no image of the dataset: another split's.
        """
        name = text
        if self.root is not None and os.path.isabs(name):
            name = os.path.relpath(name, self.root)
        name = composed(posixpath.normpath(name))
        if name in self._known:
            return self._known[name]
        inside = self.root is not None and not name.startswith("..")
        if not (elsewhere and inside and os.path.isfile(os.path.join(self.root, name))):
            where = f" under '{self.root}'" if self.root else " of the dataset"
            self.fault(line, f"{text!r} is no image{where}")
        return None

    def fault(self, line: int, what: str) -> None:
        """Notes what is wrong with a line."""
        self._faults.append(f"{self.field}: {self.file}:{line}: {what}")

    def refuse(self) -> None:
        """Raises BadList with a line a fault, of which the first are named; nothing without faults."""
        if self._faults:
            raise BadList(*capped(self._faults, begin=f"{self.field}: "))


def composed(name: str) -> str:
    """Returns a name with composed letters: macOS may write the same name in another form."""
    return unicodedata.normalize("NFC", name)


# ---------------------------------------------------------------------- a list of classes, to be written
def class_rows(
    parts: dict[str, Split], columns: Sequence[str] = (), more: Callable[[str, int], tuple] = lambda part, i: ()
) -> Iterator[tuple]:
    """Yields the header of a list for ``data.labels`` and a row for each image with a label: its path, class and split,
    what ``more`` says of image ``i`` of a part (``columns``), and its group where there are some: an image without one
    is its own."""
    grouped = any(split.groups is not None for split in parts.values())
    yield ("path", "class", "split", *columns, *(["group"] if grouped else []))
    for part, split in parts.items():
        for i in np.flatnonzero(split.labels >= 0):
            group = (split.groups is not None and split.groups[i]) or split.names[i]
            row = (split.names[i], split.classes[split.labels[i]], part, *more(part, i))
            yield (*row, group) if grouped else row


# ---------------------------------------------------------------------- images to leave out
def quoted(name: str) -> str:
    """Returns an image's name as a line of a file for ``data.exclude``."""
    plain = name.isprintable() and name == name.strip() and name[:1] not in ("#", '"')
    return name if plain else json.dumps(name)


def _unquoted(line: str) -> str:
    if line[0] == '"':
        with contextlib.suppress(ValueError):  # else it is a name in quotes that was typed by hand
            return str(json.loads(line))
    return line


def leave_out(splits: Listing, file: str, root: str | None) -> Listing:
    """Returns the splits without the images that a file names, one a line; ``excluded`` counts them.

    Empty lines and those that begin with '#' are skipped. A line in double quotes is a JSON string, for names that have
    line ends or begin with '#' or a quote. A file in ``root`` that is in no split may be named, too: the list serves
    pretraining, which reads fewer of them.

    Raises:
        BadList: It cannot be read, names what is not there, or leaves a split without images.
    """
    given = UserList("data.exclude", file, _names(splits), root)
    text = given.text("a file with the name of an image a line")
    lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), start=1)]
    found = {given.find(i, _unquoted(line), elsewhere=True) for i, line in lines if line and line[0] != "#"}
    given.refuse()
    kept, counts = {}, {}
    for key, part in splits.parts.items():
        left = [i for i, name in enumerate(part.names) if name not in found]
        if not left and key != "unlabelled":
            raise BadList(f"data.exclude: '{file}' leaves no image of {key}; wanted one at least")
        out = sorted(found.intersection(part.names))
        drawn = f"{part.drawn} without {out!r}" if out else part.drawn
        kept[key], counts[key] = replace(part.take(left), drawn=drawn) if left else None, len(out)
    total = sum(counts.values())
    where = ", ".join(f"{n} {key}" for key, n in counts.items())
    log.info("data.exclude: '%s' leaves out %s (%s)", file, counted(total, "image"), where)
    return replace(splits, **kept, excluded=total)


def _names(splits: Listing) -> list[str]:
    return [name for part in splits.parts.values() for name in part.names]


# ---------------------------------------------------------------------- groups
def with_groups(splits: Listing, how: str, root: str | None) -> Listing:
    """Returns the splits with each image's group: of a CSV (path,group), or a pattern's bracket.

    Raises:
        BadList: The file or the pattern is bad, or images are in no group.
    """
    splits, unlabelled = replace(splits, unlabelled=None), splits.unlabelled  # these are never held out
    names = _names(splits)
    if not os.path.exists(how) and set(how) & set("()[]\\+*?^$|"):
        group = _by_pattern(how, names)
    else:
        group = _by_table(UserList("data.groups", how, names, root))
    if missing := [name for name in names if not group.get(name)]:
        what = f"'{how}' says of {counted(len(missing), 'image')} no group: {listed(missing, 3)}"
        raise BadList(f"data.groups: {what}; wanted one for each image")
    parts = {key: replace(part, groups=np.array([group[n] for n in part.names])) for key, part in splits.parts.items()}
    return replace(splits, **parts, unlabelled=unlabelled)


def _by_pattern(how: str, names: list[str]) -> dict[str, str]:
    wanted = "wanted a CSV file of path,group, or a pattern with one bracket, e.g. '(patient\\d+)_'"
    try:
        pattern = re.compile(how)
    except re.error as error:
        raise BadList(f"data.groups: '{how}' is no file and no pattern ({error}); {wanted}") from None
    if pattern.groups != 1:
        raise BadList(f"data.groups: '{how}' has {pattern.groups} brackets that count; {wanted}")
    return {name: match[1] for name in names if (match := pattern.search(name))}


def _by_table(given: UserList) -> dict[str, str]:
    group = {}
    for line, cells in given.table(("path", "group")):
        name = given.find(line, cells["path"], elsewhere=True)
        if name is not None and group.setdefault(name, cells["group"]) != cells["group"]:
            given.fault(line, f"'{name}' is of '{group[name]}' already; wanted one group an image")
    given.refuse()
    return group


def shared_groups(splits: Listing) -> list[str]:
    """Returns the groups that have images both in train and in val or test."""
    held = [set(part.groups) for part in (splits.val, splits.test) if part is not None and part.groups is not None]
    return sorted(map(str, set(splits.train.groups) & set().union(*held))) if held else []


def groups_of(split: Split) -> str:
    """Returns ``12 groups``, or nothing where there are none."""
    return "" if split.groups is None else counted(len(np.unique(split.groups)), "group")
