"""From image numbers to batches: the order of an epoch, its split into micro-batches, the loader
workers."""

import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from numpy import ndarray
from torch.utils.data import DataLoader, Dataset

from idmm import distributed
from idmm.data.device_views import DeviceViews
from idmm.data.image_store import ImageStore
from idmm.data.images import CentreCrop, unit
from idmm.data.parallel import cores
from idmm.data.views import normalise, numbered, resize
from idmm.errors import RunError
from idmm.seeding import numpy_rng

log = logging.getLogger(__name__)

BatchFn = Callable[[int, ndarray], dict]  # (epoch, image numbers) -> a batch
AHEAD = 2  # finished batches that a worker holds
# open files of a worker (9 were measured) and of the rest of a process
WORKER_FILES = 16
OTHER_FILES = 64


@dataclass(frozen=True)
class BatchPlan:
    """The images of each step."""

    count: int  # images in all
    batch_size: int  # images per step, over all processes and micro-batches
    epochs: int
    seed: int  # of the order, another for each stage
    rank: int = 0  # this process
    world: int = 1  # processes
    accumulate: int = 1  # micro-batches per step, each a forward and backward pass

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch. The last, smaller batch is kept."""
        return -(-self.count // self.batch_size)

    def step_size(self, step: int) -> int:
        """Images of a step."""
        return min(self.batch_size, self.count - step * self.batch_size)

    def step_images(self, epoch: int, step: int, order: ndarray | None = None) -> ndarray:
        """Return the numbers of the images of one step over all processes, in order."""
        if order is None:
            order = numpy_rng(self.seed, "order", epoch).permutation(self.count)
        else:
            order = order
        return order[step * self.batch_size : (step + 1) * self.batch_size]

    def micro_batches(self, images: ndarray) -> list[tuple[ndarray, float]]:
        """Split a step's images into this process's micro-batches.

        Returns:
            For each the image numbers and the factor for its mean loss. With it the gradient,
            averaged over processes, is that of the mean over all images of the step, however
            unevenly they divide. A process without an image runs the first one at factor 0, because
            it has to take part.
        """
        mine = np.array_split(images[self.rank :: self.world], self.accumulate)
        weight = self.world / len(images)
        return [(part, len(part) * weight) if len(part) else (images[:1], 0.0) for part in mine]


class _Batches(Dataset):
    """A map-style dataset of whole batches. A batch's key is its epoch, image numbers and
    weight."""

    def __init__(self, batch_fn: BatchFn):
        self.batch_fn = batch_fn

    def __getitem__(self, request: tuple[int, ndarray, float]) -> dict:
        epoch, indices, weight = request
        try:
            # reductions round differently on more. Results must not depend on the workers
            with one_thread():
                return {**self.batch_fn(epoch, indices), "weight": weight}
        except RunError as error:  # a worker's exception would come wrapped in its traceback
            return {"failed": str(error)}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def training_batches(
    batch_fn: BatchFn, plan: BatchPlan, workers: int, epoch: int = 0, step: int = 0
) -> Generator[dict, None, None]:
    """Yield the micro-batches of all steps from (epoch, step) to the stage's end.

    One loader serves the whole stage: workers start once, not every epoch. A device that makes the
    views needs none. If it runs out of memory, workers continue. A step without memory throws that
    error into the generator. It gets its batch again if memory was freed, else the error.
    """

    def requests() -> Iterator[tuple[int, ndarray, float]]:
        for number in range(epoch, plan.epochs):
            order = numpy_rng(plan.seed, "order", number).permutation(plan.count)
            for position in range(step if number == epoch else 0, plan.steps_per_epoch):
                for indices, weight in plan.micro_batches(
                    plan.step_images(number, position, order)
                ):
                    yield number, indices, weight

    if isinstance(batch_fn, DeviceViews):
        return _made_on_device(batch_fn, requests())
    return _load(batch_fn, requests(), workers)


def _made_on_device(made: DeviceViews, requests: Iterator[tuple]) -> Iterator[dict]:
    """Yield the batches of requests, see :func:`training_batches`."""
    for request in requests:
        epoch, indices, weight = request
        try:
            yield {**made(epoch, indices), "weight": weight}
        except torch.OutOfMemoryError:
            made.leave()
            break
    else:
        return
    workers = choose_workers(made.workers, made.views, indices)
    yield from _load(made.views, itertools.chain([request], requests), workers)


def on_device(batch: dict, device) -> dict:
    """Send a batch to the device."""
    from accelerate.utils import send_to_device  # an evaluation need not wait for its import

    return send_to_device(batch, device, non_blocking=True)


class EvalTransform:
    """Makes the centre crops of a batch. One ``mean`` and ``std`` make RGB images grey.

    Images to evaluate on are stored as such crops. Training images are stored larger.
    """

    def __init__(self, store, size: int, crop_pct: float, mean, std):
        self.store = store
        self.size = size
        self.crop_pct = crop_pct
        self.mean = mean
        self.std = std
        self.finished = store.stored_size == CentreCrop(size, crop_pct)

    def __call__(self, epoch: int, indices: ndarray) -> dict:
        """Return ``images`` (float [B, C, size, size]), ``index`` and ``label``."""
        images = [self.store.image(i) for i in indices]
        if not self.finished:
            places = [
                CentreCrop(self.size, self.crop_pct).place(*image.shape[1:]) for image in images
            ]
            crops = zip(images, places, strict=True)
            images = [
                resize(image, list(sides))[:, rows, columns]
                for image, (sides, (rows, columns)) in crops
            ]
        if all(image.dtype == torch.uint8 for image in images):  # the usual case, copied as bytes
            images = unit(torch.stack(images))
        else:
            images = torch.stack(
                [image if image.is_floating_point() else unit(image) for image in images]
            )
        return numbered({"images": normalise(images, self.mean, self.std)}, self.store, indices)


def centre_crops(
    store: ImageStore,
    size: int,
    crop_pct: float,
    mean,
    std,
    batch_size: int,
    workers: int | None = None,
    images: ndarray | None = None,
) -> Iterator[dict]:
    """Yield this process's share of a split, centre-cropped. ``images``: only those numbers."""
    images = np.arange(len(store)) if images is None else images
    crops = EvalTransform(store, size, crop_pct, mean, std)
    return own_share(crops, images, batch_size, workers, batch_size * len(mean) * size**2 * 4)


def own_share(
    batch_fn: BatchFn, images: ndarray, batch_size: int, workers: int | None, nbytes: int
) -> Iterator:
    """Yield this process's share of the image numbers ``images`` [n] in order, in batches of
    ``nbytes`` each.

    Few images are loaded without ``workers``.
    """
    mine = images[distributed.rank() :: distributed.world()]
    # more would start for longer
    workers = min(worker_count(workers, nbytes)[0], (len(mine) - 1) // (2 * batch_size))
    return _load(
        batch_fn,
        [(0, mine[i : i + batch_size], 1.0) for i in range(0, len(mine), batch_size)],
        workers,
    )


def most_workers() -> int:
    """Return the largest number of loader workers of ``data.workers`` null, per process of this
    machine."""
    return max(0, min(16, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1))


def worker_count(workers: int | None, bytes_per_batch: int) -> tuple[int, str | None]:
    """Resolve ``data.workers``. If there is no room for that many, return a line on that, too.

    Workers hand batches over in shared memory. Containers often have 64 MiB of it, and a worker
    that runs out dies. Each batch is an open file.
    """
    workers = most_workers() if workers is None else workers
    if not os.path.isdir("/dev/shm"):
        return workers, None
    each = (AHEAD + 1) * bytes_per_batch  # one more is in the making
    free = shutil.disk_usage("/dev/shm").free
    files = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0] % 2**31  # -1: no limit
    most = min(free // max(1, each), max(0, files - OTHER_FILES) // WORKER_FILES)
    if workers <= most:
        return workers, None
    memory = f"{workers * each / 2**20:.0f} MiB of shared memory ({free / 2**20:.0f} MiB are free)"
    held = (
        f"{memory} and {OTHER_FILES + WORKER_FILES * workers} open files ({files} by 'ulimit -n')"
    )
    return most, f"data.workers {workers} would need {held}: {most or 'none'} used instead"


def choose_workers(wanted: int | None, batch_fn: BatchFn, images: ndarray) -> int:
    """Resolve ``data.workers``: null is as many as there may be. Fewer, with a warning, if shared
    memory is too small for their batches of ``images``, a micro-batch. None if a device makes the
    batches."""
    if isinstance(batch_fn, DeviceViews) or not (most_workers() if wanted is None else wanted):
        return 0
    one = batch_fn(0, images[:1])
    tensors = [
        tensor for part in one.values() for tensor in (part if isinstance(part, list) else [part])
    ]
    workers, why = worker_count(
        wanted, len(images) * sum(getattr(tensor, "nbytes", 0) for tensor in tensors)
    )
    if why:
        log.warning("%s", why)
    return workers


def _load(batch_fn: BatchFn, requests, workers: int) -> Iterator[dict]:
    # the images are shared with forked workers, not copied
    forked = workers > 0 and sys.platform == "linux"
    loader = DataLoader(
        _Batches(batch_fn),
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=AHEAD if workers else None,
        multiprocessing_context="fork" if forked else None,
        worker_init_fn=_own_process_group,
        pin_memory=torch.cuda.is_initialized(),  # not in a run on the CPU
    )
    try:
        for batch in loader:
            if "failed" in batch:
                raise RunError(batch["failed"])
            yield batch
    except RuntimeError as error:
        if lost := distributed.worker_lost(error):
            raise lost from error
        raise


def _own_process_group(worker: int) -> None:
    """Keep Ctrl-C and other signals to the process group from a worker. The training process ends
    it."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    # a scheduler may send them to all processes
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
