"""The evaluators of a training run: each is called with a model and returns numbers for
``metrics.jsonl``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from idmm.data.image_store import ImageStore
from idmm.evaluation.evaluate import Predictions, knn_predict, predict


class Evaluator(ABC):
    """Measures a model after every ``every`` epochs and at the end of a stage.

    Attributes:
        every: Epochs from one call to the next.
        images: Images that a call reads. The loop estimates its time from them.
    """

    every: int
    images: int

    @abstractmethod
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return values for ``metrics.jsonl``. All processes must call together."""


Extract = Callable[..., Tensor]
"""(backbone, store, images=None) -> pooled features of a split's images, all or those of the given
numbers, [n, d]."""


@dataclass(frozen=True)
class KNNAccuracy(Evaluator):
    """Classifies held-out images by their nearest labelled training images."""

    extract: Extract
    train: ImageStore  # images without a label are not used
    held_out: ImageStore
    every: int

    @property
    def images(self) -> int:
        """Images that a call reads."""
        return int((self.train.labels >= 0).sum()) + len(self.held_out)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``knn``, the accuracy in percent."""
        labelled = np.flatnonzero(self.train.labels >= 0)
        train = self.extract(model, self.train, labelled)
        held_out = self.extract(model, self.held_out)
        predicted = knn_predict(train, self.train.labels[labelled], held_out)
        return {"knn": 100 * float(np.mean(predicted == self.held_out.labels))}


@dataclass
class Accuracy(Evaluator):
    """Evaluates a classifier on a split and keeps its latest predictions."""

    batches: Callable[..., Iterable[dict]]
    """Makes this process's batches of the split. ``label``: for progress in the log, or None."""
    images: int  # of the split
    every: int
    device: Any  # the model runs on
    metrics: Collection[str]
    """Scores of :meth:`idmm.evaluation.evaluate.Predictions.scores` that a call returns."""
    latest: Predictions | None = None

    def predict(self, model: nn.Module, label: str | None = None) -> Predictions:
        """Return the predictions for all images. With a ``label`` the log shows the progress."""
        self.latest = predict(model, self.batches(label=label), self.device)
        return self.latest

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the ``metrics`` in percent."""
        return {
            name: score
            for name, score in self.predict(model).scores().items()
            if name in self.metrics
        }
