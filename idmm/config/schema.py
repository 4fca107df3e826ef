"""The keys of configs: those that may stand in a file, those that are flags, and how mappings of them are merged."""

import copy
import dataclasses
import functools
import types
from typing import Any, NamedTuple, Union, get_args, get_origin

WHOLE = ("kwargs", "subset", "labelled")  # mappings that are replaced, not merged


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


def is_switch(kind: Any) -> bool:
    """Whether a key is true, false or null: its flag means true where it stands without a value."""
    return {bool} == {*options(kind)} - {type(None)}


def flatten(config: dict, prefix: str = "") -> dict[str, Any]:
    """Turns nested sections into dotted keys, ``{"train": {"lr": 1}}`` -> ``{"train.lr": 1}``."""
    flat = {}
    for key, value in config.items():
        inner = isinstance(value, dict) and value and key != "kwargs"
        flat.update(flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value})
    return flat


def merged(*layers: dict) -> dict:
    """Returns mappings, whose keys may be dotted, as one nested mapping; of two values the later one stays."""
    data: dict = {}
    for layer in layers:
        _merge(data, copy.deepcopy(layer))
    return data


def _merge(data: dict, new: dict) -> None:
    for key, value in new.items():
        place, (*parents, name) = data, str(key).split(".")
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place = place[parent]
        if isinstance(value, dict) and name not in WHOLE:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            _merge(place[name], value)
        else:
            place[name] = value
