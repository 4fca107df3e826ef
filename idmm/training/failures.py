"""The errors that stop training."""

import torch
from torch import Tensor

from idmm import distributed
from idmm.config import Train
from idmm.errors import RunError


def no_memory_to_train(batch_size: int, accumulate: int) -> RunError:
    """Return the error of a training step without memory."""
    return RunError(
        f"out of memory with a batch of {batch_size} images: try --train.accumulate "
        f"{2 * accumulate} (the same step in smaller passes), a smaller --train.batch_size or "
        "--train.precision bf16, in a new --out"
    )


def diverged(subject: str, moment: str, train: Train, precision: str | None) -> RunError:
    """Return the error of a loss or of weights that are not finite at a moment."""
    remedies = ["lower --train.lr"]
    if not train.clip_grad:
        remedies.append("set --train.clip_grad 1")
    if precision != "fp32":
        remedies.append("set --train.precision fp32")
    remedy = " or ".join(remedies)
    return RunError(f"{subject} not finite {moment}: {remedy}, in a new --out", shared=True)


class FirstBadStep:
    """The number of the first step whose loss is not finite, kept on the device."""

    def __init__(self, device: torch.device):
        self._number = torch.full((), -1, device=device)  # -1: there is none

    def note(self, loss: Tensor, number: int) -> None:
        """Save the number of a step if its loss is bad, without waiting for the device."""
        is_bad = ~torch.isfinite(loss.detach())
        self._number = torch.where(is_bad & (self._number < 0), number, self._number)

    def is_known(self) -> bool:
        """Return whether this process has had a bad step."""
        return int(self._number) >= 0

    def of_all_processes(self) -> int | None:
        """Return the first one of all processes, which must call together."""
        steps = [step for step in distributed.gather(int(self._number)) if step >= 0]
        return min(steps, default=None)
