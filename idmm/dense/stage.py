"""Train and evaluate a network for boxes or masks. Detection and segmentation share this."""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from idmm import distributed
from idmm.data.image_store import ImageStore
from idmm.data.loaders import own_share
from idmm.data.split import counted
from idmm.data.store import Stores, image_differences, store_images
from idmm.dense.targets import DenseSplits, Target
from idmm.dense.transforms import DenseTransform
from idmm.errors import RunError, listed
from idmm.evaluation.evaluators import Evaluator
from idmm.methods.base import Method
from idmm.progress import counting
from idmm.seeding import derive, seeded
from idmm.stages.images import check_val, log_values
from idmm.stages.setup import build_backbone, open_run, plan_phase, with_statistics
from idmm.training.device import enough_memory
from idmm.training.loop import Loop
from idmm.training.outputs import common_result, ending, export, load_best
from idmm.training.run_context import RunContext
from idmm.training.stage import RunSetup

log = logging.getLogger("idmm")
RECORDED = ("ap", "ap50", "ap75", "mask_ap", "miou", "macc", "pixel_accuracy")  # in metrics.jsonl


def load_images(setup: RunSetup, run: RunContext) -> tuple[Stores, DenseSplits]:
    """Read every image with its boxes or masks. A resumed run compares them with the images that it began with."""
    spec, folder, (phase,) = setup.spec, run.folder, setup.phases
    data, listing = replace(setup.config.data, in_chans=spec.in_chans), setup.stage.read()
    check_val(setup.stage, listing.splits)
    saved = folder.image_values() or {"range": None, "mean": None, "std": None}
    stores = store_images(
        listing.splits,
        data,
        setup.stage.stored_size(phase.size),
        {phase.size: phase.size},
        value_range=saved["range"] or spec.range,
        mean=spec.mean or saved["mean"],
        std=spec.std or saved["std"],
    )
    log_values(setup, stores)
    digests = {
        part: {name: target.digest for name, target in zip(store.names, listing.targets[part], strict=True)}
        for part, store in stores.parts.items()
    }
    folder.check_images({**stores.fingerprint(), "targets": digests, "classes": listing.classes}, _differences)
    counts = ", ".join(f"{len(store)} {part}" for part, store in stores.parts.items())
    log.info("images: %s of '%s', %d classes", counts, data.root, len(listing.classes))
    return stores, listing


def _differences(old: dict, new: dict) -> list[str]:
    """Return how images, boxes or masks differ from those that a run began with."""
    lines = image_differences(old, new)
    for part, digests in new["targets"].items():
        before = old["targets"].get(part, {})
        if changed := [name for name in digests if name in before and before[name] != digests[name]]:
            lines.append(f"{part}: other boxes or masks of {counted(len(changed), 'image')}: {listed(changed)}")
    return lines or (["the list of classes differs"] if old["classes"] != new["classes"] else [])


class DenseEvaluator(Evaluator):
    """Evaluates networks on a part of the images and keeps the latest predictions.

    Args:
        run: Its device and precision are used.
        setup: Of the run.
        stores, listing: All images, and their boxes or masks.
        part: ``val`` or ``test``.

    Attributes:
        latest: The latest scores, if they need no other evaluation to be reported.
    """

    latest: dict[str, float] | None = None

    def __init__(self, run: RunContext, setup: RunSetup, stores: Stores, listing: DenseSplits, part: str):
        self.run, self.setup, self.listing = run, setup, listing
        self.store: ImageStore = getattr(stores, part)
        self.targets, self.classes = listing.targets[part], listing.classes
        self.images, self.every = len(self.store), setup.config.train.eval_every

    @property
    def batch_size(self) -> int:
        """Images per forward pass, as in training."""
        (phase,) = self.setup.phases
        return -(-phase.batch_size // (distributed.world() * self.setup.config.train.accumulate))

    def __call__(self, network: nn.Module) -> dict[str, float]:
        """Return the values for metrics.jsonl (percent)."""
        return {name: value for name, value in self.scores(network).items() if name in RECORDED}

    def batches(self, targets: Sequence[Target], final: bool) -> Iterator[dict]:
        """Yield this process's letterboxed images until the run is interrupted. ``final``: log the progress."""
        run, spec, (phase,) = self.run, self.setup.spec, self.setup.phases
        transform = DenseTransform(self.store, targets, phase.size, spec.mean, spec.std)
        batch_bytes = 4 * self.batch_size * (len(spec.mean) + 2) * phase.size**2
        batches = own_share(transform, np.arange(len(self.store)), self.batch_size, run.workers, batch_bytes)
        batches, label = run.interrupts.watch(batches), f"{self.setup.stage.LABELS} of the test images"
        return counting(batches, len(self.store), label) if final and run.folder.leader else batches

    @abstractmethod
    def scores(self, network: nn.Module, final: bool = False) -> dict[str, float]:
        """Return all scores in percent. ``final``: those of the result. All processes must call together."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the latest scores per class and predictions per image."""


def train(setup: RunSetup, method_class: type[Method], evaluator_class: type[DenseEvaluator], metric: str) -> dict:
    """Train and evaluate a network for boxes or masks, see :func:`idmm.detect` and :func:`idmm.segment`.

    Args:
        setup: Of the run.
        method_class: Computes the network's loss.
        evaluator_class: Evaluates networks.
        metric: Name of the score by which the best epoch is chosen.
    """
    config, (phase,) = setup.config, setup.phases
    with open_run(setup) as run:
        if run.folder.finished:
            return run.folder.result()

        # ------------------------------------------------------------------ images
        stores, listing = load_images(setup, run)
        setup = with_statistics(setup, stores.mean, stores.std)
        part = "test" if stores.val is None else "val"

        # ------------------------------------------------------------------ training
        backbone = build_backbone(setup, phase)
        if run.is_new and (report := setup.spec.load(backbone)):
            log.info("%s", report)
        with seeded(derive(config.seed, "method")):
            network = setup.stage.build_network(backbone, setup.spec, len(listing.classes), listing.outlined)
            method = method_class(network)
        evaluator = evaluator_class(run, setup, stores, listing, part)
        statistics, key = (setup.spec.mean, setup.spec.std), derive(config.seed, "stage", phase.number)
        transform = DenseTransform(stores.train, listing.targets["train"], phase.size, *statistics, config.augment, key)
        keep = metric if config.train.keep == "best" else None
        plan = plan_phase(setup, phase, len(stores.train), transform, [evaluator], ending(setup, stores), keep)
        loop = Loop(run, method, plan)
        loop.fit()

        # ------------------------------------------------------------------ results
        best = load_best(loop, metric)
        on_test = evaluator if part == "test" else evaluator_class(run, setup, stores, listing, "test")
        scores = _final_scores(run, loop.averaged, on_test)
        info = {"task": config.STAGE, "classes": listing.classes, "categories": listing.categories}
        info |= {"pyramid_width": config.model.pyramid_width, "masks": listing.outlined}
        export(run, loop, setup, stores, loop.averaged.backbone.state_dict(), info)
        result = {
            **scores,
            **best,
            "epochs": loop.position.epoch,
            "num_classes": len(listing.classes),
            "test_size": len(stores.test),
            **common_result(run, setup, stores),
        }
        run.folder.finish(result)
        return result


def _final_scores(run: RunContext, network: nn.Module, evaluator: DenseEvaluator) -> dict[str, float]:
    """Return the scores of the result on the test images, and write their files."""
    folder = run.folder
    error = RunError(
        f"out of memory with {evaluator.batch_size} images at a time. "
        "Repeat the command with more free memory to continue from here"
    )
    with enough_memory(error):
        scores = evaluator.latest or evaluator.scores(network, final=True)
    if folder.leader:
        evaluator.write(folder.path)
    text = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
    log.info("%s: %s on %d test images", folder.path, text, len(evaluator.store))
    return scores
