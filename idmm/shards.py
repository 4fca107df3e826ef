"""Parameters whose rows are divided over the processes: what DistributedDataParallel and checkpoints must know of them.

A module with such parameters has ``shard``, an :class:`idmm.distributed.Rows`, and ``sharded``, their names.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from idmm import distributed
from idmm.distributed import Rows


def row_shards(module: nn.Module) -> dict[str, Rows]:
    """Returns which rows of each divided parameter, by its full name, this process has; none with one process."""
    found = {}
    if distributed.world() > 1:
        for prefix, child in module.named_modules():
            for name in getattr(child, "sharded", ()):
                if getattr(child, name) is not None:
                    found[f"{prefix}.{name}".lstrip(".")] = child.shard
    return found


def shard_processes(module: nn.Module, accelerator: Any) -> dict[str, Rows]:
    """Readies a module with divided parameters for ``accelerator.prepare``; returns :func:`row_shards`.

    Each process steps its own rows with its own gradient. With fp16 all skip a step together, though a gradient may
    overflow in one process alone.
    """
    shards = row_shards(module)
    if shards:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(shards))
        if accelerator.scaler is not None:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            accelerator.scaler = ShardedGradScaler(process_group=torch.distributed.group.WORLD)
    return shards


def clip_gradients(module: nn.Module, limit: float, each: bool, shards: dict[str, Rows]) -> None:
    """Scales gradients down whose norm is above the limit: that of all together, or of ``each`` tensor alone.

    The norm of a divided parameter is that of all its rows; all processes must call together.
    """
    named = {name: p for name, p in module.named_parameters() if p.grad is not None}
    alike = [p for name, p in named.items() if name not in shards]
    divided = [p for name, p in named.items() if name in shards]
    for group in [[p] for p in alike] if each else [] if divided else [alike]:
        nn.utils.clip_grad_norm_(group, limit)
    if not divided:
        return
    squares = distributed.sum_all(torch.stack([p.grad.square().sum() for p in divided]))  # one for each
    if each:
        groups = [([p], square.sqrt()) for p, square in zip(divided, squares, strict=True)]
    else:
        total = nn.utils.get_total_norm([p.grad for p in alike]).square() + squares.sum()
        groups = [(alike + divided, total.sqrt())]
    for group, norm in groups:
        nn.utils.clip_grads_with_norm_(group, limit, norm)


# ---------------------------------------------------------------------- checkpoints
def whole_states(method: dict, optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], shards: dict) -> tuple:
    """Returns the states of a method and its optimizer with all rows of the divided parameters, as one process has
    them; those are whole in the first process alone. All must call together.

    Args:
        method: Its ``state_dict()``.
        optimizer: Of its parameters.
        named: Its parameters by name.
        shards: Its :func:`row_shards`.
    """
    state = optimizer.state_dict()
    if shards:
        method = {**method, **{name: distributed.whole_rows(method[name], rows.total) for name, rows in shards.items()}}
        for number, rows in _numbers(optimizer, named, shards).items():
            for key, value in state["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.ndim:  # not the count of steps
                    state["state"][number] = {**state["state"][number], key: distributed.whole_rows(value, rows.total)}
    return method, state


def own_states(
    method: dict, state: dict, optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], shards: dict
) -> tuple:
    """Returns this process's part of whole states, of a run of any number of processes; see :func:`whole_states`.

    Of several processes each has a copy, that of the optimizer's state included: the whole may be a file's.
    """
    if distributed.world() == 1:
        return method, state
    numbers = _numbers(optimizer, named, shards)
    method = {name: _own(value, shards.get(name)) for name, value in method.items()}
    moments = {
        number: {key: _own(value, numbers.get(number)) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return method, {**state, "state": moments}


def _own(whole: Any, shard: Rows | None) -> Any:
    if not isinstance(whole, Tensor):
        return whole
    fits = shard is not None and whole.ndim and len(whole) == shard.total  # what does not is refused by its module
    return (whole[shard.slice] if fits else whole).clone()


def _numbers(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], shards: dict) -> dict[int, Rows]:
    """Returns the divided parameters by their numbers in the optimizer's state."""
    names = {id(p): name for name, p in named.items()}
    order = [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
    return {number: shards[name] for number, name in enumerate(order) if name in shards}
