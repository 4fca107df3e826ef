"""Train and evaluate a network for boxes or masks. Detection and segmentation share this."""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import nn

from idmm import distributed
from idmm.data.image_store import ImageStore
from idmm.data.loaders import own_share
from idmm.dense.network import build_network
from idmm.dense.targets import outlined
from idmm.dense.transforms import DenseTransform
from idmm.errors import RunError
from idmm.evaluation.evaluators import Evaluator
from idmm.methods.base import Method
from idmm.progress import counting
from idmm.seeding import derive, seeded
from idmm.stages.images import store_run_images
from idmm.stages.setup import build_backbone, open_run, plan_phase, with_statistics
from idmm.training.device import enough_memory
from idmm.training.log import SCORES
from idmm.training.loop import Loop
from idmm.training.outputs import common_result, export, load_best
from idmm.training.run_context import RunContext
from idmm.training.stage import RunSetup

log = logging.getLogger("idmm")


class DenseEvaluator(Evaluator):
    """Evaluates networks on a part of the images and keeps the latest predictions.

    Args:
        run: Its device and precision are used.
        setup: Of the run.
        store: The images, with their boxes or masks.
        categories: Number of each class in the dataset's own files.

    Attributes:
        latest: The latest scores, if they need no other evaluation to be reported.
    """

    latest: dict[str, float] | None = None

    def __init__(self, run: RunContext, setup: RunSetup, store: ImageStore, categories: Sequence[int]):
        self.run, self.setup, self.store, self.categories = run, setup, store, categories
        self.targets, self.classes = store.targets, store.classes
        self.images, self.every = len(store), setup.config.train.eval_every

    @property
    def batch_size(self) -> int:
        """Images per forward pass, as in training."""
        (phase,) = self.setup.phases
        return -(-phase.batch_size // (distributed.world() * self.setup.config.train.accumulate))

    def __call__(self, network: nn.Module) -> dict[str, float]:
        """Return the values for metrics.jsonl (percent)."""
        return {name: value for name, value in self.scores(network).items() if name in SCORES}

    def batches(self, final: bool) -> Iterator[dict]:
        """Yield this process's letterboxed images until the run is interrupted. ``final``: log the progress."""
        run, spec, (phase,) = self.run, self.setup.spec, self.setup.phases
        transform = DenseTransform(self.store, phase.size, spec.mean, spec.std, only_images=True)
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
        listing = setup.stage.list_images()
        stores = store_run_images(setup, listing, run.folder)
        setup = with_statistics(setup, stores.mean, stores.std)
        has_outlines = outlined(stores.train.targets)

        # ------------------------------------------------------------------ training
        backbone = build_backbone(setup, phase)
        if run.is_new and (report := setup.spec.load(backbone)):
            log.info("%s", report)
        with seeded(derive(config.seed, "method")):
            layers = (len(stores.train.classes), config.model.pyramid_width, has_outlines)
            method = method_class(build_network(config.STAGE, backbone, phase.size, *layers, setup.spec.in_chans))
        evaluator = evaluator_class(run, setup, stores.val or stores.test, listing.categories)
        key = derive(config.seed, "stage", phase.number)
        transform = DenseTransform(stores.train, phase.size, setup.spec.mean, setup.spec.std, config.augment, key)
        loop = Loop(run, method, plan_phase(setup, phase, stores, transform, [evaluator], metric))
        loop.fit()

        # ------------------------------------------------------------------ results
        best = load_best(loop, metric)
        if stores.val is not None:
            evaluator = evaluator_class(run, setup, stores.test, listing.categories)
        scores = _final_scores(run, loop.averaged, evaluator)
        info = {"task": config.STAGE, "classes": stores.train.classes, "categories": listing.categories}
        info |= {"pyramid_width": config.model.pyramid_width, "masks": has_outlines}
        export(run, loop, setup, stores, loop.averaged.backbone.state_dict(), info)
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
