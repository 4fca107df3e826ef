"""The images of a run: stored, compared with those of a resumed run, described in the log, batched for evaluation."""

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from idmm import distributed
from idmm.data.folder import PARTS
from idmm.data.image_store import ImageStore
from idmm.data.loaders import centre_crops
from idmm.data.registry import spec_of
from idmm.data.split import Listing, counted
from idmm.data.store import Stores, store_images
from idmm.errors import RunError
from idmm.evaluation import baseline
from idmm.evaluation.evaluators import Accuracy
from idmm.evaluation.network import extract_features
from idmm.progress import counting
from idmm.training.device import enough_memory
from idmm.training.outputs import BASELINE
from idmm.training.run_context import RunContext
from idmm.training.run_folder import RunFolder
from idmm.training.stage import Phase, RunSetup

log = logging.getLogger("idmm")
BASELINE_BATCH = 64  # images at a time


def store_run_images(setup: RunSetup, listing: Listing, folder: RunFolder | None = None) -> tuple[RunSetup, Stores]:
    """Store the images of a run. A resumed one keeps the value range, mean and std that are saved in its ``folder``.

    Returns:
        The setup with the mean and std of the images, and the stores, with val and test at the size of the last phase.

    Raises:
        UserError: Broken images, or a resumed run whose image i is no longer image i.
    """
    stage, spec = setup.stage, setup.spec
    sizes = dict.fromkeys(phase.size for phase in setup.phases)
    saved = (folder and folder.image_values()) or {"range": None, "mean": None, "std": None}
    stores = store_images(
        listing,
        setup.config.data,
        stage.stored_size(max(sizes)),
        {size: stage.eval_stored_size(size) for size in sizes},
        parts=PARTS if stage.needs.eval_pixels else ("train",),
        value_range=saved["range"] or spec.range,
        mean=spec.mean or saved["mean"],
        std=spec.std or saved["std"],
    ).at(setup.phases[-1].size)
    log_values(setup, stores)
    if folder is not None:
        folder.check_images(stores)
        counts = ", ".join(f"{len(store)} {part}" for part, store in stores.parts.items())
        how = "decoded at each use" if stores.train.decodes else "decoded once"
        log.info("images: %s of %s (%s)", counts, setup.config.data.name, how)
    return replace(setup, spec=replace(spec, mean=stores.mean, std=stores.std)), stores


def log_values(setup: RunSetup, stores: Stores) -> None:
    """Log the range, mean and std of the images' values."""
    randaugment = getattr(getattr(setup.config, "augment", None), "randaugment", None)
    for part, store in stores.parts.items():
        if not store.high_bit:
            continue
        ranges = ", ".join(f"[{low:g}, {high:g}]" for low, high in np.reshape(store.value_range, (-1, 2)).tolist())
        line = "images: %s of %s have more than 8 bits. Their values %s become 0 to 1"
        log.info(line, f"{store.high_bit:,}", counted(len(store), f"{part} image"), ranges)
        if part == "train" and randaugment:
            line = "images: augment.randaugment: left out for the %d of more than 8 bits, which it would cut to 8"
            log.info(line, store.high_bit)
    if None in (setup.spec.mean, setup.spec.std):
        mean, std = ([float(f"{value:.4g}") for value in values] for values in (stores.mean, stores.std))
        log.info("images: mean %s, std %s of the channels, measured from the training images", mean, std)


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
    """Yield this process's share of a split in centre crops of ``size`` pixels, until the run is interrupted.

    ``images`` are the numbers of those to yield, None: all. With a ``label`` the log shows the progress.
    """
    spec = setup.spec
    crops = centre_crops(store, size, setup.stage.crop_pct, spec.mean, spec.std, batch_size, run.workers, images)
    batches = run.interrupts.watch(crops)
    if label is None or not run.folder.leader:
        return batches
    log.info("%s: %d images", label, len(store))
    return counting(batches, len(store), label)


def enough_for(batch_size: int) -> contextlib.AbstractContextManager[None]:
    """Raise RunError if memory runs out with so many images inside the block."""
    advice = "smaller images or batches, a smaller model or --train.device cpu, in a new --out"
    return enough_memory(RunError(f"out of memory with {batch_size} images at a time. Try {advice}"))


def image_features(
    run: RunContext,
    setup: RunSetup,
    model: nn.Module,
    store: ImageStore,
    images: np.ndarray | None = None,
    *,
    size: int,
    batch_size: int,
    label: str | None = None,
) -> Tensor:
    """Return features [N, d] of the images of :func:`eval_batches`. All processes must call together.

    Raises:
        RunError: They are not finite, or memory ran out.
    """
    batches = eval_batches(run, setup, store, size, batch_size, images=images, label=label)
    with enough_for(batch_size):
        features = extract_features(model.to(run.device), batches, run.device, run.autocast)
    if not bool(torch.isfinite(features).all()):
        raise RunError(
            f"the images' features are not finite{run.folder.checkpoint_note}: lower --train.lr, "
            "set --train.clip_grad 1 or --train.precision fp32, in a new --out",
            shared=True,
        )
    return features


def build_accuracy(run: RunContext, setup: RunSetup, phase: Phase, store: ImageStore) -> Accuracy:
    """Return the evaluator of the classifier of a phase on a split.

    It also records the mean over classes if the dataset's literature reports that.
    """
    batches = functools.partial(eval_batches, run, setup, store, phase.size, phase.batch_size)
    metrics = ("top1", "top5", spec_of(setup.config.data.name).metric)
    return Accuracy(batches, len(store), setup.config.train.eval_every, run.device, run.autocast, metrics)


def measure_baseline(run: RunContext, setup: RunSetup, images: Stores) -> None:
    """Measure ``baseline_top1`` (percent) of a new run: hand-made features of its centre crops, logistic regression.

    See :func:`idmm.evaluation.baseline.measure`. It is left out if the training images are all of one class. All
    processes must call together.
    """
    started_at = time.monotonic()
    if BASELINE in run.folder.start_scores:
        return
    train, test, size = images.train, images.test, setup.phases[-1].size
    most = baseline.DECODED if train.decodes or test.decodes else baseline.MOST
    numbers = baseline.sample_to_fit(train.labels, most), baseline.sample(test.labels, most)
    labels, truth = train.labels[numbers[0]], test.labels[numbers[1]]
    if len(np.unique(labels)) < 2:
        return
    train_features, test_features = (
        baseline.features(
            eval_batches(run, setup, store, size, BASELINE_BATCH, images=some), setup.spec.mean, setup.spec.std
        )
        for store, some in zip((train, test), numbers, strict=True)
    )
    top1 = None
    if run.folder.leader:
        top1 = baseline.measure(train_features, labels, test_features, truth, started_at)
    run.folder.add_start_scores({BASELINE: distributed.broadcast(top1)})
