"""How long a grid may take: a few steps of each kind of job are timed before anything starts."""

import json
import statistics
import time

import numpy as np
import torch

from idmm import options
from idmm.calibrate import time_steps
from idmm.config import FinetuneConfig, PretrainConfig, Stage, resolved_stages
from idmm.data.augment import TrainTransform
from idmm.data.loaders import worker_count
from idmm.data.views import MultiCropTransform, short_side_bound
from idmm.features import pick_device
from idmm.methods import Facts, create_method
from idmm.methods.finetune import Finetune
from idmm.progress import duration
from idmm.stages.common import describe_backbone, localization
from idmm.transfer.plan import Job, remaining
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
    left, failed = remaining(grid.laid, grid.finished()), grid.failed()  # a start tries those again
    seconds = estimates(left, counts)
    names = {job.key: job.title for job in grid.laid.jobs.values()}
    lines = []
    for job in left:
        waits = f"  after {names[job.needs]}" if job.needs in {j.key for j in left} else ""
        again = ", failed before" if job.key in failed else ""
        lines.append(f"{job.stage:9} {job.key}  about {duration(seconds[job.key]):>9}  {job.title}{waits}{again}")
    cells = sum(key in {job.key for job in left} for key in grid.laid.cells.values())
    total = duration(sum(seconds.values()) / grid.at_once())
    lines.append(f"{len(left)} jobs for {cells} cells, {len(grid.laid.cells) - cells} cells are done; about {total}")
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
    """Seconds a step of each stage of a job; a probe's are seconds an image."""
    if job.stage == "probe":
        return [_probe_rate(job)]
    kind = PretrainConfig if job.stage == "pretrain" else FinetuneConfig
    config = options.build(kind, {**job.config, "out": "-"})
    if job.stage == "pretrain":
        return [_pretrain_rate(config, budget)]
    stages = resolved_stages(config)
    return [_finetune_rate(config, stage, budget / len(stages)) for stage in stages]


def _pretrain_rate(config: PretrainConfig, budget: float) -> float:
    described, size = describe_backbone(config), config.views.size
    backbone = described.build(size, config.seed)
    facts = Facts(2048, config.train.batch_size, config.train.epochs, 1000, CLASSES)
    extra = localization(config, backbone, size, described, config.train.epochs)
    method = create_method(backbone, facts, config.method, extra)
    store = _Noise(config.train.batch_size, short_side_bound(size, min(g.scale[0] for g in config.views.crops)))
    return _step(config, method, MultiCropTransform(store, config.views, described.mean, described.std, 0), budget)


def _finetune_rate(config: FinetuneConfig, stage: Stage, budget: float) -> float:
    described = describe_backbone(config)
    model = described.build(stage.size, config.seed, CLASSES)
    extra = localization(config, model, stage.size, described, stage.epochs)
    method = Finetune(model, config.augment, config.model.freeze, extra)
    store = _Noise(stage.batch_size, short_side_bound(stage.size, config.augment.scale[0]))
    maker = TrainTransform(store, config.augment, stage.size, described.mean, described.std, key=0)
    return _step(config, method, maker, budget, stage.batch_size)


def _step(config, method, maker, budget: float, batch_size: int | None = None) -> float:
    """Seconds of one optimizer step with its images."""
    batch_size = (batch_size or config.train.batch_size) // config.train.accumulate or 1
    device = pick_device(config.train.device, "train.device")
    begun = time.monotonic()
    batch = maker(0, np.arange(batch_size))
    loading = time.monotonic() - begun
    precision = "fp32" if config.train.precision == "auto" else config.train.precision
    training = time_steps(method, batch, device, precision, rounds=1)
    if loading + 2 * training < budget:
        rounds = min(5, int(budget / (training + 1e-9)))
        training = statistics.median([training, time_steps(method, batch, device, precision, rounds)])
    workers = worker_count(config.data.workers, 0)[0]
    step = max(loading / workers, training) if workers else loading + training
    return step * config.train.accumulate


def _probe_rate(job: Job) -> float:
    config = options.build(FinetuneConfig, {k: v for k, v in job.config.items() if k != "size"})
    described = describe_backbone(config)
    model = described.build(job.config["size"], 0).eval()
    images = torch.zeros(16, described.in_chans, job.config["size"], job.config["size"])
    begun = time.monotonic()
    with torch.no_grad():
        model(images)
    return (time.monotonic() - begun) / 16


def _seconds(job: Job, images: int, rates: list[float]) -> float:
    if job.stage == "probe":
        return 2 * images * rates[0]
    kind = PretrainConfig if job.stage == "pretrain" else FinetuneConfig
    config = options.build(kind, {**job.config, "out": "-"})
    if job.stage == "pretrain":
        return config.train.epochs * -(-images // config.train.batch_size) * rates[0]
    return sum(
        stage.epochs * -(-images // stage.batch_size) * rate
        for stage, rate in zip(resolved_stages(config), rates, strict=True)
    )
