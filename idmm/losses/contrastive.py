"""Contrastive losses that no library has."""

import torch
import torch.nn.functional as F
from torch import Tensor


def info_nce(query: Tensor, key: Tensor, temperature: float) -> Tensor:
    """Contrastive loss of MoCo v3 (Chen, Xie, He, ICCV 2021, Eq. 1 and Algorithm 1).

    -log(exp(q_i k_i / T) / sum_j exp(q_i k_j / T)) of normalised vectors, the mean over i times 2 T.

    Args:
        query: [B, d].
        key: [B, d]; of row i the positive, of the others negatives.
        temperature: T.

    Returns:
        A scalar tensor; 0 for a single row.
    """
    logits = F.normalize(query, dim=1) @ F.normalize(key, dim=1).T / temperature  # [B, B]
    return 2 * temperature * F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
