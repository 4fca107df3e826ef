"""From YAML files and flags to a checked config; all faults are found before the first is reported.

argparse splits the command line and prints the help, pydantic checks the result: between them every flag, type, range
and help text is read from the classes of this package and stated nowhere else.
"""

import argparse
import dataclasses
import logging
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from idmm.config.base import FieldError
from idmm.config.reading import of_one_method, read_value, recipe, yaml_problem
from idmm.config.reading import read_file as read_file
from idmm.config.schema import (
    flags_of,
    flatten,
    keys_of,
    main_key,
    nested,
    odd_keys,
    options,
    overrule_minutes,
    switches,
)
from idmm.errors import UserError, nearest

log = logging.getLogger("idmm")
Config = TypeVar("Config")


def parse(kind: type[Config], argv: list[str], prog: str, words: tuple[str, ...] = ()) -> Config:
    """Reads ``--config`` files, then flags over them.

    Args:
        kind: Class of the config.
        argv: What was typed.
        prog: The program, for the help.
        words: Keys of the words that may stand without a flag, in their order; the last takes all that are left where
            it is a list.

    Returns:
        The config. ``--help``, ``--version`` and ``--print_config`` print and raise SystemExit(0).

    Raises:
        UserError: A line for each unknown key (with the nearest known one), wrong type and value out of range.
    """
    parser = _parser(kind, prog)
    known, unknown = parser.parse_known_args(_with_values(kind, argv) if words else argv)
    faults, loose = _unknown_flags(unknown, parser, kind)
    data: dict = {}
    origin: dict[str, str] = {}  # of each key: its file; empty: a flag
    names, files = ["" if name is _NOTHING else name for name in known.config or []], []
    for name in names:
        try:
            files.append((name, recipe(kind, name)))
        except UserError as error:
            faults += error.faults
    for where, file, note in of_one_method(files, getattr(known, "method.name", None)):
        overrule_minutes(data, file)
        _merge(data, file, origin, where)
        if note:
            log.info("%s", note)
    for leaf in flags_of(kind):
        text = getattr(known, leaf.key, None)
        if text is _NOTHING:
            faults.append(f"--{leaf.key}: wants a value ({_metavar(leaf.kind)})")
        elif text is not None:
            faults += _set(data, leaf.key, text, leaf.kind, origin)
    faults += _place_words(data, loose, words, kind, origin)
    values = flatten(data)
    flags = {key: values.get(key) for key, where in origin.items() if not where}
    overrule_minutes(data, flags)
    config = _checked(kind, data, origin, faults, whole=len(files) == len(names))
    if wrong := getattr(config, "flag_faults", lambda flags: [])(flags):
        raise UserError(*wrong)
    if known.print_config:
        print(dump(config), end="")
        raise SystemExit(0)
    return config


def build(kind: type[Config], given: Any) -> Config:
    """Makes a config from Python: an instance as it is, a mapping checked, a path or a recipe's name read as YAML.

    Raises:
        UserError: As :func:`parse`.
    """
    if isinstance(given, kind):
        return given
    if not isinstance(given, (str, Path, dict)):
        wanted = f"wanted a mapping, a {kind.__name__} or the path of a YAML file"
        raise UserError(f"config: {wanted}, got {type(given).__name__}")
    return _checked(kind, nested(given) if isinstance(given, dict) else recipe(kind, given), {}, [])


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


def changed(config: Any) -> list[str]:
    """Returns the names of a config's fields that are not as by default."""
    usual = plain(type(config)())
    return [name for name, value in plain(config).items() if value != usual[name]]


def dump(config: Any) -> str:
    """Returns a config as YAML."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


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
    parser._negative_number_matcher = re.compile(r"-[\d.]")  # of values such as -1e-3, too
    value = {"nargs": "?", "const": _NOTHING}
    parser.add_argument("--version", action="version", version=f"idmm {version('idmm')}")
    text = "YAML file of the keys below, or a name of 'idmm configs'; flags override it"
    parser.add_argument("--config", action="append", metavar="FILE", help=text, **value)
    parser.add_argument("--print_config", action="store_true", help="print the resulting config as YAML and exit")
    groups, lone = {"": parser.add_argument_group("run")}, switches(kind)
    for leaf in flags_of(kind):
        hidden = any(f"{leaf.key}.".startswith(f"{key}.") for key in getattr(kind, "HIDDEN", ()))
        name = "" if hidden else leaf.key.rpartition(".")[0]
        if name not in groups:
            groups[name] = parser.add_argument_group(name, leaf.owner.__doc__)
        default = "required" if leaf.default is PydanticUndefined else f"default: {_flow(leaf.default)}"
        groups[name].add_argument(
            f"--{leaf.key}",
            dest=leaf.key,
            default=argparse.SUPPRESS,
            metavar=_metavar(leaf.kind),
            help=argparse.SUPPRESS if hidden else f"{leaf.help} ({default})".replace("%", "%%"),
            **({"nargs": "?", "const": "true"} if leaf.key in lone else value),
        )
    return parser


def _metavar(kind: Any) -> str:
    names = []
    for option in options(kind):
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


def _set(data: dict, key: str, text: str, kind: Any, origin: dict[str, str]) -> list[str]:
    if not text:
        return [f"{key}: got '', wanted a value; of a shell variable that is not set, maybe ('null' is for none)"]
    try:
        value = _value(text, kind)
    except yaml.YAMLError as error:
        return [f"{key}: got {text!r}, which is not YAML ({yaml_problem(error)})"]
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
    texts = [t for t in options(kind) if t is not type(None)]
    if all(t is str or get_origin(t) is Literal and all(isinstance(v, str) for v in get_args(t)) for t in texts):
        return None if text == "null" and type(None) in options(kind) else text
    return read_value(text)


def _with_values(kind: type, argv: list[str]) -> list[str]:
    """Gives a switch without a value its own, lest it takes the word behind it."""
    lone = {f"--{key}" for key in switches(kind)}
    pairs = zip(argv, [*argv[1:], ""], strict=False)
    values = {"true", "True", "TRUE", "false", "False", "FALSE"}  # YAML's
    return [f"{word}=true" if word in lone and after not in values else word for word, after in pairs]


def _place_words(data: dict, loose: list[str], words: tuple[str, ...], kind: type, origin: dict[str, str]) -> list[str]:
    """Sets the keys that words without a flag stand for; returns the faults."""
    kinds, faults = {leaf.key: leaf.kind for leaf in flags_of(kind)}, []
    for key in [key for key in words if origin.get(key) != ""] or words:  # those that no flag has set
        several = any(get_origin(option) is list for option in options(kinds[key]))
        here, loose = (loose, []) if several else (loose[:1], loose[1:])
        if here and origin.get(key) == "":
            faults.append(f"{key}: given twice, as '{here[0]}' and by --{key}; wanted once")
        elif here and several:
            data[key], origin[key] = here, ""
        elif here:
            faults += _set(data, key, here[0], kinds[key], origin)
    return faults + [f"{word}: unexpected argument; values follow their --flag" for word in loose]


def _unknown_flags(unknown: list[str], parser: argparse.ArgumentParser, kind: type) -> tuple[list[str], list[str]]:
    """Returns the faults of unknown flags, and the words that follow no flag."""
    faults, loose, follows = [], [], False
    known = [option for action in parser._actions for option in action.option_strings]
    for token in unknown:
        if token.startswith("-"):
            flag = token.partition("=")[0]
            main = main_key(kind, flag.removeprefix("--"))
            faults.append(f"{flag}: unknown flag{nearest(f'--{main}' if main else flag, known)}")
        elif not follows:
            loose.append(token)
        follows = token.startswith("-") and "=" not in token
    return faults, loose


def _checked(kind: type[Config], data: dict, origin: dict[str, str], faults: list[str], whole: bool = True) -> Config:
    """Makes the config, or raises UserError with the faults so far and those of the keys; where the data is not
    ``whole``, as a file could not be read, no key is said to be missing."""
    if odd := odd_keys(data):
        raise UserError(*faults, *(f"{key}: unknown key{_place(key, origin)}" for key in odd))
    try:
        config = TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        errors = [each for one in error.errors(include_url=False) for each in _each(one)]
        found = [(e, _fault(kind, e, origin)) for e in errors]
        # a key that was misspelled is not missing as well
        meant = [fault.partition("did you mean '")[2].removesuffix("'?") for _, fault in found]
        meant += [fault.partition(":")[0] for fault in faults]  # nor one whose value could not be read
        shown = [f for e, f in found if e["type"] != "missing" or (whole and _dotted(e["loc"]) not in meant)]
        faults = faults + shown
    if faults:
        raise UserError(*faults)
    return config


def _each(error: dict) -> list[dict]:
    """Returns an error of pydantic's, once for each of the keys that one check found wrong together."""
    reason = error.get("ctx", {}).get("error")
    return [{**error, "ctx": {"error": one}} for one in reason.each] if isinstance(reason, FieldError) else [error]


def _dotted(parts: tuple) -> str:
    key = ""
    for part in parts:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    return key


def _place(key: str, origin: dict[str, str]) -> str:
    """`` (in FILE)`` where a key, or all of a section that was checked as one, is from a file."""
    if any(not where and name.startswith(f"{key}.") for name, where in origin.items()):
        return ""
    source = next((origin[k] for k in _prefixes(key) if k in origin), "")
    return f" (in {source})" if source else ""


def _fault(kind: type, error: dict, origin: dict[str, str]) -> str:
    reason = error.get("ctx", {}).get("error")
    checked = reason if isinstance(reason, FieldError) else None
    key = _dotted((*error["loc"], *([checked.field] if checked else [])))
    where = _place(key, origin)
    if error["type"] == "unexpected_keyword_argument":
        shape = re.sub(r"\[\d+\]", "[]", key)
        place = key[key.find("[") : key.find("]") + 1] if "[" in key else ""
        hint = nearest(shape, [known.key for known in keys_of(kind)])
        return f"{key}: unknown key{where}{hint.replace('[]', place)}"
    if error["type"] == "missing":
        return f"{key}: missing{where}; wanted: {_wanted(kind, key)}"
    if error["type"] == "value_error":
        return f"{key or 'config'}: {checked.text if checked else reason}{where}"
    message = error["msg"].removeprefix("Input should be ").partition(", unable")[0].partition(", got")[0]
    message = re.sub(r"a (valid )?dictionary( or an instance of \w+)?", "a mapping", message)
    message = re.sub(r"(List|Dictionary|String) should have at least (\d+) items?.*", r"\2 or more of them", message)
    message = message.replace("a valid integer", "an integer").replace("a valid ", "a ")
    if error["type"] == "list_type" and isinstance(error["input"], str | int | float):
        message += f", such as '[{error['input']}]'"
    got = "null" if error["input"] is None else repr(error["input"])
    main = main_key(kind, key) if isinstance(error["input"], str) else None
    return f"{key}: got {got}, wanted {message}{where}{nearest(main, [main]) if main else ''}"


def _wanted(kind: type, key: str) -> str:
    """Returns what a key is, by the first sentence of its description."""
    shape = re.sub(r"\[\d+\]", "[]", key)
    said = next((known.help for known in keys_of(kind) if known.key == shape), "")
    said = re.split(r"(?<!e\.g)[.;](?=\s|$)", " ".join(said.split()), maxsplit=1)[0] or "a value"
    return said if said[1:2].isupper() else said[:1].lower() + said[1:]


def _prefixes(key: str) -> list[str]:
    parts = re.split(r"\.|\[", key)
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
