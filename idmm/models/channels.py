"""A backbone's first layer for images of another number of channels, as timm does it for its own weights."""

import torch
from torch import Tensor, nn

from idmm.errors import UserError
from idmm.models.build import model_name


def repeated(weight: Tensor, in_chans: int) -> Tensor:
    """Returns the weights of a first layer for images of ``in_chans`` channels, [O, base, ...] -> [O, in_chans, ...].

    For one channel they are summed over the channels; else the channels are repeated in turn and scaled by
    base / in_chans. So an image whose channels repeat those of another gives what that gives, where ``base`` divides
    ``in_chans``.
    """
    base = weight.shape[1]
    if in_chans == 1:
        return weight.sum(1, keepdim=True)
    return weight[:, torch.arange(in_chans) % base] * (base / in_chans)


def adapt_input(model: nn.Module, state: dict[str, Tensor], in_chans: int, label: str) -> tuple[dict[str, Tensor], str]:
    """Returns weights whose first layer fits a model of ``in_chans`` channels, and what was changed, if anything.

    A model whose first layer is no plain convolution says by a method ``adapt_input(state, in_chans)`` what becomes of
    it: a new state and the channels before, or None where they are the same. T2T-ViT does.

    Raises:
        UserError: The first layer's weights cannot be adapted; ``label`` begins the message.
    """
    if hasattr(model, "adapt_input"):
        state, base = model.adapt_input(state, in_chans) or (state, None)
        return state, "" if base is None else _said(["the first layer"], base, in_chans)
    names = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv") or ()
    new, base, targets = {}, 0, model.state_dict()
    for key in (f"{name}.weight" for name in ([names] if isinstance(names, str) else names)):
        value, target = state.get(key), targets.get(key)
        if value is None or target is None or value.shape[:1] + value.shape[2:] != target.shape[:1] + target.shape[2:]:
            continue  # other weights, of which the caller tells
        if value.shape == target.shape:
            continue
        if value.ndim != 4 or target.shape[1] != in_chans:
            why = f"{key} of {model_name(model)} is no plain convolution and cannot be adapted to {in_chans} channels"
            raise UserError(f"{label} {why}; wanted the checkpoint's own number in data.in_chans, or no init")
        base = value.shape[1]
        new[key] = repeated(value, in_chans)
    return {**state, **new}, _said(list(new), base, in_chans) if new else ""


def _said(names: list[str], base: int, in_chans: int) -> str:
    if in_chans == 1:
        how = "summed"
    else:
        how = f"{'repeated in turn' if in_chans > base else f'the first {in_chans}'}, scaled by {base}/{in_chans}"
    return f"{', '.join(names)}: from {base} channels to {in_chans}: {how}"
