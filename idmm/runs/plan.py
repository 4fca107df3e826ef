"""The plan of a phase: its batches and its clock."""

import sys

import numpy as np

from idmm import distributed
from idmm.batch import BatchFn
from idmm.config.phases import Phase
from idmm.data.loaders import BatchPlan
from idmm.evaluation.evaluators import Evaluator
from idmm.progress import log
from idmm.seeding import derive
from idmm.text import counted
from idmm.training.clock import ByClock, ByEpochs, Due, Length
from idmm.training.plan import PhasePlan
from idmm.training.run import Run, TrainConfig

FIGURE_SECONDS = 2.0  # to import matplotlib, and to draw the curves and the confusion matrix


def plan_phase(
    run: Run[TrainConfig],
    phase: Phase,
    images: int,
    transform: BatchFn,
    evaluators: list[Evaluator],
    keep: str | None = None,
    final_images: int = 0,
) -> PhasePlan:
    """Return what the loop needs to know about a phase, and log how many steps it has.

    Args:
        run: Of the phase.
        phase: To be planned.
        images: Training images.
        transform: Makes a batch from image numbers.
        evaluators: Of the exported model.
        keep: The measurement, e.g. top1, by which the epoch is chosen. None: the last epoch.
        final_images: Images to evaluate after the run's last step and its evaluation.
    """
    train = run.config.train
    remaining_phases = run.phases[phase.number - 1 :]
    is_last = len(remaining_phases) == 1
    max_epochs = _max_epochs(run, phase)
    epochs = phase.epochs
    if train.minutes is not None:
        epochs = max_epochs or sys.maxsize
    _log_length(phase, images, train.minutes)
    batches = BatchPlan(
        count=images,
        batch_size=phase.batch_size,
        epochs=epochs,
        seed=derive(run.config.seed, "stage", phase.number),
        rank=distributed.rank(),
        world=distributed.world(),
        accumulate=train.accumulate,
    )
    costs = [other.epochs * other.size**2 for other in remaining_phases]
    timing = Length(
        batches=batches,
        steps=phase.epochs * batches.steps_per_epoch,
        evaluations=tuple(Due(one.images, one.every) for one in evaluators),
        share=costs[0] / sum(costs),
        max_epochs=max_epochs,
        final_images=final_images if is_last else 0,
        final_seconds=FIGURE_SECONDS if is_last else 0.0,
    )
    clock = ByEpochs(timing)
    if train.minutes is not None:
        assert train.warmup_epochs is not None  # of a resolved config
        clock = ByClock(timing, train.minutes, train.warmup_epochs)
    if not is_last:
        keep = None
    return PhasePlan(phase, batches, transform, evaluators, clock, keep)


def _log_length(phase: Phase, images: int, minutes: float | None) -> None:
    """Log the steps of an epoch of so many images, and all steps or the time."""
    steps = phase.steps(images)
    length = f"{steps} in {counted(phase.epochs, 'epoch')}"
    if minutes is not None:
        length = f"for train.minutes {minutes:g}"
    per_epoch = counted(steps // phase.epochs, "step")
    batch_size = min(phase.batch_size, images)
    log.info(f"{phase.label}: {per_epoch} of {batch_size} images per epoch, {length}")


def _max_epochs(run: Run[TrainConfig], phase: Phase) -> int | None:
    """Return the phase's share of ``train.max_epochs``, in the ratio of the phases' epochs.

    Each phase has one epoch at least.
    """
    most = run.config.train.max_epochs
    if most is None:
        return None
    planned = [other.epochs for other in run.phases]
    ends = np.cumsum(planned) * (most - len(planned)) // sum(planned)
    return 1 + int(np.diff(ends, prepend=0)[phase.number - 1])
