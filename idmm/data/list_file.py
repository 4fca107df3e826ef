"""A file whose lines name images. Each bad line is a fault.

A line names an image by its path under ``data.root`` with '/' between (as in ``check.json``), or by
its absolute path. Its folder or its ending may be missing if only one image fits.
"""

import codecs
import csv
import functools
import io
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from os.path import abspath, expanduser, isabs, isfile, join, realpath, relpath
from typing import NamedTuple

from idmm.data.folder import images_under, same_place
from idmm.data.split import composed
from idmm.errors import Fault, UserError, reason
from idmm.files import expand_home
from idmm.text import listed, one_line


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

    def table(
        self, required: Sequence[str], optional: Sequence[str] = (), fillable: Sequence[str] = ()
    ) -> list[Row]:
        """Read a CSV whose header names the columns ``required``, and may name ``optional`` ones.

        Between cells are commas, semicolons or tabs. Letter case does not matter in the header.
        Cells of ``fillable`` columns may be empty.

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
            empty = [name for name, cell in by_column.items() if not cell.strip()]
            if lacking := [name for name in empty if name not in fillable]:
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
        return UserError.of(self.field, text, hint)


def decoded(content: bytes) -> str:
    """Return text in UTF-8 or, after a byte order mark, UTF-16.

    Bytes that are not UTF-8 become surrogates.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", "replace")
    return content.decode("utf-8-sig", "surrogateescape")


def _below(path: str, root: str) -> str:
    """Return an absolute path relative to ``root``. Either may go through links."""
    name = relpath(path, root)
    if not name.startswith(".."):
        return name
    return relpath(same_place(path), realpath(root))
