"""What the loop is given, and where it stands."""

from dataclasses import dataclass, field

import torch

from idmm.data.loaders import BatchFn, BatchPlan
from idmm.evaluation.evaluators import Evaluator


@dataclass(frozen=True)
class StagePlan:
    """What the loop needs to know about a phase."""

    number: int  # from 1
    label: str  # for log lines
    epochs: int  # length of the schedules; with ``train.minutes`` the recipe's
    batches: BatchPlan  # which images make which step; with ``train.minutes`` more epochs than will be trained
    transform: BatchFn  # makes a batch from image numbers
    lr: float  # peak learning rate
    evaluators: list[Evaluator]  # of the averaged model, in this order
    keep: str | None = None
    """Name of a score: the weights of its best epoch are saved, the earlier of equals. None: those of the last."""
    share: float = 1.0  # of the minutes that remain when the phase begins
    max_epochs: int | None = None  # with ``train.minutes``
    ending: tuple[int, float] = (0, 0.0)  # after the loop: images to evaluate, and seconds of everything else


@dataclass
class Position:
    """Where a phase stands: ``step`` steps into ``epoch`` (both from 0), with the sums of the epoch so far."""

    epoch: int = 0
    step: int = 0
    total_steps: int = 0  # of the phase
    seconds: float = 0.0  # of the epoch
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # of logged values, times images


@dataclass
class Pace:
    """The time of steps in this process, without the first one, which compiles and waits for the workers."""

    seconds: float = 0.0
    images: int = 0
    steps: int = -1  # -1 before the first step

    def add(self, seconds: float, images: int) -> None:
        """Count a step."""
        if self.steps >= 0:
            self.seconds, self.images = self.seconds + seconds, self.images + images
        self.steps += 1
