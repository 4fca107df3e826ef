"""Sheets of thumbnails in rows, each with a caption."""

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

from idmm.figures.style import COLOURS, save, shortened

CELL, LARGE = 1.05, 1.9  # side of a thumbnail (inches)
GAP, LINE, EDGE = 0.14, 0.145, 0.18  # between thumbnails, a line of a caption, the margin (inches)
HEAD, TEXT = 0.66, 8  # above the rows (inches), size of the texts left of them (points)
ACROSS = 6  # large thumbnails in a row
BLUE, ORANGE = COLOURS[0], COLOURS[1]


class Tile(NamedTuple):
    """A thumbnail."""

    image: np.ndarray  # uint8 [H, W, 3]
    caption: str  # below it; lines are shortened to the end that fits
    frame: str | None = None  # colour of a frame around it and of the caption


def one_of_each(pairs: Sequence[tuple[Hashable, Hashable]]) -> dict[int, int]:
    """Returns, for each group of images that pairs join, directly or through others, the number of its first pair, and
    how many images the group has; in the order of the pairs."""
    group: dict[Hashable, set] = {}
    for pair in pairs:
        joined = set(pair).union(*(group[image] for image in pair if image in group))
        group.update(dict.fromkeys(joined, joined))
    first: dict[int, int] = {}
    for number, (image, _) in enumerate(pairs):
        first.setdefault(id(group[image]), number)
    return {number: len(group[pairs[number][0]]) for number in first.values()}


def in_rows(tiles: list, columns: int = ACROSS) -> list[tuple[str, list]]:
    """Returns tiles as rows of a sheet."""
    return [("", tiles[start : start + columns]) for start in range(0, len(tiles), columns)]


def caption_sheet(
    rows: Sequence[tuple[str, Sequence[Tile]]], path: str | Path, title: str, note: str = "", cell: float = CELL
) -> None:
    """Draws rows of thumbnails.

    Args:
        rows: For each row a text (left of it; empty everywhere: there is no such column) and its thumbnails.
        path: PNG to write.
        title: Above the picture.
        note: Below the title, one line: what colours and captions mean.
        cell: Side of a thumbnail (inches).
    """
    lines = max(tile.caption.count("\n") + 1 for _, tiles in rows for tile in tiles)
    beside = max(_wide(line, TEXT) for text, _ in rows for line in text.split("\n"))
    left = EDGE + (beside + GAP if beside else 0)
    pitch = cell + LINE * lines + GAP
    across = max(len(tiles) for _, tiles in rows) * (GAP + cell)
    width, height = left + across - GAP + EDGE, HEAD + len(rows) * pitch + EDGE - GAP
    width = max(width, EDGE * 2 + max(_wide(note, 7.5), _wide(title, 11, weight="bold")))
    figure = Figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))  # one for all, in inches: an axis each takes longer than the pictures
    axis.set_axis_off()
    axis.set(xlim=(0, width), ylim=(0, height))
    said = {"va": "center", "parse_math": False}
    axis.text(EDGE, height - 0.24, title, fontsize=11, weight="bold", **said)
    axis.text(EDGE, height - 0.45, note, fontsize=7.5, color="0.35", **said)
    for row, (text, tiles) in enumerate(rows):
        x, top = left, height - HEAD - row * pitch
        axis.text(EDGE, top - cell / 2, text, fontsize=TEXT, linespacing=1.35, **said)
        for tile in tiles:
            _draw(axis, tile, x, top, cell)
            x += GAP + cell
    save(figure, path)


def _wide(text: str, size: float, **font) -> float:
    """The width of a line of text of so many points (inches)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        plain = text.encode("utf-8", "replace").decode()
        return text_to_path.get_text_width_height_descent(plain, FontProperties(size=size, **font), False)[0] / 72


def _draw(axis: Axes, tile: Tile, x: float, top: float, cell: float) -> None:
    """Draws a thumbnail whose upper left corner is at (x, top), in inches from below left."""
    h, w = tile.image.shape[:2]
    wide, high = cell * w / max(h, w), cell * h / max(h, w)
    left, low = x + (cell - wide) / 2, top - (cell + high) / 2
    way = "nearest" if max(h, w) < 48 else "antialiased"
    axis.imshow(tile.image, extent=(left, left + wide, low, low + high), aspect="auto", interpolation=way)
    edge = {"edgecolor": tile.frame or "0.8", "linewidth": 2.0 if tile.frame else 0.5}
    axis.add_patch(Rectangle((left, low), wide, high, fill=False, **edge))
    look = {"fontsize": 6.3, "color": tile.frame or "0.25", "va": "top", "ha": "center", "linespacing": 1.2}
    axis.text(x + cell / 2, top - cell - 0.045, shortened(tile.caption, int(18.1 * cell)), parse_math=False, **look)
