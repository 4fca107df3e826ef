"""From YAML files and flags to a checked config. All faults are reported together.

Every flag, type, range and help text is read from the classes of this package. argparse splits the
command line and prints the help. pydantic checks the values.
"""

import argparse
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from idmm.config.base import FieldErrors
from idmm.config.reading import Dumper, of_method, read_value, recipe, yaml_problem
from idmm.config.schema import (
    Key,
    command_of,
    flags_of,
    flatten,
    keys_of,
    made_by_default,
    merged,
    options,
)
from idmm.display import output_code
from idmm.errors import Fault, UserError
from idmm.files import Json
from idmm.text import closest, listed

log = logging.getLogger("idmm")
Config = TypeVar("Config")
Flags = dict[str, Key]  # by name
_INDEX = re.compile(r"\[\d+\]")  # of an item of a list
FIRST = ("init", "out")  # in the help
NO_VALUE = object()  # of a flag that stands without a value
HELP = "In a YAML file, the flag --train.lr is the key train.lr, and null selects the default."


def parse(
    kind: type[Config],
    argv: list[str],
    prog: str,
    words: tuple[str, ...] = (),
    commands: Mapping[str, type] = {},
) -> Config:
    """Read ``--config`` files, then the flags of a command of ``prog`` over them.

    Args:
        words: Keys of the words that need no flag, in their order. The last takes all remaining
            words if it is a list.
        commands: Config classes by command, to name the command that an unknown flag belongs to.

    Returns:
        The config. ``--help`` and ``--print_config`` print and raise SystemExit.

    Raises:
        UserError: A line for each unknown key (with the nearest existing one), wrong type and value
            out of range.
    """
    flags = _flags(kind)
    texts, rest = _split(flag_parser(kind, prog), argv, flags)
    names = texts.pop("config", [])
    only_print = texts.pop("print_config")
    faults = _Faults()
    rest = _known(rest, flags, commands, faults)
    for word in _take_words(words, rest, texts, flags):
        faults.add(word, "unexpected argument", "Values follow their --flag.")
    values = _values(texts, flags, faults)
    layers = _layers(kind, names, values, faults)
    config = _checked(kind, merged(*layers, values), faults, partial=only_print)
    if only_print:
        print(dump(config), end="")
        raise SystemExit(output_code())
    return config


def build(kind: type[Config], source: Config | Json | str | os.PathLike[str]) -> Config:
    """Return a config from Python.

    Args:
        source: An instance, which is returned, a mapping of its keys, or the name of a YAML file
            or recipe.

    Raises:
        UserError: As :func:`parse`.
    """
    if isinstance(source, kind):
        return source
    if isinstance(source, dict):
        values = to_dict(source)
    else:
        values = recipe(kind, str(source))
    return _checked(kind, merged(values), _Faults())


def to_dict(config: Any) -> Any:
    """Return a config, or a mapping from Python, as nested dicts and lists for YAML and JSON. Paths
    become texts."""
    return to_jsonable_python(config, fallback=_plain)


def _plain(value: Any) -> Any:
    """Return a range or numpy's number or array as Python's, anything else as text."""
    if isinstance(value, range):
        return [*value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def with_command(config: Any) -> dict[str, Any]:
    """Return a config as nested dicts, with its command as the first key if it has one."""
    command = command_of(type(config))
    values = to_dict(config)
    return values if command is None else {"command": command, **values}


def dump(config: Any) -> str:
    """Return a config as YAML."""
    return yaml.dump(with_command(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)


class _Faults:
    """Faults of a config, and the keys that they name, which are not reported as missing, too."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.keys: set[str] = set()

    def add(self, field: str, text: str, hint: str = "", key: str = "") -> None:
        """Add a fault. ``key`` is the key that is meant, if the field is another one."""
        self.faults.append(Fault(field, text, hint))
        self.keys.add(key or field)


# ------------------------------------------------------------------ the command line
def _flags(kind: type) -> Flags:
    """Return the flags of a config by name. A grid also has those of its jobs:
    ``pretrain.train.lr``."""
    flags = {key.key: key for key in flags_of(kind)}
    for command, inner in getattr(kind, "STAGES", {}).items():
        flags |= {f"{command}.{key.key}": key for key in flags_of(inner)}
        flags[f"{command}.config"] = Key(
            f"{command}.config", str, f"Recipe or YAML file of {command}.", "", False, inner, ()
        )
    return flags


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=110)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar)  # argparse would put it into brackets


def flag_parser(kind: type, prog: str) -> argparse.ArgumentParser:
    """Return the parser of the flags of a command of ``prog``."""
    flags = _flags(kind)
    usage = f"{prog} [--config FILE] [--KEY VALUE ...]"
    parser = argparse.ArgumentParser(
        prog, usage, kind.__doc__, HELP, formatter_class=_Help, allow_abbrev=False
    )
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # Python's own does not know -1e-3
    # a flag may stand without a value, so that all faults are reported together
    any_value: Json = {"nargs": "?", "const": NO_VALUE, "default": argparse.SUPPRESS}
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of the keys below, or a recipe of 'idmm configs'. "
        "Flags and later files override it.",
        action="append",
        **any_value,
    )
    parser.add_argument(
        "--print_config", help="Print the resulting config as YAML and exit.", action="store_true"
    )
    groups = {"": parser.add_argument_group("run")}
    required_first = sorted(flags, key=lambda name: (not flags[name].required, name not in FIRST))
    for name in required_first:
        key = flags[name]
        section = key.key.rpartition(".")[0]
        help_text = argparse.SUPPRESS
        if name == key.key:
            help_text = key.text.replace("%", "%%")
            if section not in groups:
                groups[section] = parser.add_argument_group(section, key.owner.__doc__)
        groups.get(section, parser).add_argument(
            f"--{name}", metavar=key.metavar, help=help_text, **any_value
        )
    return parser


def _split(
    parser: argparse.ArgumentParser, argv: list[str], flags: Flags
) -> tuple[Json, list[str]]:
    """Return the texts of the flags, and the rest: words, and unknown flags with their values.

    A switch without a value means true. It takes only YAML's true, false and null, so that a word
    may follow it.
    """
    switches = [f"--{name}" for name, key in flags.items() if key.types == {bool}]
    words = []
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        if word in switches and following.lower() not in ("true", "false", "null"):
            word += "=true"
        words.append(word)
    texts, rest = parser.parse_known_args(words)
    return vars(texts), rest


def _take_words(words: tuple[str, ...], rest: list[str], texts: Json, flags: Flags) -> list[str]:
    """Add the texts of keys whose words need no flag, and return the words that remain."""
    for key in words:
        if rest and key not in texts:
            takes_all = any(get_origin(option) is list for option in options(flags[key].kind))
            count = len(rest) if takes_all else 1
            texts[key] = rest if takes_all else rest[0]
            rest = rest[count:]
    if len(words) == 1 and rest == [texts.get(words[0])]:  # of the flag and the word, which agree
        return []
    return rest


def _values(texts: Json, flags: Flags, faults: _Faults) -> Json:
    """Return the values of flags and words by key, as YAML unless a key takes only text."""
    values = {}
    for name, text in texts.items():
        key = flags[name]
        if text is NO_VALUE:
            faults.add(f"--{name}", f"expected a value ({key.metavar})", key=name)
        elif not text:
            faults.add(name, "empty value (unset shell variable?), expected null for none")
        elif isinstance(text, list) or (
            key.types == {str} and not (text == "null" and key.nullable)
        ):
            values[name] = text
        else:
            try:
                values[name] = read_value(text)
            except (yaml.YAMLError, ValueError) as error:
                faults.add(name, f"got {text!r}, which is not YAML ({yaml_problem(error)})")
    return values


def _known(
    rest: list[str], flags: Flags, commands: Mapping[str, type], faults: _Faults
) -> list[str]:
    """Return the words that follow no flag. The unknown flags among them are faults."""
    words = []
    previous = ""
    for word in rest:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--")
            owners = [command for command, kind in commands.items() if name in _flags(kind)]
            similar = closest(name, ["config", "print_config", *flags])
            if owners:
                belongs = listed(owners, most=9)
                faults.add(f"--{name}", f"unknown flag of this command, it belongs to {belongs}")
            elif similar:
                faults.add(f"--{name}", "unknown flag", f"Did you mean '--{similar}'?", similar)
            else:
                faults.add(f"--{name}", "unknown flag")
        elif not previous.startswith("--") or "=" in previous:  # else the value of the unknown flag
            words.append(word)
        previous = word
    return words


def _layers(kind: type, names: list[object], values: Json, faults: _Faults) -> list[Json]:
    """Return the keys of ``--config`` files, without those of another method than the run's."""
    files = []
    for name in names:
        try:
            files.append((name, recipe(kind, "" if name is NO_VALUE else str(name))))
        except UserError as error:
            faults.faults += error.faults
    method = flatten(merged(*(file for _, file in files), values)).get("method.name")
    layers = []
    for name, file in files:
        layer, note = of_method(file, method, str(name))
        layers.append(layer)
        if note:
            log.info(note)
    return layers


# ------------------------------------------------------------------ checks
def _checked(kind: type[Config], data: Json, faults: _Faults, partial: bool = False) -> Config:
    """Return the config, or raise UserError with ``faults`` and those of the keys. A ``partial``
    one may lack keys."""
    config = None
    missing: dict[str, str] = {}  # what is expected, by key
    sections = made_by_default(kind)
    data = {key: value for key, value in data.items() if value is not None or key not in sections}
    command = command_of(kind)
    if command is not None and data.get("command") is not None:
        data = {**data}
        saved = data.pop("command")
        if saved != command:
            faults.add("command", f"got {saved!r}, expected {command!r}, which this command is")
    if isinstance(data.get("out"), str):  # a shell does not expand --out=~/runs/a
        data = {**data, "out": os.path.expanduser(data["out"])}
    try:
        config = TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key = dotted(detail["loc"])
            if detail["type"] == "missing":
                missing[key] = _described(kind, key)
            else:
                _add_invalid(kind, detail, faults)
    if not partial:
        missing |= _missing(kind, flatten(to_dict(config or data)))
    # a key that was misspelled, or whose value could not be read, is not missing, too
    for key, expectation in missing.items():
        if key not in faults.keys:
            faults.add(key, f"missing, expected {expectation}")
    if config is None or faults.faults:
        raise UserError(*faults.faults)
    return config


def _missing(kind: type, values: Json) -> dict[str, str]:
    """Return what is expected of each required key that has no value."""
    missing = {}
    either = getattr(kind, "ONE_OF", ())
    if either and not any(values.get(key) for key in either):
        missing[either[0]] = " or ".join(f"--{key}" for key in either)
    for key in keys_of(kind):
        if key.required and "[]" not in key.key and values.get(key.key) is None:
            missing[key.key] = _described(kind, key.key)
    return missing


def _add_invalid(kind: type, error: ErrorDetails, faults: _Faults) -> None:
    """Add a fault per key of an error of pydantic's."""
    location = error["loc"]
    method: int | str = ""
    if location[:1] == ("method",) and len(location) > 1:  # pydantic names the member of the union
        method = location[1]
        location = ("method", *location[2:])
    key = dotted(location)
    context = error.get("ctx", {})
    reason = context.get("error")
    names = [option.key for option in keys_of(kind)]
    if isinstance(reason, FieldErrors):
        for field, text in reason.args[0].items():
            faults.add(dotted((*location, field)), text)
    elif error["type"] == "value_error":
        faults.add(key or "config", str(reason))
    elif error["type"] == "union_tag_invalid":
        text = f"got '{context['tag']}', expected one of {context['expected_tags']}"
        faults.add(f"{key}.name", text)
    elif error["type"] not in ("unexpected_keyword_argument", "invalid_key"):
        example = re.search(r"e\.g\. '.*?'", _help(kind, key))
        expectation = f"{expected(error)}, {example[0]}" if example else expected(error)
        shown = "null" if error["input"] is None else repr(error["input"])
        faults.add(key, f"got {shown}, expected {expectation}")
    elif method and key in names:
        text = f"got {error['input']!r}, but {method} has no such option"
        faults.add(key, text, "Leave it out.")
    elif similar := closest(_shape(key), names):
        for index in _INDEX.findall(key)[:1]:
            similar = similar.replace("[]", index)
        faults.add(key, "unknown key", f"Did you mean '{similar}'?", similar)
    else:
        faults.add(key, "unknown key")


def expected(error: ErrorDetails) -> str:
    """Return the expectation of pydantic."""
    text = re.split(", unable|, got", error["msg"].removeprefix("Input should be "))[0]
    text = re.sub(r"a (valid )?dictionary( or .*)?", "a mapping", text)
    text = re.sub(r"\w+ should have (at \w+ \d+ items?).*", r"\1", text)
    text = text.replace("a valid integer", "an integer").replace("a valid array", "a list")
    return text.replace("a valid ", "a ")


def _help(kind: type, key: str) -> str:
    return next((option.help for option in keys_of(kind) if option.key == _shape(key)), "")


def _described(kind: type, key: str) -> str:
    """Return the first sentence of a key's help."""
    text = _help(kind, key)
    text = re.split(r"(?<!e\.g)\.(?=\s|$)", text, maxsplit=1)[0] or "a value"
    if text[1:2].isupper():
        return text
    return text[:1].lower() + text[1:]


def dotted(location: Iterable[int | str]) -> str:
    """Return the place of a value as text, ``("stages", 0, "size")`` -> ``stages[0].size``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def _shape(key: str) -> str:
    """Return a key without the numbers of list items, ``stages[0].size`` -> ``stages[].size``."""
    return _INDEX.sub("[]", key)
