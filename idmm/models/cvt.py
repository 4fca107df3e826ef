"""CvT: a vision transformer whose tokens and projections are convolutions.

Wu et al., "CvT: Introducing Convolutions to Vision Transformers", ICCV 2021. Written from the paper
and from the shapes of the public release, https://github.com/microsoft/CvT.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    DropPath,
    LayerNorm2d,
    Mlp,
    get_act_layer,
    global_pool_nlc,
    to_2tuple,
)
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from idmm.models.base import (
    WINDOWS,
    Backbone,
    Grid,
    Released,
    as_map,
    init_linear,
    window_grids,
)


def conv_projection(dim: int, stride: int) -> nn.Sequential:
    """Return the convolutions of a projection (paper: section 3.2).

    [B, D, h, w] -> [B, D, h / stride, w / stride].
    """
    conv = nn.Conv2d(dim, dim, 3, stride=stride, padding=1, groups=dim, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(dim)))


class ConvAttention(nn.Module):
    """Attention of convolutional projections, [B, prefix + h w, D] -> the same.

    Class tokens skip the convolutions. There are a quarter as many keys and values. Attention is
    scaled by the total width of all heads, as in the release.
    """

    def __init__(self, dim: int, num_heads: int, prefix: int):
        super().__init__()
        self.num_heads = num_heads
        self.prefix = prefix
        self.scale = dim**-0.5
        self.conv_q = conv_projection(dim, 1)
        self.conv_k = conv_projection(dim, 2)
        self.conv_v = conv_projection(dim, 2)
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        prefix = x[:, : self.prefix]
        features = as_map(x[:, self.prefix :], grid)  # [B, D, h, w]

        def heads(conv: nn.Module, linear: nn.Module) -> Tensor:
            """Return a projection for each head, [B, heads, N, D / heads]."""
            tokens = conv(features).flatten(2).transpose(1, 2)  # [B, N, D]
            if self.prefix:
                tokens = torch.cat([prefix.to(tokens.dtype), tokens], dim=1)
            outputs: Tensor = linear(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            return outputs

        q = heads(self.conv_q, self.q)
        k = heads(self.conv_k, self.k)
        v = heads(self.conv_v, self.v)
        attended = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        outputs: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return outputs


class ConvBlock(nn.Module):
    """A transformer block over [B, prefix + h w, D]."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, prefix: int, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = ConvAttention(dim, num_heads, prefix)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=get_act_layer("quick_gelu"))
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x), grid))
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x


class ConvStage(nn.Module):
    """Token embedding and blocks: images or maps [B, C, H, W] to tokens and their grid (h, w).

    Tokens are [B, prefix + h w, dim].
    """

    def __init__(
        self,
        chans: int,
        dim: int,
        window: tuple[int, int, int],
        prefix: int,
        rates: list[float],
        heads: int,
        mlp_ratio: float,
    ):
        super().__init__()
        self.cls_token: nn.Parameter | None = None
        if prefix:
            self.cls_token = nn.Parameter(nn.init.trunc_normal_(torch.zeros(1, 1, dim), std=0.02))
        kernel, stride, padding = window
        projection = nn.Conv2d(chans, dim, kernel, stride, padding)
        norm = LayerNorm2d(dim, eps=1e-5)
        # paper: section 3.1
        self.patch_embed = nn.Sequential(OrderedDict(proj=projection, norm=norm))
        self.blocks = nn.ModuleList(
            ConvBlock(dim, heads, mlp_ratio, prefix, rate) for rate in rates
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        x = self.patch_embed(x)
        grid = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)  # [B, h w, dim]
        if self.cls_token is not None:
            first = self.cls_token.expand(x.shape[0], -1, -1)
            x = torch.cat([first.to(x.dtype), x], dim=1)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


class CvT(Released, Backbone):
    """CvT: three stages, each with a grid of half the side, and a class token in the last (paper:
    section 3, Table 2).

    There are no position embeddings, so images of any size are accepted. ``img_size`` only sets
    ``grid_size``. A side of n pixels has ceil(ceil(((n - 3) // 4 + 1) / 2) / 2) rows or columns of
    tokens, n/16 if 16 divides n. ``forward_features`` returns the last stage's [B, 1 + h w, D], the
    class token first. The classifier's bias starts at 0, unlike in the release.

    Args:
        img_size: Image side, or (height, width), in pixels.
        global_pool: 'token' (the class token) or 'avg' (the mean of the others).
        embed_dims: Width of each stage's tokens. The last is D.
        drop_path_rate: Stochastic depth of the last block. It rises linearly from 0 over the last
            stage, as released.
        in_chans, num_classes, depths, num_heads, mlp_ratio, drop_rate: As in timm's vision
            transformers, with depths and heads per stage.

    Raises:
        ValueError: A size, a pooling or widths that it does not accept.
    """

    pos_embed = None
    num_prefix_tokens = 1
    release_names = (
        (r"^stage(\d)\.", r"stages.\1."),
        (r"\.attn\.conv_proj_([qkv])\.", r".attn.conv_\1."),
        (r"\.attn\.proj_([qkv])\.", r".attn.\1."),
    )

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dims: Sequence[int] = (64, 192, 384),
        depths: Sequence[int] = (1, 2, 10),
        num_heads: Sequence[int] = (1, 3, 6),
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        self.img_size = to_2tuple(img_size)
        self.grid_size = window_grids(self.img_size)[-1]
        self.stages = nn.ModuleList()
        last = len(WINDOWS) - 1
        chans = in_chans
        shapes = zip(embed_dims, depths, num_heads, WINDOWS, strict=True)
        for i, (dim, depth, heads, window) in enumerate(shapes):
            prefix = int(i == last)
            rates = torch.linspace(0, drop_path_rate * prefix, depth, device="cpu").tolist()
            self.stages.append(ConvStage(chans, dim, window, prefix, rates, heads, mlp_ratio))
            chans = dim
        self.embed_dim = embed_dims[-1]
        self.num_features = self.embed_dim
        self.head_hidden_size = self.embed_dim
        self.norm = nn.LayerNorm(self.embed_dim)
        self.head_drop = nn.Dropout(drop_rate)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)
        self.reset_classifier(num_classes, global_pool)

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters without weight decay."""
        return {name for name, _ in self.named_parameters() if name.endswith("cls_token")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameters per layer, for layer-wise learning rates."""
        blocks = [
            (r"^stages\.(\d+)\.(?:patch_embed|cls_token)", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
        ]
        return dict(stem=r"^stages\.0\.patch_embed", blocks=[*blocks, (r"^norm", (99999,))])

    def forward_features(self, x: Tensor) -> Tensor:
        """Return normalised tokens [B, 1 + h w, D], the class token first."""
        for stage in self.stages[:-1]:
            x = as_map(*stage(x))
        outputs: Tensor = self.norm(self.stages[-1](x)[0])
        return outputs

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits, [B, 1 + h w, D] -> [B, num_classes], or the pooled features [B, D]."""
        pooled = global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=1)
        features: Tensor = self.head_drop(pooled)
        if pre_logits:
            return features
        outputs: Tensor = self.head(features)
        return outputs


_cfg = dict(pool_size=(14, 14), first_conv="stages.0.patch_embed.proj", classifier="head")
default_cfgs = generate_default_cfgs({"cvt_13": _cfg})


@register_model
def cvt_13(pretrained: bool = False, **kwargs: Any) -> CvT:
    """Build CvT-13, 20M parameters (paper: Table 2)."""
    return build_model_with_cfg(CvT, "cvt_13", pretrained, **kwargs)
