"""What a section of a report's page is made of; the template has a macro for each kind."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from idmm.pictures import save
from idmm.report.pictures import image_sheet
from idmm.report.svg import ImageBlock, data_uri, sheets, themed_svg, webp

_NUMBER = r"|[+−-]?[\d.,]+(e[+-]?\d+)?( to [\d.]+| M| s| min| h \d+ min| days)?"


class Part:
    """What the template shows by the name of its class."""

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    def save(self, folder: Path) -> None:
        """Writes what lies beside the page, if anything."""


@dataclass
class Text(Part):
    """A paragraph; ``quiet`` ones explain, ``loud`` ones are what to remember."""

    text: str
    tone: str = ""


@dataclass
class TableOf(Part):
    """A table; columns of numbers stand at the right, but for the first one, which names the rows."""

    heads: list[str]
    rows: list[list[Any]]
    caption: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Whether each column's cells begin with a digit, or are empty."""
        columns = zip(*self.rows, strict=True) if self.rows else [[""]] * len(self.heads)
        texts = [[str(cell) for cell in column] for column in columns]
        found = [all(re.fullmatch(_NUMBER, text) for text in column) and any(column) for column in texts]
        return [False, *found[1:]]


@dataclass
class Picture(Part):
    """A figure: drawn into the page, in narrow windows another one if there is one, and a PNG beside the page."""

    name: str
    figure: Figure
    alt: str
    caption: str = ""
    narrow: Figure | None = None

    @cached_property
    def sources(self) -> list[tuple[str, int, int]]:
        """Of the figure, and of the narrow one, if any: the source, and width and height in the page (CSS pixels)."""
        figures = [one for one in (self.figure, self.narrow) if one is not None]
        drawn = [data_uri("image/svg+xml", themed_svg(one).encode("utf-8", "replace")) for one in figures]
        return [(svg, *np.rint(96 * one.get_size_inches())) for svg, one in zip(drawn, figures, strict=True)]

    def save(self, folder: Path) -> None:
        save(self.figure, folder / self.name)


@dataclass
class Raster(Part):
    """A picture that is there already."""

    source: str
    alt: str
    pixels: int  # wide, 1.6 times as many as it is shown at


@dataclass
class Tabs(Part):
    """Pictures of which one is shown at a time, on paper all."""

    name: str  # one word, no two of a page alike
    pictures: list[tuple[str, Picture]]  # with a label each

    def save(self, folder: Path) -> None:
        for _, picture in self.pictures:
            picture.save(folder)


@dataclass
class Sheets(Part):
    """Sheets of images side by side, each under its title; a PNG of that name beside the page."""

    name: str
    blocks: list[ImageBlock]
    caption: str = ""
    note: str = ""  # below the images in the PNG

    @property
    def sheets(self) -> list[tuple[str, str, int, int]]:
        """Title, source, width and height of each."""
        return [(title.replace("\n", " "), webp(one), *one.shape[1::-1]) for title, one in sheets(self.blocks)]

    def save(self, folder: Path) -> None:
        image_sheet(self.blocks, folder / self.name, self.note)


@dataclass
class Thumbs(Part):
    """Images with a few words under each."""

    items: list[tuple[str, list[str], str]]  # source (empty: none), lines, and whole name


@dataclass
class Folded(Part):
    """A list of keys and values that is shown when asked for."""

    title: str
    pairs: list[tuple[str, str]]


@dataclass
class Section:
    """A part of the page, in the list of contents."""

    id: str
    title: str
    level: int = 2
    parts: list[Part] = field(default_factory=list)
