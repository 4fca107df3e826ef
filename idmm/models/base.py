"""Shared by our models: windows of tokens, sinusoids, names of released weights and timm's configuration."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from idmm.config import IMAGENET_MEAN, IMAGENET_STD

Grid = tuple[int, int]
Window = tuple[int, int, int]  # kernel, stride and padding
WINDOWS: tuple[Window, ...] = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # of each step from pixels to tokens


def renamed(state: dict[str, Tensor], names: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Return weights with other names. ``names``: patterns of names in a public release, and our names."""
    out = {}
    for key, value in state.items():
        for old, new in names:
            key = re.sub(old, new, key)
        out[key] = value
    return out


def as_map(x: Tensor, grid: Grid) -> Tensor:
    """Return tokens [B, h w, D] as a map [B, D, h, w], without a copy."""
    return x.transpose(1, 2).unflatten(2, grid)


def window_grids(size: Grid) -> list[Grid]:
    """Return the grid of windows after each step, for an image of (height, width)."""
    grids = []
    for kernel, stride, padding in WINDOWS:
        size = tuple((n + 2 * padding - kernel) // stride + 1 for n in size)
        grids.append(size)
    return grids


def sinusoids(positions: int, dim: int) -> Tensor:
    """Return the sinusoids of Vaswani et al. (2017, section 3.5), [1, positions, dim], sines in even columns."""
    column = torch.arange(dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (column // 2 * 2 / dim)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).float()[None]


def timm_cfg(**kwargs) -> dict:
    """Return timm's configuration of a model without public weights. ``kwargs`` replace defaults."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "interpolation": "bicubic",
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "classifier": "head",
        **kwargs,
    }
