"""Sheets of thumbnails in rows, each with a caption."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from idmm.pictures import COLOURS, save, shortened

CELL, LARGE = 1.05, 1.9  # side of a thumbnail (inches)
GAP, LINE, EDGE = 0.14, 0.145, 0.18  # between thumbnails, a line of a caption, the margin (inches)
HEAD, TEXT = 0.62, 1.75  # above the rows, and left of them where rows have texts (inches)
ACROSS = 6  # large thumbnails in a row
BLUE, ORANGE = COLOURS[0], COLOURS[1]


class Tile(NamedTuple):
    """A thumbnail."""

    image: np.ndarray  # uint8 [H, W, 3]
    caption: str  # below it; lines are shortened to the end that fits
    frame: str | None = None  # colour of a frame around it and of the caption


def pair_rows(pairs: Sequence[tuple]) -> list[tuple[str, list]]:
    """Returns pairs of tiles as rows of a sheet, with a gap between one pair and the next."""
    tiles = [tile for pair in pairs for tile in (*pair, None)]
    return in_rows(tiles, ACROSS // 2 * 3)


def in_rows(tiles: list, columns: int = ACROSS) -> list[tuple[str, list]]:
    """Returns tiles as rows of a sheet."""
    return [("", tiles[start : start + columns]) for start in range(0, len(tiles), columns)]


def caption_sheet(
    rows: Sequence[tuple[str, Sequence[Tile | None]]], path: str | Path, title: str, note: str = "", cell: float = CELL
) -> None:
    """Draws rows of thumbnails.

    Args:
        rows: For each row a text (left of it; empty everywhere: there is no such column) and its thumbnails, None for a
            gap.
        path: PNG to write.
        title: Above the picture.
        note: Below the title, one line: what colours and captions mean.
        cell: Side of a thumbnail (inches).
    """
    lines = max(tile.caption.count("\n") + 1 for _, tiles in rows for tile in tiles if tile)
    left = EDGE + (TEXT if any(text for text, _ in rows) else 0)
    pitch = cell + LINE * lines + GAP
    across = max(sum(GAP + cell * (tile is not None) for tile in tiles) for _, tiles in rows)
    width, height = left + across - GAP + EDGE, HEAD + len(rows) * pitch + EDGE - GAP
    width = max(width, EDGE * 2 + 0.068 * max(len(note), 1.3 * len(title)))
    figure = Figure(figsize=(width, height))
    said = {"va": "center", "parse_math": False}
    figure.text(EDGE / width, 1 - 0.24 / height, title, fontsize=11, weight="bold", **said)
    figure.text(EDGE / width, 1 - 0.45 / height, note, fontsize=7.5, color="0.35", **said)
    for row, (text, tiles) in enumerate(rows):
        x, top = left, height - HEAD - row * pitch
        figure.text(EDGE / width, (top - cell / 2) / height, text, fontsize=8, linespacing=1.35, **said)
        for tile in tiles:
            if tile is not None:
                _draw(figure, tile, x, top, cell)
            x += GAP + cell * (tile is not None)
    save(figure, path)


def _draw(figure: Figure, tile: Tile, x: float, top: float, cell: float) -> None:
    """Draws a thumbnail whose upper left corner is at (x, top), in inches from below left."""
    width, height = figure.get_size_inches()
    axis = figure.add_axes((x / width, (top - cell) / height, cell / width, cell / height))
    axis.imshow(tile.image, interpolation="nearest" if max(tile.image.shape) < 48 else "antialiased")
    axis.set_axis_off()
    h, w = tile.image.shape[:2]
    edge = {"edgecolor": tile.frame or "0.8", "linewidth": 2.0 if tile.frame else 0.5}
    axis.add_patch(Rectangle((-0.5, -0.5), w, h, fill=False, clip_on=False, **edge))
    place = ((x + cell / 2) / width, (top - cell - 0.045) / height)
    look = {"fontsize": 6.3, "color": tile.frame or "0.25", "va": "top", "ha": "center", "linespacing": 1.2}
    figure.text(*place, shortened(tile.caption, int(18.1 * cell)), parse_math=False, **look)
