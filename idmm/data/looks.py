"""Small images whose raw pixels are compared: the baseline without a network."""

import numpy as np
from PIL import Image

from idmm.data.images import resized

SIDE = 32  # pixels of the small images that are compared as they are


def small(image: np.ndarray, crop_pct: float) -> np.ndarray:
    """Returns the middle of an image, ``crop_pct`` of its short side, averaged down: uint8 or uint16 [H, W, C] -> grey
    levels of 0 to 255, [SIDE, SIDE, C]."""
    (h, w), side = image.shape[:2], crop_pct * min(image.shape[:2])
    box = ((w - side) / 2, (h - side) / 2, (w + side) / 2, (h + side) / 2)
    pixels = resized(image, SIDE, SIDE, Image.Resampling.BOX, box)
    return pixels if pixels.dtype == np.uint8 else pixels / np.float32(257)
