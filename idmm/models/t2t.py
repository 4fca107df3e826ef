"""T2T-ViT: tokens to tokens, then a deep and narrow vision transformer.

Yuan et al., "Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet", ICCV
2021, with the token transformer of performer type (Choromanski et al., "Rethinking Attention with
Performers", ICLR 2021). Written from the papers and from the shapes of the public release,
https://github.com/yitu-opensource/T2T-ViT.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp, resample_abs_pos_embed, to_2tuple, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from idmm.models.base import WINDOWS, Grid, Released, as_map, sinusoids, window_grids
from idmm.models.build import Size


class TokenPerformer(nn.Module):
    """A transformer layer of one head and linear cost: [B, N, dim_in] -> [B, N, dim].

    Softmax attention becomes q' (k'^T v) / (q' sum k') with x' = exp(w x - |x|^2 / 2) / sqrt(m), m
    = dim / 2 positive random features (Performers, section 2.3). The rows of ``w`` are orthogonal,
    drawn once, saved and never trained. The residual is added to the values, not to the inputs,
    because the widths differ.

    Args:
        dim_in: Width of the windows.
        dim: Width of the tokens.
        drop: Dropout after attention and after the MLP.
    """

    w: Tensor  # [m, dim]

    def __init__(self, dim_in: int, dim: int, drop: float = 0.1):
        super().__init__()
        count = dim // 2  # m
        self.register_buffer("w", nn.init.orthogonal_(torch.empty(count, dim)) * math.sqrt(count))
        self.kqv = nn.Linear(dim_in, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(dim_in)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, dim, drop=(0.0, drop))
        self.drop = nn.Dropout(drop)

    def features(self, x: Tensor) -> Tensor:
        """Return the random features x', [B, N, dim] -> [B, N, m].

        They span many orders of magnitude and need fp32.
        """
        projected = x @ self.w.to(x.dtype).T
        lengths = x.square().sum(-1, keepdim=True)
        return torch.exp(projected - lengths / 2) / math.sqrt(len(self.w))

    def attend(self, k: Tensor, q: Tensor, v: Tensor) -> Tensor:
        """Return attention, each [B, N, dim] -> the same, in fp32 or double despite autocast."""
        dtype = torch.promote_types(v.dtype, torch.float32)
        with torch.autocast(v.device.type, enabled=False):
            # [B, N, m]
            k = self.features(k.to(dtype))
            q = self.features(q.to(dtype))
            total = q @ k.sum(1).unsqueeze(2)  # [B, N, 1]
            values = k.transpose(1, 2) @ v.to(dtype)  # [B, m, dim]
            attended = q @ values / (total + 1e-8)
            return attended.to(v.dtype)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.kqv(self.norm1(x)).chunk(3, dim=-1)
        x = v + self.drop(self.proj(self.attend(k, q, v)))
        x = x + self.mlp(self.norm2(x))
        return x


class TokensToToken(nn.Module):
    """Soft splits and token transformers: [B, in_chans, H, W] -> [B, h, w, embed_dim].

    h and w are about a 16th of the image's sides. A split makes tokens from overlapping windows,
    and a layer between two splits mixes them (paper: section 3.1, Fig. 3). ``img_size`` and
    ``grid_size`` are pairs, as in timm's ``PatchEmbed``.
    """

    def __init__(
        self,
        img_size: Size,
        in_chans: int,
        embed_dim: int,
        token_dim: int,
        drop: float,
        **patches: Any,  # timm's arguments for plain patches
    ):
        super().__init__()
        self.img_size = to_2tuple(img_size)
        self.grid_size = window_grids(self.img_size)[-1]
        self.num_patches = math.prod(self.grid_size)
        first, second, third = (kernel**2 for kernel, _, _ in WINDOWS)  # pixels of the windows
        self.performer1 = TokenPerformer(in_chans * first, token_dim, drop)
        self.performer2 = TokenPerformer(token_dim * second, token_dim, drop)
        self.proj = nn.Linear(token_dim * third, embed_dim)

    def dynamic_feat_size(self, img_size: Grid) -> Grid:
        """Return the grid of an image of (height, width), for timm's ``forward_intermediates``."""
        return window_grids(img_size)[-1]

    def forward(self, x: Tensor) -> Tensor:
        layers = self.performer1, self.performer2, self.proj
        grids = window_grids(x.shape[-2:])
        for layer, (kernel, stride, padding), grid in zip(layers, WINDOWS, grids, strict=True):
            # [B, C, H, W] -> [B, C kernel^2, h w]
            windows = F.unfold(x, kernel, stride=stride, padding=padding)
            x = as_map(layer(windows.transpose(1, 2)), grid)  # [B, token_dim or embed_dim, h, w]
        return x.permute(0, 2, 3, 1)


class T2TViT(Released, VisionTransformer):
    """T2T-ViT: :class:`TokensToToken`, then timm's vision transformer with fixed positions (paper:
    section 3.2).

    A side of n pixels has ceil(ceil(((n - 3) // 4 + 1) / 2) / 2) rows or columns of tokens, n/16 if
    16 divides n. ``forward_features`` returns [B, 1 + h w, D], the class token first.
    ``patch_embed.grid_size`` is (h, w).

    ``pos_embed``, [1, 1 + h w, D], starts as sinusoids over the tokens row by row. It is saved and
    never trained. For images of another size it is interpolated on its grid, as in the release.
    Sinusoids of the new size would move the positions.

    Args:
        img_size: Image side, or (height, width), in pixels.
        token_dim: Width of the tokens between the soft splits.
        token_drop_rate: Dropout in the performers, always 0.1 in the release.
        **kwargs: Of timm's vision transformer.
    """

    cls_token: nn.Parameter
    antialias_positions = False  # as in the release, also for weights of another size
    release_names = (
        (r"^tokens_to_token\.attention([12])\.mlp\.0\.", r"patch_embed.performer\1.mlp.fc1."),
        (r"^tokens_to_token\.attention([12])\.mlp\.2\.", r"patch_embed.performer\1.mlp.fc2."),
        (r"^tokens_to_token\.attention([12])\.", r"patch_embed.performer\1."),
        (r"^tokens_to_token\.project\.", r"patch_embed.proj."),
    )

    def __init__(
        self,
        img_size: Size = 224,
        token_dim: int = 64,
        token_drop_rate: float = 0.1,
        **kwargs: Any,
    ):
        embed = partial(TokensToToken, token_dim=token_dim, drop=token_drop_rate)
        super().__init__(
            to_2tuple(img_size),
            qkv_bias=False,
            fc_norm=False,
            norm_layer=nn.LayerNorm,
            pos_embed="none",
            embed_layer=embed,
            **kwargs,
        )
        trunc_normal_(self.cls_token, std=0.02)
        del self.pos_embed  # None
        positions = sinusoids(1 + self.patch_embed.num_patches, self.embed_dim)
        self.register_buffer("pos_embed", positions)

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Return tokens with the class token first and positions added.

        [B, h, w, D] -> [B, 1 + h w, D].
        """
        first = self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype)
        tokens = torch.cat([first, x.flatten(1, 2)], dim=1)
        outputs: Tensor = tokens + resample_abs_pos_embed(
            self.pos_embed,
            list(x.shape[1:3]),
            self.patch_embed.grid_size,
            antialias=self.antialias_positions,
        )
        return outputs


_cfg = dict(fixed_input_size=True, crop_pct=0.9, classifier="head")
default_cfgs = generate_default_cfgs({"t2t_vit_7": _cfg, "t2t_vit_14": _cfg})


@register_model
def t2t_vit_7(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """Build T2T-ViT-7, 4.3M parameters (paper: Table 1)."""
    defaults = dict(embed_dim=256, depth=7, num_heads=4, mlp_ratio=2.0)
    return build_model_with_cfg(T2TViT, "t2t_vit_7", pretrained, **defaults | kwargs)


@register_model
def t2t_vit_14(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """Build T2T-ViT-14, 21.5M parameters (paper: Table 1)."""
    defaults = dict(embed_dim=384, depth=14, num_heads=6, mlp_ratio=3.0)
    return build_model_with_cfg(T2TViT, "t2t_vit_14", pretrained, **defaults | kwargs)
