"""Public weights, ``timm:NAME`` and ``hf-hub:ORG/NAME``: on the Hugging Face hub, kept in its cache, read by timm.

huggingface_hub fetches (environment variables HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN) and lets no two processes
fetch one file at a time; timm turns whatever format weights are published in into its own.
"""

import functools
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars
from timm.models import get_pretrained_cfg
from torch import Tensor

from idmm.errors import UserError, in_short, nearest
from idmm.files import is_public, weights_label
from idmm.models.build import accepts

log = logging.getLogger("idmm")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
OURS = ("grey_range", "range", "bands", "file_channels")  # what idmm's own exports add to config.json
_REASONS = {  # a subclass before its parent
    GatedRepoError: "accept its terms there, then run 'hf auth login' or set HF_TOKEN",
    RepositoryNotFoundError: "no such repository, or a private one ('hf auth login', or set HF_TOKEN)",
    RevisionNotFoundError: "no such branch, tag or commit",
    LocalEntryNotFoundError: "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set",
    EntryNotFoundError: f"it has no {' and no '.join(WEIGHTS)} with a config.json, timm's format",
}


@dataclass(frozen=True)
class PublicWeights:
    """Public weights as they lie in the cache.

    Attributes:
        text: Their name with the commit of the repository, which names the same weights for ever.
        file: The weights.
        builds: What ``timm.create_model`` takes: a name with its tag, or the folder with ``config.json``.
        about: What ``config.json`` says; empty for timm's names.
    """

    text: str
    file: Path
    builds: str
    about: dict[str, Any]

    def read(self, state: dict[str, Tensor], label: str) -> dict[str, Any]:
        """Returns the fields of a :class:`idmm.models.weights.Checkpoint`, from what ``file`` holds; messages begin
        with ``label``.

        Raises:
            UserError: The weights are not those of the model that they are said to be of.
        """
        overlay = {"state_dict": state, "source": None}  # in place of what it would look for
        try:
            with torch.random.fork_rng(devices=[]):
                model = timm.create_model(self.builds, pretrained=True, pretrained_cfg_overlay=overlay)
        except Exception as error:  # constructors raise any kind
            raise UserError(f"{label} does not fit the model that it is said to be of: {in_short(error)}") from error
        looks = model.pretrained_cfg
        name, (chans, *size) = looks["architecture"], looks["input_size"]
        kwargs = {**(self.about.get("model_args") or {}), **({} if chans == 3 else {"in_chans": chans})}
        if accepts(name, "img_size"):
            kwargs["img_size"] = size
        extra = {key.removeprefix("grey_"): self.about[key] for key in OURS if key in self.about}
        found = {"state": model.state_dict(), "source": self.text, "name": name, "kwargs": kwargs, "size": size}
        found |= {key: looks[key] for key in ("crop_pct", "interpolation")}
        return found | {"mean": tuple(looks["mean"]), "std": tuple(looks["std"]), "extra": extra}


def pinned(init: str | None, field: str = "init") -> str | None:
    """Returns weights to start from as they are given; public ones with the commit that their name means now.

    Raises:
        UserError: See :func:`public_weights`.
    """
    return public_weights(init, field).text if is_public(init) else init


@functools.cache
def public_weights(text: str, field: str = "") -> PublicWeights:
    """Finds public weights in the cache, or fetches them; within a process a name always means the same commit.

    The first process of a run shows how far the download is. If the hub is out of reach, what the cache has serves.

    Args:
        text: ``timm:NAME`` or ``hf-hub:ORG/NAME``, maybe with ``@REVISION``.
        field: Config field that names it, with which messages then begin.

    Raises:
        UserError: No such name or repository, not in timm's format, or out of reach and not in the cache.
    """
    label = weights_label(text, field)
    name, _, revision = text.partition("@")
    kind, _, name = name.partition(":")
    name, repository, files = _registered(name, label) if kind == "timm" else (name, name, WEIGHTS)
    if os.environ.get("RANK", "0") != "0":
        disable_progress_bars()
    cache = _cache(repository)
    file = _fetched(cache, repository, files, revision or constants.DEFAULT_REVISION, label)
    commit = file.relative_to(cache).parts[2]  # models--ORG--NAME/snapshots/COMMIT/FILE
    text = f"{kind}:{name}@{commit}"
    if kind == "timm":
        return PublicWeights(text, file, name, {})
    about = _described(_fetched(cache, repository, ("config.json",), commit, label), repository, label)
    return PublicWeights(text, file, f"local-dir:{file.parent}", about)


def _registered(name: str, label: str) -> tuple[str, str, tuple[str, ...]]:
    """Weights that timm knows by name: their name with its tag, the repository, and the files that may hold them, the
    best one first."""
    names = timm.list_models(pretrained=True)
    cfg = get_pretrained_cfg(name) if name in names or ("." not in name and timm.is_model(name)) else None
    if cfg is None or not cfg.hf_hub_id:
        raise UserError(f"{label} is not among timm's weights on the hub{nearest(name, names + timm.list_models())}")
    files = (cfg.hf_hub_filename,) if cfg.hf_hub_filename else WEIGHTS
    return f"{name.partition('.')[0]}.{cfg.tag}" if cfg.tag else name, cfg.hf_hub_id, files


def _cache(repository: str) -> Path:
    """Returns huggingface_hub's cache, or a temporary folder where that has no place or cannot take the repository."""
    usual = Path(constants.HF_HUB_CACHE)
    place = next(folder for folder in (usual.absolute(), *usual.absolute().parents) if os.path.lexists(folder))
    known = os.path.isdir(usual / f"models--{repository.replace('/', '--')}")
    if usual.parts[0][0] != "~" and (known or place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return usual
    folder = Path(tempfile.gettempdir(), f"idmm-{os.getuid()}", "hub")
    if not os.access(constants.HF_TOKEN_PATH, os.R_OK):  # in another user's home, which is an error there
        constants.HF_TOKEN_PATH = str(folder / "token")
    log.warning("cannot write to '%s': public weights are kept in '%s'; set HF_HOME", usual, folder)
    return folder


def _fetched(cache: Path, repository: str, files: tuple[str, ...], revision: str, label: str) -> Path:
    """Returns the first of the files that a repository has, from the cache if the hub is out of reach."""
    for file in files:
        try:
            return Path(hf_hub_download(repository, file, revision=revision, cache_dir=cache))
        except Exception as error:  # by version of huggingface_hub: requests', httpx's and its own kinds
            if not isinstance(error, EntryNotFoundError) or file == files[-1]:
                where = f"'{repository}' on {constants.ENDPOINT}"
                why = next((why for kind, why in _REASONS.items() if isinstance(error, kind)), in_short(error))
                raise UserError(f"{label} cannot be fetched from {where}: {why}") from error
    raise AssertionError(files)


def _described(file: Path, repository: str, label: str) -> dict[str, Any]:
    """Reads what ``config.json`` says of a model."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        known = timm.is_model(about["architecture"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise UserError(f"{label} is not in timm's format: config.json of '{repository}' names no model of timm")
    return about
