"""A backbone's first layer for images of another number of channels, as timm does it for its own weights."""

from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from idmm.errors import UserError
from idmm.models.build import build_on_meta, model_name


class Picked(NamedTuple):
    """Channels that are taken from weights, by their numbers in files."""

    wanted: list[int]
    own: list[int]  # all that the weights are for, in their order

    @property
    def places(self) -> list[int]:
        """Where the wanted ones are among the weights' own."""
        return [self.own.index(number) for number in self.wanted]

    def __str__(self) -> str:
        of = _and(self.own) if self.own != list(range(len(self.own))) else len(self.own)
        return f"channel{'s' if len(self.wanted) > 1 else ''} {_and(self.wanted)} of {of}"


def _and(numbers: list[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))


def repeated(weight: Tensor, base: int, in_chans: int, picked: Picked | None = None) -> Tensor:
    """Returns the weights of a first layer for images of ``in_chans`` channels, from those for ``base``.

    For one channel they are summed over the channels; else the channels are repeated in turn and scaled by
    base / in_chans. So an image whose channels repeat those of another gives what that gives, where ``base`` divides
    ``in_chans``. Channels that are ``picked`` keep their weights as they are, not scaled: an image gives what it gives
    the whole layer with the others at their mean, which is zero here, as ``channel_drop`` trains it.

    Args:
        weight: [O, k base, ...]; the channel counts fastest where several pixels come together (space to depth).
        base: Channels that it is for.
        in_chans: Channels wanted.
        picked: Which of the layer's own those are; None: others.

    Returns:
        [O, k in_chans, ...]
    """
    parts = weight.unflatten(1, (-1, base))  # [O, k, base, ...]
    if picked is not None:
        return parts[:, :, picked.places].flatten(1, 2)
    if in_chans == 1:
        return parts.sum(2)
    return (parts[:, :, torch.arange(in_chans) % base] * (base / in_chans)).flatten(1, 2)


def adapt_input(
    model: nn.Module, state: dict[str, Tensor], in_chans: int, label: str, picked: Picked | None = None
) -> tuple[dict[str, Tensor], str]:
    """Returns weights whose first layer fits a model of ``in_chans`` channels (those ``picked``, where they are of its
    own), and what was changed, if anything.

    A model whose first layer is no plain convolution says by a method ``adapt_input(state, in_chans, picked)`` what
    becomes of it: a new state and the channels before, or None where they are the same. T2T-ViT does.

    Raises:
        UserError: The first layer's weights cannot be adapted; ``label`` begins the message.
    """
    if hasattr(model, "adapt_input"):
        state, base = model.adapt_input(state, in_chans, picked) or (state, None)
        return state, "" if base is None else _said(["the first layer"], base, in_chans, picked)
    new, base = {}, 0
    for key, target in _first(getattr(model, "pretrained_cfg", None), model.state_dict()).items():
        value, each = state.get(key), target.shape[1] // in_chans
        if value is None or value.shape[:1] + value.shape[2:] != target.shape[:1] + target.shape[2:]:
            continue  # other weights, of which the caller tells
        if value.shape == target.shape:
            continue
        if value.ndim != 4 or not each or value.shape[1] % each:
            why = f"{key} of {model_name(model)} is no convolution, and cannot be adapted to {in_chans} channels"
            raise UserError(f"{label} {why}; wanted the checkpoint's own number in data.in_chans, or no init")
        base = value.shape[1] // each
        new[key] = repeated(value, base, in_chans, picked)
    return {**state, **new}, _said(list(new), base, in_chans, picked) if new else ""


def input_channels(name: str, kwargs: dict[str, Any], state: dict[str, Tensor]) -> int | None:
    """Returns how many channels the weights of a file are for, by their first convolution; None where that is unknown.

    Args:
        name: timm's name of the model.
        kwargs: For its constructor.
        state: The weights.
    """
    cfg = timm.get_pretrained_cfg(name)
    for key, target in _first(cfg and cfg.to_dict(), state).items():
        if target.ndim == 4:
            own = build_on_meta(name, {**kwargs, "num_classes": 0}).get_parameter(key)  # of three channels
            return target.shape[1] // max(1, own.shape[1] // 3)
    return None


def _first(cfg: dict[str, Any] | None, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of the convolutions that see the image, by timm's description of the model, if any."""
    names = (cfg or {}).get("first_conv") or ()
    keys = (f"{name}.weight" for name in ([names] if isinstance(names, str) else names))
    return {key: state[key] for key in keys if key in state}


def _said(names: list[str], base: int, in_chans: int, picked: Picked | None) -> str:
    if picked is not None:
        return f"{', '.join(names)}: {picked}, as they are"
    if in_chans == 1:
        how = "summed"
    else:
        how = f"{'repeated in turn' if in_chans > base else f'the first {in_chans}'}, scaled by {base}/{in_chans}"
    return f"{', '.join(names)}: from {base} channels to {in_chans}: {how}"
