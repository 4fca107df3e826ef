"""Detection: from images with boxes, and masks if there are any, to a detector."""

import json

import numpy as np
import torch
from torch import Tensor

from idmm import distributed
from idmm.config import DetectConfig, parsing
from idmm.dense.evaluate import detection_scores, on_file
from idmm.dense.network import Detector
from idmm.dense.stage import DenseEvaluator, train
from idmm.evaluation.evaluate import evaluating
from idmm.files import write_csv, write_text
from idmm.methods.base import Method
from idmm.methods.common import at_least_fp32
from idmm.models.build import one_image_norms
from idmm.stages.resolve import resolve
from idmm.training.stage import RunSetup

_NAMES = {  # torchvision's: ours
    "loss_objectness": "rpn_objectness",
    "loss_rpn_box_reg": "rpn_box",
    "loss_classifier": "classifier",
    "loss_box_reg": "box",
    "loss_mask": "mask",
}


def detect(config: DetectConfig | RunSetup | dict | str) -> dict:
    """Train a detector and write it, its average precision and its boxes on the test images to ``config.out``.

    The network is torchvision's Faster R-CNN on a feature pyramid of the backbone, or Mask R-CNN if all training boxes
    have an outline. Images lie on a square of ``train.size``. Boxes and masks are compared at the size of the files.

    Args:
        config: A DetectConfig, a mapping of its keys ('idmm detect --help'), or the name of a YAML file or recipe.

    Returns:
        The content of ``result.json``. It has ``ap`` (COCO's: the mean over classes and intersections over union of
        0.50 to 0.95), ``ap50`` and ``ap75``, with masks also ``mask_ap``, ``mask_ap50`` and ``mask_ap75``, in percent
        on the test split, of the last epoch or, with ``train.keep`` best, of ``kept_epoch``. Further keys are
        ``num_classes``, ``train_size``, ``test_size``, ``epochs``, ``minutes`` (if set), ``seed``, ``seconds`` over
        all resumes and ``precision``.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training cannot continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM, after the state was saved.
    """
    setup = config if isinstance(config, RunSetup) else resolve(parsing.build(DetectConfig, config))
    return train(setup, Detection, BoxEvaluator, metric="ap")


class Detection(Method):
    """The sum of the losses of Faster R-CNN (Ren et al., NeurIPS 2015) or Mask R-CNN (He et al., ICCV 2017).

    Attributes:
        backbone: The whole :class:`Detector`, which is trained, averaged and exported.
    """

    backbone: Detector

    def forward(self, batch: dict, key: int, epoch: int) -> dict[str, Tensor]:
        """Return the loss of a batch, as for :meth:`Detector.losses`, and its terms."""
        with one_image_norms(self.backbone, batch["images"]):
            losses = self.backbone.losses(batch)
        terms = {_NAMES[name]: at_least_fp32(value) for name, value in losses.items()}
        return {"loss": sum(terms.values()), **terms}


class BoxEvaluator(DenseEvaluator):
    """Compares the predicted objects of all images with the true ones."""

    @torch.no_grad()
    def scores(self, network, final=False):
        objects = {}  # by the image's number
        with evaluating(network):
            for batch in self.batches(final):
                images = batch["images"].to(self.run.device, non_blocking=True)
                with self.run.autocast():
                    outputs = network(images)
                for number, output in zip(batch["index"].tolist(), outputs, strict=True):
                    objects[number] = on_file(output, self.targets[number].size, images.shape[-1])
        gathered = {number: one for part in distributed.gather(objects) for number, one in part.items()}
        self.objects = dict(sorted(gathered.items()))
        self.latest, self.per_class = detection_scores(list(self.objects.values()), self.targets, self.classes)
        return self.latest

    def write(self, folder):
        boxes = np.bincount(np.concatenate([t.labels for t in self.targets]), minlength=len(self.classes))
        rows = [("class", "boxes", *self.per_class)]
        for label, name in enumerate(self.classes):
            values = [scores[label] for scores in self.per_class.values()]
            rows.append([name, boxes[label], *("" if np.isnan(value) else round(value, 2) for value in values)])
        write_csv(folder / "per_class.csv", rows)
        results = []
        for number, objects in self.objects.items():
            results += objects.results(self.targets[number].image_id, self.categories)
        write_text(folder / "predictions.json", json.dumps(results) + "\n")
