"""SimCLR (Chen et al., ICML 2020): two crops of an image against all other crops of the batch."""

from lightly.loss import NTXentLoss

from idmm.batch import Batch
from idmm.config import methods as options
from idmm.methods.base import Method, RunInfo, Values
from idmm.methods.common import crops_of, full_precision, gather_batch, projection_head
from idmm.models import Backbone


class SimCLR(Method):
    """NT-Xent (Eq. 1) between projections of two crops. The batches of all processes are one batch.

    With ``accumulate`` a micro-batch is compared only with itself.
    """

    def __init__(self, backbone: Backbone, info: RunInfo, config: options.SimCLR):
        super().__init__(backbone)
        self.head = projection_head(backbone, config)
        self.loss = NTXentLoss(config.temperature)

    def forward(self, batch: Batch, key: int, epoch: int) -> Values:
        """Compute the loss of the two crops in ``batch["views"]``."""
        features, extra, logs = self.features(crops_of(batch), key)  # [2B, d]
        one, other = gather_batch(batch, *self.head(features).chunk(2))  # [B, dim] each
        with full_precision(one):
            return {"loss": self.loss(one, other) + extra, **logs}
