"""Dense relative localization: the offset between two embeddings of a grid (Liu et al., NeurIPS
2021)."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm.seeding import numpy_rng

MODES = ("l1", "l1_signed", "ce", "reg", "l1_all")
ALPHA = 0.001  # weight of log sigma in ``reg``
VARIANCE_FLOOR = 1e-6


class DenseRelativeLocalization(nn.Module):
    """Predicts the offset p - q between random positions p and q of a grid from their embeddings.

    The reference is the pseudocode of the paper's supplement: means over batch and pairs, not the
    sums of Eq. 2.

    ========= =============== ======== ===================================================
    mode      target          outputs  loss
    ========= =============== ======== ===================================================
    l1        abs(p - q)/k    2        mean absolute error over batch, pairs and both axes
    l1_signed (p - q)/k       2        the same (Eq. 3 of the supplement)
    ce        class p - q + K 2(2K+1)  cross-entropy along u + cross-entropy along v (Eq. 5)
    reg       p - q           2(2K+1)  mean of (c-mu)^2/sigma^2 + alpha log sigma, axes added
                                       (Eq. 6)
    l1_all    as l1, in each  2        sum over the transformer's blocks, each with its own
              block                    head (Eq. 7)
    ========= =============== ======== ===================================================

    Axis 0 of targets and outputs is u, the rows (downwards). Axis 1 is v, the columns. K is
    ``grid_size`` and k is the grid's own size along the axis. A grid with more than K rows or
    columns is average-pooled to K along that axis. A smaller one is not changed. The paper's Eq. 7
    does not pool the finer grids of Swin's early blocks. For that, pass the size of the largest
    grid with ``l1_all``.

    Half inputs are raised to the head's precision, normally fp32, before pooling. Only the head's
    products follow the caller's autocast. Its outputs are raised to fp32 (double stays) before
    softmax, variance, logarithm and means.

    Args:
        in_dim: Width D of the embeddings. For ``l1_all`` a sequence of widths, one per block, or
            that of a single one.
        mode: See the table.
        num_pairs: Pairs m per image.
        hidden_dim: Width of the head's two hidden layers.
        grid_size: K.

    Raises:
        ValueError: An unknown mode, or widths that do not match it.
    """

    def __init__(
        self,
        in_dim: int | Sequence[int],
        mode: str = "l1",
        num_pairs: int = 64,
        hidden_dim: int = 512,
        grid_size: int = 7,
    ):
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if isinstance(in_dim, Sequence):
            widths = list(in_dim)
        else:
            widths = [in_dim]
        if not widths or min(widths) < 1 or (len(widths) > 1 and mode != "l1_all"):
            if mode == "l1_all":
                expected = "one width for each block"
            else:
                expected = "one width"
            raise ValueError(f"in_dim must be {expected} in mode {mode}, got {in_dim!r}")
        self.mode = mode
        self.num_pairs = num_pairs
        self.grid_size = grid_size
        outputs = 2 * (2 * grid_size + 1) if mode in ("ce", "reg") else 2
        self.heads = nn.ModuleList(PairHead(width, hidden_dim, outputs) for width in widths)

    def forward(
        self,
        grid: Tensor | Sequence[Tensor],
        generator: np.random.Generator | None = None,
        positions: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return the loss of a batch.

        Args:
            grid: Embeddings, [B, D, k_h, k_w]. For ``l1_all`` a sequence of them, one per block.
            generator: Source of the pairs, see :meth:`draw`.
            positions: The pairs (a sequence for ``l1_all``), int64 [B, m, 4]: row and column of p,
                row and column of q, in the pooled grid.

        Returns:
            Mean over images and pairs, a scalar tensor.

        Raises:
            ValueError: The number of grids differs from that of the heads.
        """
        grids = self._grids(grid)
        if isinstance(positions, Tensor):
            positions = [positions]
        else:
            positions = positions
        if positions is None:
            pairs = self.draw(grid, generator)
        else:
            pairs = positions
        losses = [self._loss(*inputs) for inputs in zip(self.heads, grids, pairs, strict=True)]
        if len(losses) == 1:
            return losses[0]
        return torch.stack(losses).sum()

    def draw(
        self, grid: Tensor | Sequence[Tensor], generator: np.random.Generator | None = None
    ) -> list[Tensor]:
        """Draw pairs for each grid, uniformly and with replacement. Both ends of a pair may
        coincide.

        Args:
            grid: As for :meth:`forward`. Only its shape is used.
            generator: From :func:`idmm.seeding.numpy_rng`. None: one seeded by torch's global
                generator.

        Returns:
            Positions for :meth:`forward`, which can then be compiled whole: int64 [B, m, 4] each,
            on the CPU.
        """
        generator = generator or numpy_rng(int(torch.randint(2**62, ())), "drloc")
        drawn = []
        for g in self._grids(grid):
            height, width = self._size(g)
            flat = generator.integers(height * width, size=(len(g), self.num_pairs, 2))
            # [B, m, 2, 2] -> [B, m, 4]
            pairs = torch.from_numpy(np.stack(np.divmod(flat, width), -1)).flatten(2)
            # copied without waiting for the device
            drawn.append(pairs.pin_memory() if g.is_cuda else pairs)
        return drawn

    def _grids(self, grid: Tensor | Sequence[Tensor]) -> list[Tensor]:
        if isinstance(grid, Tensor):
            return [grid]
        return list(grid)

    def _size(self, grid: Tensor) -> tuple[int, int]:
        """Return rows and columns after pooling."""
        return min(grid.shape[2], self.grid_size), min(grid.shape[3], self.grid_size)

    def _loss(self, head: "PairHead", grid: Tensor, positions: Tensor) -> Tensor:
        size = self._size(grid)
        with torch.autocast(grid.device.type, enabled=False):
            grid = grid.to(head[0].weight.dtype)
            if grid.shape[2:] != size:
                grid = F.adaptive_avg_pool2d(grid, size)
        # [B, m, 2] each: row, column
        p, q = positions.to(grid.device, non_blocking=True).split(2, -1)
        # [B, m, 2]
        index = torch.stack((p[..., 0] * size[1] + p[..., 1], q[..., 0] * size[1] + q[..., 1]), -1)
        # [B, D, h, w] -> [B, h*w, D] -> [B, m, outputs]
        out = head(grid.flatten(2).transpose(1, 2), index)
        with torch.autocast(grid.device.type, enabled=False):
            out = out.to(torch.promote_types(out.dtype, torch.float32))
            return self._compare(out, p - q, size)

    def _compare(self, out: Tensor, offset: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the mean loss of outputs [B, m, outputs] for the offsets p - q, int64 [B, m,
        2]."""
        if self.mode == "ce":
            logits = out.view(-1, 2 * self.grid_size + 1)  # [B*m*2, 2K+1]
            return 2 * F.cross_entropy(logits, offset.flatten() + self.grid_size)
        if self.mode == "reg":
            # [2K+1]
            classes = torch.arange(
                -self.grid_size, self.grid_size + 1, device=out.device, dtype=out.dtype
            )
            p = out.unflatten(2, (2, -1)).softmax(-1)  # [B, m, 2, 2K+1]
            mean = p @ classes  # [B, m, 2]
            variance = (p * (classes - mean.unsqueeze(-1)) ** 2).sum(-1).clamp(min=VARIANCE_FLOOR)
            loss = (offset - mean) ** 2 / variance + ALPHA / 2 * variance.log()
            return 2 * loss.mean()
        target = offset.to(out.dtype)
        target = torch.stack((target[..., 0] / size[0], target[..., 1] / size[1]), -1)
        return F.l1_loss(out, target if self.mode == "l1_signed" else target.abs())


class PairHead(nn.Sequential):
    """The localization MLP, 2d -> h -> ReLU -> h -> ReLU -> outputs, on pairs of tokens."""

    def __init__(self, in_dim: int, hidden_dim: int, outputs: int):
        layers = (
            nn.Linear(2 * in_dim, hidden_dim),
            nn.Linear(hidden_dim, hidden_dim),
            nn.Linear(hidden_dim, outputs),
        )
        super().__init__(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Return [B, m, outputs] of tokens [B, n, d] and pairs of their indices [B, m, 2].

        With the weight W = [W1 W2] the first layer is W1 z_p + W2 z_q. If there are no more tokens
        than pairs, it is cheaper to project each token once by both halves and to add the selected
        rows. A product with zeros and ones selects them. Its gradient is a product, too, so it is
        fast and deterministic on a GPU.
        """
        first, *rest = self
        batch, n, dim = tokens.shape
        if n <= index.shape[1]:
            # [h, 2d] -> [2h, d]
            weight = first.weight.unflatten(1, (2, dim)).transpose(0, 1).flatten(0, 1)
            bias = torch.cat((first.bias, torch.zeros_like(first.bias)))
            # [B, n, 2h] -> [B, 2n, h]
            halves = F.linear(tokens, weight, bias).view(batch, 2 * n, -1)
            place = torch.arange(2 * n, device=index.device)
            chosen = (place == 2 * index[..., :1]) | (place == 2 * index[..., 1:] + 1)  # [B, m, 2n]
            x = chosen.to(halves.dtype) @ halves  # [B, m, h]
        else:
            # of all images' tokens
            rows = index + n * torch.arange(batch, device=index.device)[:, None, None]
            pairs = tokens.reshape(-1, dim).index_select(0, rows.flatten())  # [B*m*2, d]
            x = first(pairs.view(batch, -1, 2 * dim))  # [B, m, 2d] -> [B, m, h]
        for layer in rest:
            x = layer(x)
        return x
