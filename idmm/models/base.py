"""What T2T-ViT and CvT share: timm's interface for a class token and patch tokens of one grid."""

import re
from collections.abc import Sequence

import torch
from timm.layers import global_pool_nlc, to_2tuple, trunc_normal_
from torch import Tensor, nn

from idmm.config import IMAGENET_MEAN, IMAGENET_STD

Grid = tuple[int, int]
WINDOWS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # kernel, stride and padding of each step from pixels to tokens
SMALLEST = 16  # pixels of a token's side


class TokenModel(nn.Module):
    """Pooling and classifier over [B, 1 + h w, D], the class token first.

    ``forward_features`` gives those tokens, normalised.
    """

    num_prefix_tokens = 1
    pools = ("token", "avg")  # what global_pool may be
    release_names: Sequence[tuple[str, str]] = ()  # patterns for names in the public release, and ours

    def add_head(self, dim: int, num_classes: int, global_pool: str, drop_rate: float, norm: nn.Module) -> None:
        """Adds the last norm and the classifier, and initialises all linear layers and norms."""
        self.num_features = self.head_hidden_size = self.embed_dim = dim
        self.norm = norm
        self.head_drop = nn.Dropout(drop_rate)
        self.apply(_initialise)
        self.reset_classifier(num_classes, global_pool)

    def get_classifier(self) -> nn.Module:
        """Returns the classifier; an ``Identity`` where there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Gives the model a fresh classifier (0 classes: none); None leaves the pooling as it is."""
        if global_pool is not None:
            if global_pool not in self.pools:
                raise ValueError(f"global_pool is {global_pool!r}; wanted is one of {', '.join(map(repr, self.pools))}")
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes > 0:
            like = next(self.parameters())  # tells the device and the precision
            layer = nn.Linear(self.num_features, num_classes).apply(_initialise)
            self.head = layer.to(like.device, like.dtype).train(self.training)

    def pool(self, x: Tensor) -> Tensor:
        """[B, 1 + N, D] -> [B, D]: the class token, or the mean of the others."""
        return global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """[B, 1 + N, D] -> [B, num_classes], or the pooled features [B, D]."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> [B, num_classes]; [B, D] without a classifier."""
        return self.forward_head(self.forward_features(x))

    def checkpoint_filter_fn(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Renames the weights of the public release; our own names stay."""
        out = {}
        for key, value in state_dict.items():
            for old, new in self.release_names:
                key = re.sub(old, new, key)
            out[key] = value
        return out


def as_map(x: Tensor, grid: Grid) -> Tensor:
    """[B, h w, D] -> [B, D, h, w], without a copy."""
    return x.transpose(1, 2).unflatten(2, grid)


def window_grids(size: Grid) -> list[Grid]:
    """The grid of windows after each step, of an image of (height, width)."""
    grids = []
    for kernel, stride, padding in WINDOWS:
        size = tuple((n + 2 * padding - kernel) // stride + 1 for n in size)
        grids.append(size)
    return grids


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Stochastic depth of each block: from 0 up to ``rate``."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


def checked_size(img_size: int | Sequence[int]) -> Grid:
    """Returns a size as (height, width); ValueError if it is smaller than one token (pixels)."""
    height, width = to_2tuple(img_size)
    if min(height, width) < SMALLEST:
        raise ValueError(f"img_size is {img_size!r}; expected at least {SMALLEST} pixels")
    return height, width


def sinusoids(positions: int, dim: int) -> Tensor:
    """Position embedding of Vaswani et al. (2017, section 3.5): sines in even columns, [1, positions, dim]."""
    column = torch.arange(dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (column // 2 * 2 / dim)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).float()[None]


def timm_cfg(**kwargs) -> dict:
    """timm's description of a model whose weights it cannot download; ``kwargs`` are what differs."""
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
    """Linear layers: a normal of 0.02, biases 0, as the releases have it. Convolutions and norms keep torch's."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
