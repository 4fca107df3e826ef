"""Images with what is there beside what a network predicts: boxes, masks and classes of pixels."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from idmm.pictures import COLOURS, names_legend, shortened

ACROSS = 2  # images in a row, each twice
OPACITY = 0.5  # of masks
NAMED = 12  # classes in the key
LONG = 8.0  # long side of a single image (inches)
PLAIN = (
    "background",
    "unlabeled",
    "unlabelled",
    "void",
)  # classes that are not painted, as a veil over all says nothing


class Drawn(NamedTuple):
    """Boxes and masks on an image of H x W pixels."""

    boxes: np.ndarray  # float [n, 4]: x1, y1, x2, y2 (pixels)
    labels: np.ndarray  # int64 [n]
    scores: np.ndarray | None = None  # [n]; None: they are the truth
    masks: np.ndarray | None = None  # bool [n, H, W]


class Scene(NamedTuple):
    """An image, what is there and what was predicted: objects, or the class of each pixel, int64 [H, W] (255: none)."""

    name: str
    image: np.ndarray  # uint8 [H, W, 3]
    truth: Drawn | np.ndarray
    predicted: Drawn | np.ndarray


def colour(label: int) -> str:
    """Returns the colour of a class; they repeat."""
    return COLOURS[label % len(COLOURS)]


def scenes_figure(scenes: Sequence[Scene], classes: Sequence[str], title: str) -> Figure:
    """Returns each image twice, with what is there at the left and what was predicted at the right of it.

    Args:
        scenes: In order.
        classes: Names of all, by number.
        title: Above them.
    """
    rows, cell, head = -(-len(scenes) // ACROSS), 2.4, 0.9
    width, height = 2 * ACROSS * cell, rows * (cell + 0.25) + head  # inches
    figure = Figure(figsize=(width, height))
    top = 1 - head / height
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=top, wspace=0.03, hspace=0.16)
    figure.text(0.01, 1 - 0.2 / height, title, fontsize=11, weight="bold", va="center", parse_math=False)
    seen: set[int] = set()
    for number, scene in enumerate(scenes):
        for side, (what, of) in enumerate({"truth": scene.truth, "prediction": scene.predicted}.items()):
            axis = figure.add_subplot(rows, 2 * ACROSS, 2 * number + side + 1)
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"{shortened(scene.name, 26)}" if side == 0 else what, fontsize=7, loc="left")
            drawn = _objects if isinstance(of, Drawn) else _areas
            seen |= drawn(axis, scene.image, of, classes)
    named = sorted(seen)[:NAMED]
    if named:
        handles = [Patch(color=colour(label)) for label in named]
        where = {"loc": "upper left", "bbox_to_anchor": (0.0, 1 - 0.3 / height), "ncols": 6}
        names_legend(figure, handles, [shortened(classes[label], 24) for label in named], **where)
    return figure


def marked_figure(image: np.ndarray, of: Drawn | np.ndarray, classes: Sequence[str]) -> tuple[Figure, float]:
    """Returns an image with what was found in it drawn upon it, and the dots an inch at which it has the image's size.

    Args:
        image: uint8 [H, W, 3].
        of: Objects, or the class of each pixel, int [H, W].
        classes: Names of all, by number.
    """
    height, width = image.shape[:2]
    dpi = max(height, width) / LONG
    figure = Figure(figsize=(width / dpi, height / dpi))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()
    if isinstance(of, Drawn):
        _objects(axis, image, of, classes, fontsize=9)
    elif seen := sorted(_areas(axis, image, of, classes)):
        handles = [Patch(color=colour(label)) for label in seen[:NAMED]]
        names_legend(
            figure, handles, [shortened(classes[label], 24) for label in seen[:NAMED]], loc="lower left", frameon=True
        )
    axis.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), aspect="auto")
    return figure, dpi


def _objects(axis, image: np.ndarray, of: Drawn, classes: Sequence[str], fontsize: float = 5) -> set[int]:
    """Draws an image with boxes and, where there are some, masks; returns which classes they are of."""
    shown = image.astype(np.float32) / 255
    for label, mask in zip(of.labels.tolist(), () if of.masks is None else of.masks, strict=False):
        shown[mask] = (1 - OPACITY) * shown[mask] + OPACITY * np.array(to_rgb(colour(label)))
    axis.imshow(shown)
    for n, ((x1, y1, x2, y2), label) in enumerate(zip(of.boxes.tolist(), of.labels.tolist(), strict=True)):
        axis.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, linewidth=1.2, edgecolor=colour(label)))
        said = shortened(classes[label], 16) + ("" if of.scores is None else f" {of.scores[n]:.2f}")
        box = {"facecolor": "white", "alpha": 0.7, "pad": 0.6, "linewidth": 0}
        axis.text(x1, y1, said, fontsize=fontsize, color="black", va="bottom", parse_math=False, clip_on=True, bbox=box)
    return set(of.labels.tolist())


def _areas(axis, image: np.ndarray, of: np.ndarray, classes: Sequence[str]) -> set[int]:
    """Draws an image with the class of each pixel as a colour; returns which classes are painted."""
    shown = image.astype(np.float32) / 255
    labels = [n for n in np.unique(of[of < len(classes)]).tolist() if classes[n].lower() not in PLAIN]
    for label in labels:
        inside = of == label
        shown[inside] = (1 - OPACITY) * shown[inside] + OPACITY * np.array(to_rgb(colour(label)))
    axis.imshow(shown)
    return set(labels)
