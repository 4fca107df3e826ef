"""Batches to evaluate, features, accuracy and the baseline of an open run."""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from idmm import distributed
from idmm.batch import Batch
from idmm.config import FinetuneConfig
from idmm.config.phases import Phase
from idmm.data.image_store import ImageStore
from idmm.data.loaders import centre_crops
from idmm.data.registry import spec_of
from idmm.data.store import Stores
from idmm.errors import RunError
from idmm.evaluation import baseline
from idmm.evaluation.baseline import BASELINE, BASELINE_SIZE
from idmm.evaluation.evaluators import Accuracy
from idmm.evaluation.network import extract_features
from idmm.progress import counting, log
from idmm.runs.networks import LabelledRun
from idmm.training.device import enough_memory
from idmm.training.run import Run

BASELINE_BATCH = 64  # images at a time
Numbers = NDArray[np.int64]  # of images


def eval_batches(
    run: LabelledRun,
    store: ImageStore,
    size: int,
    batch_size: int,
    *,
    images: Numbers | None = None,
    label: str | None = None,
) -> Iterator[Batch]:
    """Yield this process's share of a split in centre crops of ``size`` pixels.

    It stops if the run is interrupted.

    Args:
        images: Numbers of those to yield, [n]. None: all.
        label: Of a progress bar. None: no bar.
    """
    workers = run.config.data.workers
    crops = centre_crops(store, run.crop(size), run.mean, run.std, batch_size, workers, images)
    batches = run.interrupts.watch(crops)
    if label is None or not run.folder.leader:
        return batches
    log.info(f"{label}: {len(store)} images")
    return counting(batches, len(store), label)


def enough_for(batch_size: int) -> contextlib.AbstractContextManager[None]:
    """Raise RunError if memory runs out with so many images inside the block."""
    return enough_memory(
        RunError(
            f"out of memory with {batch_size} images at a time. Try smaller images or batches, "
            "a smaller model or --train.device cpu, in a new --out"
        )
    )


def image_features(
    run: LabelledRun,
    model: nn.Module,
    store: ImageStore,
    images: Numbers | None = None,
    *,
    size: int,
    batch_size: int,
    label: str | None = None,
) -> Tensor:
    """Return features [N, d] of the images of :func:`eval_batches`.

    Errors are those of :func:`batch_features`.
    """
    batches = eval_batches(run, store, size, batch_size, images=images, label=label)
    return batch_features(run, model, batches, batch_size)


def batch_features(
    run: LabelledRun, model: nn.Module, batches: Iterable[Batch], batch_size: int
) -> Tensor:
    """Return features [N, d] of the images of batches. All processes must call together.

    Raises:
        RunError: They are not finite, or memory ran out.
    """
    with enough_for(batch_size):
        features = extract_features(model.to(run.device), batches, run.device, run.autocast)
    if not bool(features.isfinite().all()):
        raise RunError(
            f"the images' features are not finite{run.folder.checkpoint_note}: lower --train.lr, "
            "set --train.clip_grad 1 or --train.precision fp32, in a new --out",
            shared=True,
        )
    return features


def build_accuracy(run: Run[FinetuneConfig], phase: Phase, store: ImageStore) -> Accuracy:
    """Return the evaluator of the classifier of a phase on a split.

    It also records the mean over classes if the dataset's literature reports that.
    """
    batches = functools.partial(eval_batches, run, store, phase.size, phase.batch_size)
    metrics = ("top1", "top5", spec_of(run.config.data.name).metric)
    return Accuracy(batches, len(store), run.config.train.eval_every, run.device, metrics)


def measure_baseline(run: LabelledRun, images: Stores) -> None:
    """Measure ``baseline_top1`` (percent) of a new run: logistic regression on hand-made features.

    It is fitted to centre crops of ``baseline_train_size`` training images and tested on all test
    images. See :func:`idmm.evaluation.baseline.measure`. All processes must call together.
    """
    started_at = time.monotonic()
    if BASELINE in run.folder.start_scores:
        return
    train = images.train
    test = images.tested
    size = run.phases[-1].size
    numbers = baseline.sample_to_fit(train.known_labels)

    def features(store: ImageStore, some: Numbers | None) -> NDArray[np.float32]:
        batches = eval_batches(run, store, size, BASELINE_BATCH, images=some)
        return baseline.features(batches, run.mean, run.std)

    train_features = features(train, numbers)
    test_features = features(test, None)
    top1 = None
    if run.folder.leader:
        groups = None if train.groups is None else train.groups[numbers]
        labels = train.known_labels[numbers]
        top1 = baseline.measure(
            train_features, labels, test_features, test.known_labels, started_at, groups
        )
    top1 = distributed.broadcast(top1)
    run.folder.add_start_scores({BASELINE: top1, BASELINE_SIZE: len(numbers)})
