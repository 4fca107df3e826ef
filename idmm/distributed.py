"""Where a run computes, and what its processes tell each other; with one process, nothing."""

import atexit
import contextlib
import datetime
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from idmm.errors import RunError, UserError, in_short

_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")  # of torch, drivers, libraries
_control = None  # a gloo group, so that a flag costs no device sync


def pick_device(wanted: str, flag: str = "device") -> str:
    """Resolves 'auto' to cuda, mps or cpu.

    Raises:
        UserError: The device is not there; the line begins with ``flag``.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    there = [name for name in found if found[name]]
    if wanted != "auto" and wanted not in there:
        raise UserError(f"{flag}: '{wanted}' is not there; wanted one of {', '.join(there)}")
    return there[0] if wanted == "auto" else wanted


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Inside, accelerate reads the environment variables that tell it of other processes and of settings of its own.

    Raises:
        UserError: They contradict each other, as those that a scheduler's shell leaves behind.
    """
    try:
        yield
    except (ValueError, ImportError) as error:
        advice = "unset WORLD_SIZE, RANK, LOCAL_RANK and ACCELERATE_*, or start the command with torchrun"
        fault = UserError(f"environment: accelerate cannot start ({in_short(error)}); {advice}")
        fault.shared = False  # the other processes may not exist
        raise fault from None


@contextlib.contextmanager
def enough_memory(otherwise: RunError) -> Iterator[None]:
    """Raises ``otherwise`` where memory runs out inside the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if lost := worker_lost(error):
            raise lost from error
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and not any(sign in str(error) for sign in _NO_MEMORY):
            raise
        raise otherwise from error


def worker_lost(error: Exception) -> RunError | None:
    """Returns what to say where torch tells that a loader worker was killed, which it does wherever the process is."""
    if not re.match(r"DataLoader worker .*(killed by signal|exited unexpectedly)", str(error)):
        return None
    why = "a loader worker was killed, most likely for want of memory"
    return RunError(f"{why}; try fewer --data.workers (0: none), or fewer images a batch")


def step_too_large(batch_size: int, accumulate: int) -> RunError:
    """Says what to try where memory does not suffice for a step on so many images in so many passes."""
    return RunError(
        f"out of memory with a batch of {batch_size} images: try --train.accumulate {2 * accumulate} "
        "(the same step in smaller passes), a smaller --train.batch_size or --train.precision bf16, in a new --out"
    )


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def several_gpus() -> bool:
    """Whether there are several processes, and they compute on GPUs."""
    return world() > 1 and "nccl" in dist.get_backend()


def any_process(*flags: bool) -> tuple[bool, ...]:
    """Whether each flag is set in any process; all must call together."""
    return tuple(bool(flag) for flag in largest(*flags))


def largest(*values: float) -> tuple[float, ...]:
    """Returns the largest of each value in any process; all must call together."""
    if world() == 1:
        return values
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=_control_group())
    return tuple(found.tolist())


def sum_all(values: torch.Tensor) -> torch.Tensor:
    """Adds a tensor up over the processes; all must call together."""
    if world() > 1:
        dist.all_reduce(values)
    return values


def share_statistics(module: torch.nn.Module) -> None:
    """Gives the module of every process the first one's running statistics of batch norms, which each makes of its own
    images; all must call together."""
    if world() > 1:
        for part in module.modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
                dist.broadcast(part.running_mean, 0)
                dist.broadcast(part.running_var, 0)


# ---------------------------------------------------------------------- rows of all processes
def _counts(rows: int) -> list[int]:
    """Returns how many rows each process has; all must call together."""
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(world())]
    dist.all_gather(found, torch.tensor([rows]), group=_control_group())
    return [int(count) for count in found]


def _all_rows(rows: torch.Tensor, each: list[int]) -> torch.Tensor:
    padded = rows.new_zeros(max(each), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in each]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, each, strict=True)])


class _Gather(torch.autograd.Function):
    """Rows of all processes; the gradient of a process's own rows is the sum over what all made of them."""

    @staticmethod
    def forward(ctx, rows, each):
        ctx.each = each
        return _all_rows(rows, each)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.split(ctx.each)[rank()], None


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows [B, ...] of all processes in order, with gradient; B may differ. All must call together.

    Where each process computes the same loss of all rows, the mean over processes of the parameters' gradients, which
    DistributedDataParallel takes, is that of a single process with all images.
    """
    return rows if world() == 1 else _Gather.apply(rows, _counts(len(rows)))


# ---------------------------------------------------------------------- Python objects
def broadcast(value: Any) -> Any:
    """Returns the first process's value in every process (small Python objects)."""
    if world() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control_group())
    return box[0]


def gather(value: Any) -> list[Any]:
    """Returns every process's value, in order, in every process (Python objects, NumPy arrays)."""
    if world() == 1:
        return [value]
    values = [None] * world()
    dist.all_gather_object(values, value, group=_control_group())
    return values


def forget() -> None:
    """Drops what was kept of a process group that is about to end."""
    global _control
    _control = None


def _control_group():
    global _control
    if _control is None:
        # others wait here while the first process fits a probe, say
        _control = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
        atexit.unregister(_leave)
        atexit.register(_leave)
    return _control


def _leave() -> None:
    """Ends the process group before the interpreter ends: its threads would abort a process that has finished."""
    if dist.is_initialized():
        dist.destroy_process_group()
