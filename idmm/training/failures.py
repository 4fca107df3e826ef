"""The errors that stop training."""

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
