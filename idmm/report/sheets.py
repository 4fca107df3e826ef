"""Sheets of thumbnails with captions."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image

from idmm.figures import COLOURS, save, shortened

CELL = 1.05  # side of a thumbnail (inches)
LARGE = 1.9  # side of a large one
GAP = 0.14  # between thumbnails (inches)
LINE = 0.145  # height of a line of a caption (inches)
LETTER = 0.065  # width of a letter (inches)
HEAD = 0.66  # above the rows (inches)
COLUMNS = 6  # of large thumbnails
THUMBNAIL = 96  # longest side of a thumbnail (pixels)
BLUE = COLOURS[0]
ORANGE = COLOURS[1]


class Tile(NamedTuple):
    """A thumbnail."""

    image: NDArray[np.uint8]  # [H, W, 3]
    caption: str  # below it. The end of each line that fits is drawn
    frame: str | None = None  # colour of its frame and caption


class SheetRow(NamedTuple):
    """A row of thumbnails."""

    text: str  # on its left
    tiles: Sequence[Tile]


def thumbnail(picture: NDArray[np.uint8], caption: str, frame: str | None = None) -> Tile:
    """Return a tile of a picture, uint8 [H, W, 3] of any size."""
    image = Image.fromarray(picture)
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    return Tile(np.asarray(image), caption, frame)


def in_rows(tiles: Sequence[Tile]) -> list[SheetRow]:
    """Return large tiles as rows of a sheet."""
    starts = range(0, len(tiles), COLUMNS)
    return [SheetRow("", tiles[start : start + COLUMNS]) for start in starts]


def caption_sheet(
    rows: Sequence[SheetRow],
    path: str | Path,
    title: str,
    note: str = "",
    cell: float = CELL,
) -> None:
    """Draw rows of thumbnails.

    Args:
        rows: Their texts are in a column on the left, unless all are empty.
        path: PNG to write.
        title: Above the picture.
        note: Below the title, one line on colours and captions.
        cell: Side of a thumbnail (inches).
    """
    columns = max(len(tiles) for _, tiles in rows)
    lines = max(tile.caption.count("\n") + 1 for _, tiles in rows for tile in tiles)
    left = GAP + LETTER * max(len(line) for text, _ in rows for line in text.split("\n"))
    pitch = cell + LINE * lines + GAP
    width = max(left + columns * (cell + GAP), LETTER * max(1.5 * len(title), len(note)))
    height = HEAD + len(rows) * pitch
    figure = Figure(figsize=(width, height))
    # one axis for all, in inches: one per picture takes longer than the pictures
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axis.set_axis_off()
    axis.text(GAP, height - 0.24, title, fontsize=11, weight="bold", va="center")
    axis.text(GAP, height - 0.45, note, fontsize=7.5, color="0.35", va="center")
    for number, (text, tiles) in enumerate(rows):
        top = height - HEAD - number * pitch
        axis.text(GAP, top - cell / 2, text, fontsize=8, linespacing=1.35, va="center")
        for column, tile in enumerate(tiles):
            middle = left + column * (cell + GAP) + cell / 2
            _draw_tile(axis, tile, middle, top, cell)
    save(figure, path)


def _draw_tile(axis: Axes, tile: Tile, middle: float, top: float, cell: float) -> None:
    """Draw a thumbnail of side ``cell`` below ``top`` (inches), with its caption."""
    longest = max(tile.image.shape)
    height = tile.image.shape[0] * cell / longest
    width = tile.image.shape[1] * cell / longest
    x = middle - width / 2
    y = top - (cell + height) / 2
    interpolation = "nearest" if longest < 48 else "antialiased"
    axis.imshow(
        tile.image,
        extent=(x, x + width, y, y + height),
        aspect="auto",
        interpolation=interpolation,
    )
    frame = Rectangle((x, y), width, height, fill=False, edgecolor="0.8", linewidth=0.5)
    if tile.frame:
        frame.set(edgecolor=tile.frame, linewidth=2.0)
    axis.add_patch(frame)
    axis.text(
        middle,
        top - cell - 0.045,
        shortened(tile.caption, int(18.1 * cell)),
        linespacing=1.2,
        fontsize=6.3,
        color=tile.frame or "0.25",
        va="top",
        ha="center",
    )
