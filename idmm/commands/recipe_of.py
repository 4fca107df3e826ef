"""Which shipped recipe a run's config came from, as near as can be told."""

import contextlib
from typing import Any

from idmm.config import FREE, parsing
from idmm.config.reading import recipe, recipes
from idmm.errors import UserError
from idmm.report.facts import Recipe
from idmm.stages import STAGES, stage_of

OWN = (*FREE, "seed", "init", "train.size", "train.minutes")  # of a run, not of a recipe ...
OWN_SECTIONS = ("data.", "model.")  # ... and all in these
PARTIAL = ("backbone", "data", "transfer")  # folders of recipes that go after others, or of other commands


def nearest_recipe(config: Any) -> Recipe | None:
    """Returns the shipped recipe of a config's stage with the fewest differences, of equals the first by name.

    What a recipe leaves open (null), images, model, seed and folders are no difference.
    """
    stage, found = stage_of(config), []
    if stage.name not in ("pretrain", "finetune"):
        return None
    for name in sorted(recipes(), key=lambda name: (not name.startswith(f"{stage.name}/"), name)):
        if name.partition("/")[0] in PARTIAL:
            continue
        with contextlib.suppress(UserError):  # of another stage, or of a method whose library is missing here
            values = {**recipe(stage.config, name), "init": config.init}  # on which the classifier's start depends
            shipped = stage.by_method(parsing.build(stage.config, values))[0]
            found.append(Recipe(name.removeprefix(f"{stage.name}/"), differences(shipped, config)))
    return min(found, key=lambda one: len(one.differences), default=None)


def differences(shipped: Any, own: Any) -> list[tuple[str, Any, Any]]:
    """Returns keys with their values in a recipe and in a run's config, where they differ."""
    old, new = (parsing.flatten(_settled(config)) for config in (shipped, own))
    return [
        (key, old.get(key), value)
        for key, value in new.items()
        if key not in OWN and not key.startswith(OWN_SECTIONS) and not _agrees(old.get(key), value)
    ]


def _settled(config: Any) -> dict:
    """A config as nested mappings, with the stages of a fine-tuning as it would go through them."""
    phases = STAGES["finetune"].phases(config) if hasattr(config, "stages") else []
    values = parsing.plain(config)
    if not phases:
        return values
    names = ("size", "epochs", "lr", "batch_size")
    own = [{name: getattr(phase, name) for name in names} for phase in phases]
    one = len(own) == 1  # told by the keys of train as well
    values["stages"] = [] if one else own  # null would be left open
    values["train"] |= own[0] if one else {}
    return values


def _agrees(old: Any, new: Any) -> bool:
    """Whether a value is the recipe's, or the recipe leaves it open."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(_agrees(old.get(key), value) for key, value in new.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_agrees, old, new))
    return old is None or old == new
