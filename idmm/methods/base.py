"""The interface of a method for the training loop: a loss for a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType

import torch
from torch import Tensor, nn

from idmm.batch import Batch
from idmm.methods.common import MomentumEncoder, in_one_pass
from idmm.methods.drloc import Localization
from idmm.models import Backbone
from idmm.models.build import one_image_norms

Values = dict[str, Tensor]  # scalars by name: a loss, and values for the log
# of a backbone, with an extra loss and values for the log
Output = tuple[Tensor, Tensor | float, Values]


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run that a method may need."""

    images: int  # N, from the data
    batch_size: int  # images of an optimizer step
    epochs: int  # with ``train.minutes`` the recipe's
    steps: int  # optimizer steps of so many epochs
    classes: int | None = None  # K, if there are labels
    # how many groups of crops, from the first on, are global (idmm.config.global_groups)
    global_groups: int = 1
    labelled: int | None = None  # images with a label; None: all


class Method(nn.Module):
    """A backbone, which is trained and averaged by EMA, with the modules that a method adds.

    Attributes:
        localization: An extra loss on the grid of embeddings of all images that need gradients, or
            None.
        head: Between the features and the loss. The default does nothing.
        scheduled_epoch: Progress in the recipe's epochs, which the loop sets with
            ``train.minutes``. None: schedules follow the epoch.
        starts_from_features: Whether a new run calls :meth:`prepare` before its first step.
        teacher: Of backbone and head, or None.
        lr_scales: Learning rates of child modules by name, as multiples of the run's; 1 if not
            named.
    """

    localization: Localization | None
    teacher: MomentumEncoder | None

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.backbone = backbone
        # first after the backbone, so second in the optimizer's groups
        self.register_module("localization", None)
        self.head: nn.Module = nn.Identity()
        self.lr_scales: dict[str, float] = {}
        self.scheduled_epoch: float | None = None
        self.starts_from_features = False
        self.teacher = None

    def others(self) -> dict[str, tuple[nn.Module, float]]:
        """Return all modules but the backbone by name, each with its multiple of the lr."""
        modules = {}
        for name, child in self.named_children():
            if name != "backbone":
                modules[name] = (child, self.lr_scales.get(name, 1.0))
        return modules

    def scheduled(self, epoch: int) -> float:
        """Return the position of schedules in an epoch, counted from 0."""
        if self.scheduled_epoch is None:
            return epoch
        return self.scheduled_epoch

    @property
    def exported(self) -> Backbone:
        """The backbone to export. The default is the one in training."""
        return self.backbone

    def forward(self, batch: Batch, key: int, epoch: int) -> Values:
        """Compute the loss of a batch.

        Args:
            batch: From the loader, on the device. ``weight`` 0 marks images that only keep this
                process in step.
            key: Seed of this call's random choices. It differs per step, micro-batch and process.
            epoch: Counted from 0.

        Returns:
            ``loss``, the mean over the batch's images, and other scalars for the log.
        """
        raise NotImplementedError(f"{type(self).__name__} must compute a loss")

    def features(
        self,
        images: Tensor | list[Tensor],
        key: int,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> Output:
        """Run the backbone once.

        Args:
            images: [B, C, S, S], or several such, which go through in one pass.
            key: As for :meth:`forward`.
            head: Replaces ``backbone.forward_head``.

        Returns:
            The output, one row per image ([B, d] without ``head``), the extra loss and its values
            for the log.
        """
        backbone = self.backbone
        images = in_one_pass(images)
        with one_image_norms(backbone, images):
            if self.localization is not None:
                output: Output = self.localization(backbone, images, key, head)
                return output
            if head is None:
                return backbone(images), 0.0, {}
            return head(backbone.forward_features(images)), 0.0, {}

    def prepare(self, features: Tensor) -> None:
        """Start from the features [N, d] of all training images, on the CPU."""

    def compile(self) -> None:
        """Compile what most of a step's time goes to by torch.compile: the backbone's features."""
        backbone = self.backbone  # methods call its features and its head one by one
        compiled = torch.compile(type(backbone).forward_features)
        # bound to the copy of a copied backbone
        bound = MethodType(compiled, backbone)
        backbone.forward_features = bound  # type: ignore[method-assign]  # of this object only

    def before_step(self, epoch: int) -> None:
        """Act between backward pass and optimizer step, e.g. drop gradients. Nothing by default."""

    def after_step(self, step: float) -> None:
        """Act after an optimizer step, counted from 0. The default moves the teacher, if any.

        With ``train.minutes``, ``step`` is the progress times the recipe's steps.
        """
        if self.teacher is not None:
            self.teacher.update(step, self.backbone, self.head)

    def embed(self, features: Tensor) -> Tensor:
        """Return the embeddings that the loss compares, from pooled features of ``exported``.

        [B, d] -> [B, D]. A collapse shows there first.
        """
        outputs: Tensor = self.head(features)
        return outputs

    def diagnose(self, features: Tensor, index: Tensor) -> dict[str, float]:
        """Return the method's own measures.

        Args:
            features: Pooled, of ``exported``, [B, d].
            index: Numbers of the images, int64 [B].
        """
        return {}
