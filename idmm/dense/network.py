"""Networks for detection and segmentation on any backbone whose features form a grid.

Detection is torchvision's Faster and Mask R-CNN. Segmentation is UPerNet (Xiao et al., ECCV 2018),
as in the drloc supplement. Its decoder is that of segmentation_models_pytorch, whose models do not
accept maps of any backbone.
"""

from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from idmm import distributed
from idmm.batch import Batch
from idmm.dense.cascade import BOX_WEIGHTS, IOUS, BoxWeights, CascadeHeads, SharedBoxPredictor
from idmm.dense.targets import IGNORED
from idmm.errors import SizeError
from idmm.methods.common import at_least_fp32
from idmm.models.base import Backbone, Tensors
from idmm.models.build import create_backbone
from idmm.models.maps import STRIDES, MultiScaleBackbone
from idmm.models.weights import Checkpoint

AUXILIARY_WIDTH = 256  # channels of the auxiliary head, as in mmsegmentation
FULL_SIZE = 640  # side of images (pixels) from which anchors have the papers' size
_TERMS = {  # torchvision's: ours
    "loss_objectness": "rpn_objectness",
    "loss_rpn_box_reg": "rpn_box",
    "loss_classifier": "classifier",
    "loss_box_reg": "box",
    "loss_mask": "mask",
}


class Detector(MultiScaleBackbone):
    """torchvision's Faster R-CNN, or Mask R-CNN, on a feature pyramid of any backbone.

    The pyramid is an FPN (Lin et al., CVPR 2017) if the backbone has maps of several strides, else
    ViTDet's simple one. Widths follow ``width`` and are torchvision's at 256. If images are smaller
    than 640 pixels, anchors are smaller in proportion, and so is the size by which boxes choose a
    map.

    Args:
        backbone: A timm model without a classifier, built for ``size``.
        size: Side of the images (pixels), a multiple of 32.
        classes: K, without the background.
        width: Channels of the pyramid.
        masks: Whether to predict masks, too.
        in_chans: Channels of the images.
        cascade: Whether three heads refine the boxes, see :class:`idmm.dense.cascade.CascadeHeads`.

    Raises:
        SizeError: 32 does not divide the size.
        UserError: The backbone's features do not form a grid.
    """

    def __init__(
        self,
        backbone: Backbone,
        size: int,
        classes: int,
        width: int = 256,
        masks: bool = False,
        in_chans: int = 3,
        cascade: bool = False,
    ):
        if size % STRIDES[-1]:
            raise SizeError.of(
                "",
                f"image size {size}x{size}: "
                f"expected a multiple of {STRIDES[-1]} pixels for detection",
            )
        super().__init__(backbone, size, in_chans)
        self.masks = masks
        if self.several:
            self.pyramid = FeaturePyramidNetwork(
                self.channels, width, LastLevelMaxPool(), norm_layer=LayerNorm2d
            )
        else:
            self.pyramid = _SimplePyramid(self.channels, width)
        thresholds = IOUS if cascade else IOUS[:1]
        predictor = SharedBoxPredictor if cascade else FastRCNNPredictor
        share = min(1.0, size / FULL_SIZE)
        models = []
        for iou, box_weights in zip(thresholds, BOX_WEIGHTS, strict=False):
            models.append(_rcnn(predictor, width, classes, masks, share, iou, box_weights))
        heads = [model.roi_heads for model in models]
        self.rpn = models[0].rpn
        self.roi_heads = CascadeHeads(heads) if cascade else heads[0]
        self.rpn.head.register_forward_hook(_in_fp32)
        for head in heads:
            head.box_predictor.register_forward_hook(_in_fp32)

    def forward(self, images: Tensor) -> list[Tensors]:
        """Find objects in images [B, C, H, W], in evaluation mode. 32 divides H and W.

        Returns:
            Per image ``boxes`` [n, 4] (x1, y1, x2, y2, pixels), ``labels`` int64 [n] from 0,
            ``scores`` [n] descending, and with masks ``masks`` [n, 1, 28, 28]: probabilities within
            the boxes.
        """
        outputs, _ = self._run(images, None)
        # torchvision's 0 is the background
        return [{**output, "labels": output["labels"] - 1} for output in outputs]

    def loss(self, batch: Batch) -> Tensors:
        """Return the ``loss`` of a batch, in training mode, and the terms that it is the sum of.

        Args:
            batch: ``images`` [B, C, H, W], ``boxes`` [B, M, 4] (pixels), ``labels`` int64 [B, M]
                (-1: no box), with masks ``masks`` uint8 [B, M, H, W].
        """
        targets = {"boxes": batch["boxes"], "labels": batch["labels"] + 1}
        if self.masks:
            targets["masks"] = batch["masks"]
        of_images = []
        for number, valid in enumerate(batch["labels"] >= 0):
            of_images.append({name: values[number, valid] for name, values in targets.items()})
        _, losses = self._run(batch["images"], of_images)
        terms = {_TERMS[name]: at_least_fp32(value) for name, value in losses.items()}
        return {"loss": reduce(torch.add, terms.values()), **terms}

    def _run(self, images: Tensor, targets: list[Tensors] | None) -> tuple[list[Tensors], Tensors]:
        maps = {str(number): one for number, one in enumerate(self.forward_features(images))}
        features = self.pyramid(maps)  # five, of strides 4 to 64
        sizes = [tuple(images.shape[-2:])] * len(images)
        proposals, rpn_losses = self.rpn(ImageList(images, sizes), features, targets)
        outputs, losses = self.roi_heads(features, proposals, sizes, targets)
        return outputs, rpn_losses | losses


def _rcnn(
    predictor: type[FastRCNNPredictor],
    width: int,
    classes: int,
    masks: bool,
    share: float,
    iou: float,
    box_weights: BoxWeights,
) -> FasterRCNN:
    """Return torchvision's model, of which only the layers after the pyramid are used.

    Args:
        predictor: Class of the last layer of boxes.
        width, classes, masks: As for :class:`Detector`.
        share: Of the papers' sizes of anchors.
        iou: Intersection over union from which a box is an object.
        box_weights: Inverse standard deviations of the offsets.
    """

    def pool(side: int) -> MultiScaleRoIAlign:
        levels = ["0", "1", "2", "3"]
        return MultiScaleRoIAlign(levels, side, sampling_ratio=2, canonical_scale=224 * share)

    kind = FasterRCNN
    mask_heads = {}
    if masks:
        kind = MaskRCNN
        mask_heads["mask_roi_pool"] = pool(14)
        mask_heads["mask_head"] = MaskRCNNHeads(width, (width,) * 4, 1)
        mask_heads["mask_predictor"] = MaskRCNNPredictor(width, width, classes + 1)
    anchor_sizes = tuple((8 * stride * share,) for stride in (*STRIDES, 64))
    return kind(
        SimpleNamespace(out_channels=width),  # all that torchvision reads of a backbone
        rpn_anchor_generator=_Anchors(anchor_sizes, ((0.5, 1.0, 2.0),) * 5),
        box_roi_pool=pool(7),
        box_head=TwoMLPHead(width * 7 * 7, 4 * width),
        box_predictor=predictor(4 * width, classes + 1),
        box_batch_size_per_image=2 * width,
        box_fg_iou_thresh=iou,
        box_bg_iou_thresh=iou,
        bbox_reg_weights=box_weights,
        **mask_heads,
    )


class _Anchors(AnchorGenerator):  # type: ignore[misc]  # torchvision has no types
    """Anchors in fp32 whatever the dtype of the maps."""

    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        super().set_cell_anchors(torch.float32, device)


def _in_fp32(
    module: nn.Module,
    inputs: tuple[Any, ...],
    outputs: tuple[Any, Any],
) -> Any:
    """Make logits and offsets fp32, tensors or lists of them.

    torchvision computes boxes in their dtype, and bf16 skips every other pixel beyond 256.
    """
    logits, offsets = outputs
    if isinstance(logits, Tensor):
        return logits.float(), offsets.float()
    return [one.float() for one in logits], [one.float() for one in offsets]


class _SimplePyramid(nn.Module):
    """ViTDet's convolutions per map, and a fifth map of stride 64: -> [B, width, n, n] each."""

    def __init__(self, channels: list[int], width: int):
        super().__init__()
        conv = partial(Conv2dNormActivation, norm_layer=LayerNorm2d, activation_layer=None)
        self.levels = nn.ModuleList(
            nn.Sequential(conv(c, width, 1), conv(width, width, 3)) for c in channels
        )

    def forward(self, maps: Tensors) -> Tensors:
        outputs = {}
        for (name, features), level in zip(maps.items(), self.levels, strict=True):
            outputs[name] = level(features)
        outputs["pool"] = F.max_pool2d(outputs[name], kernel_size=1, stride=2)
        return outputs


class Segmenter(MultiScaleBackbone):
    """UPerNet on any backbone.

    Args:
        backbone, size, width, in_chans: As for :class:`Detector`. Any size is accepted.
        classes: K.
        auxiliary: Weight of the loss of a second head, on the map of stride 16 (Zhao et al., CVPR
            2017). 0: none.

    Raises:
        UserError: The backbone's features do not form a grid.
    """

    def __init__(
        self,
        backbone: Backbone,
        size: int,
        classes: int,
        width: int = 256,
        in_chans: int = 3,
        auxiliary: float = 0.0,
    ):
        # of the extra 'dense'
        from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder

        super().__init__(backbone, size, in_chans)
        self.decoder = UPerNetDecoder([0, 0, *self.channels], decoder_channels=width)
        self.head = nn.Conv2d(width, classes, kernel_size=1)
        self.auxiliary_weight = auxiliary
        self.auxiliary = None
        if auxiliary:
            self.auxiliary = nn.Sequential(
                Conv2dNormActivation(self.channels[2], AUXILIARY_WIDTH, kernel_size=3),
                nn.Dropout2d(0.1),
                nn.Conv2d(AUXILIARY_WIDTH, classes, kernel_size=1),
            )
        if distributed.several_gpus():  # each process sees only a few images of a batch
            self.decoder = nn.SyncBatchNorm.convert_sync_batchnorm(self.decoder)
            if self.auxiliary is not None:
                self.auxiliary = nn.SyncBatchNorm.convert_sync_batchnorm(self.auxiliary)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, K, S, S] of images [B, C, S, S]."""
        return self._logits(self.forward_features(images), images)

    def _logits(self, maps: list[Tensor], images: Tensor) -> Tensor:
        features = self.decoder([None, None, *maps])  # [B, width, S / 4, S / 4]
        return _enlarged(self.head(features), images)

    def loss(self, batch: Batch) -> Tensors:
        """Return the ``loss`` of ``images`` [B, C, S, S] with the class of each pixel, ``mask``
        int64 [B, S, S].

        With an auxiliary head also its unweighted part, ``auxiliary``.
        """
        images = batch["images"]
        mask = batch["mask"]
        maps = self.forward_features(images)
        loss = pixel_cross_entropy(self._logits(maps, images), mask)
        if self.auxiliary is None:
            return {"loss": loss}
        logits = _enlarged(self.auxiliary(maps[2]), images)  # from [B, K, S / 16, S / 16]
        auxiliary = pixel_cross_entropy(logits, mask)
        return {"loss": loss + self.auxiliary_weight * auxiliary, "auxiliary": auxiliary}


def _enlarged(logits: Tensor, images: Tensor) -> Tensor:
    """Return logits at the size of images, [B, K, H, W]."""
    return F.interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=False)


def pixel_cross_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the cross-entropy of each pixel's class, a scalar.

    The mean is over an image's pixels with a class, then over images. So the loss does not depend
    on how a batch is split. An image without such pixels adds 0.

    Args:
        logits: [B, K, S, S].
        mask: Class of each pixel, int64 [B, S, S]. 255: none.
    """
    # [B, S, S]
    losses = F.cross_entropy(at_least_fp32(logits), mask, ignore_index=IGNORED, reduction="none")
    pixels = (mask != IGNORED).sum((1, 2))
    return (losses.sum((1, 2)) / pixels.clamp(min=1)).mean()


def build_network(
    backbone: Backbone,
    size: int,
    in_chans: int,
    task: str,
    **layers: Any,
) -> Detector | Segmenter:
    """Put a :class:`Detector` (``task`` detect) or :class:`Segmenter` (segment) on a backbone.

    ``layers`` are their other arguments.
    """
    kind = Detector if task == "detect" else Segmenter
    return kind(backbone, size, in_chans=in_chans, **layers)


def saved_network(saved: Checkpoint) -> Detector | Segmenter:
    """Return the network of a run of ``idmm detect`` or ``idmm segment``, in evaluation mode."""
    assert saved.name is not None
    assert isinstance(saved.size, int)
    kwargs = dict(saved.kwargs)
    kwargs.pop("img_size", None)
    dynamic = saved.extra["short_side"] is not None
    backbone = create_backbone(saved.name, saved.size, dynamic_size=dynamic, **kwargs)
    network = build_network(backbone, saved.size, saved.in_chans, **saved.extra["layers"])
    network.load_state_dict(saved.state)
    return network.eval()
