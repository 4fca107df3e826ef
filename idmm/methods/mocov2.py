"""MoCo v2 (He et al., CVPR 2020; Chen et al., arXiv:2003.04297): a queue of earlier keys."""

from lightly.loss import NTXentLoss

from idmm.batch import Batch
from idmm.config import methods as options
from idmm.methods.base import Method, RunInfo, Values
from idmm.methods.common import (
    MomentumEncoder,
    crops_of,
    full_precision,
    gather_batch,
    head_dim,
    projection_head,
)
from idmm.models import Backbone
from idmm.progress import log

QUEUE = 2048  # Table 10 of the IDMM paper


class MoCoV2(Method):
    """InfoNCE (Eq. 1) of the first crop's query against the second's key and the queue.

    The keys are a momentum encoder's, and the queue starts at random. Keys are not shuffled between
    processes: heads have no batch norm to learn from it.
    """

    teacher: MomentumEncoder

    def __init__(self, backbone: Backbone, info: RunInfo, config: options.MoCoV2):
        super().__init__(backbone)
        self.head = projection_head(backbone, config)
        self.teacher = MomentumEncoder(backbone, self.head, config.momentum)
        queue = _queue(config.queue, info), head_dim(backbone, config)
        self.loss = NTXentLoss(config.temperature, memory_bank_size=queue)
        # as part of the state, which resume needs
        for name, buffer in list(self.loss.memory_bank.named_buffers()):
            self.loss.memory_bank.register_buffer(name, buffer, persistent=True)

    def forward(self, batch: Batch, key: int, epoch: int) -> Values:
        """Compute the loss of the two crops in ``batch["views"]``, whose keys enter the queue."""
        one, other = crops_of(batch)
        features, extra, logs = self.features(one, key)  # [B, d]
        # [B, dim] each
        query, positive = gather_batch(batch, self.head(features), self.teacher(other))
        with full_precision(query):
            return {"loss": self.loss(query, positive) + extra, **logs}


def _queue(requested: int | None, info: RunInfo) -> int:
    """Return the length of the queue, at most so long that few keys are of images in the batch."""
    room = max(1, info.images - min(info.batch_size, info.images // 2))
    length = requested or QUEUE
    if room < length:
        log.info(f"method.queue: {room}, not {length}: there are {info.images} images")
    return min(length, room)
