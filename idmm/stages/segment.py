"""Stage 2 for masks: from images with a class for each pixel, and a backbone or none, to a segmentation."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from idmm import distributed
from idmm.config import SegmentConfig, parsing
from idmm.data.dense import read_segmentation
from idmm.evaluate import evaluating
from idmm.evaluate_dense import class_scores, classes_on_file, segmentation_scores, segmented
from idmm.files import replacing, write_csv
from idmm.methods.dense import Segmentation
from idmm.models.dense import Segmenter
from idmm.stages.dense import DenseAssembly, Judge, train

COLUMNS = ("class", "pixels", "iou", "accuracy")
MASKS = "masks"  # folder of the test images' predicted masks


def segment(config: SegmentConfig | dict | str) -> dict:
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
    return train(parsing.build(SegmentConfig, config))


class Segmenting(DenseAssembly):
    """The parts of a run."""

    learns = "masks"
    metric = "miou"
    learner = Segmentation

    def read(self, data, progress):
        return read_segmentation(data, progress)

    def network(self, phase, backbone):
        width = self.config.model.pyramid_width
        made = Segmenter(backbone, phase.size, len(self.classes), width, self.spec.in_chans)
        if distributed.several_gpus():  # a process sees few images of a batch
            made.decoder = nn.SyncBatchNorm.convert_sync_batchnorm(made.decoder)
        return made

    def judge(self, run, splits, part):
        return _Judge(run, self, splits, part)


class _Judge(Judge):
    """Sums up which pixels are named what."""

    def scores(self, network, final=False):
        classes = len(self.parts.classes)
        found = torch.zeros(classes, classes, dtype=torch.int64)
        for number, predicted in self._predictions(network, final):
            truth = torch.from_numpy(self.targets[number].mask())  # uint8 [H, W]
            known = truth < classes
            pairs = truth[known].long() * classes + predicted[known]
            found += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
            if final:
                path = self._file(number)
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as file:  # as the dataset has them, a grey PNG of class numbers
                    values = (predicted + self.targets[number].first).numpy().astype(np.uint8)
                    Image.fromarray(values).save(file, format="PNG")
        self.confusion = sum(torch.from_numpy(each) for each in distributed.gather(found.numpy()))
        return segmentation_scores(self.confusion)

    def _file(self, number: int) -> Path:
        """Returns the file of an image's predicted mask, named as the image below images/PART."""
        name = Path(*Path(self.store.names[number]).parts[2:]).with_suffix(".png")
        return self.run.folder.path / MASKS / name

    @torch.no_grad()
    def _predictions(self, network: nn.Module, final: bool) -> Iterator[tuple[int, Tensor]]:
        """Yields the number of each of this process's images, and the class of each pixel of its file, int64 [H, W]."""
        (phase,), label = self.parts.phases, "masks of the test images" if final else ""
        scales = self.parts.config.eval_scales if final else [1.0]
        with evaluating(network):
            for batch in self.parts.eval_batches(self.run, self.store, self.targets, label):
                with self.run.autocast():
                    shares = segmented(network, batch["images"].to(self.run.device), scales)  # [B, K, S, S]
                for number, each in zip(batch["index"].tolist(), shares, strict=True):
                    yield number, classes_on_file(each, self.targets[number].size, phase.size)

    def write(self, folder):
        rows = [COLUMNS]
        iou, accuracy = class_scores(self.confusion)  # NaN where there is no pixel
        pixels = self.confusion.sum(1).tolist()
        for name, *values in zip(self.parts.classes, pixels, iou.tolist(), accuracy.tolist(), strict=True):
            rows.append([name, values[0], *("" if np.isnan(value) else round(value, 2) for value in values[1:])])
        write_csv(folder / "per_class.csv", rows)

    def pair(self, number):
        target = self.targets[number]
        with Image.open(self._file(number)) as image:
            return target.mask(), np.asarray(image) - np.uint8(target.first)
