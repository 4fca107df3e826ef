"""Stage 2 for boxes: from images with boxes, masks too where there are any, and a backbone or none, to a detector."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from idmm.config import DetectConfig, parsing
from idmm.data.dense import BoxTarget, DenseSplits, letterboxed, read_detection
from idmm.errors import UserError, listed
from idmm.evaluate import evaluating
from idmm.evaluate_dense import Objects, detect_objects, detection_scores, on_file
from idmm.files import write_csv, write_text
from idmm.methods.dense import Detection
from idmm.models.dense import Detector
from idmm.stages.dense import DenseAssembly, Judge, plain_picture, train

SURE = 0.5  # score from which on a box is always drawn
log = logging.getLogger("idmm")


def detect(config: DetectConfig | dict | str) -> dict:
    """Trains a detector and writes it, its average precision and its boxes on the test images to ``config.out``.

    torchvision's Faster R-CNN on a feature pyramid of the backbone, or Mask R-CNN, see ``model.masks``. Images are put
    on a square of ``train.size``; boxes and masks are compared at the size of their files.

    Args:
        config: A DetectConfig, a mapping of its keys ('idmm detect --help'), or the name of a YAML file or recipe.

    Returns:
        What ``result.json`` holds; ``ap`` (COCO's: the mean over classes and intersections over union of 0.50 to 0.95),
        ``ap50`` and ``ap75``, of masks ``mask_ap``, ``mask_ap50`` and ``mask_ap75``, in percent, on the test split, of
        the last epoch or, with ``train.keep`` best, of ``kept_epoch``; ``num_classes``, ``train_size``, ``test_size``,
        ``epochs``, ``minutes`` where they are given, ``seed``, ``seconds`` over all resumes, ``precision``.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not go on (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    return train(parsing.build(DetectConfig, config))


class Detecting(DenseAssembly):
    """The parts of a run."""

    learns = "boxes"
    metric = "ap"
    masks = False  # whether masks are predicted, once the images are read

    def read(self, data, progress):
        found = read_detection(data, progress)
        self.masks = found.outlined if self.config.model.masks is None else self.config.model.masks
        if self.masks and not found.outlined:
            line = "model.masks: true, but no box of the training images has an outline; wanted null or false"
            raise UserError(line)
        if progress:
            self._say_boxes(found)
        if not self.masks:  # outlines are not drawn for nothing
            plain = {part: [replace(t, segments=None) for t in targets] for part, targets in found.targets.items()}
            found = replace(found, targets=plain)
        return found

    def _say_boxes(self, found: DenseSplits) -> None:
        """Logs how many boxes of each class there are to learn from, and whether masks."""
        labels = np.concatenate([target.labels[~target.crowd] for target in found.targets["train"]])
        each = zip(found.classes, np.bincount(labels, minlength=len(found.classes)).tolist(), strict=True)
        what = "boxes and masks" if self.masks else "boxes"
        log.info("%s: %d to train on (%s)", what, len(labels), listed((f"{name} {n}" for name, n in each), 12))

    @property
    def about(self):
        return {"masks": self.masks}

    def network(self, phase, backbone):
        width = self.config.model.pyramid_width
        return Detector(backbone, phase.size, len(self.classes), width, self.masks, self.spec.in_chans)

    def learner(self, network):
        return Detection(network)

    def judge(self, run, splits, part):
        return _Judge(run, self, splits, part)


class _Judge(Judge):
    """Finds the objects of all images, then compares them with those that are there."""

    def scores(self, network, final=False):
        run, (phase,) = self.run, self.parts.phases
        label = "boxes of the test images" if final else ""
        # what is there is compared at the files' size: nothing of it is drawn on canvases
        batches = self.parts.eval_batches(run, self.store, self.bare, phase.size, label=label)
        self.found = detect_objects(network, batches, self.targets, run.device, run.autocast)
        objects = list(self.found.values())
        self.latest, self.by_class = detection_scores(objects, self.targets, self.parts.classes)
        return self.latest

    @property
    def bare(self) -> Sequence[BoxTarget]:
        """The targets without outlines."""
        return [replace(target, segments=None) for target in self.targets]

    def write(self, folder):
        boxes = np.bincount(np.concatenate([t.labels for t in self.targets]), minlength=len(self.parts.classes))
        rows = [("class", "boxes", *self.by_class)]
        for label, name in enumerate(self.parts.classes):
            values = [each[label] for each in self.by_class.values()]
            rows.append([name, boxes[label], *("" if np.isnan(value) else round(value, 2) for value in values)])
        write_csv(folder / "per_class.csv", rows)
        results = []
        for number, objects in self.found.items():
            results += objects.results(self.targets[number].image_id, self.parts.categories)
        write_text(folder / "predictions.json", json.dumps(results) + "\n")

    @property
    def sure(self) -> float:
        """Score from which on boxes are drawn: that of as many as there are true ones, where few reach 0.5."""
        scores = np.sort(np.concatenate([objects.scores for objects in self.found.values()]))[::-1]
        true = sum(len(target.boxes) for target in self.targets)
        return SURE if not len(scores) else min(SURE, float(scores[min(true, len(scores)) - 1]))

    @torch.no_grad()
    def draw(self, network, numbers):
        from idmm.stages.dense_pictures import Drawn, Scene, scenes_figure

        scenes, (phase,), run, sure = [], self.parts.phases, self.run, self.sure
        with evaluating(network):
            for batch in self.parts.eval_batches(run, self.store, self.targets, phase.size, images=numbers):
                with run.autocast():
                    outputs = network(batch["images"].to(run.device))
                for row, (number, output) in enumerate(zip(batch["index"].tolist(), outputs, strict=True)):
                    h, w = letterboxed(self.targets[number].size, phase.size)
                    picture = plain_picture(batch["images"][row], self.parts.spec)[:h, :w]
                    there = batch["labels"][row] >= 0
                    masks = batch["masks"][row, there, :h, :w].bool().numpy() if "masks" in batch else None
                    truth = Drawn(batch["boxes"][row, there].numpy(), batch["labels"][row, there].numpy(), None, masks)
                    found = _drawn(on_file(output, (h, w), phase.size), sure)
                    scenes.append(Scene(self.store.names[number], picture, truth, found))
        title = f"{run.folder.path.name}: boxes on test images, of a score of {sure:.2g} or more"
        return scenes_figure(scenes, self.parts.classes, title)


def _drawn(found: Objects, least: float):
    """What is drawn of an image's predictions: those of a score of ``least`` or more."""
    from pycocotools import mask as coco

    from idmm.stages.dense_pictures import Drawn

    sure = found.scores >= least
    masks = None
    if found.segments is not None:
        kept = [segment for segment, keep in zip(found.segments, sure, strict=True) if keep]
        masks = np.array([coco.decode(segment).astype(bool) for segment in kept])
    return Drawn(found.boxes[sure], found.labels[sure], found.scores[sure], masks)
