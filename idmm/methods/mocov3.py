"""MoCo v3 (Chen, Xie, He, ICCV 2021): a predictor of a momentum encoder's keys, both crops in both parts."""

import torch
from lightly.models.modules import MoCoProjectionHead
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor, nn

from idmm import config
from idmm.losses.contrastive import info_nce
from idmm.methods.base import Method, RunInfo
from idmm.methods.common import MomentumEncoder, crops_of, full_precision, gather_batch, synchronised, width_of
from idmm.methods.drloc import Localization


class MoCoV3(Method):
    """The symmetric loss of Algorithm 1: ctr(q1, k2) + ctr(q2, k1), with the other images of the batch as negatives.

    Both crops go through in one pass, so batch norms see them together; those of the heads see the batch of all
    processes on GPUs, and of their own process on CPUs.
    """

    def __init__(
        self, backbone: nn.Module, info: RunInfo, config: config.Method, localization: Localization | None = None
    ):
        super().__init__(backbone, localization)
        width, hidden = width_of(backbone, config)
        self.head = synchronised(MoCoProjectionHead(width, hidden, config.dim, num_layers=3, batch_norm=True))
        self.predictor = synchronised(MoCoProjectionHead(config.dim, hidden, config.dim, num_layers=2, batch_norm=True))
        self.teacher = MomentumEncoder(backbone, self.head)
        self.temperature, self.momentum, self.steps = config.temperature, config.momentum, info.steps

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Computes the loss of the two crops in ``batch["views"]``."""
        images = torch.cat(crops_of(batch))  # [2B, C, S, S]
        features, extra, logs = self.features(images, key, epoch)  # [2B, d]
        queries = self.predictor(self.head(features)).chunk(2)  # [B, dim] each
        rows = gather_batch(batch, *queries, *self.teacher(images).chunk(2))
        with full_precision(rows[0]):
            one, other, one_key, other_key = rows
            loss = info_nce(one, other_key, self.temperature) + info_nce(other, one_key, self.temperature)
        return {"loss": loss + extra, **logs}

    def after_step(self, step: int) -> None:
        """Moves the momentum encoder, less and less: the momentum rises to 1 along a cosine."""
        momentum = float(cosine_schedule(step, self.steps, self.momentum, 1.0))
        self.teacher.update(momentum, self.backbone, self.head)
