"""From image numbers to batches: the order of an epoch, micro-batches, the loader workers."""

import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from idmm import distributed
from idmm.batch import Batch, BatchFn
from idmm.data.device_views import Device, DeviceViews
from idmm.data.image_store import ImageStore
from idmm.data.images import CentreCrop, PerChannel, unit
from idmm.data.parallel import cores
from idmm.data.view_plan import Integers
from idmm.data.views import normalise, resize, with_labels
from idmm.errors import RunError
from idmm.seeding import numpy_rng

log = logging.getLogger(__name__)

AHEAD = 2  # finished batches that a worker holds
# open files of a worker (9 were measured) and of the rest of a process
WORKER_FILES = 16
OTHER_FILES = 64


class Request(NamedTuple):
    """A micro-batch to make."""

    epoch: int
    images: Integers  # [B]
    # factor for its mean loss. With it the gradient, averaged over processes, is that of the mean
    # over all images of the step, however unevenly they divide
    weight: float


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

    def requests(self, epoch: int = 0, step: int = 0) -> Iterator[Request]:
        """Yield this process's micro-batches from a step of an epoch to the end of all epochs.

        Each step has ``accumulate`` of them. One without an image runs the step's first image at
        factor 0, because all processes have to take part.
        """
        for number in range(epoch, self.epochs):
            order = numpy_rng(self.seed, "order", number).permutation(self.count)
            for start in range(step * self.batch_size, self.count, self.batch_size):
                images = order[start : start + self.batch_size]
                share = images[self.rank :: self.world]
                weight = self.world / len(images)
                for part in np.array_split(share, self.accumulate):
                    if len(part):
                        yield Request(number, part, len(part) * weight)
                    else:
                        yield Request(number, images[:1], 0.0)
            step = 0


class _Batches(Dataset[Batch]):
    """A map-style dataset of whole batches. A batch's key is its request."""

    def __init__(self, batch_fn: BatchFn):
        self.batch_fn = batch_fn

    def __getitem__(self, request: Request) -> Batch:
        try:
            # reductions round differently on more. Results must not depend on the workers
            with one_thread():
                return _weighted(self.batch_fn, request)
        except RunError as error:  # a worker's exception would come wrapped in its traceback
            return {"failed": str(error)}


def _weighted(batch_fn: BatchFn, request: Request) -> Batch:
    batch = batch_fn(request.epoch, request.images)
    return {**batch, "weight": request.weight}


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
    batch_fn: BatchFn,
    plan: BatchPlan,
    workers: int,
    epoch: int = 0,
    step: int = 0,
) -> Generator[Batch, None, None]:
    """Return the micro-batches of all steps from a step of an epoch to the end of all epochs.

    One loader serves all epochs: workers start once. A device that makes the views needs none. If
    it runs out of memory, workers continue. A step without memory throws that error into the
    generator. It gets its batch again if memory was freed, else the error.
    """
    requests = plan.requests(epoch, step)
    if isinstance(batch_fn, DeviceViews):
        return _made_on_device(batch_fn, requests)
    return _load(batch_fn, requests, workers)


def _made_on_device(
    device_views: DeviceViews, requests: Iterator[Request]
) -> Generator[Batch, None, None]:
    """Yield the batches of requests, see :func:`training_batches`."""
    for request in requests:
        try:
            yield _weighted(device_views, request)
        except torch.OutOfMemoryError:
            device_views.leave()
            break
    else:
        return
    views = device_views.views
    workers = choose_workers(device_views.workers, views, request.images)
    yield from _load(views, itertools.chain([request], requests), workers)


def on_device(batch: Batch, device: Device) -> Batch:
    """Send a batch to the device."""
    from accelerate.utils import send_to_device  # an evaluation need not wait for its import

    sent: Batch = send_to_device(batch, device, non_blocking=True)
    return sent


@dataclass(eq=False)
class EvalTransform:
    """Makes the centre crops of a batch. One ``mean`` and ``std`` make RGB images grey.

    Images to evaluate on are stored as such crops. Training images are stored larger.
    """

    store: ImageStore
    crop: CentreCrop
    mean: PerChannel
    std: PerChannel

    def __call__(self, epoch: int, indices: Integers) -> Batch:
        """Return ``images`` (float32 [B, C, size, size]), ``index`` and ``label``."""
        crops = [self._crop(self.store.image(i)) for i in indices]
        if any(crop.dtype != torch.uint8 for crop in crops):  # the others are copied as bytes
            crops = [unit(crop) for crop in crops]
        images = unit(torch.stack(crops))
        images = normalise(images, self.mean, self.std)
        return with_labels({"images": images}, self.store, indices)

    def _crop(self, image: Tensor) -> Tensor:
        """Return an image [C, H, W] as its centre crop [C, size, size], which it may be already."""
        crop = self.crop
        if self.store.stored_size == crop:
            return image
        if crop.mode != "center":
            return torch.from_numpy(crop(image.permute(1, 2, 0).numpy())).permute(2, 0, 1)
        cut = crop.cut(*image.shape[1:])
        return resize(image, cut.sides)[:, cut.rows, cut.columns]


def centre_crops(
    store: ImageStore,
    crop: CentreCrop,
    mean: PerChannel,
    std: PerChannel,
    batch_size: int,
    workers: int | None = None,
    images: Integers | None = None,
) -> Iterator[Batch]:
    """Yield this process's share of a split, centre-cropped. ``images``: only those numbers."""
    if images is None:
        images = np.arange(len(store))
    crops = EvalTransform(store, crop, mean, std)
    batch_bytes = batch_size * len(mean) * crop.size**2 * 4
    return own_batches(crops, images, batch_size, workers, batch_bytes)


def own_batches(
    batch_fn: BatchFn,
    images: Integers,
    batch_size: int,
    workers: int | None,
    nbytes: int,
) -> Iterator[Batch]:
    """Yield the batches of this process's share of ``images`` [n], in order.

    Few images are loaded without ``workers``.

    Args:
        nbytes: Bytes of a batch.
    """
    share = images[distributed.rank() :: distributed.world()]
    few = (len(share) - 1) // (2 * batch_size)  # more would start for longer
    most, _ = worker_count(workers, nbytes)
    starts = range(0, len(share), batch_size)
    requests = [Request(0, share[start : start + batch_size], 1.0) for start in starts]
    return _load(batch_fn, requests, min(most, few))


def most_workers() -> int:
    """Return the largest number of loader workers per process that ``data.workers`` null means."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this machine
    return max(0, min(16, cores() // processes - 1))


def worker_count(workers: int | None, bytes_per_batch: int) -> tuple[int, str | None]:
    """Resolve ``data.workers``. If there is no room for that many, return a line on that, too.

    Workers hand batches over in shared memory. Containers often have 64 MiB of it, and a worker
    that runs out dies. Each batch is an open file.
    """
    if workers is None:
        workers = most_workers()
    if not os.path.isdir("/dev/shm"):
        return workers, None
    worker_bytes = (AHEAD + 1) * bytes_per_batch  # one more is in the making
    free = shutil.disk_usage("/dev/shm").free
    files = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0] % 2**31  # -1: no limit
    most_by_memory = free // max(1, worker_bytes)
    most_by_files = max(0, files - OTHER_FILES) // WORKER_FILES
    most = min(most_by_memory, most_by_files)
    if workers <= most:
        return workers, None
    return most, (
        f"data.workers {workers} would need {workers * worker_bytes / 2**20:.0f} MiB of shared "
        f"memory ({free / 2**20:.0f} MiB are free) and {OTHER_FILES + WORKER_FILES * workers} open "
        f"files ({files} by 'ulimit -n'): {most or 'none'} used instead"
    )


def choose_workers(wanted: int | None, batch_fn: BatchFn, images: Integers) -> int:
    """Resolve ``data.workers``: null is as many as there may be, none if a device makes batches.

    They are fewer, with a warning, if shared memory is too small for their batches of ``images``, a
    micro-batch.
    """
    if wanted is None:
        wanted = most_workers()
    if isinstance(batch_fn, DeviceViews) or not wanted:
        return 0
    image_bytes = 0
    for value in batch_fn(0, images[:1]).values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, Tensor):
                image_bytes += tensor.nbytes
    workers, warning = worker_count(wanted, len(images) * image_bytes)
    if warning:
        log.warning(warning)
    return workers


def _load(
    batch_fn: BatchFn, requests: Iterable[Request], workers: int
) -> Generator[Batch, None, None]:
    # the images are shared with forked workers, not copied
    is_forked = workers > 0 and sys.platform == "linux"
    loader = DataLoader(
        _Batches(batch_fn),
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=AHEAD if workers else None,
        multiprocessing_context="fork" if is_forked else None,
        worker_init_fn=_own_process_group,
        # not in a run on the CPU
        pin_memory=torch.cuda.is_initialized(),
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
