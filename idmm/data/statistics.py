"""Mean and standard deviation of each channel of the training images, to the last digit in any order."""

import math
from contextlib import closing

import numpy as np

from idmm.data.cache import ImageStore
from idmm.data.images import TOP
from idmm.data.parallel import in_order
from idmm.data.views import LUMA
from idmm.errors import UserError, listed


def measured(store: ImageStore, grey: bool, progress: bool = False) -> tuple[list[float], list[float]]:
    """Returns mean and standard deviation of each channel of a split as it is stored; ``grey``: of the brightness."""

    def work(i: int) -> np.ndarray:
        return _moments(store.image(i).numpy(), grey)

    with closing(in_order(work, len(store), store.names.__getitem__, "measuring mean and std", progress)) as found:
        total = sum(found)  # [C, 3], integers of any size
    mean = [float(f"{s / n / TOP:.6g}") for n, s, _ in total]
    std = [float(f"{math.sqrt(n * q - s * s) / n / TOP:.6g}") for n, s, q in total]  # of a constant it is 0
    return mean, std


def _moments(pixels: np.ndarray, grey: bool) -> np.ndarray:
    """Returns of each channel of an image, uint8 or uint16 [C, H, W], how many pixels it has, their sum, and the sum of
    their squares, in steps of 1/65535; ``grey``: of the brightness of RGB alone."""
    if grey:
        pixels = np.rint(np.tensordot(LUMA, pixels, axes=1) * (TOP / np.iinfo(pixels.dtype).max))[None]  # [1, H, W]
        values = pixels.astype(np.uint64)
    else:
        values = pixels.astype(np.uint64) * (TOP // np.iinfo(pixels.dtype).max)
    return np.array([[channel.size, int(channel.sum()), int((channel * channel).sum())] for channel in values], object)


def refuse_constant(std: list[float], numbers: list[int]) -> None:
    """Raises UserError if a channel, one of ``numbers``, has the same value in all training images."""
    flat = [str(number) for number, value in zip(numbers, std, strict=True) if not value]
    if flat:
        kept = [number for number, value in zip(numbers, std, strict=True) if value]
        how = "give --data.std"
        how = f"use the others by --data.bands '{kept}', or give --data.mean and --data.std" if kept else how
        raise UserError(f"data.std: the training images have one value in all pixels of channel {listed(flat)}; {how}")
