"""Sheets of thumbnails in rows, each with a caption."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from idmm.pictures import COLOURS, save, shortened

CELL, GAP, LINE, EDGE = (
    1.05,
    0.14,
    0.145,
    0.18,
)  # of a thumbnail, between them, a line of a caption, the margin (inches)
HEAD, TEXT = 0.62, 1.75  # above the rows, and left of them where rows have texts (inches)
BLUE, ORANGE = COLOURS[0], COLOURS[1]


class Tile(NamedTuple):
    """A thumbnail."""

    image: np.ndarray  # uint8 [H, W, 3]
    caption: str  # below it; lines are shortened to the end that fits
    frame: str | None = None  # colour of a frame around it and of the caption


def caption_sheet(rows: Sequence[tuple[str, Sequence[Tile]]], path: str | Path, title: str, note: str = "") -> None:
    """Draws rows of thumbnails.

    Args:
        rows: For each row a text (left of it; empty everywhere: there is no such column) and its thumbnails.
        path: PNG to write.
        title: Above the picture.
        note: Below the title, one line: what colours and captions mean.
    """
    lines = max(tile.caption.count("\n") + 1 for _, tiles in rows for tile in tiles)
    columns, left = max(len(tiles) for _, tiles in rows), EDGE + (TEXT if any(text for text, _ in rows) else 0)
    pitch = CELL + LINE * lines + GAP
    width, height = left + columns * (CELL + GAP) - GAP + EDGE, HEAD + len(rows) * pitch + EDGE - GAP
    width = max(width, EDGE * 2 + 0.068 * max(len(note), 1.3 * len(title)))
    figure = Figure(figsize=(width, height))
    figure.text(EDGE / width, 1 - 0.24 / height, title, fontsize=11, weight="bold", va="center")
    figure.text(EDGE / width, 1 - 0.45 / height, note, fontsize=7.5, color="0.35", va="center")
    for row, (text, tiles) in enumerate(rows):
        top = height - HEAD - row * pitch
        figure.text(EDGE / width, (top - CELL / 2) / height, text, fontsize=8, va="center", linespacing=1.35)
        for column, tile in enumerate(tiles):
            _draw(figure, tile, left + column * (CELL + GAP), top, width, height)
    save(figure, path)


def _draw(figure: Figure, tile: Tile, x: float, top: float, width: float, height: float) -> None:
    """Draws a thumbnail whose upper left corner is at (x, top), in inches from below left, of a figure of that size."""
    axis = figure.add_axes((x / width, (top - CELL) / height, CELL / width, CELL / height))
    axis.imshow(tile.image, interpolation="nearest" if max(tile.image.shape) < 48 else "antialiased")
    axis.set_axis_off()
    h, w = tile.image.shape[:2]
    edge = {"edgecolor": tile.frame or "0.8", "linewidth": 2.0 if tile.frame else 0.5}
    axis.add_patch(Rectangle((-0.5, -0.5), w, h, fill=False, clip_on=False, **edge))
    place = ((x + CELL / 2) / width, (top - CELL - 0.045) / height)
    look = {"fontsize": 6.3, "color": tile.frame or "0.25", "va": "top", "ha": "center", "linespacing": 1.2}
    figure.text(*place, shortened(tile.caption, 19), **look)
