"""Base of T2T-ViT and CvT: timm's interface for a class token and the patch tokens of one grid."""

import re
from collections.abc import Sequence

import torch
from timm.layers import global_pool_nlc, trunc_normal_
from torch import Tensor, nn

from idmm.config import IMAGENET_MEAN, IMAGENET_STD

Grid = tuple[int, int]
Window = tuple[int, int, int]  # kernel, stride and padding
WINDOWS: tuple[Window, ...] = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # of each step from pixels to tokens


class TokenModel(nn.Module):
    """Pooling and classifier over the normalised tokens of ``forward_features``, [B, 1 + h w, D], class token first."""

    num_prefix_tokens = 1
    global_pool = "token"  # or "avg"
    release_names: Sequence[tuple[str, str]] = ()  # patterns of names in the public release, and our names

    def add_head(self, dim: int, num_classes: int, global_pool: str, drop_rate: float, norm: nn.Module) -> None:
        """Add the last norm and the classifier, and initialise all linear layers."""
        self.num_features = self.head_hidden_size = self.embed_dim = dim
        self.norm = norm
        self.head_drop = nn.Dropout(drop_rate)
        self.apply(_initialise)
        self.reset_classifier(num_classes, global_pool)

    def get_classifier(self) -> nn.Module:
        """Return the classifier, an ``Identity`` if there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier (0 classes: none) and, unless None, the pooling."""
        self.global_pool = global_pool or self.global_pool
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes > 0:
            parameter = next(self.parameters())  # has the device and the dtype
            layer = nn.Linear(self.num_features, num_classes).apply(_initialise)
            self.head = layer.to(parameter.device, parameter.dtype).train(self.training)

    def pool(self, x: Tensor) -> Tensor:
        """Return the class token or the mean of the others, [B, 1 + N, D] -> [B, D]."""
        return global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits, [B, 1 + N, D] -> [B, num_classes], or the pooled features [B, D]."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, [B, in_chans, H, W] -> [B, num_classes], or [B, D] without a classifier."""
        return self.forward_head(self.forward_features(x))

    def checkpoint_filter_fn(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return weights with the public release's names replaced by ours."""
        out = {}
        for key, value in state_dict.items():
            for old, new in self.release_names:
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


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Return the stochastic depth of each block, from 0 to ``rate``."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


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


def _initialise(module: nn.Module) -> None:
    """Draw linear weights with std 0.02 and zero the biases, as in the releases. Other layers keep torch's."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
