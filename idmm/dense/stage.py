"""Detection and segmentation: from images with boxes or masks to a trained network, its scores and
predictions."""

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn

from idmm import distributed
from idmm.config import DetectConfig, SegmentConfig, parsing
from idmm.data.image_store import ImageStore
from idmm.data.loaders import own_batches
from idmm.dense.evaluate import (
    Scores,
    classes_on_file,
    detection_scores,
    on_file,
    segmentation_scores,
    segmented,
)
from idmm.dense.network import Detector, Segmenter, build_network
from idmm.dense.read import split_classes
from idmm.dense.targets import outlined
from idmm.dense.transforms import DenseTransform
from idmm.errors import RunError, UserError
from idmm.evaluation.evaluate import evaluating
from idmm.evaluation.evaluators import Evaluator
from idmm.files import replacing, write_csv, write_text
from idmm.methods.base import Method
from idmm.models.base import Tensors
from idmm.models.build import one_image_norms
from idmm.progress import counting, log
from idmm.runs import common
from idmm.runs.outputs import common_result, export, load_best
from idmm.runs.resolve import run_stage
from idmm.seeding import derive, seeded
from idmm.training.device import enough_memory
from idmm.training.log import SCORES
from idmm.training.loop import Loop
from idmm.training.run_context import RunContext
from idmm.training.stage import RunSetup


def detect(config: DetectConfig | dict | str) -> dict:
    """Train a detector and write it, its average precision and its boxes on the test images to
    ``config.out``.

    The network is torchvision's Faster R-CNN on a feature pyramid of the backbone, or Mask R-CNN if
    all training boxes have an outline. With ``model.cascade`` three heads refine the boxes. Images
    lie on a square of ``train.size``, or with ``augment.short_side`` on a canvas of the batch.
    Boxes and masks are compared at the size of the files.

    Args:
        config: A DetectConfig, a mapping of its keys ('idmm detect --help'), or the name of a YAML
            file or recipe.

    Returns:
        The content of ``result.json``. It has ``ap`` (COCO's: the mean over classes and
        intersections over union of 0.50 to 0.95), ``ap50`` and ``ap75``, with masks also
        ``mask_ap``, ``mask_ap50`` and ``mask_ap75``, in percent on the test split, of the last
        epoch or, with ``train.keep`` best, of ``kept_epoch``. They are None if the split has no
        object. Further keys are ``num_classes``, ``train_size``, ``test_size``, ``epochs``,
        ``minutes`` (if set), ``seed``, ``seconds`` over all resumes and ``precision``.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training cannot continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or another stop signal, after the state was saved.
    """
    return run_stage(parsing.build(DetectConfig, config))


def segment(config: SegmentConfig | dict | str) -> dict:
    """Train a semantic segmentation and write it, its mIoU and its masks of the test images to
    ``config.out``.

    The network is UPerNet on the backbone's maps. Images lie on a square of ``train.size``. Masks
    are compared at the size of the files.

    Args:
        config: A SegmentConfig, a mapping of its keys ('idmm segment --help'), or the name of a
            YAML file or recipe.

    Returns:
        The content of ``result.json``. It has ``miou`` (the mean of the classes' intersection over
        union), ``macc`` (the mean share of their pixels that are right) and ``pixel_accuracy``, in
        percent on the test split, of the last epoch or, with ``train.keep`` best, of
        ``kept_epoch``. They are None if no pixel has a class. Further keys are those of
        :func:`idmm.detect`.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training cannot continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or another stop signal, after the state was saved.
    """
    return run_stage(parsing.build(SegmentConfig, config))


def run_one(setup: RunSetup) -> dict:
    """Train and evaluate a network for boxes or masks by a resolved config."""
    config, (phase,) = setup.config, setup.phases
    is_detection = isinstance(config, DetectConfig)
    evaluator_class, metric = (BoxEvaluator, "ap") if is_detection else (PixelEvaluator, "miou")
    with common.open_run(setup) as run:
        if run.folder.finished:
            return run.folder.result()

        # ------------------------------------------------------------------ images
        listing = setup.stage.list_images()
        if config.train.keep == "best" and not split_classes(listing.val):
            raise UserError(
                "train.keep: best chooses by val, which has no object. Add some, or use --train.keep last"
            )
        setup, stores = common.store_run_images(setup, listing, run.folder)
        has_outlines = outlined(stores.train.targets)

        # ------------------------------------------------------------------ training
        backbone = common.build_backbone(setup, phase)
        if run.is_new and (report := setup.spec.load(backbone)):
            log.info("%s", report)
        with seeded(derive(config.seed, "method")):
            layers = config.layers(len(stores.train.classes), has_outlines)
            method = DenseMethod(build_network(backbone, phase.size, setup.spec.in_chans, **layers))
        evaluator = evaluator_class(run, setup, stores.val or stores.test, listing.categories)
        key = derive(config.seed, "stage", phase.number)
        transform = DenseTransform(
            stores.train, config.train.size, setup.spec.mean, setup.spec.std, config.augment, key
        )
        loop = Loop(
            run, method, common.plan_phase(setup, phase, stores, transform, [evaluator], metric)
        )
        loop.fit()

        # ------------------------------------------------------------------ results
        best = load_best(loop, metric)
        if stores.val is not None:
            evaluator = evaluator_class(run, setup, stores.test, listing.categories)
        advice = "Repeat the command with more free memory to continue from here"
        with enough_memory(
            RunError(f"out of memory with {evaluator.batch_size} images at a time. {advice}")
        ):
            scores = evaluator.latest or evaluator.scores(loop.exported, final=True)
        if run.folder.leader:
            evaluator.write(run.folder.path)
        shown = {
            name: "undefined" if value is None else f"{value:.2f}" for name, value in scores.items()
        }
        text = ", ".join(map(" ".join, shown.items()))
        log.info("%s: %s on %d test images", run.folder.path, text, len(stores.test))
        info = {
            "task": config.STAGE,
            "classes": stores.train.classes,
            "categories": listing.categories,
            "layers": layers,
            "side": config.train.size,
            "short_side": config.tested_short_side,
        }
        export(run, loop, setup, stores, loop.exported.backbone.state_dict(), info)
        result = {
            **scores,
            **best,
            "epochs": loop.position.epoch,
            "num_classes": len(stores.train.classes),
            "test_size": len(stores.test),
            **common_result(run, setup, stores),
        }
        run.folder.finish(result)
        return result


class DenseMethod(Method):
    """The loss of a detector or a segmenter.

    Attributes:
        backbone: The whole network, which is trained, averaged and exported.
    """

    backbone: Detector | Segmenter

    def forward(self, batch: dict, key: int, epoch: int) -> Tensors:
        """Return the network's ``loss`` of a batch."""
        with one_image_norms(self.backbone, batch["images"]):
            return self.backbone.loss(batch)


# ---------------------------------------------------------------------- evaluation
class DenseEvaluator(Evaluator):
    """Evaluates networks on a part of the images and keeps the latest predictions.

    Args:
        store: The images, with their boxes or masks.
        categories: Number of each class in the dataset's own files.

    Attributes:
        latest: The latest scores, if they need no other evaluation to be reported.
        per_class: The latest scores of each class in percent, [K] each, NaN if there is none.
        counts: True objects or pixels of each class, [K].
    """

    COUNTED: ClassVar[str]  # in the plural: boxes or pixels
    latest: Scores | None = None
    per_class: dict[str, np.ndarray]
    counts: np.ndarray

    def __init__(
        self, run: RunContext, setup: RunSetup, store: ImageStore, categories: Sequence[int]
    ):
        self.run = run
        self.setup = setup
        self.store = store
        self.categories = categories
        self.targets = store.targets
        self.classes = store.classes
        self.images = len(store)
        self.every = setup.config.train.eval_every
        (phase,) = setup.phases
        self.size = setup.config.train.size
        self.short = setup.config.tested_short_side
        # images per forward pass, as in training
        self.batch_size = -(
            -phase.batch_size // (distributed.world() * setup.config.train.accumulate)
        )
        if self.short is not None:
            self.batch_size = 1  # an image's own canvas, as in idmm predict

    def __call__(self, network: nn.Module) -> Scores:
        """Return the values for metrics.jsonl (percent, None if undefined)."""
        return {name: value for name, value in self.scores(network).items() if name in SCORES}

    def batches(self, final: bool) -> Iterator[dict]:
        """Yield this process's letterboxed images until the run is interrupted. ``final``: log the
        progress."""
        run = self.run
        spec = self.setup.spec
        transform = DenseTransform(
            self.store, self.size, spec.mean, spec.std, only_images=True, short=self.short
        )
        batch_bytes = 4 * self.batch_size * (len(spec.mean) + 2) * self.size**2
        batches = own_batches(
            transform, np.arange(len(self.store)), self.batch_size, run.workers, batch_bytes
        )
        batches = run.interrupts.watch(batches)
        label = f"{self.COUNTED} of the test images"
        if final and run.folder.leader:
            return counting(batches, len(self.store), label)
        return batches

    @abstractmethod
    def scores(self, network: nn.Module, final: bool = False) -> Scores:
        """Return all scores in percent, None if undefined. All processes must call together.

        ``final``: those of the result.
        """

    def write(self, folder: Path) -> None:
        """Write the latest scores per class."""
        rows = [("class", self.COUNTED, *self.per_class)]
        for name, count, *scores in zip(
            self.classes, self.counts, *self.per_class.values(), strict=True
        ):
            rows.append(
                [name, count, *("" if np.isnan(score) else round(score, 2) for score in scores)]
            )
        write_csv(folder / "per_class.csv", rows)


class BoxEvaluator(DenseEvaluator):
    """Compares the predicted objects of all images with the true ones."""

    COUNTED = "boxes"

    @torch.no_grad()
    def scores(self, network, final=False):
        objects = {}  # by the image's number
        with evaluating(network):
            for batch in self.batches(final):
                images = batch["images"].to(self.run.device, non_blocking=True)
                with self.run.autocast():
                    outputs = network(images)
                for number, output in zip(batch["index"].tolist(), outputs, strict=True):
                    objects[number] = on_file(
                        output, self.targets[number].size, self.size, self.short
                    )
        gathered = {
            number: one for part in distributed.gather(objects) for number, one in part.items()
        }
        self.objects = dict(sorted(gathered.items()))
        labels = np.concatenate([target.labels[~target.crowd] for target in self.targets])
        self.counts = np.bincount(labels, minlength=len(self.classes))
        self.latest, self.per_class = detection_scores(
            list(self.objects.values()), self.targets, self.classes
        )
        return self.latest

    def write(self, folder):
        super().write(folder)
        results = []
        for number, objects in self.objects.items():
            results += objects.results(self.targets[number].image_id, self.categories)
        write_text(folder / "predictions.json", json.dumps(results) + "\n")


class PixelEvaluator(DenseEvaluator):
    """Counts pixels by true and predicted class."""

    COUNTED = "pixels"

    @torch.no_grad()
    def scores(self, network, final=False):
        classes = len(self.classes)
        scales = self.setup.config.eval_scales if final else [1.0]
        confusion = np.zeros((classes, classes), dtype=np.int64)
        with evaluating(network):
            for batch in self.batches(final):
                with self.run.autocast():
                    # [B, K, S, S]
                    outputs = segmented(network, batch["images"].to(self.run.device), scales)
                for number, output in zip(batch["index"].tolist(), outputs, strict=True):
                    target = self.targets[number]
                    predicted = classes_on_file(output, target.size, self.size).numpy()  # [H, W]
                    truth = target.mask().astype(np.int64)
                    pairs = (truth * classes + predicted)[truth < classes]
                    confusion += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
                    if final:  # a grey PNG with the dataset's own numbers of classes
                        # in images/PART
                        name = Path(*Path(self.store.names[number]).parts[2:]).with_suffix(".png")
                        path = self.run.folder.path / "masks" / name
                        with replacing(path) as file:
                            Image.fromarray((predicted + target.first).astype(np.uint8)).save(
                                file, format="PNG"
                            )
        confusion = sum(distributed.gather(confusion))
        self.counts = confusion.sum(1)
        scores, self.per_class = segmentation_scores(confusion)
        return scores
