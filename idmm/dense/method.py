"""Losses of detection and segmentation, for the networks of :mod:`idmm.dense.network`."""

import torch.nn.functional as F
from torch import Tensor

from idmm.dense.network import Detector, Segmenter
from idmm.dense.targets import IGNORED
from idmm.methods.base import Method
from idmm.methods.common import at_least_fp32
from idmm.models.build import one_image_norms

_NAMES = {  # torchvision's: ours
    "loss_objectness": "rpn_objectness",
    "loss_rpn_box_reg": "rpn_box",
    "loss_classifier": "classifier",
    "loss_box_reg": "box",
    "loss_mask": "mask",
}


class Detection(Method):
    """The sum of the losses of Faster R-CNN (Ren et al., NeurIPS 2015) or Mask R-CNN (He et al., ICCV 2017).

    Attributes:
        backbone: The whole :class:`Detector`, which is trained, averaged and exported.
    """

    backbone: Detector

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Return the loss of a batch, as for :meth:`Detector.losses`, and its terms."""
        with one_image_norms(self.backbone, batch["images"]):
            losses = self.backbone.losses(batch)
        terms = {_NAMES[name]: at_least_fp32(value) for name, value in losses.items()}
        return {"loss": sum(terms.values()), **terms}


class Segmentation(Method):
    """Cross-entropy of each pixel's class.

    The mean is over an image's pixels with a class, then over images. So the loss does not depend on how a batch is
    split. An image without such pixels adds 0.

    Attributes:
        backbone: The whole :class:`Segmenter`, as for :class:`Detection`.
    """

    backbone: Segmenter

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Return the loss of ``batch["images"]`` [B, C, S, S] with classes ``batch["mask"]`` int64 [B, S, S]."""
        with one_image_norms(self.backbone, batch["images"]):
            logits = self.backbone(batch["images"])  # [B, K, S, S]
        return {"loss": pixel_cross_entropy(logits, batch["mask"])}


def pixel_cross_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of :class:`Segmentation`, a scalar.

    Args:
        logits: [B, K, S, S].
        mask: Class of each pixel, int64 [B, S, S]. 255: none.
    """
    losses = F.cross_entropy(at_least_fp32(logits), mask, ignore_index=IGNORED, reduction="none")  # [B, S, S]
    return (losses.sum((1, 2)) / (mask != IGNORED).sum((1, 2)).clamp(min=1)).mean()
