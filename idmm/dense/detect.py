"""Stage 2 for boxes: from images with boxes, masks too where there are any, and a backbone or none, to a detector."""

import json
from dataclasses import replace

import numpy as np

from idmm.config import DetectConfig, parsing
from idmm.dense.evaluate import Objects, detect_objects, detection_scores
from idmm.dense.method import Detection
from idmm.dense.stage import Judge, train
from idmm.files import write_csv, write_text
from idmm.stages.resolve import RunSetup, resolve


def detect(config: DetectConfig | RunSetup | dict | str) -> dict:
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
    setup = config if isinstance(config, RunSetup) else resolve(parsing.build(DetectConfig, config))
    return train(setup, Detection, _Judge, metric="ap")


class _Judge(Judge):
    """Finds the objects of all images, then compares them with those that are there."""

    def scores(self, network, final=False):
        # what is there is compared at the files' size: no outline is drawn on canvases
        bare = [replace(target, segments=None) for target in self.targets]
        batches = self.batches(bare, final)
        self.found = detect_objects(network, batches, self.targets, self.run.device, self.run.autocast)
        objects = list(self.found.values())
        self.latest, self.by_class = detection_scores(objects, self.targets, self.dense.classes)
        return self.latest

    def write(self, folder):
        boxes = np.bincount(np.concatenate([t.labels for t in self.targets]), minlength=len(self.dense.classes))
        rows = [("class", "boxes", *self.by_class)]
        for label, name in enumerate(self.dense.classes):
            values = [each[label] for each in self.by_class.values()]
            rows.append([name, boxes[label], *("" if np.isnan(value) else round(value, 2) for value in values)])
        write_csv(folder / "per_class.csv", rows)
        results = []
        for number, objects in self.found.items():
            results += objects.results(self.targets[number].image_id, self.dense.categories)
        write_text(folder / "predictions.json", json.dumps(results) + "\n")

    def pair(self, number):
        target, found = self.targets[number], self.found[number]
        surest = found.boxes, found.labels, found.scores, found.segments  # of these as many as there are true ones
        return target, Objects(*(part if part is None else part[: len(target.boxes)] for part in surest))
