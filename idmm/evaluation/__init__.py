"""Evaluation: accuracy, kNN, probes, features, collapse, and the predictor of finished runs."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]  # features as the network returns them, or float64
Integers = NDArray[np.int64]
Names = NDArray[np.str_]  # of groups of images
