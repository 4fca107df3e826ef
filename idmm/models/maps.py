"""Maps of several strides from any backbone whose features form a grid."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from timm.models._manipulate import group_parameters
from torch import Tensor, nn

from idmm.models.base import Backbone
from idmm.models.build import black_image
from idmm.models.grid import as_grid, token_grid

STRIDES = (4, 8, 16, 32)  # pixels from one place of a map to the next


FINAL = -1  # layer of the final features


class _Source(NamedTuple):
    """A map of a backbone."""

    layer: int  # timm's number, or FINAL
    stride: float
    channels: int


def _deepest_maps(backbone: Backbone, image: Tensor) -> list[_Source]:
    """Return the deepest map of each stride, for an image [1, C, S, S]."""
    layers: dict[int, Tensor] = {}
    with torch.no_grad():
        if hasattr(backbone, "forward_intermediates"):  # as most of timm's models
            maps = backbone.forward_intermediates(image, intermediates_only=True)
            layers = dict(enumerate(maps))
        layers[FINAL] = token_grid(backbone, image)
    sources = {}
    for layer, features in layers.items():
        stride = image.shape[-1] / features.shape[-1]
        sources[stride] = _Source(layer, stride, features.shape[1])
    return list(sources.values())


def _upsampling(width: int, steps: int) -> nn.Sequential:
    """Return layers that double a map's side ``steps`` times, and halve its channels as often."""
    layers: list[nn.Module] = []
    for step in range(steps):
        channels = width >> step
        if step:
            layers += [LayerNorm2d(channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))
    return nn.Sequential(*layers)


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

    def __init__(self, backbone: Backbone, size: int, in_chans: int = 3):
        super().__init__()
        self.backbone = backbone
        image = black_image(backbone, in_chans, size)
        training = backbone.training
        backbone.eval()
        maps = _deepest_maps(backbone, image)
        self.several = len(maps) > 1
        self.levels = nn.ModuleList()
        self.channels: list[int] = []
        layers = []
        for stride in STRIDES:
            source = min(maps, key=lambda one: abs(math.log2(one.stride / stride)))
            steps = max(0, round(math.log2(source.stride / stride)))
            self.levels.append(_upsampling(source.channels, steps))
            self.channels.append(source.channels >> steps)
            layers.append(source.layer)
        self.layers = sorted({*layers} - {FINAL})
        # the numbers of their maps among those of :meth:`_maps`
        self.sources = [[*self.layers, FINAL].index(layer) for layer in layers]
        self._freeze_unused(image)
        backbone.train(training)

    def _freeze_unused(self, image: Tensor) -> None:
        """Freeze parameters of the backbone that no map depends on."""
        trained = [weight for weight in self.backbone.parameters() if weight.requires_grad]
        # the caller may have switched it off
        with torch.inference_mode(False), torch.enable_grad():
            sums = [features.sum() for features in self._maps(image)]
            total = torch.stack(sums).sum()
            gradients = torch.autograd.grad(total, trained, allow_unused=True)
        for weight, gradient in zip(trained, gradients, strict=True):
            weight.requires_grad_(gradient is not None)

    def _maps(self, images: Tensor) -> list[Tensor]:
        """Return the outputs [B, D, h, w] of ``layers``, and the final features as the last."""
        if not self.layers:
            return [token_grid(self.backbone, images)]
        final, maps = self.backbone.forward_intermediates(images, indices=self.layers)
        return [*maps, as_grid(self.backbone, final, images.shape[-2:])]

    def forward_features(self, images: Tensor) -> list[Tensor]:
        """Return the maps of images [B, C, H, W]: [B, channels[i], h, w].

        h is H / STRIDES[i] if 32 divides H.
        """
        maps = self._maps(images)
        rows, columns = (math.ceil(side / STRIDES[-1]) for side in images.shape[-2:])
        outputs = []
        for level, source, stride in zip(self.levels, self.sources, STRIDES, strict=True):
            output = level(maps[source])
            shape = (rows * STRIDES[-1] // stride, columns * STRIDES[-1] // stride)
            if output.shape[-2:] != shape:
                output = F.adaptive_max_pool2d(output, shape)
            outputs.append(output)
        return outputs

    def no_weight_decay(self) -> set[str]:
        """Return names of the backbone's parameters without weight decay."""
        own = getattr(self.backbone, "no_weight_decay", set)  # not all of timm's models have it
        return {f"backbone.{name}" for name in own()}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], float]:
        """Return layer numbers for timm's layer-wise lr decay: the backbone's, the rest on top."""
        matcher = getattr(self.backbone, "group_matcher", None)  # not all of timm's models have it
        if matcher is None:
            return lambda name: 0
        layers = group_parameters(self.backbone, matcher(coarse=coarse), reverse=True)
        return lambda name: layers.get(name.removeprefix("backbone."), math.inf)
