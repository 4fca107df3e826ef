"""IDMM: instance discrimination with multi-crop and CutMix (Cao, Yu, Wu, ECCV 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm import config
from idmm.losses.instance import instance_discrimination_loss
from idmm.methods.base import Method
from idmm.methods.drloc import Localization
from idmm.mixing import draw_cutmix, mix_images
from idmm.seeding import numpy_rng


class InstanceClassifier(nn.Module):
    """The N-way layer W: a row for each image.

    Args:
        instances: Images N.
        width: Of the pooled features, d.
        config: ``classifier`` (linear, or cosine with a learned scale), bias, scale, smoothing, chunk size.
    """

    def __init__(self, instances: int, width: int, config: config.Method):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(instances, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)  # as nn.Linear
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
    def start_from(self, features: Tensor) -> None:
        """Sets the rows to the images' own features [N, d], centred and brought to unit length."""
        self.weight.copy_(F.normalize(features - features.mean(0), dim=1))


class IDMM(Method):
    """Two groups of crops, each CutMixed on its own; the loss is the sum of the groups' means (DESIGN: section 4).

    Args:
        backbone: A timm model with ``num_classes=0``: images [B, C, S, S] -> features [B, d].
        instances: Images N; from the data, never a flag.
        width: Of the features, d.
        config: The method's switches.
        localization: An extra loss on the grid of embeddings of all crops, or None.
    """

    def __init__(
        self,
        backbone: nn.Module,
        instances: int,
        width: int,
        config: config.Method,
        localization: Localization | None = None,
    ):
        super().__init__(backbone)
        self.config, self.localization = config, localization
        self.classifier = InstanceClassifier(instances, width, config)
        self.lr_scales["classifier"] = config.classifier_lr_scale

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Computes the loss of ``batch["views"]`` (a list of [B, count, C, S, S]) of images ``batch["index"]`` [B]."""
        images, targets = [], []
        for number, views in enumerate(batch["views"]):
            target = batch["index"].repeat_interleave(views.shape[1])  # [B] -> [B*count], views of an image together
            views, *mixed = self._mix(views.flatten(0, 1), target, key, number)
            images.append(views)  # [B*count, C, S, S]
            targets.append((target, *mixed))
        features, extra, logs = self._outputs(torch.cat(images), key, epoch)  # all groups in one forward: [V, d]
        groups = features.split([len(group) for group in images])
        losses = [self.classifier(z, *target) for z, target in zip(groups, targets, strict=True)]
        if self.classifier.scale is not None:
            logs["scale"] = self.classifier.scale.detach()
        return {"loss": sum(losses) + extra, **logs}

    def _outputs(self, images: Tensor, key: int, epoch: int) -> tuple[Tensor, Tensor | float, dict[str, Tensor]]:
        """Returns pooled features, the extra loss and its log, of one forward pass."""
        if self.localization is None:
            return self.backbone(images), 0.0, {}
        return self.localization(self.backbone, images, key, epoch)

    def _mix(self, views: Tensor, target: Tensor, key: int, group: int) -> tuple[Tensor, Tensor | None, float]:
        """Returns the views, the instances mixed into them (None: none) and the share of their own pixels."""
        if not self.config.cutmix_alpha:
            return views, None, 1.0
        rng = numpy_rng(key, "cutmix", group)
        mix = draw_cutmix(len(views), *views.shape[-2:], self.config.cutmix_alpha, rng)
        return mix_images(views, mix), target[mix.partner.to(target.device)], mix.lam
