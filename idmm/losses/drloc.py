"""Dense relative localization: where two embeddings of a grid stand to each other (Liu et al., NeurIPS 2021)."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm.seeding import numpy_rng

MODES = ("l1", "l1_signed", "ce", "reg", "l1_all")
VARIANCE_FLOOR = 1e-6


class DenseRelativeLocalization(nn.Module):
    """Guesses the offset p - q between random positions p and q of a grid from the two embeddings there.

    The reference is the pseudocode of the paper's supplement: means over batch and pairs, not the sums of Eq. 2.

    ========== ==================== ======= ==================================================================
    mode       target               outputs loss
    ========== ==================== ======= ==================================================================
    l1         abs(p - q)/k         2       mean absolute error over batch, pairs and both axes
    l1_signed  (p - q)/k            2       the same (Eq. 3 of the supplement)
    ce         class p - q + K      2(2K+1) cross-entropy along u + cross-entropy along v (Eq. 5)
    reg        p - q                2(2K+1) mean of (c-mu)^2/sigma^2 + alpha log sigma, axes added (Eq. 6)
    l1_all     as l1, in each block 2       sum over the transformer's blocks, each with its own head (Eq. 7)
    ========== ==================== ======= ==================================================================

    Axis 0 of targets and outputs is u, the rows (counted downwards); axis 1 is v, the columns. K is ``grid_size``; k is
    the grid's own size along the axis. A grid of more than K rows or columns is average-pooled to K along that axis, a
    smaller one is used as it is. The paper's Eq. 7 does not pool the finer grids of Swin's early blocks: for that, give
    ``l1_all`` the size of the largest grid.

    A half input is raised to the head's precision, fp32 as a rule, and pooled in it. The head's products alone follow
    the caller's autocast; its outputs are raised to fp32 (double stays) before softmax, variance, logarithm and means.

    Args:
        in_dim: Width D of the embeddings; for ``l1_all`` a sequence of widths, one for each block.
        mode: See the table.
        num_pairs: Pairs m drawn in each image.
        hidden_dim: Width of the head's two hidden layers.
        grid_size: K.
        alpha: Weight of log sigma in ``reg``.

    Raises:
        ValueError: An unknown mode, or widths that do not fit it.
    """

    def __init__(
        self,
        in_dim: int | Sequence[int],
        mode: str = "l1",
        num_pairs: int = 64,
        hidden_dim: int = 512,
        grid_size: int = 7,
        alpha: float = 0.001,
    ):
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if isinstance(in_dim, Sequence) != (mode == "l1_all") or not in_dim:
            wanted = "a list of widths, one for each block" if mode == "l1_all" else "one width"
            raise ValueError(f"in_dim must be {wanted} in mode {mode}, got {in_dim!r}")
        self.in_dims = tuple(in_dim) if mode == "l1_all" else (in_dim,)
        self.mode, self.num_pairs, self.grid_size, self.alpha = mode, num_pairs, grid_size, alpha
        outputs = 2 * (2 * grid_size + 1) if mode in ("ce", "reg") else 2
        self.heads = nn.ModuleList(PairHead(dim, hidden_dim, outputs) for dim in self.in_dims)

    def forward(
        self,
        grid: Tensor | Sequence[Tensor],
        generator: np.random.Generator | None = None,
        positions: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Computes the loss of a batch.

        Args:
            grid: Embeddings, [B, D, k_h, k_w]; for ``l1_all`` a sequence of them, one for each block.
            generator: Where the pairs come from, see :meth:`draw`.
            positions: The pairs themselves (a sequence of them for ``l1_all``), int64 [B, m, 4]: row and column of p,
                row and column of q, in the pooled grid.

        Returns:
            Mean over images and pairs, a scalar tensor.

        Raises:
            ValueError: Grids of other widths or another number than the heads.
        """
        grids = self._grids(grid)
        pairs = self.draw(grid, generator) if positions is None else positions
        if isinstance(pairs, Tensor):
            pairs = [pairs]
        losses = [self._loss(*parts) for parts in zip(self.heads, grids, pairs, strict=True)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def draw(self, grid: Tensor | Sequence[Tensor], generator: np.random.Generator | None = None) -> list[Tensor]:
        """Draws pairs for each grid, uniformly and with replacement: both ends of a pair may be one position.

        Args:
            grid: As for :meth:`forward`; only its shape counts.
            generator: As from :func:`idmm.seeding.numpy_rng`; None: one that torch's global generator seeds.

        Returns:
            Positions for :meth:`forward`, which can then be compiled whole: int64 [B, m, 4] each, on the CPU.
        """
        generator = generator or numpy_rng(int(torch.randint(2**62, ())), "drloc")
        drawn = []
        for g in self._grids(grid):
            height, width = self._size(g)
            flat = generator.integers(height * width, size=(len(g), self.num_pairs, 2))
            pairs = torch.from_numpy(np.stack(np.divmod(flat, width), -1)).flatten(2)  # [B, m, 2, 2] -> [B, m, 4]
            drawn.append(pairs.pin_memory() if g.is_cuda else pairs)  # copied without waiting for the device
        return drawn

    def _grids(self, grid: Tensor | Sequence[Tensor]) -> list[Tensor]:
        if isinstance(grid, Tensor) == (self.mode == "l1_all"):
            wanted = "a sequence of grids" if self.mode == "l1_all" else "one grid"
            raise ValueError(f"mode {self.mode} takes {wanted}, got {type(grid).__name__}")
        grids = [grid] if isinstance(grid, Tensor) else list(grid)
        if [g.shape[1] for g in grids] != list(self.in_dims):
            raise ValueError(f"expected grids of widths {self.in_dims}, got {[list(g.shape) for g in grids]}")
        return grids

    def _size(self, grid: Tensor) -> tuple[int, int]:
        """Rows and columns after pooling."""
        return min(grid.shape[2], self.grid_size), min(grid.shape[3], self.grid_size)

    def _loss(self, head: "PairHead", grid: Tensor, positions: Tensor) -> Tensor:
        size = self._size(grid)
        with torch.autocast(grid.device.type, enabled=False):
            grid = grid.to(head[0].weight.dtype)
            if grid.shape[2:] != size:
                grid = F.adaptive_avg_pool2d(grid, size)
        p, q = positions.to(grid.device, non_blocking=True).split(2, -1)  # [B, m, 2] each: row, column
        index = torch.stack((p[..., 0] * size[1] + p[..., 1], q[..., 0] * size[1] + q[..., 1]), -1)  # [B, m, 2]
        out = head(grid.flatten(2).transpose(1, 2), index)  # [B, D, h, w] -> [B, h*w, D] -> [B, m, outputs]
        with torch.autocast(grid.device.type, enabled=False):
            out = out.to(torch.promote_types(out.dtype, torch.float32))
            return self._compare(out, p - q, size)

    def _compare(self, out: Tensor, offset: Tensor, size: tuple[int, int]) -> Tensor:
        """Mean loss of the head's outputs [B, m, outputs] against the offsets p - q, int64 [B, m, 2]."""
        if self.mode == "ce":
            logits = out.view(-1, 2 * self.grid_size + 1)  # [B*m*2, 2K+1]
            return 2 * F.cross_entropy(logits, offset.flatten() + self.grid_size)
        if self.mode == "reg":
            classes = torch.arange(-self.grid_size, self.grid_size + 1, device=out.device, dtype=out.dtype)  # [2K+1]
            p = out.unflatten(2, (2, -1)).softmax(-1)  # [B, m, 2, 2K+1]
            mean = p @ classes  # [B, m, 2]
            variance = (p * (classes - mean.unsqueeze(-1)) ** 2).sum(-1).clamp(min=VARIANCE_FLOOR)
            loss = (offset - mean) ** 2 / variance + self.alpha / 2 * variance.log()
            return 2 * loss.mean()
        target = offset.to(out.dtype)
        target = torch.stack((target[..., 0] / size[0], target[..., 1] / size[1]), -1)
        return F.l1_loss(out, target if self.mode == "l1_signed" else target.abs())


class PairHead(nn.Sequential):
    """The localization MLP, 2d -> h -> ReLU -> h -> ReLU -> outputs, on pairs of tokens."""

    def __init__(self, in_dim: int, hidden_dim: int, outputs: int):
        super().__init__(
            nn.Linear(2 * in_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, outputs),
        )

    def forward(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Maps tokens [B, n, d] and pairs of their places [B, m, 2] to [B, m, outputs].

        With the first weight W = [W1 W2] the first layer is W1 z_p + W2 z_q. Where tokens are no more than pairs it is
        cheaper to project each token once by both halves and to add what the pairs name. The choice is made by a
        product with zeros and ones, whose gradient is a product too: fast, and the same on every run on a GPU.
        """
        first, *rest = self
        batch, n, dim = tokens.shape
        if n <= index.shape[1]:
            weight = first.weight.unflatten(1, (2, dim)).transpose(0, 1).flatten(0, 1)  # [h, 2d] -> [2h, d]
            bias = torch.cat((first.bias, torch.zeros_like(first.bias)))
            halves = F.linear(tokens, weight, bias).view(batch, 2 * n, -1)  # [B, n, 2h] -> [B, 2n, h]
            place = torch.arange(2 * n, device=index.device)
            chosen = (place == 2 * index[..., :1]) | (place == 2 * index[..., 1:] + 1)  # [B, m, 2n]
            x = chosen.to(halves.dtype) @ halves  # [B, m, h]
        else:
            rows = index + n * torch.arange(batch, device=index.device)[:, None, None]  # of all images' tokens
            pairs = tokens.reshape(-1, dim).index_select(0, rows.flatten())  # [B*m*2, d]
            x = first(pairs.view(batch, -1, 2 * dim))  # [B, m, 2d] -> [B, m, h]
        for layer in rest:
            x = layer(x)
        return x
