"""The keys of a config class, and how mappings of keys are merged."""

import copy
import dataclasses
import functools
import types
from collections import defaultdict
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from idmm.files import Json

# mappings that a later file or flag replaces instead of merging
REPLACED = ("kwargs", "subset", "labelled")


def command_of(kind: type) -> str | None:
    """Return the command of a config class. None: its config is saved nowhere."""
    command: str | None = getattr(kind, "COMMAND", None)  # only some classes have one
    return command


class Key(NamedTuple):
    """A key of a config."""

    key: str  # with dots, within the items of a list e.g. ``stages[].size``
    kind: Any  # its type
    help: str  # one or two sentences, with the meaning of null
    # as YAML, empty if null or required. One per method if it differs between methods
    default: str
    required: bool
    owner: type  # the class that it is a field of
    sections: tuple[type, ...]  # the classes of the keys within it

    @property
    def text(self) -> str:
        """The help with the default."""
        if self.required:
            return f"{self.help} Required."
        if self.default:
            return f"{self.help} Default: {self.default}."
        return self.help

    @property
    def nullable(self) -> bool:
        """Whether the value may be null."""
        return type(None) in options(self.kind)

    @property
    def types(self) -> set[Any]:
        """The types of its values, without null."""
        types = set()
        for option in options(self.kind):
            choices = get_args(option) if get_origin(option) is Literal else ()
            types.add(type(choices[0]) if choices else option)
        return types - {type(None)}

    @property
    def metavar(self) -> str:
        """The type in capital letters, or the choices."""
        words = {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT", list: "LIST"}
        choices: list[str] = []
        names = []
        for option in options(self.kind):
            if get_origin(option) is Literal:
                choices += map(str, get_args(option))
            elif option is not type(None):
                names.append(words.get(get_origin(option) or option, "MAPPING"))
        if choices:
            names.insert(0, f"{{{','.join(choices)}}}")
        return "|".join(dict.fromkeys(names))


def fields_of(section: type) -> dict[str, FieldInfo]:
    """Return the fields of a section of a config by name."""
    assert is_pydantic_dataclass(section)
    return section.__pydantic_fields__


def made_by_default(kind: type) -> set[str]:
    """Return the keys whose default is made anew for each config, for which null stands, too."""
    assert is_pydantic_dataclass(kind)
    fields = dataclasses.fields(kind)
    return {field.name for field in fields if field.default_factory is not dataclasses.MISSING}


@functools.cache
def keys_of(kind: type, prefix: str = "") -> tuple[Key, ...]:
    """Return all keys that a config may have, including sections and the keys of list items."""
    keys = []
    for name, info in fields_of(kind).items():
        default = info.get_default(call_default_factory=True)
        required = info.is_required()
        default_text = ""
        if default is None:
            required = required or type(None) not in options(info.annotation)
        elif not required:
            default_text = _as_yaml(to_jsonable_python(default))
        sections = _sections(info.annotation)
        help_text = " ".join((info.description or "").split())
        key = prefix + name
        keys.append(Key(key, info.annotation, help_text, default_text, required, kind, sections))
        if len(sections) > 1:
            keys += _shared_keys(sections, f"{key}.")
        else:
            keys += [inner for section in sections for inner in keys_of(section, f"{key}.")]
        for option in options(info.annotation):
            if get_origin(option) is list:
                for item in _sections(get_args(option)[0]):
                    keys += keys_of(item, f"{key}[].")
    return tuple(keys)


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()


def _shared_keys(sections: tuple[type, ...], prefix: str) -> list[Key]:
    """Return the keys of a union of sections, each key once, with the sections that have it in its
    help."""
    bases = sections[0].__mro__
    owner = next(base for base in bases if all(issubclass(one, base) for one in sections))
    by_name: dict[str, dict[str, Key]] = defaultdict(dict)  # by key and section
    for section in sections:
        section_name = fields_of(section)["name"].default
        for key in keys_of(section):
            by_name[key.key][section_name] = key
    keys = []
    for name, same in by_name.items():
        kind: Any = Union[*(key.kind for key in same.values())]
        first = next(iter(same.values()))
        help_text = first.help
        default = first.default
        if name != "name":
            help_text = f"{', '.join(same)}: {help_text}"
            default = _defaults(same)
        keys.append(Key(prefix + name, kind, help_text, default, False, owner, ()))
    return keys


def _defaults(same: dict[str, Key]) -> str:
    """Return the default of a key, with the sections that it belongs to if they differ."""
    users = defaultdict(list)
    for section, key in same.items():
        users[key.default].append(section)
    if "" in users:  # the help of a null default names the others
        return ""
    if len(users) == 1:
        return next(iter(users))
    return ", ".join(f"{default} ({', '.join(names)})" for default, names in users.items())


def flags_of(kind: type) -> list[Key]:
    """Return the keys that are flags: those of no list item, and no sections except those that may
    be null."""
    keys = [key for key in keys_of(kind) if "[]" not in key.key]
    return [key for key in keys if key.nullable or not key.sections]


def _sections(kind: Any) -> tuple[type, ...]:
    return tuple(option for option in options(kind) if is_pydantic_dataclass(option))


def options(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself, without their ranges."""
    if get_origin(kind) in (Union, types.UnionType):
        members = get_args(kind)
    else:
        members = (kind,)
    return tuple(get_args(one)[0] if get_origin(one) is Annotated else one for one in members)


def flatten(config: Json, prefix: str = "") -> Json:
    """Turn nested sections into dotted keys, ``{"train": {"lr": 1}}`` -> ``{"train.lr": 1}``."""
    flat: Json = {}
    for key, value in config.items():
        if isinstance(value, dict) and value and key != "kwargs":
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def merged(*layers: Json) -> Json:
    """Return mappings, whose keys may be dotted, as one nested mapping. Later values replace
    earlier ones."""
    data: Json = {}
    for layer in layers:
        for key, value in copy.deepcopy(layer).items():
            name, _, inner = str(key).partition(".")
            before = data.get(name)
            if not isinstance(before, dict) or (name in REPLACED and not inner):
                before = {}
            elif value is None and not inner:
                continue  # a section without keys
            if inner:
                value = merged(before, {inner: value})
            elif isinstance(value, dict) and name not in REPLACED:
                value = merged(before, value)
            data[name] = value
    return data
