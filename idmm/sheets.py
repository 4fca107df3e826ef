"""Sheets of thumbnails with captions."""

import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path

from idmm.figures import COLOURS, save, shortened

CELL, LARGE = 1.05, 1.9  # side of a thumbnail (inches)
GAP, LINE, EDGE = 0.14, 0.145, 0.18  # between thumbnails, a line of a caption, the margin (inches)
HEAD, TEXT = 0.66, 8  # above the rows (inches), size of the texts left of them (points)
COLUMNS = 6  # of large thumbnails
BLUE, ORANGE = COLOURS[0], COLOURS[1]


class Tile(NamedTuple):
    """A thumbnail."""

    image: np.ndarray  # uint8 [H, W, 3]
    caption: str  # below it. The end of each line that fits is drawn
    frame: str | None = None  # colour of its frame and caption


def one_of_each(pairs: Sequence[tuple[Hashable, Hashable]]) -> dict[int, int]:
    """Group the images that pairs connect, directly or through others. Return, for each group in the order of the
    pairs, the number of its first pair and how many images it has."""
    groups: dict[Hashable, set] = {}
    for pair in pairs:
        joined = set(pair).union(*(groups[image] for image in pair if image in groups))
        groups.update(dict.fromkeys(joined, joined))
    first: dict[int, int] = {}
    for number, (image, _) in enumerate(pairs):
        first.setdefault(id(groups[image]), number)
    return {number: len(groups[pairs[number][0]]) for number in first.values()}


def in_rows(tiles: list) -> list[tuple[str, list]]:
    """Return large tiles as rows of a sheet."""
    return [("", tiles[start : start + COLUMNS]) for start in range(0, len(tiles), COLUMNS)]


def caption_sheet(
    rows: Sequence[tuple[str, Sequence[Tile]]], path: str | Path, title: str, note: str = "", cell: float = CELL
) -> None:
    """Draw rows of thumbnails.

    Args:
        rows: For each row a text and its thumbnails. The texts are in a column on the left, unless all are empty.
        path: PNG to write.
        title: Above the picture.
        note: Below the title, one line on colours and captions.
        cell: Side of a thumbnail (inches).
    """
    lines = max(tile.caption.count("\n") + 1 for _, tiles in rows for tile in tiles)
    text_width = max(_text_width(line, TEXT) for text, _ in rows for line in text.split("\n"))
    left = EDGE + (text_width + GAP if text_width else 0)
    pitch = cell + LINE * lines + GAP
    width = left + max(len(tiles) for _, tiles in rows) * (GAP + cell) - GAP + EDGE
    width = max(width, EDGE * 2 + max(_text_width(note, 7.5), _text_width(title, 11, weight="bold")))
    height = HEAD + len(rows) * pitch + EDGE - GAP
    figure = Figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))  # one for all, in inches: one per picture takes longer than the pictures
    axis.set_axis_off()
    axis.set(xlim=(0, width), ylim=(0, height))
    style = {"va": "center", "parse_math": False}
    axis.text(EDGE, height - 0.24, title, fontsize=11, weight="bold", **style)
    axis.text(EDGE, height - 0.45, note, fontsize=7.5, color="0.35", **style)
    for row, (text, tiles) in enumerate(rows):
        top = height - HEAD - row * pitch
        axis.text(EDGE, top - cell / 2, text, fontsize=TEXT, linespacing=1.35, **style)
        for column, tile in enumerate(tiles):
            _draw(axis, tile, left + column * (GAP + cell), top, cell)
    save(figure, path)


def _text_width(text: str, size: float, **font) -> float:
    """Return the width of a line of text of ``size`` points (inches)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        text = text.encode("utf-8", "replace").decode()
        return text_to_path.get_text_width_height_descent(text, FontProperties(size=size, **font), False)[0] / 72


def _draw(axis: Axes, tile: Tile, x: float, top: float, cell: float) -> None:
    """Draw a thumbnail whose upper left corner is at (x, top), in inches from the lower left."""
    h, w = tile.image.shape[:2]
    width, height = cell * w / max(h, w), cell * h / max(h, w)
    left, bottom = x + (cell - width) / 2, top - (cell + height) / 2
    interpolation = "nearest" if max(h, w) < 48 else "antialiased"
    extent = (left, left + width, bottom, bottom + height)
    axis.imshow(tile.image, extent=extent, aspect="auto", interpolation=interpolation)
    edge = {"edgecolor": tile.frame or "0.8", "linewidth": 2.0 if tile.frame else 0.5}
    axis.add_patch(Rectangle((left, bottom), width, height, fill=False, **edge))
    style = {"fontsize": 6.3, "color": tile.frame or "0.25", "va": "top", "ha": "center", "linespacing": 1.2}
    axis.text(x + cell / 2, top - cell - 0.045, shortened(tile.caption, int(18.1 * cell)), parse_math=False, **style)
