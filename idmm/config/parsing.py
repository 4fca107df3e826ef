"""From YAML files and flags to a checked config; all faults are found before the first is reported.

argparse splits the command line and prints the help, pydantic checks the result: between them every flag, type, range
and help text is read from the classes of this package and stated nowhere else.
"""

import argparse
import dataclasses
import re
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from idmm.errors import UserError, nearest

Config = TypeVar("Config")


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: ``off`` and ``no`` are words, ``1e-3`` is a number, a key given twice is a fault."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [i for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            mark = node.value[twice[0]][0].start_mark
            raise yaml.constructor.ConstructorError(None, None, f"'{keys[twice[0]]}' is given twice", mark)
        return super().construct_mapping(node, deep)


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regex) for tag, regex in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_NUMBER.pattern})$"), list("-+0123456789."))


class _Field(NamedTuple):
    """A leaf of the config: one flag."""

    key: str
    kind: Any
    help: str
    default: Any
    section: type


def parse(kind: type[Config], argv: list[str], prog: str) -> Config:
    """Reads ``--config`` files, then flags over them; ``prog`` is the program, for the help.

    Returns:
        The config. ``--help``, ``--version`` and ``--print_config`` print and raise SystemExit(0).

    Raises:
        UserError: A line for each unknown key (with the nearest known one), wrong type and value out of range.
    """
    parser = _parser(kind, prog)
    known, unknown = parser.parse_known_args(argv)
    faults = _unknown_flags(unknown, parser)
    data: dict = {}
    origin: dict[str, str] = {}
    unread: list[str] = []
    for path in known.config or []:
        if path is _NOTHING:
            unread.append("--config: wants a FILE")
            continue
        try:
            _merge(data, read_file(path), origin, path)
        except UserError as error:
            unread += error.faults
    faults += unread
    for leaf in _leaves(kind):
        text = getattr(known, leaf.key, None)
        if text is _NOTHING:
            faults.append(f"--{leaf.key}: wants a value ({_metavar(leaf.kind)})")
        elif text is not None:
            faults += _set(data, leaf.key, text, leaf.kind, origin)
    config = _checked(kind, data, origin, faults, whole=not unread)
    if known.print_config:
        print(dump(config), end="")
        raise SystemExit(0)
    return config


def build(kind: type[Config], given: Any) -> Config:
    """Makes a config from Python: an instance as it is, a mapping checked, a path read as YAML.

    Raises:
        UserError: As :func:`parse`.
    """
    if isinstance(given, kind):
        return given
    if not isinstance(given, (str, Path, dict)):
        wanted = f"wanted a mapping, a {kind.__name__} or the path of a YAML file"
        raise UserError(f"config: {wanted}, got {type(given).__name__}")
    return _checked(kind, given if isinstance(given, dict) else read_file(given), {}, [])


def read_file(path: str | Path) -> dict:
    """Returns the keys of a YAML file.

    Raises:
        UserError: It cannot be read, is not YAML or holds no mapping.
    """
    try:
        loaded = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"--config: cannot read '{path}' ({why}); wanted a YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config: '{path}' is not YAML: {_yaml_problem(error)}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise UserError(f"--config: '{path}' holds {type(loaded).__name__}; wanted a mapping of keys")
    return loaded or {}


def read_value(text: str) -> Any:
    """Returns a flag's text as YAML."""
    return yaml.load(text, _Loader)


def plain(config: Any) -> Any:
    """Returns a config as nested dicts and lists, for YAML and JSON."""
    if isinstance(config, dict):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [plain(value) for value in config]
    if not dataclasses.is_dataclass(config):
        return config
    values = {item.name: plain(getattr(config, item.name)) for item in dataclasses.fields(config)}
    sparse = getattr(config, "SPARSE", False)
    return {name: value for name, value in values.items() if not (sparse and value is None)}


def flatten(config: dict, prefix: str = "") -> dict[str, Any]:
    """Turns nested sections into dotted keys, ``{"train": {"lr": 1}}`` -> ``{"train.lr": 1}``."""
    flat = {}
    for key, value in config.items():
        inner = isinstance(value, dict) and value and key != "kwargs"
        flat.update(flatten(value, f"{prefix}{key}.") if inner else {prefix + key: value})
    return flat


def changed(config: Any) -> list[str]:
    """Returns the names of a config's fields that are not as by default."""
    usual = plain(type(config)())
    return [name for name, value in plain(config).items() if value != usual[name]]


def dump(config: Any) -> str:
    """Returns a config as YAML."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def _leaves(kind: type, prefix: str = "") -> list[_Field]:
    leaves = []
    for item in dataclasses.fields(kind):
        info = kind.__pydantic_fields__[item.name]
        section = next((t for t in _options(info.annotation) if dataclasses.is_dataclass(t)), None)
        default = info.get_default(call_default_factory=True)
        if section is None or default is None:
            leaves.append(_Field(prefix + item.name, info.annotation, info.description or "", default, kind))
        if section is not None:
            leaves += _leaves(section, f"{prefix}{item.name}.")
    return leaves


def _options(kind: Any) -> tuple:
    """The members of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


_NOTHING = object()  # a flag at the end of the line, or followed by another flag


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog):
        super().__init__(prog, max_help_position=32, width=110)

    def _format_args(self, action, default_metavar):
        return action.metavar or ""


def _parser(kind: type, prog: str) -> argparse.ArgumentParser:
    """Builds a parser that never objects: what it cannot place is returned, and judged with the rest."""
    usage = f"{prog} [--config FILE] [--KEY VALUE ...]"
    parser = argparse.ArgumentParser(
        prog=prog, description=kind.__doc__, usage=usage, allow_abbrev=False, formatter_class=_Formatter
    )
    value = {"nargs": "?", "const": _NOTHING}
    parser.add_argument("--version", action="version", version=f"idmm {version('idmm')}")
    text = "YAML file of the keys below; flags override it"
    parser.add_argument("--config", action="append", metavar="FILE", help=text, **value)
    parser.add_argument("--print_config", action="store_true", help="print the resulting config as YAML and exit")
    groups = {"": parser.add_argument_group("run")}
    for leaf in _leaves(kind):
        name = leaf.key.rpartition(".")[0]
        if name not in groups:
            groups[name] = parser.add_argument_group(name, leaf.section.__doc__)
        default = "required" if leaf.default is PydanticUndefined else f"default: {_flow(leaf.default)}"
        groups[name].add_argument(
            f"--{leaf.key}",
            dest=leaf.key,
            default=argparse.SUPPRESS,
            metavar=_metavar(leaf.kind),
            help=f"{leaf.help} ({default})".replace("%", "%%"),
            **({"nargs": "?", "const": "true"} if leaf.kind is bool else value),
        )
    return parser


def _metavar(kind: Any) -> str:
    names = []
    for option in _options(kind):
        if get_origin(option) is Literal:
            names.append("{" + ",".join(str(value) for value in get_args(option)) + "}")
        elif option is not type(None):
            words = {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT", list: "LIST"}
            names.append(words.get(get_origin(option) or option, "MAPPING"))
    return "|".join(names)


def _flow(value: Any) -> str:
    value = TypeAdapter(type(value)).dump_python(value) if value is not None else None
    return yaml.safe_dump(value, default_flow_style=True, width=1000).strip().removesuffix("...").strip()


def _merge(data: dict, new: dict, origin: dict[str, str], where: str, prefix: str = "") -> None:
    for key, value in new.items():
        origin[f"{prefix}{key}"] = where
        if isinstance(value, dict) and isinstance(data.get(key), dict) and key != "kwargs":
            _merge(data[key], value, origin, where, f"{prefix}{key}.")
        else:
            data[key] = value
            if isinstance(value, dict):
                origin.update({f"{prefix}{key}.{name}": where for name in value})


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem}, line {mark.line + 1}" if mark else problem


def _set(data: dict, key: str, text: str, kind: Any, origin: dict[str, str]) -> list[str]:
    try:
        value = _value(text, kind)
    except yaml.YAMLError as error:
        return [f"{key}: got {text!r}, which is not YAML ({_yaml_problem(error)})"]
    *sections, name = key.split(".")
    for section in sections:
        if not isinstance(data.get(section), dict):
            data[section] = {}
        data = data[section]
    data[name] = value
    origin[key] = ""
    return []


def _value(text: str, kind: Any) -> Any:
    """A flag's text as YAML, but taken to the letter where only text is wanted."""
    texts = [t for t in _options(kind) if t is not type(None)]
    if all(t is str or get_origin(t) is Literal and all(isinstance(v, str) for v in get_args(t)) for t in texts):
        return None if text == "null" and type(None) in _options(kind) else text
    return yaml.load(text, _Loader)


def _unknown_flags(unknown: list[str], parser: argparse.ArgumentParser) -> list[str]:
    faults, follows = [], False
    known = [option for action in parser._actions for option in action.option_strings]
    for token in unknown:
        if token.startswith("-"):
            flag = token.partition("=")[0]
            faults.append(f"{flag}: unknown flag{nearest(flag, known)}")
        elif not follows:
            faults.append(f"{token}: unexpected argument; values follow their --flag")
        follows = token.startswith("-") and "=" not in token
    return faults


def _checked(kind: type[Config], data: dict, origin: dict[str, str], faults: list[str], whole: bool = True) -> Config:
    """Makes the config, or raises UserError with the faults so far and those of the keys.

    Where the data is not ``whole``, as a file could not be read, no key is said to be missing.
    """
    try:
        config = TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        found = [e for e in error.errors(include_url=False) if whole or e["type"] != "missing"]
        faults = faults + [_fault(kind, e, origin) for e in found]
    if faults:
        raise UserError(*faults)
    return config


def _fault(kind: type, error: dict, origin: dict[str, str]) -> str:
    key = ""
    for part in error["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    source = next((origin[k] for k in _prefixes(key) if k in origin), "")
    where = f" (in {source})" if source else ""
    if error["type"] == "unexpected_keyword_argument":
        shape = re.sub(r"\[\d+\]", "[]", key)
        hint = nearest(shape, _keys(kind)).replace("[]", key[key.find("[") : key.find("]") + 1] if "[" in key else "")
        return f"{key}: unknown key{where}{hint}"
    if error["type"] == "missing":
        return f"{key}: missing{where}; wanted is a value"
    if error["type"] == "value_error":
        return f"{key or 'config'}: {error['ctx']['error']}{where}"
    message = error["msg"].removeprefix("Input should be ").partition(", unable")[0].partition(", got")[0]
    message = re.sub(r"a (valid )?dictionary( or an instance of \w+)?", "a mapping", message)
    message = re.sub(r"(List|Dictionary|String) should have at least (\d+) items?.*", r"\2 or more of them", message)
    message = message.replace("a valid integer", "an integer").replace("a valid ", "a ")
    got = "null" if error["input"] is None else repr(error["input"])
    return f"{key}: got {got}, wanted {message}{where}"


def _prefixes(key: str) -> list[str]:
    parts = re.split(r"\.|\[", key)
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _keys(kind: type, prefix: str = "") -> list[str]:
    """All keys that may stand in a config, sections and list items included."""
    keys = []
    for name, info in kind.__pydantic_fields__.items():
        keys.append(prefix + name)
        for option in _options(info.annotation):
            inner = get_args(option)[0] if get_origin(option) is list else option
            if dataclasses.is_dataclass(inner):
                keys += _keys(inner, prefix + name + ("[]." if inner is not option else "."))
    return keys
