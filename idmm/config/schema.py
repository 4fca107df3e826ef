"""The keys of configs: those that may stand in a file, those that are flags, and those that replace one another."""

import dataclasses
import functools
import types
from typing import Any, NamedTuple, Union, get_args, get_origin


class Key(NamedTuple):
    """A key of a config."""

    key: str  # with dots between; within the items of a list e.g. ``stages[].size``.
    kind: Any
    help: str
    default: Any
    owner: type  # the class that it is a field of
    section: type | None  # the class of the keys within it


@functools.cache
def keys_of(kind: type, prefix: str = "") -> tuple[Key, ...]:
    """Returns all keys that may stand in a config, sections and list items included."""
    keys = []
    for name, info in kind.__pydantic_fields__.items():
        section = next((option for option in options(info.annotation) if dataclasses.is_dataclass(option)), None)
        default = info.get_default(call_default_factory=True)
        keys.append(Key(prefix + name, info.annotation, info.description or "", default, kind, section))
        items = (get_args(option)[0] for option in options(info.annotation) if get_origin(option) is list)
        for inner, mark in [(section, "."), *((item, "[].") for item in items)]:
            keys += keys_of(inner, f"{prefix}{name}{mark}") if dataclasses.is_dataclass(inner) else ()
    return tuple(keys)


def flags_of(kind: type) -> list[Key]:
    """Returns the keys that are flags: those of no list item, and no sections but such as may be null."""
    return [key for key in keys_of(kind) if "[]" not in key.key and (key.section is None or key.default is None)]


def options(kind: Any) -> tuple:
    """Returns the members of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def switches(kind: type) -> list[str]:
    """Returns the keys whose flags mean true where they stand without a value: those that are true, false or null."""
    return [leaf.key for leaf in flags_of(kind) if {bool} == {*options(leaf.kind)} - {type(None)}]


def main_key(kind: type, key: str) -> str | None:
    """Returns the key that is meant where a section is given as one word: ``data DIR`` is ``data.root``."""
    main = next((getattr(known.section, "MAIN", None) for known in keys_of(kind) if known.key == key), None)
    return main and f"{key}.{main}"


def unknown_keys(kind: type, data: dict) -> list[str]:
    """Returns the keys of a file and of its sections that a config of this kind does not have."""
    known, strange = {key.key: key.section for key in keys_of(kind)}, []
    for key, value in data.items():
        within = value if isinstance(value, dict) and known.get(key) else ()
        strange += [name for name in (key, *(f"{key}.{name}" for name in within)) if name not in known]
    return strange


def odd_keys(data: Any, prefix: str = "") -> list[str]:
    """Returns keys that are no text, such as the 1 of ``{1: 2}``; a model's arguments may hold any."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    odd = []
    for key, value in items:
        place = f"{prefix}[{key}]" if isinstance(data, list) else f"{prefix}.{key}" if prefix else str(key)
        if isinstance(data, dict) and not isinstance(key, str):
            odd.append(place)
        elif key != "kwargs":
            odd += odd_keys(value, place)
    return odd


def flatten(config: dict, prefix: str = "") -> dict[str, Any]:
    """Turns nested sections into dotted keys, ``{"train": {"lr": 1}}`` -> ``{"train.lr": 1}``."""
    flat = {}
    for key, value in config.items():
        inner = isinstance(value, dict) and value and key != "kwargs"
        flat.update(flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value})
    return flat


def nested(config: dict) -> dict:
    """Turns dotted keys into sections, ``{"train.lr": 1}`` -> ``{"train": {"lr": 1}}``; what stands later counts."""
    found: dict = {}
    for key, value in config.items():
        *sections, name = key.split(".") if isinstance(key, str) else [key]
        place = found
        for section in sections:
            place[section] = dict(place[section]) if isinstance(place.get(section), dict) else {}
            place = place[section]
        both = isinstance(value, dict) and isinstance(place.get(name), dict)
        place[name] = {**place[name], **value} if both else value
    return found


# ------------------------------------------------------------------ epochs or minutes: what is said last counts
def two_lengths(keys: dict[str, Any]) -> list[str]:
    """Returns what is wrong where a stage's flat keys say both how many epochs it trains and how many minutes."""
    both = _says_epochs(keys) and keys.get("train.minutes") is not None
    return ["train.minutes: given beside epochs, which it replaces; give one of the two"] if both else []


def overrule_minutes(data: dict, new: dict) -> None:
    """Removes ``train.minutes`` and its ``train.max_epochs`` from nested ``data`` where what is about to be merged into
    it says epochs instead; in the sections of a grid, too."""
    keys = flatten(new)
    if _says_epochs(keys) and "train.minutes" not in keys:
        for name in ("minutes", "max_epochs"):
            data.pop(f"train.{name}", None)
            if isinstance(data.get("train"), dict):
                data["train"].pop(name, None)
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            overrule_minutes(data[key], value)


def _says_epochs(keys: dict[str, Any]) -> bool:
    """Whether a stage's keys, dotted, say how many epochs it trains."""
    stages = keys.get("stages")
    own = [stage.get("epochs") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    return any(epochs is not None for epochs in (keys.get("train.epochs"), *own))
