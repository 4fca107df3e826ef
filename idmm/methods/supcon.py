"""SupCon (Khosla et al., NeurIPS 2020): crops of a class against those of the others."""

from torch import Tensor, nn

from idmm import config
from idmm.losses.contrastive import sup_con
from idmm.methods.base import Method, RunInfo
from idmm.methods.common import crops_of, full_precision, gather_batch, projection_head


class SupCon(Method):
    """The supervised contrastive loss (Eq. 2, "out") between projections of any number of crops of
    an image.

    With ``accumulate`` a micro-batch is compared only with itself.
    """

    def __init__(self, backbone: nn.Module, info: RunInfo, config: config.Method):
        super().__init__(backbone)
        self.head = projection_head(backbone, config)
        self.temperature = config.temperature

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Compute the loss of all crops in ``batch["views"]`` with classes ``batch["label"]``
        [B]."""
        crops = crops_of(batch)
        features, extra, logs = self.features(crops, key)  # [V*B, d]
        # [V*B, dim], [V*B]
        rows, label = gather_batch(batch, self.head(features), batch["label"].repeat(len(crops)))
        with full_precision(rows):
            return {"loss": sup_con(rows, label, self.temperature) + extra, **logs}
