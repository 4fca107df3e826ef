"""MoCo v3 (Chen, Xie, He, ICCV 2021): a predictor of a momentum encoder's keys."""

import torch
from lightly.models.modules import MoCoProjectionHead
from torch import Tensor, nn

from idmm.batch import Batch
from idmm.config import methods as options
from idmm.distributed import several_gpus
from idmm.losses.contrastive import info_nce
from idmm.methods.base import Method, RunInfo, Values
from idmm.methods.common import MomentumEncoder, crops_of, full_precision, gather_batch
from idmm.models import Backbone, feature_width
from idmm.progress import log
from idmm.seeding import derive


class MoCoV3(Method):
    """The symmetric loss of Algorithm 1: ctr(q1, k2) + ctr(q2, k1).

    The other images of the batch are negatives. The crops go through one after the other, so that
    batch norms see one of them at a time. Those of the heads see the batch of all processes on
    GPUs, and of their own process on CPUs. The patch projection stays as it was drawn, which keeps
    transformers stable.
    """

    teacher: MomentumEncoder

    def __init__(self, backbone: Backbone, info: RunInfo, config: options.MoCoV3):
        super().__init__(backbone)
        _freeze_projection(backbone)
        hidden = config.hidden_dim
        self.head = _mlp(feature_width(backbone), hidden, config.dim, layers=3)
        self.predictor = _mlp(config.dim, hidden, config.dim, layers=2)
        self.teacher = MomentumEncoder(backbone, self.head, config.momentum, info.steps)
        self.temperature = config.temperature

    def forward(self, batch: Batch, key: int, epoch: int) -> Values:
        """Compute the loss of the two crops in ``batch["views"]``."""
        queries = []
        keys = []
        extras = []
        values: dict[str, list[Tensor]] = {}
        for number, images in enumerate(self._passes(crops_of(batch))):
            features, extra, logs = self.features(images, derive(key, "crop", number))  # [B, d]
            queries.append(self.predictor(self.head(features)))  # [B, dim]
            keys.append(self.teacher(images))
            extras.append(extra)
            for name, value in logs.items():
                values.setdefault(name, []).append(value)
        pairs = torch.cat(queries).chunk(2) + torch.cat(keys).chunk(2)
        one, other, one_key, other_key = gather_batch(batch, *pairs)
        with full_precision(one):
            loss = info_nce(one, other_key, self.temperature)
            loss = loss + info_nce(other, one_key, self.temperature)
        means = {name: torch.stack(parts).mean() for name, parts in values.items()}
        return {"loss": loss + sum(extras) / len(extras), **means}

    def _passes(self, crops: list[Tensor]) -> list[Tensor]:
        """Return the images of each pass: a crop, or both of a process's only image.

        Batch norms need two rows. Synchronised ones find them elsewhere.
        """
        if len(crops[0]) > 1:
            return crops
        for module in self.head.modules():
            if isinstance(module, nn.SyncBatchNorm):
                return crops
        return [torch.cat(crops)]


def _mlp(width: int, hidden: int, dim: int, layers: int) -> nn.Module:
    """Return an MLP whose every layer has a batch norm.

    The last one has no scale and shift, as in its release. On several GPUs batch norms see the
    batch of all processes.
    """
    mlp = MoCoProjectionHead(width, hidden, dim, num_layers=layers, batch_norm=True)
    mlp.layers[-1] = nn.BatchNorm1d(dim, affine=False)
    head: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(mlp) if several_gpus() else mlp
    return head


def _freeze_projection(backbone: Backbone) -> None:
    """Take the patch projection, if there is one, out of training."""
    embed = getattr(backbone, "patch_embed", None)  # of transformers
    projection = getattr(embed, "proj", None)
    # of pixels, not of another network's maps
    if isinstance(projection, nn.Conv2d) and not hasattr(embed, "backbone"):
        projection.requires_grad_(False)
        log.info("mocov3: the patch projection stays as it was drawn")
