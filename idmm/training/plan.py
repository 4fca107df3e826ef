"""The plan of a phase, its position, and the state that a checkpoint holds."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from idmm import distributed
from idmm.batch import BatchFn
from idmm.config.phases import Phase
from idmm.data.loaders import BatchPlan
from idmm.evaluation.evaluators import Evaluator
from idmm.training.clock import ByEpochs


@dataclass(frozen=True)
class PhasePlan:
    """What the loop needs to know about a phase, the part of a run at one image size."""

    # its epochs are the length of the schedules; with ``train.minutes`` the recipe's
    phase: Phase
    # which images make which step; with ``train.minutes`` more epochs than will be trained
    batches: BatchPlan
    transform: BatchFn  # makes a batch from image numbers
    evaluators: list[Evaluator]  # of the exported model, in this order
    clock: ByEpochs
    # a score: the weights of its best epoch are saved, the earlier of equals. None: the last's
    keep: str | None = None

    def due(self, epoch: int) -> list[Evaluator]:
        """Return the evaluators that an epoch calls if it is not the last."""
        return [evaluator for evaluator in self.evaluators if (epoch + 1) % evaluator.every == 0]


class Sums:
    """Sums of logged values, times images, over an epoch."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor], images: float) -> None:
        """Add the means of some images, without waiting for the device."""
        for name, value in values.items():
            product = value.detach().float() * images
            if name in self.values:
                product = self.values[name] + product
            self.values[name] = product

    def totals(self) -> dict[str, float]:
        """Return the sums over all processes, which must call together."""
        names = sorted(self.values)
        if not names:
            return {}
        sums = torch.stack([self.values[name] for name in names])
        if distributed.world() > 1:
            torch.distributed.all_reduce(sums)
        return dict(zip(names, sums.tolist(), strict=True))

    def load(self, totals: dict[str, float], share: float, device: torch.device) -> None:
        """Continue with a process's share of the totals."""
        for name, value in totals.items():
            self.values[name] = torch.tensor(value * share, device=device)


@dataclass
class Position:
    """Where a phase stands: ``step`` steps into ``epoch``, both from 0."""

    epoch: int = 0
    step: int = 0
    total_steps: int = 0  # of the phase
    seconds: float = 0.0  # of the epoch
    sums: Sums = field(default_factory=Sums)  # of the epoch so far


@dataclass(frozen=True)
class Best:
    """The best epoch so far, with ``train.keep`` best."""

    epoch: int  # from 1
    value: float
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, epoch: int, value: float, model: nn.Module) -> "Best":
        """Copy the weights of a model to the CPU."""
        weights = {}
        for name, tensor in model.state_dict().items():
            weights[name] = tensor.to("cpu", copy=True)
        return cls(epoch, value, weights)


@dataclass
class TrainingState:
    """The content of ``last/state.pt``: what the rest of a run depends on, except its seed."""

    stage: int  # number of the phase, from 1
    epoch: int  # of the phase, from 0
    step: int  # of the epoch, from 0
    steps: list[int]  # of earlier phases, of this one
    epoch_seconds: float
    seconds: float  # of the run
    timer: dict[str, Any] | None  # see :class:`idmm.training.clock.Timer`
    sums: dict[str, float]  # see :class:`Sums`, over all processes
    precision: str
    channels_last: bool
    views: str  # where they are made: device or loader
    method: dict[str, Any]  # state of the module, as those below
    optimizer: dict[str, Any]
    ema: dict[str, Tensor] | None
    scaler: dict[str, Any] | None
    best: dict[str, Any] | None  # see :class:`Best`
