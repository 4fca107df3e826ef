"""Structured fresh weights of a vision transformer.

Patches attend to similar patches, position embeddings are sinusoids, and the patch embedding
whitens.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from idmm.batch import Batch
from idmm.seeding import derive

# patches per image and in all for the covariance, at most
PER_IMAGE = 128
PATCHES = 40_000
CHUNK = 32  # images whose patches are in memory together
NOISE = 0.01  # share of the mean variance that is added to each, so that none is 0


def can_init_vit(model: nn.Module) -> TypeGuard[VisionTransformer]:
    """Return whether :func:`init_vit` supports it: timm's ViTs with learned positions."""
    if not isinstance(model, VisionTransformer):
        return False
    embed = model.patch_embed
    if hasattr(embed, "backbone"):  # it embeds maps of another network
        return False
    # not all of timm's patch embeddings, blocks and attentions have these attributes
    if not isinstance(getattr(embed, "proj", None), nn.Conv2d):
        return False
    for block in model.blocks:
        attention = getattr(block, "attn", None)
        if not isinstance(getattr(attention, "qkv", None), nn.Linear):
            return False
    return model.pos_embed is not None and model.embed_dim % 4 == 0


@torch.no_grad()
def init_vit(model: VisionTransformer, batches: Iterable[Batch], seed: int) -> None:
    """Set attention, positions and the patch embedding of fresh weights in place.

    Args:
        model: On the CPU. :func:`can_init_vit` must be true.
        batches: With normalised ``images``, float [B, C, H, W], of the size that the model is built
            for.
        seed: Of the random matrices and the sample of patches.
    """
    generator = torch.Generator().manual_seed(derive(seed, "start"))
    grid = model.patch_embed.grid_size
    count = math.prod(grid)
    positions = build_sincos2d_pos_embed(list(grid), model.embed_dim)  # [count, d]
    if model.pos_embed is not None:
        model.pos_embed[:, -count:] = positions.to(model.pos_embed)  # after the class token's
    for block in model.blocks:
        _init_attention(block.attn, generator)
    patches = _drawn_patches(batches, model.patch_embed.patch_size, generator)
    _init_whitening(model.patch_embed.proj, patches)


def _drawn_patches(
    batches: Iterable[Batch], size: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Return patches of a size (pixels) at random positions of all images, [P, C * h * w]."""
    height, width = size
    stride = (max(1, height // 2), max(1, width // 2))
    samples = []
    for batch in batches:
        for images in batch["images"].split(CHUNK):
            # [B, positions, C * h * w]
            patches = F.unfold(images.float(), size, stride=stride).transpose(1, 2)
            chosen = torch.randperm(patches.shape[1], generator=generator)[:PER_IMAGE]
            samples.append(patches[:, chosen].flatten(0, 1))
    drawn = torch.cat(samples)
    return drawn[torch.randperm(len(drawn), generator=generator)[:PATCHES]]


def _init_attention(attention: Any, generator: torch.Generator) -> None:
    """Draw weights with which patches attend to similar patches and subtract the result.

    ``attention`` is one of timm's classes, which share no base. Each head's W_q' W_k is near 0.7 I
    and W_proj W_v near -0.4 I, as in trained layers (Trockman and Kolter, Mimetic Initialization of
    Self-Attention Layers, ICML 2023, section 4, with alpha = beta for each).
    """
    query, key, value = attention.qkv.weight.chunk(3)  # [d, d] each
    width = query.shape[1]
    heads = attention.num_heads
    for head_query, head_key in zip(query.chunk(heads), key.chunk(heads), strict=True):
        left, right = _factors(0.7, 0.7, width, len(head_query), generator)
        head_query.copy_(left.T)
        head_key.copy_(right)
    left, right = _factors(0.4, -0.4, width, len(value), generator)
    value.copy_(right)
    attention.proj.weight.copy_(left)


def _factors(
    noise: float, identity: float, width: int, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return factors [width, rank], [rank, width] of the best approximation to a sum.

    It is noise Z + identity I, and Z is normal with variance 1 / width.
    """
    noisy = noise * torch.randn(width, width, generator=generator) / math.sqrt(width)
    left, scale, right = torch.linalg.svd(noisy + identity * torch.eye(width))
    root = scale[:rank].sqrt()
    return left[:, :rank] * root, right[:rank] * root[:, None]


def _init_whitening(layer: nn.Conv2d, patches: Tensor) -> None:
    """Make the first outputs of a patch embedding whitened principal components.

    They are those of patches [P, C * h * w]. Together they have a mean variance of 1. Outputs
    beyond the number of components keep their weights.
    """
    mean = patches.mean(0)
    centred = patches - mean
    variance, components = torch.linalg.eigh(centred.T @ centred / len(centred))  # ascending
    count = min(len(layer.weight), len(variance))
    variance = variance.flip(0)[:count].clamp_min(0)
    components = components.flip(1)[:, :count]
    deviation = (variance + NOISE * centred.square().mean()).sqrt().clamp_min(1e-6)
    rows = (components / deviation).T  # [count, C * h * w]
    rows /= (centred @ rows.T).std().clamp_min(1e-6)
    layer.weight[:count] = rows.view(count, *layer.weight.shape[1:])
    if layer.bias is not None:
        layer.bias[:count] = -rows @ mean
