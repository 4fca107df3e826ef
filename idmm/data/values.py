"""What pixel values stand for: the value range of images of more than 8 bits, mean and standard deviation.

0 and 1 of images of more than 8 bits stand for one range of values. ``data.range`` gives it, or it goes from the
smallest to the largest value of all training images, for bands of each channel. Each image's 1 in 10,000 most extreme
pixels at either end are left out, so that hot and dead pixels of a sensor do not set it.
"""

import numpy as np

AUTO = "auto"
MinMax = tuple[float, float]  # smallest and largest value
# AUTO, one range, one per channel, or None: the full range of 16 bits
ValueRange = str | MinMax | tuple[MinMax, ...] | None
WHITE = 65535  # stands for 1 in stored images of more than 8 bits
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's and torchvision's grey


class RangeUnknown(Exception):
    """An image has more than 8 bits, and their value range is not known yet."""


def as_range(value: ValueRange | list) -> ValueRange:
    """Return a value range, or one per channel, as tuples with whole numbers as int. AUTO and None stay."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value[0], (list, tuple)):
        return tuple(as_range(pair) for pair in value)
    return tuple(int(number) if float(number).is_integer() else float(number) for number in value)


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
    """Return number of pixels, sum and sum of squares of each channel, values in [0, 1], float64 [C, 3].

    Args:
        pixels: uint8 or uint16 [C, H, W].
        grey: Of the brightness of RGB instead of each channel.
    """
    values = pixels / np.iinfo(pixels.dtype).max
    values = np.rint(np.tensordot(LUMA, values, axes=1) * WHITE)[None] / WHITE if grey else values
    return np.stack([np.full(len(values), values[0].size), values.sum((1, 2)), (values * values).sum((1, 2))], axis=1)


def mean_and_std(total: np.ndarray) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation (of a constant 1) per channel from the sum of :func:`moments`."""
    mean, square = total[:, 1] / total[:, 0], total[:, 2] / total[:, 0]
    std = np.sqrt(np.maximum(square - mean * mean, 0))
    return [float(f"{m:.6g}") for m in mean], [float(f"{s:.6g}") if s > 1e-6 else 1.0 for s in std]
