"""What a section of a report's page is made of; the template has a macro for each kind."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from matplotlib.figure import Figure

from idmm.report.svg import data_uri, size_of, themed_svg

_NUMBER = r"|[+−-]?[\d.,]+(e[+-]?\d+)?( to [\d.]+| M| s| min| h \d+ min| days)?"


@dataclass
class Text:
    """A paragraph; ``quiet`` ones explain, ``loud`` ones are what to remember."""

    text: str
    tone: str = ""
    kind: str = "text"


@dataclass
class TableOf:
    """A table; columns of numbers stand at the right, but for the first one, which names the rows."""

    heads: list[str]
    rows: list[list[Any]]
    caption: str = ""
    kind: str = "table"

    @property
    def numeric(self) -> list[bool]:
        """Whether each column's cells begin with a digit, or are empty."""
        columns = zip(*self.rows, strict=True) if self.rows else [[""]] * len(self.heads)
        found = [all(map(_numeric, column)) and any(map(str, column)) for column in columns]
        return [False, *found[1:]]


def _numeric(cell: Any) -> bool:
    return re.fullmatch(_NUMBER, str(cell)) is not None


@dataclass
class Picture:
    """A figure: drawn into the page, and a PNG of that name beside it."""

    name: str
    figure: Figure
    alt: str
    caption: str = ""
    kind: str = "picture"

    @cached_property
    def source(self) -> str:
        return data_uri("image/svg+xml", themed_svg(self.figure).encode("utf-8", "replace"))

    @property
    def size(self) -> tuple[int, int]:
        return size_of(self.figure)


@dataclass
class Raster:
    """A picture that is there already."""

    source: str
    alt: str
    pixels: int  # wide, 1.6 times as many as it is shown at
    kind: str = "raster"


@dataclass
class Tabs:
    """Pictures of which one is shown at a time, on paper all."""

    name: str  # one word, no two of a page alike
    pictures: list[tuple[str, Picture]]  # with a label each
    kind: str = "tabs"


@dataclass
class Sheets:
    """Sheets of images side by side, each under its title; ``blocks`` also goes into a PNG of that name."""

    name: str
    blocks: list
    sheets: list[tuple[str, str, int, int]]  # title, source, width and height
    caption: str = ""
    kind: str = "sheets"


@dataclass
class Thumbs:
    """Images with a few words under each."""

    items: list[tuple[str, list[str], str]]  # source (empty: none), lines, and whole name
    kind: str = "thumbs"


@dataclass
class Folded:
    """A list of keys and values that is shown when asked for."""

    title: str
    pairs: list[tuple[str, str]]
    kind: str = "folded"


@dataclass
class Section:
    """A part of the page, in the list of contents."""

    id: str
    title: str
    level: int = 2
    parts: list = field(default_factory=list)
