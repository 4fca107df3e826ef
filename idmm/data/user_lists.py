"""Lists that people keep of their own images: classes, groups, images to leave out.

A line names an image by its path under ``data.root`` with '/' between (as in ``check.json``), or by
its absolute path. Its folder or its ending may be missing if only one image fits. Each bad line is
a fault.
"""

import codecs
import csv
import functools
import io
import logging
import posixpath
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os.path import abspath, exists, expanduser, isabs, isdir, isfile, join, realpath, relpath
from typing import NamedTuple

import numpy as np

from idmm.data.folder import PARTS, UNLABELLED, images_under, same_place
from idmm.data.split import Groups, Listing, Split, arranged, class_of, composed, split_of
from idmm.errors import Fault, UserError, reason
from idmm.files import expand_home
from idmm.text import counted, listed, one_line

log = logging.getLogger(__name__)

SPLIT = "split.csv"  # list of a run's images with their classes and splits


class Row(NamedTuple):
    """A row of a table."""

    line: int  # its number in the file, from 1
    cells: dict[str, str]  # by column


class UserList:
    """A file whose lines name images. Faults of lines are collected and raised together.

    Args:
        field: Of the config, that names the file.
        file: Its path.
        images: Names of the dataset's images.
        root: Their folder. None: the dataset has no files.
    """

    def __init__(self, field: str, file: str, images: Iterable[str], root: str | None):
        self.field = field
        self.file = file
        self._given_root = root and expanduser(root)  # as the log has it
        self.root = self._given_root and abspath(self._given_root)
        self._names = {composed(name): name for name in images}
        self._faults: list[Fault] = []

    def text(self, expected: str) -> str:
        """Return the whole file. Bytes of names that are not UTF-8 become surrogates.

        Raises:
            UserError: It cannot be read, or is no text. Or it is not UTF-8, and neither is the name
                of any image.
        """
        path = expand_home(self.file)
        try:
            if path.is_fifo():  # it may never end
                raise self._refusal(f"'{self.file}' is a pipe, expected {expected}")
            text = decoded(path.read_bytes())
        except OSError as error:
            hint = ""
            if self.root and isfile(join(self.root, self.file)):
                hint = f"Give its path: {join(self.root, self.file)}"
            raise self._refusal(
                f"cannot read '{self.file}' ({reason(error)}), expected {expected}", hint
            ) from None
        not_utf8 = re.compile("[\udc80-\udcff]").search
        if "\0" in text or (not_utf8(text) and not any(map(not_utf8, self._short_names))):
            raise self._refusal(
                f"'{self.file}' is not UTF-8 text, expected {expected}",
                "Save it as 'CSV UTF-8', e.g. in Excel",
            )
        return text

    def table(self, required: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
        """Read a CSV whose header names the columns ``required``, and may name ``optional`` ones.

        Between cells are commas, semicolons or tabs. Letter case does not matter in the header.

        Raises:
            UserError: It cannot be read, has no such header, or has rows with cells missing, empty
                or without column.
        """
        form = ",".join(required)
        text = self.text(f"a CSV file of {form}")
        first_line = text.lstrip().partition("\n")[0]
        delimiter = max(",;\t", key=first_line.count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = []
        try:
            # Excel may begin with sep=;
            first_row = next((cells for cells in reader if cells and cells[0] != "sep="), [])
            header = [name.strip().lower() for name in first_row]
            columns = [name for name in (*required, *optional) if name in header]
            self._check_header(header, columns, required)
            for cells in filter(any, reader):  # Excel leaves lines of semicolons
                row = Row(reader.line_num, dict.fromkeys(columns, ""))
                rows.append(row)
                if any(cells[len(header) :]):
                    self.fault(
                        row.line, f"has {len(cells)} cells, expected {len(header)} as in the header"
                    )
                for name, cell in zip(header, cells, strict=False):
                    if name == "path":  # it may begin or end with blanks, see find()
                        row.cells[name] = cell
                    elif name in columns:
                        row.cells[name] = cell.strip()
        except csv.Error as error:
            raise self._refusal(
                f"{self.file}:{reader.line_num}: is not CSV ({error}), expected {form}"
            ) from None
        for line, by_column in rows:
            if lacking := [name for name, cell in by_column.items() if not cell.strip()]:
                self.fault(line, f"has no {' and no '.join(lacking)}, expected {','.join(columns)}")
        self.refuse()
        return rows

    def _check_header(
        self, header: list[str], columns: Sequence[str], required: Sequence[str]
    ) -> None:
        """Raise UserError if a column is missing or is there twice."""
        if missing := [name for name in required if name not in columns]:
            form = ",".join(required)
            raise self._refusal(
                f"the header of '{self.file}' lacks {listed(missing)}, expected {form}",
                f"Its first line is '{','.join(header)[:200]}'",
            )
        for name in columns:
            if header.count(name) > 1:
                raise self._refusal(
                    f"the header of '{self.file}' has {name} twice, expected one column"
                )

    def find(self, line: int, text: str, elsewhere: bool = False) -> str | None:
        """Return the name of the image that a line means. None: there is none, which is a fault.

        It is no fault if ``elsewhere`` allows files in the root that are no image of the dataset:
        another split's.
        """
        cell = text.strip()
        matches: list[str] = []
        for path in (text, cell, cell.replace("\\", "/")):
            name = path
            if self.root and isabs(path):
                name = _below(path, self.root)
            name = composed(posixpath.normpath(name))
            if name in self._names:
                return self._names[name]
            is_inside = self.root and not name.startswith("..")
            if elsewhere and is_inside and isfile(join(self.root or "", name)):
                return None
            matches = matches or self._short_names.get(name, [])
        if len(matches) == 1 and (elsewhere or matches[0] in self._names):
            return self._names.get(matches[0])
        if len(matches) > 1:
            self.fault(line, f"{cell!r} fits {listed(matches, 3)}, expected the path of one")
        elif self.root:
            self.fault(line, f"{cell!r} is no image under '{self.root}'")
        else:
            self.fault(line, f"{cell!r} is no image of the dataset")
        return None

    @functools.cached_property
    def _short_names(self) -> dict[str, list[str]]:
        """All images by their names without folder, without ending, without both, on one line."""
        short_names = defaultdict(list)
        images: Iterable[str] = self._names
        if self._given_root:
            images = map(composed, images_under(self._given_root))
        for name in images:
            stem = posixpath.splitext(name)[0]
            file = posixpath.basename(name)
            for short_name in {stem, file, posixpath.basename(stem), one_line(name)}:
                short_names[short_name].append(name)
        return short_names

    def fault(self, line: int, text: str) -> None:
        """Note a fault of a line."""
        self._faults.append(Fault(self.field, f"{self.file}:{line}: {text}"))

    def refuse(self) -> None:
        """Raise UserError if there are faults, with at most 20 of them."""
        if len(self._faults) > 20:
            self._faults[20:] = [Fault(self.field, f"and {len(self._faults) - 20} more")]
        if self._faults:
            raise UserError(*self._faults)

    def _refusal(self, text: str, hint: str = "") -> UserError:
        """Return the error of a file that cannot be used."""
        return UserError(Fault(self.field, text, hint))


def decoded(content: bytes) -> str:
    """Return text in UTF-8 or, after a byte order mark, UTF-16.

    Bytes that are not UTF-8 become surrogates.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", "replace")
    return content.decode("utf-8-sig", "surrogateescape")


# ---------------------------------------------------------------------- classes
class _Labelled(NamedTuple):
    """A row of a list of classes."""

    line: int  # its number in the file, from 1
    label: str
    split: str
    group: str | None  # None: the list has no groups


def read_with_labels(root: str, file: str, labelled: bool) -> Listing:
    """Read the images under ROOT with the classes of a CSV file of path,class.

    Its column ``split`` (train, val or test) gives each image's split. Without one the folders of
    these names do if ROOT has a ``train`` folder, else all images are to train on. Images without a
    row (never those of the folders val and test) are ``unlabelled``, or in train without labels if
    labels are not needed. Those of ROOT/unlabelled are always ``unlabelled``.

    Raises:
        UserError: The file has bad lines, or no class, or no image to train on. Or classes to
            evaluate on that are not trained on.
    """
    images = images_under(root)
    has_parts = isdir(join(root, "train"))
    rows = _label_rows(file, images, root, has_parts)
    names: dict[str, list[str]] = {part: [] for part in PARTS}
    trained = []  # with a label or without
    without_label = []  # those of them that have none
    more = []
    for name in images:
        folder = name.partition("/")[0]
        if name in rows:
            names[rows[name].split].append(name)
        elif has_parts and folder == UNLABELLED:
            more.append(name)
        elif folder == "train" or not has_parts and folder not in PARTS:
            without_label.append(name)
    trained = [name for name in images if name in {*names["train"], *without_label}]
    classes = sorted({rows[name].label for name in names["train"]})
    faults = _class_faults(file, rows.values(), classes)
    if not labelled and trained and (faults or without_label):
        return Listing(_part(root, trained), unlabelled=_part(root, more) or None)
    if faults:
        raise UserError(*faults)
    if len(rows) < len(images):
        log.info(
            "data.labels: '%s' has no row for %d of %s, which are left out if labels are needed",
            file,
            len(images) - len(rows),
            counted(len(images), "image"),
        )
    splits = {}
    for part in filter(names.get, PARTS):
        part_rows = [rows[name] for name in names[part]]
        labels = np.searchsorted(classes, [row.label for row in part_rows])
        groups = None
        if part_rows[0].group is not None:
            groups = np.array([row.group for row in part_rows])
        split = split_of(root, names[part], labels, classes)
        splits[part] = replace(split, groups=groups, whole=False)
    unlabelled = _part(root, sorted([*without_label, *more]))
    return replace(arranged(splits), unlabelled=unlabelled or None)


def _class_faults(file: str, rows: Iterable[_Labelled], classes: list[str]) -> list[Fault]:
    """Return what is wrong with the ``classes`` to train on, and with those to evaluate on."""
    faults = []
    if not classes:
        fault = (
            f"'{file}' has no image to train on, expected two or more classes in the split train"
        )
        return [Fault("data.labels", fault)]
    if len(classes) == 1:
        faults.append(
            Fault(
                "data.labels",
                f"'{file}' has one class to train on ('{classes[0]}'), "
                "expected two or more classes in the split train",
            )
        )
    for part in PARTS[1:]:
        if extra := sorted({row.label for row in rows if row.split == part}.difference(classes)):
            fault = f"'{file}' has classes in {part} that train lacks: {listed(extra)}"
            faults.append(Fault("data.labels", fault))
    return faults


def _part(root: str, names: list[str]) -> Split:
    return replace(split_of(root, names), whole=False)


def _label_rows(file: str, images: list[str], root: str, has_parts: bool) -> dict[str, _Labelled]:
    """Return the row of each image by name.

    ``has_parts``: Without a column split, the folders train, val and test are the splits.
    """
    table = UserList("data.labels", file, images, root)
    rows: dict[str, _Labelled] = {}
    for line, cells in table.table(("path", "class"), ("split", "group")):
        name = table.find(line, cells["path"])
        if name is None:
            continue
        if name in rows:
            table.fault(
                line, f"'{name}' is in line {rows[name].line}, too, expected one row per image"
            )
            continue
        part = "train"
        if "split" in cells:
            part = cells["split"].lower()
            if part not in PARTS:
                table.fault(line, f"the split is '{cells['split']}', expected train, val or test")
        elif has_parts:
            part = name.partition("/")[0].lower()
            if part not in PARTS:
                table.fault(
                    line, f"'{name}' is outside of train, val and test, expected a column split"
                )
        rows[name] = _Labelled(line, class_of(cells["class"]), part, cells.get("group"))
    table.refuse()
    return rows


def class_rows(parts: Mapping[str, Split]) -> Iterator[tuple[str, ...]]:
    """Yield the header of a list for ``data.labels`` and a row per image with a label.

    A row has path, class, split, and the group if there are groups. An image without a group is its
    own.
    """
    header = ("path", "class", "split")
    is_grouped = any(split.groups is not None for split in parts.values())
    yield (*header, "group") if is_grouped else header
    for part, split in parts.items():
        groups = split.names
        if split.groups is not None:
            groups = split.groups.tolist()
        for i in np.flatnonzero(split.known_labels >= 0).tolist():
            name = split.names[i]
            row = (name, split.class_names[split.known_labels[i]], part)
            yield (*row, groups[i] or name) if is_grouped else row


# ---------------------------------------------------------------------- images to leave out
def leave_out(splits: Listing, file: str, root: str | None) -> Listing:
    """Return the splits without the images that a file names, one per line.

    ``excluded`` counts them. Empty lines and those that begin with '#' are skipped. A file in
    ``root`` that is in no split may be named, too: the list serves pretraining, which reads fewer
    of them.

    Raises:
        UserError: It cannot be read, names a missing image, or leaves a split without images.
    """
    names = UserList("data.exclude", file, _names(splits), root)
    text = names.text("a file with the name of one image per line, as idmm data check writes it")
    excluded: set[str | None] = set()
    for i, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            excluded.add(names.find(i, line, elsewhere=True))
    names.refuse()
    parts = {}
    counts = {}
    for key, part in splits.parts.items():
        parts[key] = without(part, excluded)
        counts[key] = len(part) - len(parts[key])
        if not parts[key] and key != "unlabelled":
            fault = f"'{file}' leaves no image of {key}, expected at least one"
            raise UserError(Fault("data.exclude", fault))
    total = sum(counts.values())
    log.info(
        "data.exclude: '%s' leaves out %s (%s)",
        file,
        counted(total, "image"),
        ", ".join(f"{count} {key}" for key, count in counts.items()),
    )
    return replace(splits.with_parts(parts), excluded=total)


def without(split: Split, names: Container[str | None]) -> Split:
    """Return the images of a split that are not named."""
    return split.take([i for i, name in enumerate(split.names) if name not in names])


def _below(path: str, root: str) -> str:
    """Return an absolute path relative to ``root``. Either may go through links."""
    name = relpath(path, root)
    if not name.startswith(".."):
        return name
    return relpath(same_place(path), realpath(root))


def exclude_line(name: str) -> str:
    """Return the line for ``data.exclude`` that names an image."""
    if name.lstrip().startswith("#"):  # a comment
        name = f"./{name}"
    return one_line(name)


def _names(splits: Listing) -> list[str]:
    return [name for part in splits.parts.values() for name in part.names]


# ---------------------------------------------------------------------- groups
def with_groups(splits: Listing, groups: str, root: str | None) -> Listing:
    """Return the splits with each image's group. One without a label may have none: it is its own.

    Raises:
        UserError: As :func:`read_groups`, or images with labels are in no group.
    """
    group_of = read_groups(groups, _names(splits), root)
    names = _names(replace(splits, unlabelled=None))
    if missing := [name for name in names if not group_of.get(name)]:
        raise UserError(
            Fault(
                "data.groups",
                f"'{groups}' gives no group to {counted(len(missing), 'image')}: "
                f"{listed(missing, 3)}, expected one for each image",
            )
        )
    parts = {}
    for key, part in splits.parts.items():
        names_of_groups = [group_of.get(name) or name for name in part.names]
        parts[key] = replace(part, groups=np.array(names_of_groups))
    return splits.with_parts(parts)


def read_groups(groups: str, names: list[str], root: str | None) -> dict[str, str]:
    """Return the group of each named image that has one, by a CSV (path,group) or a pattern's
    bracket.

    Raises:
        UserError: The file or the pattern is bad.
    """
    group_of: dict[str, str] = {}
    if not exists(groups) and set(groups) & set("()[]\\+*?^$|"):
        try:
            pattern = re.compile(groups)
            if pattern.groups != 1:
                raise re.error(f"{pattern.groups} brackets")
        except re.error as error:
            raise UserError(
                Fault(
                    "data.groups",
                    f"'{groups}' is no file and no pattern ({error}), expected a CSV file of "
                    "path,group, or a pattern with one bracket, e.g. '(patient\\d+)_'",
                )
            ) from None
        for name in names:
            if match := pattern.search(name):
                group_of[name] = match[1]
        return group_of
    table = UserList("data.groups", groups, names, root)
    for line, cells in table.table(("path", "group")):
        image = table.find(line, cells["path"], elsewhere=True)
        if image is None:
            continue
        known = group_of.setdefault(image, cells["group"])
        if known != cells["group"]:
            table.fault(line, f"'{image}' is of '{known}' already, expected one group per image")
    table.refuse()
    return group_of


def groups_of(groups: Groups) -> str:
    """Return ``12 groups``, of the name of each image's group, [N]."""
    return counted(len(np.unique(groups)), "group")
