"""Networks for boxes, masks and classes of pixels, on any backbone whose features have places.

Detection is torchvision's Faster and Mask R-CNN. Segmentation is UPerNet (Xiao et al., ECCV 2018), as in the drloc
supplement, with the decoder of segmentation_models_pytorch: unlike that library's models it takes maps of any backbone.
"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from timm.models._manipulate import group_parameters
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from idmm.config.dense import DENSE_LIBRARIES
from idmm.errors import SizeError, UserError, needed
from idmm.files import weights_label
from idmm.models.build import black_image, create_backbone
from idmm.models.grid import as_grid
from idmm.models.weights import Checkpoint

STRIDES = (4, 8, 16, 32)  # pixels from a place of a map to the next
FULL_SIZE = 640  # side of images (pixels) from which on anchors are as large as the papers'


def _backbone_maps(backbone: nn.Module, images: Tensor, layers: list[int | None]) -> list[Tensor]:
    """Returns the outputs [B, D, h, w] of a backbone's layers, by timm's rising numbers; the last is None: what
    ``forward_features`` gives."""
    if layers == [None]:
        return [as_grid(backbone, backbone.forward_features(images), images.shape[-2:])]
    final, taken = backbone.forward_intermediates(images, indices=layers[:-1])
    return [*taken, as_grid(backbone, final, images.shape[-2:])]


def _maps_by_stride(backbone: nn.Module, black: Tensor) -> dict[float, tuple[int | None, int]]:
    """Returns for each stride (pixels) the deepest layer with a map of it, as :func:`_backbone_maps` names them, and
    its channels."""
    maps: list[tuple[int | None, Tensor]] = []
    with torch.no_grad():
        if hasattr(backbone, "forward_intermediates"):
            maps += enumerate(backbone.forward_intermediates(black, intermediates_only=True))
        maps.append((None, _backbone_maps(backbone, black, [None])[0]))
    return {black.shape[-1] / made.shape[-1]: (layer, made.shape[1]) for layer, made in maps}


def _enlarged(width: int, steps: int) -> nn.Sequential:
    """Doubles a map's side and halves its channels so many times: [B, D, n, n] -> [B, D / 2^steps, n 2^steps, ...]."""
    layers = []
    for step in range(steps):
        layers += [LayerNorm2d(width >> step), nn.GELU()] if step else []
        layers.append(nn.ConvTranspose2d(width >> step, width >> step + 1, kernel_size=2, stride=2))
    return nn.Sequential(*layers)


class DenseNetwork(nn.Module):
    """A backbone with maps of strides 4, 8, 16 and 32, for what makes a prediction for places of them.

    Each map is made of the backbone's map with the nearest stride, of several the deepest; the last of all is what
    ``forward_features`` gives. Where the stride differs, as three of four do in a plain transformer, the map is
    enlarged by transposed convolutions or max-pooled: the simple feature pyramid of ViTDet (Li et al., ECCV 2022,
    section 3.1).

    Parameters of the backbone that no map depends on (a norm after pooling) are taken out of training: processes that
    train together wait for the gradient of every other one.

    Args:
        backbone: A timm model without a classifier.
        size: Side of the images (pixels).
        in_chans: Their channels.

    Attributes:
        backbone: The plain timm model.
        channels: Of the four maps.
        several: Whether the backbone gives maps of several strides.

    Raises:
        UserError: Its features have no places.
    """

    def __init__(self, backbone: nn.Module, size: int, in_chans: int = 3):
        super().__init__()
        self.backbone = backbone
        black, training = black_image(backbone, in_chans, size), backbone.training
        backbone.eval()
        found = _maps_by_stride(backbone, black)
        sources = [min(found, key=lambda stride, s=s: abs(math.log2(stride / s))) for s in STRIDES]
        taken = {found[source][0] for source in sources}
        self.layers = [*sorted(taken - {None}), None]
        self.sources = [self.layers.index(found[source][0]) for source in sources]
        self.several = len(found) > 1
        self.levels, self.channels = nn.ModuleList(), []
        for source, stride in zip(sources, STRIDES, strict=True):
            steps, width = max(0, round(math.log2(source / stride))), found[source][1]
            self.levels.append(_enlarged(width, steps))
            self.channels.append(width >> steps)
        trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller has switched off
            total = sum(made.sum() for made in _backbone_maps(backbone, black, self.layers))
            gradients = torch.autograd.grad(total, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)
        backbone.train(training)

    def forward_features(self, images: Tensor) -> list[Tensor]:
        """Returns the maps of images [B, C, S, S]: [B, channels[i], n, n], n = S / STRIDES[i] where 32 divides S."""
        maps, least = _backbone_maps(self.backbone, images, self.layers), math.ceil(images.shape[-1] / STRIDES[-1])
        sizes = [least * STRIDES[-1] // stride for stride in STRIDES]
        made = [level(maps[source]) for level, source in zip(self.levels, self.sources, strict=True)]
        return [
            one if one.shape[-1] == size else F.adaptive_max_pool2d(one, size)
            for one, size in zip(made, sizes, strict=True)
        ]

    def no_weight_decay(self) -> set[str]:
        """Names of the backbone's parameters that it exempts from weight decay."""
        names = self.backbone.no_weight_decay() if hasattr(self.backbone, "no_weight_decay") else ()
        return {f"backbone.{name}" for name in names}

    def group_matcher(self, coarse: bool = False):
        """For timm's layer-wise lr decay: the backbone's own layers, then all the rest as the uppermost."""
        matcher = getattr(self.backbone, "group_matcher", None)
        layers = group_parameters(self.backbone, matcher(coarse=coarse), reverse=True) if matcher else {}
        return lambda name: layers.get(name.removeprefix("backbone."), math.inf if layers else 0)


class Detector(DenseNetwork):
    """Faster R-CNN, or Mask R-CNN, of torchvision on a feature pyramid of any backbone.

    The pyramid is an FPN (Lin et al., CVPR 2017) where the backbone's maps have several strides, else the simple one of
    ViTDet. Widths follow ``width``; at 256 all are torchvision's. On images smaller than 640 pixels anchors, and the
    size by which boxes choose a map, are smaller in proportion.

    Args:
        backbone: A timm model without a classifier, built for ``size``.
        size: Side of the images (pixels), a multiple of 32.
        classes: K, without the background.
        width: Channels of the pyramid.
        masks: Whether masks are predicted, too.
        in_chans: Channels of the images.

    Raises:
        SizeError: 32 does not divide the size.
        UserError: The backbone's features have no places.
    """

    def __init__(
        self, backbone: nn.Module, size: int, classes: int, width: int = 256, masks: bool = False, in_chans: int = 3
    ):
        if size % STRIDES[-1]:
            raise SizeError(f"image size {size}x{size}: wanted are multiples of {STRIDES[-1]} pixels for detection")
        super().__init__(backbone, size, in_chans)
        self.masks = masks
        if self.several:
            self.pyramid = FeaturePyramidNetwork(self.channels, width, LastLevelMaxPool(), norm_layer=LayerNorm2d)
        else:
            self.pyramid = _SimplePyramid(self.channels, width)
        share = min(1.0, size / FULL_SIZE)
        anchors = _Anchors(tuple((8 * s * share,) for s in (*STRIDES, 64)), ((0.5, 1.0, 2.0),) * 5)

        def pool(side: int) -> MultiScaleRoIAlign:
            return MultiScaleRoIAlign(["0", "1", "2", "3"], side, sampling_ratio=2, canonical_scale=224 * share)

        heads = {}
        if masks:
            heads = {"mask_roi_pool": pool(14), "mask_head": MaskRCNNHeads(width, (width,) * 4, 1)}
            heads["mask_predictor"] = MaskRCNNPredictor(width, width, classes + 1)
        places = nn.Identity()
        places.out_channels = width  # all that torchvision asks of what makes the maps
        made = (MaskRCNN if masks else FasterRCNN)(
            places,
            rpn_anchor_generator=anchors,
            box_roi_pool=pool(7),
            box_head=TwoMLPHead(width * 7 * 7, 4 * width),
            box_predictor=FastRCNNPredictor(4 * width, classes + 1),
            box_batch_size_per_image=2 * width,
            **heads,
        )
        self.rpn, self.roi_heads = made.rpn, made.roi_heads
        for part in (self.rpn.head, self.roi_heads.box_predictor):
            part.register_forward_hook(_in_fp32)

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        """Finds objects in images [B, C, S, S], in evaluation mode.

        Returns:
            For each image ``boxes`` [n, 4] (x1, y1, x2, y2; pixels), ``labels`` int64 [n] from 0, ``scores`` [n] from
            the highest down, and with masks ``masks`` [n, 1, 28, 28]: shares within the boxes.
        """
        found, _ = self._run(images, None)
        for one in found:
            one["labels"] = one["labels"] - 1  # torchvision's 0 is the background
        return found

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the losses of a batch, in training mode, by name; their sum is what is learned from.

        Args:
            batch: ``images`` [B, C, S, S], ``boxes`` [B, M, 4] (pixels), ``labels`` int64 [B, M] (-1: no box), with
                masks ``masks`` uint8 [B, M, S, S].
        """
        targets = []
        for number, labels in enumerate(batch["labels"]):
            there = labels >= 0
            target = {"boxes": batch["boxes"][number, there], "labels": labels[there] + 1}
            if self.masks:
                target["masks"] = batch["masks"][number, there]
            targets.append(target)
        return self._run(batch["images"], targets)[1]

    def _run(self, images: Tensor, targets: list[dict] | None) -> tuple[list[dict], dict[str, Tensor]]:
        maps = OrderedDict((str(number), made) for number, made in enumerate(self.forward_features(images)))
        features = self.pyramid(maps)  # five, of strides 4 to 64
        sizes = [tuple(images.shape[-2:])] * len(images)
        proposals, first = self.rpn(ImageList(images, sizes), features, targets)
        found, second = self.roi_heads(features, proposals, sizes, targets)
        return found, first | second


class _Anchors(AnchorGenerator):
    """Anchors in fp32, whatever the maps are in."""

    def set_cell_anchors(self, dtype, device):
        super().set_cell_anchors(torch.float32, device)


def _in_fp32(part: nn.Module, inputs: tuple, outputs: tuple) -> tuple:
    """Makes offsets fp32: torchvision computes boxes in their arithmetic, and beyond 256 pixels bf16 has but every
    second one."""
    return tuple([one.float() for one in of] if isinstance(of, list) else of.float() for of in outputs)


class _SimplePyramid(nn.Module):
    """ViTDet's convolutions on each map alone, and a fifth map, of stride 64: -> [B, width, n, n] each."""

    def __init__(self, channels: list[int], width: int):
        super().__init__()
        plain = dict(norm_layer=LayerNorm2d, activation_layer=None)
        self.levels = nn.ModuleList(
            nn.Sequential(Conv2dNormActivation(c, width, 1, **plain), Conv2dNormActivation(width, width, 3, **plain))
            for c in channels
        )

    def forward(self, maps: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {name: level(maps[name]) for name, level in zip(maps, self.levels, strict=True)}
        return made | {"pool": F.max_pool2d(list(made.values())[-1], kernel_size=1, stride=2)}


class Segmenter(DenseNetwork):
    """UPerNet on any backbone.

    Args:
        backbone: A timm model without a classifier, built for ``size``.
        size: Side of the images (pixels).
        classes: K.
        width: Channels of the decoder.
        in_chans: Channels of the images.

    Raises:
        UserError: The backbone's features have no places.
    """

    def __init__(self, backbone: nn.Module, size: int, classes: int, width: int = 256, in_chans: int = 3):
        super().__init__(backbone, size, in_chans)
        from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder  # of the extra 'dense'

        self.decoder = UPerNetDecoder([0, 0, *self.channels], decoder_channels=width)
        self.head = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, S, S] -> logits [B, K, S, S]."""
        made = self.decoder([None, None, *self.forward_features(images)])  # [B, width, S / 4, S / 4]
        return F.interpolate(self.head(made), size=images.shape[-2:], mode="bilinear", align_corners=False)


def build_network(saved: Checkpoint) -> Detector | Segmenter:
    """Builds the network that ``idmm detect`` or ``idmm segment`` wrote, with its weights, in evaluation mode.

    Raises:
        UserError: It is the network of neither.
    """
    known, label = saved.extra, weights_label(saved.source, saved.field)
    if known.get("task") not in ("detect", "segment"):
        raise UserError(f"{label} is of neither idmm detect nor idmm segment; wanted such a run")
    needed(label.rstrip(":"), DENSE_LIBRARIES[known["task"]], "dense")
    kwargs = {key: value for key, value in saved.kwargs.items() if key not in ("img_size", "num_classes")}
    backbone = create_backbone(saved.name, saved.size, **kwargs)
    given = backbone, saved.size, len(known["classes"]), known["pyramid_width"]
    more = {"in_chans": saved.in_chans}
    network = Detector(*given, known["masks"], **more) if known["task"] == "detect" else Segmenter(*given, **more)
    network.load_state_dict(saved.state)
    return network.eval()
