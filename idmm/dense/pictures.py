"""Images with boxes, masks or classes of pixels drawn upon them, by torchvision."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from idmm.dense.evaluate import Objects
from idmm.dense.targets import BoxTarget, nearest, rasterised
from idmm.figures.style import COLOURS, shortened

ACROSS = 2  # images in a row, each twice
OPACITY = 0.5  # of masks
PLAIN = ("background", "unlabeled", "unlabelled", "void")  # classes that are not painted, as they would cover all


def painted(
    image: np.ndarray, of: BoxTarget | Objects | np.ndarray, size: tuple[int, int], classes: Sequence[str]
) -> np.ndarray:
    """Returns an image with objects or classes of pixels drawn upon it, uint8 [H, W, 3].

    Args:
        image: uint8 [H, W, 3], of any scale.
        of: Objects, or the class of each pixel, uint8 of ``size`` (255: none).
        size: Height and width of the image's file (pixels).
        classes: Names of all, by number.
    """
    shape, objects = image.shape[:2], not isinstance(of, np.ndarray)
    height = max(12, max(shape) // 60)  # of texts
    if objects:
        labels, masks = of.labels.tolist(), [rasterised(one, size, shape) for one in of.segments or ()]
        boxes = of.boxes * np.tile(np.divide(shape, size)[::-1], 2)
        scores = [f" {score:.2f}" for score in getattr(of, "scores", ())] or [""] * len(labels)
        texts = zip(boxes[:, 0], boxes[:, 1], scores, strict=True)
    else:
        mask = nearest(of, shape)
        labels = [n for n in np.unique(mask).tolist() if n < len(classes) and classes[n].lower() not in PLAIN]
        masks = [mask == label for label in labels]
        texts = [(0, 1.3 * row * height, "") for row in range(len(labels))]  # a key in the corner
    colours = [COLOURS[label % len(COLOURS)] for label in labels]
    picture = torch.from_numpy(image.copy()).permute(2, 0, 1)
    if masks:
        picture = draw_segmentation_masks(picture, torch.from_numpy(np.stack(masks)).bool(), OPACITY, colours)
    if objects and labels:
        picture = draw_bounding_boxes(picture, torch.from_numpy(boxes), colors=colours, width=2)
    made = Image.fromarray(picture.permute(1, 2, 0).numpy())
    pen, font = ImageDraw.Draw(made), ImageFont.truetype(findfont("DejaVu Sans"), height)
    for label, colour, (x, y, more) in zip(labels, colours, texts, strict=True):
        name = shortened(classes[label], 24) + more
        pen.text((x + 4, y + 2), name, fill=colour, font=font, stroke_width=2, stroke_fill="white")
    return np.asarray(made)


def pairs_figure(pairs: Sequence[tuple[str, np.ndarray, np.ndarray]], title: str) -> Figure:
    """Returns the names of images, each with what is there at the left and what was predicted at the right."""
    rows = -(-len(pairs) // ACROSS)
    figure = Figure(figsize=(4.8 * ACROSS, 2.65 * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=11, weight="bold", parse_math=False)
    for number, (name, *pictures) in enumerate(pairs):
        for side, picture in enumerate(pictures):
            axis = figure.add_subplot(rows, 2 * ACROSS, 2 * number + side + 1)
            axis.set_axis_off()
            axis.imshow(picture)
            text = "prediction" if side else shortened(name, 26)
            axis.set_title(text, fontsize=7, loc="left", parse_math=False)
    return figure
