"""CutMix (Yun et al., ICCV 2019) and Mixup (Zhang et al., ICLR 2018) with sparse targets, for both
stages.

A mixed batch has two targets and one share, never a dense row of class probabilities. timm's Mixup
needs even batches and draws from NumPy's global state; here the draw is a function of the generator
passed in.
"""

from dataclasses import dataclass

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
        if device.type == "cuda":
            pinned = self.partner.pin_memory()
        else:
            pinned = self.partner
        return pinned.to(device, non_blocking=True)


def draw_cutmix(count: int, height: int, width: int, alpha: float, rng: np.random.Generator) -> Mix:
    """Draw one box for a group: lam ~ Beta(alpha, alpha), the larger of lam and 1 - lam as
    released.

    The box covers 1 - lam of the image around a uniform centre, is clipped at the border, and lam
    becomes the share that is left outside it.
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
    return Mix(lam, torch.from_numpy(rng.permutation(count)), (top, bottom, left, right))


def draw_mixup(count: int, alpha: float, rng: np.random.Generator) -> Mix:
    """Draw one blend for a group: lam ~ Beta(alpha, alpha), the larger of lam and 1 - lam."""
    lam = float(rng.beta(alpha, alpha))
    return Mix(max(lam, 1 - lam), torch.from_numpy(rng.permutation(count)), None)


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """Return the mixed images, [B, C, H, W], the input left as it was."""
    partner = mix.partner_on(images.device)
    if mix.box is None:
        return images * mix.lam + images[partner] * (1 - mix.lam)
    top, bottom, left, right = mix.box
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[partner, :, top:bottom, left:right]
    return mixed
