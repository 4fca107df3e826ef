"""Shared by methods: crops in order, mixing, rows of all processes, a momentum encoder."""

import copy
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from idmm.config import Method
from idmm.distributed import gather_rows
from idmm.methods.mixing import draw_cutmix, mix_images
from idmm.models import feature_width
from idmm.models.build import one_image_norms
from idmm.seeding import numpy_rng


def crops_of(batch: dict) -> list[Tensor]:
    """Return the crops of a batch one by one, each [B, C, S, S]."""
    return [crop for group in batch["views"] for crop in group.unbind(1)]


def mixed_groups(batch: dict, target: Tensor, alpha: float, key: int) -> Iterator[tuple]:
    """Mix each group of crops on its own, by CutMix of Beta(alpha, alpha) with partners from the
    group; 0: no mixing.

    Yields:
        Views [B*count, C, S, S], crops of an image together; their targets [B*count], from the
        images' [B], or rows of several targets from the images' [B, T]; the targets mixed into them
        (None: none) and the share of their own pixels.
    """
    for number, views in enumerate(batch["views"]):
        own = target.repeat_interleave(views.shape[1], dim=0)  # [B] -> [B*count]
        views = views.flatten(0, 1)
        other = None
        lam = 1.0
        if alpha:
            mix = draw_cutmix(
                len(views), *views.shape[-2:], alpha, numpy_rng(key, "cutmix", number)
            )
            views = mix_images(views, mix)
            other = own[mix.partner_on(own.device)]
            lam = mix.lam
        yield views, own, other, lam


def mixed_cross_entropy(
    logits: Tensor,
    own: Tensor,
    other: Tensor | None,
    lam: float,
    smoothing: float,
    class_weight: Tensor | None = None,
    summed: bool = False,
) -> Tensor:
    """Return the cross-entropy of logits [B, K] with classes ``own`` [B] (share lam) and ``other``
    [B] (the rest).

    It is the mean over the rows or, with ``summed``, the sum. A class of -1 is unknown and adds
    nothing to the sum.

    With weights ``class_weight`` [K] it is (1/B) sum_i lam w(own_i) CE_i(own_i) + (1 - lam)
    w(other_i) CE_i(other_i), CE_i(c) is image i's cross-entropy with the smoothed label of class c.
    torch's ``weight`` differs: it weighs the terms of the smoothing by their own classes, so the
    large weight of a rare class would act on every image.
    """

    def part(label: Tensor) -> Tensor:
        if class_weight is None:
            reduction = "sum" if summed else "mean"
            return F.cross_entropy(
                logits, label, ignore_index=-1, label_smoothing=smoothing, reduction=reduction
            )
        each = F.cross_entropy(logits, label, label_smoothing=smoothing, reduction="none")  # [B]
        return (class_weight[label] * each).mean()

    if other is None:
        return part(own)
    return lam * part(own) + (1 - lam) * part(other)


def gather_batch(batch: dict, *rows: Tensor) -> list[Tensor]:
    """Return rows [B, ...] of all processes in float32 or better, with gradient, as if one process
    had made them.

    Images that only keep a process in step (``weight`` 0) are left out. If no process has others,
    its own remain, because the loss of no rows is not a number. Its factor is 0.
    """
    keep = batch.get("weight", 1.0) > 0
    rows = [at_least_fp32(tensor) if tensor.is_floating_point() else tensor for tensor in rows]
    gathered = [gather_rows(tensor if keep else tensor[:0]) for tensor in rows]
    if len(gathered[0]):
        return gathered
    return rows


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return half precision as float32 and double as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def full_precision(tensor: Tensor):
    """Return a context without autocast, for losses."""
    return torch.autocast(tensor.device.type, enabled=False)


def width_of(backbone: nn.Module, config: Method) -> tuple[int, int]:
    """Return the width of the features and of a head's hidden layers."""
    width = feature_width(backbone)
    return width, config.hidden_dim or width


def head_dim(backbone: nn.Module, config: Method) -> int:
    """Return the width of the output of :func:`projection_head`."""
    if config.projection:
        return config.dim or 256
    return feature_width(backbone)


def projection_head(backbone: nn.Module, config: Method) -> nn.Module:
    """Return the MLP of SimCLR (W2 relu(W1 h), no batch norm), [B, d] -> [B, dim], or the identity
    if it is off."""
    if not config.projection:
        return nn.Identity()
    from lightly.models.modules import SimCLRProjectionHead

    return SimCLRProjectionHead(
        *width_of(backbone, config), head_dim(backbone, config), num_layers=2, batch_norm=False
    )


class MomentumEncoder(nn.Module):
    """A slowly moving average of a backbone and a head, without gradients, dropout and drop path.

    Batch norms take the statistics of the batch in training, as those of the original modules.

    Args:
        backbone: Followed.
        head: Followed.
        momentum: Share that stays at each step.
        steps: T of the run; after step t of 0 to T - 1 the momentum is 1 - (1 - m) (1 + cos(pi t /
            T)) / 2. None: m.
    """

    def __init__(
        self, backbone: nn.Module, head: nn.Module, momentum: float, steps: int | None = None
    ):
        super().__init__()
        self.copies = nn.Sequential(copy.deepcopy(backbone), copy.deepcopy(head)).requires_grad_(
            False
        )
        self.momentum = momentum
        self.steps = steps

    @torch.no_grad()
    def forward(self, images: Tensor | Sequence[Tensor]) -> Tensor:
        """Run the copies on images [B, C, S, S], or on several such in one pass."""
        if isinstance(images, Tensor):
            images = images
        else:
            images = torch.cat(images)
        with one_image_norms(self.copies[0], images):
            return self.copies(images)

    def train(self, mode: bool = True) -> "MomentumEncoder":
        """Put only batch norms into training mode."""
        super().train(False)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.training = mode
        return self

    def update(self, step: float, backbone: nn.Module, head: nn.Module) -> None:
        """Move towards the modules after an optimizer step, see
        :meth:`idmm.methods.base.Method.after_step`."""
        from lightly.models.utils import update_momentum
        from lightly.utils.scheduler import cosine_schedule

        momentum = self.momentum
        if self.steps is not None:
            momentum = float(cosine_schedule(step, self.steps + 1, momentum, 1.0))
        update_momentum(nn.Sequential(backbone, head), self.copies, momentum)
