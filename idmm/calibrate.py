"""A few timed steps before the first real one: which precision is faster here, how long the run will take."""

import copy
import logging
import shutil
import statistics
import time

import torch
from accelerate.utils import send_to_device

from idmm import distributed
from idmm.methods.base import Method
from idmm.progress import duration, size
from idmm.seeding import seeded

log = logging.getLogger("idmm")
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BUDGET = 20.0  # seconds of timing at most, once each precision has had two steps


def choose_precision(wanted: str, method: Method, batch: dict, device: str) -> str:
    """Resolves ``train.precision``: as wanted, or for 'auto' what suits the device.

    GPUs that have bf16 take it, other CUDA devices fp16, Apple's fp32. On CPUs bf16 can be 1.7 times faster or 2.5
    times slower, by model and processor: both are timed on a copy of the method.
    """
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device == "mps":
        return "fp32"
    log.info("train.precision auto: timing a few steps of fp32 and of bf16; --train.precision fp32 saves the wait")
    seconds = {precision: time_steps(method, batch, device, precision) for precision in ("fp32", "bf16")}
    best = min(seconds, key=seconds.get)
    log.info("train.precision auto: %s (%.3g s a step in fp32, %.3g in bf16)", best, seconds["fp32"], seconds["bf16"])
    return best


def time_steps(method: Method, batch: dict, device, precision: str, rounds: int = 3) -> float:
    """Returns the median seconds of a forward and backward pass, after one that warms up; the method stays as it is."""
    copied = copy.deepcopy(method).to(device).train()
    batch = send_to_device({k: v for k, v in batch.items() if k != "weight"}, device)
    seconds, start = [], time.monotonic()
    for _ in range(rounds + 1):
        begun = time.monotonic()
        with seeded(0), torch.autocast(torch.device(device).type, DTYPES[precision], enabled=precision != "fp32"):
            loss = copied(batch, 0, 0)["loss"]
        loss.backward()
        float(loss.detach())  # waits for the device
        seconds.append(time.monotonic() - begun)
        late = len(seconds) > 1 and time.monotonic() - start > BUDGET
        if distributed.any_process(late)[0]:  # methods may talk to each other in a step: all do as many
            break
    return statistics.median(seconds[1:])


def say_estimate(session, method: Method, plan, batch: dict, done, workers: int) -> None:
    """Logs how long the stage will take and what it will write, and warns where the disk is too small for it.

    ``session`` has device, precision and folder, ``batch`` is the first micro-batch on this process, ``done`` where the
    stage starts.
    """
    batches = plan.batches
    steps = batches.epochs * batches.steps_per_epoch - done.epoch * batches.steps_per_epoch - done.step
    images = len(batch["index"])
    begun = time.monotonic()
    plan.transform(0, batch["index"].numpy())
    loading = (time.monotonic() - begun) * batches.accumulate / max(1, workers)
    training = time_steps(method, batch, session.accelerator.device, session.precision, rounds=1) * batches.accumulate
    step = max(loading, training) if workers else loading + training
    looked_at = sum(
        item.images * (-(-batches.epochs // item.every) - done.epoch // item.every) for item in plan.evaluations
    )
    # A forward pass costs a third of a step; evaluation sees one view of an image.
    views = sum(v.shape[1] for v in batch["views"]) if "views" in batch else 1
    evaluating = looked_at * training / (3 * images * batches.accumulate * views)
    trained = sum(p.nbytes for p in method.parameters() if p.requires_grad)
    weights = sum(p.nbytes for p in method.backbone.parameters())
    still = sum(p.nbytes for p in method.parameters()) - trained
    copies = bool(session.train.ema) + (plan.keep is not None)
    kept = 3 * trained + still + copies * weights  # Adam keeps two more of each
    free = shutil.disk_usage(session.folder.path).free
    log.info(
        "%s: %d steps of about %.2g s, %s in all; checkpoint %s, exported weights %s, %s free",
        plan.label, steps, step, duration(steps * step + evaluating), size(kept), size(weights), size(free),
    )  # fmt: skip
    if 2 * kept + weights > free:
        need = size(2 * kept + weights)
        log.warning("out: %s free, but the old and the new checkpoint need %s for a moment", size(free), need)
