"""CutMix (Yun et al., ICCV 2019) and Mixup (Zhang et al., ICLR 2018) with sparse targets.

A mixed batch has two targets and one share, never a dense row of class probabilities. timm's Mixup
needs even batches and draws from NumPy's global state; here the draw is a function of the generator
passed in.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Mix:
    """How one group of images is mixed."""

    lam: float  # share of each image's own pixels, in [0, 1]
    partner: Tensor  # which image is mixed into each, a permutation, int64 [B]
    # pixels of the partner: top, bottom, left, right; None blends all (Mixup)
    box: tuple[int, int, int, int] | None

    def partner_on(self, device: torch.device) -> Tensor:
        """Return ``partner`` on the device, without waiting for what that has still to do."""
        partner = self.partner
        if device.type == "cuda":
            partner = partner.pin_memory()
        return partner.to(device, non_blocking=True)


@dataclass(frozen=True)
class MixedCrops:
    """A group of crops that were mixed with each other, and their targets."""

    views: Tensor  # crops [B, C, S, S], or what was computed from them [B, ...]
    own: Tensor  # target of each, [B], or rows of several targets, [B, T]
    other: Tensor | None = None  # targets that were mixed in. None: no mixing
    lam: float = 1.0  # share of their own pixels

    def column(self, number: int) -> "MixedCrops":
        """Return the group with only one of its several targets."""
        other = self.other
        if other is not None:
            other = other[:, number]
        return replace(self, own=self.own[:, number], other=other)


def draw_cutmix(
    count: int,
    height: int,
    width: int,
    alpha: float,
    rng: np.random.Generator,
) -> Mix:
    """Draw one box for a group: lam ~ Beta(alpha, alpha), the larger of lam and 1 - lam.

    The latter is as released. The box covers 1 - lam of the image around a uniform centre. It is
    clipped at the border, and lam becomes the share that is left outside it.
    """
    lam = rng.beta(alpha, alpha)
    side = (1 - max(lam, 1 - lam)) ** 0.5
    box_h = int(height * side)
    box_w = int(width * side)
    y = int(rng.integers(height))
    x = int(rng.integers(width))
    top = max(0, y - box_h // 2)
    bottom = min(height, y - box_h // 2 + box_h)
    left = max(0, x - box_w // 2)
    right = min(width, x - box_w // 2 + box_w)
    lam = 1 - (bottom - top) * (right - left) / (height * width)
    partner = torch.from_numpy(rng.permutation(count))
    return Mix(lam, partner, (top, bottom, left, right))


def draw_mixup(count: int, alpha: float, rng: np.random.Generator) -> Mix:
    """Draw one blend for a group: lam ~ Beta(alpha, alpha), the larger of lam and 1 - lam."""
    lam = float(rng.beta(alpha, alpha))
    partner = torch.from_numpy(rng.permutation(count))
    return Mix(max(lam, 1 - lam), partner, None)


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """Return the mixed images, [B, C, H, W], the input left as it was."""
    partner = mix.partner_on(images.device)
    if mix.box is None:
        return images * mix.lam + images[partner] * (1 - mix.lam)
    top, bottom, left, right = mix.box
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[partner, :, top:bottom, left:right]
    return mixed


def mixed_crops(crops: Tensor, target: Tensor, mix: Mix | None) -> MixedCrops:
    """Return crops [B, C, S, S] and their targets [B, ...], mixed unless ``mix`` is None."""
    if mix is None:
        return MixedCrops(crops, target)
    other = target[mix.partner_on(target.device)]
    return MixedCrops(mix_images(crops, mix), target, other, mix.lam)
