"""A few timed steps before the first real one: which precision is faster here, how long the run will take."""

import copy
import itertools
import shutil
import statistics
import time
from collections.abc import Iterator

import torch

from idmm import distributed
from idmm.config import Train
from idmm.data.loaders import Finish, on_device, one_thread
from idmm.errors import UserError
from idmm.methods.base import Method
from idmm.progress import brief, duration, log, size
from idmm.seeding import seeded
from idmm.shards import row_shards

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TIMED = 32  # images of a batch that precisions are compared on
BUDGET = 6.0  # seconds of timing at most, once each precision has had two steps


def choose_device(train: Train) -> str:
    """Resolves ``train.device`` to cuda, mps or cpu; UserError where it is not there, or not for the precision."""
    device = distributed.pick_device(train.device, "train.device")
    if train.precision == "fp16" and device != "cuda":
        wanted = "wanted bf16, fp32 or auto"
        raise UserError(f"train.precision: fp16 needs a CUDA device, this run is on {device}; {wanted}")
    return device


def choose_precision(wanted: str, method: Method, batch: dict, device: str, finish: Finish | None = None) -> str:
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
    batch = on_device(batch, device, finish)
    few = {name: [v[:TIMED] for v in part] if isinstance(part, list) else part[:TIMED] for name, part in batch.items()}
    again = itertools.repeat(few)
    seconds = {precision: time_steps(method, again, device, precision) for precision in ("fp32", "bf16")}
    best = min(seconds, key=seconds.get)
    found = (best, len(few["index"]), seconds["fp32"], seconds["bf16"])
    log.info("train.precision auto: %s (%d images take %.3g s in fp32, %.3g in bf16)", *found)
    return best


def time_steps(
    method: Method,
    batches: Iterator[dict],
    device,
    precision: str,
    rounds: int = 3,
    budget: float = BUDGET,
    finish: Finish | None = None,
) -> float:
    """Returns the median seconds of a forward and backward pass on a copy, waiting for its batch included.

    One step warms up, then come ``rounds``, or as few as one where they take longer than ``budget`` (seconds).
    """
    copied = copy.deepcopy(method).to(device).train()
    seconds, start = [], time.monotonic()
    for _ in range(rounds + 1):
        begun = time.monotonic()
        batch = on_device({k: v for k, v in next(batches).items() if k != "weight"}, device, finish)
        with seeded(0), torch.autocast(torch.device(device).type, DTYPES[precision], enabled=precision != "fp32"):
            loss = copied(batch, 0, 0)["loss"]
        loss.backward()
        float(loss.detach())  # waits for the device
        seconds.append(time.monotonic() - begun)
        late = len(seconds) > 1 and time.monotonic() - start > budget
        if distributed.any_process(late)[0]:  # methods may talk to each other in a step: all do as many
            break
    return statistics.median(seconds[1:])


def timing_seconds(step: float, precisions: bool) -> float:
    """Returns how long a run times steps before its first one, by what a forward and backward pass takes (seconds)."""
    budgets = [BUDGET / 2] + ([BUDGET, BUDGET] if precisions else [])
    return sum(max(2 * step, min(4 * step, budget)) for budget in budgets)


def evaluation_seconds(step: float, loading: float, batch: dict) -> float:
    """Returns what evaluating an image costs, by what a micro-batch costs in training (seconds).

    A forward pass is a third of a step, and evaluation sees one view of an image, as large as the largest crops.
    """
    pixels = [(v.shape[1], v.shape[-2] * v.shape[-1]) for v in batch.get("views", [])]
    views = sum(count * area for count, area in pixels) / max(area for _, area in pixels) if pixels else 1
    return (step / 3 + loading) / (len(batch["index"]) * views)


def say_estimate(loop, loader: Iterator[dict]) -> list[dict]:
    """Logs how long a stage will take from where its loop stands and what it will write; warns where the disk is too
    small.

    Returns the batches that were taken from the ``loader`` to time steps; none where ``train.minutes`` says how long.
    """
    session, plan, at, drawn, time_for = loop.session, loop.plan, loop.position, [], ""
    steps = loop.steps - at.epoch * plan.batches.steps_per_epoch - at.step
    if not steps:  # stopped after its last step, or its last epoch
        return []
    if session.train.minutes is None:
        step, evaluating, drawn = _expected(loop, loader)
        time_for = f" of about {brief(step)} s, {duration(steps * step + evaluating)} in all"
    kept, weights = written_bytes(loop.method, bool(session.train.ema) + (plan.keep is not None))
    free = shutil.disk_usage(session.folder.path).free
    log.info(
        "%s: %d steps%s; checkpoint %s, exported weights %s, %s free",
        plan.label, steps, time_for, size(kept), size(weights), size(free),
    )  # fmt: skip
    if 2 * kept + weights > free:
        need = size(2 * kept + weights)
        log.warning("out: %s free, but the old and the new checkpoint need %s for a moment", size(free), need)
    return drawn


def written_bytes(method: Method, copies: int) -> tuple[int, int]:
    """Returns the bytes of a checkpoint, with so many more ``copies`` of the backbone, and of the exported weights."""
    shards, trained, still = row_shards(method), 0, 0
    for name, p in method.named_parameters():
        size = p.element_size() * p[:1].numel() * shards[name].total if name in shards else p.nbytes
        trained, still = trained + size * p.requires_grad, still + size * (not p.requires_grad)
    weights = sum(p.nbytes for p in method.backbone.parameters())
    return 3 * trained + still + copies * weights, weights  # Adam keeps two more of each


def _expected(loop, loader: Iterator[dict]) -> tuple[float, float, list[dict]]:
    """Returns the seconds of a step and of the evaluations that are to come, and what it took of the loader.

    Steps are timed on what the ``loader`` gives, while its workers make the next batches as they will all the time:
    on a CPU both want the same cores.
    """
    session, plan, batches, drawn = loop.session, loop.plan, loop.batches, []

    def remembered() -> Iterator[dict]:
        for batch in loader:
            drawn.append(batch)
            yield batch
        yield from itertools.repeat(drawn[-1])

    device, precision = session.accelerator.device, session.precision
    waited = time_steps(loop.method, remembered(), device, precision, budget=BUDGET / 2, finish=plan.finish)
    begun = time.monotonic()
    with one_thread():  # as workers load
        plan.transform(0, drawn[0]["index"].numpy())
    loading = time.monotonic() - begun
    step = max(loading / max(1, loop.workers), waited) * batches.accumulate  # what is loaded beforehand is gone in time
    seen = on_device(drawn[0], device, plan.finish)
    each = evaluation_seconds(waited if loop.workers else max(0.0, waited - loading), loading, seen)
    evaluating = sum(
        item.images * (-(-batches.epochs // item.every) - loop.position.epoch // item.every) * each
        for item in plan.evaluations
    )
    return step, evaluating, drawn
