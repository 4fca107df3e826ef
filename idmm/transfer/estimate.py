"""How long a grid may take: a few steps of each kind of job are timed before anything starts."""

import json
import statistics
import time

import numpy as np
import torch

from idmm.calibrate import time_steps
from idmm.data.loaders import worker_count
from idmm.distributed import pick_device
from idmm.progress import duration
from idmm.stages import STAGES, Phase
from idmm.stages.assemble import Assembly, assemble
from idmm.transfer.plan import Job
from idmm.transfer.run import Grid

BUDGET = 30.0  # seconds of timing in all
CLASSES = 100  # of the classifier that is timed


class _Noise:
    """Images of noise, as large as the cache keeps them, all alike in cost."""

    def __init__(self, count: int, side: int):
        rng = np.random.default_rng(0)
        self.sizes = np.full((count, 2), side)
        self.labels = np.arange(count) % CLASSES
        self._image = torch.from_numpy(rng.integers(0, 256, (3, side, side), dtype=np.uint8))

    def image(self, i: int) -> torch.Tensor:
        return self._image


def text(grid: Grid, counts: dict[str, int]) -> str:
    """Returns the jobs that are left, what each waits for and takes, and the time for all.

    Args:
        grid: The grid.
        counts: Training images of each job, by key.
    """
    jobs, cells, failed = grid.plan.jobs, grid.plan.cells, grid.failed()
    left = {job.key: job for job in grid.plan.remaining(grid.finished())}  # a start tries those that failed again
    seconds = estimates(list(left.values()), counts)
    lines = []
    for key, job in left.items():
        waits = f"  after {jobs[job.needs].title}" if job.needs in left else ""
        again = ", failed before" if key in failed else ""
        lines.append(f"{job.stage:9} {key}  about {duration(seconds[key]):>9}  {job.title}{waits}{again}")
    missing = sum(key in left for key in cells.values())
    total = duration(sum(seconds.values()) / grid.at_once())
    lines.append(f"{len(left)} jobs for {missing} cells, {len(cells) - missing} cells are done; about {total}")
    return "\n".join(lines)


def estimates(jobs: list[Job], counts: dict[str, int]) -> dict[str, float]:
    """Returns seconds by key, training alone; jobs of one shape are timed once, all together in about 30 s."""
    shapes = {_shape(job): job for job in jobs}
    share = BUDGET / max(1, len(shapes))
    rates = {shape: _rates(job, share) for shape, job in shapes.items()}
    return {job.key: _seconds(job, counts[job.key], rates[_shape(job)]) for job in jobs}


def _shape(job: Job) -> str:
    """What a job's speed depends on."""
    config = job.config
    parts = {name: config.get(name) for name in ("model", "views", "method", "augment", "stages", "drloc", "size")}
    train = config.get("train") or {}
    parts["train"] = {name: train.get(name) for name in ("batch_size", "accumulate", "size", "precision", "device")}
    return json.dumps([job.stage, parts], sort_keys=True)


def _rates(job: Job, budget: float) -> list[float]:
    """Seconds a step of each phase of a job; a probe's step is an image."""
    parts = assemble(STAGES[job.stage].build(job.config))
    if job.stage == "probe":
        return [_probe_rate(parts)]
    return [_step(parts, phase, budget / len(parts.phases)) for phase in parts.phases]


def _step(parts: Assembly, phase: Phase, budget: float) -> float:
    """Seconds of one optimizer step with its images."""
    train, workers = parts.config.train, parts.config.data.workers
    method = parts.method(phase, parts.backbone(phase, CLASSES), max(2048, phase.batch_size), CLASSES)
    transform = parts.transform(phase, _Noise(phase.batch_size, parts.short_side(phase.size)))
    device = pick_device(parts.device, "train.device")
    begun = time.monotonic()
    batch = transform(0, np.arange(phase.batch_size // train.accumulate or 1))
    loading = time.monotonic() - begun
    precision = "fp32" if train.precision == "auto" else train.precision
    training = time_steps(method, batch, device, precision, rounds=1)
    if loading + 2 * training < budget:
        rounds = min(5, int(budget / (training + 1e-9)))
        training = statistics.median([training, time_steps(method, batch, device, precision, rounds)])
    workers = worker_count(workers, 0)[0]
    step = max(loading / workers, training) if workers else loading + training
    return step * train.accumulate


def _probe_rate(parts: Assembly) -> float:
    (phase,) = parts.phases
    model = parts.backbone(phase).eval()
    images = torch.zeros(16, parts.spec.in_chans, phase.size, phase.size)
    begun = time.monotonic()
    with torch.no_grad():
        model(images)
    return (time.monotonic() - begun) / 16


def _seconds(job: Job, images: int, rates: list[float]) -> float:
    stage = STAGES[job.stage]
    phases = stage.phases(stage.build(job.config))
    return sum(phase.steps(images) * rate for phase, rate in zip(phases, rates, strict=True))
