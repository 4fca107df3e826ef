"""Supervised training of a classifier, with the sparse Mixup and CutMix of pretraining."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idmm.batch import Batch
from idmm.config import Augment
from idmm.methods.base import Method, Values
from idmm.methods.common import mixed_cross_entropy
from idmm.methods.mixing import Mix, draw_cutmix, draw_mixup, mixed_crops
from idmm.models import Backbone
from idmm.models.build import classifiers
from idmm.seeding import numpy_rng


class Finetune(Method):
    """Cross-entropy on mixed images. By default even epochs have Mixup and odd ones CutMix.

    So it was released.

    Args:
        backbone: A timm model with a classifier: images [B, C, S, S] -> logits [B, K].
        config: Mixing and label smoothing.
        freeze: Train only the classifier. The rest stays in evaluation mode (no dropout, fixed
            batch statistics).

    Attributes:
        class_weight: Of each class in the loss, float32 [K], see :func:`balanced_weights`; None:
            all are 1.
    """

    class_weight: Tensor | None

    def __init__(self, backbone: Backbone, config: Augment, freeze: bool = False):
        super().__init__(backbone)
        self.config = config
        # set once the images are known
        self.register_buffer("class_weight", None, persistent=False)
        self.freeze = freeze
        if freeze:
            backbone.requires_grad_(False)
            for part in classifiers(backbone):
                part.requires_grad_(True)

    def train(self, mode: bool = True) -> "Finetune":
        """Set training mode, but not of a frozen backbone and its classifier."""
        super().train(mode)
        if self.freeze:
            self.backbone.eval()
        return self

    def forward(self, batch: Batch, key: int, epoch: int) -> Values:
        """Compute the loss of ``images`` [B, C, S, S] with classes ``label`` [B]."""
        mix = self._draw(batch["images"], epoch, numpy_rng(key, "mixing"))
        mixed = mixed_crops(batch["images"], batch["label"], mix)
        logits, extra, logs = self.features(mixed.views, key)  # [B, K]
        smoothing = self.config.label_smoothing
        loss = mixed_cross_entropy(logits.float(), mixed, smoothing, self.class_weight)
        return {"loss": loss + extra, **logs}

    def _draw(self, images: Tensor, epoch: int, rng: np.random.Generator) -> Mix | None:
        mixup = self.config.mixup_alpha
        cutmix = self.config.cutmix_alpha
        number = int(rng.integers(2)) if self.config.mixing == "batches" else epoch
        if mixup and (number % 2 == 0 or not cutmix):
            return draw_mixup(len(images), mixup, rng)
        if cutmix:
            count, _, height, width = images.shape
            return draw_cutmix(count, height, width, cutmix, rng)
        return None


def balanced_weights(labels: NDArray[np.int64], classes: int) -> Tensor:
    """Return a weight for each of K classes by the training images' labels [n], float32 [K].

    w_c = n / (K n_c), n_c images of class c (King and Zeng, Political Analysis 9, 2001;
    scikit-learn's 'balanced'). K counts the classes that have an image, so that the mean weight of
    an image is 1; of the others w_c is 0.
    """
    count = np.bincount(labels, minlength=classes)
    present = count > 0
    weights = np.zeros(classes)
    weights[present] = len(labels) / (present.sum() * count[present])
    return torch.from_numpy(weights).float()
