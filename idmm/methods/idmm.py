"""IDMM: instance discrimination with multi-crop and CutMix (Cao, Yu, Wu, ECCV 2022)."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm.batch import Batch
from idmm.config import methods as options
from idmm.losses.instance import fits, instance_discrimination_loss, instance_losses, row_tiles
from idmm.methods.base import Method, RunInfo, Values
from idmm.methods.common import (
    added,
    at_least_fp32,
    head_dim,
    mixed_cross_entropy,
    mixed_groups,
    projection_head,
    rows_of,
)
from idmm.methods.mixing import MixedCrops
from idmm.models import Backbone, feature_width
from idmm.models.build import linear_classifiers

ROWS_AT_A_TIME = 2**16  # of W, so that not all logits are held


class InstanceClassifier(nn.Module):
    """The N-way layer W [N, d], a row for each image: linear, or cosine with a learned scale."""

    def __init__(self, instances: int, width: int, config: options.IDMM):
        super().__init__()
        self.smoothing = config.label_smoothing
        self.weight = nn.Parameter(torch.empty(instances, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)  # as nn.Linear
        self.scale: nn.Parameter | None = None
        if config.classifier == "cosine":
            self.scale = nn.Parameter(torch.tensor(config.classifier_scale))

    def forward(self, *groups: MixedCrops) -> Tensor:
        """Return the sum of the groups' mean losses.

        Args:
            groups: With features [B, d] as ``views``, and instances [B] as targets.
        """
        if all(fits(group.views, len(self.weight)) for group in groups):
            return self.held(*groups)
        # all groups at once: one gradient of W is held, not one for each
        rows = torch.cat([self._scaled(group.views.float()) for group in groups])  # [V, d]
        target = torch.cat([group.own for group in groups])  # [V]
        others = [group.other for group in groups if group.other is not None]
        partner = torch.cat(others) if others else None
        # a copy of lam would wait for the device
        lam = torch.cat(
            [torch.full_like(group.own, group.lam, dtype=torch.float32) for group in groups]
        )
        cosine = self.scale is not None
        losses = instance_losses(
            rows, self.weight, target, partner, lam, self.smoothing, cosine=cosine
        )
        return added(part.mean() for part in rows_of(groups, losses))

    def held(self, *groups: MixedCrops) -> Tensor:
        """Return :meth:`forward` of few enough logits that they are held at once."""
        weight = self._rows(self.weight)
        losses = []
        for group in groups:
            rows = self._scaled(group.views.float())
            losses.append(
                instance_discrimination_loss(
                    rows, weight, group.own, group.other, group.lam, self.smoothing
                )
            )
        return added(losses)

    def _rows(self, weight: Tensor) -> Tensor:
        """Return rows of W, of unit length if the layer is cosine."""
        if self.scale is None:
            return weight
        return F.normalize(weight, dim=1)

    def _scaled(self, features: Tensor) -> Tensor:
        if self.scale is None:
            return features
        return F.normalize(features, dim=1) * self.scale

    @torch.no_grad()
    def nearest(self, features: Tensor) -> Tensor:
        """Return the instance with the largest logit, of features [B, d] -> int64 [B]."""
        features = features.float()
        values = []
        numbers = []
        for part in row_tiles(len(self.weight), ROWS_AT_A_TIME):
            # cosine: norm and scale of the features change no order
            logits = F.linear(features, self._rows(self.weight[part]))
            value, number = logits.max(1)
            values.append(value)
            numbers.append(number + part.start)
        best = torch.stack(values).argmax(0)[None]  # [1, B]
        return torch.stack(numbers).gather(0, best)[0]


class IDMM(Method):
    """Groups of crops, each CutMixed on its own. The loss is the sum of the groups' means.

    With ``label_weight`` w the backbone has a classifier (joint training, as SSAT has it: Das et
    al., WACV 2024), and

        loss = w label + v instance + drloc

    instance is the loss above over all images, and v its weight after ``instance_decay``. label is
    the cross-entropy of the global crops whose class is known (label >= 0), mixed as their
    instances are. It is divided by the average number of such crops in a batch of this size, not by
    their number in this batch. So every labelled image weighs the same in every batch, micro-batch
    and process, and over an epoch label is the mean over the crops of labelled images. A batch
    without labels has 0.
    """

    def __init__(self, backbone: Backbone, info: RunInfo, config: options.IDMM):
        super().__init__(backbone)
        self.config = config
        self.epochs = info.epochs
        self.global_groups = info.global_groups
        self.labelled_share = 1.0 if info.labelled is None else info.labelled / info.images
        self.head = projection_head(backbone, config)  # Table 9; the paper's recipe has none
        self.classifier = InstanceClassifier(info.images, head_dim(backbone, config), config)
        self.lr_scales["classifier"] = config.classifier_lr_scale
        self.starts_from_features = config.classifier_init == "features"
        # whether the backbone's own classifier is one linear layer
        self.reads_pooled = False
        if config.label_weight:
            layers = linear_classifiers(backbone)
            self.reads_pooled = len(layers) == 1 and isinstance(layers[0], nn.Linear)

    def forward(self, batch: Batch, key: int, epoch: int) -> Values:
        """Compute the loss of ``views`` (a list of [B, count, C, S, S]) of images ``index`` [B].

        With ``label_weight`` of classes ``label`` [B] too, -1 where there is none.
        """
        if self.config.label_weight:
            return self._joint(batch, key, epoch)
        groups = mixed_groups(batch, batch["index"], self.config.cutmix_alpha, key)
        features, extra, logs = self.features([group.views for group in groups], key)  # [V, d]
        return {"loss": self._instance(features, groups) + extra, **logs, **self._scale()}

    def _joint(self, batch: Batch, key: int, epoch: int) -> Values:
        """Return :meth:`forward` with labels."""
        targets = torch.stack([batch["index"], batch["label"]], dim=1)  # [B, 2]
        groups = mixed_groups(batch, targets, self.config.cutmix_alpha, key)
        views = [group.views for group in groups]
        outputs, extra, logs = self.features(views, key, self.pooled_and_logits)  # [V, d + K]
        features, logits = outputs.tensor_split([feature_width(self.backbone)], dim=1)
        instance = self._instance(features, [group.column(0) for group in groups])
        label = self._label(logits, [group.column(1) for group in groups[: self.global_groups]])
        decay = 1.0
        if self.config.instance_decay == "cosine":
            progress = self.scheduled(epoch) / self.epochs
            decay = (1 + math.cos(math.pi * progress)) / 2
        # a copy would wait for the device
        weight = torch.full((), decay, device=label.device)
        return {
            "loss": self.config.label_weight * label + decay * instance + extra,
            "label_loss": label.detach(),
            "instance_loss": instance.detach(),
            "instance_weight": weight,
            **logs,
            **self._scale(),
        }

    def pooled_and_logits(self, tokens: Tensor) -> Tensor:
        """Return pooled features and logits side by side, [V, d + K], of ``forward_features``.

        A single linear layer reads the pooled features. For other classifiers (two of distilled
        models, one with a norm before it or another beside it) the backbone's head runs again.
        """
        pooled = self.backbone.forward_head(tokens, pre_logits=True)  # [V, d]
        if self.reads_pooled:
            logits = self.backbone.get_classifier()(pooled)  # [V, K]
        else:
            logits = self.backbone.forward_head(tokens)
        return torch.cat([pooled, logits], dim=1)  # under autocast both as the wider of their types

    def _label(self, logits: Tensor, groups: list[MixedCrops]) -> Tensor:
        """Return the labels' loss of logits [V, K], whose first rows are of ``groups``."""
        count = sum(len(group.views) for group in groups)
        logits = at_least_fp32(logits[:count])
        losses = []
        for group, rows in zip(groups, rows_of(groups, logits), strict=True):
            losses.append(
                mixed_cross_entropy(rows, group, self.config.label_smoothing, summed=True)
            )
        return added(losses) / (self.labelled_share * count)

    def _instance(self, features: Tensor, groups: list[MixedCrops]) -> Tensor:
        """Return the N-way loss of features [V, d] of the groups' crops."""
        rows = rows_of(groups, self.head(features))
        outputs: Tensor = self.classifier(*map(_with_rows, groups, rows))
        return outputs

    def _scale(self) -> Values:
        """Return the scale of a cosine layer, for the log."""
        if self.classifier.scale is None:
            return {}
        return {"scale": self.classifier.scale.detach()}

    def compile(self) -> None:
        """Compile the backbone and the loss. Tiles of logits stay, as each would be compiled."""
        super().compile()
        held = torch.compile(self.classifier.held)
        self.classifier.held = held  # type: ignore[method-assign]  # of this object only

    @torch.no_grad()
    def prepare(self, features: Tensor) -> None:
        """Start the N-way layer from the images' features [N, d], centred and of unit length."""
        rows = self.head(features)
        centred = rows - rows.mean(0)
        self.classifier.weight.copy_(F.normalize(centred, dim=1))

    def diagnose(self, features: Tensor, index: Tensor) -> dict[str, float]:
        """Return ``instance_accuracy``: how many images are told from all others (percent)."""
        right = self.classifier.nearest(self.head(features)) == index
        return {"instance_accuracy": 100 * float(right.float().mean())}


def _with_rows(group: MixedCrops, rows: Tensor) -> MixedCrops:
    return replace(group, views=rows)
