"""CCT: a compact vision transformer whose tokens come from a few convolutions, and whose pooling is learned.

Hassani et al., "Escaping the Big Data Paradigm with Compact Transformers", arXiv:2104.05704. Written from the paper and
from the shapes and settings of the public release, https://github.com/SHI-Labs/Compact-Transformers.
"""

from collections.abc import Sequence

import torch
from timm.layers import trunc_normal_
from timm.models import checkpoint, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from idmm.models.base import BlockModel, Tokenizer, build_variant, drop_path_rates, sinusoids, timm_cfg

POSITIONS = ("learn", "sine", "none")
POOLING = (3, 2, 1)  # of the tokenizer: kernel, stride and padding


class ConvTokenizer(Tokenizer):
    """Convolutions without bias, each with ReLU and max pooling (paper: section 3.3): [B, C, H, W] -> [B, h w, dim].

    As in the release a kernel of k pixels has the stride k // 2 - 1, or 1, and the padding k // 2.

    Args:
        layers: Number of convolutions.
        inner_dim: Width of all but the last.
    """

    def __init__(
        self,
        img_size: int | Sequence[int],
        in_chans: int,
        dim: int,
        layers: int,
        kernel: int,
        inner_dim: int,
        dynamic_img_size: bool = False,
    ):
        window = (kernel, max(1, kernel // 2 - 1), max(1, kernel // 2))
        super().__init__((window, POOLING) * layers, img_size, dynamic_img_size)
        widths = [in_chans, *[inner_dim] * (layers - 1), dim]
        self.convs = nn.Sequential()
        for i in range(layers):
            conv = nn.Conv2d(widths[i], widths[i + 1], kernel, *window[1:], bias=False)
            nn.init.kaiming_normal_(conv.weight)
            self.convs.append(nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(*POOLING)))

    def forward(self, x: Tensor) -> Tensor:
        self.grids(x)  # refuses images of another size
        x = checkpoint(self.convs, x) if self.grad_checkpointing else self.convs(x)  # [B, dim, h, w]
        return x.flatten(2).transpose(1, 2)


class EncoderBlock(Block):
    """timm's block with CCT's second norm, which normalises what the MLP's output is added to, as well."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.drop_path1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.mlp(x))


class CCT(BlockModel):
    """CCT: :class:`ConvTokenizer`, positions, blocks, and sequence pooling for a class token (paper: section 3).

    Sequence pooling is a mean of the tokens, weighted by the softmax over all of them of a linear layer, ``seq_pool``,
    of one output. It belongs to the backbone: ``forward_head(x, pre_logits=True)`` is what the classifier is given.
    ``forward_features`` gives [B, h w, D] without a class token; ``patch_embed.grid_size`` is (h, w), row by row. An
    image side of n pixels gives n/2 rows or columns of tokens for 3x1, n/4 for 3x2 and n/16 for 7x2, rounded up.

    Args:
        img_size: Image side, or (height, width), in pixels; at least one token's (2, 4 or 16).
        dynamic_img_size: Take images of other sizes too, with the positions interpolated; else they are refused.
        global_pool: 'seq' (sequence pooling), 'avg' (the mean of the tokens) or '' (no pooling).
        embed_dim: Width D of the tokens.
        conv_layers, kernel_size, conv_dim: Convolutions of the tokenizer, their kernel (pixels), and the width of all
            but the last.
        pos_embed: Positions, 'learn' (trained), 'sine' (sinusoids over the tokens row by row, not trained) or 'none'.
            Both tables are saved with the weights, and interpolated at another size.
        attn_drop_rate: Dropout of attention weights, 0.1 as in the release.
        drop_path_rate: Stochastic depth of the last block, 0.1 as in the release; rises linearly from 0 in the first.
        in_chans, num_classes, depth, num_heads, mlp_ratio, qkv_bias, drop_rate, pos_drop_rate, proj_drop_rate: As in
            timm's vision transformers.

    Raises:
        ValueError: A size, a pooling, positions or layers that it does not take.
    """

    num_prefix_tokens = 0
    pools = ("seq", "avg", "")
    release_names = (
        (r"^tokenizer\.conv_layers\.", r"patch_embed.convs."),
        (r"^classifier\.positional_emb$", r"pos_embed"),
        (r"^classifier\.attention_pool\.", r"seq_pool."),
        (r"^classifier\.fc\.", r"head."),
        (r"^classifier\.(blocks\.\d+)\.norm1\.", r"\1.norm2."),
        (r"^classifier\.(blocks\.\d+)\.pre_norm\.", r"\1.norm1."),
        (r"^classifier\.(blocks\.\d+)\.self_attn\.", r"\1.attn."),
        (r"^classifier\.(blocks\.\d+)\.linear([12])\.", r"\1.mlp.fc\2."),
        (r"^classifier\.norm\.", r"norm."),
    )

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "seq",
        embed_dim: int = 384,
        depth: int = 14,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        conv_layers: int = 2,
        kernel_size: int = 7,
        conv_dim: int = 64,
        pos_embed: str = "learn",
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.1,
        drop_path_rate: float = 0.1,
        dynamic_img_size: bool = False,
    ):
        super().__init__()
        if pos_embed not in POSITIONS:
            raise ValueError(f"pos_embed is {pos_embed!r}; wanted is one of {', '.join(map(repr, POSITIONS))}")
        if conv_layers < 1 or kernel_size < 1 or kernel_size % 2 == 0:
            given = f"conv_layers is {conv_layers} and kernel_size {kernel_size}"
            raise ValueError(f"{given}; wanted are one layer or more, and an odd kernel")
        self.embed_dim = embed_dim
        convs = (conv_layers, kernel_size, conv_dim, dynamic_img_size)
        self.patch_embed = ConvTokenizer(img_size, in_chans, embed_dim, *convs)
        count = self.patch_embed.num_patches
        if pos_embed == "learn":
            self.pos_embed = nn.Parameter(trunc_normal_(torch.zeros(1, count, embed_dim), std=0.2))
        else:
            self.register_buffer("pos_embed", sinusoids(count, embed_dim) if pos_embed == "sine" else None)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        options = dict(qkv_bias=qkv_bias, proj_drop=proj_drop_rate, attn_drop=attn_drop_rate, norm_layer=nn.LayerNorm)
        rates = drop_path_rates(drop_path_rate, depth)
        self.add_blocks([EncoderBlock(embed_dim, num_heads, mlp_ratio, drop_path=rate, **options) for rate in rates])
        self.seq_pool = None
        self.add_head(embed_dim, num_classes, global_pool, drop_rate, nn.LayerNorm(embed_dim))

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Gives the model a fresh classifier (0 classes: none); None leaves the pooling and its weights alone."""
        super().reset_classifier(num_classes, global_pool)
        if self.global_pool != "seq":
            self.seq_pool = None
        elif self.seq_pool is None:
            self.seq_pool = self.new_linear(1)

    def pool(self, x: Tensor) -> Tensor:
        """[B, N, D] -> [B, D]: the mean of the tokens, weighted for 'seq'; as it is for ''."""
        if self.global_pool != "seq":
            return super().pool(x)
        weights = self.seq_pool(x).softmax(dim=1)  # [B, N, 1]
        return (weights.transpose(1, 2) @ x).squeeze(1)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay should spare."""
        return {"pos_embed"}

    def group_matcher(self, coarse: bool = False) -> dict:
        """Patterns that sort parameters into layers, for layer-wise learning rates."""
        return dict(stem=r"^pos_embed|patch_embed", blocks=[(r"^blocks\.(\d+)", None), (r"^norm|^seq_pool", (99999,))])

    def embed(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> [B, h w, D], with positions."""
        return self.pos_drop(self.add_positions(self.patch_embed(x), x))


_cfg = timm_cfg(pool_size=None, fixed_input_size=True, crop_pct=0.9, first_conv="patch_embed.convs.0.0")
_cfg_32 = {**_cfg, "input_size": (3, 32, 32), "crop_pct": 1.0}
_NAMES_32 = ("cct_2_3x2_32", "cct_4_3x2_32", "cct_6_3x1_32", "cct_7_3x1_32", "cct_7_3x2_32")
_NAMES_224 = ("cct_7_7x2_224", "cct_14_7x2_224")
default_cfgs = generate_default_cfgs({**dict.fromkeys(_NAMES_32, _cfg_32), **dict.fromkeys(_NAMES_224, _cfg)})

# depth: width, heads and MLP ratio (paper: Table 1)
_WIDTHS = {2: (128, 2, 1.0), 4: (128, 2, 1.0), 6: (256, 4, 2.0), 7: (256, 4, 2.0), 14: (384, 6, 3.0)}


def _create(variant: str, pretrained: bool, depth: int, kernel_size: int, conv_layers: int, kwargs: dict) -> nn.Module:
    defaults = dict(zip(("embed_dim", "num_heads", "mlp_ratio"), _WIDTHS[depth], strict=True))
    defaults |= dict(depth=depth, kernel_size=kernel_size, conv_layers=conv_layers)
    return build_variant(CCT, variant, pretrained, 3, {**defaults, **kwargs})


@register_model
def cct_2_3x2_32(pretrained: bool = False, **kwargs) -> CCT:
    """CCT-2/3x2, 0.28M parameters with 10 classes."""
    return _create("cct_2_3x2_32", pretrained, 2, 3, 2, kwargs)


@register_model
def cct_4_3x2_32(pretrained: bool = False, **kwargs) -> CCT:
    """CCT-4/3x2, 0.48M parameters with 10 classes."""
    return _create("cct_4_3x2_32", pretrained, 4, 3, 2, kwargs)


@register_model
def cct_6_3x1_32(pretrained: bool = False, **kwargs) -> CCT:
    """CCT-6/3x1, 3.17M parameters with 10 classes, and 0.07M positions."""
    return _create("cct_6_3x1_32", pretrained, 6, 3, 1, kwargs)


@register_model
def cct_7_3x1_32(pretrained: bool = False, **kwargs) -> CCT:
    """CCT-7/3x1, 3.76M parameters with 10 classes."""
    return _create("cct_7_3x1_32", pretrained, 7, 3, 1, kwargs)


@register_model
def cct_7_3x2_32(pretrained: bool = False, **kwargs) -> CCT:
    """CCT-7/3x2, 3.85M parameters with 10 classes."""
    return _create("cct_7_3x2_32", pretrained, 7, 3, 2, kwargs)


@register_model
def cct_7_7x2_224(pretrained: bool = False, **kwargs) -> CCT:
    """CCT-7/7x2, 4.57M parameters with 102 classes."""
    return _create("cct_7_7x2_224", pretrained, 7, 7, 2, kwargs)


@register_model
def cct_14_7x2_224(pretrained: bool = False, **kwargs) -> CCT:
    """CCT-14/7x2, 22.37M parameters with 1,000 classes."""
    return _create("cct_14_7x2_224", pretrained, 14, 7, 2, kwargs)
