"""Epochs or minutes: which of the files, flags and layers of a grid says how long a stage trains. The last one does."""

from collections.abc import Mapping
from typing import Any

TWO_LENGTHS = "train.minutes: given beside epochs, which it replaces; give one of the two"


def says_epochs(keys: Mapping[str, Any]) -> bool:
    """Whether a stage's keys, dotted, say how many epochs it trains."""
    stages = keys.get("stages")
    own = [stage.get("epochs") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    return any(epochs is not None for epochs in (keys.get("train.epochs"), *own))


def says_two_lengths(keys: Mapping[str, Any]) -> bool:
    """Whether a stage's keys, dotted, say both."""
    return says_epochs(keys) and keys.get("train.minutes") is not None


def flatten(config: dict, prefix: str = "") -> dict[str, Any]:
    """Turns nested sections into dotted keys, ``{"train": {"lr": 1}}`` -> ``{"train.lr": 1}``."""
    flat = {}
    for key, value in config.items():
        inner = isinstance(value, dict) and value and key != "kwargs"
        flat.update(flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value})
    return flat


def overrule_minutes(data: dict, new: dict) -> None:
    """Removes ``train.minutes`` from nested ``data`` where what is about to be merged into it says epochs instead; in
    the sections of a grid, too."""
    keys = flatten(new)
    if says_epochs(keys) and "train.minutes" not in keys:
        data.pop("train.minutes", None)
        if isinstance(data.get("train"), dict):
            data["train"].pop("minutes", None)
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            overrule_minutes(data[key], value)
