"""How long a grid may take: a few steps of each kind of job are timed before anything starts."""

import copy
import json
import time
from typing import NamedTuple

import numpy as np
import torch

from idmm import distributed
from idmm.calibrate import (
    choose_precision,
    draw_sample,
    evaluation_seconds,
    free_workers,
    step_seconds,
    time_steps,
    timing_seconds,
)
from idmm.data.dense import DenseSplits
from idmm.data.device_images import DeviceImages, made_there
from idmm.data.device_views import DeviceViews, ViewDraws
from idmm.data.images import bands_of
from idmm.distributed import pick_device
from idmm.progress import duration
from idmm.stages import STAGES, Phase
from idmm.stages.assemble import Assembly, assemble
from idmm.stages.values import assumed
from idmm.transfer.plan import Job
from idmm.transfer.preflight import Counts
from idmm.transfer.run import Grid

BUDGET = 30.0  # seconds of timing in all
CLASSES = 100  # of the classifier that is timed
# Seconds of a core of a 2.x GHz server: the first job's imports and first calls; what else a job does beside its steps.
STARTING, AROUND = 5.0, 0.4


class _Noise:
    """Stands for an ImageStore: images of noise, as large as the cache keeps them."""

    def __init__(self, count: int, side: int, channels: int, cache: str):
        rng = np.random.default_rng(0)
        self.channels, self.cache = channels, cache
        self.pixel_bytes = np.full(count, channels)
        self.sizes = np.full((count, 2), side)
        self.labels = np.arange(count) % CLASSES
        self._image = torch.from_numpy(rng.integers(0, 256, (channels, side, side), dtype=np.uint8))

    def image(self, i: int) -> torch.Tensor:
        return self._image


class Rates(NamedTuple):
    """Seconds that a phase of a job takes."""

    step: float  # an optimizer step; an image in a probe
    image: float = 0.0  # looked at between epochs
    start: float = 0.0  # until the first step: the model, and the steps that a run times before it


def text(grid: Grid, counts: dict[str, Counts]) -> str:
    """Returns the jobs that are left, what each waits for and takes, and the time for all; ``counts``: the images of
    each job by its key."""
    jobs, cells, failed = grid.plan.jobs, grid.plan.cells, grid.failed()
    left = {job.key: job for job in grid.plan.remaining(grid.finished())}  # a start tries those that failed again
    seconds = _estimates(list(left.values()), counts)
    lines = []
    for key, job in left.items():
        waits = f"  after {jobs[job.needs].title}" if job.needs in left else ""
        again = ", failed before" if key in failed else ""
        lines.append(f"{job.stage:9} {key}  about {duration(seconds[key]):>9}  {job.title}{waits}{again}")
    missing = sum(key in left for key in cells.values())
    total = duration((STARTING if left else 0) + sum(seconds.values()) / grid.parallel())
    lines.append(f"{len(left)} jobs for {missing} cells, {len(cells) - missing} cells are done; about {total}")
    return "\n".join(lines)


def _estimates(jobs: list[Job], counts: dict[str, Counts]) -> dict[str, float]:
    """Seconds by the jobs' keys, reading images left out; jobs of one shape are timed once, all in about 30 s, those
    with ``train.minutes`` not at all."""
    seconds = {job.key: 60 * minutes for job in jobs if (minutes := (job.config.get("train") or {}).get("minutes"))}
    timed = [job for job in jobs if job.key not in seconds]
    shapes = {_shape(job): job for job in timed}
    share = BUDGET / max(1, len(shapes))
    rates = {shape: _rates(job, share, counts[job.key].known) for shape, job in shapes.items()}
    for job in timed:
        stage, images = STAGES[job.stage], counts[job.key]
        config = stage.build(job.config)
        seconds[job.key] = AROUND
        for phase, rate in zip(stage.phases(config), rates[_shape(job)], strict=True):
            looks = stage.looks(config, phase, images.train, images.held) * rate.image
            seconds[job.key] += images.runs * (rate.start + phase.steps(images.train) * rate.step + looks)
    return seconds


def _shape(job: Job) -> str:
    """What a job's speed depends on."""
    config = job.config
    parts = {name: config.get(name) for name in ("model", "views", "method", "augment", "stages", "drloc", "size")}
    train = config.get("train") or {}
    data = config.get("data") or {}
    parts["data"] = {name: data.get(name) for name in ("in_chans", "bands", "cache", "workers")}
    parts["train"] = {name: train.get(name) for name in ("batch_size", "accumulate", "size", "precision", "device")}
    return json.dumps([job.stage, parts], sort_keys=True)


def _rates(job: Job, budget: float, known: DenseSplits | None) -> list[Rates]:
    """What each phase of a job takes; ``known``: its images' boxes or masks."""
    parts = assemble(STAGES[job.stage].build(job.config))
    parts.suppose(known, parts.phases[0].batch_size)
    timed = _probe_step if job.stage == "probe" else training_rates
    return [timed(parts, phase, budget / len(parts.phases)) for phase in parts.phases]


def training_rates(parts: Assembly, phase: Phase, budget: float) -> Rates:
    """Times a few steps of a phase, on noise as large as its images, for about ``budget`` seconds.

    Raises:
        RunError: Memory does not suffice for a step.
    """
    with distributed.enough_memory(distributed.step_too_large(phase.batch_size, parts.config.train.accumulate)):
        return _step_rates(parts, phase, budget)


def _step_rates(parts: Assembly, phase: Phase, budget: float) -> Rates:
    parts, train, began = copy.copy(parts), parts.config.train, time.monotonic()
    parts.spec = spec = assumed(parts.spec)
    pictures = bands_of(spec.in_chans, spec.bands) is None
    channels = 3 if pictures else spec.in_chans
    noise = _Noise(phase.batch_size, parts.bound(phase.size), channels, parts.config.data.cache)
    method = parts.method(phase, parts.backbone(phase, CLASSES), max(2048, phase.batch_size), CLASSES)
    transform, finish = parts.transform(phase, noise), None
    built = time.monotonic() - began
    device = pick_device(parts.device, "train.device")
    if made_there(torch.device(device), transform)[0]:
        views = DeviceViews(transform, DeviceImages(noise, torch.device(device)))
        transform, finish = ViewDraws(transform), views
    sample = draw_sample(transform, np.arange(phase.batch_size // train.accumulate or 1), device, finish)
    timed_later = train.precision == "auto" and device == "cpu"
    precision = "fp32" if timed_later else choose_precision(train.precision, method, sample, device)
    spent = time.monotonic() - began - built
    training = time_steps(method, sample.loaded, device, precision, rounds=5, budget=budget - spent, finish=finish)
    loading, workers = sample.loading, parts.config.data.workers
    if workers is None:
        workers = free_workers(device, loading, training, drawn=finish is not None)
    step = step_seconds(sample.scaled(loading), sample.scaled(training), workers, device)
    timed = timing_seconds(training, timed_later)
    return Rates(step * train.accumulate, evaluation_seconds(training, loading, sample.batch), 2 * built + timed)


def _probe_step(parts: Assembly, phase: Phase, budget: float) -> Rates:
    model = parts.backbone(phase).eval()
    images = torch.zeros(16, parts.spec.in_chans, phase.size, phase.size)
    begun = time.monotonic()
    with torch.no_grad():
        model(images)
    return Rates((time.monotonic() - begun) / 16)
