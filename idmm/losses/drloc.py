"""Dense relative localization (Liu et al., NeurIPS 2021): offsets between embeddings of a grid."""

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
        widths = [in_dim] if isinstance(in_dim, int) else list(in_dim)
        if mode == "l1_all":
            expected = "one width for each block"
            most = len(widths)
        else:
            expected = "one width"
            most = 1
        if not 1 <= len(widths) <= most or min(widths) < 1:
            raise ValueError(f"in_dim must be {expected} in mode {mode}, got {in_dim!r}")
        self.mode = mode
        self.num_pairs = num_pairs
        self.grid_size = grid_size
        outputs = 2
        if mode in ("ce", "reg"):  # a class for each offset
            outputs *= 2 * grid_size + 1
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
        if positions is None:
            positions = self.draw(grid, generator)
        losses = []
        for head, one, pairs in zip(self.heads, _listed(grid), _listed(positions), strict=True):
            losses.append(self._loss(head, one, pairs))
        if len(losses) == 1:
            return losses[0]
        return torch.stack(losses).sum()

    def draw(
        self, grid: Tensor | Sequence[Tensor], generator: np.random.Generator | None = None
    ) -> list[Tensor]:
        """Draw pairs for each grid, uniformly and with replacement. Both ends may coincide.

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
        for one in _listed(grid):
            height, width = self._size(one)
            flat = generator.integers(height * width, size=(len(one), self.num_pairs, 2))
            places = np.stack(np.divmod(flat, width), -1)  # [B, m, 2, 2]
            pairs = torch.from_numpy(places).flatten(2)  # [B, m, 4]
            if one.is_cuda:  # copied without waiting for the device
                pairs = pairs.pin_memory()
            drawn.append(pairs)
        return drawn

    def _size(self, grid: Tensor) -> tuple[int, int]:
        """Return rows and columns after pooling."""
        rows, columns = grid.shape[2:]
        return min(rows, self.grid_size), min(columns, self.grid_size)

    def _loss(self, head: nn.Module, grid: Tensor, positions: Tensor) -> Tensor:
        size = self._size(grid)
        with torch.autocast(grid.device.type, enabled=False):
            grid = grid.to(next(head.parameters()).dtype)
            if grid.shape[2:] != size:
                grid = F.adaptive_avg_pool2d(grid, size)
        # [B, m, 4] -> [B, m, 2, 2]: p and q, row and column
        places = positions.to(grid.device, non_blocking=True).unflatten(2, (2, 2))
        index = places[..., 0] * size[1] + places[..., 1]  # [B, m, 2]
        # [B, D, h, w] -> [B, h*w, D] -> [B, m, outputs]
        out: Tensor = head(grid.flatten(2).transpose(1, 2), index)
        with torch.autocast(grid.device.type, enabled=False):
            out = out.to(torch.promote_types(out.dtype, torch.float32))
            offset = places[:, :, 0] - places[:, :, 1]
            return self._compare(out, offset, size)

    def _compare(self, out: Tensor, offset: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the mean loss of outputs [B, m, outputs] for offsets p - q, int64 [B, m, 2]."""
        k = self.grid_size
        if self.mode == "ce":
            logits = out.view(-1, 2 * k + 1)  # [B*m*2, 2K+1]
            return 2 * F.cross_entropy(logits, offset.flatten() + k)
        if self.mode == "reg":
            classes = torch.arange(-k, k + 1, device=out.device, dtype=out.dtype)  # [2K+1]
            p: Tensor = out.unflatten(2, (2, -1)).softmax(-1)  # [B, m, 2, 2K+1]
            mean = p @ classes  # [B, m, 2]
            squares = (classes - mean.unsqueeze(-1)) ** 2
            variance = (p * squares).sum(-1).clamp(min=VARIANCE_FLOOR)
            loss = (offset - mean) ** 2 / variance + ALPHA / 2 * variance.log()
            return 2 * loss.mean()
        target = offset.to(out.dtype)
        u = target[..., 0] / size[0]
        v = target[..., 1] / size[1]
        target = torch.stack((u, v), -1)
        if self.mode != "l1_signed":
            target = target.abs()
        return F.l1_loss(out, target)


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return list(tensors)


class PairHead(nn.ModuleList):
    """The localization MLP, 2d -> h -> ReLU -> h -> ReLU -> outputs, on pairs of tokens."""

    def __init__(self, in_dim: int, hidden_dim: int, outputs: int):
        first = nn.Linear(2 * in_dim, hidden_dim)
        second = nn.Linear(hidden_dim, hidden_dim)
        last = nn.Linear(hidden_dim, outputs)
        super().__init__([first, nn.ReLU(), second, nn.ReLU(), last])

    def forward(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Return [B, m, outputs] of tokens [B, n, d] and pairs of their indices [B, m, 2].

        With the weight W = [W1 W2] the first layer is W1 z_p + W2 z_q. If there are no more tokens
        than pairs, it is cheaper to project each token once by both halves and to add the selected
        rows. A product with zeros and ones selects them. Its gradient is a product, too, so it is
        fast and deterministic on a GPU.
        """
        batch, n, dim = tokens.shape
        if n <= index.shape[1]:
            weight, bias = self[0].parameters()
            # [h, 2d] -> [2h, d]
            parts = weight.unflatten(1, (2, dim)).transpose(0, 1)  # [2, h, d]
            weights = parts.flatten(0, 1)
            biases = torch.cat((bias, torch.zeros_like(bias)))
            # [B, n, 2h] -> [B, 2n, h]
            halves = F.linear(tokens, weights, biases).view(batch, 2 * n, -1)
            rows = torch.arange(2 * n, device=index.device)
            is_first = rows == 2 * index[..., :1]  # [B, m, 2n]
            is_second = rows == 2 * index[..., 1:] + 1
            chosen = is_first | is_second
            x = chosen.to(halves.dtype) @ halves  # [B, m, h]
        else:
            # of all images' tokens
            rows = index + n * torch.arange(batch, device=index.device)[:, None, None]
            pairs = tokens.reshape(-1, dim).index_select(0, rows.flatten())  # [B*m*2, d]
            x = self[0](pairs.view(batch, -1, 2 * dim))  # [B, m, 2d] -> [B, m, h]
        for layer in list(self)[1:]:
            x = layer(x)
        return x
