"""Schedules over steps: the learning rate (linear warm-up, then one of timm's) and the weight
decay."""

import math
from collections.abc import Callable, Sequence

import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler

from idmm.config import Train
from idmm.progress import log
from idmm.text import counted
from idmm.training.clock import WARMUP

WARMUP_START = 1e-6  # as released, and timm's own default


def learning_rate_of(
    train: Train, optimizer: torch.optim.Optimizer, steps_per_epoch: int, steps: int
) -> Scheduler:
    """Return the schedule of the learning rate, and log a warm-up that was shortened.

    With ``train.minutes`` the warm-up takes the first tenth of the schedule, which then follows the
    clock.
    """
    assert train.warmup_epochs is not None  # of a resolved config
    warmup: float
    warmup, shortened = warmup_length(train.warmup_epochs, steps_per_epoch, steps)
    if train.minutes is not None:
        warmup = WARMUP * steps if train.warmup_epochs else 0.0
    elif shortened:
        log.info(shortened)
    falls = [round(epochs * steps_per_epoch) for epochs in train.lr_steps]
    return learning_rate(optimizer, steps, warmup, train.schedule, falls)


def learning_rate(
    optimizer: torch.optim.Optimizer,
    steps: int,
    warmup_steps: float,
    kind: str = "cosine",
    falls: Sequence[int] = (),
) -> Scheduler:
    """Return a schedule that ``step_update(step)`` sets each group's lr (times ``lr_scale``) by.

    The rate depends only on the step, so a resumed run gets the same rate. With a warm-up, step 0
    runs at 1e-6 and step ``warmup_steps`` at the peak. Step ``steps``, one past the last, would run
    at zero.

    Args:
        optimizer: The groups' present lr is the peak.
        steps: Of the run.
        warmup_steps: Fewer than the run's.
        kind: After the warm-up: ``cosine``, ``linear``, or ``steps``, which divides the rate by ten
            at each of the steps ``falls``.
        falls: Counted from the start of the run.
    """
    start = min([WARMUP_START, *(group["lr"] / 10 for group in optimizer.param_groups)])
    warmup = dict(warmup_t=warmup_steps, warmup_lr_init=start, t_in_epochs=False)
    if kind == "steps":
        falls = [step + 1 for step in falls]  # timm's fall a step before the one that is given
        return MultiStepLRScheduler(
            optimizer, decay_t=falls, decay_rate=0.1, warmup_prefix=False, **warmup
        )
    shape = dict(t_initial=steps - warmup_steps, warmup_prefix=True, **warmup)
    if kind == "linear":
        return PolyLRScheduler(optimizer, power=1.0, **shape)
    return CosineLRScheduler(optimizer, **shape)


def weight_decay_schedule(
    optimizer: torch.optim.Optimizer, steps: int, end: float | None
) -> Callable[[float], None]:
    """Return a function that sets the weight decay of a step: half a cosine from the groups'
    present one to ``end``.

    It depends only on the step. ``end`` would be reached one step past the last; None changes
    nothing. Groups without weight decay (biases and norms) keep none.
    """
    starts = {number: group["weight_decay"] for number, group in enumerate(optimizer.param_groups)}

    def update(step: float) -> None:
        for number, start in starts.items():
            if end is not None and start > 0:
                value = end + (start - end) * (1 + math.cos(math.pi * step / steps)) / 2
                optimizer.param_groups[number]["weight_decay"] = value

    return update


def warmup_length(epochs: float, steps_per_epoch: int, steps: int) -> tuple[int, str | None]:
    """Return the warm-up in steps and, if it is shortened, a line for the log.

    A warm-up as long as the run or longer would never reach the peak. It becomes a tenth of the
    run.
    """
    warmup = round(epochs * steps_per_epoch)
    if warmup < steps:
        return warmup, None
    shorter = steps // 10
    return (
        shorter,
        f"warm-up of {warmup} steps shortened to {shorter}: the run has {counted(steps, 'step')}",
    )
