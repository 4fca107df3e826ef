"""Maps of several strides from any backbone whose features form a grid."""

import math

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from timm.models._manipulate import group_parameters
from torch import Tensor, nn

from idmm.models.build import black_image
from idmm.models.grid import as_grid, token_grid

STRIDES = (4, 8, 16, 32)  # pixels from one place of a map to the next


def _backbone_maps(backbone: nn.Module, images: Tensor, layers: list[int | None]) -> list[Tensor]:
    """Return the outputs [B, D, h, w] of layers, by timm's ascending numbers and last None for the
    final features."""
    if layers == [None]:
        return [token_grid(backbone, images)]
    final, maps = backbone.forward_intermediates(images, indices=layers[:-1])
    return [*maps, as_grid(backbone, final, images.shape[-2:])]


class MultiScaleBackbone(nn.Module):
    """A backbone with maps of strides 4, 8, 16 and 32.

    Each map comes from the backbone's map with the nearest stride, the deepest of several. The last
    one is always the final features. If the stride differs, as for three of four maps of a plain
    transformer, the map is enlarged by transposed convolutions or max-pooled: ViTDet's simple
    feature pyramid (Li et al., ECCV 2022, section 3.1).

    Backbone parameters without a gradient (a norm after pooling) are frozen. Processes that train
    together would wait for their gradients.

    Args:
        backbone: A timm model without a classifier.
        size: Side of the images (pixels).
        in_chans: Their channels.

    Attributes:
        backbone: The unchanged timm model.
        channels: Of the four maps.
        several: Whether the backbone has maps of several strides.

    Raises:
        UserError: Its features do not form a grid.
    """

    def __init__(self, backbone: nn.Module, size: int, in_chans: int = 3):
        super().__init__()
        self.backbone = backbone
        image = black_image(backbone, in_chans, size)
        training = backbone.training
        backbone.eval()
        maps = []
        with torch.no_grad():
            if hasattr(backbone, "forward_intermediates"):
                maps += enumerate(backbone.forward_intermediates(image, intermediates_only=True))
            maps.append((None, _backbone_maps(backbone, image, [None])[0]))
        # the deepest layer per stride, and its channels
        layers = {size / features.shape[-1]: (layer, features.shape[1]) for layer, features in maps}
        sources = [min(layers, key=lambda stride, s=s: abs(math.log2(stride / s))) for s in STRIDES]
        self.layers = [*sorted({layers[source][0] for source in sources} - {None}), None]
        self.sources = [self.layers.index(layers[source][0]) for source in sources]
        self.several = len(layers) > 1
        self.levels = nn.ModuleList()
        self.channels = []
        for source, stride in zip(sources, STRIDES, strict=True):
            steps = max(0, round(math.log2(source / stride)))
            width = layers[source][1]
            upsampling = []
            for step in range(steps):  # each doubles the side and halves the channels
                upsampling += [LayerNorm2d(width >> step), nn.GELU()] if step else []
                upsampling.append(
                    nn.ConvTranspose2d(width >> step, width >> step + 1, kernel_size=2, stride=2)
                )
            self.levels.append(nn.Sequential(*upsampling))
            self.channels.append(width >> steps)
        trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        # the caller may have switched it off
        with torch.inference_mode(False), torch.enable_grad():
            total = sum(features.sum() for features in _backbone_maps(backbone, image, self.layers))
            gradients = torch.autograd.grad(total, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)
        backbone.train(training)

    def forward_features(self, images: Tensor) -> list[Tensor]:
        """Return the maps of images [B, C, H, W]: [B, channels[i], h, w], h = H / STRIDES[i] if 32
        divides H."""
        maps = _backbone_maps(self.backbone, images, self.layers)
        smallest = [math.ceil(side / STRIDES[-1]) for side in images.shape[-2:]]
        outputs = []
        for level, source, stride in zip(self.levels, self.sources, STRIDES, strict=True):
            output = level(maps[source])
            shape = tuple(side * STRIDES[-1] // stride for side in smallest)
            outputs.append(
                output if output.shape[-2:] == shape else F.adaptive_max_pool2d(output, shape)
            )
        return outputs

    def no_weight_decay(self) -> set[str]:
        """Return names of the backbone's parameters without weight decay."""
        if hasattr(self.backbone, "no_weight_decay"):
            names = self.backbone.no_weight_decay()
        else:
            names = ()
        return {f"backbone.{name}" for name in names}

    def group_matcher(self, coarse: bool = False):
        """Return layer numbers for timm's layer-wise lr decay: the backbone's own, and the rest on
        top."""
        matcher = getattr(self.backbone, "group_matcher", None)
        if matcher:
            layers = group_parameters(self.backbone, matcher(coarse=coarse), reverse=True)
        else:
            layers = {}
        return lambda name: layers.get(name.removeprefix("backbone."), math.inf if layers else 0)
