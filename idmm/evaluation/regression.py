"""Logistic regression on scaled features, by scikit-learn."""

import warnings
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from idmm.evaluation import Floats, Integers

STRENGTHS = tuple(10.0**n for n in range(-4, 3))  # of the probe: scikit-learn's C
PROBE_STEPS = 2000  # most steps of the probe's fit
ONE_THREAD = 20_000_000  # most numbers in the features of a fit for which one thread is the fastest


def fitted(
    train: Floats,
    labels: Integers,
    strength: float,
    class_weight: str | None = None,
    one_scale: bool = False,
    sample_weight: Floats | None = None,
) -> tuple[Floats, Floats, Integers]:
    """Return the regression as a classifier of raw features.

    Returns:
        Weight [K, d] and bias [K] in float64, and the classes of their rows, [K].
    """
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=PROBE_STEPS, class_weight=class_weight)
    # scikit-learn suspects few images per class
    with threads(train), warnings.catch_warnings(action="ignore"):
        scaler = fitted_scaler(train, one_scale)
        scaled = scaler.transform(train)
        axes = _axes(scaled)
        if axes is not None:
            scaled = scaled @ axes
        model.fit(scaled, labels, sample_weight)
    weight = model.coef_.astype(np.float64)
    bias = model.intercept_.astype(np.float64)
    if len(weight) == 1:  # with two classes scikit-learn has only the difference of the logits
        weight = np.concatenate([-weight, weight]) / 2
        bias = np.concatenate([-bias, bias]) / 2
    if axes is not None:
        weight = weight @ axes.T
    weight /= scaler.scale_
    return weight, bias - weight @ scaler.mean_, model.classes_


def _axes(rows: Floats) -> Floats | None:
    """Return axes [d, n] of the space of n rows, in which fits are the same and faster.

    None: there are more rows than features.
    """
    if rows.shape[1] <= len(rows):
        return None
    axes: Floats = np.linalg.svd(rows, full_matrices=False)[2].T
    return axes


def fitted_scaler(train: Floats, one_scale: bool) -> Any:
    """Return scikit-learn's scaler to mean 0 and variance 1.

    With ``one_scale`` only the mean variance is 1: rare features do not get the weight of others.
    """
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train)
    if one_scale:
        scaler.scale_ = np.full_like(scaler.scale_, max(1e-9, scaler.var_.mean()) ** 0.5)
    return scaler


def threads(train: Floats) -> threadpool_limits:
    """Return a block with one thread for a small fit.

    Many short products wait for threads longer than they take.
    """
    limit = 1 if train.size <= ONE_THREAD else None
    return threadpool_limits(limit)


def held_out_hits(
    train: Floats,
    labels: Integers,
    held_out: Floats,
    truth: Integers,
    class_weight: str | None,
    one_scale: bool,
) -> Integers:
    """Return the number of correct predictions on held-out images for each strength, [S].

    Each fit starts from the one before.
    """
    from sklearn.linear_model import LogisticRegression

    scaler = fitted_scaler(train, one_scale)
    train = scaler.transform(train)
    held_out = scaler.transform(held_out)
    axes = _axes(train)
    if axes is not None:
        train = train @ axes
        held_out = held_out @ axes
    model = LogisticRegression(max_iter=500, warm_start=True, class_weight=class_weight)
    hits = []
    with warnings.catch_warnings(action="ignore"):  # fits that did not converge are near enough
        for strength in STRENGTHS:
            model.set_params(C=strength).fit(train, labels)
            hits.append((model.predict(held_out) == truth).sum())
    return np.array(hits)
