"""Networks for detection and segmentation on any backbone whose features form a grid.

Detection is torchvision's Faster and Mask R-CNN. Segmentation is UPerNet (Xiao et al., ECCV 2018),
as in the drloc supplement. Its decoder is that of segmentation_models_pytorch, whose models do not
accept maps of any backbone.
"""

from collections import OrderedDict
from functools import partial

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
from idmm.dense.cascade import BOX_WEIGHTS, IOUS, CascadeHeads, SharedBoxPredictor
from idmm.dense.targets import IGNORED, Size
from idmm.errors import SizeError
from idmm.methods.common import at_least_fp32
from idmm.models.base import Tensors
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
        backbone: nn.Module,
        size: int,
        classes: int,
        width: int = 256,
        masks: bool = False,
        in_chans: int = 3,
        cascade: bool = False,
    ):
        if size % STRIDES[-1]:
            raise SizeError(
                f"image size {size}x{size}: expected a multiple of {STRIDES[-1]} pixels for detection"
            )
        super().__init__(backbone, size, in_chans)
        self.masks = masks
        if self.several:
            self.pyramid = FeaturePyramidNetwork(
                self.channels, width, LastLevelMaxPool(), norm_layer=LayerNorm2d
            )
        else:
            self.pyramid = _SimplePyramid(self.channels, width)
        share = min(1.0, size / FULL_SIZE)
        anchors = _Anchors(tuple((8 * s * share,) for s in (*STRIDES, 64)), ((0.5, 1.0, 2.0),) * 5)

        def pool(side: int) -> MultiScaleRoIAlign:
            return MultiScaleRoIAlign(
                ["0", "1", "2", "3"], side, sampling_ratio=2, canonical_scale=224 * share
            )

        def model(iou: float, box_weights: tuple[float, ...]) -> FasterRCNN:
            mask_heads = {}
            if masks:
                mask_heads["mask_roi_pool"] = pool(14)
                mask_heads["mask_head"] = MaskRCNNHeads(width, (width,) * 4, 1)
                mask_heads["mask_predictor"] = MaskRCNNPredictor(width, width, classes + 1)
            placeholder = nn.Identity()
            placeholder.out_channels = width  # torchvision reads only this of a backbone
            predictor = SharedBoxPredictor if cascade else FastRCNNPredictor
            return (MaskRCNN if masks else FasterRCNN)(
                placeholder,
                rpn_anchor_generator=anchors,
                box_roi_pool=pool(7),
                box_head=TwoMLPHead(width * 7 * 7, 4 * width),
                box_predictor=predictor(4 * width, classes + 1),
                box_batch_size_per_image=2 * width,
                box_fg_iou_thresh=iou,
                box_bg_iou_thresh=iou,
                bbox_reg_weights=box_weights,
                **mask_heads,
            )

        if cascade:
            settings = list(zip(IOUS, BOX_WEIGHTS, strict=True))
        else:
            settings = [(IOUS[0], BOX_WEIGHTS[0])]
        models = [model(*each) for each in settings]
        heads = [each.roi_heads for each in models]
        self.rpn = models[0].rpn
        self.roi_heads = CascadeHeads(heads) if cascade else heads[0]
        for predictor in (self.rpn.head, *(head.box_predictor for head in heads)):
            predictor.register_forward_hook(_in_fp32)

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

    def loss(self, batch: Tensors) -> Tensors:
        """Return the ``loss`` of a batch, in training mode, and the terms that it is the sum of.

        Args:
            batch: ``images`` [B, C, H, W], ``boxes`` [B, M, 4] (pixels), ``labels`` int64 [B, M]
                (-1: no box), with masks ``masks`` uint8 [B, M, H, W].
        """
        targets = {"boxes": batch["boxes"], "labels": batch["labels"] + 1}
        if self.masks:
            targets["masks"] = batch["masks"]
        of_images = [
            {name: values[number, valid] for name, values in targets.items()}
            for number, valid in enumerate(batch["labels"] >= 0)
        ]
        _, losses = self._run(batch["images"], of_images)
        terms = {_TERMS[name]: at_least_fp32(value) for name, value in losses.items()}
        return {"loss": sum(terms.values()), **terms}

    def _run(self, images: Tensor, targets: list[dict] | None) -> tuple[list[dict], Tensors]:
        maps = OrderedDict(
            (str(number), features) for number, features in enumerate(self.forward_features(images))
        )
        features = self.pyramid(maps)  # five, of strides 4 to 64
        sizes = [tuple(images.shape[-2:])] * len(images)
        proposals, rpn_losses = self.rpn(ImageList(images, sizes), features, targets)
        outputs, losses = self.roi_heads(features, proposals, sizes, targets)
        return outputs, rpn_losses | losses


class _Anchors(AnchorGenerator):
    """Anchors in fp32 whatever the dtype of the maps."""

    def set_cell_anchors(self, dtype, device):
        super().set_cell_anchors(torch.float32, device)


def _in_fp32(module: nn.Module, inputs: tuple, outputs: tuple) -> tuple:
    """Make offsets fp32. torchvision computes boxes in their dtype, and bf16 skips every other
    pixel beyond 256."""
    return tuple(
        [one.float() for one in value] if isinstance(value, list) else value.float()
        for value in outputs
    )


class _SimplePyramid(nn.Module):
    """ViTDet's convolutions per map, and a fifth map of stride 64: -> [B, width, n, n] each."""

    def __init__(self, channels: list[int], width: int):
        super().__init__()
        conv = partial(Conv2dNormActivation, norm_layer=LayerNorm2d, activation_layer=None)
        self.levels = nn.ModuleList(
            nn.Sequential(conv(c, width, 1), conv(width, width, 3)) for c in channels
        )

    def forward(self, maps: Tensors) -> Tensors:
        outputs = {name: level(maps[name]) for name, level in zip(maps, self.levels, strict=True)}
        return outputs | {"pool": F.max_pool2d(list(outputs.values())[-1], kernel_size=1, stride=2)}


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
        backbone: nn.Module,
        size: int,
        classes: int,
        width: int = 256,
        in_chans: int = 3,
        auxiliary: float = 0.0,
    ):
        super().__init__(backbone, size, in_chans)
        # of the extra 'dense'
        from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder

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
            self.auxiliary = nn.SyncBatchNorm.convert_sync_batchnorm(self.auxiliary)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, K, S, S] of images [B, C, S, S]."""
        return self._logits(self.forward_features(images), images.shape[-2:])

    def _logits(self, maps: list[Tensor], size: Size) -> Tensor:
        features = self.decoder([None, None, *maps])  # [B, width, S / 4, S / 4]
        return _enlarged(self.head(features), size)

    def loss(self, batch: Tensors) -> Tensors:
        """Return the ``loss`` of ``images`` [B, C, S, S] with the class of each pixel, ``mask``
        int64 [B, S, S].

        With an auxiliary head also its unweighted part, ``auxiliary``.
        """
        images = batch["images"]
        mask = batch["mask"]
        maps = self.forward_features(images)
        loss = pixel_cross_entropy(self._logits(maps, images.shape[-2:]), mask)
        if self.auxiliary is None:
            return {"loss": loss}
        # [B, K, S / 16, S / 16] -> [B, K, S, S]
        logits = _enlarged(self.auxiliary(maps[2]), images.shape[-2:])
        auxiliary = pixel_cross_entropy(logits, mask)
        return {"loss": loss + self.auxiliary_weight * auxiliary, "auxiliary": auxiliary}


def _enlarged(logits: Tensor, size: Size) -> Tensor:
    return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)


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
    return (losses.sum((1, 2)) / (mask != IGNORED).sum((1, 2)).clamp(min=1)).mean()


def build_network(
    backbone: nn.Module, size: int, in_chans: int, task: str, **layers
) -> Detector | Segmenter:
    """Put a :class:`Detector` (``task`` detect) or :class:`Segmenter` (segment) with their
    arguments on a backbone."""
    network = {"detect": Detector, "segment": Segmenter}[task]
    return network(backbone, size, in_chans=in_chans, **layers)


def saved_network(saved: Checkpoint) -> Detector | Segmenter:
    """Return the network of a run of ``idmm detect`` or ``idmm segment`` with its weights, in
    evaluation mode."""
    kwargs = {
        key: value for key, value in saved.kwargs.items() if key not in ("img_size", "num_classes")
    }
    dynamic = saved.extra["short_side"] is not None
    backbone = create_backbone(saved.name, saved.size, dynamic_size=dynamic, **kwargs)
    network = build_network(backbone, saved.size, saved.in_chans, **saved.extra["layers"])
    network.load_state_dict(saved.state)
    return network.eval()
