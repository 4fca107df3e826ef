"""Layers of a backbone that stay as they are: no gradient, and evaluation mode whatever the mode of the rest."""

import itertools

from timm.models._manipulate import group_with_matcher
from torch import nn

from idmm.errors import UserError

_ABOVE = "?"  # a name that no model has: what no pattern matches stands above the blocks, as a classifier does


def freeze_layers(model: nn.Module, count: int, name: str) -> None:
    """Freezes the stem of a timm model named ``name`` and the first ``count`` of its blocks (of a plain transformer) or
    stages (of other models); 0 changes nothing.

    What counts as a block or a stage is timm's ``group_matcher(coarse=True)``. See :func:`freeze` for what it does.

    Raises:
        UserError: There are not so many that one would be left to learn, or the model does not tell its layers apart.
    """
    if not count:
        return
    if not hasattr(model, "group_matcher"):
        raise UserError(f"train.freeze_layers: {count}, but {name} does not tell its layers apart; wanted 0 for it")
    named = itertools.chain(model.named_parameters(), model.named_buffers(), [(_ABOVE, None)])
    layers = group_with_matcher(named, model.group_matcher(coarse=True), reverse=True)  # name: number, the stem's is 0
    blocks = layers.pop(_ABOVE) - 1
    if count >= blocks:
        what = f"{name} has {blocks} blocks or stages after its stem, of which one has to learn"
        raise UserError(f"train.freeze_layers: {count}, but {what}; wanted at most {max(0, blocks - 1)}")
    freeze(model, {name for name, layer in layers.items() if layer <= count})


def freeze(model: nn.Module, tensors: set[str]) -> None:
    """Takes parameters and buffers, by their names, out of training.

    Modules all of whose tensors are among them are put into evaluation mode by :func:`hold_still`: their batch norms
    neither see a batch's statistics nor keep them, and they drop nothing. The model, and copies of it, list them in
    ``frozen_parameters`` and ``frozen_modules``.
    """
    for name, parameter in model.named_parameters():
        if name in tensors:
            parameter.requires_grad_(False)
    model.frozen_parameters = tuple(name for name, _ in model.named_parameters() if name in tensors)
    model.frozen_modules = tuple(_whole(model, tensors, ""))


def _whole(module: nn.Module, tensors: set[str], path: str):
    """Yields the names of the largest modules that have tensors, and none but these."""
    prefix = f"{path}." if path else ""
    own = [f"{prefix}{name}" for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())]
    if own and tensors.issuperset(own):
        yield path
    elif not tensors.isdisjoint(own):
        for name, child in module.named_children():
            yield from _whole(child, tensors, f"{prefix}{name}")


def hold_still(module: nn.Module) -> None:
    """Puts what is frozen of the models within a module into evaluation mode."""
    for part in module.modules():
        for name in getattr(part, "frozen_modules", ()):
            part.get_submodule(name).eval()
