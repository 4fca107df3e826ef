"""Stage 2 for masks: from images with a class for each pixel, and a backbone or none, to a segmentation."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from idmm import distributed
from idmm.config import SegmentConfig, parsing
from idmm.data.dense import letterboxed, read_segmentation
from idmm.data.dense.masks import ADE_FOLDERS
from idmm.data.readers.folder import PARTS
from idmm.evaluate import evaluating
from idmm.evaluate_dense import class_scores, classes_on_file, segmentation_scores, segmented
from idmm.files import replacing, write_csv
from idmm.methods.dense import Segmentation
from idmm.models.dense import Segmenter
from idmm.stages.dense import DenseAssembly, Judge, plain_picture, train

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

    def read(self, data, progress):
        return read_segmentation(data, progress)

    def network(self, phase, backbone):
        width = self.config.model.pyramid_width
        made = Segmenter(backbone, phase.size, len(self.classes), width, self.spec.in_chans)
        if distributed.several_gpus():  # a process sees few images of a batch
            made.decoder = nn.SyncBatchNorm.convert_sync_batchnorm(made.decoder)
        return made

    def learner(self, network):
        return Segmentation(network)

    def judge(self, run, splits, part):
        return _Judge(run, self, splits, part)


class _Judge(Judge):
    """Sums up which pixels are named what."""

    def scores(self, network, final=False):
        classes = len(self.parts.classes)
        found = torch.zeros(classes, classes, dtype=torch.int64)
        folder = self.run.folder.path / MASKS
        for number, predicted in self._predictions(network, final):
            truth = torch.from_numpy(self.targets[number].mask())  # uint8 [H, W]
            known = truth < classes
            pairs = truth[known].long() * classes + predicted[known]
            found += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
            if final:
                write_mask(folder / self._mask_name(number), predicted, self.first)
        self.confusion = sum(torch.from_numpy(each) for each in distributed.gather(found.numpy()))
        return segmentation_scores(self.confusion)

    def _mask_name(self, number: int) -> Path:
        """Returns the path of an image below its part's folder, as a PNG."""
        parts = Path(self.store.names[number]).parts
        below = parts[parts.index("images") + 1 :]
        in_part = len(below) > 1 and below[0] in (*PARTS, *ADE_FOLDERS.values())
        return Path(*below[in_part:]).with_suffix(".png")

    @property
    def first(self) -> int:
        """Value of class 0 in the dataset's masks."""
        return self.targets[0].first

    @torch.no_grad()
    def _predictions(self, network: nn.Module, final: bool) -> Iterator[tuple[int, Tensor]]:
        """Yields the number of each of this process's images, and the class of each pixel of its file, int64 [H, W]."""
        (phase,), label = self.parts.phases, "masks of the test images" if final else ""
        with evaluating(network):
            for batch in self.parts.eval_batches(self.run, self.store, self.targets, phase.size, label=label):
                logits = self._logits(network, batch["images"].to(self.run.device), final)  # [B, K, S, S]
                for number, each in zip(batch["index"].tolist(), logits, strict=True):
                    yield number, classes_on_file(each, self.targets[number].size, phase.size)

    def _logits(self, network: nn.Module, images: Tensor, final: bool) -> Tensor:
        config = self.parts.config
        scales, flip = (config.eval_scales, config.eval_flip) if final else ([1.0], False)
        with self.run.autocast():
            return segmented(network, images, scales, flip)

    def write(self, folder):
        rows = [COLUMNS]
        iou, accuracy = class_scores(self.confusion)  # NaN where there is no pixel
        pixels = self.confusion.sum(1).tolist()
        for name, *values in zip(self.parts.classes, pixels, iou.tolist(), accuracy.tolist(), strict=True):
            rows.append([name, values[0], *("" if np.isnan(value) else round(value, 2) for value in values[1:])])
        write_csv(folder / "per_class.csv", rows)

    def draw(self, network, numbers):
        from idmm.stages.dense_pictures import Scene, scenes_figure

        scenes, (phase,) = [], self.parts.phases
        with evaluating(network):
            for batch in self.parts.eval_batches(self.run, self.store, self.targets, phase.size, images=numbers):
                predicted = self._logits(network, batch["images"].to(self.run.device), False).argmax(1).cpu()
                for row, number in enumerate(batch["index"].tolist()):
                    h, w = letterboxed(self.targets[number].size, phase.size)
                    picture = plain_picture(batch["images"][row], self.parts.spec)[:h, :w]
                    pair = batch["mask"][row, :h, :w].numpy(), predicted[row, :h, :w].numpy()
                    scenes.append(Scene(self.store.names[number], picture, *pair))
        return scenes_figure(scenes, self.parts.classes, f"{self.run.folder.path.name}: masks of test images")


def write_mask(path: Path, predicted: Tensor, first: int) -> None:
    """Writes a mask as the dataset has them, a grey PNG of class numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        Image.fromarray((predicted + first).numpy().astype(np.uint8)).save(file, format="PNG")
