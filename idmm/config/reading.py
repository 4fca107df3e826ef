"""YAML files, and the recipes that ship with the package."""

import functools
import json
import re
from collections.abc import Hashable
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from idmm.config.schema import command_of, merged
from idmm.errors import UserError
from idmm.files import Json
from idmm.text import listed, nearest

# setup.cfg maps the repository's folder into the package as idmm/configs. A checkout has it next to
# the package
_PLACES = [Path(__file__).resolve().parents[level] / "configs" for level in (1, 2)]
CONFIGS = next((place for place in _PLACES if place.is_dir()), _PLACES[0])
MOST_ALIASES = 20  # each may double the size of the value
# whose recipes are named without their folder
COMMANDS = ("pretrain", "finetune", "transfer", "detect", "segment")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without surprises: ``off``, ``no`` and dates are words, 1e-3 is a number, keys are
    given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: list[Any] = []
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"'{key}' is given twice", key_node.start_mark
                )
            keys.append(key)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes texts that the loader would take for numbers, such as 1e3."""


_RULES = {  # the only words, and numbers, that are no texts
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(0|[1-9]\d*)|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", "-+0123456789."),
}
_OTHERS = ("bool", "int", "timestamp")  # rules of YAML 1.1 that these replace
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regex) for tag, regex in rules if not tag.endswith(_OTHERS)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, (_words, _first) in _RULES.items():
    _regex = re.compile(f"^(?:{_words})$")
    for _kind in (_Loader, Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regex, list(_first))


def read_value(text: str) -> Any:
    """Return a text as YAML. YAMLError or, for a value such as ``!!int x``, ValueError: it is
    none."""
    try:
        aliases = 0
        if "&" in text:
            aliases = sum(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        if aliases > MOST_ALIASES:
            raise yaml.YAMLError(f"it has more than {MOST_ALIASES} aliases")
        value = yaml.load(text, _Loader)
        json.dumps(value, default=str, skipkeys=True)  # ValueError: it contains itself
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    return value


def read_file(path: Path) -> Json:
    """Return the keys of a YAML file. UserError: it cannot be read, is not YAML or holds no
    mapping."""
    try:
        values = read_value(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    except UnicodeDecodeError:
        raise _unreadable(path, "not UTF-8 text") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError.of("--config", f"'{path}' is not YAML: {yaml_problem(error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError.of(
            "--config",
            f"'{path}' holds a {type(values).__name__}, expected a mapping of keys",
        )
    return values


def _unreadable(path: Path, reason: str | None) -> UserError:
    return UserError.of("--config", f"cannot read '{path}' ({reason}), expected a YAML file")


def yaml_problem(error: yaml.YAMLError | ValueError) -> str:
    """Return what is wrong with a text, with the line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if mark:
        return f"{problem}, line {mark.line + 1}"
    return problem


# ------------------------------------------------------------------ recipes
@functools.cache
def recipes() -> dict[str, Path]:
    """Return the files of the recipes by FOLDER/NAME."""
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(CONFIGS.glob("*/*.yaml"))}


def recipe(kind: type, name: str) -> Json:
    """Return the keys of a YAML file, or of a recipe: NAME in the folder of the config's command,
    or FOLDER/NAME.

    Raises:
        UserError: Neither a file nor a recipe, or it cannot be read.
    """
    if not name:
        raise UserError.of("--config", "expected a FILE")
    path = Path(name)
    files = recipes()
    command = command_of(kind)
    key = name.removesuffix(".yaml")
    if not path.is_file():
        path = files.get(key) or files.get(f"{command}/{key}") or path
    if path.exists() or path.is_absolute() or path.suffix in (".yaml", ".yml"):
        return merged(read_file(path))
    others = [other for other in COMMANDS if f"{other}/{key}" in files]
    if others:
        raise UserError.of(
            "--config",
            f"'{name}' is a recipe of idmm {listed(others)}, not of this command",
            "'idmm configs' lists the recipes of each.",
        )
    names = [file.removeprefix(f"{command}/") for file in files]
    raise UserError.of(
        "--config",
        f"'{name}' is neither a file nor a recipe. 'idmm configs' lists the recipes",
        nearest(key, [*names, *files]),
    )


def of_method(values: Json, name: str | None, file: str | None) -> tuple[Json, str]:
    """Return a file's keys without a ``method`` section of another method than ``name``, and a note
    if there is one."""
    section = values.get("method")
    if not isinstance(section, dict) or section.get("name") in (None, name):
        return values, ""
    ignored = [f"method.{key}" for key in section if key != "name"] or ["method.name"]
    return (
        {key: value for key, value in values.items() if key != "method"},
        f"{listed(ignored, most=99)}: ignored from '{file}', as they belong to {section['name']} "
        f"and this run uses {name}",
    )


def recipe_list(_: object) -> str:
    """Return the recipes by the names that --config takes, each with the first sentence of its
    comment."""
    groups = {command: [f"idmm {command} --config NAME:"] for command in COMMANDS}
    others = ["--config FOLDER/NAME:"]
    for key, path in recipes().items():
        folder, _, name = key.partition("/")
        if folder in groups:
            groups[folder].append(_recipe_line(name, path))
        else:
            others.append(_recipe_line(key, path))
    return "\n".join([*chain(*groups.values()), *others])


def _recipe_line(label: str, path: Path) -> str:
    header, _, _ = path.read_text(encoding="utf-8").partition("\n#\n")
    comments = [line for line in header.splitlines() if line.startswith("#")]
    text = " ".join(comment.removeprefix("#").strip() for comment in comments)
    return f"  {label:<37}{text.partition('. ')[0].rstrip('.:')}"
