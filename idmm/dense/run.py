"""Detection and segmentation: from images with boxes or masks to a network and its scores."""

import functools
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from idmm import distributed
from idmm.batch import Batch
from idmm.config import DetectConfig, SegmentConfig
from idmm.config.phases import Phase
from idmm.data.image_store import ImageStore
from idmm.data.loaders import own_batches
from idmm.data.store import Stores
from idmm.dense.evaluate import (
    Scores,
    classes_on_file,
    detection_scores,
    on_file,
    segmentation_scores,
    segmented,
)
from idmm.dense.network import Detector, Segmenter, build_network
from idmm.dense.read import read_images, split_classes
from idmm.dense.targets import DenseListing, outlined
from idmm.dense.transforms import DenseTransform
from idmm.errors import RunError, UserError
from idmm.evaluation.evaluate import evaluating
from idmm.evaluation.evaluators import Evaluator
from idmm.files import replacing, write_csv, write_text
from idmm.methods.base import Method
from idmm.models.base import Backbone, Tensors
from idmm.models.build import one_image_norms
from idmm.progress import counting, log
from idmm.runs.images import check_images
from idmm.runs.networks import build_backbone, try_sizes
from idmm.runs.outputs import common_result, export, load_best
from idmm.runs.plan import plan_phase
from idmm.seeding import derive, seeded
from idmm.training.device import enough_memory
from idmm.training.log import SCORES
from idmm.training.loop import Loop
from idmm.training.run import Run

DenseRun = Run[DetectConfig | SegmentConfig]


def train_detector(run: Run[DetectConfig]) -> dict[str, Any]:
    """Train and evaluate a network for boxes. Return the content of ``result.json``."""
    return _train(run, BoxEvaluator, "ap")


def train_segmenter(run: Run[SegmentConfig]) -> dict[str, Any]:
    """Train and evaluate a network for masks. Return the content of ``result.json``."""
    return _train(run, PixelEvaluator, "miou")


def _train(run: DenseRun, evaluate: type["DenseEvaluator"], metric: str) -> dict[str, Any]:
    config = run.config

    def list_images() -> DenseListing:
        listing = read_images(config.COMMAND, config.data)
        check_images(config.needs, listing)
        return listing

    try_sizes(run, functools.partial(build_dense, run, classes=1, masks=False))
    with run.opened():
        if run.folder.finished:
            return run.finished_result(list_images)
        listing = list_images()
        check_best(run, listing)
        stores = run.store(listing, run.folder)
        has_outlines = outlined(stores.train.targets or [])
        method = build_method(run, len(stores.train.class_names), has_outlines)
        evaluator = evaluate(run, stores.val or stores.tested, listing.categories)
        loop = build_loop(run, stores, method, evaluator, metric)
        loop.start()
        loop.fit()
        best = load_best(loop, metric)
        if stores.val is not None:
            evaluator = evaluate(run, stores.tested, listing.categories)
        scores = final_scores(run, loop, evaluator)
        entries = {
            "task": config.COMMAND,
            "classes": stores.train.class_names,
            "categories": listing.categories,
            "layers": config.layers(len(stores.train.class_names), has_outlines),
            "side": config.train.size,
            "short_side": config.tested_short_side,
        }
        network: Any = loop.exported  # with its backbone
        backbone = network.backbone.state_dict()
        export(run, stores, loop, backbone, entries, config.COMMAND)
        result = {
            **scores,
            **best,
            "epochs": loop.position.epoch,
            "num_classes": len(stores.train.class_names),
            "test_size": len(stores.tested),
            **common_result(run, stores),
        }
        run.folder.write_result(result)
        return result


def check_best(run: DenseRun, listing: DenseListing) -> None:
    """Raise UserError if the best epoch is to be chosen on images without an object."""
    val = listing.val
    if run.config.train.keep == "best" and val is not None and not split_classes(val):
        raise UserError.of(
            "train.keep",
            "best chooses by val, which has no object",
            "Add some, or use --train.keep last",
        )


def build_dense(
    run: DenseRun, phase: Phase, backbone: Backbone, classes: int, masks: bool
) -> Detector | Segmenter:
    """Build the network of a phase on its backbone."""
    layers = run.config.layers(classes, masks)
    return build_network(backbone, phase.size, run.spec.in_chans, **layers)


def build_method(run: DenseRun, classes: int, masks: bool) -> "DenseMethod":
    """Build the network and its loss. A new run loads the weights of ``init``."""
    (phase,) = run.phases
    backbone = build_backbone(run, phase)
    if run.is_new:
        report = run.spec.load(backbone)
        if report is not None:
            log.info(str(report))
    with seeded(derive(run.config.seed, "method")):
        network = build_dense(run, phase, backbone, classes, masks)
        return DenseMethod(network)  # type: ignore[arg-type]  # as above


def build_loop(
    run: DenseRun, stores: Stores, method: "DenseMethod", evaluator: "DenseEvaluator", metric: str
) -> Loop:
    """Build the training loop."""
    config = run.config
    (phase,) = run.phases
    key = derive(config.seed, "stage", phase.number)
    transform = DenseTransform(
        stores.train, config.train.size, run.mean, run.std, config.augment, key
    )
    keep = metric if config.train.keep == "best" else None
    passes = sum(scale**2 for scale in config.tested_scales)
    final_images = round(len(stores.tested) * passes)
    count = len(stores.train)
    plan = plan_phase(run, phase, count, transform, [evaluator], keep, final_images)
    return Loop(run, method, plan)


def final_scores(run: DenseRun, loop: Loop, evaluator: "DenseEvaluator") -> Scores:
    """Return the scores of the test images, write their tables, and log them."""
    no_memory = RunError(
        f"out of memory with {evaluator.batch_size} images at a time. "
        "Repeat the command with more free memory to continue from here"
    )
    with enough_memory(no_memory):
        scores = evaluator.latest or evaluator.scores(loop.exported, final=True)
    if run.folder.leader:
        evaluator.write(run.folder.path)
    texts = []
    for name, value in scores.items():
        shown = "undefined" if value is None else f"{value:.2f}"
        texts.append(f"{name} {shown}")
    log.info(f"{run.folder.path}: {', '.join(texts)} on {evaluator.images} test images")
    return scores


class DenseMethod(Method):
    """The loss of a detector or a segmenter.

    Attributes:
        backbone: The whole network, which is trained, averaged and exported.
    """

    backbone: Detector | Segmenter  # type: ignore[assignment]  # timm's interface is not needed

    def forward(self, batch: Batch, key: int, epoch: int) -> Tensors:
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
    per_class: dict[str, NDArray[np.float64]]
    counts: NDArray[np.int64]

    def __init__(self, run: DenseRun, store: ImageStore, categories: Sequence[int]):
        self.run = run
        self.store = store
        self.categories = categories
        self.targets = store.targets or []
        self.classes = store.class_names
        self.images = len(store)
        self.every = run.config.train.eval_every
        (phase,) = run.phases
        self.size = run.config.train.size
        self.short = run.config.tested_short_side
        # images per forward pass, as in training
        self.batch_size = -(
            -phase.batch_size // (distributed.world() * run.config.train.accumulate)
        )
        if self.short is not None:
            self.batch_size = 1  # an image's own canvas, as in idmm predict

    def __call__(self, network: nn.Module) -> Scores:
        """Return the values for metrics.jsonl (percent, None if undefined)."""
        return {name: value for name, value in self.scores(network).items() if name in SCORES}

    def batches(self, final: bool) -> Iterator[Batch]:
        """Yield this process's letterboxed images until the run is interrupted. ``final``: log the
        progress."""
        run = self.run
        transform = DenseTransform(
            self.store, self.size, run.mean, run.std, only_images=True, short=self.short
        )
        batch_bytes = 4 * self.batch_size * (len(run.mean) + 2) * self.size**2
        batches = own_batches(
            transform,
            np.arange(len(self.store)),
            self.batch_size,
            run.config.data.workers,
            batch_bytes,
        )
        batches = run.interrupts.watch(batches)
        label = f"{self.COUNTED} of the test images"
        if final and run.folder.leader:
            return counting(batches, len(self.store), label)
        return batches

    @abstractmethod
    def scores(self, network: Any, final: bool = False) -> Scores:
        """Return all scores in percent, None if undefined. All processes must call together.

        ``final``: those of the result.
        """

    def write(self, folder: Path) -> None:
        """Write the latest scores per class."""
        rows: list[Sequence[Any]] = [("class", self.COUNTED, *self.per_class)]
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
    def scores(self, network: Any, final: bool = False) -> Scores:
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

    def write(self, folder: Path) -> None:
        super().write(folder)
        results = []
        for number, objects in self.objects.items():
            results += objects.results(self.targets[number].image_id, self.categories)
        write_text(folder / "predictions.json", json.dumps(results) + "\n")


class PixelEvaluator(DenseEvaluator):
    """Counts pixels by true and predicted class."""

    COUNTED = "pixels"

    @torch.no_grad()
    def scores(self, network: Any, final: bool = False) -> Scores:
        classes = len(self.classes)
        scales = self.run.config.tested_scales if final else [1.0]
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
