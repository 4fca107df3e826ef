"""What detection and segmentation share: a network on a backbone's pyramid, trained and evaluated on letterboxed
images with their boxes or masks."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from idmm import distributed
from idmm.config import Data, DenseConfig
from idmm.data.image_store import ImageStore
from idmm.data.loaders import own_share
from idmm.data.split import counted
from idmm.data.store import image_differences, store_images
from idmm.dense import DenseSplits, DenseTransform, Target
from idmm.errors import RunError, listed
from idmm.evaluation.evaluators import Evaluator
from idmm.methods.base import Method
from idmm.progress import counting, drawing
from idmm.seeding import derive, seeded
from idmm.stages import Phase
from idmm.stages.assemble import (
    Assembly,
    LoadedSplits,
    check_val,
    log_values,
    resolve,
    say_length,
    session,
)
from idmm.stages.results import ending, export_dense, length_result, take_best
from idmm.training.engine import Loop
from idmm.training.session import Session

log = logging.getLogger("idmm")
RECORDED = ("ap", "ap50", "ap75", "mask_ap", "miou", "macc", "pixel_accuracy")  # of each evaluation
SHOWN, PICTURE = 8, 480  # test images on predictions.png, and the least long side of theirs (pixels)


class DenseAssembly(Assembly, ABC):
    """The parts of a run of detection or segmentation.

    Attributes:
        metric: Name of the value that says how good it is, in percent.
        learner: What makes the network's loss.
        judge: What evaluates networks on a part of the images, a :class:`Judge`.
        masks: Whether a mask is predicted for each box, once the images are read.
        classes: Names of the K classes, once the images are read.
        targets: Boxes or masks of the images of each part, in the order of its images, likewise.
        categories: Number of each class in the dataset's own files, likewise.
    """

    crop_pct = 1.0  # images are letterboxed, none of it is cut off
    metric: ClassVar[str]
    learner: ClassVar[type[Method]]
    judge: ClassVar[type]
    masks = False
    classes: Sequence[str] = ("",)
    targets: dict[str, Sequence[Target]]
    categories: Sequence[int]

    @abstractmethod
    def read(self, data: Data, progress: bool) -> DenseSplits:
        """Lists the images with their targets, all checked."""

    @abstractmethod
    def network(self, phase: Phase, backbone: nn.Module) -> nn.Module:
        """Puts what predicts boxes or masks on a backbone, its fresh weights from the generators."""

    def listed(self):
        return self.read(self.config.data, progress=True).splits

    def method(self, phase, backbone, images, classes=None):
        with seeded(derive(self.config.seed, "method")):
            return self.learner(self.network(phase, backbone))

    def bound(self, size):
        return math.ceil(size * max(1.0, *self.config.augment.scale))

    def transform(self, phase, store):
        key, looks = derive(self.config.seed, "stage", phase.number), (self.spec.mean, self.spec.std)
        return DenseTransform(store, self.targets["train"], phase.size, *looks, self.config.augment, key)

    def try_model(self, phase, weights=False):
        super().try_model(phase, weights)
        self.network(phase, self.backbone(phase))

    def load(self, run: Session) -> LoadedSplits:
        """Reads every image and what is known of it; a run that is resumed is held to what it began with."""
        data, folder, spec = replace(self.config.data, in_chans=self.spec.in_chans), run.folder, self.spec
        found, (phase,) = self.read(data, folder.leader), self.phases
        check_val(self, found.splits)
        saved = folder.statistics() or (None, None)
        stores = store_images(
            found.splits,
            data,
            self.bound(phase.size),
            {phase.size: phase.size},
            value_range=folder.scale(spec.range),
            mean=spec.mean or saved[0],
            std=spec.std or saved[1],
            progress=folder.leader,
        )
        log_values(self, stores)
        self.spec = replace(spec, mean=stores.mean, std=stores.std)
        self.classes, self.categories = found.classes, found.categories
        self.targets = {part: found.of(part, store.names) for part, store in stores.parts.items()}
        digests = {
            part: {name: target.digest for name, target in zip(store.names, self.targets[part], strict=True)}
            for part, store in stores.parts.items()
        }
        fingerprint = {**stores.fingerprint(), "targets": digests, "classes": list(self.classes)}
        folder.check_images(fingerprint, _differences)
        counts = ", ".join(f"{len(store)} {part}" for part, store in stores.parts.items())
        log.info("images: %s of '%s', %d classes", counts, data.root, len(self.classes))
        return stores

    @property
    def pass_size(self) -> int:
        """Images that go through the network at a time."""
        return -(-self.phases[0].batch_size // (distributed.world() * self.config.train.accumulate))


def _differences(old: dict, new: dict) -> list[str]:
    """Says how images, boxes or masks differ from those that a run began with."""
    lines = image_differences(old, new)
    for part, now in new["targets"].items():
        before = old["targets"].get(part, {})
        if changed := [name for name in now if name in before and before[name] != now[name]]:
            lines.append(f"{part}: other boxes or masks of {counted(len(changed), 'image')}: {listed(changed)}")
    return lines or (["the list of classes is another"] if old["classes"] != new["classes"] else [])


class Judge(Evaluator):
    """Evaluates networks on a part of the images, and keeps what the last one predicted.

    Args:
        run: Its device and arithmetic.
        parts: Of the run.
        splits: The images.
        part: ``val`` or ``test``.

    Attributes:
        latest: What :meth:`scores` found last, where that is as it is reported; None: nothing yet.
    """

    latest: dict[str, float] | None = None

    def __init__(self, run: Session, parts: DenseAssembly, splits: LoadedSplits, part: str):
        self.run, self.parts, self.part = run, parts, part
        self.store: ImageStore = getattr(splits, part)
        self.targets = parts.targets[part]
        self.images, self.every = len(self.store), parts.config.train.eval_every

    def __call__(self, network: nn.Module) -> dict[str, float]:
        """Returns the values for metrics.jsonl (percent)."""
        return {name: value for name, value in self.scores(network).items() if name in RECORDED}

    def batches(self, targets: Sequence[Target], final: bool) -> Iterator[dict]:
        """Yields this process's share of letterboxed images, as many at a time as in training, until the run is
        interrupted. If ``final``, the log has how far it is."""
        run, spec, count, (phase,) = self.run, self.parts.spec, self.parts.pass_size, self.parts.phases
        made = DenseTransform(self.store, targets, phase.size, spec.mean, spec.std)
        batch_bytes = 4 * count * (len(spec.mean) + 2) * phase.size**2
        batches = own_share(made, np.arange(len(self.store)), count, run.workers, batch_bytes)
        batches, label = run.interrupts.watch(batches), f"{self.parts.learns} of the test images"
        return counting(batches, len(self.store), label) if final and run.folder.leader else batches

    @abstractmethod
    def scores(self, network: nn.Module, final: bool = False) -> dict[str, float]:
        """Evaluates a network, in percent; ``final``: as it is reported. All processes must call together."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Writes what the last evaluation found, class by class and image by image."""

    @abstractmethod
    def pair(self, number: int) -> tuple[Any, Any]:
        """Returns what is there in an image and what the last evaluation found, as pictures of it are drawn from."""


def train(config: DenseConfig) -> dict:
    """Trains and evaluates a network for boxes or masks, see :func:`idmm.detect` and :func:`idmm.segment`."""
    parts, notes = resolve(config)
    config = parts.config
    with session(parts, notes) as run:
        if run.folder.finished:
            return run.folder.result()

        # ------------------------------------------------------------------ images
        splits = parts.load(run)
        held, begun = "test" if splits.val is None else "val", run.folder.state is not None
        say_length(run, parts, len(splits.train))

        # ------------------------------------------------------------------ training
        (phase,) = parts.phases
        backbone = parts.backbone(phase)
        if not begun and (report := parts.spec.load(backbone)):
            log.info("%s", report)
        method, judge = parts.method(phase, backbone, len(splits.train)), parts.judge(run, parts, splits, held)
        plan = parts.plan(phase, splits.train, [judge], ending(parts, splits))
        plan.keep = parts.metric if config.train.keep == "best" else None
        loop = Loop(run, method, plan)
        loop.fit()

        # ------------------------------------------------------------------ results
        kept = take_best(loop, parts.metric)
        scores = _judged(run, loop.averaged, judge if held == "test" else parts.judge(run, parts, splits, "test"))
        about = {"task": config.STAGE, "classes": list(parts.classes), "categories": list(parts.categories)}
        about |= {"pyramid_width": config.model.pyramid_width, "masks": parts.masks}
        export_dense(run, loop, parts, splits, about)
        result = {
            **scores,
            **kept,
            "epochs": loop.position.epoch,
            **length_result(run, parts, splits),
            "num_classes": len(parts.classes),
            "train_size": len(splits.train),
            "test_size": len(splits.test),
            "seed": config.seed,
            "seconds": round(run.seconds, 1),
            "precision": run.precision,
            **splits.remarks,
        }
        run.folder.finish(result)
        return result


def _judged(run: Session, network: nn.Module, judge: Judge) -> dict[str, float]:
    """Evaluates what is reported on the test images, unless that was just done, and writes its files."""
    folder, count = run.folder, judge.parts.pass_size
    error = RunError(
        f"out of memory with {count} images at a time; the same command goes on from here where more is free"
    )
    with distributed.enough_memory(error):
        scores = judge.latest or judge.scores(network, final=True)
    if folder.leader:
        judge.write(folder.path)
        with drawing("predictions.png"):
            from idmm.dense.pictures import painted, pairs_figure
            from idmm.figures.style import save  # matplotlib takes a second

            pairs = []
            for n in np.unique(np.linspace(0, len(judge.store) - 1, SHOWN).astype(int)).tolist():
                image, size = judge.store.picture(n), judge.targets[n].size
                times = max(1, PICTURE // max(image.shape))
                image = image.repeat(times, 0).repeat(times, 1)
                drawn = [painted(image, of, size, judge.parts.classes) for of in judge.pair(n)]
                pairs.append((judge.store.names[n], *drawn))
            save(pairs_figure(pairs, f"{folder.path.name}: test images"), folder.path / "predictions.png")
    shown = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
    log.info("%s: %s on %d test images", folder.path, shown, len(judge.store))
    return scores
