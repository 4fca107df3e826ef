"""YAML files, and the recipes that ship with the package and go by their names."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from idmm.config.schema import merged
from idmm.errors import UserError, listed, nearest

# setup.cfg maps the repository's folder into the package as idmm/configs; a checkout has it beside the package
_PLACES = [Path(__file__).resolve().parents[level] / "configs" for level in (1, 2)]
CONFIGS = next((place for place in _PLACES if place.is_dir()), _PLACES[0])
# folders of recipes that are called without their folder
STAGES = ("pretrain", "finetune", "transfer", "detect", "segment")


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: ``off`` and ``no`` are words, ``1e-3`` is a number, a key given twice is a fault."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [i for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            mark = node.value[twice[0]][0].start_mark
            raise yaml.constructor.ConstructorError(None, None, f"'{keys[twice[0]]}' is given twice", mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regex) for tag, regex in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for tag, words, first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("float", r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", "-+0123456789."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{words})$"), list(first))


def read_value(text: str) -> Any:
    """Returns a flag's text as YAML."""
    try:
        found = yaml.load(text, _Loader)
        json.dumps(found, default=str, skipkeys=True)  # refuses what an alias puts into itself
        return found
    except (ValueError, RecursionError) as error:  # of a date, say, that there is not
        raise yaml.YAMLError(str(error)) from None


def read_file(path: str | Path) -> dict:
    """Returns the keys of a YAML file.

    Raises:
        UserError: It cannot be read, is not YAML or holds no mapping.
    """
    try:
        loaded = read_value(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"--config: cannot read '{path}' ({why}); wanted a YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config: '{path}' is not YAML: {yaml_problem(error)}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise UserError(f"--config: '{path}' holds {type(loaded).__name__}; wanted a mapping of keys")
    return loaded or {}


def yaml_problem(error: yaml.YAMLError) -> str:
    """Returns what is wrong with a text, with the line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem}, line {mark.line + 1}" if mark else problem


# ------------------------------------------------------------------ recipes
@functools.cache
def recipes() -> dict[str, Path]:
    """Returns the recipes that ship, by FOLDER/NAME."""
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(CONFIGS.glob("*/*.yaml"))}


def located(name: str | Path, stage: str | None = None) -> Path:
    """Returns the file of that path, else the recipe of that name: NAME in the folder of the stage, or FOLDER/NAME.

    Raises:
        UserError: Neither a file nor a recipe.
    """
    if not name:
        raise UserError("--config: wants a FILE")
    path, known = Path(name), recipes()
    if path.exists() and not path.is_dir():
        return path
    plain = str(name).removesuffix(".yaml")
    found = known.get(plain) or known.get(f"{stage}/{plain}")
    if found or path.exists() or path.is_absolute() or path.suffix in (".yaml", ".yml"):
        return found or path
    if others := [other for other in STAGES if f"{other}/{plain}" in known]:
        what = f"is a recipe of idmm {listed(others)}, not of this command"
        raise UserError(f"--config: '{name}' {what}; 'idmm configs' lists those of each")
    names = [*(key.removeprefix(f"{stage}/") for key in known), *known]
    what = "is no file and no recipe's name"
    raise UserError(f"--config: '{name}' {what}{nearest(plain, names)}; 'idmm configs' lists them")


def recipe(kind: type, name: str | Path) -> dict:
    """Returns the keys of a recipe for a config of this kind: a YAML file, or one that ships, by its name.

    Raises:
        UserError: There is none, or it cannot be read.
    """
    return merged(read_file(located(name, getattr(kind, "STAGE", None))))


def of_method(data: dict, name: str | None, where: str) -> tuple[dict, str]:
    """Returns the keys of the file ``where`` without a ``method`` section that names another method than ``name``, and
    then a line for the log."""
    section = data.get("method")
    own = section.get("name") if isinstance(section, dict) else None
    if own in (None, name):
        return data, ""
    keys = listed([f"method.{key}" for key in section if key != "name"], most=99) or "method.name"
    note = f"{keys}: left out of '{where}', where they are for {own}; this is {name}"
    return {key: value for key, value in data.items() if key != "method"}, note


def about(path: Path) -> str:
    """Returns the first sentence of the comment that a recipe begins with."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#")
        if text == line or not text.strip() or text.startswith("  "):  # the comment's end, or a command in it
            break
        lines.append(text.strip())
    return " ".join(lines).partition(". ")[0].rstrip(".:")
