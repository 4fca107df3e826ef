"""Stage 2: supervised training of a classifier, with Mixup and CutMix through the same sparse mixing as stage 1."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idmm.config import Augment
from idmm.methods.base import Method
from idmm.methods.drloc import Localization
from idmm.mixing import Mix, draw_cutmix, draw_mixup, mix_images
from idmm.seeding import numpy_rng


class Finetune(Method):
    """Cross-entropy on mixed images; Mixup on even epochs and CutMix on odd ones, as released.

    Args:
        backbone: A timm model with a classifier: images [B, C, S, S] -> logits [B, K].
        config: Mixing and label smoothing.
        freeze: Train the classifier alone; the rest stays in evaluation mode (no dropout, fixed batch statistics).
        localization: An extra loss on the grid of embeddings, or None.
    """

    def __init__(
        self, backbone: nn.Module, config: Augment, freeze: bool = False, localization: Localization | None = None
    ):
        super().__init__(backbone)
        self.config, self.freeze, self.localization = config, freeze, localization
        if freeze:
            classifier = backbone.get_classifier()
            parts = classifier if isinstance(classifier, tuple) else (classifier,)  # distilled DeiT has two
            backbone.requires_grad_(False)
            for part in parts:
                part.requires_grad_(True)

    def train(self, mode: bool = True) -> "Finetune":
        """Sets training mode, on a frozen backbone never."""
        super().train(mode)
        if self.freeze:
            self.backbone.eval()
        return self

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Computes the loss of ``batch["images"]`` [B, C, S, S] with classes ``batch["label"]`` [B]."""
        images, label = batch["images"], batch["label"]
        mix = self._draw(images, epoch, numpy_rng(key, "mixing"))
        images = images if mix is None else mix_images(images, mix)
        logits, extra, logs = self._outputs(images, key, epoch)  # [B, K]
        loss = F.cross_entropy(logits, label, label_smoothing=self.config.label_smoothing)
        if mix is not None:
            other = label[mix.partner.to(label.device)]
            mixed = F.cross_entropy(logits, other, label_smoothing=self.config.label_smoothing)
            loss = mix.lam * loss + (1 - mix.lam) * mixed
        return {"loss": loss + extra, **logs}

    def _outputs(self, images: Tensor, key: int, epoch: int) -> tuple[Tensor, Tensor | float, dict[str, Tensor]]:
        """Returns logits, the extra loss and its log, of one forward pass."""
        if self.localization is not None:
            logits, extra, logs = self.localization(self.backbone, images, key, epoch)
            return logits.float(), extra, logs
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze):
            features = self.backbone.forward_features(images)
        return self.backbone.forward_head(features).float(), 0.0, {}

    def _draw(self, images: Tensor, epoch: int, rng: np.random.Generator) -> Mix | None:
        mixup, cutmix = self.config.mixup_alpha, self.config.cutmix_alpha
        if mixup and (epoch % 2 == 0 or not cutmix):
            return draw_mixup(len(images), mixup, rng)
        if cutmix:
            return draw_cutmix(len(images), *images.shape[-2:], cutmix, rng)
        return None
