"""Public weights, ``timm:NAME``: from the Hugging Face hub or its cache, read by timm.

huggingface_hub downloads (environment variables HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT) and locks each file. timm
converts every published format to its own.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.models import get_pretrained_cfg
from torch import Tensor

from idmm.errors import UserError, in_short, nearest
from idmm.files import is_public, weights_label
from idmm.models.build import accepts


@dataclass(frozen=True)
class PublicWeights:
    """Public weights in the cache."""

    name: str  # timm's, with its tag
    commit: str  # of the repository
    file: Path

    @property
    def text(self) -> str:
        """The name with the commit, which never changes its meaning."""
        return f"timm:{self.name}@{self.commit}"

    def read(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """Return the fields of a :class:`idmm.models.weights.Checkpoint` from the content of ``file``."""
        overlay = {"state_dict": state, "source": None}  # instead of a download
        with torch.random.fork_rng(devices=[]):
            model = timm.create_model(self.name, pretrained=True, pretrained_cfg_overlay=overlay)
        cfg = model.pretrained_cfg
        name, (chans, *size) = cfg["architecture"], cfg["input_size"]
        kwargs = {} if chans == 3 else {"in_chans": chans}
        if accepts(name, "img_size"):
            kwargs["img_size"] = size
        preprocessing = {key: cfg[key] for key in ("crop_pct", "interpolation")}
        preprocessing |= {key: tuple(cfg[key]) for key in ("mean", "std")}
        fields = {"state": model.state_dict(), "source": self.text, "name": name, "kwargs": kwargs, "size": size}
        return fields | preprocessing


def pin_commit(init: str | None, field: str = "init") -> str | None:
    """Return ``init``, public weights with the commit that they mean now. UserError: see :func:`public_weights`."""
    return public_weights(init, field).text if is_public(init) else init


@functools.cache
def public_weights(text: str, field: str = "") -> PublicWeights:
    """Find public weights in the cache, or download them. A process keeps the commit of its first call.

    If the hub is out of reach, the cache is used.

    Args:
        text: ``timm:NAME``, with an optional ``@REVISION``.
        field: Config field for messages.

    Raises:
        UserError: No such name, or out of reach and not in the cache.
    """
    label, names = weights_label(text, field), timm.list_models(pretrained=True)
    name, _, revision = text.removeprefix("timm:").partition("@")
    cfg = get_pretrained_cfg(name) if name in names or ("." not in name and timm.is_model(name)) else None
    if cfg is None or not cfg.hf_hub_id:
        hint = nearest(name, names + timm.list_models())
        raise UserError(f"{label} is not among timm's weights on the hub{hint}")
    try:
        file = Path(hf_hub_download(cfg.hf_hub_id, "model.safetensors", revision=revision or None))
    except Exception as error:  # of requests, httpx or huggingface_hub
        absent = "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set"
        why = absent if isinstance(error, LocalEntryNotFoundError) else in_short(error)
        raise UserError(f"{label} cannot be fetched from '{cfg.hf_hub_id}' on {constants.ENDPOINT}: {why}") from error
    commit = file.relative_to(Path(constants.HF_HUB_CACHE)).parts[2]  # models--ORG--NAME/snapshots/COMMIT/FILE
    return PublicWeights(f"{name.partition('.')[0]}.{cfg.tag}" if cfg.tag else name, commit, file)
