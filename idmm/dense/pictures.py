"""Draw boxes, masks and classes of pixels on images, by torchvision."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from idmm.dense.evaluate import Objects
from idmm.dense.targets import BoxTarget, nearest, rasterised
from idmm.figures import COLOURS, shortened

PAIRS_PER_ROW = 2
OPACITY = 0.5  # of masks
BACKGROUND = ("background", "unlabeled", "unlabelled", "void")  # classes without colour: they would cover everything


def painted(
    image: np.ndarray, target: BoxTarget | Objects | np.ndarray, size: tuple[int, int], classes: Sequence[str]
) -> np.ndarray:
    """Return an image with objects or classes of pixels drawn on it, uint8 [H, W, 3].

    Args:
        image: uint8 [H, W, 3], of any scale.
        target: Objects, or the class of each pixel, uint8 of ``size`` (255: none).
        size: Height and width of the image's file (pixels).
        classes: Names of all classes.
    """
    shape, boxes = image.shape[:2], None
    text_height = max(12, max(shape) // 60)
    if isinstance(target, np.ndarray):
        mask = nearest(target, shape)
        labels = [n for n in np.unique(mask).tolist() if n < len(classes) and classes[n].lower() not in BACKGROUND]
        masks = [mask == label for label in labels]
        texts = [(0, 1.3 * row * text_height, "") for row in range(len(labels))]  # a legend in the corner
    else:
        labels, masks = target.labels.tolist(), [rasterised(one, size, shape) for one in target.segments or ()]
        boxes = target.boxes * np.tile(np.divide(shape, size)[::-1], 2)
        scores = [f" {score:.2f}" for score in getattr(target, "scores", ())] or [""] * len(labels)
        texts = zip(boxes[:, 0], boxes[:, 1], scores, strict=True)
    colours = [COLOURS[label % len(COLOURS)] for label in labels]
    picture = torch.from_numpy(image.copy()).permute(2, 0, 1)
    if masks:
        picture = draw_segmentation_masks(picture, torch.from_numpy(np.stack(masks)).bool(), OPACITY, colours)
    if boxes is not None and labels:
        picture = draw_bounding_boxes(picture, torch.from_numpy(boxes), colors=colours, width=2)
    canvas = Image.fromarray(picture.permute(1, 2, 0).numpy())
    draw, font = ImageDraw.Draw(canvas), ImageFont.truetype(findfont("DejaVu Sans"), text_height)
    for label, colour, (x, y, score) in zip(labels, colours, texts, strict=True):
        text = shortened(classes[label], 24) + score
        draw.text((x + 4, y + 2), text, fill=colour, font=font, stroke_width=2, stroke_fill="white")
    return np.asarray(canvas)


def pairs_figure(pairs: Sequence[tuple[str, np.ndarray, np.ndarray]], title: str) -> Figure:
    """Return a figure of images by name, each with the truth on the left and the prediction on the right."""
    rows = -(-len(pairs) // PAIRS_PER_ROW)
    figure = Figure(figsize=(4.8 * PAIRS_PER_ROW, 2.65 * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=11, weight="bold", parse_math=False)
    for number, (name, truth, prediction) in enumerate(pairs):
        for place, text, picture in ((1, shortened(name, 26), truth), (2, "prediction", prediction)):
            axis = figure.add_subplot(rows, 2 * PAIRS_PER_ROW, 2 * number + place)
            axis.set_axis_off()
            axis.imshow(picture)
            axis.set_title(text, fontsize=7, loc="left", parse_math=False)
    return figure
