"""YAML files, and the recipes that ship with the package."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from idmm.config.schema import merged
from idmm.errors import UserError
from idmm.text import listed, nearest

# setup.cfg maps the repository's folder into the package as idmm/configs. A checkout has it next to
# the package
_PLACES = [Path(__file__).resolve().parents[level] / "configs" for level in (1, 2)]
CONFIGS = next((place for place in _PLACES if place.is_dir()), _PLACES[0])
MOST_ALIASES = 20  # each may double the size of the value
# folders of recipes that are named without their folder
STAGES = ("pretrain", "finetune", "transfer", "detect", "segment")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without surprises: ``off``, ``no`` and dates are words, 1e-3 is a number, keys are
    given once."""

    def construct_mapping(self, node, deep=False):
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        twice = [i for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            mark = node.value[twice[0]][0].start_mark
            raise yaml.constructor.ConstructorError(
                None, None, f"'{keys[twice[0]]}' is given twice", mark
            )
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes texts that the loader would take for numbers, such as 1e3."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, regex)
        for tag, regex in rules
        if tag.rpartition(":")[2] not in ("bool", "int", "timestamp")
    ]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for tag, words, first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9]\d*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", "-+0123456789."),
):
    for kind in (_Loader, Dumper):
        kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{words})$"), list(first)
        )


def read_value(text: str) -> Any:
    """Return a text as YAML. YAMLError or, for a value such as ``!!int x``, ValueError: it is
    none."""
    try:
        if (
            "&" in text
            and sum(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)) > MOST_ALIASES
        ):
            raise yaml.YAMLError(f"it has more than {MOST_ALIASES} aliases")
        value = yaml.load(text, _Loader)
        json.dumps(value, default=str, skipkeys=True)  # ValueError: it contains itself
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    return value


def read_file(path: str | Path) -> dict:
    """Return the keys of a YAML file. UserError: it cannot be read, is not YAML or holds no
    mapping."""
    try:
        loaded = read_value(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError):
            reason = error.strerror
        else:
            reason = "not UTF-8 text"
        raise UserError(
            f"--config: cannot read '{path}' ({reason}), expected a YAML file"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"--config: '{path}' is not YAML: {yaml_problem(error)}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise UserError(
            f"--config: '{path}' holds a {type(loaded).__name__}, expected a mapping of keys"
        )
    return loaded or {}


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


def recipe(kind: type, name: str | Path) -> dict:
    """Return the keys of a YAML file, or of a recipe: NAME in the folder of the config's stage, or
    FOLDER/NAME.

    Raises:
        UserError: Neither a file nor a recipe, or it cannot be read.
    """
    if not name:
        raise UserError("--config: expected a FILE")
    path = Path(name)
    files = recipes()
    stage = getattr(kind, "STAGE", None)
    key = str(name).removesuffix(".yaml")
    if not path.is_file():
        path = files.get(key) or files.get(f"{stage}/{key}") or path
    if path.exists() or path.is_absolute() or path.suffix in (".yaml", ".yml"):
        return merged(read_file(path))
    if others := [other for other in STAGES if f"{other}/{key}" in files]:
        belongs = f"a recipe of idmm {listed(others)}, not of this command"
        raise UserError(
            f"--config: '{name}' is {belongs}. 'idmm configs' lists the recipes of each."
        )
    hint = nearest(key, [*(name.removeprefix(f"{stage}/") for name in files), *files])
    raise UserError(
        f"--config: '{name}' is neither a file nor a recipe. 'idmm configs' lists the recipes{hint}"
    )


def of_method(data: dict, name: str | None, where: str) -> tuple[dict, list[str]]:
    """Return a file's keys without a ``method`` section of another method than ``name``, and a note
    if there is one."""
    section = data.get("method")
    other = section.get("name") if isinstance(section, dict) else None
    if other in (None, name):
        return data, []
    keys = listed([f"method.{key}" for key in section if key != "name"], most=99) or "method.name"
    note = f"{keys}: ignored from '{where}', as they belong to {other} and this run uses {name}"
    return {key: value for key, value in data.items() if key != "method"}, [note]


def recipe_list(_: Any) -> str:
    """Return the recipes by the names that --config takes, each with the first sentence of its
    comment."""
    groups = {stage: [f"idmm {stage} --config NAME:"] for stage in STAGES}
    others = ["--config FOLDER/NAME, most of them after one of the above:"]
    for key, path in recipes().items():
        folder, _, name = key.partition("/")
        lines, label = (groups[folder], name) if folder in groups else (others, key)
        header = path.read_text(encoding="utf-8").partition("\n#\n")[0].splitlines()
        text = " ".join(line.removeprefix("#").strip() for line in header if line.startswith("#"))
        lines.append(f"  {label:<37}{text.partition('. ')[0].rstrip('.:')}")
    return "\n".join(line for lines in (*groups.values(), others) for line in lines)
