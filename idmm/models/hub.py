"""Public weights, ``timm:NAME``: from the Hugging Face hub or its cache, read by timm.

huggingface_hub downloads (environment variables HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT) and locks each file. timm
converts every published format to its own.
"""

import functools
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.models import get_pretrained_cfg
from torch import Tensor

from idmm.errors import UserError, in_short, nearest
from idmm.files import weights_label
from idmm.models.build import accepts


@functools.cache
def public_file(text: str, field: str = "") -> Path:
    """Return the file of public weights, ``timm:NAME``, in the cache. It is downloaded if it is not there.

    If the hub is out of reach, the cache is used. ``field``: of the config, for messages.

    Raises:
        UserError: No such name, or out of reach and not in the cache.
    """
    label, names, name = weights_label(text, field), timm.list_models(pretrained=True), text.removeprefix("timm:")
    cfg = get_pretrained_cfg(name) if name in names or ("." not in name and timm.is_model(name)) else None
    if cfg is None or not cfg.hf_hub_id:
        hint = nearest(name, names + timm.list_models())
        raise UserError(f"{label} is not among timm's weights on the hub{hint}")
    try:
        return Path(hf_hub_download(cfg.hf_hub_id, "model.safetensors"))
    except Exception as error:  # of requests, httpx or huggingface_hub
        absent = "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set"
        why = absent if isinstance(error, LocalEntryNotFoundError) else in_short(error)
        raise UserError(f"{label} cannot be fetched from '{cfg.hf_hub_id}' on {constants.ENDPOINT}: {why}") from error


def public_fields(text: str, state: dict[str, Tensor]) -> dict[str, Any]:
    """Return the fields of a :class:`idmm.models.weights.Checkpoint` of public weights from their file's content."""
    overlay = {"state_dict": state, "source": None}  # instead of a download
    with torch.random.fork_rng(devices=[]):
        model = timm.create_model(text.removeprefix("timm:"), pretrained=True, pretrained_cfg_overlay=overlay)
    cfg = model.pretrained_cfg
    name, (chans, *size) = cfg["architecture"], cfg["input_size"]
    kwargs = {} if chans == 3 else {"in_chans": chans}
    if accepts(name, "img_size"):
        kwargs["img_size"] = size
    preprocessing = {key: cfg[key] for key in ("crop_pct", "interpolation")}
    preprocessing |= {key: tuple(cfg[key]) for key in ("mean", "std")}
    return {"state": model.state_dict(), "source": text, "name": name, "kwargs": kwargs, "size": size} | preprocessing
