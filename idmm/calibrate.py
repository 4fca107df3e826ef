"""A few timed steps before the first real one: which precision is faster here, how many loader workers, how long the
run will take."""

import contextlib
import copy
import hashlib
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

from idmm import distributed, environment
from idmm.config import Train, parsing
from idmm.data.cores import cores
from idmm.data.disk import cache_folder
from idmm.data.loaders import BatchFn, most_workers, on_device, one_thread, worker_count
from idmm.errors import RunError, UserError
from idmm.files import write_json
from idmm.methods.base import Method
from idmm.progress import brief, duration, log, size
from idmm.seeding import seeded

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TIMED, CROPS = 32, 64  # images of a batch that steps are timed on: so many, or as few as make so many crops
BUDGET = 4.0  # seconds of timing at most, once each precision has had two steps
IDLE = 0.02  # of a step: loading that takes less needs no workers
CLEAR = 1.3  # times as fast: which precision it is needs no further steps
COMPILED_IN = "TORCHINDUCTOR_CACHE_DIR"  # of the environment
KEPT, COMPILED = "timed.json", "compiled"  # in the cache folder: answers to the same question; what torch compiled


@dataclass
class Sample:
    """A few images of a run's first micro-batch, and what they take."""

    loaded: dict  # what a loader worker hands over
    batch: dict  # what the method is given, on the device
    images: int  # in ``batch``
    whole: int  # images of the micro-batch
    loading: float  # seconds to make ``loaded``, on one core
    training: dict[str, float] = field(default_factory=dict)  # seconds of a forward and backward pass, by precision

    def scaled(self, seconds: float) -> float:
        """Returns what a micro-batch takes, by what these images take."""
        return seconds * self.whole / self.images

    @property
    def bytes(self) -> int:
        """Of a micro-batch, as loaded."""
        parts = [tensor for part in self.loaded.values() for tensor in (part if isinstance(part, list) else [part])]
        return int(self.scaled(sum(getattr(tensor, "nbytes", 0) for tensor in parts)))


def draw_sample(transform: BatchFn, images: np.ndarray, device) -> Sample:
    """Makes a batch of the first of a micro-batch's ``images``; of all of them on a GPU, which few would not fill."""
    few = len(images)
    with one_thread():  # as workers load
        if torch.device(device).type == "cpu":
            one = on_device(transform(0, images[:1]), device)
            crops = sum(part.shape[1] for part in one.get("views", [])) or 1
            few = min(few, TIMED, max(1, CROPS // crops))
        began = time.monotonic()
        loaded = transform(0, images[:few])
        seconds = time.monotonic() - began
    return Sample(loaded, on_device(loaded, device), few, len(images), seconds)


def choose_device(train: Train) -> str:
    """Resolves ``train.device`` to cuda, mps or cpu; UserError where it is not there, or not for the precision."""
    device = distributed.pick_device(train.device, "train.device")
    if train.precision == "fp16" and device != "cuda":
        wanted = "wanted bf16, fp32 or auto"
        raise UserError(f"train.precision: fp16 needs a CUDA device, this run is on {device}; {wanted}")
    return device


def choose_precision(wanted: str, method: Method, sample: Sample, device: str, config: Any = None) -> str:
    """Resolves ``train.precision``: as wanted, or for 'auto' what suits the device.

    GPUs that have bf16 take it, other CUDA devices fp16, Apple's fp32. On CPUs bf16 can be 1.7 times faster or 2.5
    times slower, by model and processor: both are timed on a copy of the method, unless that was done before for a run
    like the one of ``config``.
    """
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device == "mps":
        return "fp32"
    kept = None if config is None else _Remembered(config, method, sample, device)
    seconds, how = distributed.broadcast(kept and kept.read()), "as timed before"
    if seconds is None:
        log.info("train.precision auto: timing a few steps of fp32 and of bf16; --train.precision fp32 saves the wait")
        timed, how = time_precisions(method, sample.loaded, device, ("fp32", "bf16")), ""
        sample.training.update({precision: statistics.median(times) for precision, times in timed.items()})
        seconds = {precision: min(times) for precision, times in timed.items()}  # other work only ever adds to them
        if kept is not None and distributed.rank() == 0:
            kept.write(seconds)
    best = min(seconds, key=seconds.get)
    found = (best, f", {how}" if how else "", sample.images, seconds["fp32"], seconds["bf16"])
    log.info("train.precision auto: %s%s (%d images take %.3g s in fp32, %.3g in bf16)", *found)
    return best


class _Remembered:
    """What precisions took in runs that are alike, in the cache folder; harmless where it is lost or damaged."""

    def __init__(self, config: Any, method: Method, sample: Sample, device: str):
        kept = config.data.cache in ("auto", "disk")
        self.path = cache_folder(config.data.cache_dir) / KEPT if kept else None
        tensors = [*method.parameters(), *method.buffers()]
        about = {
            **{name: parsing.plain(config).get(name) for name in ("model", "method", "views", "augment", "drloc")},
            "tensors": [len(tensors), sum(tensor.numel() for tensor in tensors).bit_length()],  # folds differ a little
            "learn": sum(tensor.requires_grad for tensor in tensors),
            "batch": {name: [tuple(v.shape) for v in (part if isinstance(part, list) else [part])]
                      for name, part in sorted(sample.batch.items()) if name != "weight"},
            "versions": [torch.__version__, timm.__version__],
            "here": [device, environment.processor(), cores(), torch.get_num_threads(), distributed.world()],
        }  # fmt: skip
        self.key = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()

    def read(self) -> dict[str, float] | None:
        """Returns the seconds of each precision; None where they are not known."""
        found = self._all().get(self.key)
        whole = isinstance(found, dict) and set(found) == {"fp32", "bf16"}
        return found if whole and all(isinstance(s, float) and s > 0 for s in found.values()) else None

    def write(self, seconds: dict[str, float]) -> None:
        """Keeps them, for all runs on this cache folder; where it cannot be written, for none."""
        if self.path is not None:
            with contextlib.suppress(RunError, OSError):
                write_json(self.path, {**self._all(), self.key: seconds})

    def _all(self) -> dict:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.path.read_text()) if self.path is not None else {}
            return found if isinstance(found, dict) else {}
        return {}


def keep_compiled(config: Any) -> None:
    """Has torch keep what it compiles in the cache folder, unless that cannot be written or the environment names
    another place."""
    from torch._inductor.runtime.runtime_utils import default_cache_dir  # torch names it in the environment when loaded

    named = os.environ.get(COMPILED_IN)
    if config.data.cache not in ("auto", "disk") or named not in (None, os.path.abspath(default_cache_dir())):
        return
    folder = cache_folder(config.data.cache_dir).absolute() / COMPILED
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ[COMPILED_IN] = str(folder)


def kept(folder: Path) -> dict[Path, int]:
    """Returns the files that precisions and ``train.compile`` keep in a cache folder, with their bytes."""
    files = [folder / KEPT, *(folder / COMPILED).rglob("*")]
    found = {}
    for path in files:
        with contextlib.suppress(OSError):  # not there, or being removed
            if path.is_file():
                found[path] = path.stat().st_size
    return found


def clear(folder: Path) -> int:
    """Removes it; returns the bytes that were freed. RunError: it cannot be removed."""
    found = kept(folder)
    try:
        (folder / KEPT).unlink(missing_ok=True)
        if (folder / COMPILED).is_dir():
            shutil.rmtree(folder / COMPILED)
    except OSError as error:
        raise RunError(f"{folder}: cannot be removed ({error.strerror})") from None
    return sum(found.values())


def time_precisions(
    method: Method,
    batch: dict,
    device,
    precisions: Sequence[str],
    rounds: int = 3,
    budget: float = BUDGET,
) -> dict[str, list[float]]:
    """Returns the seconds of forward and backward passes in each precision on a copy.

    The precisions take turns. One step each warms up, then come ``rounds``, or as few as two where the answer is
    :data:`CLEAR`, or one where they take longer than ``budget`` (seconds).
    """
    copied = copy.deepcopy(method).to(device).train()
    found: dict[str, list[float]] = {precision: [] for precision in precisions}
    start = time.monotonic()
    for number in range(rounds + 1):
        for precision, times in found.items():
            times.append(_timed_step(copied, batch, device, precision))
        if not number:
            continue
        fastest = [min(times[1:]) for times in found.values()]
        clear = number > 1 and max(fastest) >= CLEAR * min(fastest)
        late = time.monotonic() - start > budget
        if distributed.any_process(clear or late)[0]:  # methods may talk to each other in a step: all do as many
            break
    return {precision: times[1:] for precision, times in found.items()}


def time_steps(method: Method, batch: dict, device, precision: str, **how) -> float:
    """Returns the median seconds of a forward and backward pass on a copy, see :func:`time_precisions`."""
    return statistics.median(time_precisions(method, batch, device, (precision,), **how)[precision])


def compile_ahead(method: Method, sample: Sample, device, precision: str) -> float:
    """Has torch compile what the method will run, on a copy; returns the seconds.

    From two batches of different sizes it compiles code for batches of all sizes, as an epoch's last is smaller.
    """
    copied, began = copy.deepcopy(method).to(device).train(), time.monotonic()
    for count in (sample.images, max(2, sample.images - 1)):  # two steps in each process: they may talk to each other
        _timed_step(copied, _first(sample.batch, count), device, precision)
    return time.monotonic() - began


def _first(batch: dict, count: int) -> dict:
    """Returns the batch of the first images."""
    return {name: [v[:count] for v in part] if isinstance(part, list) else part[:count] for name, part in batch.items()}


def _timed_step(method: Method, batch: dict, device, precision: str) -> float:
    """Makes a forward and a backward pass; returns its seconds."""
    begun = time.monotonic()
    batch = on_device({k: v for k, v in batch.items() if k != "weight"}, device)
    with seeded(0), torch.autocast(torch.device(device).type, DTYPES[precision], enabled=precision != "fp32"):
        loss = method(batch, 0, 0)["loss"]
    loss.backward()
    float(loss.detach())  # waits for the device
    return time.monotonic() - begun


def timing_seconds(step: float, precisions: bool) -> float:
    """Returns how long a run times steps before its first one, by what a forward and backward pass of the images that
    are timed takes (seconds)."""
    timed = 2 if precisions else 1
    return timed * max(2 * step, min(4 * step, BUDGET))


def step_seconds(loading: float, training: float, workers: int, device: str) -> float:
    """Returns what a micro-batch takes, by what making it takes on one core and a forward and backward pass (seconds).

    On a CPU the loader workers take their time from the cores that train.
    """
    if not workers:
        return loading + training
    return max(loading / workers, training + (loading / cores() if device == "cpu" else 0.0))


def needed_workers(loading: float, training: float, most: int) -> int:
    """Returns how many loader workers, ``most`` at most, keep up with training on a CPU: as few as do, since they run
    on the cores that train, and none where loading (seconds of a core) takes next to nothing of a step (seconds)."""
    return 0 if loading < IDLE * training else min(most, math.ceil(2 * loading / max(1e-9, training)))


def free_workers(device: str, loading: float, training: float) -> int:
    """Returns what ``data.workers`` null comes to: on a CPU as few as keep up with training, else as many as there may
    be."""
    most = most_workers()
    return needed_workers(loading, training, most) if device == "cpu" else most


def evaluation_seconds(step: float, loading: float, batch: dict) -> float:
    """Returns what evaluating an image costs, by what a micro-batch costs in training (seconds).

    A forward pass is a third of a step, and evaluation sees one view of an image, as large as the largest crops.
    """
    pixels = [(v.shape[1], v.shape[-2] * v.shape[-1]) for v in batch.get("views", [])]
    views = sum(count * area for count, area in pixels) / max(area for _, area in pixels) if pixels else 1
    return (step / 3 + loading) / (len(batch["index"]) * views)


def time_training(loop) -> tuple[float, float]:
    """Compiles what is to be compiled, and times a few steps where the estimate or the number of workers depends on it.

    Returns:
        Seconds to make the loop's ``sample`` on one core, and of a forward and backward pass on it, 0 where not timed.
    """
    session, sample, device = loop.session, loop.sample, loop.accelerator.device
    if session.train.compile and loop.left:
        seconds = compile_ahead(loop.method, sample, device, session.precision)
        place = os.environ.get(COMPILED_IN)
        log.info("train.compile: took %s%s", duration(seconds), f"; kept in '{place}' for later runs" if place else "")
        sample.training.clear()  # that was not compiled
    training = 0.0
    if loop.left and (session.train.minutes is None or _free_workers(loop)):
        training = sample.training.get(session.precision) or time_steps(
            loop.method, sample.loaded, device, session.precision, rounds=2, budget=BUDGET / 2
        )
    return distributed.broadcast((sample.loading, training))


def _free_workers(loop) -> bool:
    return loop.session.workers is None and loop.accelerator.device.type == "cpu"


def choose_workers(loop) -> int:
    """Resolves ``data.workers`` by what loading and training take; what it chose goes to the log."""
    wanted, sample = loop.session.workers, loop.sample
    if wanted is None:
        wanted = free_workers(loop.accelerator.device.type, *loop.timed)
    if _free_workers(loop) and loop.left:
        loading, training = (brief(sample.scaled(seconds)) for seconds in loop.timed)
        said = "data.workers: %d, as loading a batch takes %s s of a core, and training on it %s s"
        log.info(said, wanted, loading, training)
    workers, why = worker_count(wanted, sample.bytes)
    if why:
        log.warning("%s", why)
    return workers


def say_estimate(loop) -> None:
    """Logs how long a stage will take from where its loop stands and what it will write; warns where the disk is too
    small. ``train.minutes`` says by itself how long."""
    session, plan, time_for = loop.session, loop.plan, ""
    if not loop.left:  # stopped after its last step, or its last epoch
        return
    if session.train.minutes is None:
        step, evaluating = _expected(loop)
        time_for = f" of about {brief(step)} s, {duration(loop.left * step + evaluating)} in all"
    kept, weights = written_bytes(loop.method, bool(session.train.ema) + (plan.keep is not None))
    free = shutil.disk_usage(session.folder.path).free
    log.info(
        "%s: %d steps%s; checkpoint %s, exported weights %s, %s free",
        plan.label, loop.left, time_for, size(kept), size(weights), size(free),
    )  # fmt: skip
    if 2 * kept + weights > free:
        need = size(2 * kept + weights)
        log.warning("out: %s free, but the old and the new checkpoint need %s for a moment", size(free), need)


def written_bytes(method: Method, copies: int) -> tuple[int, int]:
    """Returns the bytes of a checkpoint, with so many more ``copies`` of the backbone, and of the exported weights."""
    trained = sum(p.nbytes for p in method.parameters() if p.requires_grad)
    still = sum(p.nbytes for p in method.parameters() if not p.requires_grad)
    weights = sum(p.nbytes for p in method.backbone.parameters())
    return 3 * trained + still + copies * weights, weights  # Adam keeps two more of each


def _expected(loop) -> tuple[float, float]:
    """Returns the seconds of a step and of the evaluations that are to come."""
    plan, batches, device = loop.plan, loop.batches, loop.accelerator.device.type
    loading, training = loop.timed
    sample = loop.sample
    step = step_seconds(sample.scaled(loading), sample.scaled(training), loop.workers, device) * batches.accumulate
    each = evaluation_seconds(training, loading, sample.batch)
    evaluating = sum(
        item.images * (-(-batches.epochs // item.every) - loop.position.epoch // item.every) * each
        for item in plan.evaluations
    )
    return step, evaluating
