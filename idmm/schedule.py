"""The learning rate as a function of the step: linear warm-up, then half a cosine to zero (timm's)."""

import torch
from timm.scheduler import CosineLRScheduler

WARMUP_START = 1e-6  # as released, and timm's own default


def cosine_schedule(optimizer: torch.optim.Optimizer, steps: int, warmup_steps: int) -> CosineLRScheduler:
    """Returns a schedule that sets each group's lr (times its ``lr_scale``) on ``step_update(step)``.

    Stateless in the step: a resumed run asks for its step and gets the same rate. Step 0 runs at 1e-6 where there is a
    warm-up, ``warmup_steps`` at the peak, ``steps`` (one past the last) would be zero. The released code divides
    inside the cosine so that short runs end at up to 77 % of the peak; this one ends at zero.

    Args:
        optimizer: Its groups' present lr is the peak.
        steps: Length of the run (optimizer steps).
        warmup_steps: Length of the warm-up, shorter than the run (optimizer steps).
    """
    start = min([WARMUP_START, *(group["lr"] / 10 for group in optimizer.param_groups)])
    return CosineLRScheduler(
        optimizer,
        t_initial=steps - warmup_steps,
        warmup_t=warmup_steps,
        warmup_lr_init=start,
        warmup_prefix=True,
        t_in_epochs=False,
    )


def warmup_length(epochs: float, steps_per_epoch: int, steps: int) -> tuple[int, str | None]:
    """Returns the warm-up in steps and, where it had to be shortened, a line for the log.

    A warm-up as long as the run or longer would never reach the peak: it becomes a tenth of the run.
    """
    wanted = round(epochs * steps_per_epoch)
    if wanted < steps:
        return wanted, None
    shorter = steps // 10
    return shorter, f"warm-up of {wanted} steps shortened to {shorter}: the run has {steps} steps"
