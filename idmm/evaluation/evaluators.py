"""The evaluators of a training run: each is called with a model and returns numbers for ``metrics.jsonl``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor, nn

from idmm.data.image_store import ImageStore
from idmm.evaluation.evaluate import Predictions, knn_accuracy, predict


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
"""(backbone, store, images=None) -> pooled features of a split's images, all or those of the given numbers, [n, d]."""


class KNNAccuracy(Evaluator):
    """Classifies held-out images by their nearest labelled training images.

    Args:
        extract: Takes the features.
        train: Training images. Those without a label are not used.
        held_out: Images to classify.
        every: Epochs from one call to the next.
    """

    def __init__(self, extract: Extract, train: ImageStore, held_out: ImageStore, every: int):
        self.extract, self.train, self.held_out, self.every = extract, train, held_out, every
        self.labelled = np.flatnonzero(train.labels >= 0)
        self.images = len(self.labelled) + len(held_out)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``knn``, the accuracy in percent."""
        train = self.extract(model, self.train, self.labelled)
        held_out = self.extract(model, self.held_out)
        return {"knn": knn_accuracy(train, self.train.labels[self.labelled], held_out, self.held_out.labels)}


class Accuracy(Evaluator):
    """Evaluates a classifier on a split and keeps its latest predictions.

    Args:
        batches: Makes this process's batches of the split. Its argument is a label for progress in the log, or None.
        images: Images of the split.
        every: Epochs from one call to the next.
        device, autocast: Where and in which precision the model runs.
        metrics: Scores of :meth:`idmm.evaluation.evaluate.Predictions.scores` that a call returns.
    """

    def __init__(
        self, batches: Callable[..., Iterable[dict]], images: int, every: int, device, autocast, metrics: Iterable[str]
    ):
        self.batches, self.images, self.every = batches, images, every
        self.device, self.autocast, self.metrics = device, autocast, set(metrics)
        self.latest: Predictions | None = None

    def predict(self, model: nn.Module, label: str | None = None) -> Predictions:
        """Return the predictions for all images. With a ``label`` the log shows the progress."""
        self.latest = predict(model, self.batches(label), self.device, self.autocast)
        return self.latest

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the ``metrics`` in percent."""
        return {name: score for name, score in self.predict(model).scores().items() if name in self.metrics}
