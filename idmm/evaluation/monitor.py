"""The monitor of collapse: measures, on a few training images, whether a run still learns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm.evaluation import Integers
from idmm.evaluation.evaluate import evaluating
from idmm.evaluation.evaluators import Evaluator
from idmm.methods.base import Method
from idmm.progress import log

# Values below a floor, or below a share of the run's best, mean a collapse. Runs that learned had
# an embedding_std of at least 0.012, planted collapses of at most 0.0043 from the start
# (tests/test_monitor.py).
FLOORS = {"feature_std": 0.005, "embedding_std": 0.005, "feature_rank": 1.5}
SHARE = 0.1
FEWEST = 3  # images, whose rank is low anyway


def spread(rows: Tensor) -> float:
    """Return the standard deviation of unit vectors per dimension, times the root of their number.

    The vectors are [N, d]. The result is 0 if all rows point the same way and 1 if they are spread
    evenly (SimSiam, Chen and He, CVPR 2021, Fig. 2, without their division by sqrt(d)).
    """
    unit = F.normalize(rows.double(), dim=1)
    return float(unit.var(0, unbiased=False).sum().sqrt())


def effective_rank(rows: Tensor) -> float:
    """Return exp of the entropy of the normalised singular values of centred rows [N, d].

    It goes from 1, if all lie on a line, to min(N - 1, d). It is 0 if all are one point (Roy and
    Vetterli, EUSIPCO 2007).
    """
    values = torch.linalg.svdvals(rows.double() - rows.double().mean(0))
    if float(values.sum()) <= 1e-12 * max(1.0, float(rows.abs().max())):
        return 0.0
    share = values / values.sum()
    return float(torch.exp(-(share * share.clamp(min=1e-30).log()).sum()))


@dataclass
class CollapseMonitor(Evaluator):
    """Measures a method on a few training images and warns once if it collapses."""

    method: Method  # its own backbone is measured, not its average
    extract: Callable[[nn.Module], Tensor]  # backbone -> features of the images to measure [n, d]
    numbers: Integers  # of these images, [n]
    history: Callable[[], list[dict[str, Any]]]  # returns the records of the epochs so far
    every: int
    warned: bool = False

    def __post_init__(self) -> None:
        self.images = len(self.numbers)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``feature_std``, ``feature_rank``, ``embedding_std`` and the method's own
        values."""
        device = next(self.method.parameters()).device
        features = self.extract(self.method.exported)
        values = {"feature_std": spread(features), "feature_rank": effective_rank(features)}
        with evaluating(self.method), torch.no_grad():
            on_device = features.to(device)
            values["embedding_std"] = spread(self.method.embed(on_device).float().cpu())
            values |= self.method.diagnose(on_device, torch.from_numpy(self.numbers).to(device))
        if self.images > FEWEST and not self.warned:
            warning = collapse(values, self.history())
            if warning:
                self.warned = True
                log.warning(warning)
        return {name: round(value, 4) for name, value in values.items()}


def collapse(values: dict[str, float], history: list[dict[str, Any]]) -> str | None:
    """Return a warning if one of the ``values`` is below its floor, or far below the best in
    ``history``."""
    for name, floor in FLOORS.items():
        best = max((record[name] for record in history if name in record), default=0.0)
        if values[name] >= max(floor, SHARE * best):
            continue
        before = f", {best:.3g} at best before" if best else ""
        return (
            f"collapse: {name} is {values[name]:.3g}{before}: "
            "the images look the same to the network. "
            "Try a lower --train.lr, larger batches or a longer warm-up"
        )
    return None
