"""How long a grid may take: a few steps of each kind of job are timed before anything starts."""

import json
import statistics
import time

import numpy as np
import torch

from idmm.calibrate import time_steps
from idmm.config import FinetuneConfig, PretrainConfig, resolved_stages
from idmm.data.augment import TrainImages
from idmm.data.loaders import worker_count
from idmm.data.views import ViewMaker, short_side_bound
from idmm.features import pick_device
from idmm.methods import Facts, create_method
from idmm.methods.finetune import Finetune
from idmm.progress import duration
from idmm.stages.common import describe_backbone, localization
from idmm.transfer.plan import Job
from idmm.transfer.run import Grid
from idmm.transfer.stages import STAGES

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
    found = {}
    for job in jobs:
        passes, stage = rates[_shape(job)], STAGES[job.stage]
        found[job.key] = sum(
            times * -(-counts[job.key] // batch_size) * rate
            for (times, batch_size), rate in zip(stage.passes(stage.build(job.config)), passes, strict=True)
        )
    return found


def _shape(job: Job) -> str:
    """What a job's speed depends on."""
    config = job.config
    parts = {name: config.get(name) for name in ("model", "views", "method", "augment", "stages", "drloc", "size")}
    train = config.get("train") or {}
    parts["train"] = {name: train.get(name) for name in ("batch_size", "accumulate", "size", "precision", "device")}
    return json.dumps([job.stage, parts], sort_keys=True)


def _rates(job: Job, budget: float) -> list[float]:
    """Seconds a step of each of a job's passes."""
    config = STAGES[job.stage].build(job.config)
    return _TIMED[job.stage](config, budget)


def _pretrain_rates(config: PretrainConfig, budget: float) -> list[float]:
    described, size = describe_backbone(config), config.views.size
    backbone = described.build(size, config.seed)
    facts = Facts(2048, config.train.batch_size, config.train.epochs, 1000, CLASSES)
    extra = localization(config, backbone, size, described, config.train.epochs)
    method = create_method(backbone, facts, config.method, extra)
    store = _Noise(config.train.batch_size, short_side_bound(size, min(g.scale[0] for g in config.views.crops)))
    maker = ViewMaker(store, config.views, described.mean, described.std, 0)
    return [_step(config, method, maker, budget, config.train.batch_size)]


def _finetune_rates(config: FinetuneConfig, budget: float) -> list[float]:
    described, stages, rates = describe_backbone(config), resolved_stages(config), []
    for stage in stages:
        model = described.build(stage.size, config.seed, CLASSES)
        extra = localization(config, model, stage.size, described, stage.epochs)
        method = Finetune(model, config.augment, config.model.freeze, extra)
        store = _Noise(stage.batch_size, short_side_bound(stage.size, config.augment.scale[0]))
        maker = TrainImages(store, config.augment, stage.size, described.mean, described.std, key=0)
        rates.append(_step(config, method, maker, budget / len(stages), stage.batch_size))
    return rates


def _probe_rates(config: FinetuneConfig, budget: float) -> list[float]:
    described = describe_backbone(config)
    model = described.build(config.size, 0).eval()
    images = torch.zeros(16, described.in_chans, config.size, config.size)  # [16, C, H, W]
    begun = time.monotonic()
    with torch.no_grad():
        model(images)
    return [(time.monotonic() - begun) / len(images)]


_TIMED = {"pretrain": _pretrain_rates, "finetune": _finetune_rates, "probe": _probe_rates}


def _step(config, method, maker, budget: float, batch_size: int) -> float:
    """Seconds of one optimizer step with its images."""
    batch_size = batch_size // config.train.accumulate or 1
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
