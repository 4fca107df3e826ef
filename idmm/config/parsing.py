"""From YAML files and flags to a checked config. All faults are reported together.

Every flag, type, range and help text is read from the classes of this package. argparse splits the
command line and prints the help. pydantic checks the values.
"""

import argparse
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from idmm.config.base import FieldErrors
from idmm.config.reading import Dumper, of_method, read_value, recipe, yaml_problem
from idmm.config.schema import Key, flags_of, flatten, keys_of, merged, options
from idmm.display import output_code
from idmm.errors import UserError
from idmm.text import listed, nearest

log = logging.getLogger("idmm")
Config = TypeVar("Config")
Flags = dict[str, Key]  # by name
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
    faults, rest = _unknown(rest, flags, commands)
    for key in (key for key in words if rest and key not in texts):
        takes_all = any(get_origin(option) is list for option in options(flags[key].kind))
        texts[key], rest = (rest, []) if takes_all else (rest[0], rest[1:])
    if len(words) == 1 and rest == [texts.get(words[0])]:  # of the flag and the word, which agree
        rest = []
    faults += [f"{word}: unexpected argument. Values follow their --flag." for word in rest]
    values, more = _values(texts, flags)
    faults = faults + more
    files = []
    for name in names:
        try:
            files.append((name, recipe(kind, "" if name is NO_VALUE else name)))
        except UserError as error:
            faults += map(str, error.faults)

    method = flatten(merged(*(file for _, file in files), values)).get("method.name")
    files = [of_method(file, method, name) for name, file in files]
    for note in [note for _, notes in files for note in notes]:
        log.info("%s", note)
    config = _checked(
        kind, merged(*(layer for layer, _ in files), values), faults, partial=only_print
    )
    if only_print:
        print(dump(config), end="")
        raise SystemExit(output_code())
    return config


def build(kind: type[Config], source: Any) -> Config:
    """Return a config from Python: an instance as it is, a mapping checked, a path or a recipe's
    name read as YAML.

    Raises:
        UserError: As :func:`parse`.
    """
    if isinstance(source, kind):
        return source
    return _checked(
        kind, merged(to_dict(source)) if isinstance(source, dict) else recipe(kind, source), []
    )


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


def dump(config: Any) -> str:
    """Return a config as YAML."""
    return yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)


# ------------------------------------------------------------------ the command line
def _flags(kind: type) -> Flags:
    """Return the flags of a config by name. A grid also has those of its stages:
    ``pretrain.train.lr``."""
    flags = {key.key: key for key in flags_of(kind)}
    for stage, inner in getattr(kind, "STAGES", {}).items():
        flags |= {f"{stage}.{key.key}": key for key in flags_of(inner)}
        flags[f"{stage}.config"] = Key(
            f"{stage}.config", str, f"Recipe or YAML file of {stage}.", "", False, inner, ()
        )
    return flags


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=110)

    def _format_args(self, action, default_metavar):
        return action.metavar  # argparse would put it into brackets


def flag_parser(kind: type, prog: str) -> argparse.ArgumentParser:
    """Return the parser of the flags of a command of ``prog``."""
    flags = _flags(kind)
    usage = f"{prog} [--config FILE] [--KEY VALUE ...]"
    parser = argparse.ArgumentParser(
        prog, usage, kind.__doc__, HELP, formatter_class=_Help, allow_abbrev=False
    )
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # Python's own does not know -1e-3
    # a flag may stand without a value, so that all faults are reported together
    any_value = {"nargs": "?", "const": NO_VALUE, "default": argparse.SUPPRESS}
    text = "YAML file of the keys below, or a recipe of 'idmm configs'. Flags and later files override it."
    parser.add_argument("--config", metavar="FILE", help=text, action="append", **any_value)
    parser.add_argument(
        "--print_config", help="Print the resulting config as YAML and exit.", action="store_true"
    )
    groups = {"": parser.add_argument_group("run")}
    for name, key in sorted(
        flags.items(), key=lambda flag: (not flag[1].required, flag[0] not in ("init", "out"))
    ):
        section = key.key.rpartition(".")[0]
        if name == key.key and section not in groups:
            groups[section] = parser.add_argument_group(section, key.owner.__doc__)
        if name == key.key:
            text = key.text.replace("%", "%%")
        else:
            text = argparse.SUPPRESS
        groups.get(section, parser).add_argument(
            f"--{name}", metavar=key.metavar, help=text, **any_value
        )
    return parser


def _split(
    parser: argparse.ArgumentParser, argv: list[str], flags: Flags
) -> tuple[dict, list[str]]:
    """Return the texts of the flags, and the rest: words, and unknown flags with their values.

    A switch without a value means true. It takes only YAML's true, false and null, so that a word
    may follow it.
    """
    switches = {
        f"--{name}" for name, key in flags.items() if {*options(key.kind)} - {type(None)} == {bool}
    }
    argv = [
        f"{word}=true"
        if word in switches and after.lower() not in ("true", "false", "null")
        else word
        for word, after in zip(argv, [*argv[1:], ""], strict=False)
    ]
    texts, loose = parser.parse_known_args(argv)
    return vars(texts), loose


def _values(texts: dict, flags: Flags) -> tuple[dict, list[str]]:
    """Return the values of flags and words by key, as YAML unless a key takes only text, and the
    faults of others."""
    values = {}
    faults = []
    for name, text in texts.items():
        if isinstance(text, list):  # words
            values[name] = text
        elif text is NO_VALUE:
            faults.append(f"--{name}: expected a value ({flags[name].metavar})")
        elif not text:
            faults.append(f"{name}: empty value (unset shell variable?), expected null for none")
        else:
            try:
                kinds = options(flags[name].kind)
                types = {
                    type(get_args(kind)[0]) if get_origin(kind) is Literal else kind
                    for kind in kinds
                }
                is_text = types <= {str, type(None)} and not (
                    text == "null" and type(None) in types
                )
                values[name] = text if is_text else read_value(text)
            except (yaml.YAMLError, ValueError) as error:
                faults.append(f"{name}: got {text!r}, which is not YAML ({yaml_problem(error)})")
    return values, faults


def _unknown(
    rest: list[str], flags: Flags, commands: dict[str, type]
) -> tuple[list[str], list[str]]:
    """Return a fault for each unknown flag, and the words that follow no flag."""
    faults = []
    words = []
    previous = ""
    for word in rest:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--")
            others = [command for command, kind in commands.items() if name in _flags(kind)]
            hint = nearest(name, ["config", "print_config", *flags]).replace("'", "'--", 1)
            if others:
                owners = f" of this command, it belongs to {listed(others, most=9)}"
            else:
                owners = hint
            faults.append(f"--{name}: unknown flag{owners}")
        elif not previous.startswith("--") or "=" in previous:  # else the value of the unknown flag
            words.append(word)
        previous = word
    return faults, words


# ------------------------------------------------------------------ checks
def _checked(kind: type[Config], data: dict, faults: list[str], partial: bool = False) -> Config:
    """Return the config, or raise UserError with ``faults`` and those of the keys. A ``partial``
    one may lack keys."""
    config = None
    missing = {}
    faults = [*faults]
    sections = [item.name for item in fields(kind) if item.default_factory is not MISSING]
    data = {key: value for key, value in data.items() if value is not None or key not in sections}
    if isinstance(data.get("out"), str):  # a shell does not expand --out=~/runs/a
        data = {**data, "out": os.path.expanduser(data["out"])}
    try:
        config = TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            key = dotted(one["loc"])
            if one["type"] == "missing":
                missing[key] = _described(kind, key)
            else:
                faults += _faults(kind, one)
    if not partial:
        flat = flatten(to_dict(config or data))
        either = getattr(kind, "ONE_OF", ())
        if either and not any(flat.get(key) for key in either):
            missing[either[0]] = " or ".join(f"--{key}" for key in either)
        required = [key.key for key in keys_of(kind) if key.required and "[]" not in key.key]
        missing |= {key: _described(kind, key) for key in required if flat.get(key) is None}
    # a key that was misspelled, or whose value could not be read, is not missing as well
    named = {
        fault.partition("Did you mean '")[2].removesuffix("'?").removeprefix("--")
        for fault in faults
    }
    named |= {fault.partition(":")[0].removeprefix("--") for fault in faults}
    faults += [
        f"{key}: missing, expected {text}" for key, text in missing.items() if key not in named
    ]
    if faults:
        raise UserError(*faults)
    return config


def _faults(kind: type, error: dict) -> list[str]:
    """Return a fault per key of an error of pydantic's."""
    location = error["loc"]
    method = ""
    if location[:1] == ("method",) and len(location) > 1:  # pydantic names the member of the union
        location, method = ("method", *location[2:]), location[1]
    key = dotted(location)
    reason = error.get("ctx", {}).get("error")
    if isinstance(reason, FieldErrors):
        return [f"{dotted((*location, field))}: {text}" for field, text in reason.args[0].items()]
    if error["type"] == "value_error":
        return [f"{key or 'config'}: {reason}"]
    if error["type"] in ("unexpected_keyword_argument", "invalid_key"):
        names = [option.key for option in keys_of(kind)]
        if method and key in names:
            return [
                f"{key}: got {error['input']!r}, but {method} has no such option. Leave it out."
            ]
        if "[" in key:
            index = key[key.find("[") : key.find("]") + 1]
        else:
            index = ""
        return [f"{key}: unknown key{nearest(_shape(key), names).replace('[]', index)}"]
    if error["type"] == "union_tag_invalid":
        return [
            f"{key}.name: got '{error['ctx']['tag']}', expected one of {error['ctx']['expected_tags']}"
        ]
    got = "null" if error["input"] is None else repr(error["input"])
    example = re.search(r"e\.g\. '.*?'", _help(kind, key))
    return [f"{key}: got {got}, expected {expected(error)}{f', {example[0]}' if example else ''}"]


def expected(error: dict) -> str:
    """Return the expectation of pydantic."""
    text = (
        error["msg"].removeprefix("Input should be ").partition(", unable")[0].partition(", got")[0]
    )
    text = re.sub(r"a (valid )?dictionary( or .*)?", "a mapping", text)
    text = re.sub(r"\w+ should have (at \w+ \d+ items?).*", r"\1", text)
    return (
        text.replace("a valid integer", "an integer")
        .replace("a valid array", "a list")
        .replace("a valid ", "a ")
    )


def _help(kind: type, key: str) -> str:
    return next((option.help for option in keys_of(kind) if option.key == _shape(key)), "")


def _described(kind: type, key: str) -> str:
    """Return the first sentence of a key's help."""
    text = _help(kind, key)
    text = re.split(r"(?<!e\.g)\.(?=\s|$)", text, maxsplit=1)[0] or "a value"
    if text[1:2].isupper():
        return text
    return text[:1].lower() + text[1:]


def dotted(location: tuple) -> str:
    """Return the place of a value as text, ``("stages", 0, "size")`` -> ``stages[0].size``."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in location
    ).removeprefix(".")


def _shape(key: str) -> str:
    """Return a key without the numbers of list items, ``stages[0].size`` -> ``stages[].size``."""
    return re.sub(r"\[\d+\]", "[]", key)
