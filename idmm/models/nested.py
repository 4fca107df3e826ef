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

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from idmm.errors import UserError
from idmm.files import WEIGHTS_EXPECTED, weights_label
from idmm.models.base import Tensors
from idmm.text import listed

MAX_DEPTH = 8  # words in a prefix. lightly-train has 4
# words in prefixes: of equally similar networks, the first kind is preferred and the last kind
# avoided
PREFERRED = {"teacher", "ema"}
AVOIDED = {"student", "momentum", "key", "k"}
OBJECTS = "Python objects, which are never run"
REMEDY = "Use the file that the tool exports, or save only the weights: torch.save(model.state_dict(), path)"


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
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # torch warns of files that it then refuses
            if path.suffix.lower() == ".safetensors":
                content = load_file(path)
            else:
                content = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(content, dict):
            state = dict(_weights(content))
        else:
            state = {}
    except Exception as error:  # a damaged file can raise anything
        why = f"cannot be read as a checkpoint: it is damaged or holds {OBJECTS}"
        if match := re.search(r"nsupported (?:global: )?GLOBAL ([\w.]+)", str(error)):
            why = f"holds {OBJECTS} ({match[1].rstrip('.')})"
        raise UserError(f"{weights_label(path, field)} {why}. {REMEDY}") from error
    if not state:
        if isinstance(content, dict):
            names = listed(map(str, content), 8)
        else:
            names = ""
        entries = f" (its entries: {names})" if names else ""
        raise UserError(
            f"{weights_label(path, field)} holds no weights{entries}, {WEIGHTS_EXPECTED}"
        )
    return state


def _weights(entries: dict, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
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
    networks = defaultdict(dict)
    layers = {str(number): name for number, (name, _) in enumerate(model.named_children())}
    for full_name, value in state.items():
        ends = [dot.end() for dot in re.finditer(r"\.", full_name)][:MAX_DEPTH]
        for prefix in ["", *(full_name[:end] for end in ends)]:
            name = full_name[len(prefix) :]
            first, dot, rest = name.partition(".")
            layer_name = f"{layers.get(first, first)}{dot}{rest}"
            networks[prefix][layer_name if layer_name in targets else name] = value
    if convert := getattr(model, "checkpoint_filter_fn", None):
        networks = {prefix: convert(network) for prefix, network in networks.items()}

    def similarity(prefix: str) -> tuple[int, int]:
        shapes = [
            value.shape == targets[name].shape
            for name, value in networks[prefix].items()
            if name in targets
        ]
        words = set(re.split(r"[._]", prefix))
        return len(shapes) + sum(shapes), 2 if words & PREFERRED else 0 if words & AVOIDED else 1

    best = max(networks, key=similarity)
    if 2 * len(networks[best].keys() & targets.keys()) >= len(targets):
        prefix = best
    else:
        prefix = ""
    return prefix, networks[prefix]
