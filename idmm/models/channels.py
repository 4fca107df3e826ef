"""A backbone's first layer for images of another number of channels, as timm does it for its own weights."""

from typing import Any

import timm
import torch
from torch import Tensor, nn

from idmm.errors import UserError
from idmm.models.build import build_on_meta, model_name


def repeated(weight: Tensor, base: int, in_chans: int) -> Tensor:
    """Returns the weights of a first layer for images of ``in_chans`` channels, from those for ``base``.

    For one channel they are summed over the channels; else the channels are repeated in turn and scaled by
    base / in_chans. So an image whose channels repeat those of another gives what that gives, where ``base`` divides
    ``in_chans``.

    Args:
        weight: [O, k base, ...]; the channel counts fastest where several pixels come together (space to depth).
        base: Channels that it is for.
        in_chans: Channels wanted.

    Returns:
        [O, k in_chans, ...]
    """
    parts = weight.unflatten(1, (-1, base))  # [O, k, base, ...]
    if in_chans == 1:
        return parts.sum(2)
    return (parts[:, :, torch.arange(in_chans) % base] * (base / in_chans)).flatten(1, 2)


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
    new, base = {}, 0
    for key, target in _first(model.pretrained_cfg, model.state_dict()).items():
        value, each = state.get(key), target.shape[1] // in_chans
        if value is None or value.shape[:1] + value.shape[2:] != target.shape[:1] + target.shape[2:]:
            continue  # other weights, of which the caller tells
        if value.shape == target.shape:
            continue
        if value.ndim != 4 or value.shape[1] % each:
            why = f"{key} of {model_name(model)} is no convolution, and cannot be adapted to {in_chans} channels"
            raise UserError(f"{label} {why}; wanted the checkpoint's own number in data.in_chans, or no init")
        base = value.shape[1] // each
        new[key] = repeated(value, base, in_chans)
    return {**state, **new}, _said(list(new), base, in_chans) if new else ""


def input_channels(name: str, kwargs: dict[str, Any], state: dict[str, Tensor]) -> int | None:
    """Returns how many channels the weights of a file are for, by their first convolution; None where that is unknown.

    Args:
        name: timm's name of the model.
        kwargs: For its constructor.
        state: The weights.
    """
    for key, target in _first(timm.get_pretrained_cfg(name).to_dict(), state).items():
        if target.ndim == 4:
            own = build_on_meta(name, {**kwargs, "num_classes": 0}).get_parameter(key)  # of three channels
            return target.shape[1] // max(1, own.shape[1] // 3)
    return None


def _first(cfg: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of the convolutions that see the image, by timm's description of the model."""
    names = cfg.get("first_conv") or ()
    keys = (f"{name}.weight" for name in ([names] if isinstance(names, str) else names))
    return {key: state[key] for key in keys if key in state}


def _said(names: list[str], base: int, in_chans: int) -> str:
    how = "summed" if in_chans == 1 else f"repeated in turn and scaled by {base}/{in_chans}"
    return f"{', '.join(names)}: weights for {base} channels {how}, for {in_chans}"
