"""What the classes of a config say: their flags, their sections, the keys that may stand in a file."""

import dataclasses
import types
from typing import Any, NamedTuple, Union, get_args, get_origin


class Flag(NamedTuple):
    """A leaf of the config: one flag."""

    key: str
    kind: Any
    help: str
    default: Any
    section: type


def flags_of(kind: type, prefix: str = "") -> list[Flag]:
    """Returns the leaves of a config and of its sections."""
    leaves = []
    for item in dataclasses.fields(kind):
        info = kind.__pydantic_fields__[item.name]
        section = _dataclass(info.annotation)
        default = info.get_default(call_default_factory=True)
        if section is None or default is None:
            leaves.append(Flag(prefix + item.name, info.annotation, info.description or "", default, kind))
        if section is not None:
            leaves += flags_of(section, f"{prefix}{item.name}.")
    return leaves


def _dataclass(kind: Any) -> type | None:
    return next((option for option in options(kind) if dataclasses.is_dataclass(option)), None)


def options(kind: Any) -> tuple:
    """Returns the members of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def switches(kind: type) -> list[str]:
    """Returns the keys whose flags mean true where they stand without a value."""
    return [leaf.key for leaf in flags_of(kind) if leaf.kind is bool]


def section_of(kind: type, key: str) -> type | None:
    """Returns the class of a section by its dotted name; None where there is no such section."""
    found: type | None = kind
    for name in key.split("."):
        info = getattr(found, "__pydantic_fields__", {}).get(name)
        found = info and _dataclass(info.annotation)
    return found


def main_key(kind: type, key: str) -> str | None:
    """Returns the key that is meant where a section is given as one word: ``data DIR`` is ``data.root``."""
    main = getattr(section_of(kind, key), "MAIN", None)
    return main and f"{key}.{main}"


def keys_of(kind: type, prefix: str = "") -> list[str]:
    """Returns all keys that may stand in a config, sections and list items included."""
    keys = []
    for name, info in kind.__pydantic_fields__.items():
        keys.append(prefix + name)
        for option in options(info.annotation):
            inner = get_args(option)[0] if get_origin(option) is list else option
            if dataclasses.is_dataclass(inner):
                keys += keys_of(inner, prefix + name + ("[]." if inner is not option else "."))
    return keys


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
