"""Lists that people keep of their own images: classes, groups, images to leave out. Each bad line
is a fault.

A line names an image by its path under ``data.root`` with '/' between (as in ``check.json``), or by
its absolute path. Its folder or its ending may be missing if only one image fits.
"""

import codecs
import csv
import functools
import io
import logging
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from os.path import abspath, exists, expanduser, isabs, isdir, isfile, join, realpath, relpath

import numpy as np

from idmm.data.folder import PARTS, UNLABELLED, images_under, same_place
from idmm.data.split import Listing, Split, arranged, class_of, composed, split_of
from idmm.errors import UserError, reason
from idmm.files import expand_home
from idmm.text import capped, counted, listed, one_line

log = logging.getLogger(__name__)

SPLIT = "split.csv"  # list of a run's images with their classes and splits


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
        self.root = root and abspath(self._given_root)
        self._names = {composed(name): name for name in images}
        self._faults = []

    def text(self, expected: str) -> str:
        """Return the whole file. Bytes of names that are not UTF-8 become surrogates.

        Raises:
            UserError: It cannot be read, or is no text. Or it is not UTF-8, and neither is the name
                of any image.
        """
        try:
            path = expand_home(self.file)
            if path.is_fifo():  # it may never end
                raise UserError(f"{self.field}: '{self.file}' is a pipe, expected {expected}")
            text = decoded(path.read_bytes())
        except OSError as error:
            hint = ""
            if self.root is not None and isfile(join(self.root, self.file)):
                hint = f". Give its path: {join(self.root, self.file)}"
            line = f"{self.field}: cannot read '{self.file}' ({reason(error)}), expected {expected}{hint}"
            raise UserError(line) from None
        not_utf8 = re.compile("[\udc80-\udcff]").search
        if "\0" in text or (not_utf8(text) and not any(map(not_utf8, self._short_names))):
            raise UserError(
                f"{self.field}: '{self.file}' is not UTF-8 text, expected {expected}. "
                "Save it as 'CSV UTF-8', e.g. in Excel"
            )
        return text

    def table(
        self, required: tuple[str, ...], optional: tuple[str, ...] = ()
    ) -> list[tuple[int, dict[str, str]]]:
        """Read a CSV whose header names the columns ``required``, and may name ``optional`` ones.

        Between cells are commas, semicolons or tabs. Letter case does not matter in the header.

        Returns:
            Each row's line number and its cells by column.

        Raises:
            UserError: It cannot be read, has no such header, or has rows with cells missing, empty
                or without column.
        """
        form = ",".join(required)
        text = self.text(f"a CSV file of {form}")
        first_line = text.lstrip().partition("\n")[0]
        delimiter = max(",;\t", key=first_line.count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        try:
            # Excel may begin with sep=;
            header = next((cells for cells in reader if cells and cells[0] != "sep="), [])
            header = [name.strip().lower() for name in header]
            columns = [name for name in (*required, *optional) if name in header]
            if missing := [name for name in required if name not in header]:
                raise UserError(
                    f"{self.field}: the header of '{self.file}' lacks {listed(missing)}, expected {form}. "
                    f"Its first line is '{','.join(header)[:200]}'"
                )
            if twice := [name for name in columns if header.count(name) > 1]:
                raise UserError(
                    f"{self.field}: the header of '{self.file}' has {twice[0]} twice, expected one column"
                )
            rows = []
            for cells in filter(any, reader):  # Excel leaves lines of semicolons
                if any(cells[len(header) :]):
                    self.fault(
                        reader.line_num,
                        f"has {len(cells)} cells, expected {len(header)} as in the header",
                    )
                cells = dict(zip(header, cells, strict=False))
                # a path may begin or end with blanks, see find()
                cells = {name: cells.get(name, "") for name in columns}
                cells |= {name: cell.strip() for name, cell in cells.items() if name != "path"}
                rows.append((reader.line_num, cells))
        except csv.Error as error:
            raise UserError(
                f"{self.field}: {self.file}:{reader.line_num}: is not CSV ({error}), expected {form}"
            ) from None
        for line, cells in rows:
            if lacking := [name for name, cell in cells.items() if not cell.strip()]:
                self.fault(line, f"has no {' and no '.join(lacking)}, expected {','.join(columns)}")
        self.refuse()
        return rows

    def find(self, line: int, text: str, elsewhere: bool = False) -> str | None:
        """Return the name of the image that a line means. None: there is none, which is a fault.

        It is no fault if ``elsewhere`` allows files in the root that are no image of the dataset:
        another split's.
        """
        matches = []
        for path in (text, text.strip(), text.strip().replace("\\", "/")):
            if self.root is not None and isabs(path):
                name = _below(path, self.root)
            else:
                name = path
            name = composed(posixpath.normpath(name))
            if name in self._names:
                return self._names[name]
            inside = self.root is not None and not name.startswith("..")
            if elsewhere and inside and isfile(join(self.root, name)):
                return None
            matches = matches or self._short_names.get(name, [])
        if len(matches) == 1 and (elsewhere or matches[0] in self._names):
            return self._names.get(matches[0])
        if self.root:
            where = f" under '{self.root}'"
        else:
            where = " of the dataset"
        if matches[1:]:
            what = f"fits {listed(matches, 3)}, expected the path of one"
        else:
            what = f"is no image{where}"
        self.fault(line, f"{text.strip()!r} {what}")
        return None

    @functools.cached_property
    def _short_names(self) -> dict[str, list[str]]:
        """All images by their names without folder, without ending, without both, and on one
        line."""
        short_names = defaultdict(list)
        for name in map(composed, images_under(self._given_root) if self.root else self._names):
            stem = posixpath.splitext(name)[0]
            for short_name in {
                stem,
                posixpath.basename(name),
                posixpath.basename(stem),
                one_line(name),
            }:
                short_names[short_name].append(name)
        return short_names

    def fault(self, line: int, what: str) -> None:
        """Note a fault of a line."""
        self._faults.append(f"{self.field}: {self.file}:{line}: {what}")

    def refuse(self) -> None:
        """Raise UserError with one line per fault, if there are faults."""
        if self._faults:
            raise UserError(*capped(self._faults, begin=f"{self.field}: "))


def decoded(content: bytes) -> str:
    """Return text in UTF-8 or, after a byte order mark, UTF-16. Bytes that are not UTF-8 become
    surrogates."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", "replace")
    return content.decode("utf-8-sig", "surrogateescape")


# ---------------------------------------------------------------------- classes
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
    inside = "train/" if isdir(join(root, "train")) else ""
    rows = _label_rows(root, file, images, folders=bool(inside))
    names = {
        part: [name for name in images if name in rows and rows[name]["split"] == part]
        for part in PARTS
    }
    classes = sorted({rows[name]["class"] for name in names["train"]})
    faults = []
    if len(classes) < 2:
        if classes:
            what = f"one class to train on ('{classes[0]}')"
        else:
            what = "no image to train on"
        faults.append(
            f"data.labels: '{file}' has {what}, expected two or more classes in the split train"
        )
    for part in PARTS[1:]:
        extra = sorted({rows[name]["class"] for name in names[part]}.difference(classes))
        if classes and extra:
            faults.append(
                f"data.labels: '{file}' has classes in {part} that train lacks: {listed(extra)}"
            )
    unnamed = [name for name in images if name not in rows]
    more = [name for name in unnamed if inside and name.startswith(f"{UNLABELLED}/")]
    without_label = {
        name
        for name in unnamed
        if name.startswith(inside) and not name.startswith(("val/", "test/"))
    }
    trained = without_label.union(names["train"])
    train = [name for name in images if name in trained]
    if not labelled and train and (faults or without_label):
        return Listing(_files(root, train), unlabelled=_files(root, more))
    if faults:
        raise UserError(*faults)
    if unnamed:
        what = f"{len(unnamed)} of {counted(len(images), 'image')}"
        log.info(
            "data.labels: '%s' has no row for %s, which are left out if labels are needed",
            file,
            what,
        )
    splits = {}
    for part in filter(names.get, PARTS):
        split = _files(root, names[part])
        labels = np.searchsorted(classes, [rows[name]["class"] for name in split.names])
        groups = [rows[name]["group"] for name in split.names if "group" in rows[name]]
        splits[part] = replace(
            split, labels=labels, classes=classes, groups=np.array(groups) if groups else None
        )
    return replace(arranged(splits), unlabelled=_files(root, sorted([*without_label, *more])))


def _files(root: str, names: list[str]) -> Split | None:
    if names:
        return replace(split_of(root, names), whole=False)
    return None


def _label_rows(
    root: str, file: str, images: list[str], folders: bool
) -> dict[str, dict[str, str]]:
    """Return class, split and, if there is that column, group of images by name.

    ``folders``: Without a column split, the folders train, val and test are the splits.
    """
    table = UserList("data.labels", file, images, root)
    rows = {}
    line_of = {}
    for line, cells in table.table(("path", "class"), ("split", "group")):
        name = table.find(line, cells["path"])
        if name in rows:
            table.fault(
                line, f"'{name}' is in line {line_of[name]}, too, expected one row per image"
            )
        elif name is not None:
            part = cells.get("split", name.partition("/")[0] if folders else "train").lower()
            if part not in PARTS and "split" in cells:
                table.fault(line, f"the split is '{cells['split']}', expected train, val or test")
            elif part not in PARTS:
                table.fault(
                    line, f"'{name}' is outside of train, val and test, expected a column split"
                )
            rows[name], line_of[name] = (
                {**cells, "class": class_of(cells["class"]), "split": part},
                line,
            )
    table.refuse()
    return rows


def class_rows(parts: dict[str, Split]) -> Iterator[tuple]:
    """Yield the header of a list for ``data.labels`` and a row per image with a label.

    A row has path, class, split, and the group if there are groups. An image without a group is its
    own.
    """
    grouped = any(split.groups is not None for split in parts.values())
    columns = 4 if grouped else 3
    yield ("path", "class", "split", "group")[:columns]
    for part, split in parts.items():
        for i in np.flatnonzero(split.labels >= 0):
            group = (split.groups is not None and split.groups[i]) or split.names[i]
            yield (split.names[i], split.classes[split.labels[i]], part, group)[:columns]


# ---------------------------------------------------------------------- images to leave out
def leave_out(splits: Listing, file: str, root: str | None) -> Listing:
    """Return the splits without the images that a file names, one per line. ``excluded`` counts
    them.

    Empty lines and those that begin with '#' are skipped. A file in ``root`` that is in no split
    may be named, too: the list serves pretraining, which reads fewer of them.

    Raises:
        UserError: It cannot be read, names a missing image, or leaves a split without images.
    """
    names = UserList("data.exclude", file, _names(splits), root)
    text = names.text("a file with the name of one image per line, as idmm data check writes it")
    excluded = set()
    for i, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            excluded.add(names.find(i, line, elsewhere=True))
    names.refuse()
    parts = {}
    counts = {}
    for key, part in splits.parts.items():
        parts[key] = without(part, excluded)
        if parts[key] is None and key != "unlabelled":
            raise UserError(
                f"data.exclude: '{file}' leaves no image of {key}, expected at least one"
            )
        counts[key] = len(part) - len(parts[key] or ())
    total = sum(counts.values())
    per_part = ", ".join(f"{n} {key}" for key, n in counts.items())
    log.info("data.exclude: '%s' leaves out %s (%s)", file, counted(total, "image"), per_part)
    return replace(splits, **parts, excluded=total)


def without(split: Split, names: set[str]) -> Split | None:
    """Return the images of a split that are not named. None: there are none."""
    remaining = [i for i, name in enumerate(split.names) if name not in names]
    if remaining:
        return split.take(remaining)
    return None


def _below(path: str, root: str) -> str:
    """Return an absolute path relative to ``root``. Either may go through links."""
    name = relpath(path, root)
    if not name.startswith(".."):
        return name
    return relpath(same_place(path), realpath(root))


def exclude_line(name: str) -> str:
    """Return the line for ``data.exclude`` that names an image. A '#' at its beginning would make
    it a comment."""
    return one_line(f"./{name}" if name.lstrip().startswith("#") else name)


def _names(splits: Listing) -> list[str]:
    return [name for part in splits.parts.values() for name in part.names]


# ---------------------------------------------------------------------- groups
def with_groups(splits: Listing, groups: str, root: str | None) -> Listing:
    """Return the splits with each image's group. An image without a label may have none: it is its
    own.

    Raises:
        UserError: As :func:`read_groups`, or images with labels are in no group.
    """
    group = read_groups(groups, _names(splits), root)
    names = _names(replace(splits, unlabelled=None))
    if missing := [name for name in names if not group.get(name)]:
        raise UserError(
            f"data.groups: '{groups}' gives no group to {counted(len(missing), 'image')}: "
            f"{listed(missing, 3)}, expected one for each image"
        )
    parts = {}
    for key, part in splits.parts.items():
        parts[key] = replace(
            part, groups=np.array([group.get(name) or name for name in part.names])
        )
    return replace(splits, **parts)


def read_groups(groups: str, names: list[str], root: str | None) -> dict[str, str]:
    """Return the group of each named image that has one, by a CSV (path,group) or a pattern's
    bracket.

    Raises:
        UserError: The file or the pattern is bad.
    """
    if not exists(groups) and set(groups) & set("()[]\\+*?^$|"):
        try:
            pattern = re.compile(groups)
            if pattern.groups != 1:
                raise re.error(f"{pattern.groups} brackets")
        except re.error as error:
            expected = (
                "a CSV file of path,group, or a pattern with one bracket, e.g. '(patient\\d+)_'"
            )
            raise UserError(
                f"data.groups: '{groups}' is no file and no pattern ({error}), expected {expected}"
            ) from None
        return {name: match[1] for name in names if (match := pattern.search(name))}
    table = UserList("data.groups", groups, names, root)
    group = {}
    for line, cells in table.table(("path", "group")):
        name = table.find(line, cells["path"], elsewhere=True)
        if name is not None and group.setdefault(name, cells["group"]) != cells["group"]:
            table.fault(
                line, f"'{name}' is of '{group[name]}' already, expected one group per image"
            )
    table.refuse()
    return group


def groups_of(split: Split) -> str:
    """Return ``12 groups``."""
    return counted(len(np.unique(split.groups)), "group")
