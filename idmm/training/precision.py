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
    copied = copy.deepcopy(method).to(device).train()
    seconds = _time_precisions(partial(_timed_step, copied, batch, device))
    fastest: str = distributed.broadcast(min(seconds, key=lambda name: seconds[name]))
    log.info(
        "train.precision auto: %s (%d images take %.3g s in fp32, %.3g in bf16)",
        fastest,
        len(batch["index"]),
        seconds["fp32"],
        seconds["bf16"],
    )
    return fastest


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
    seconds = _time_precisions(partial(_timed_forward, model, images, device))
    faster = min(seconds, key=lambda name: seconds[name])
    log.info(
        "precision auto: %s (%d images take %.3g s in fp32, %.3g in bf16)",
        faster,
        len(images),
        seconds["fp32"],
        seconds["bf16"],
    )
    return faster


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


def _time_precisions(step: Callable[[str], float]) -> dict[str, float]:
    """Return the seconds of a step in fp32 and in bf16.

    They are those of the faster of two steps, which take turns.
    """
    seconds: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for _ in range(STEPS):
        for precision, times in seconds.items():
            times.append(step(precision))
    return {precision: min(times) for precision, times in seconds.items()}


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
