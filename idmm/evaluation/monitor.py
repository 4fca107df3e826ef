"""Is the run still learning? Measures of collapse on a few training images."""

import logging
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm.data.image_store import ImageStore
from idmm.evaluation.evaluate import evaluating
from idmm.evaluation.evaluators import Evaluator, Extract
from idmm.methods.base import Method

log = logging.getLogger("idmm")

# What trips the alarm: values under a floor, or under a share of the best seen in the run. Runs that learned had
# embedding_std at 0.012 and more, planted collapses 0.0043 and less from the start (tests/test_monitor.py).
FLOORS = {"feature_std": 0.005, "embedding_std": 0.005, "feature_rank": 1.5}
SHARE = 0.1


def spread(rows: Tensor) -> float:
    """Standard deviation of unit vectors along each dimension, times the root of their number: [N, d] -> [0, 1].

    0 where all rows point the same way, 1 where they are spread evenly (the measure of SimSiam, Chen and He, CVPR
    2021, Fig. 2, which they divide by sqrt(d)).
    """
    unit = F.normalize(rows.double(), dim=1)
    return float(unit.var(0, unbiased=False).sum().sqrt())


def effective_rank(rows: Tensor) -> float:
    """exp of the entropy of the normalised singular values of centred rows [N, d] (Roy and Vetterli, EUSIPCO 2007).

    From 1, where all lie on a line, to min(N - 1, d); 0 where all are one point.
    """
    centred = rows.double() - rows.double().mean(0)
    values = torch.linalg.svdvals(centred)
    if float(values.sum()) <= 1e-12 * max(1.0, float(rows.abs().max())):
        return 0.0
    share = values / values.sum()
    return float(torch.exp(-(share * share.clamp(min=1e-30).log()).sum()))


class CollapseMonitor(Evaluator):
    """Measures a method on a few training images and warns once if it collapses.

    Args:
        method: The method in training. Its own backbone is measured, not its average.
        extract: Takes the features.
        train: The training images.
        numbers: Numbers of the images to measure, int64 [n].
        history: Returns the records of the epochs so far.
        every: Epochs from one call to the next.
    """

    def __init__(
        self,
        method: Method,
        extract: Extract,
        train: ImageStore,
        numbers: np.ndarray,
        history: Callable[[], list[dict]],
        every: int,
    ):
        self.method, self.extract, self.train, self.numbers = method, extract, train, numbers
        self.history, self.every, self.images = history, every, len(numbers)
        self.warned = False

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``feature_std``, ``feature_rank``, ``embedding_std`` and the method's own values."""
        device = next(self.method.parameters()).device
        features = self.extract(self.method.exported, self.train, self.numbers)
        values = {"feature_std": spread(features), "feature_rank": effective_rank(features)}
        with evaluating(self.method), torch.no_grad():
            on_device = features.to(device)
            values["embedding_std"] = spread(self.method.embed(on_device).float().cpu())
            values |= self.method.diagnose(on_device, torch.from_numpy(self.numbers).to(device))
        if not self.warned and (line := collapse(values, self.history())):
            self.warned = True
            log.warning("%s", line)
        return {name: round(value, 4) for name, value in values.items()}


def collapse(values: dict[str, float], history: list[dict]) -> str | None:
    """Returns a line where one of the ``values`` of now is under its floor, or far below the best in ``history``."""
    for name, floor in FLOORS.items():
        best = max((record[name] for record in history if name in record), default=0.0)
        if values[name] < max(floor, SHARE * best):
            was = f", {best:.3g} at best before" if best else ""
            return (
                f"collapse: {name} is {values[name]:.3g}{was}: the images look alike to the network; "
                "a lower --train.lr, larger batches or a longer warm-up may help"
            )
    return None
