"""What all stages share, in the order of a run: open it, try the model, store the images, build,
evaluate."""

import contextlib
import functools
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from idmm import distributed
from idmm.batch import BatchFn
from idmm.data.fingerprint import listed_again
from idmm.data.image_store import ImageStore
from idmm.data.loaders import BatchPlan, centre_crops
from idmm.data.registry import spec_of
from idmm.data.split import Listing
from idmm.data.store import Stores, store_images
from idmm.errors import Interrupted, RunError, SizeError, UserError, checked
from idmm.evaluation import baseline
from idmm.evaluation.evaluators import Accuracy, Evaluator
from idmm.evaluation.network import extract_features
from idmm.files import holds_run
from idmm.methods.drloc import Localization
from idmm.models.build import try_size
from idmm.models.vit_init import can_init_vit
from idmm.progress import counting, log
from idmm.runs.outputs import BASELINE, BASELINE_SIZE, ending
from idmm.seeding import derive, seeded
from idmm.text import counted
from idmm.training.device import enough_memory
from idmm.training.log import logging_to
from idmm.training.plan import PhasePlan
from idmm.training.run_context import RunContext
from idmm.training.run_folder import RunFolder
from idmm.training.stage import Phase, RunSetup

BASELINE_BATCH = 64  # images at a time


# ------------------------------------------------------------------ the folder, and the model tried
@contextlib.contextmanager
def open_run(setup: RunSetup) -> Iterator[RunContext]:
    """Open the run's folder, log and interrupts, and close them however the block ends.

    The model of a new run is tried at every size before there is a folder. A run that is refused
    leaves no folder.
    """
    check_sizes(setup)
    run = RunContext(setup.config, setup.started_at)
    with open_folder(setup, run.folder), run.interrupts:
        try:
            yield run
        except KeyboardInterrupt:
            checkpoint = run.folder.checkpoint_note or ". There is no checkpoint yet"
            raise Interrupted(
                f"{setup.config.out}: interrupted{checkpoint}. Repeat the command to continue"
            ) from None


@contextlib.contextmanager
def open_folder(setup: RunSetup, folder: RunFolder) -> Iterator[None]:
    """Log to a run's folder inside the block, first if it is finished, and close it at the end.

    Raises:
        UserError: The images of a finished run changed.
    """
    with folder, logging_to(folder.path):
        if folder.finished:
            if listing := listed_again(setup.stage.list_images, setup.config.data):
                folder.check_listing(used_parts(setup, listing))
            log.info("%s: finished already, nothing to do", folder.path)
        yield


def check_sizes(setup: RunSetup) -> None:
    """Try the model of a new run at every size, so that no size is refused hours after the start.

    Raises:
        UserError: A line per fault, with the field.
    """
    if not holds_run(setup.config.out):
        checked(*(functools.partial(try_model, setup, phase) for phase in setup.phases))


def try_model(setup: RunSetup, phase: Phase, with_weights: bool = False) -> None:
    """Build the model of a phase once.

    Raises:
        UserError: The backbone, drloc's head or, if requested, the weights to start from do not
            fit.
    """
    spec = setup.spec
    field = phase.field
    try:
        backbone = build_backbone(setup, phase)
        setup.stage.check_network(phase, backbone, spec)
        for name, size in phase.other_sizes:
            field = name
            try_size(backbone, spec.name, size, spec.in_chans)
    except SizeError as error:
        raise UserError(*(f"{field}: {fault}" for fault in error.faults)) from None
    structured = getattr(setup.config.model, "start", "timm") == "structured" and spec.init is None
    if structured and not can_init_vit(backbone):
        line = f"{spec.name} is not one of timm's vision transformers with learned positions, expected timm or auto"
        raise UserError(f"model.start: structured, but {line}")
    if with_weights:
        spec.load(backbone)
    build_localization(setup, phase, backbone)


# ---------------------------------------------------------------------- the images
def used_parts(setup: RunSetup, listing: Listing) -> Listing:
    """Return the splits whose pixels the run needs."""
    if setup.stage.needs.eval_pixels:
        return listing
    return replace(listing, val=None, test=None)


def store_run_images(
    setup: RunSetup, listing: Listing, folder: RunFolder | None = None
) -> tuple[RunSetup, Stores]:
    """Store the images of a run. A resumed one keeps the value range, mean and std that are saved
    in its ``folder``.

    Returns:
        The setup with the mean and std of the images, and the stores, with val and test at the size
        of the last phase.

    Raises:
        UserError: Broken images, or a resumed run whose image i is no longer image i.
    """
    stage = setup.stage
    spec = setup.spec
    # not before an error about the list of images
    for note in setup.notes if folder is not None else ():
        log.info("%s", note)
    sizes = dict.fromkeys(phase.size for phase in setup.phases)
    saved = (folder and folder.image_values()) or {}
    stores = store_images(
        used_parts(setup, listing),
        setup.config.data,
        stage.stored_size(max(sizes)),
        {size: stage.eval_stored_size(size) for size in sizes},
        value_range=saved.get("range") or spec.range,
        mean=spec.mean or saved.get("mean"),
        std=spec.std or saved.get("std"),
    ).at(setup.phases[-1].size)
    log_values(setup, stores)
    if folder is not None:
        folder.check_images(stores)
        counts = ", ".join(f"{len(store)} {part}" for part, store in stores.parts.items())
        if stores.train.decodes:
            how = "decoded at each use"
        else:
            how = "decoded once"
        log.info("images: %s of %s (%s)", counts, setup.config.data.name, how)
    return replace(setup, spec=replace(spec, mean=stores.mean, std=stores.std)), stores


def log_values(setup: RunSetup, stores: Stores) -> None:
    """Log the range, mean and std of the images' values."""
    randaugment = getattr(getattr(setup.config, "augment", None), "randaugment", None)
    for part, store in stores.parts.items():
        if not store.high_bit:
            continue
        ranges = ", ".join(
            f"[{low:g}, {high:g}]" for low, high in np.reshape(store.value_range, (-1, 2)).tolist()
        )
        line = "images: %s of %s have more than 8 bits. Their values %s become 0 to 1"
        log.info(line, f"{store.high_bit:,}", counted(len(store), f"{part} image"), ranges)
        if part == "train" and randaugment:
            line = "images: augment.randaugment: left out for the %d of more than 8 bits, which it would cut to 8"
            log.info(line, store.high_bit)
    for name in ("mean", "std"):
        if getattr(setup.spec, name) is None:
            values = [float(f"{value:.4g}") for value in getattr(stores, name)]
            log.info(
                "images: %s %s of the channels, measured from the training images", name, values
            )


# ---------------------------------------------------------------------- the model and the loop
def build_backbone(setup: RunSetup, phase: Phase, classes: int = 0) -> torch.nn.Module:
    """Build the backbone of a phase with fresh weights, and a classifier if there are
    ``classes``."""
    return setup.spec.build(phase.size, setup.config.seed, classes, dynamic=bool(phase.other_sizes))


def build_localization(
    setup: RunSetup, phase: Phase, backbone: torch.nn.Module
) -> Localization | None:
    """Build the head of ``drloc``, its fresh weights drawn from the run's seed; None if its weight
    is 0."""
    drloc = getattr(setup.config, "drloc", None)
    if drloc is None or not drloc.weight:
        return None
    with seeded(derive(setup.config.seed, "drloc", phase.size)):
        return Localization(backbone, drloc, phase.size, setup.spec.in_chans)


def plan_phase(
    setup: RunSetup,
    phase: Phase,
    images: Stores,
    transform: BatchFn,
    evaluators: list[Evaluator],
    score: str | None = None,
) -> PhasePlan:
    """Return what the loop needs to know about a phase, see :class:`PhasePlan`, and log how many
    steps it has.

    ``score`` is the measurement, e.g. top1, by which ``train.keep`` best chooses the epoch.
    """
    train = setup.config.train
    phases_from_here = setup.phases[phase.number - 1 :]
    count = len(images.train)
    is_last = len(phases_from_here) == 1
    costs = [other.epochs * other.size**2 for other in phases_from_here]
    max_epochs = None
    epochs = phase.epochs
    steps = phase.steps(count)
    length = f"{steps} in {counted(phase.epochs, 'epoch')}"
    if train.minutes is not None:
        # divided in the ratio of the phases' epochs. Each has one at least
        if train.max_epochs is not None:
            planned = [other.epochs for other in setup.phases]
            ends = np.cumsum(planned) * (train.max_epochs - len(planned)) // sum(planned)
            max_epochs = 1 + int(np.diff(ends, prepend=0)[phase.number - 1])
        epochs = max_epochs or sys.maxsize
        length = f"for train.minutes {train.minutes:g}"
    per_epoch = counted(steps // phase.epochs, "step")
    batch = min(phase.batch_size, count)
    log.info("%s: %s of %d images per epoch, %s", phase.label, per_epoch, batch, length)
    order = derive(setup.config.seed, "stage", phase.number)
    processes = (distributed.rank(), distributed.world())
    return PhasePlan(
        phase=phase,
        batches=BatchPlan(count, phase.batch_size, epochs, order, *processes, train.accumulate),
        transform=transform,
        evaluators=evaluators,
        keep=score if score and is_last and train.keep == "best" else None,
        share=costs[0] / sum(costs),
        max_epochs=max_epochs,
        ending=ending(setup, images) if is_last else (0, 0.0),
    )


# ---------------------------------------------------------------------- evaluation
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
    """Yield this process's share of a split in centre crops of ``size`` pixels, until the run is
    interrupted.

    ``images`` are the numbers of those to yield, None: all. With a ``label`` the log shows the
    progress.
    """
    spec = setup.spec
    crops = centre_crops(
        store, size, setup.stage.crop_pct, spec.mean, spec.std, batch_size, run.workers, images
    )
    batches = run.interrupts.watch(crops)
    if label is None or not run.folder.leader:
        return batches
    log.info("%s: %d images", label, len(store))
    return counting(batches, len(store), label)


def enough_for(batch_size: int) -> contextlib.AbstractContextManager[None]:
    """Raise RunError if memory runs out with so many images inside the block."""
    advice = "smaller images or batches, a smaller model or --train.device cpu, in a new --out"
    return enough_memory(
        RunError(f"out of memory with {batch_size} images at a time. Try {advice}")
    )


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
    """Return features [N, d] of the images of :func:`eval_batches`. Errors as of
    :func:`batch_features`."""
    batches = eval_batches(run, setup, store, size, batch_size, images=images, label=label)
    return batch_features(run, model, batches, batch_size)


def batch_features(
    run: RunContext, model: nn.Module, batches: Iterable[dict], batch_size: int
) -> Tensor:
    """Return features [N, d] of the images of batches. All processes must call together.

    Raises:
        RunError: They are not finite, or memory ran out.
    """
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
    return Accuracy(batches, len(store), setup.config.train.eval_every, run.device, metrics)


def measure_baseline(run: RunContext, setup: RunSetup, images: Stores) -> None:
    """Measure ``baseline_top1`` (percent) of a new run: hand-made features of its centre crops,
    logistic regression.

    It is fitted to ``baseline_train_size`` of the training images and tested on all test images.
    See :func:`idmm.evaluation.baseline.measure`. All processes must call together.
    """
    started_at = time.monotonic()
    if BASELINE in run.folder.start_scores:
        return
    train = images.train
    test = images.test
    size = setup.phases[-1].size
    numbers = baseline.sample_to_fit(train.labels)
    train_features, test_features = (
        baseline.features(
            eval_batches(run, setup, store, size, BASELINE_BATCH, images=some),
            setup.spec.mean,
            setup.spec.std,
        )
        for store, some in ((train, numbers), (test, None))
    )
    top1 = None
    labels = train.labels[numbers]
    groups = None if train.groups is None else train.groups[numbers]
    if run.folder.leader:
        top1 = baseline.measure(
            train_features, labels, test_features, test.labels, started_at, groups
        )
    run.folder.add_start_scores(
        {BASELINE: distributed.broadcast(top1), BASELINE_SIZE: len(numbers)}
    )
