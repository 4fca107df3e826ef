"""CvT: a vision transformer whose tokens and projections are convolutions.

Wu et al., "CvT: Introducing Convolutions to Vision Transformers", ICCV 2021. Written from the paper and from the shapes
of the public release, https://github.com/microsoft/CvT.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, get_act_layer, trunc_normal_
from timm.models import generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from idmm.models.base import (
    WINDOWS,
    Grid,
    TokenModel,
    as_map,
    build_variant,
    checked_size,
    drop_path_rates,
    timm_cfg,
    window_grids,
)


class ConvEmbed(nn.Module):
    """Convolutional token embedding (paper: section 3.1), [B, C, H, W] -> [B, dim, h, w], normalised over channels."""

    def __init__(self, in_chans: int, dim: int, kernel: int, stride: int, padding: int):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride=stride, padding=padding)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvProjection(nn.Module):
    """The convolutional part of a projection (paper: section 3.2): each channel on its own, 3x3, then batch norm.

    [B, D, h, w] -> [B, h' w', D], where h' is h over the stride, rounded up.
    """

    def __init__(self, dim: int, stride: int):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, stride=stride, padding=1, groups=dim, bias=False)
        self.bn = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).flatten(2).transpose(1, 2)


class ConvAttention(nn.Module):
    """Attention of convolutional projections: [B, prefix + h w, D] -> the same.

    Class tokens pass the convolutions by. Keys and values are fewer by ``kv_stride`` squared. Attention is scaled by
    the width of all heads together, not of one, as in the release.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        prefix: int,
        kv_stride: int = 2,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads is {num_heads}, by which the width {dim} is not divisible")
        self.num_heads, self.prefix, self.attn_drop = num_heads, prefix, attn_drop
        self.scale = dim**-0.5
        self.conv_q = ConvProjection(dim, 1)
        self.conv_k = ConvProjection(dim, kv_stride)
        self.conv_v = ConvProjection(dim, kv_stride)
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.k = nn.Linear(dim, dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        first, places = x[:, : self.prefix], as_map(x[:, self.prefix :], grid)  # [B, D, h, w]

        def heads(conv, linear):
            tokens = conv(places)
            tokens = torch.cat([first.to(tokens.dtype), tokens], dim=1) if self.prefix else tokens
            return linear(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # [B, heads, N, D / heads]

        q, k, v = heads(self.conv_q, self.q), heads(self.conv_k, self.k), heads(self.conv_v, self.v)
        drop = self.attn_drop if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, scale=self.scale)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class ConvBlock(nn.Module):
    """A transformer block over [B, prefix + h w, D]."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, prefix: int, drop_path: float, **options):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = ConvAttention(dim, num_heads, prefix, **options)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim)
        drop = options.get("proj_drop", 0.0)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=get_act_layer("quick_gelu"), drop=drop)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x), grid))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class ConvStage(nn.Module):
    """Token embedding and blocks: [B, C, H, W] -> tokens [B, prefix + h w, dim] and their grid (h, w)."""

    def __init__(
        self,
        in_chans: int,
        dim: int,
        embed: tuple[int, int, int],
        prefix: int,
        rates: list[float],
        drop: float,
        **options,
    ):
        super().__init__()
        self.prefix = prefix
        self.cls_token = nn.Parameter(trunc_normal_(torch.zeros(1, 1, dim), std=0.02)) if prefix else None
        self.patch_embed = ConvEmbed(in_chans, dim, *embed)
        self.pos_drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList(ConvBlock(dim, prefix=prefix, drop_path=rate, **options) for rate in rates)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        x = self.patch_embed(x)
        grid = tuple(x.shape[-2:])
        x = x.flatten(2).transpose(1, 2)  # [B, h w, dim]
        if self.prefix:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)
        x = self.pos_drop(x)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


class CvT(TokenModel):
    """CvT: three stages, each with a grid of half the side, and a class token in the last (paper: section 3, Table 2).

    There are no position embeddings: any image is taken, and ``img_size`` only says which ``grid_size`` is meant. An
    image side of n pixels gives ceil(ceil(((n - 3) // 4 + 1) / 2) / 2) rows or columns of tokens, n/16 where 16
    divides n. ``forward_features`` gives the last stage's [B, 1 + h w, D], the class token first; the grid of an image
    of any size comes with ``forward_intermediates(images, indices=1, norm=True)``, as [B, D, h, w].

    The release leaves the classifier's bias as torch draws it; here it starts at 0.

    Args:
        img_size: Image side, or (height, width), in pixels; at least 16.
        global_pool: 'token' (the class token), 'avg' (the mean of the others) or '' (no pooling).
        embed_dims: Width of each stage's tokens; the last is D.
        kv_stride: Stride of the convolutions of keys and values.
        pos_drop_rate: Dropout after each token embedding.
        drop_path_rate: Stochastic depth of the last block; rises linearly from 0 over the last stage, as released.
        in_chans, num_classes, depths, num_heads, mlp_ratio, qkv_bias, drop_rate, proj_drop_rate, attn_drop_rate: As in
            timm's vision transformers; depths and heads of each stage.

    Raises:
        ValueError: A size, a pooling or widths that it does not take.
    """

    pos_embed = None
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
        qkv_bias: bool = True,
        kv_stride: int = 2,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        for name, values in dict(embed_dims=embed_dims, depths=depths, num_heads=num_heads).items():
            if len(values) != len(WINDOWS):
                raise ValueError(f"{name} is {values!r}; wanted are {len(WINDOWS)}, one a stage")
        self.set_input_size(img_size)
        stages, last = [], len(WINDOWS) - 1
        options = dict(mlp_ratio=mlp_ratio, qkv_bias=qkv_bias, kv_stride=kv_stride)
        options |= dict(attn_drop=attn_drop_rate, proj_drop=proj_drop_rate, drop=pos_drop_rate)
        for i, (dim, depth, heads, embed) in enumerate(zip(embed_dims, depths, num_heads, WINDOWS, strict=True)):
            rates = drop_path_rates(drop_path_rate if i == last else 0.0, depth)
            chans = embed_dims[i - 1] if i else in_chans
            stages.append(ConvStage(chans, dim, embed, int(i == last), rates, num_heads=heads, **options))
        self.stages = nn.ModuleList(stages)
        self.add_head(embed_dims[-1], num_classes, global_pool, drop_rate, nn.LayerNorm(embed_dims[-1]))

    def set_input_size(self, img_size: int | Sequence[int]) -> None:
        """Says which size ``grid_size`` is for."""
        self.img_size = checked_size(img_size)
        self.grid_size = window_grids(self.img_size)[-1]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay should spare."""
        return {name for name, _ in self.named_parameters() if name.endswith("cls_token")}

    def group_matcher(self, coarse: bool = False) -> dict:
        """Patterns that sort parameters into layers, for layer-wise learning rates."""
        blocks = [(r"^stages\.(\d+)\.(?:patch_embed|cls_token)", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return dict(
            stem=r"^stages\.0\.patch_embed",
            blocks=r"^stages\.(\d+)" if coarse else [*blocks, (r"^norm", (99999,))],
        )

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> [B, 1 + h w, D], the class token first."""
        for stage in self.stages[:-1]:
            x = as_map(*stage(x))
        return self.norm(self.stages[-1](x)[0])

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        intermediates_only: bool = False,
    ):
        """Returns what ``forward_features`` does, and what stages put out, [B, D, h, w].

        The arguments are timm's. ``indices``: of stages; a number means the last so many, None all. ``norm`` normalises
        the last stage's, the only one that has a norm.
        """
        take, _ = feature_take_indices(len(self.stages), indices)
        final, taken = len(self.stages) - 1, []
        for i, stage in enumerate(self.stages):
            tokens, grid = stage(x)
            normed = self.norm(tokens) if i == final else tokens
            if i in take:
                taken.append(as_map((normed if norm else tokens)[:, stage.prefix :], grid).contiguous())
            if i < final:
                x = as_map(tokens, grid)
        return taken if intermediates_only else (normed, taken)


_cfg = timm_cfg(pool_size=(14, 14), crop_pct=0.875, first_conv="stages.0.patch_embed.proj")
default_cfgs = generate_default_cfgs({"cvt_13": _cfg})


@register_model
def cvt_13(pretrained: bool = False, **kwargs) -> CvT:
    """CvT-13, 20M parameters (paper: Table 2)."""
    return build_variant(CvT, "cvt_13", pretrained, kwargs)
