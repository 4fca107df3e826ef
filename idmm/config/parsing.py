"""From YAML files and flags to a checked config; all faults are found before the first is reported.

Every flag, type, range and help text is read from the classes of this package and stated nowhere else: argparse prints
the help, pydantic checks the result.
"""

import argparse
import dataclasses
import functools
import logging
import re
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from idmm.config.base import FieldError
from idmm.config.reading import of_method, read_value, recipe, yaml_problem
from idmm.config.reading import read_file as read_file
from idmm.config.schema import Key, flags_of, flatten, is_switch, keys_of, merged, options
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
        The config. ``--help`` and ``--print_config`` print and raise SystemExit(0).

    Raises:
        UserError: A line for each unknown key (with the nearest known one), wrong type and value out of range.
    """
    if "--help" in argv or "-h" in argv:
        _print_help(kind, prog)
        raise SystemExit(0)
    kinds = {key: leaf.kind for key, leaf in _flags(kind).items()}
    known, faults, own, names = [*kinds, "config", "print_config"], [], {}, []
    given, loose = _split(argv, {"print_config", *(key for key, of in kinds.items() if is_switch(of))})
    for key, text in given:
        if key not in known:
            faults.append(f"--{key}: unknown flag{nearest(f'--{key}', [f'--{name}' for name in known])}")
        elif key == "config":
            names.append(text or "")
        elif text is None:
            faults.append(f"--{key}: wants a value ({_metavar(kinds[key])})")
        elif key in kinds:
            faults += _set(own, key, text, kinds[key])
    for key in [key for key in words if key not in own]:
        several = any(get_origin(option) is list for option in options(kinds[key]))
        here, loose = (loose, []) if several else (loose[:1], loose[1:])
        if here and several:
            own[key] = here
        elif here:
            faults += _set(own, key, here[0], kinds[key])
    faults += [f"{word}: unexpected argument; values follow their --flag" for word in loose]
    files = []
    for name in names:
        try:
            files.append((name, recipe(kind, name)))
        except UserError as error:
            faults += error.faults
    layers, origin = [], {}  # of each key: its file; empty: a flag
    method = flatten(merged(*(file for _, file in files), own)).get("method.name")  # of the flag, else the last file
    for where, file in files:
        file, note = of_method(file, method, where)
        layers.append(file)
        origin |= dict.fromkeys(flatten(file), where)
        if note:
            log.info("%s", note)
    config = _checked(kind, merged(*layers, own), origin | dict.fromkeys(own, ""), faults)
    if "print_config" in dict(given):
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
    return _checked(kind, merged(given) if isinstance(given, dict) else recipe(kind, given), {}, [])


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


def _flags(kind: type) -> dict[str, Key]:
    """Returns the flags of a config by their names, with those of the stages that a grid has: ``pretrain.train.lr``."""
    flags = {leaf.key: leaf for leaf in flags_of(kind)}
    for stage, inner in getattr(kind, "STAGES", {}).items():
        flags |= {f"{stage}.{leaf.key}": leaf for leaf in flags_of(inner)}
        flags[f"{stage}.config"] = Key(f"{stage}.config", str, "", None, kind, None)
    return flags


def _split(argv: list[str], lone: set[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Splits a command line into flags with their texts (None: without one), and words that follow none.

    The flags ``lone`` mean true without a value, and take none but YAML's lest they take the word behind them.
    """
    flags, words, tokens = [], [], list(argv)
    while tokens:
        key, equals, text = tokens.pop(0).partition("=")
        if not key.startswith("--"):
            words.append(key + equals + text)
            continue
        key = key.removeprefix("--")
        if not equals:
            usable = bool(tokens) and not tokens[0].startswith("--")
            if key in lone:
                usable = usable and tokens[0].lower() in ("true", "false", "null")
            text = tokens.pop(0) if usable else "true" if key in lone else None
        flags.append((key, text))
    return flags, words


def _print_help(kind: type, prog: str) -> None:
    usage = f"{prog} [--config FILE] [--KEY VALUE ...]"
    formatter = functools.partial(argparse.HelpFormatter, max_help_position=32, width=110)
    parser = argparse.ArgumentParser(prog=prog, description=kind.__doc__, usage=usage, formatter_class=formatter)
    text = "YAML file of the keys below, or a name of 'idmm configs'; flags override it"
    parser.add_argument("--config", metavar="FILE", help=text)
    parser.add_argument("--print_config", action="store_true", help="print the resulting config as YAML and exit")
    groups = {"": parser.add_argument_group("run")}
    for leaf in flags_of(kind):
        if any(f"{leaf.key}.".startswith(f"{key}.") for key in getattr(kind, "HIDDEN", ())):
            continue
        name = leaf.key.rpartition(".")[0]
        if name not in groups:
            groups[name] = parser.add_argument_group(name, leaf.owner.__doc__)
        default = "required" if leaf.default is PydanticUndefined else f"default: {_flow(leaf.default)}"
        text = f"{leaf.help} ({default})".replace("%", "%%")
        groups[name].add_argument(f"--{leaf.key}", metavar=_metavar(leaf.kind), help=text)
    parser.print_help()


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


def _set(own: dict, key: str, text: str, kind: Any) -> list[str]:
    """Sets a key to a flag's text; returns the faults."""
    if not text:
        return [f"{key}: got '', wanted a value ('null' is for none)"]
    try:
        own[key] = _value(text, kind)
    except yaml.YAMLError as error:
        return [f"{key}: got {text!r}, which is not YAML ({yaml_problem(error)})"]
    return []


def _value(text: str, kind: Any) -> Any:
    """A flag's text as YAML, but taken to the letter where only text is wanted."""
    texts = [t for t in options(kind) if t is not type(None)]
    if all(t is str or get_origin(t) is Literal and all(isinstance(v, str) for v in get_args(t)) for t in texts):
        return None if text == "null" and type(None) in options(kind) else text
    return read_value(text)


def _checked(kind: type[Config], data: dict, origin: dict[str, str], faults: list[str]) -> Config:
    """Makes the config, or raises UserError with the faults so far and those of the keys."""
    try:
        config = TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        errors = [each for one in error.errors(include_url=False) for each in _each(one)]
        found = [(e, _fault(kind, e, origin)) for e in errors]
        # a key that was misspelled, or whose value could not be read, is not missing as well
        meant = [fault.partition("did you mean '")[2].removesuffix("'?") for _, fault in found]
        meant += [fault.partition(":")[0] for fault in faults]
        faults = faults + [f for e, f in found if e["type"] != "missing" or _dotted(e["loc"]) not in meant]
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
    """`` (in FILE)`` where a key, and all of a section that was checked as one, is from a file."""
    files = [where for name, where in origin.items() if _within(key, name) or _within(name, key)]
    return f" (in {files[0]})" if files and all(files) else ""


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith((f"{section}.", f"{section}["))


def _fault(kind: type, error: dict, origin: dict[str, str]) -> str:
    reason = error.get("ctx", {}).get("error")
    checked = reason if isinstance(reason, FieldError) else None
    key = _dotted((*error["loc"], *([checked.field] if checked else [])))
    where = _place(key, origin)
    if error["type"] in ("unexpected_keyword_argument", "invalid_key"):
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
    if isinstance(error["input"], str | int | float):
        shape = re.sub(r"\[\d+\]", "[]", key)
        inner = [known for known in keys_of(kind) if known.key.rpartition(".")[0] in (shape, f"{shape}[]")]
        inner.sort(key=lambda known: type(error["input"]) not in options(known.kind))  # the first that may have it
        first = inner[0].key.rpartition(".")[2] if inner else None
        example = f"{{{first}: {error['input']}}}" if first else error["input"]
        if error["type"] == "list_type":
            message += f", such as '[{example}]'"
        elif first:
            message += f", such as '{example}'"
    got = "null" if error["input"] is None else repr(error["input"])
    return f"{key}: got {got}, wanted {message}{where}"


def _wanted(kind: type, key: str) -> str:
    """Returns what a key is, by the first sentence of its description."""
    shape = re.sub(r"\[\d+\]", "[]", key)
    said = next((known.help for known in keys_of(kind) if known.key == shape), "")
    said = re.split(r"(?<!e\.g)[.;](?=\s|$)", " ".join(said.split()), maxsplit=1)[0] or "a value"
    return said if said[1:2].isupper() else said[:1].lower() + said[1:]
