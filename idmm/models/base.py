"""Shared by our models: timm's interface, windows, names of released weights, resizing."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

Grid = Sequence[int]  # rows and columns, or height and width
Tensors = dict[str, Tensor]
# kernel, stride and padding of each step from pixels to tokens
WINDOWS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


class Backbone(nn.Module):
    """timm's interface of an image model, which :func:`idmm.models.create_backbone` checks.

    Our models inherit from it. For those of timm, which do not, it is only a type.

    Attributes:
        num_features: Width D of the features that ``head`` classifies.
        feature_width: Width of the pooled features, if it was measured.
        num_classes: Of the classifier; 0: none.
        pretrained_cfg: What timm knows of the model and of its images.
    """

    num_features: int
    feature_width: int
    num_classes: int
    pretrained_cfg: dict[str, Any]
    default_cfg: dict[str, Any]
    forward_intermediates: Callable[..., Any]  # of most of timm's models
    global_pool = ""

    def get_classifier(self) -> nn.Module:
        """Return the classifier, an ``Identity`` if there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier (0 classes: none) and, unless None, the pooling."""
        self.global_pool = global_pool or self.global_pool
        self.num_classes = num_classes
        self.head: nn.Module = nn.Identity()
        if num_classes > 0:
            tensor = any_tensor(self)
            layer = init_linear(nn.Linear(self.num_features, num_classes))
            self.head = layer.to(tensor.device, tensor.dtype).train(self.training)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return tokens or maps of images [B, in_chans, H, W]."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits [B, num_classes] of tokens or maps, or the pooled features [B, D]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, num_classes], or features without classes, of [B, in_chans, H, W]."""
        return self.forward_head(self.forward_features(x))


def any_tensor(model: nn.Module) -> Tensor:
    """Return a parameter or buffer of a model, for its device and dtype."""
    return next(itertools.chain(model.parameters(), model.buffers()))


def init_linear(layer: nn.Linear) -> nn.Linear:
    """Draw weights with std 0.02 and zero the bias, as in the releases of T2T-ViT and CvT."""
    trunc_normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class Released:
    """A model with a public release, whose weights have other names."""

    release_names: Sequence[tuple[str, str]]  # patterns of names in the release, and our names

    def checkpoint_filter_fn(self, state_dict: Tensors) -> Tensors:
        """Return weights with the public release's names replaced by ours."""
        for pattern, name in self.release_names:
            state_dict = {re.sub(pattern, name, key): value for key, value in state_dict.items()}
        return state_dict


def as_map(x: Tensor, grid: Grid) -> Tensor:
    """Return tokens [B, h w, D] as a map [B, D, h, w], without a copy."""
    outputs: Tensor = x.transpose(1, 2).unflatten(2, grid)
    return outputs


def resized(images: Tensor, side: int) -> Tensor:
    """Return images [B, C, H, W] as [B, C, side, side], bilinear with antialiasing."""
    if images.shape[2:] == (side, side):
        return images
    return F.interpolate(images.float(), size=(side, side), mode="bilinear", antialias=True)


def window_grids(size: Grid) -> list[Grid]:
    """Return the grid of windows after each step, for an image of (height, width)."""
    grids: list[Grid] = []
    for kernel, stride, padding in WINDOWS:
        size = tuple((side + 2 * padding - kernel) // stride + 1 for side in size)
        grids.append(size)
    return grids


def sinusoids(positions: int, dim: int) -> Tensor:
    """Return the sinusoids of Vaswani et al. (2017, section 3.5), [1, positions, dim].

    Even columns are sines.
    """
    column = torch.arange(dim)
    position = torch.arange(positions, dtype=torch.float64)[:, None]
    angle = position / 10000 ** (column // 2 * 2 / dim)
    table = torch.where(column % 2 == 0, angle.sin(), angle.cos())
    return table.float()[None]
