"""Stage 2 for masks: from images with a class for each pixel, and a backbone or none, to a segmentation."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from idmm import distributed
from idmm.config import SegmentConfig, parsing
from idmm.dense.evaluate import class_scores, classes_on_file, segmentation_scores, segmented
from idmm.dense.method import Segmentation
from idmm.dense.stage import Judge, train
from idmm.evaluation.evaluate import evaluating
from idmm.files import replacing, write_csv
from idmm.stages.resolve import RunSetup, resolve


def segment(config: SegmentConfig | RunSetup | dict | str) -> dict:
    """Trains a semantic segmentation and writes it, its mIoU and its masks of the test images to ``config.out``.

    UPerNet on the backbone's maps. Images are put on a square of ``train.size``; the masks are compared at the size of
    their files.

    Args:
        config: A SegmentConfig, a mapping of its keys ('idmm segment --help'), or the name of a YAML file or recipe.

    Returns:
        What ``result.json`` holds; ``miou`` (mean of the classes' intersection over union), ``macc`` (mean of the
        shares of their pixels that are named right) and ``pixel_accuracy``, in percent, on the test split, of the last
        epoch or, with ``train.keep`` best, of ``kept_epoch``; ``num_classes``, ``train_size``, ``test_size``,
        ``epochs``, ``minutes`` where they are given, ``seed``, ``seconds`` over all resumes, ``precision``.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not go on (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    setup = config if isinstance(config, RunSetup) else resolve(parsing.build(SegmentConfig, config))
    return train(setup, Segmentation, _Judge, metric="miou")


class _Judge(Judge):
    """Sums up which pixels are named what."""

    @torch.no_grad()
    def scores(self, network, final=False):
        (phase,), classes = self.setup.phases, len(self.dense.classes)
        scales, found = self.setup.config.eval_scales if final else [1.0], np.zeros((classes, classes), dtype=np.int64)
        with evaluating(network):
            for batch in self.batches(self.targets, final):
                with self.run.autocast():
                    shares = segmented(network, batch["images"].to(self.run.device), scales)  # [B, K, S, S]
                for number, each in zip(batch["index"].tolist(), shares, strict=True):
                    target = self.targets[number]
                    predicted = classes_on_file(each, target.size, phase.size).numpy()  # [H, W]
                    truth = target.mask().astype(np.int64)
                    pairs = (truth * classes + predicted)[truth < classes]
                    found += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
                    if final:
                        path = self._file(number)
                        path.parent.mkdir(parents=True, exist_ok=True)
                        with replacing(path) as file:  # as the dataset has them, a grey PNG of class numbers
                            Image.fromarray((predicted + target.first).astype(np.uint8)).save(file, format="PNG")
        self.confusion = sum(distributed.gather(found))
        return segmentation_scores(self.confusion)

    def _file(self, number: int) -> Path:
        """Returns the file of an image's predicted mask, named as the image below images/PART."""
        name = Path(*Path(self.store.names[number]).parts[2:]).with_suffix(".png")
        return self.run.folder.path / "masks" / name

    def write(self, folder):
        rows = [("class", "pixels", "iou", "accuracy")]
        iou, accuracy = class_scores(self.confusion)  # NaN where there is no pixel
        pixels = self.confusion.sum(1).tolist()
        for name, *values in zip(self.dense.classes, pixels, iou.tolist(), accuracy.tolist(), strict=True):
            rows.append([name, values[0], *("" if np.isnan(value) else round(value, 2) for value in values[1:])])
        write_csv(folder / "per_class.csv", rows)

    def pair(self, number):
        target = self.targets[number]
        with Image.open(self._file(number)) as image:
            return target.mask(), np.asarray(image) - np.uint8(target.first)
