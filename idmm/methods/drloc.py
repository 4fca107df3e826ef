"""Dense relative localization as an extra term of a method's loss, with the head that it needs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from idmm.config import DrLoc
from idmm.errors import UserError
from idmm.losses.drloc import DenseRelativeLocalization
from idmm.models import Backbone
from idmm.models.build import black_image
from idmm.models.grid import as_grid, block_outputs
from idmm.seeding import numpy_rng


class Localization(nn.Module):
    """Runs a backbone once, for its output and for the loss on its grid of embeddings.

    ``size`` is the images' side (pixels).

    Raises:
        UserError: The model's features are no grid, or one of a single place, or mode l1_all and it
            has no transformer blocks.
    """

    def __init__(self, backbone: Backbone, config: DrLoc, size: int, in_chans: int):
        super().__init__()
        self.config = config
        grids = self._probe(backbone, size, in_chans)
        rows, columns = grids[-1].shape[2:]
        if min(rows, columns) < 2:
            text = f"at {size} px the final grid is {rows}x{columns}, nothing is apart"
            remedy = "Give larger images, a backbone with finer grids or --drloc.weight 0"
            raise UserError.of("drloc.weight", text, remedy)
        widths = [grid.shape[1] for grid in grids]
        self.loss = DenseRelativeLocalization(
            widths, config.mode, config.pairs, config.hidden_dim, config.grid_size
        )

    def forward(
        self,
        backbone: Backbone,
        images: Tensor,
        key: int,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the backbone's output, the weighted loss on its grid, and values for the log.

        Args:
            backbone: Run once.
            images: [B, C, S, S].
            key: Seed of the pairs.
            head: Replaces ``backbone.forward_head``.
        """
        features, grids = self._run(backbone, images)
        loss = self.loss(grids, numpy_rng(key, "drloc"))
        if head is None:
            head = backbone.forward_head
        return head(features), self.config.weight * loss, {"drloc": loss.detach()}

    def _run(self, backbone: Backbone, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features and the grids of the loss: the final one, or one for each block."""
        size = images.shape[-2:]
        if self.config.mode != "l1_all":
            features = backbone.forward_features(images)
            return features, [as_grid(backbone, features, size)]
        with block_outputs(backbone) as outputs:
            features = backbone.forward_features(images)
        return features, [as_grid(backbone, output, size) for output in outputs]

    @torch.no_grad()
    def _probe(self, backbone: Backbone, size: int, in_chans: int) -> list[Tensor]:
        """Return the grids of a black image."""
        training = backbone.training
        try:
            return self._run(backbone.eval(), black_image(backbone, in_chans, size))[1]
        finally:
            backbone.train(training)
