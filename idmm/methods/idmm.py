"""IDMM: instance discrimination with multi-crop and CutMix (Cao, Yu, Wu, ECCV 2022)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm import config
from idmm.losses.instance import fits, instance_discrimination_loss, instance_losses, row_tiles
from idmm.methods.base import Method, RunInfo
from idmm.methods.common import (
    at_least_fp32,
    head_dim,
    mixed_cross_entropy,
    mixed_groups,
    projection_head,
)
from idmm.models.build import feature_width, linear_classifiers

ROWS_AT_A_TIME = 2**16  # of W, so that not all logits are held


class InstanceClassifier(nn.Module):
    """The N-way layer W [N, d], a row for each image: linear, or cosine with a learned scale."""

    def __init__(self, instances: int, width: int, config: config.Method):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(instances, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)  # as nn.Linear
        cosine = config.classifier == "cosine"
        if cosine:
            self.scale = nn.Parameter(torch.tensor(config.classifier_scale))
        else:
            self.scale = None

    def forward(self, *groups: tuple[Tensor, Tensor, Tensor | None, float]) -> Tensor:
        """Return the sum of the groups' mean losses.

        Args:
            groups: Of each its features [B, d], its instances [B], those mixed into them (None:
                none) and the share of its own.
        """
        if all(fits(features, len(self.weight)) for features, *_ in groups):
            return self.held(*groups)
        smoothing = self.config.label_smoothing
        rows = [self._scaled(features.float()) for features, *_ in groups]
        # all groups at once: one gradient of W is held, not one for each
        sizes, (_, _, mixed, _) = [len(z) for z in rows], groups[0]
        # a copy of lam would wait for the device
        # [V]
        lam = torch.cat(
            [torch.full(target.shape, lam, device=target.device) for _, target, _, lam in groups]
        )
        target = torch.cat([target for _, target, *_ in groups])  # [V]
        if mixed is None:
            partner = None
        else:
            partner = torch.cat([mixed for _, _, mixed, _ in groups])
        losses = instance_losses(
            torch.cat(rows),
            self.weight,
            target,
            partner,
            lam,
            smoothing,
            cosine=self.scale is not None,
        )
        return sum(part.mean() for part in losses.split(sizes))

    def held(self, *groups: tuple) -> Tensor:
        """Return :meth:`forward` of few enough logits that they are held at once."""
        if self.scale is None:
            weight = self.weight
        else:
            weight = F.normalize(self.weight, dim=1)
        loss = 0
        for features, *targets in groups:
            rows = self._scaled(features.float())
            loss = loss + instance_discrimination_loss(
                rows, weight, *targets, self.config.label_smoothing
            )
        return loss

    def _scaled(self, features: Tensor) -> Tensor:
        if self.scale is None:
            return features
        return F.normalize(features, dim=1) * self.scale

    @torch.no_grad()
    def nearest(self, features: Tensor) -> Tensor:
        """Return the instance with the largest logit, of features [B, d] -> int64 [B]."""
        features = features.float()
        largest = []
        for part in row_tiles(len(self.weight), ROWS_AT_A_TIME):
            if self.scale is None:
                weight = self.weight[part]
            else:
                weight = F.normalize(self.weight[part], dim=1)
            value, at = F.linear(features, weight).max(1)  # cosine: norm and scale change no order
            largest.append((value, at + part.start))
        values, numbers = (torch.stack(parts) for parts in zip(*largest, strict=True))  # [K, B]
        return numbers.gather(0, values.argmax(0)[None])[0]


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

    def __init__(self, backbone: nn.Module, info: RunInfo, config: config.Method):
        super().__init__(backbone)
        self.config = config
        self.epochs = info.epochs
        self.global_groups = info.global_groups
        if info.labelled is None:
            self.labelled_share = 1.0
        else:
            self.labelled_share = info.labelled / info.images
        self.head = projection_head(backbone, config)  # Table 9; the paper's recipe has none
        self.classifier = InstanceClassifier(info.images, head_dim(backbone, config), config)
        self.lr_scales["classifier"] = config.classifier_lr_scale
        self.starts_from_features = config.classifier_init == "features"
        if config.label_weight:
            layers = linear_classifiers(backbone)
        else:
            layers = []
        # the backbone's own classifier
        self.reads_pooled = len(layers) == 1 and isinstance(layers[0], nn.Linear)

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Compute the loss of ``batch["views"]`` (a list of [B, count, C, S, S]) of images
        ``batch["index"]`` [B].

        With ``label_weight`` of classes ``batch["label"]`` [B] too, -1 where there is none.
        """
        names, head = (
            (["index", "label"], self.pooled_and_logits)
            if self.config.label_weight
            else (["index"], None)
        )
        targets = torch.stack([batch[name] for name in names], dim=1)  # [B, T]
        groups = list(mixed_groups(batch, targets, self.config.cutmix_alpha, key))
        # [V, d] or [V, d + K]
        outputs, extra, logs = self.features([views for views, *_ in groups], key, head)
        features, logits = outputs.tensor_split([feature_width(self.backbone)], dim=1)
        instance = self._instance(features, [_column(group, 0) for group in groups], logs)
        if not self.config.label_weight:
            return {"loss": instance + extra, **logs}
        label = self._label(logits, [_column(group, 1) for group in groups[: self.global_groups]])
        instance_weight = 1.0
        if self.config.instance_decay == "cosine":
            instance_weight = (1 + math.cos(math.pi * self.scheduled(epoch) / self.epochs)) / 2
        parts = {"label_loss": label.detach(), "instance_loss": instance.detach()}
        # a copy would wait for the device
        weight = torch.full((), instance_weight, device=label.device)
        loss = self.config.label_weight * label + instance_weight * instance + extra
        return {"loss": loss, **parts, "instance_weight": weight, **logs}

    def pooled_and_logits(self, tokens: Tensor) -> Tensor:
        """Return pooled features and logits side by side, [V, d + K], of what
        ``backbone.forward_features`` gave.

        A single linear layer reads the pooled features. For other classifiers (two of distilled
        models, one with a norm before it or another beside it) the backbone's head runs again.
        """
        head = self.backbone.forward_head
        pooled = head(tokens, pre_logits=True)  # [V, d]
        # [V, K]
        if self.reads_pooled:
            logits = self.backbone.get_classifier()(pooled)
        else:
            logits = head(tokens)
        return torch.cat([pooled, logits], dim=1)  # under autocast both as the wider of their types

    def _label(self, logits: Tensor, groups: list[tuple]) -> Tensor:
        """Return the labels' loss of logits [V, K], of whose rows the first are the crops of
        ``groups``."""
        sizes = [len(views) for views, *_ in groups]
        smoothing = self.config.label_smoothing
        rows = zip(at_least_fp32(logits[: sum(sizes)]).split(sizes), groups, strict=True)
        loss = sum(
            mixed_cross_entropy(z, *targets, smoothing, summed=True) for z, (_, *targets) in rows
        )
        return loss / (self.labelled_share * sum(sizes))

    def _instance(self, features: Tensor, groups: list[tuple], logs: dict[str, Tensor]) -> Tensor:
        """Return the N-way loss of features [V, d] of the groups' crops, and log the scale of a
        cosine layer."""
        rows = self.head(features).split([len(views) for views, *_ in groups])
        loss = self.classifier(
            *((z, *targets) for z, (_, *targets) in zip(rows, groups, strict=True))
        )
        if self.classifier.scale is not None:
            logs["scale"] = self.classifier.scale.detach()
        return loss

    def compile(self) -> None:
        """Compile the backbone and the loss. Tiles of logits stay as they are, because each would
        be compiled."""
        super().compile()
        self.classifier.held = torch.compile(self.classifier.held)

    @torch.no_grad()
    def prepare(self, features: Tensor) -> None:
        """Set the rows of the N-way layer to the images' own features [N, d], centred and of unit
        length."""
        rows = self.head(features)
        self.classifier.weight.copy_(F.normalize(rows - rows.mean(0), dim=1))

    def diagnose(self, features: Tensor, index: Tensor) -> dict[str, float]:
        """Return ``instance_accuracy``: how many of the images are told from all others
        (percent)."""
        right = self.classifier.nearest(self.head(features)) == index
        return {"instance_accuracy": 100 * float(right.float().mean())}


def _column(group: tuple, n: int) -> tuple:
    """Return a group of crops with only the ``n``-th of its targets."""
    views, target, partner, lam = group
    return views, target[:, n], None if partner is None else partner[:, n], lam
