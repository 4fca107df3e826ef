"""What the training loop asks of a method: a loss for a batch, and no more."""

from torch import Tensor, nn


class Method(nn.Module):
    """A backbone with what a method adds to it. The loop knows neither.

    Attributes:
        backbone: The timm model that is trained, averaged (EMA) and exported.
        lr_scales: Learning rate of a child module by name, as a multiple of the run's; 1 where not named.
    """

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.lr_scales: dict[str, float] = {}

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Computes the loss of a batch.

        Args:
            batch: From the loader, on the device.
            key: Seed of this pass's own random choices, another for each step, pass and process.
            epoch: Counted from 0.

        Returns:
            ``loss``, the mean over the batch's images, and other scalars for the log.
        """
        raise NotImplementedError(f"{type(self).__name__} must compute a loss")

    def after_step(self, step: int) -> None:
        """Acts after an optimizer step (a momentum encoder, a queue); nothing by default."""
