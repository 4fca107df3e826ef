"""Whether a classifier is right as often as it says: bins of confidence and the expected calibration error."""

from typing import NamedTuple

import numpy as np

from idmm.intervals import wilson

BINS = 10


class Bin(NamedTuple):
    """Images of about the same confidence."""

    low: float  # edges of the confidence, shares
    high: float
    images: int
    confidence: float  # mean
    accuracy: float  # share that is right
    interval: tuple[float, float]  # of the accuracy, Wilson's, 95 %


class Calibration(NamedTuple):
    """Of a classifier's test images."""

    bins: list[Bin]  # those that have images
    error: float  # expected calibration error, a share
    confidence: float  # mean over all images
    accuracy: float


def calibration(probability: np.ndarray, right: np.ndarray, bins: int = BINS) -> Calibration:
    """Returns the expected calibration error over bins of equal width (Guo et al., ICML 2017, Eq. 3).

    It is the mean of |accuracy - mean confidence| over the bins, weighted by their images. Bin n of B holds
    confidences in (n/B, (n+1)/B], the first one 0, too.

    Args:
        probability: Of the predicted class of each image, in [0, 1], [M].
        right: Whether that is the true class, bool [M].
        bins: B.
    """
    number = np.clip(np.ceil(probability * bins).astype(int) - 1, 0, bins - 1)
    found = []
    for n in np.unique(number):
        inside = number == n
        count, hits = int(inside.sum()), int(right[inside].sum())
        low, high = (float(bound) for bound in wilson(hits, count))
        found.append(Bin(n / bins, (n + 1) / bins, count, float(probability[inside].mean()), hits / count, (low, high)))
    error = sum(one.images * abs(one.accuracy - one.confidence) for one in found) / len(right)
    return Calibration(found, error, float(probability.mean()), float(right.mean()))
