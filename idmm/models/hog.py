"""Hand-made features as a backbone without weights: oriented gradients, a histogram of colours.

Dalal and Triggs, "Histograms of Oriented Gradients for Human Detection", CVPR 2005, with the bins,
cells and blocks of scikit-image's ``feature.hog``. The histogram is compared by the Hellinger
distance: its features are square roots of shares. Gradients and histogram each have length 1.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor

from idmm.config import IMAGENET_MEAN, IMAGENET_STD
from idmm.models.base import Backbone, Tensors, resized

# sides of the resized image and of a cell (pixels)
SIDE = 64
CELL = 8
ORIENTATIONS = 9  # of gradients, over half a turn
FLAT = 1e-6  # smaller differences of grey levels are rounding errors and become 0
CLIP = 0.2  # largest value that L2-Hys leaves in a block (paper: section 6.4)
# weights of red, green and blue in a grey level (scikit-image's rgb2gray)
LUMA = (0.2125, 0.7154, 0.0721)
HSV_BINS = (8, 4, 4)  # hue, saturation and value
CHANNEL_BINS = 32  # per channel if the image is not RGB
NUDGE = 1e-4  # bins. A value on the edge of two bins counts for the upper one despite rounding
SMALL = 1e-6  # smallest divisor


def oriented_cells(grey: Tensor) -> Tensor:
    """Return the mean magnitude of gradients per orientation in each cell of 8x8 pixels.

    Args:
        grey: Images [B, H, W] with multiples of 8 for H and W.

    Returns:
        [B, 9, H/8, W/8]. Orientation k spans 20 k to 20 (k + 1) degrees.
    """
    # [B, H, W], 0 at the border
    rows = grey[:, 2:] - grey[:, :-2]
    columns = grey[:, :, 2:] - grey[:, :, :-2]
    down = F.hardshrink(F.pad(rows, (0, 0, 1, 1)), FLAT)
    right = F.hardshrink(F.pad(columns, (1, 1)), FLAT)
    # opposite gradients have the same orientation
    upward = (down < 0) | ((down == 0) & (right < 0))
    sign = torch.where(upward, -1.0, 1.0)
    past = [torch.ones_like(upward)]
    for k in range(1, ORIENTATIONS):
        edge = math.pi * k / ORIENTATIONS
        across = down * math.cos(edge) - right * math.sin(edge)
        past.append(sign * across >= 0)
    # [B, 9, H, W], 1 up to the orientation
    reached = torch.stack(past, dim=1).to(grey.dtype)
    later = F.pad(reached[:, 1:], (0, 0, 0, 0, 0, 1))
    magnitude = (down.square() + right.square()).sqrt()
    return F.avg_pool2d(magnitude[:, None] * (reached - later), CELL)


def normalised_blocks(cells: Tensor) -> Tensor:
    """Return blocks of 2x2 cells normalised by L2-Hys.

    [B, 9, h, w] -> [B, h - 1, w - 1, 2, 2, 9].
    """
    windows = cells.unfold(2, 2, 1).unfold(3, 2, 1)
    blocks = windows.permute(0, 2, 3, 4, 5, 1)

    def unit(x: Tensor) -> Tensor:
        x = x * 1e5  # with epsilon 1e-5 as 1, which the ONNX exporter does not round to 0
        squares = x.square().sum((3, 4, 5), keepdim=True)
        return x / (squares + 1).sqrt()

    return unit(unit(blocks).clamp(max=CLIP))


def hsv_histogram(rgb: Tensor) -> Tensor:
    """Return the share of pixels per bin of hue, saturation and value.

    [B, 3, H, W] in [0, 1] -> [B, 128].
    """
    red, green, blue = rgb.unbind(1)
    # [B, H, W]
    value = rgb.amax(1)
    spread = value - rgb.amin(1)
    wide = spread.clamp(min=SMALL)
    sextant = torch.where(value == green, 2 + (blue - red) / wide, 4 + (red - green) / wide)
    # in [-1, 5]; 0 if all channels are the same
    sextant = torch.where(value == red, (green - blue) / wide, sextant)
    hues, saturations, values = HSV_BINS
    hue = (sextant / 6 * hues + hues + NUDGE).long() % hues
    saturation = _bin(spread / value.clamp(min=SMALL), saturations)
    bins = (hue * saturations + saturation) * values + _bin(value, values)
    return _shares(bins, math.prod(HSV_BINS))


def _bin(x: Tensor, bins: int) -> Tensor:
    return (x * bins + NUDGE).long().clamp(0, bins - 1)


def _shares(bins: Tensor, count: int) -> Tensor:
    """Return the share of pixels per bin, [B, H, W] bin numbers -> [B, count]."""
    bins = bins.flatten(1)
    ones = torch.ones_like(bins, dtype=torch.float32) / bins.shape[1]
    return ones.new_zeros(bins.shape[0], count).scatter_add(1, bins, ones)


class Hog(Backbone):
    """Oriented gradients and a histogram of colours, with timm's interface.

    It undoes the normalisation of images by its buffers ``mean`` and ``std``, which are saved with
    the weights, and resizes to 64x64 pixels, bilinear with antialiasing. RGB images have 1,764
    features of the grey level's gradients and 128 of the joint histogram of hue, saturation and
    value. Other images have 1,764 of the channel mean's gradients and 32 per channel. Only the
    classifier learns.

    Args:
        in_chans: Channels of images.
        num_classes: Of the classifier; 0: none.
        global_pool: Kept for timm, which passes it to every model. There is nothing to pool.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, in_chans: int = 3, num_classes: int = 1000, global_pool: str = ""):
        super().__init__()
        mean = torch.tensor(IMAGENET_MEAN)
        std = torch.tensor(IMAGENET_STD)
        self.grey_weights: Sequence[float] = LUMA
        colours = math.prod(HSV_BINS)
        if in_chans != 3:
            mean = torch.zeros(in_chans)
            std = torch.ones(in_chans)
            self.grey_weights = [1 / in_chans] * in_chans
            colours = CHANNEL_BINS * in_chans
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        blocks = (SIDE // CELL - 1) ** 2
        self.hand_made = blocks * 4 * ORIENTATIONS + colours
        self.num_features = self.hand_made
        self.head_hidden_size = self.hand_made
        self.reset_classifier(num_classes, global_pool)

    def set_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set mean and std of the images' normalisation, per channel, on pixel values in [0, 1]."""
        self.mean.copy_(torch.tensor(mean))
        self.std.copy_(torch.tensor(std))

    def checkpoint_filter_fn(self, state_dict: Tensors) -> Tensors:
        """Return weights without mean and std of images with other channels."""
        fit = dict(state_dict)
        for name in ("mean", "std"):
            if name in fit and fit[name].shape != self.mean.shape:
                del fit[name]
        return fit

    def pixels(self, x: Tensor) -> Tensor:
        """Return pixel values in [0, 1], [B, in_chans, H, W] -> [B, in_chans, 64, 64]."""
        values = x.float() * self.std[:, None, None] + self.mean[:, None, None]
        images = resized(values, SIDE)
        # libraries differ in the last digits. 0.3 avoids ties
        return (images * 65535 + 0.3).floor() / 65535

    def grey(self, pixels: Tensor) -> Tensor:
        """Return grey levels, [B, in_chans, H, W] -> [B, H, W]."""
        channels = pixels.unbind(1)
        grey = torch.zeros_like(channels[0])
        for weight, channel in zip(self.grey_weights, channels, strict=True):
            grey = grey + weight * channel
        return grey

    def features_of(self, pixels: Tensor) -> Tensor:
        """Return gradients and histogram of colours, [B, in_chans, 64, 64] in [0, 1] -> [B, D]."""
        channels = pixels.unbind(1)
        gradients = normalised_blocks(oriented_cells(self.grey(pixels))).flatten(1)
        if len(channels) == 3:
            shares = hsv_histogram(pixels)
        else:
            each = [_shares(_bin(channel, CHANNEL_BINS), CHANNEL_BINS) for channel in channels]
            shares = torch.cat(each, dim=1) / len(each)
        return torch.cat([F.normalize(gradients, eps=SMALL), shares.sqrt()], dim=1)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the features, [B, in_chans, H, W] -> [B, D]."""
        return self.features_of(self.pixels(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits, [B, D] -> [B, num_classes], or the unchanged features."""
        if pre_logits:
            return x
        outputs: Tensor = self.head(x)
        return outputs


default_cfgs = generate_default_cfgs({"hog": dict(input_size=(3, SIDE, SIDE), classifier="head")})


@register_model
def hog(pretrained: bool = False, **kwargs: Any) -> Hog:
    """Build oriented gradients and a histogram of colours, without weights."""
    return build_model_with_cfg(Hog, "hog", pretrained, **kwargs)
