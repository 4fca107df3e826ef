"""Files of weights, of this and of other tools: in which entry and under which prefix the weights of a model lie.

Nothing in a file is executed: torch builds tensors and plain containers, and of all classes ``argparse.Namespace``, in
which DINO and MAE keep their arguments.
"""

import argparse
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from os.path import commonprefix
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from idmm.errors import UserError, listed
from idmm.files import WEIGHTS_WANTED, weights_label

_DEPTH = 8  # words of a prefix at most; lightly-train has 4
# words of prefixes: if networks of a file fit alike, the first come before the others, the last after them
_FIRST, _LAST = {"teacher", "ema"}, {"student", "momentum", "key", "k"}
_OBJECTS = "Python objects, which are never run"
_ALONE = "give what the tool exports, or save weights alone: torch.save(model.state_dict(), path)"


def read_weights(path: Path, field: str) -> tuple[dict[str, Tensor], str, list[str]]:
    """Reads the weights in all entries of a file, at any depth.

    Args:
        path: Of a file of torch's or safetensors'.
        field: Config field that names it, with which messages begin.

    Returns:
        The weights by name, which begins with the entries that hold them, a dot after each. Then what all these names
        begin with and has been taken off: a common entry, ``module.`` and ``_orig_mod.``. Then the entries without any.

    Raises:
        UserError: The file is damaged, holds no weights, or holds Python objects.
    """
    state, others, places = {}, [], set()
    try:
        # torch warns of files that it then refuses
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")
            if path.suffix.lower() == ".safetensors":
                content = load_file(path)
            else:
                content = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(content, dict):
            _collect(content, "", state, places, set())
            others = [name for name in map(_printable, content) if name not in state]
            others = [name for name in others if not any(weight.startswith(f"{name}.") for weight in state)]
    except Exception as error:  # a damaged file fails in any way it likes
        raise UserError(f"{weights_label(path, field)} {_refusal(str(error), type(error).__name__)}") from error
    if not state:
        entries = f" (its entries: {listed(others, 8)})" if others else ""
        raise UserError(f"{weights_label(path, field)} holds no weights{entries}; {WEIGHTS_WANTED}")
    nest = places.pop() if len(places) == 1 else ""
    nest += re.match(r"((module|_orig_mod)\.)*", commonprefix([name[len(nest) :] for name in state])).group()
    return {name[len(nest) :]: value for name, value in state.items()}, nest, others


def _collect(entries: dict, place: str, state: dict[str, Tensor], places: set[str], seen: set[int]) -> None:
    """Adds the weights among the entries of a dict to ``state``, and where they lie to ``places``."""
    seen.add(id(entries))  # a dict may hold itself
    for key, value in entries.items():
        if isinstance(key, str) and isinstance(value, Tensor):
            state[place + _printable(key)] = value
            places.add(place)
        elif isinstance(key, str) and isinstance(value, dict) and id(value) not in seen:
            _collect(value, f"{place}{_printable(key)}.", state, places, seen)


def _printable(key: object) -> str:
    """Returns the name of an entry for messages of one line."""
    return name if (name := f"{key}").isprintable() else ascii(name)


def _refusal(text: str, kind: str) -> str:
    """Returns why torch refused a file."""
    if found := re.search(r"nsupported (?:global: )?GLOBAL ([\w.]+)", text):
        return f"holds {_OBJECTS} ({found[1].rstrip('.')}); {_ALONE}"
    if "TorchScript" in text:
        return f"holds {_OBJECTS} (a TorchScript archive); {_ALONE}"
    if "nsupported operand" in text:
        return f"cannot be read as a checkpoint: it is damaged or holds {_OBJECTS}; {_ALONE}"
    return f"cannot be read as a checkpoint ({kind}); {WEIGHTS_WANTED}"


def best_part(
    model: nn.Module, state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], nest: str
) -> tuple[str, dict[str, Tensor]]:
    """Finds the network in a file that is most like a model.

    Args:
        model: Its layers are also found by their numbers, as in lightly's ``nn.Sequential(*model.children())``, and
            where it has a method ``checkpoint_filter_fn(state)``, by the names that this converts.
        state: The weights of the file by their whole names.
        wanted: The weights of the model that are to be loaded.
        nest: The prefix to return if less than half of these are found anywhere.

    Returns:
        The prefix under which the most names and shapes fit, and the weights under it by the model's names. If networks
        fit alike, averages and teachers come first, students, momentum and key encoders last, then the file's order.
    """
    parts: dict[str, dict[str, Tensor]] = {nest: {}}
    numbered = {str(number): name for number, (name, _) in enumerate(model.named_children())}
    for name, value in state.items():
        for prefix in _prefixes(name):
            first, dot, rest = name[len(prefix) :].partition(".")
            own = f"{numbered.get(first, first)}{dot}{rest}"
            parts.setdefault(prefix, {})[own if own in wanted else name[len(prefix) :]] = value
    if convert := getattr(model, "checkpoint_filter_fn", None):
        parts = {prefix: convert(part) for prefix, part in parts.items()}

    def likeness(prefix):
        shapes = [value.shape == wanted[name].shape for name, value in parts[prefix].items() if name in wanted]
        return len(shapes) + sum(shapes), -_rank(prefix)

    best = max(parts, key=likeness)
    prefix = best if 2 * len(parts[best].keys() & wanted.keys()) >= len(wanted) else nest
    return prefix, parts[prefix]


def _prefixes(name: str) -> list[str]:
    ends = (dot.end() for dot in re.finditer(r"\.", name))
    return ["", *(name[:end] for end in itertools.islice(ends, _DEPTH))]


def _rank(prefix: str) -> int:
    words = set(re.split(r"[._]", prefix))
    return 0 if words & _FIRST else 2 if words & _LAST else 1


def beside(names: Iterable[str], prefix: str) -> Counter[str]:
    """Counts the weights that do not begin with a prefix, by the shortest beginning that shows it."""
    counts: Counter[str] = Counter()
    for name in names:
        if not name.startswith(prefix):
            common = commonprefix([name, prefix]).rpartition(".")
            begin = common[0] + common[1]
            counts[begin + name[len(begin) :].partition(".")[0]] += 1
    return counts


def contents(names: Iterable[str], others: Iterable[str]) -> str:
    """Returns for a message which entries a file has, and how a third or more of its weights are named."""
    names = list(names)
    entries = dict.fromkeys([*(name.partition(".")[0] for name in names), *others])
    counts = Counter(prefix for name in names for prefix in _prefixes(name))
    common = max((prefix for prefix, count in counts.items() if 3 * count >= len(names)), key=len, default="")
    share = f"; {counts[common]} of {len(names)} weights begin with '{common}'" if common else ""
    return f"its entries: {listed(entries, 8)}{share}"
