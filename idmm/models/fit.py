"""Weights of a checkpoint for a model of another image size or number of channels."""

import math
import warnings
from collections.abc import Callable
from typing import Any

from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from timm.models import adapt_input_conv
from torch import Tensor, nn

from idmm.errors import Fault, UserError
from idmm.models.base import Tensors
from idmm.models.build import model_name


def resized(model: nn.Module, key: str, value: Tensor, target: Tensor) -> Tensor:
    """Return a value in the target's dtype and shape. ValueError if it cannot be converted."""
    value = value.to(target.dtype)
    if value.shape == target.shape:
        return value
    owner, _, name = key.rpartition(".")
    converted = None
    if value.ndim == target.ndim and name.endswith("relative_position_bias_table"):
        converted = _resized_table(model, owner, value, target)
    elif value.ndim == 3 and name == "pos_embed":
        converted = _resized_positions(model, value, target)
    if converted is not None:
        return converted
    saved_shape, shape = ("x".join(map(str, t.shape)) or "a number" for t in (value, target))
    raise ValueError(f"{saved_shape} in the checkpoint, {shape} in the model")


def _resized_table(model: nn.Module, owner: str, value: Tensor, target: Tensor) -> Tensor | None:
    """Return a table of relative positions for the windows of its owner, or None."""
    # timm's interpolation is deprecated in torch
    with warnings.catch_warnings(action="ignore"):
        try:
            attention: Any = model.get_submodule(owner)
            outputs: Tensor | None = resize_rel_pos_bias_table(
                value, tuple(attention.window_size), target.shape
            )
            return outputs
        except (AssertionError, RuntimeError, AttributeError):
            return None


def _resized_positions(model: nn.Module, value: Tensor, target: Tensor) -> Tensor | None:
    """Return position embeddings [1, N, D] of a square grid for the grid of the model, or None."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)  # of transformers
    if grid is None or value.shape[::2] != target.shape[::2]:
        return None
    prefix = target.shape[1] - math.prod(grid)  # 0 if class tokens have no position
    count = value.shape[1] - prefix
    side = math.isqrt(max(count, 0))
    if not 0 <= prefix <= 2 or side**2 != count:  # the grid is not that of the tokens
        return None
    antialias = getattr(model, "antialias_positions", True)  # timm's default
    outputs: Tensor | None = resample_abs_pos_embed(
        value, list(grid), [side, side], prefix, antialias=antialias
    )
    return outputs


def adapt_input(
    model: nn.Module,
    state: Tensors,
    fault: Callable[[str, str], Fault],
) -> tuple[Tensors, str]:
    """Return weights for RGB with a first layer for the model's channels, as in timm.

    For one channel the weights are summed. Otherwise they repeat over the channels, scaled by
    3 / channels.

    Args:
        model: With the first layer.
        state: Of a model for RGB.
        fault: Makes a fault of the checkpoint from a text and a hint.

    Returns:
        The weights, and a line on the change.

    Raises:
        UserError: The first layer cannot be adapted.
    """
    config = getattr(model, "pretrained_cfg", None) or {}  # models of other packages lack it
    names = config.get("first_conv") or ()
    if isinstance(names, str):
        names = (names,)
    adapted = {}
    change = ""
    targets = model.state_dict()
    for name in names:
        key = f"{name}.weight"
        if key not in state or key not in targets:
            continue
        value = state[key]
        in_chans = targets[key].shape[1]
        if value.shape[1] == in_chans:
            continue
        if value.ndim != 4 or value.shape[1] != 3:
            raise UserError(
                fault(
                    f"{key} of {model_name(model)} is no convolution of RGB "
                    "and cannot be adapted to other channels",
                    "Leave out data.in_chans or init",
                )
            )
        adapted[key] = adapt_input_conv(in_chans, value)
        if in_chans == 1:
            change = f"{', '.join(adapted)}: from 3 channels to 1: summed"
        else:
            change = (
                f"{', '.join(adapted)}: from 3 channels to {in_chans}: "
                f"repeated in turn, scaled by 3/{in_chans}"
            )
    return state | adapted, change
