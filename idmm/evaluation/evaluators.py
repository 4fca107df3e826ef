"""The evaluators of a training run: called with a model, they return numbers for
``metrics.jsonl``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from idmm.batch import Batch
from idmm.data.image_store import ImageStore
from idmm.evaluation.evaluate import Predictions, knn_predict, predict


class Evaluator(ABC):
    """Measures a model after every ``every`` epochs and at the end of a phase.

    Attributes:
        every: Epochs from one call to the next.
        images: Images that a call reads. The loop estimates its time from them.
    """

    every: int
    images: int

    @abstractmethod
    def __call__(self, model: nn.Module) -> Mapping[str, float | None]:
        """Return values for ``metrics.jsonl``. All processes must call together."""


Extract = Callable[..., Tensor]
"""(backbone, store, images=None, label=None) -> pooled features, float32 [n, d], of all images of a
split or those of the given numbers. With a label the log shows the progress."""


@dataclass
class KNNAccuracy(Evaluator):
    """Classifies held-out images by their nearest labelled training images."""

    extract: Extract
    train: ImageStore  # images without a label are not used
    held_out: ImageStore
    every: int

    def __post_init__(self) -> None:
        assert self.train.labels is not None
        assert self.held_out.labels is not None
        self.labelled = np.flatnonzero(self.train.labels >= 0)
        self.labels = self.train.labels[self.labelled]
        self.truth = self.held_out.labels
        self.images = len(self.labelled) + len(self.held_out)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``knn``, the accuracy in percent."""
        train = self.extract(model, self.train, self.labelled).numpy()
        held_out = self.extract(model, self.held_out).numpy()
        predicted = knn_predict(train, self.labels, held_out)
        return {"knn": 100 * float(np.mean(predicted == self.truth))}


@dataclass
class Accuracy(Evaluator):
    """Evaluates a classifier on a split and keeps its latest predictions."""

    batches: Callable[..., Iterable[Batch]]
    """Makes this process's batches of the split. ``label``: for progress in the log, or None."""
    images: int  # of the split
    every: int
    device: str  # the model runs on
    metrics: Collection[str]
    """Those of :class:`idmm.evaluation.evaluate.Scores` that a call returns."""
    latest: Predictions | None = None

    def predict(self, model: nn.Module, label: str | None = None) -> Predictions:
        """Return the predictions for all images. With a ``label`` the log shows the progress."""
        self.latest = predict(model, self.batches(label=label), self.device)
        return self.latest

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the ``metrics`` in percent."""
        scores: dict[str, Any] = {**self.predict(model).scores()}
        return {name: score for name, score in scores.items() if name in self.metrics}
