"""Shared by our models: the classifier, windows of tokens, names of released weights and
resizing."""

import itertools
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

Grid = tuple[int, int]
Tensors = dict[str, Tensor]
# kernel, stride and padding of each step from pixels to tokens
WINDOWS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


class WithClassifier(nn.Module):
    """timm's interface of a model whose ``head`` classifies ``num_features`` features."""

    global_pool = ""

    def get_classifier(self) -> nn.Module:
        """Return the classifier, an ``Identity`` if there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier (0 classes: none) and, unless None, the pooling."""
        self.global_pool = global_pool or self.global_pool
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes > 0:
            # has the device and the dtype
            tensor = next(itertools.chain(self.parameters(), self.buffers()))
            layer = init_linear(nn.Linear(self.num_features, num_classes))
            self.head = layer.to(tensor.device, tensor.dtype).train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, [B, in_chans, H, W] -> [B, num_classes], or features [B, D] without a
        classifier."""
        return self.forward_head(self.forward_features(x))


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
        for old, new in self.release_names:
            state_dict = {re.sub(old, new, key): value for key, value in state_dict.items()}
        return state_dict


def as_map(x: Tensor, grid: Grid) -> Tensor:
    """Return tokens [B, h w, D] as a map [B, D, h, w], without a copy."""
    return x.transpose(1, 2).unflatten(2, grid)


def resized(images: Tensor, side: int) -> Tensor:
    """Return images [B, C, H, W] as [B, C, side, side], bilinear with antialiasing."""
    if images.shape[2:] == (side, side):
        return images
    return F.interpolate(images.float(), size=(side, side), mode="bilinear", antialias=True)


def window_grids(size: Grid) -> list[Grid]:
    """Return the grid of windows after each step, for an image of (height, width)."""
    grids = []
    for kernel, stride, padding in WINDOWS:
        size = tuple((n + 2 * padding - kernel) // stride + 1 for n in size)
        grids.append(size)
    return grids


def sinusoids(positions: int, dim: int) -> Tensor:
    """Return the sinusoids of Vaswani et al. (2017, section 3.5), [1, positions, dim], sines in
    even columns."""
    column = torch.arange(dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (column // 2 * 2 / dim)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).float()[None]
