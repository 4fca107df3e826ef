"""The evaluators of a run on its centre crops."""

import logging
from collections.abc import Iterator

import numpy as np

from idmm.data.image_store import ImageStore
from idmm.data.loaders import centre_crops
from idmm.data.registry import spec_of
from idmm.evaluation.evaluators import Accuracy
from idmm.progress import counting
from idmm.stages import Phase
from idmm.stages.resolve import RunSetup
from idmm.training.run_context import RunContext

log = logging.getLogger("idmm")


def eval_batches(
    run: RunContext,
    setup: RunSetup,
    store: ImageStore,
    size: int,
    batch_size: int,
    *,
    images: np.ndarray | None = None,
    label: str | None = None,
) -> Iterator[dict]:
    """Yield this process's share of a split in centre crops, until the run is interrupted.

    Args:
        run: The open run.
        setup: Of the run, with the mean and std of the images.
        store: The split.
        size: Side of the crops (pixels).
        batch_size: Images at a time.
        images: Numbers of the images; None: all.
        label: For the progress in the log; None: no progress.
    """
    spec = setup.spec
    crops = centre_crops(store, size, setup.stage.crop_pct, spec.mean, spec.std, batch_size, run.workers, images)
    batches = run.interrupts.watch(crops)
    if label is None or not run.folder.leader:
        return batches
    log.info("%s: %d images", label, len(store))
    return counting(batches, len(store), label)


def build_accuracy(run: RunContext, setup: RunSetup, phase: Phase, store: ImageStore) -> Accuracy:
    """Return the evaluator of the classifier of a phase on a split.

    It also records the mean over classes if the dataset's literature reports that.
    """

    def batches(label: str | None) -> Iterator[dict]:
        return eval_batches(run, setup, store, phase.size, phase.batch_size, label=label)

    metrics = ("top1", "top5", spec_of(setup.config.data.name).metric)
    return Accuracy(batches, len(store), setup.config.train.eval_every, run.device, run.autocast, metrics)
