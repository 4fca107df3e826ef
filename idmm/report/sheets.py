"""Sheets of thumbnails with captions."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from idmm.figures import COLOURS, save, shortened

# side of a thumbnail (inches)
CELL = 1.05
LARGE = 1.9
# between thumbnails, a line and a letter of a caption (inches)
GAP = 0.14
LINE = 0.145
LETTER = 0.065
HEAD = 0.66  # above the rows (inches)
COLUMNS = 6  # of large thumbnails
THUMBNAIL = 96  # longest side of a thumbnail (pixels)
BLUE = COLOURS[0]
ORANGE = COLOURS[1]


class Tile(NamedTuple):
    """A thumbnail."""

    image: np.ndarray  # uint8 [H, W, 3]
    caption: str  # below it. The end of each line that fits is drawn
    frame: str | None = None  # colour of its frame and caption


def thumbnail(picture: np.ndarray, caption: str, frame: str | None = None) -> Tile:
    """Return a tile of a picture, uint8 [H, W, 3] of any size."""
    image = Image.fromarray(picture)
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    return Tile(np.asarray(image), caption, frame)


def one_of_each(pairs: Iterable) -> list:
    """Return the pairs (with ``first`` and ``second``) none of whose images is in an earlier
    one."""
    drawn = set()
    chosen = []
    for pair in pairs:
        if drawn.isdisjoint((pair.first, pair.second)):
            chosen.append(pair)
        drawn |= {pair.first, pair.second}
    return chosen


def in_rows(tiles: list) -> list[tuple[str, list]]:
    """Return large tiles as rows of a sheet."""
    return [("", tiles[start : start + COLUMNS]) for start in range(0, len(tiles), COLUMNS)]


def caption_sheet(
    rows: Sequence[tuple[str, Sequence[Tile]]],
    path: str | Path,
    title: str,
    note: str = "",
    cell: float = CELL,
) -> None:
    """Draw rows of thumbnails.

    Args:
        rows: For each row a text and its thumbnails. The texts are in a column on the left, unless
            all are empty.
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
    for row, (text, tiles) in enumerate(rows):
        top = height - HEAD - row * pitch
        axis.text(GAP, top - cell / 2, text, fontsize=8, linespacing=1.35, va="center")
        for column, tile in enumerate(tiles):
            h, w = np.array(tile.image.shape[:2]) * cell / max(tile.image.shape)  # inches
            middle = left + column * (cell + GAP) + cell / 2
            x = middle - w / 2
            y = top - (cell + h) / 2
            if max(tile.image.shape) < 48:
                interpolation = "nearest"
            else:
                interpolation = "antialiased"
            axis.imshow(
                tile.image, extent=(x, x + w, y, y + h), aspect="auto", interpolation=interpolation
            )
            frame = {"edgecolor": tile.frame or "0.8", "linewidth": 2.0 if tile.frame else 0.5}
            axis.add_patch(Rectangle((x, y), w, h, fill=False, **frame))
            style = {"fontsize": 6.3, "color": tile.frame or "0.25", "va": "top", "ha": "center"}
            axis.text(
                middle,
                top - cell - 0.045,
                shortened(tile.caption, int(18.1 * cell)),
                linespacing=1.2,
                **style,
            )
    save(figure, path)
