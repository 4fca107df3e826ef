"""Cascade R-CNN (Cai and Vasconcelos, CVPR 2018): three heads, each refines the boxes before it."""

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.roi_heads import (
    RoIHeads,
    fastrcnn_loss,
    maskrcnn_inference,
    maskrcnn_loss,
)
from torchvision.ops import clip_boxes_to_image

from idmm.dense.targets import Size
from idmm.models.base import Tensors

BoxWeights = tuple[float, float, float, float]
PerImage = list[Tensor]  # a tensor for each image of a batch

IOUS = (0.5, 0.6, 0.7)  # intersection over union from which a box is an object, per head
# inverse standard deviations of the offsets (x, y, width, height), per head
BOX_WEIGHTS: tuple[BoxWeights, ...] = (
    (10.0, 10.0, 5.0, 5.0),
    (20.0, 20.0, 10.0, 10.0),
    (30.0, 30.0, 15.0, 15.0),
)
LOSS_WEIGHTS = (1.0, 0.5, 0.25)  # as in mmdetection, which the drloc supplement uses


class SharedBoxPredictor(FastRCNNPredictor):  # type: ignore[misc]  # torchvision has no types
    """Class logits, and one box for all classes."""

    def __init__(self, in_channels: int, num_classes: int):
        super().__init__(in_channels, num_classes)
        self.bbox_pred = nn.Linear(in_channels, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [R, K] and offsets [R, 4 K], the same for each class.

        The features are [R, d].
        """
        logits, offsets = super().forward(x)
        return logits, offsets.repeat(1, logits.shape[1])


class CascadeHeads(nn.Module):
    """Three heads of torchvision in place of one.

    In training each head samples its own boxes by its own threshold. In evaluation the class logits
    and the masks' probabilities are means over the heads, and the boxes are those of the last one.

    Args:
        heads: One per threshold of :data:`IOUS` and :data:`BOX_WEIGHTS`, with a
            :class:`SharedBoxPredictor` each.
    """

    def __init__(self, heads: list[RoIHeads]):
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(
        self,
        features: Tensors,
        proposals: PerImage,
        sizes: list[Size],
        targets: list[Tensors] | None,
    ) -> tuple[list[Tensors], Tensors]:
        """Return detections and losses, as torchvision's ``RoIHeads`` do.

        Args:
            features: Maps of the pyramid, [B, D, h, w] each.
            proposals: Boxes of each image, [R, 4] (x1, y1, x2, y2, pixels).
            sizes: Height and width of each image (pixels).
            targets: ``boxes`` [n, 4], ``labels`` int64 [n] from 1, and with masks ``masks`` uint8
                [n, H, W] of each image. None: evaluation.
        """
        images = _Images(features, sizes)
        if targets is None:
            return self._detections(images, proposals), {}
        return [], self._losses(images, proposals, targets)

    def _losses(
        self,
        images: "_Images",
        proposals: PerImage,
        targets: list[Tensors],
    ) -> Tensors:
        totals: dict[str, Any] = defaultdict(float)
        head: RoIHeads
        for head, weight in zip(self.heads, LOSS_WEIGHTS, strict=True):
            boxes, matches, labels, true_offsets = head.select_training_samples(proposals, targets)
            logits, offsets = images.outputs(head, boxes)
            classifier_loss, box_loss = fastrcnn_loss(logits, offsets, labels, true_offsets)
            totals["loss_classifier"] += weight * classifier_loss
            totals["loss_box_reg"] += weight * box_loss
            if head.has_mask():
                mask_loss = images.mask_loss(head, boxes, targets, matches, labels)
                totals["loss_mask"] += weight * mask_loss
            true_boxes = [target["boxes"] for target in targets]
            proposals = _without(images.refined(head, offsets, boxes), boxes, true_boxes)
        return dict(totals)

    def _detections(self, images: "_Images", proposals: PerImage) -> list[Tensors]:
        last: RoIHeads = self.heads[-1]
        all_logits = []
        for head in self.heads:
            logits, offsets = images.outputs(head, proposals)
            all_logits.append(logits)
            if head is not last:
                proposals = images.refined(head, offsets, proposals)
        mean_logits = torch.stack(all_logits).mean(0)  # [R, K + 1]
        boxes, scores, labels = last.postprocess_detections(
            mean_logits, offsets, proposals, images.sizes
        )
        detections = []
        for columns in zip(boxes, scores, labels, strict=True):
            detections.append(dict(zip(("boxes", "scores", "labels"), columns, strict=True)))
        if last.has_mask():
            per_head = [
                maskrcnn_inference(images.mask_logits(head, boxes), labels) for head in self.heads
            ]
            for detection, masks in zip(detections, zip(*per_head, strict=True), strict=True):
                detection["masks"] = torch.stack(masks).mean(0)  # [n, 1, 28, 28]
        return detections


class _Images(NamedTuple):
    """A batch as the heads read it."""

    features: Tensors  # maps of the pyramid
    sizes: list[Size]

    def outputs(self, head: RoIHeads, boxes: PerImage) -> tuple[Tensor, Tensor]:
        """Return logits [R, K + 1] and offsets [R, 4 (K + 1)] of all boxes."""
        pooled = head.box_roi_pool(self.features, boxes, self.sizes)  # [R, D, 7, 7]
        logits, offsets = head.box_predictor(head.box_head(pooled))
        return logits, offsets

    def mask_logits(self, head: RoIHeads, boxes: PerImage) -> Tensor:
        """Return logits of masks within the boxes, [R, K + 1, 28, 28]."""
        pooled = head.mask_roi_pool(self.features, boxes, self.sizes)  # [R, D, 14, 14]
        outputs: Tensor = head.mask_predictor(head.mask_head(pooled))
        return outputs

    def mask_loss(
        self,
        head: RoIHeads,
        boxes: PerImage,
        targets: list[Tensors],
        matches: PerImage,
        labels: PerImage,
    ) -> Tensor:
        """Return the loss of the masks within boxes that are objects."""
        object_boxes = []
        object_matches = []
        for number, label in enumerate(labels):
            is_object = label > 0
            object_boxes.append(boxes[number][is_object])
            object_matches.append(matches[number][is_object])
        masks = [target["masks"] for target in targets]
        classes = [target["labels"] for target in targets]
        logits = self.mask_logits(head, object_boxes)
        outputs: Tensor = maskrcnn_loss(logits, object_boxes, masks, classes, object_matches)
        return outputs

    def refined(
        self,
        head: RoIHeads,
        offsets: Tensor,
        boxes: PerImage,
    ) -> PerImage:
        """Return the boxes moved by a head's offsets, within their images, without a gradient."""
        moved = head.box_coder.decode(offsets.detach(), boxes)[:, 0]  # [R, K + 1, 4] -> [R, 4]
        parts = moved.split([len(box) for box in boxes])
        return list(map(clip_boxes_to_image, parts, self.sizes))


def _without(
    refined: PerImage,
    boxes: PerImage,
    true_boxes: PerImage,
) -> PerImage:
    """Return the refined boxes without those that were true boxes, which each head samples."""
    remaining = []
    for moved, before, true in zip(refined, boxes, true_boxes, strict=True):
        is_true = (before[:, None] == true.to(before.dtype)).all(2).any(1)  # [R, n, 4] -> [R]
        remaining.append(moved[~is_true])
    return remaining
