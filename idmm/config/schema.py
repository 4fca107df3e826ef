"""The keys of a config class, and how mappings of keys are merged."""

import copy
import dataclasses
import functools
import types
from collections import defaultdict
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic_core import to_jsonable_python

# mappings that a later file or flag replaces instead of merging
REPLACED = ("kwargs", "subset", "labelled")


class Key(NamedTuple):
    """A key of a config."""

    key: str  # with dots, within the items of a list e.g. ``stages[].size``
    kind: Any  # its type
    help: str  # one or two sentences, with the meaning of null
    # as YAML, empty if null or required. Of options that differ between methods, one default per
    # method
    default: str
    required: bool
    owner: type  # the class that it is a field of
    sections: tuple[type, ...]  # the classes of the keys within it

    @property
    def text(self) -> str:
        """The help with the default."""
        if self.required:
            end = "Required."
        else:
            end = self.default and f"Default: {self.default}."
        return f"{self.help} {end}".rstrip()

    @property
    def metavar(self) -> str:
        """The type in capital letters, or the choices."""
        words = {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT", list: "LIST"}
        sets = [option for option in options(self.kind) if get_origin(option) is Literal]
        choices = ",".join(str(value) for option in sets for value in get_args(option))
        names = ["{" + choices + "}"] if sets else []
        others = [
            option
            for option in options(self.kind)
            if option not in sets and option is not type(None)
        ]
        return "|".join(
            dict.fromkeys(
                [*names, *(words.get(get_origin(one) or one, "MAPPING") for one in others)]
            )
        )


@functools.cache
def keys_of(kind: type, prefix: str = "") -> tuple[Key, ...]:
    """Return all keys that a config may have, including sections and the keys of list items."""
    keys = []
    for name, info in kind.__pydantic_fields__.items():
        default = info.get_default(call_default_factory=True)
        required = (
            info.is_required() or default is None and type(None) not in options(info.annotation)
        )
        sections = _sections(info.annotation)
        help_text = " ".join((info.description or "").split())
        default_text = ""
        if not required and default is not None:
            value = to_jsonable_python(default)
            default_text = (
                yaml.safe_dump(value, default_flow_style=True, width=1000)
                .removesuffix("...\n")
                .strip()
            )
        keys.append(
            Key(prefix + name, info.annotation, help_text, default_text, required, kind, sections)
        )
        keys += _shared_keys(sections, f"{prefix}{name}.") if len(sections) > 1 else ()
        items = [
            _sections(get_args(option)[0])
            for option in options(info.annotation)
            if get_origin(option) is list
        ]
        for inner, mark in [
            (sections if len(sections) == 1 else (), "."),
            *((one, "[].") for one in items),
        ]:
            keys += [key for section in inner for key in keys_of(section, f"{prefix}{name}{mark}")]
    return tuple(keys)


def _shared_keys(sections: tuple[type, ...], prefix: str) -> list[Key]:
    """Return the keys of a union of sections, each key once, with the sections that have it in its
    help."""
    owner = next(
        base
        for base in sections[0].__mro__
        if all(issubclass(section, base) for section in sections)
    )
    by_name = defaultdict(dict)
    for section in sections:
        for key in keys_of(section):
            by_name[key.key][section.name] = key
    keys = []
    for name, same in by_name.items():
        kinds = [key.kind for key in same.values()]
        help_text = next(iter(same.values())).help
        default = sections[0].name
        if name != "name":
            help_text = f"{', '.join(same)}: {help_text}"
            users = defaultdict(list)
            for section, key in same.items():
                users[key.default].append(section)
            values = [
                f"{value} ({', '.join(names)})" if len(users) > 1 else value
                for value, names in users.items()
            ]
            # the help of a null default names the others
            if "" in users:
                default = ""
            else:
                default = ", ".join(values)
        keys.append(Key(prefix + name, Union[*kinds], help_text, default, False, owner, ()))
    return keys


def flags_of(kind: type) -> list[Key]:
    """Return the keys that are flags: those of no list item, and no sections except those that may
    be null."""
    return [
        key
        for key in keys_of(kind)
        if "[]" not in key.key and (not key.sections or type(None) in options(key.kind))
    ]


def _sections(kind: Any) -> tuple[type, ...]:
    return tuple(option for option in options(kind) if dataclasses.is_dataclass(option))


def options(kind: Any) -> tuple:
    """Return the members of a union, or the type itself, without their ranges."""
    if get_origin(kind) in (Union, types.UnionType):
        members = get_args(kind)
    else:
        members = (kind,)
    return tuple(get_args(one)[0] if get_origin(one) is Annotated else one for one in members)


def flatten(config: dict, prefix: str = "") -> dict:
    """Turn nested sections into dotted keys, ``{"train": {"lr": 1}}`` -> ``{"train.lr": 1}``."""
    flat = {}
    for key, value in config.items():
        is_section = isinstance(value, dict) and value and key != "kwargs"
        flat.update(flatten(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value})
    return flat


def merged(*layers: dict) -> dict:
    """Return mappings, whose keys may be dotted, as one nested mapping. Later values replace
    earlier ones."""
    data = {}
    for layer in layers:
        for key, value in copy.deepcopy(layer).items():
            name, _, inner = str(key).partition(".")
            if (
                value is None
                and isinstance(data.get(name), dict)
                and name not in REPLACED
                and not inner
            ):
                continue  # a section without keys
            if inner or (isinstance(value, dict) and name not in REPLACED):
                before = data.get(name)
                value = merged(
                    before if isinstance(before, dict) else {}, {inner: value} if inner else value
                )
            data[name] = value
    return data
