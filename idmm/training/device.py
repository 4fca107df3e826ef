"""The device of a run, and its memory."""

import contextlib
from collections.abc import Iterator

import torch

from idmm.config import Train
from idmm.distributed import worker_lost
from idmm.errors import RunError, UserError

# messages of torch, drivers, libraries
_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")


def pick_device(device: str, field: str = "device") -> str:
    """Return the device, with 'auto' resolved to cuda, mps or cpu.

    Raises:
        UserError: The device is not available. ``field`` begins the message.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    names = [name for name in available if available[name]]
    if device != "auto" and device not in names:
        expected = ", ".join(names)
        raise UserError.of(field, f"'{device}' is not available, expected one of {expected}")
    if device == "auto":
        return names[0]
    return device


def choose_device(train: Train) -> str:
    """Resolve ``train.device`` to cuda, mps or cpu. UserError: it lacks the precision, or is
    missing."""
    device = pick_device(train.device, "train.device")
    if train.precision == "fp16" and device != "cuda":
        raise UserError.of(
            "train.precision",
            f"fp16 needs a CUDA device, this run is on {device}",
            "Give bf16, fp32 or auto",
        )
    return device


@contextlib.contextmanager
def enough_memory(otherwise: RunError) -> Iterator[None]:
    """Raise ``otherwise`` if memory runs out inside the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if lost := worker_lost(error):
            raise lost from error
        typed = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not typed and not any(sign in str(error) for sign in _NO_MEMORY):
            raise
        raise otherwise from error
