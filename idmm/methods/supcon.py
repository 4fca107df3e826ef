"""SupCon (Khosla et al., NeurIPS 2020): crops of a class against those of the others."""

from idmm.batch import Batch
from idmm.config import methods as options
from idmm.losses.contrastive import sup_con
from idmm.methods.base import Method, RunInfo, Values
from idmm.methods.common import crops_of, full_precision, gather_batch, projection_head
from idmm.models import Backbone


class SupCon(Method):
    """The supervised contrastive loss (Eq. 2, "out") between projections of an image's crops.

    There may be any number of them. With ``accumulate`` a micro-batch is compared only with itself.
    """

    def __init__(self, backbone: Backbone, info: RunInfo, config: options.SupCon):
        super().__init__(backbone)
        self.head = projection_head(backbone, config)
        self.temperature = config.temperature

    def forward(self, batch: Batch, key: int, epoch: int) -> Values:
        """Compute the loss of all crops in ``views`` with classes ``label`` [B]."""
        crops = crops_of(batch)
        features, extra, logs = self.features(crops, key)  # [V*B, d]
        labels = batch["label"].repeat(len(crops))  # [V*B]
        rows, labels = gather_batch(batch, self.head(features), labels)  # [V*B, dim], [V*B]
        with full_precision(rows):
            loss = sup_con(rows, labels, self.temperature)
        return {"loss": loss + extra, **logs}
