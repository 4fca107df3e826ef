"""The choice of the precision: before the first step of a run, and of a network in use."""

import copy
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idmm import distributed
from idmm.batch import Batch, BatchFn
from idmm.data.loaders import on_device, one_thread
from idmm.errors import UserError
from idmm.methods.base import Method
from idmm.progress import log
from idmm.seeding import seeded

Device = str | torch.device
# images of the steps that are timed: at most so many, and as few as have so many crops
TIMED = 32
CROPS = 64
STEPS = 2  # timed in each precision


def choose_precision(
    requested: str,
    method: Method,
    transform: BatchFn,
    images: NDArray[np.int64],
    device: Device,
) -> str:
    """Resolve ``train.precision``: as requested, or for 'auto' the fastest one on the device.

    It is bf16 on GPUs that have it, fp16 on other CUDA devices, fp32 on Apple's. On CPUs bf16 can
    be 1.7 times faster or 2.5 times slower, depending on model and processor, so two steps of both
    are timed on a copy of the method.

    Args:
        requested: Of the config.
        method: To be trained.
        transform: Makes a batch from image numbers.
        images: Numbers of the images of the first micro-batch.
        device: cuda, mps or cpu.
    """
    if requested != "auto":
        return requested
    known = _known_precision(device)
    if known is not None:
        return known
    log.info(
        "train.precision auto: two steps of fp32 and of bf16 are timed. "
        "--train.precision fp32 saves the wait"
    )
    with one_thread():  # as workers load
        views = transform(0, images[:1]).get("views", [])
        crops = sum(part.shape[1] for part in views) or 1
        batch = transform(0, images[: min(TIMED, max(1, CROPS // crops))])
    step = partial(_timed_step, copy.deepcopy(method).to(device).train(), batch, device)
    return _faster(step, "train.precision", len(batch["index"]))


def inference_precision(
    requested: str,
    model: nn.Module,
    images: Tensor,
    device: Device,
) -> str:
    """Resolve the precision of a network in use: as requested, or for 'auto' the faster one.

    It is bf16 on GPUs that have it, and fp32 on other GPUs and on Apple's. On CPUs both are timed.

    Args:
        requested: fp32, bf16 or auto.
        model: In evaluation mode, on the device.
        images: To be timed on, [B, C, H, W].
        device: cuda, mps or cpu.

    Raises:
        UserError: ``requested`` is none of these.
    """
    if requested not in ("fp32", "bf16", "auto"):
        raise UserError.of("precision", f"got '{requested}', expected fp32, bf16 or auto")
    if requested != "auto":
        return requested
    known = _known_precision(device)
    if known == "fp16":  # weights that were trained in another precision may overflow
        return "fp32"
    if known is not None:
        return known
    return _faster(partial(_timed_forward, model, images, device), "precision", len(images))


def autocast(device: Device, precision: str) -> torch.autocast:
    """Return the context of a forward pass in fp32 or bf16."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=precision == "bf16")


def _known_precision(device: Device) -> str | None:
    """Return the fastest precision of a device. None: it is to be timed."""
    if device == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        return "fp16"
    if device == "mps":
        return "fp32"
    return None


def _faster(step: Callable[[str], float], field: str, images: int) -> str:
    """Return fp32 or bf16, by the faster of two steps each, which take turns.

    All processes get the first one's choice.

    Args:
        step: Returns its seconds in a precision.
        field: Config field for the message.
        images: Number of images of a step.
    """
    seconds: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for _ in range(STEPS):
        for precision, times in seconds.items():
            times.append(step(precision))
    faster: str = distributed.broadcast(min(seconds, key=lambda name: min(seconds[name])))
    log.info(
        f"{field} auto: {faster} ({images} images take "
        f"{min(seconds['fp32']):.3g} s in fp32, {min(seconds['bf16']):.3g} in bf16)"
    )
    return faster


@torch.no_grad()
def _timed_forward(model: nn.Module, images: Tensor, device: Device, precision: str) -> float:
    """Return the seconds of a forward pass."""
    started_at = time.monotonic()
    with autocast(device, precision):
        model(images)
    return time.monotonic() - started_at


def _timed_step(method: Method, batch: Batch, device: Device, precision: str) -> float:
    """Return the seconds of a forward and a backward pass."""
    started_at = time.monotonic()
    batch = on_device(batch, device)
    with seeded(0), autocast(device, precision):
        loss = method(batch, 0, 0)["loss"]
    loss.backward()
    float(loss.detach())  # waits for the device
    return time.monotonic() - started_at
