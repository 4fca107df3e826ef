"""Mean and standard deviation of each channel of the training images, to the last digit in any order."""

import math
from collections.abc import Iterable
from contextlib import closing

import numpy as np

from idmm.data.cache import ImageStore
from idmm.data.images import TOP
from idmm.data.parallel import in_order
from idmm.data.views import LUMA
from idmm.errors import UserError, listed


def moments(pixels: np.ndarray, grey: bool = False) -> list[list[int]]:
    """Returns of each channel of an image, uint8 or uint16 [C, H, W], how many pixels it has, their sum, and the sum of
    their squares, in steps of 1/65535; ``grey``: of the brightness of RGB alone."""
    if grey:
        pixels = np.rint(np.tensordot(LUMA, pixels, axes=1) * (TOP / np.iinfo(pixels.dtype).max))[None]  # [1, H, W]
        values = pixels.astype(np.uint64)
    else:
        values = pixels.astype(np.uint64) * (TOP // np.iinfo(pixels.dtype).max)
    squares = (values * values).sum(axis=(1, 2))
    return [[values[0].size, int(s), int(q)] for s, q in zip(values.sum(axis=(1, 2)), squares, strict=True)]


def mean_std(each: Iterable[list[list[int]]]) -> tuple[list[float], list[float]]:
    """Returns mean and standard deviation of each channel over images, on [0, 1], by the :func:`moments` of each."""
    total = sum(np.array(found, dtype=object) for found in each)  # [C, 3], integers of any size
    mean = [float(f"{s / n / TOP:.6g}") for n, s, _ in total]
    std = [float(f"{math.sqrt(n * q - s * s) / n / TOP:.6g}") for n, s, q in total]  # of a constant it is 0
    return mean, std


def measured(store: ImageStore, grey: bool, progress: bool = False) -> tuple[list[float], list[float]]:
    """Returns mean and standard deviation of each channel of a split as it is stored; ``grey``: of the brightness."""

    def work(i: int) -> list[list[int]]:
        return moments(store.image(i).numpy(), grey)

    with closing(in_order(work, len(store), store.names.__getitem__, "measuring mean and std", progress)) as found:
        return mean_std(found)


def refuse_constant(std: list[float], numbers: list[int]) -> None:
    """Raises UserError if a channel, one of ``numbers``, has the same value in all training images."""
    flat = [str(number) for number, value in zip(numbers, std, strict=True) if not value]
    if flat:
        kept = [number for number, value in zip(numbers, std, strict=True) if value]
        how = "give --data.std"
        how = f"use the others by --data.bands '{kept}', or give --data.mean and --data.std" if kept else how
        raise UserError(f"data.std: the training images have one value in all pixels of channel {listed(flat)}; {how}")
