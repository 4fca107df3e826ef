"""Add a pretraining method of your own, without a change of the installed package.

    OUT=runs/own python examples/own_method.py

It pretrains a small transformer on digits by VICReg's variance and invariance terms (Bardes, Ponce,
LeCun, ICLR 2022).
"""

import os
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor

import idmm
from idmm.batch import Batch
from idmm.config import section
from idmm.config.methods import Projected
from idmm.methods import Method, RunInfo, register_method
from idmm.methods.common import crops_of, full_precision, gather_batch, projection_head
from idmm.models import Backbone


@section
class SpreadOptions(Projected):
    """Make two crops agree, and keep each dimension spread over the batch."""

    CROPS_COMPARED: ClassVar = (2, 2)

    name: Literal["spread"] = "spread"
    spread: PositiveFloat = 1.0
    """Weight of the spread."""


class Spread(Method):
    """The mean squared difference of two crops, and a hinge on each dimension's deviation."""

    def __init__(self, backbone: Backbone, info: RunInfo, config: SpreadOptions):
        super().__init__(backbone)
        self.head = projection_head(backbone, config)
        self.spread = config.spread

    def forward(self, batch: Batch, key: int, epoch: int) -> dict[str, Tensor]:
        """Return the loss of the two crops in ``batch["views"]``."""
        features, extra, logs = self.features(crops_of(batch), key)  # [2B, d]
        one, other = gather_batch(batch, *self.head(features).chunk(2))  # [B, dim] each
        with full_precision(one):
            deviation = torch.cat([one, other], dim=1).var(0, correction=0).add(1e-4).sqrt()
            loss = F.mse_loss(one, other) + self.spread * F.relu(1 - deviation).mean()
        return {"loss": loss + extra, **logs}


register_method(SpreadOptions, Spread)

if __name__ == "__main__":
    result = idmm.pretrain(
        {
            "method": {"name": "spread", "dim": 64},
            "data": {"name": "digits", "subset": {"total": 96}},
            "model": {
                "name": "vit_tiny_patch16_224",
                "kwargs": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
            },
            "views": {"size": 16},
            "train": {"epochs": int(os.environ.get("EPOCHS", "2")), "batch_size": 32},
            "out": os.environ.get("OUT", "runs/own_method"),
        }
    )
    print(f"loss {result['loss']:.3f}")
