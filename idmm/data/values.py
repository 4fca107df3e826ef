"""What pixel values stand for: the value range of images of more than 8 bits, mean and standard deviation.

0 and 1 of images of more than 8 bits stand for one range of values. ``data.range`` gives it, or it goes from the
smallest to the largest value of all training images, for bands of each channel. Each image's 1 in 10,000 most extreme
pixels at either end are left out, so that hot and dead pixels of a sensor do not set it.
"""

import math
from collections.abc import Iterable

import numpy as np

AUTO = "auto"
MinMax = tuple[float, float]  # smallest and largest value
# AUTO, one range, one per channel, or None: the full range of 16 bits
ValueRange = str | MinMax | tuple[MinMax, ...] | None
WHITE = 65535  # stands for 1 in stored images of more than 8 bits
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's and torchvision's grey
_TRIMMED = 1e-4  # share of an image's pixels at either end that its smallest and largest value leave out


class RangeUnknown(Exception):
    """An image has more than 8 bits, and their value range is not known yet."""


def as_range(value: ValueRange | list) -> ValueRange:
    """Return a value range, or one per channel, as tuples with whole numbers as int. AUTO and None stay."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value[0], (list, tuple)):
        return tuple(as_range(pair) for pair in value)
    return tuple(int(number) if float(number).is_integer() else float(number) for number in value)


def min_max(values: np.ndarray, per_channel: bool) -> tuple[MinMax, ...]:
    """Return smallest and largest value of an image [H, W, C], or of each channel, without the most extreme pixels."""
    channels = np.moveaxis(values, 2, 0).reshape(values.shape[2], -1) if per_channel else values.reshape(1, -1)
    cut = int(channels.shape[1] * _TRIMMED)
    ends = [cut, channels.shape[1] - 1 - cut]
    return tuple(map(tuple, np.partition(channels, ends, axis=1)[:, ends].astype(np.float64).tolist()))


def common_range(min_maxes: Iterable[tuple[MinMax, ...]], per_channel: bool) -> ValueRange:
    """Return the range that the results of :func:`min_max` span. Empty ones (8 bits) do not count. None: no others."""
    pairs = np.array([pairs for pairs in min_maxes if pairs])  # [D, 1 or C, 2]
    if not len(pairs):
        return None
    ranges = as_range(np.stack([pairs[..., 0].min(axis=0), pairs[..., 1].max(axis=0)], axis=-1).tolist())
    return ranges if per_channel else ranges[0]


def rescale(values: np.ndarray, value_range: ValueRange) -> np.ndarray:
    """Map values [H, W, C] from their range, or one per channel, to uint16 [H, W, C]. Values outside are clipped."""
    low, high = np.array(value_range, dtype=np.float64).T  # [] or [C]
    factor = np.divide(WHITE, high - low, out=np.zeros_like(high), where=high > low)
    return np.clip(np.rint((values.astype(np.float64) - low) * factor), 0, WHITE).astype(np.uint16)


def unit(image):
    """Return an image as float32 in [0, 1], from a tensor uint8 or uint16 of any shape."""
    return image.float().div_(WHITE if image.element_size() == 2 else 255)


# ---------------------------------------------------------------------- mean and standard deviation
def moments(pixels: np.ndarray, grey: bool) -> np.ndarray:
    """Return number of pixels, sum and sum of squares of each channel, in steps of 1/65535, as integers [C, 3].

    Args:
        pixels: uint8 or uint16 [C, H, W].
        grey: Of the brightness of RGB instead of each channel.
    """
    if grey:
        pixels = np.rint(np.tensordot(LUMA, pixels, axes=1) * (WHITE / np.iinfo(pixels.dtype).max))[None]  # [1, H, W]
        values = pixels.astype(np.uint64)
    else:
        values = pixels.astype(np.uint64) * (WHITE // np.iinfo(pixels.dtype).max)
    return np.array([[channel.size, int(channel.sum()), int((channel * channel).sum())] for channel in values], object)


def mean_and_std(total: np.ndarray) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation (of a constant 1) per channel from sums of :func:`moments`, in any order."""
    mean = [float(f"{s / n / WHITE:.6g}") for n, s, _ in total]
    std = [float(f"{math.sqrt(n * q - s * s) / n / WHITE:.6g}") or 1.0 for n, s, q in total]
    return mean, std
