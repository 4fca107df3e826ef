"""A page: one HTML file with sections of texts, tables and embedded pictures."""

import base64
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from idmm.figures import DPI
from idmm.files import idmm_version

_NUMBER = re.compile(r"(|—|failed|[+−-]?\d.*)", re.DOTALL)  # a cell of a column of numbers


class Cell(NamedTuple):
    """A table's cell with a style."""

    text: str
    below: str = ""  # a small line
    tone: str = ""  # CSS class: up, down, level or failed
    bold: bool = False
    sign: str = ""  # after the text. It takes no room, so that numbers stay in line

    def __str__(self) -> str:
        return self.text


class TableOf(NamedTuple):
    """A table. The first column names the rows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    caption: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Whether each column has numbers, which are right-aligned."""
        columns = zip(*self.rows, strict=True)
        next(columns)
        return [False, *map(_is_numeric, columns)]


def _is_numeric(column: Sequence[str | Cell]) -> bool:
    return all(_NUMBER.fullmatch(str(cell)) for cell in column)


class Picture(NamedTuple):
    """A PNG file, of which the page has a copy."""

    path: Path
    caption: str

    @property
    def source(self) -> str:
        """The picture as a data URL."""
        return f"data:image/png;base64,{base64.b64encode(self.path.read_bytes()).decode()}"

    @property
    def width(self) -> int:
        """Its width in CSS pixels."""
        with Image.open(self.path) as image:
            return round(image.width * 96 / DPI)


class Section(NamedTuple):
    """A part of the page. A text is a paragraph."""

    title: str
    parts: Sequence[str | TableOf | Picture]


def environment(escaped: Callable[[str], str], **delimiters: Any) -> Environment:
    """Return the templates of a format. They print all data escaped by ``escaped``."""

    def finalize(value: object) -> Markup:
        if isinstance(value, Markup):  # what a macro made
            return value
        return Markup(escaped(str(value)))

    return Environment(
        loader=PackageLoader("idmm.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **delimiters,
    )


def readable(text: str) -> str:
    """Return a name without control characters and bytes outside UTF-8.

    No page and no font can show these.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


HTML = environment(lambda text: escape(readable(text)))


def html(title: str, intro: list[str], sections: list[Section]) -> str:
    """Return the page as text."""
    template = HTML.get_template("page.html.j2")
    return template.render(title=title, intro=intro, sections=sections, version=idmm_version())
