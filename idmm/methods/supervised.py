"""Supervised pretraining on the views of pretraining, to measure the value of labels.

It is that of Table 6 of the IDMM paper.
"""

from torch import nn

from idmm.batch import Batch
from idmm.config import methods as options
from idmm.methods.base import Method, RunInfo, Values
from idmm.methods.common import (
    added,
    at_least_fp32,
    mixed_cross_entropy,
    mixed_groups,
    rows_of,
)
from idmm.models import Backbone, feature_width


class Supervised(Method):
    """Cross-entropy of all crops with the image's class. Groups' means are added.

    Each group is CutMixed on its own.
    """

    def __init__(self, backbone: Backbone, info: RunInfo, config: options.Supervised):
        super().__init__(backbone)
        self.config = config
        self.classifier = nn.Linear(feature_width(backbone), info.classes or 0)

    def forward(self, batch: Batch, key: int, epoch: int) -> Values:
        """Compute the loss of all crops in ``views`` with classes ``label`` [B]."""
        groups = mixed_groups(batch, batch["label"], self.config.cutmix_alpha, key)
        features, extra, logs = self.features([group.views for group in groups], key)  # [V, d]
        logits = at_least_fp32(self.classifier(features))  # [V, K]
        losses = []
        for group, rows in zip(groups, rows_of(groups, logits), strict=True):
            losses.append(mixed_cross_entropy(rows, group, self.config.label_smoothing))
        return {"loss": added(losses) + extra, **logs}
