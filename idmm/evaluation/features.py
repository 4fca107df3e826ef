"""A frozen backbone, which takes the features of whole splits in fp32."""

import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np

from idmm import distributed
from idmm.config.commands import ProbeConfig
from idmm.data.image_store import ImageStore
from idmm.data.split import counted
from idmm.errors import SizeError, UserError
from idmm.evaluation.network import Network
from idmm.models.spec import ModelSpec
from idmm.progress import counting, duration

log = logging.getLogger("idmm")
UNTRAINED = "untrained"


class FrozenBackbone:
    """A backbone to be measured at one size.

    Args:
        spec: Its specification.
        size: Side of the images (pixels).
        config: Its source, the seed of fresh weights, crop, batch size, device and workers.
        label: Its name in results. None: ``config.init``, or the model's name.

    Raises:
        UserError: The device does not exist.
    """

    def __init__(self, spec: ModelSpec, size: int, config: ProbeConfig, label: str | None = None):
        self.spec, self.size, self.config = spec, size, config
        self.label = label or config.init or config.model.name or UNTRAINED
        self.device = distributed.pick_device(config.device)
        self._network: Network | None = None

    @property
    def about(self) -> dict[str, Any]:
        """Its entries in results. With fresh weights ``init`` is None."""
        return {"init": self.config.init, "model": self.spec.name, "size": self.size}

    def untrained(self, label: str) -> "FrozenBackbone":
        """Return the same backbone with fresh weights, drawn from ``config.seed`` as a stage draws them."""
        return FrozenBackbone(replace(self.spec, init=None), self.size, replace(self.config, init=None), label)

    def set_statistics(self, spec: ModelSpec) -> None:
        """Take mean and std from a specification, which has them once the images were read."""
        self.spec = spec
        if self._network is not None:
            self._network = replace(self._network, mean=spec.mean, std=spec.std)
            spec.set_statistics(self._network.model)

    def features(self, store: ImageStore, part: str) -> np.ndarray:
        """Return the pooled features of all images of a split (train, val or test), float32 [N, d].

        Raises:
            RunError: They are not finite, or there is too little memory for the batch.
        """
        started = time.monotonic()
        if self._network is None:
            self.build()
        batches = self._network.split_batches(store, self.config.data.workers)
        features = self._network.outputs(counting(batches, len(store), f"features of {part}"))
        seconds = duration(time.monotonic() - started)
        log.info("%s: features of %s (%s) in %s", self.label, part, counted(len(store), "image"), seconds)
        return features

    def build(self) -> None:
        """Build the model.

        Raises:
            UserError: It cannot be built at this size, or the weights do not fit.
        """
        spec, config = self.spec, self.config
        try:
            model = spec.build(self.size, config.seed)
        except SizeError as error:
            raise UserError(f"size: {error}") from None
        if report := spec.load(model):
            log.info("%s", report)
        model = model.eval().to(self.device)
        preprocessing = (self.size, config.crop_pct, spec.mean, spec.std)
        self._network = Network(model, *preprocessing, self.device, config.batch_size, self.label)
