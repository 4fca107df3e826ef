"""Supervised pretraining on stage 1's views, to measure the value of labels (Table 6 of the IDMM
paper)."""

from torch import Tensor, nn

from idmm import config
from idmm.methods.base import Method, RunInfo
from idmm.methods.common import at_least_fp32, mixed_cross_entropy, mixed_groups
from idmm.models import feature_width


class Supervised(Method):
    """Cross-entropy of all crops with the image's class, each group CutMixed on its own; groups'
    means are added."""

    def __init__(self, backbone: nn.Module, info: RunInfo, config: config.Method):
        super().__init__(backbone)
        self.config = config
        self.classifier = nn.Linear(feature_width(backbone), info.classes)

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Compute the loss of all crops in ``batch["views"]`` with classes ``batch["label"]``
        [B]."""
        groups = list(mixed_groups(batch, batch["label"], self.config.cutmix_alpha, key))
        features, extra, logs = self.features([views for views, *_ in groups], key)  # [V, d]
        # [B*count, K]
        logits = at_least_fp32(self.classifier(features)).split(
            [len(views) for views, *_ in groups]
        )
        smoothing = self.config.label_smoothing
        losses = [
            mixed_cross_entropy(rows, *of, smoothing)
            for rows, (_, *of) in zip(logits, groups, strict=True)
        ]
        return {"loss": sum(losses) + extra, **logs}
