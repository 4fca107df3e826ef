"""IDMM: instance discrimination with multi-crop and CutMix (Cao, Yu, Wu, ECCV 2022)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm import config
from idmm.losses.instance import instance_discrimination_loss
from idmm.methods.base import Method, RunInfo
from idmm.methods.common import head_dim, mixed_groups, projection_head


class InstanceClassifier(nn.Module):
    """The N-way layer W [N, d], a row for each image: linear, or cosine with a learned scale."""

    def __init__(self, instances: int, width: int, config: config.Method):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(instances, width))
        if config.classifier_init_std is None:
            nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)  # as nn.Linear
        else:
            nn.init.normal_(self.weight, std=config.classifier_init_std)
        self.bias = nn.Parameter(torch.zeros(instances)) if config.classifier_bias else None
        cosine = config.classifier == "cosine"
        self.scale = nn.Parameter(torch.tensor(config.classifier_scale)) if cosine else None

    def forward(self, features: Tensor, target: Tensor, mixed_target: Tensor | None, lam: float) -> Tensor:
        """Returns the mean loss of features [B, d] whose instances are ``target`` [B], mixed with ``mixed_target``."""
        features, weight = features.float(), self.weight
        if self.scale is not None:
            features, weight = F.normalize(features, dim=1) * self.scale, F.normalize(weight, dim=1)
        smoothing, chunk = self.config.label_smoothing, self.config.chunk_size
        return instance_discrimination_loss(features, weight, target, mixed_target, lam, smoothing, chunk, self.bias)

    @torch.no_grad()
    def nearest(self, features: Tensor) -> Tensor:
        """Returns the instance with the largest logit, of features [B, d] -> int64 [B]."""
        weight = self.weight if self.scale is None else F.normalize(self.weight, dim=1)
        return F.linear(features.float(), weight, self.bias).argmax(1)  # cosine: norm and scale change no order

    @torch.no_grad()
    def start_from(self, features: Tensor) -> None:
        """Sets the rows to the images' own features [N, d], centred and brought to unit length."""
        self.weight.copy_(F.normalize(features - features.mean(0), dim=1))


class IDMM(Method):
    """Groups of crops, each CutMixed on its own; the loss is the sum of the groups' means."""

    def __init__(self, backbone: nn.Module, info: RunInfo, config: config.Method):
        super().__init__(backbone)
        self.config = config
        self.head = projection_head(backbone, config)  # Table 9; the paper's recipe has none
        self.classifier = InstanceClassifier(info.images, head_dim(backbone, config), config)
        self.lr_scales["classifier"] = config.classifier_lr_scale

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Computes the loss of ``batch["views"]`` (a list of [B, count, C, S, S]) of images ``batch["index"]`` [B]."""
        groups = list(mixed_groups(batch, batch["index"], self.config.cutmix_alpha, key))
        features, extra, logs = self.features([views for views, *_ in groups], key, epoch)  # [V, d]
        rows = self.head(features).split([len(views) for views, *_ in groups])
        losses = [self.classifier(z, *targets) for z, (_, *targets) in zip(rows, groups, strict=True)]
        if self.classifier.scale is not None:
            logs["scale"] = self.classifier.scale.detach()
        return {"loss": sum(losses) + extra, **logs}

    @torch.no_grad()
    def prepare(self, extract: Callable[[], Tensor]) -> None:
        """Starts the N-way layer from the untrained network's own features, where it is to."""
        if self.config.classifier_init == "features":
            self.classifier.start_from(self.head(extract()))

    def diagnose(self, features: Tensor, index: Tensor) -> dict[str, float]:
        """Returns ``instance_accuracy``: how many of the images are told from all others (percent)."""
        right = self.classifier.nearest(self.head(features)) == index
        return {"instance_accuracy": 100 * float(right.float().mean())}
