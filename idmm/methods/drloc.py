"""Dense relative localization as an extra term of a method's loss. Its head is here, never in the
backbone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from idmm.config import DrLoc
from idmm.errors import UserError
from idmm.losses.drloc import DenseRelativeLocalization
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

    def __init__(self, backbone: nn.Module, config: DrLoc, size: int, in_chans: int):
        super().__init__()
        self.config = config
        grids = self._probe(backbone, size, in_chans)
        if min(grids[-1].shape[2:]) < 2:
            rows, columns = grids[-1].shape[2:]
            why = f"at {size} px the final grid is {rows}x{columns}, nothing is apart"
            raise UserError(
                f"drloc.weight: {why}. Give larger images, a backbone with finer grids or --drloc.weight 0"
            )
        widths = [grid.shape[1] for grid in grids]
        self.loss = DenseRelativeLocalization(
            widths, config.mode, config.pairs, config.hidden_dim, config.grid_size
        )

    def forward(
        self, backbone: nn.Module, images: Tensor, key: int, head: Callable | None = None
    ) -> tuple[Tensor, Tensor, dict]:
        """Return the backbone's output for images [B, C, S, S], the weighted loss on its grid, and
        values for the log.

        ``key`` seeds the pairs; ``head`` takes the place of ``backbone.forward_head``.
        """
        features, grids = self._run(backbone, images)
        loss = self.loss(grids, numpy_rng(key, "drloc"))
        return (
            (head or backbone.forward_head)(features),
            self.config.weight * loss,
            {"drloc": loss.detach()},
        )

    def _run(self, backbone: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features and the grids that the loss is for, the final one or one for each
        block."""
        size = images.shape[-2:]
        if self.config.mode != "l1_all":
            features = backbone.forward_features(images)
            return features, [as_grid(backbone, features, size)]
        with block_outputs(backbone) as outputs:
            features = backbone.forward_features(images)
        return features, [as_grid(backbone, output, size) for output in outputs]

    @torch.no_grad()
    def _probe(self, backbone: nn.Module, size: int, in_chans: int) -> list[Tensor]:
        """Return the grids of a black image."""
        training = backbone.training
        try:
            return self._run(backbone.eval(), black_image(backbone, in_chans, size))[1]
        finally:
            backbone.train(training)
