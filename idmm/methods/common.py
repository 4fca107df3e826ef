"""Shared by methods: crops in order, mixing, rows of all processes, a momentum encoder."""

import copy
import functools
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from idmm.batch import Batch
from idmm.config.methods import Projected
from idmm.distributed import gather_rows
from idmm.methods.mixing import MixedCrops, draw_cutmix, mixed_crops
from idmm.models import Backbone, feature_width
from idmm.models.build import one_image_norms
from idmm.seeding import numpy_rng


def crops_of(batch: Batch) -> list[Tensor]:
    """Return the crops of a batch one by one, each [B, C, S, S]."""
    return [crop for group in batch["views"] for crop in group.unbind(1)]


def mixed_groups(batch: Batch, target: Tensor, alpha: float, key: int) -> list[MixedCrops]:
    """Mix each group of crops on its own, by CutMix of Beta(alpha, alpha) within the group.

    Args:
        batch: With ``views``.
        target: Of the images [B], or rows of several targets [B, T].
        alpha: 0: no mixing.
        key: Seed.

    Returns:
        Groups of count crops per image, [B*count, C, S, S], those of an image together.
    """
    groups = []
    for number, views in enumerate(batch["views"]):
        count, _, height, width = views.shape[1:]
        own = target.repeat_interleave(count, dim=0)  # [B] -> [B*count]
        crops = views.flatten(0, 1)
        mix = None
        if alpha:
            rng = numpy_rng(key, "cutmix", number)
            mix = draw_cutmix(len(crops), height, width, alpha, rng)
        groups.append(mixed_crops(crops, own, mix))
    return groups


def rows_of(groups: Sequence[MixedCrops], rows: Tensor) -> list[Tensor]:
    """Return the rows [V, ...] of all crops by group, [B, ...] each."""
    return list(rows.split([len(group.views) for group in groups]))


def added(losses: Iterable[Tensor]) -> Tensor:
    """Return the sum of losses."""
    return functools.reduce(torch.add, losses)


def mixed_cross_entropy(
    logits: Tensor,
    crops: MixedCrops,
    smoothing: float,
    class_weight: Tensor | None = None,
    summed: bool = False,
) -> Tensor:
    """Return the cross-entropy of logits [B, K] of crops with their classes and those mixed in.

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

    if crops.other is None:
        return part(crops.own)
    return crops.lam * part(crops.own) + (1 - crops.lam) * part(crops.other)


def gather_batch(batch: Batch, *rows: Tensor) -> list[Tensor]:
    """Return rows [B, ...] of all processes in float32 or better, with gradient.

    They are as if one process had made them. Images that only keep a process in step (``weight`` 0)
    are left out. If no process has others, its own remain, because the loss of no rows is not a
    number. Its factor is 0.
    """
    own = []
    gathered = []
    for tensor in rows:
        if tensor.is_floating_point():
            tensor = at_least_fp32(tensor)
        own.append(tensor)
        if batch.get("weight", 1.0) <= 0:
            tensor = tensor[:0]
        gathered.append(gather_rows(tensor))
    if len(gathered[0]):
        return gathered
    return own


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return half precision as float32 and double as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def full_precision(tensor: Tensor) -> torch.autocast:
    """Return a context without autocast, for losses."""
    return torch.autocast(tensor.device.type, enabled=False)


def head_dim(backbone: Backbone, config: Projected) -> int:
    """Return the width of the output of :func:`projection_head`."""
    if config.projection:
        return config.dim or 256
    return feature_width(backbone)


def projection_head(backbone: Backbone, config: Projected) -> nn.Module:
    """Return the MLP of SimCLR, [B, d] -> [B, dim], or the identity if it is off.

    It is W2 relu(W1 h), without batch norm.
    """
    if not config.projection:
        return nn.Identity()
    from lightly.models.modules import SimCLRProjectionHead

    width = feature_width(backbone)
    hidden = config.hidden_dim or width
    head: nn.Module = SimCLRProjectionHead(
        width, hidden, head_dim(backbone, config), num_layers=2, batch_norm=False
    )
    return head


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
        self.copies = nn.Sequential(copy.deepcopy(backbone), copy.deepcopy(head))
        self.copies.requires_grad_(False)
        self.momentum = momentum
        self.steps = steps

    @torch.no_grad()
    def forward(self, images: Tensor | list[Tensor]) -> Tensor:
        """Run the copies on images [B, C, S, S], or on several such in one pass."""
        images = in_one_pass(images)
        with one_image_norms(self.copies[0], images):
            output: Tensor = self.copies(images)
        return output

    def train(self, mode: bool = True) -> "MomentumEncoder":
        """Put only batch norms into training mode."""
        super().train(False)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.training = mode
        return self

    def update(self, step: float, backbone: nn.Module, head: nn.Module) -> None:
        """Move towards the modules after an optimizer step.

        See :meth:`idmm.methods.base.Method.after_step`.
        """
        from lightly.models.utils import update_momentum
        from lightly.utils.scheduler import cosine_schedule

        momentum = self.momentum
        if self.steps is not None:
            momentum = float(cosine_schedule(step, self.steps + 1, momentum, 1.0))
        update_momentum(nn.Sequential(backbone, head), self.copies, momentum)


def in_one_pass(images: Tensor | list[Tensor]) -> Tensor:
    """Return images [B, C, S, S], or several such, as one tensor."""
    if isinstance(images, Tensor):
        return images
    return torch.cat(images)
