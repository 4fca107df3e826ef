"""Segmentation: from images with a class for each pixel to a semantic segmentation."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from idmm import distributed
from idmm.config import SegmentConfig, parsing
from idmm.dense.evaluate import class_scores, classes_on_file, segmentation_scores, segmented
from idmm.dense.network import Segmenter
from idmm.dense.stage import DenseEvaluator, train
from idmm.dense.targets import IGNORED
from idmm.evaluation.evaluate import evaluating
from idmm.files import replacing, write_csv
from idmm.methods.base import Method
from idmm.methods.common import at_least_fp32
from idmm.models.build import one_image_norms
from idmm.stages.resolve import resolve
from idmm.training.stage import RunSetup


def segment(config: SegmentConfig | RunSetup | dict | str) -> dict:
    """Train a semantic segmentation and write it, its mIoU and its masks of the test images to ``config.out``.

    The network is UPerNet on the backbone's maps. Images lie on a square of ``train.size``. Masks are compared at the
    size of the files.

    Args:
        config: A SegmentConfig, a mapping of its keys ('idmm segment --help'), or the name of a YAML file or recipe.

    Returns:
        The content of ``result.json``. It has ``miou`` (the mean of the classes' intersection over union), ``macc``
        (the mean share of their pixels that are right) and ``pixel_accuracy``, in percent on the test split, of the
        last epoch or, with ``train.keep`` best, of ``kept_epoch``. Further keys are those of :func:`idmm.detect`.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training cannot continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM, after the state was saved.
    """
    setup = config if isinstance(config, RunSetup) else resolve(parsing.build(SegmentConfig, config))
    return train(setup, Segmentation, PixelEvaluator, metric="miou")


class Segmentation(Method):
    """Cross-entropy of each pixel's class.

    The mean is over an image's pixels with a class, then over images. So the loss does not depend on how a batch is
    split. An image without such pixels adds 0.

    Attributes:
        backbone: The whole :class:`Segmenter`, as for :class:`Detection`.
    """

    backbone: Segmenter

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Return the loss of ``batch["images"]`` [B, C, S, S] with classes ``batch["mask"]`` int64 [B, S, S]."""
        with one_image_norms(self.backbone, batch["images"]):
            logits = self.backbone(batch["images"])  # [B, K, S, S]
        return {"loss": pixel_cross_entropy(logits, batch["mask"])}


def pixel_cross_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of :class:`Segmentation`, a scalar.

    Args:
        logits: [B, K, S, S].
        mask: Class of each pixel, int64 [B, S, S]. 255: none.
    """
    losses = F.cross_entropy(at_least_fp32(logits), mask, ignore_index=IGNORED, reduction="none")  # [B, S, S]
    return (losses.sum((1, 2)) / (mask != IGNORED).sum((1, 2)).clamp(min=1)).mean()


class PixelEvaluator(DenseEvaluator):
    """Counts pixels by true and predicted class."""

    @torch.no_grad()
    def scores(self, network, final=False):
        (phase,), classes = self.setup.phases, len(self.classes)
        scales = self.setup.config.eval_scales if final else [1.0]
        confusion = np.zeros((classes, classes), dtype=np.int64)
        with evaluating(network):
            for batch in self.batches(final):
                with self.run.autocast():
                    outputs = segmented(network, batch["images"].to(self.run.device), scales)  # [B, K, S, S]
                for number, output in zip(batch["index"].tolist(), outputs, strict=True):
                    target = self.targets[number]
                    predicted = classes_on_file(output, target.size, phase.size).numpy()  # [H, W]
                    truth = target.mask().astype(np.int64)
                    pairs = (truth * classes + predicted)[truth < classes]
                    confusion += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
                    if final:  # a grey PNG with the dataset's own numbers of classes
                        name = Path(*Path(self.store.names[number]).parts[2:]).with_suffix(".png")  # in images/PART
                        path = self.run.folder.path / "masks" / name
                        path.parent.mkdir(parents=True, exist_ok=True)
                        with replacing(path) as file:
                            Image.fromarray((predicted + target.first).astype(np.uint8)).save(file, format="PNG")
        self.confusion = sum(distributed.gather(confusion))
        return segmentation_scores(self.confusion)

    def write(self, folder):
        rows = [("class", "pixels", "iou", "accuracy")]
        iou, accuracy = class_scores(self.confusion)  # NaN if there is no pixel
        pixels = self.confusion.sum(1).tolist()
        for name, count, *values in zip(self.classes, pixels, iou.tolist(), accuracy.tolist(), strict=True):
            rows.append([name, count, *("" if np.isnan(value) else round(value, 2) for value in values)])
        write_csv(folder / "per_class.csv", rows)
