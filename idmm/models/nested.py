"""Files of weights, of idmm and of other tools: which entry and prefix hold the weights of a model.

Nothing in a file is executed. torch builds only tensors, plain containers and
``argparse.Namespace``, in which DINO and MAE store their arguments.
"""

import argparse
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from idmm.errors import UserError
from idmm.files import WEIGHTS_EXPECTED, weights_fault
from idmm.models.base import Tensors
from idmm.text import listed

MAX_DEPTH = 8  # words in a prefix. lightly-train has 4
# words in prefixes: of equally similar networks, the first kind is preferred and the last kind
# avoided
PREFERRED = {"teacher", "ema"}
AVOIDED = {"student", "momentum", "key", "k"}
OBJECTS = "Python objects, which are never run"
REMEDY = (
    "Use the file that the tool exports, or save only the weights: "
    "torch.save(model.state_dict(), path)"
)


def read_weights(path: Path, field: str) -> Tensors:
    """Read the weights in all entries of a file, at any depth.

    Args:
        path: A file of torch or safetensors.
        field: Config field for messages.

    Returns:
        The weights by name. A name begins with the entries that hold the weight, joined by dots.

    Raises:
        UserError: The file is damaged, has no weights, or has Python objects.
    """
    try:
        content = _content(path)
        state = dict(_weights(content))
    except Exception as error:  # a damaged file can raise anything
        refused = re.search(r"nsupported (?:global: )?GLOBAL ([\w.]+)", str(error))
        text = f"cannot be read as a checkpoint: it is damaged or holds {OBJECTS}"
        if refused:
            text = f"holds {OBJECTS} ({refused[1].rstrip('.')})"
        raise UserError(weights_fault(path, field, text, REMEDY)) from error
    if state:
        return state
    text = f"holds no weights, {WEIGHTS_EXPECTED}"
    if content:
        text = f"holds no weights (its entries: {listed(map(str, content), 8)}), {WEIGHTS_EXPECTED}"
    raise UserError(weights_fault(path, field, text))


def _content(path: Path) -> dict[Any, Any]:
    """Return the entries of a file, none if it holds something else."""
    with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.simplefilter("ignore")  # torch warns of files that it then refuses
        if path.suffix.lower() == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    return content if isinstance(content, dict) else {}


def _weights(entries: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in a dict at any depth, with their names."""
    for key, value in entries.items():
        if isinstance(key, str) and isinstance(value, Tensor):
            yield prefix + key, value
        elif isinstance(key, str) and isinstance(value, dict):
            yield from _weights(value, f"{prefix}{key}.")


def best_network(
    model: nn.Module, state: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> tuple[str, Tensors]:
    """Find the network in a file that is most similar to a model.

    Args:
        model: Its layers are also found by number, as in lightly's
            ``nn.Sequential(*model.children())``. A method ``checkpoint_filter_fn(state)`` converts
            other names.
        state: All weights of the file.
        targets: The weights of the model to load.

    Returns:
        The prefix with the most matching names and shapes, and its weights by the model's names.
        Among equals the order is averages and teachers, others, students and momentum or key
        encoders, then the file's order. If none has half of ``targets``: no prefix and all weights.
    """
    layers = {str(number): name for number, (name, _) in enumerate(model.named_children())}
    networks: dict[str, Tensors] = defaultdict(dict)
    for full_name, value in state.items():
        for prefix in _prefixes(full_name):
            name = full_name[len(prefix) :]
            first, dot, rest = name.partition(".")
            layer_name = f"{layers.get(first, first)}{dot}{rest}"
            if layer_name in targets:
                name = layer_name
            networks[prefix][name] = value
    convert = getattr(model, "checkpoint_filter_fn", None)  # of some models
    if convert is not None:
        networks = {prefix: convert(network) for prefix, network in networks.items()}

    def similarity(prefix: str) -> tuple[int, int]:
        points = 0  # one for a name, one more for its shape
        for name, value in networks[prefix].items():
            if name in targets:
                points += 1 + (value.shape == targets[name].shape)
        words = set(re.split(r"[._]", prefix))
        return points, max(2 * bool(words & PREFERRED), not words & AVOIDED)

    best = max(networks, key=similarity)
    if 2 * len(networks[best].keys() & targets.keys()) < len(targets):
        best = ""
    return best, networks[best]


def _prefixes(name: str) -> list[str]:
    """Return the beginnings of a name that end with a dot, and the empty one."""
    dots = [match.end() for match in re.finditer(r"\.", name)]
    return ["", *(name[:end] for end in dots[:MAX_DEPTH])]
