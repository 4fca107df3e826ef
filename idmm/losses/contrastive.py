"""Contrastive losses that no library has, or has correctly."""

import torch
import torch.nn.functional as F
from torch import Tensor


def info_nce(query: Tensor, key: Tensor, temperature: float) -> Tensor:
    """Return the contrastive loss of MoCo v3 (Chen, Xie, He, ICCV 2021, Eq. 1 and Algorithm 1).

    It is the mean over i of -log(exp(q_i k_i / T) / sum_j exp(q_i k_j / T)) of normalised vectors,
    times 2 T.

    Args:
        query: [B, d].
        key: [B, d]. Row i is the positive of query i, the others are negatives.
        temperature: T.

    Returns:
        A scalar tensor, 0 for a single row.
    """
    query = F.normalize(query, dim=1)
    key = F.normalize(key, dim=1)
    logits = query @ key.T / temperature  # [B, B]
    positive = torch.arange(len(logits), device=logits.device)
    return 2 * temperature * F.cross_entropy(logits, positive)


def sup_con(rows: Tensor, label: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrastive loss (Khosla et al., NeurIPS 2020, Eq. 2).

    The sum is outside the log. It is the mean of -1/|P(i)| sum_p log(exp(z_i z_p / T) / sum_{a !=
    i} exp(z_i z_a / T)) over the rows i with positives, where p in P(i) are the other rows of i's
    class and z are normalised rows.

    Args:
        rows: [V, d].
        label: Classes, int64 [V].
        temperature: T.

    Returns:
        A scalar tensor, 0 if no two rows share a class.
    """
    rows = F.normalize(rows, dim=1)
    logits = rows @ rows.T / temperature  # [V, V]
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    log_p = logits.masked_fill(itself, torch.finfo(logits.dtype).min).log_softmax(1)
    positive = (label[:, None] == label) & ~itself  # [V, V]
    count = positive.sum(1)  # [V]
    losses = -log_p.where(positive, 0).sum(1) / count.clamp(min=1)
    return losses.sum() / (count > 0).sum().clamp(min=1)
