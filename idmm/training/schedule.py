"""What changes with the step: the learning rate (linear warm-up, then a schedule of timm's), weight decay,
the weight of a loss."""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler

WARMUP_START = 1e-6  # as released, and timm's own default


def learning_rate(
    optimizer: torch.optim.Optimizer, steps: int, warmup_steps: int, kind: str = "cosine", falls: Sequence[int] = ()
) -> Scheduler:
    """Returns a schedule that sets each group's lr (times its ``lr_scale``) on ``step_update(step)``.

    Stateless in the step: a resumed run asks for its step and gets the same rate. Step 0 runs at 1e-6 where there is a
    warm-up, ``warmup_steps`` at the peak, ``steps`` (one past the last) would be zero.

    Args:
        optimizer: The groups' present lr is the peak.
        steps: Of the run.
        warmup_steps: Fewer than the run's.
        kind: After the warm-up ``cosine``, a straight line (``linear``), or ``steps``: a tenth of the rate from each of
            the steps ``falls`` on.
        falls: Counted from the start of the run.
    """
    start = min([WARMUP_START, *(group["lr"] / 10 for group in optimizer.param_groups)])
    warmup = dict(warmup_t=warmup_steps, warmup_lr_init=start, t_in_epochs=False)
    if kind == "steps":
        falls = [step + 1 for step in falls]  # timm's fall a step before the one that is given
        return MultiStepLRScheduler(optimizer, decay_t=falls, decay_rate=0.1, warmup_prefix=False, **warmup)
    shape = dict(t_initial=steps - warmup_steps, warmup_prefix=True, **warmup)
    if kind == "linear":
        return PolyLRScheduler(optimizer, power=1.0, **shape)
    logger = logging.getLogger("timm.scheduler.cosine_lr")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of a run of one step
    try:
        return CosineLRScheduler(optimizer, **shape)
    finally:
        logger.setLevel(level)


def weight_decay_schedule(optimizer: torch.optim.Optimizer, steps: int, end: float | None) -> Callable[[int], None]:
    """Returns what sets the weight decay of a step: half a cosine from its groups' present one to ``end``.

    Stateless in the step, as the learning rate; ``end`` would be reached one past the last, None leaves it as it is.
    Groups that have no weight decay, biases and norms, keep none.
    """
    starts = {number: group["weight_decay"] for number, group in enumerate(optimizer.param_groups)}

    def update(step: int) -> None:
        for number, start in starts.items():
            if end is not None and start > 0:
                value = end + (start - end) * (1 + math.cos(math.pi * step / steps)) / 2
                optimizer.param_groups[number]["weight_decay"] = value

    return update


def warmup_length(epochs: float, steps_per_epoch: int, steps: int) -> tuple[int, str | None]:
    """Returns the warm-up in steps and, where it had to be shortened, a line for the log.

    A warm-up as long as the run or longer would never reach the peak: it becomes a tenth of the run.
    """
    wanted = round(epochs * steps_per_epoch)
    if wanted < steps:
        return wanted, None
    shorter = steps // 10
    return shorter, f"warm-up of {wanted} steps shortened to {shorter}: the run has {steps} step{'s' * (steps != 1)}"
