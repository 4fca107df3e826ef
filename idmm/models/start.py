"""Fresh weights of a vision transformer that begin where training leads: attention that looks at like patches,
positions that have a place, and a patch embedding that whitens."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from idmm.seeding import derive

EACH, PATCHES = 128, 40_000  # patches of an image, and of all, whose covariance is taken, at most
AT_ONCE = 32  # images whose patches are in memory together
NOISE = 0.01  # of the mean variance, added to each: directions without variance are not blown up


def takes_structure(model: nn.Module) -> bool:
    """Whether :func:`structured_start` knows the model: timm's vision transformers with learned positions."""
    return (
        isinstance(model, VisionTransformer)
        and model.pos_embed is not None
        and model.embed_dim % 4 == 0
        and isinstance(getattr(model.patch_embed, "proj", None), nn.Conv2d)
        and not hasattr(model.patch_embed, "backbone")  # it embeds the maps of another network
        and all(isinstance(getattr(getattr(block, "attn", None), "qkv", None), nn.Linear) for block in model.blocks)
    )


@torch.no_grad()
def structured_start(model: VisionTransformer, batches: Iterable[dict], seed: int) -> None:
    """Sets attention, positions and the patch embedding of fresh weights; the rest stays as timm drew it.

    Args:
        model: Where :func:`takes_structure`, on the CPU.
        batches: With ``images`` of the size that the model is built for, normalised, float [B, C, H, W].
        seed: Of what is drawn.
    """
    draw = torch.Generator().manual_seed(derive(seed, "start"))
    count = math.prod(model.patch_embed.grid_size)
    places = build_sincos2d_pos_embed(model.patch_embed.grid_size, model.embed_dim)  # [places, d]
    model.pos_embed[:, -count:] = places.to(model.pos_embed)  # after those of the class token
    for block in model.blocks:
        _mimetic(block.attn, draw)
    _whitening(model.patch_embed.proj, _patches(batches, model.patch_embed.patch_size, draw))


def _mimetic(attention: nn.Module, draw: torch.Generator) -> None:
    """Draws the weights of an attention layer, d wide with H heads, so that a patch looks at patches like it, and what
    it finds is taken off: each head's W_q' W_k near 0.7 I, W_proj W_v near -0.4 I, as in trained ones (Trockman and
    Kolter, Mimetic Initialization of Self-Attention Layers, ICML 2023, section 4, with alpha = beta for each)."""
    query, key, value = attention.qkv.weight.chunk(3)  # [d, d] each
    width, heads = query.shape[1], attention.num_heads
    rank = len(query) // heads
    for rows in range(0, len(query), rank):
        left, right = _factors(0.7, 0.7, width, rank, draw)
        query[rows : rows + rank], key[rows : rows + rank] = left.T, right
    left, right = _factors(0.4, -0.4, width, len(value), draw)
    value.copy_(right)
    attention.proj.weight.copy_(left)


def _factors(noise: float, eye: float, width: int, rank: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns the factors [width, rank] and [rank, width] of the best approximation of that rank to
    noise * Z + eye * I, with Z normal, of variance 1 / width."""
    noisy = noise * torch.randn(width, width, generator=draw) / math.sqrt(width) + eye * torch.eye(width)
    left, scale, right = torch.linalg.svd(noisy)
    root = scale[:rank].sqrt()
    return left[:, :rank] * root, right[:rank] * root[:, None]


def _patches(batches: Iterable[dict], size: tuple[int, int], draw: torch.Generator) -> Tensor:
    """Returns patches of images, at half a patch's distance from each other, [P, C * h * w]."""
    stride, found = tuple(max(1, side // 2) for side in size), []
    for images in (part for batch in batches for part in batch["images"].split(AT_ONCE)):
        patches = F.unfold(images.float(), size, stride=stride).transpose(1, 2)  # [B, places, C * h * w]
        some = torch.randperm(patches.shape[1], generator=draw)[:EACH]
        found.append(patches[:, some].flatten(0, 1))
    found = torch.cat(found)
    return found[torch.randperm(len(found), generator=draw)[:PATCHES]]


def _whitening(layer: nn.Conv2d, patches: Tensor) -> None:
    """Makes the first outputs of a patch embedding the principal components of patches [P, C * h * w], their mean off,
    each scaled by its standard deviation, and all together to a mean variance of 1; outputs beyond these stay."""
    mean = patches.mean(0)
    centred = patches - mean
    variance, components = torch.linalg.eigh(centred.T @ centred / len(centred))  # ascending
    count = min(len(layer.weight), len(variance))
    variance, components = variance.flip(0)[:count].clamp_min(0), components.flip(1)[:, :count]
    rows = (components / (variance + NOISE * centred.square().mean()).sqrt().clamp_min(1e-6)).T  # [count, C * h * w]
    rows /= (centred @ rows.T).std().clamp_min(1e-6)
    layer.weight[:count] = rows.view(count, *layer.weight.shape[1:])
    if layer.bias is not None:
        layer.bias[:count] = -rows @ mean
