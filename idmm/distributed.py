"""Communication between the processes of a run. With one process there is none."""

import atexit
import datetime
import functools
import re
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

from idmm.errors import RunError


def worker_lost(error: Exception) -> RunError | None:
    """Return the error to raise if torch reports a killed loader worker, else None."""
    if not re.match(r"DataLoader worker .*(killed by signal|exited unexpectedly)", str(error)):
        return None
    return RunError(
        "a loader worker was killed, probably because memory ran out. "
        "Try fewer --data.workers (0: none), or a smaller batch"
    )


def rank() -> int:
    """Return the number of this process, from 0."""
    if dist.is_initialized():
        return dist.get_rank()
    return 0


def world() -> int:
    """Return the number of processes."""
    if dist.is_initialized():
        return dist.get_world_size()
    return 1


def several_gpus() -> bool:
    """Return whether there are several processes on GPUs."""
    return world() > 1 and "nccl" in dist.get_backend()


def largest(*values: float) -> tuple[float, ...]:
    """Return the largest of each value over the processes."""
    if world() == 1:
        return values
    maxima = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=_control_group())
    return tuple(maxima.tolist())


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows [B, ...] of all processes in order, with gradient. B may differ.

    If every process computes the same loss of all rows, DistributedDataParallel's mean of the
    gradients is that of a single process with all images.
    """
    if world() == 1:
        return rows
    counts = gather(len(rows))
    padding = [0, 0] * (rows.ndim - 1) + [0, max(counts) - len(rows)]
    padded = torch.nn.functional.pad(rows, padding)
    parts = zip(all_gather(padded), counts, strict=True)
    return torch.cat([part[:count] for part, count in parts])


def broadcast(value: Any) -> Any:
    """Return the first process's value in every process (small Python objects)."""
    if world() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control_group())
    return box[0]


def gather(value: Any) -> list[Any]:
    """Return every process's value, in order (Python objects, NumPy arrays)."""
    if world() == 1:
        return [value]
    values = [None] * world()
    dist.all_gather_object(values, value, group=_control_group())
    return values


def forget() -> None:
    """Drop the control group before its process group ends."""
    _control_group.cache_clear()


@functools.cache
def _control_group() -> Any:
    """Return a group by gloo, so that flags need no sync with the device."""
    atexit.register(_leave)
    # others may wait here while the first process fits a probe
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))


def _leave() -> None:
    """End the process group first: its threads would abort a finished process."""
    if dist.is_initialized():
        dist.destroy_process_group()
