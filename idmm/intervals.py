"""Confidence intervals of shares. No torch, because reports may run without it."""

import numpy as np

Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


def wilson(hits, count, z: float = Z95) -> tuple[np.ndarray, np.ndarray]:
    """Return Wilson's score interval (JASA 22, 1927) of the share ``hits`` / ``count``, as shares."""
    hits, count = np.asarray(hits, dtype=float), np.asarray(count, dtype=float)
    share, spread = hits / count, z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = np.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    # exact bounds despite rounding if all or none are hits
    return np.where(hits == 0, 0.0, middle - half), np.where(hits == count, 1.0, middle + half)
