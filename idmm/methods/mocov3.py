"""MoCo v3 (Chen, Xie, He, ICCV 2021): a predictor of a momentum encoder's keys, both crops in both
parts."""

import torch
from lightly.models.modules import MoCoProjectionHead
from torch import Tensor, nn

from idmm import config
from idmm.distributed import several_gpus
from idmm.losses.contrastive import info_nce
from idmm.methods.base import Method, RunInfo
from idmm.methods.common import MomentumEncoder, crops_of, full_precision, gather_batch, width_of
from idmm.progress import log
from idmm.seeding import derive


class MoCoV3(Method):
    """The symmetric loss of Algorithm 1: ctr(q1, k2) + ctr(q2, k1), with the other images of the
    batch as negatives.

    The crops go through one after the other, so that batch norms see one of them at a time; those
    of the heads see the batch of all processes on GPUs, and of their own process on CPUs. The patch
    projection stays as it was drawn, which keeps transformers stable.
    """

    def __init__(self, backbone: nn.Module, info: RunInfo, config: config.Method):
        super().__init__(backbone)
        _freeze_projection(backbone)
        width, hidden = width_of(backbone, config)
        self.head = _mlp(width, hidden, config.dim, layers=3)
        self.predictor = _mlp(config.dim, hidden, config.dim, layers=2)
        self.teacher = MomentumEncoder(backbone, self.head, config.momentum, info.steps)
        self.temperature = config.temperature

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Compute the loss of the two crops in ``batch["views"]``."""
        crops = self._parts(crops_of(batch))
        features, extras, logs = zip(
            *(
                self.features(crop, derive(key, "crop", number))
                for number, crop in enumerate(crops)
            ),
            strict=True,
        )  # [B, d] each
        # [B, dim] each
        queries = torch.cat([self.predictor(self.head(rows)) for rows in features]).chunk(2)
        keys = torch.cat([self.teacher(crop) for crop in crops]).chunk(2)
        rows = gather_batch(batch, *queries, *keys)
        with full_precision(rows[0]):
            one, other, one_key, other_key = rows
            loss = info_nce(one, other_key, self.temperature) + info_nce(
                other, one_key, self.temperature
            )
        means = {name: sum(log[name] for log in logs) / len(logs) for name in logs[0]}
        return {"loss": loss + sum(extras) / len(extras), **means}

    def _parts(self, crops: list[Tensor]) -> list[Tensor]:
        """Return the images of one pass: a crop, or both crops of an image that is the only one of
        this process.

        Batch norms need two rows; synchronised ones find them elsewhere.
        """
        single = len(crops[0]) == 1 and not any(
            isinstance(part, nn.SyncBatchNorm) for part in self.head.modules()
        )
        if single:
            return [torch.cat(crops)]
        return crops


def _mlp(width: int, hidden: int, dim: int, layers: int) -> nn.Module:
    """Return an MLP whose every layer has a batch norm, the last one's without scale and shift, as
    in its release.

    On several GPUs batch norms see the batch of all processes.
    """
    head = MoCoProjectionHead(width, hidden, dim, num_layers=layers, batch_norm=True)
    head.layers[-1] = nn.BatchNorm1d(dim, affine=False)
    if several_gpus():
        return nn.SyncBatchNorm.convert_sync_batchnorm(head)
    return head


def _freeze_projection(backbone: nn.Module) -> None:
    """Take the patch projection, if there is one, out of training."""
    embed = getattr(backbone, "patch_embed", None)
    projection = getattr(embed, "proj", None)
    # of pixels, not of another network's maps
    if isinstance(projection, nn.Conv2d) and not hasattr(embed, "backbone"):
        projection.requires_grad_(False)
        log.info("mocov3: the patch projection stays as it was drawn")
