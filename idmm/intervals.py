"""Intervals of shares. No torch: reports are drawn where there is none."""

import numpy as np

Z95 = 1.959963984540054  # the normal distribution's


def wilson(hits, count, z: float = Z95) -> tuple[np.ndarray, np.ndarray]:
    """Returns Wilson's score interval for a share of ``hits`` in ``count``, as shares (JASA 22, 1927)."""
    hits, count = np.asarray(hits, dtype=float), np.asarray(count, dtype=float)
    share, spread = hits / count, z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = np.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    # where all or none hit, rounding would leave the bound a hair off
    low, high = np.where(hits == 0, 0.0, middle - half), np.where(hits == count, 1.0, middle + half)
    return low, high


def too_narrow(images: int, groups: int) -> str:
    """Returns what is to be said of an interval over test images that come in groups."""
    how = "images of one group are alike, so top-1's interval, which counts each image for itself, is too narrow"
    return f"the {images} test images are of {groups} group{'' if groups == 1 else 's'}: {how}"
