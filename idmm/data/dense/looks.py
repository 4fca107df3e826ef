"""Sizes of images and values of masks, found by looking at each file once."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from idmm.data.dense.targets import mask_values, short_digest
from idmm.data.formats import opened
from idmm.data.images import read
from idmm.data.parallel import in_order
from idmm.data.split import Split


class MaskLook(NamedTuple):
    """What is known of a mask's file."""

    size: tuple[int, int]  # height and width (pixels)
    values: list[int]  # those that it has pixels of, rising
    digest: str  # another for other bytes


def look_at(split: Split, look: Callable, max_pixels: int, progress: bool) -> list:
    """Returns what ``look`` finds in each file, or BadImage where it cannot be used; a bar if slow."""
    results = in_order(lambda i: look(split.items[i], max_pixels), len(split), split.place, "reading sizes", progress)
    with contextlib.closing(results):
        return list(results)


def image_size(path: str, max_pixels: int) -> tuple[int, int]:
    """Returns height and width of an image, upright (pixels)."""
    with opened(read(path), max_pixels) as image:
        turned = image.orientation() in (5, 6, 7, 8)
        return (image.width, image.height) if turned else (image.height, image.width)


def look_at_mask(path: str, max_pixels: int) -> MaskLook:
    content = read(path)
    values = mask_values(content, max_pixels)
    return MaskLook(values.shape, np.unique(values).tolist(), short_digest(content))
