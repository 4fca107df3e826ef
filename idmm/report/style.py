"""How pictures look: no pyplot, so that no window opens and a user's own figures and settings stay as they are.

Nothing is told by colour alone: colours are Okabe and Ito's, which colour-blind readers tell apart; line styles and
markers tell the same in grey print.
"""

import warnings
from pathlib import Path

from matplotlib.figure import Figure

from idmm.files import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DPI = 150


def colour_and_marker(number: int) -> dict[str, str]:
    """Keywords of the n-th line."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def line_style(number: int) -> str:
    return STYLES[number % len(STYLES)]


def plain_axis(axis, grid: str = "y") -> None:
    """Takes away what carries no information."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)


def save(figure: Figure, path: str | Path) -> None:
    """Writes a PNG, whole or not at all."""
    with replacing(Path(path)) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a label in letters that the font lacks
        figure.savefig(file, format="png", dpi=DPI, facecolor="white")
