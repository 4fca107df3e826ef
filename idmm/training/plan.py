"""The plan of a phase, its position, and the state that a checkpoint holds."""

from dataclasses import dataclass, field
from typing import Any

import torch

from idmm.batch import BatchFn
from idmm.config import Train
from idmm.data.loaders import BatchPlan
from idmm.evaluation.evaluators import Evaluator
from idmm.training.clock import Timer
from idmm.training.stage import Phase


@dataclass(frozen=True)
class PhasePlan:
    """What the loop needs to know about a phase, the part of a run at one image size."""

    phase: Phase  # its epochs are the length of the schedules; with ``train.minutes`` the recipe's
    # which images make which step; with ``train.minutes`` more epochs than will be trained
    batches: BatchPlan
    transform: BatchFn  # makes a batch from image numbers
    evaluators: list[Evaluator]  # of the exported model, in this order
    keep: str | None = None
    """Name of a score: the weights of its best epoch are saved, the earlier of equals. None: those
    of the last."""
    share: float = 1.0  # of the minutes that remain when the phase begins
    max_epochs: int | None = None  # with ``train.minutes``
    # after the loop: images to evaluate, and seconds of everything else
    ending: tuple[int, float] = (0, 0.0)

    def timer(self, start: float, train: Train) -> Timer:
        """Return the timer of a phase with ``train.minutes`` that starts at a time of the run
        (seconds)."""
        steps_per_epoch, (images, seconds) = self.batches.steps_per_epoch, self.ending
        return Timer(
            start,
            until=start + self.share * (60 * train.minutes - start),
            warmup_steps=round(train.warmup_epochs * steps_per_epoch),
            max_steps=self.max_epochs and self.max_epochs * steps_per_epoch,
            final_images=images + sum(evaluator.images for evaluator in self.evaluators),
            final_seconds=seconds,
        )


@dataclass
class Position:
    """Where a phase stands: ``step`` steps into ``epoch`` (both from 0), with the sums of the epoch
    so far."""

    epoch: int = 0
    step: int = 0
    total_steps: int = 0  # of the phase
    seconds: float = 0.0  # of the epoch
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # of logged values, times images


@dataclass
class TrainingState:
    """All that the rest of a run depends on and that its seed does not give: the content of
    ``last/state.pt``."""

    stage: int  # number of the phase, from 1
    epoch: int  # of the phase, from 0
    step: int  # of the epoch, from 0
    steps: list[int]  # of earlier phases, of this one
    epoch_seconds: float
    seconds: float  # of the run
    timer: dict | None  # see :class:`idmm.training.clock.Timer`
    sums: dict[str, float]  # see :class:`Position`, over all processes
    precision: str
    channels_last: bool
    views: str  # where they are made: device or loader
    method: dict[str, Any]  # state of the module, as those below
    optimizer: dict[str, Any]
    ema: dict[str, torch.Tensor] | None
    scaler: dict[str, Any] | None
    best: dict | None  # epoch (from 1), value and weights of the best epoch so far


@dataclass
class Pace:
    """The time of steps in this process, without the first one, which compiles and waits for the
    workers."""

    seconds: float = 0.0
    images: int = 0
    steps: int = -1  # -1 before the first step

    def add(self, seconds: float, images: int) -> None:
        """Count a step."""
        if self.steps >= 0:
            self.seconds = self.seconds + seconds
            self.images = self.images + images
        self.steps += 1
