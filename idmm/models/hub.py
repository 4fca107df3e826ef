"""Public weights, ``timm:NAME`` and ``hf-hub:ORG/NAME``: from the Hugging Face hub or its cache, read by timm.

huggingface_hub downloads (environment variables HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN) and locks each file.
timm converts every published format to its own.
"""

import contextlib
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars
from timm.models import get_pretrained_cfg
from torch import Tensor

from idmm.errors import UserError, in_short, nearest
from idmm.files import is_public, weights_label
from idmm.models.build import accepts

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
OUR_KEYS = ("grey_range", "range", "bands", "file_channels")  # that idmm's exports add to config.json
_REASONS = {  # a subclass before its parent
    GatedRepoError: "accept its terms there, then run 'hf auth login' or set HF_TOKEN",
    RepositoryNotFoundError: "no such repository, or a private one ('hf auth login', or set HF_TOKEN)",
    LocalEntryNotFoundError: "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set",
    EntryNotFoundError: f"it has no {' and no '.join(WEIGHTS)} with a config.json, timm's format",
}


@dataclass(frozen=True)
class PublicWeights:
    """Public weights in the cache."""

    text: str  # the name with the commit of the repository, which never changes its meaning
    file: Path
    model_name: str  # for ``timm.create_model``: a name with its tag, or the folder with ``config.json``
    info: dict[str, Any]  # content of ``config.json``, {} for timm's names

    def read(self, state: dict[str, Tensor], label: str) -> dict[str, Any]:
        """Return the fields of a :class:`idmm.models.weights.Checkpoint` from the content of ``file``.

        Raises:
            UserError: The weights do not fit the model in ``config.json``. ``label`` begins the message.
        """
        overlay = {"state_dict": state, "source": None}  # instead of a download
        try:
            with torch.random.fork_rng(devices=[]):
                model = timm.create_model(self.model_name, pretrained=True, pretrained_cfg_overlay=overlay)
        except Exception as error:  # constructors raise any kind
            raise UserError(f"{label} does not fit the model in its config.json: {in_short(error)}") from error
        cfg = model.pretrained_cfg
        name, (chans, *size) = cfg["architecture"], cfg["input_size"]
        kwargs = {**(self.info.get("model_args") or {}), **({} if chans == 3 else {"in_chans": chans})}
        if accepts(name, "img_size"):
            kwargs["img_size"] = size
        return {
            "state": model.state_dict(), "source": self.text, "name": name, "kwargs": kwargs, "size": size,
            "mean": tuple(cfg["mean"]), "std": tuple(cfg["std"]),
            "crop_pct": cfg["crop_pct"], "interpolation": cfg["interpolation"],
            "extra": {key.removeprefix("grey_"): self.info[key] for key in OUR_KEYS if key in self.info},
        }  # fmt: skip


def pin_commit(init: str | None, field: str = "init") -> str | None:
    """Return ``init``. Public weights get the commit that their name means now.

    Raises:
        UserError: See :func:`public_weights`.
    """
    return public_weights(init, field).text if is_public(init) else init


@functools.cache
def public_weights(text: str, field: str = "") -> PublicWeights:
    """Find public weights in the cache, or download them. A process keeps the commit of its first call.

    The first process of a run draws the progress. If the hub is out of reach, the cache is used.

    Args:
        text: ``timm:NAME`` or ``hf-hub:ORG/NAME``, with an optional ``@REVISION``.
        field: Config field for messages.

    Raises:
        UserError: No such name or repository, not in timm's format, or out of reach and not in the cache.
    """
    label = weights_label(text, field)
    name, _, revision = text.partition("@")
    kind, _, name = name.partition(":")
    repository, files = name, WEIGHTS
    if kind == "timm":
        names = timm.list_models(pretrained=True)
        cfg = get_pretrained_cfg(name) if name in names or ("." not in name and timm.is_model(name)) else None
        if cfg is None or not cfg.hf_hub_id:
            hint = nearest(name, names + timm.list_models())
            raise UserError(f"{label} is not among timm's weights on the hub{hint}")
        repository, files = cfg.hf_hub_id, (cfg.hf_hub_filename,) if cfg.hf_hub_filename else WEIGHTS
        name = f"{name.partition('.')[0]}.{cfg.tag}" if cfg.tag else name
    if os.environ.get("RANK", "0") != "0":
        disable_progress_bars()
    file = _downloaded(repository, files, revision or constants.DEFAULT_REVISION, label)
    commit = file.relative_to(Path(constants.HF_HUB_CACHE)).parts[2]  # models--ORG--NAME/snapshots/COMMIT/FILE
    text = f"{kind}:{name}@{commit}"
    if kind == "timm":
        return PublicWeights(text, file, name, {})
    config = _downloaded(repository, ("config.json",), commit, label)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        info = json.loads(config.read_text(encoding="utf-8"))
        if timm.is_model(info["architecture"]):
            return PublicWeights(text, file, f"local-dir:{file.parent}", info)
    raise UserError(f"{label} is not in timm's format: config.json of '{repository}' names no model of timm")


def _downloaded(repository: str, files: tuple[str, ...], revision: str, label: str) -> Path:
    """Return the first of the files that the repository has, from the cache if the hub is out of reach."""
    for file in files:
        try:
            return Path(hf_hub_download(repository, file, revision=revision, cache_dir=constants.HF_HUB_CACHE))
        except Exception as error:  # of requests, httpx or huggingface_hub
            if not isinstance(error, EntryNotFoundError) or file == files[-1]:
                why = next((why for kind, why in _REASONS.items() if isinstance(error, kind)), in_short(error))
                source = f"'{repository}' on {constants.ENDPOINT}"
                raise UserError(f"{label} cannot be fetched from {source}: {why}") from error
    raise AssertionError(files)
