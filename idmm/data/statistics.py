"""Mean and standard deviation of each channel of the training images, to the last digit in any order."""

import math
from collections.abc import Iterable
from contextlib import closing

import numpy as np

from idmm.data.cache import ImageStore
from idmm.data.depth import in_order, is_deep
from idmm.data.images import TOP
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


def constant(mean: list[float], std: list[float], numbers: list[int], extremes: np.ndarray) -> str | None:
    """Says which channels, by their ``numbers``, have a standard deviation of 0, and what to do; None: none has.

    ``extremes``: as of :class:`idmm.data.cache.ImageStore`."""
    flat = [i for i, value in enumerate(std) if not value]
    if not flat:
        return None
    deep = extremes[is_deep(extremes)].reshape(-1, len(mean), 2)
    named = []
    for i in flat:  # by the numbers that the files have
        values = deep[:, i] if len(deep) else np.array([255 * mean[i]])
        low, high = f"{values.min():g}", f"{values.max():g}"
        named.append(f"{numbers[i]} (value {low if low == high else f'{low} to {high}'})")
    kept = [number for i, number in enumerate(numbers) if i not in flat]
    how = f"use the others by --data.bands '{kept}', or give --data.mean and --data.std" if kept else "give --data.std"
    what = f"the same value in all pixels of the training images, hence no standard deviation: channel {listed(named)}"
    return f"{what}; {how}"


def refuse_constant(mean: list[float], std: list[float], numbers: list[int], extremes: np.ndarray) -> None:
    """Raises UserError where a channel has the same value in all training images."""
    if why := constant(mean, std, numbers, extremes):
        raise UserError(f"data.std: {why}")
