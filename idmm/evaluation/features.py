"""Features of a frozen backbone: taken from each image once, in fp32."""

import hashlib
import json
import logging
import time
from dataclasses import replace

import numpy as np
import torch

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
    """A backbone to be measured at one size, which takes the features of splits.

    Args:
        spec: What is known of it.
        size: Side of the images (pixels).
        config: Where it comes from, seed of fresh weights, crop, batch size and device; of its ``data`` the workers.
        label: For people; None: as ``config.init`` says, without one the model's name.

    Raises:
        UserError: The device is not there.
    """

    def __init__(self, spec: ModelSpec, size: int, config: ProbeConfig, label: str | None = None):
        self.spec, self.size, self.config = spec, size, config
        self.label = label or config.init or config.model.name or UNTRAINED
        about = {"name": spec.name, "kwargs": spec.kwargs} | ({} if spec.init else {"seed": config.seed})
        self.weights = _digest(about, spec.init.state if spec.init else None)  # others for other weights
        self.device = distributed.pick_device(config.device)
        self._network: Network | None = None

    @property
    def init(self) -> str | None:
        """Where it comes from, as the user said; None: its weights are fresh."""
        return self.config.init

    @property
    def about(self) -> dict:
        """What results say of it."""
        return {"init": self.init, "model": self.spec.name, "size": self.size}

    def untrained(self, label: str) -> "FrozenBackbone":
        """Returns the same with fresh weights, drawn from ``config.seed`` as a stage draws them."""
        return FrozenBackbone(replace(self.spec, init=None), self.size, replace(self.config, init=None), label)

    def know(self, spec: ModelSpec) -> None:
        """Takes what is known of the backbone once the images were read: their mean and std."""
        self.spec = spec
        if self._network is not None:
            self._network = replace(self._network, mean=spec.mean, std=spec.std)
            spec.set_statistics(self._network.model)

    def features(self, store: ImageStore, part: str) -> np.ndarray:
        """Returns the pooled features of all images of a split (train, val or test), float32 [N, d].

        Raises:
            RunError: They are not finite, or there is too little memory for the batch.
        """
        began = time.monotonic()
        if self._network is None:
            self.build()
        batches = self._network.split_batches(store, self.config.data.workers)
        found = self._network.outputs(counting(batches, len(store), f"features of {part}"))
        how = duration(time.monotonic() - began)
        log.info("%s: features of %s (%s) in %s", self.label, part, counted(len(store), "image"), how)
        return found

    def build(self) -> None:
        """Builds the model now, not at the first image.

        Raises:
            UserError: It cannot be built at this size, or the weights do not fit.
        """
        spec, given = self.spec, self.config
        try:
            model = spec.build(self.size, given.seed)
        except SizeError as error:
            raise UserError(f"size: {error}") from None
        if report := spec.load(model):
            log.info("%s", report)
        looks = (self.size, given.crop_pct, spec.mean, spec.std)
        model = model.eval().to(self.device)
        self._network = Network(model, *looks, self.device, given.batch_size, self.label)


def _digest(about: dict, state: dict[str, torch.Tensor] | None = None) -> str:
    """Returns 32 hexadecimal digits that differ where the facts ``about`` a backbone or its weights do."""
    hashed = hashlib.blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted((state or {}).items()):
        tensor = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
