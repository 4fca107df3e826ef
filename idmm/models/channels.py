"""Adapt a backbone's first layer to images with another number of channels, as timm does for its own weights."""

import torch
from torch import Tensor, nn

from idmm.errors import UserError
from idmm.models.build import model_name


def repeated(weight: Tensor, in_chans: int) -> Tensor:
    """Return first-layer weights for ``in_chans`` channels, [O, base, ...] -> [O, in_chans, ...].

    Like timm's ``adapt_input_conv``, which is limited to 3 channels in the checkpoint. For one channel the weights are
    summed. Otherwise they are repeated in turn and scaled by base / in_chans. So if base divides in_chans, an image
    whose channels are repeated gives the same outputs.
    """
    base = weight.shape[1]
    if in_chans == 1:
        return weight.sum(1, keepdim=True)
    return weight[:, torch.arange(in_chans) % base] * (base / in_chans)


def adapt_input(model: nn.Module, state: dict[str, Tensor], in_chans: int, label: str) -> tuple[dict[str, Tensor], str]:
    """Return weights whose first layer fits a model of ``in_chans`` channels, and a description of the change.

    Raises:
        UserError: The first layer cannot be adapted. ``label`` begins the message.
    """
    names = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv") or ()
    adapted, base, targets = {}, 0, model.state_dict()
    for key in (f"{name}.weight" for name in ([names] if isinstance(names, str) else names)):
        value, target = state.get(key), targets.get(key)
        if value is None or target is None or value.shape == target.shape:
            continue
        if value.shape[:1] + value.shape[2:] != target.shape[:1] + target.shape[2:]:
            continue  # the caller reports weights of other shapes
        if value.ndim != 4 or target.shape[1] != in_chans:
            why = f"{key} of {model_name(model)} is no plain convolution and cannot be adapted to {in_chans} channels"
            raise UserError(f"{label} {why}. Leave out data.in_chans or init")
        base = value.shape[1]
        adapted[key] = repeated(value, in_chans)
    how = "repeated in turn" if in_chans > base else f"the first {in_chans}"
    how = "summed" if in_chans == 1 else f"{how}, scaled by {base}/{in_chans}"
    return state | adapted, f"{', '.join(adapted)}: from {base} channels to {in_chans}: {how}" if adapted else ""
