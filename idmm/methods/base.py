"""What the training loop asks of a method: a loss for a batch, and no more."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from idmm.methods.drloc import Localization
from idmm.models.build import one_image_norms


@dataclass(frozen=True)
class RunInfo:
    """What a method may need to know of the run."""

    images: int  # N, from the data
    batch_size: int  # images of an optimizer step
    epochs: int  # of the recipe, where ``train.minutes`` decide
    steps: int  # optimizer steps of so many epochs
    classes: int | None = None  # K, where there are labels
    global_groups: int = 1  # how many groups of crops, from the first on, are global (idmm.config.global_groups)
    labelled: int | None = None  # images with a label; None: all


class Method(nn.Module):
    """A backbone, a timm model that is trained and averaged (EMA), with what a method adds to it.

    Attributes:
        localization: An extra loss on the grid of embeddings of all images that need gradients, or None.
        head: Between the features and the loss; nothing unless a method has one.
        scheduled_epoch: Where schedules that go by epochs stand, which the loop sets with ``train.minutes``: from 0 to
            the recipe's epochs; None: at the epoch.
        lr_scales: Learning rate of a child module by name, as a multiple of the run's; 1 where not named.
        instance_rows: Name of the parameter that has a row for each training image [N, d]; None: there is none.
    """

    instance_rows: ClassVar[str | None] = None
    localization: Localization | None

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.register_module("localization", None)  # set later, it still comes second in the optimizer's groups
        self.head: nn.Module = nn.Identity()
        self.lr_scales: dict[str, float] = {}
        self.scheduled_epoch: float | None = None

    def scheduled(self, epoch: int) -> float:
        """Returns where schedules stand in an epoch, counted from 0."""
        return epoch if self.scheduled_epoch is None else self.scheduled_epoch

    @property
    def exported(self) -> nn.Module:
        """The backbone that the run is for; the one that is trained, unless a method says otherwise."""
        return self.backbone

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Computes the loss of a batch.

        Args:
            batch: From the loader, on the device; ``weight`` 0 marks images that only keep this process in step.
            key: Seed of this call's own random choices, another for each step, micro-batch and process.
            epoch: Counted from 0.

        Returns:
            ``loss``, the mean over the batch's images, and other scalars for the log.
        """
        raise NotImplementedError(f"{type(self).__name__} must compute a loss")

    def features(
        self,
        images: Tensor | Sequence[Tensor],
        key: int,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | float, dict[str, Tensor]]:
        """Runs the backbone, once for each size of images.

        Args:
            images: [B, C, S, S], or several such, each of its size; of one size with ``localization``.
            key: As for :meth:`forward`.
            head: Takes the place of ``backbone.forward_head``.

        Returns:
            The output, a row for each image ([B, d] without ``head``), the extra loss and its values for the log.
        """
        backbone = self.backbone
        with one_image_norms(backbone, images):
            if self.localization is not None:
                images = images if isinstance(images, Tensor) else torch.cat(images)
                return self.localization(backbone, images, key, head)
            network = backbone if head is None else lambda part: head(backbone.forward_features(part))
            return run_by_size(network, images), 0.0, {}

    @property
    def starts_from_features(self) -> bool:
        """Whether a new run calls :meth:`prepare` before its first step."""
        return False

    def prepare(self, features: Tensor) -> None:
        """Start from the features [N, d] of all training images, on the CPU."""

    def before_step(self, epoch: int) -> None:
        """Acts between the backward pass and the optimizer step (gradients to drop); nothing by default."""

    def after_step(self, step: float) -> None:
        """Acts after an optimizer step, counted from 0 (a momentum encoder); nothing by default. With ``train.minutes``
        it is the share of the time that is over, times the recipe's steps."""

    def embed(self, features: Tensor) -> Tensor:
        """Returns what the loss compares, of pooled features [B, d] of ``exported``; collapse shows there first."""
        return self.head(features)

    def diagnose(self, features: Tensor, index: Tensor) -> dict[str, float]:
        """Returns measures of its own, of training images' pooled features [B, d] (``exported``'s) and numbers [B]."""
        return {}


def run_by_size(network: Callable[[Tensor], Tensor], images: Tensor | Sequence[Tensor]) -> Tensor:
    """Runs images [B, C, S, S], or several such, all of one size in one pass; returns a row each, in their order."""
    if isinstance(images, Tensor):
        return network(images)
    by_size: dict[torch.Size, list[int]] = defaultdict(list)
    for number, part in enumerate(images):
        by_size[part.shape[-2:]].append(number)
    rows: dict[int, Tensor] = {}  # by the part's number
    for numbers in by_size.values():
        same = [images[number] for number in numbers]
        rows |= zip(numbers, network(torch.cat(same)).split([len(part) for part in same]), strict=True)
    return torch.cat([rows[number] for number in range(len(images))])
