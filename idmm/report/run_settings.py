"""The sections of a report on how runs were made: their settings, what they ran on, their seeds."""

import json
import re
from collections.abc import Iterator

from idmm.errors import listed
from idmm.report.facts import RunFacts
from idmm.report.parts import Folded, Section, TableOf, Text

KINDS = {"pretrain": "Pretraining", "finetune": "Fine-tuning", "probe": "Probe"}
ENVIRONMENT = ("started", "finished", "command", "python", "platform", "cpu", "cores", "memory", "gpus", "processes")


def settings(runs: list[RunFacts]) -> Section:
    section = Section("settings", "Settings")
    if len(runs) > 1:
        section.parts += _own_settings(runs)
    for run in runs if len(runs) == 1 else [run for run in runs if run.detailed]:
        if run.recipe is not None:
            differ = run.recipe.differences
            caption = f"{run.label}: the shipped recipe that it is nearest to is {run.recipe.name}"
            rows = [[key, _value(old), _value(new)] for key, old, new in differ]
            table = TableOf(["key", "recipe", "run"], rows, f"{caption}; it differs in")
            section.parts.append(table if rows else Text(f"{caption}, of which it changes nothing."))
        pairs = [(key, _value(value)) for key, value in run.config.items()]
        if pairs:
            section.parts.append(Folded(f"The whole config of {run.label}", pairs))
    if any(run.recipe for run in runs):
        line = (
            "config.yaml does not name its recipe: the nearest is the one with the fewest differences, images, model, "
        )
        line += "seed and folders left out, as is what a recipe leaves open."
        section.parts.append(Text(line, "quiet"))
    return section


def _own_settings(runs: list[RunFacts]) -> Iterator[TableOf]:
    """Where runs of one kind differ."""
    for kind, name in KINDS.items():
        some = [run for run in runs if run.kind == kind and run.detailed and run.config]
        keys = list(dict.fromkeys(key for run in some for key in run.config if key not in ("out", "resume")))
        rows = [[key, *(_value(run.config.get(key)) for run in some)] for key in keys]
        rows = [row for row in rows if len(set(row[1:])) > 1]
        if len(some) > 1 and rows:
            yield TableOf(["key", *(run.label for run in some)], rows, f"{name}: where the runs' configs differ")


def _value(value) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def environments(runs: list[RunFacts]) -> Section:
    section = Section("environment", "Environment and seeds")
    seeds = [
        [run.label, _value(run.config.get("seed", run.result.get("seed"))), run.result.get("precision", "")]
        for run in runs
    ]
    section.parts.append(TableOf(["run", "seed", "precision"], seeds, "Seeds"))
    known = [run for run in runs if run.environment]
    if known:
        rows = [[key, *(_told(key, run.environment) for run in known)] for key in _environment_keys(known)]
        rows = [row for row in rows if any(row[1:])]
        if len(known) > 1 and len({tuple(row[1:]) for row in rows}) and all(len(set(r[1:])) == 1 for r in rows):
            rows = [row[:2] for row in rows]
            section.parts.append(TableOf(["", "all runs"], rows, "What they ran on"))
        else:
            section.parts.append(TableOf(["", *(run.label for run in known)], rows, "What they ran on"))
    without = [run.label for run in runs if not run.environment]
    if without:
        line = f"No environment.json, which older versions did not write: {listed(without)}."
        section.parts.append(Text(line, "quiet"))
    return section


def _environment_keys(runs: list[RunFacts]) -> list[str]:
    keys = dict.fromkeys(ENVIRONMENT)
    versions = {f"versions.{name}": None for run in runs for name in run.environment.get("versions", {})}
    return [*keys, *versions]


def _told(key: str, environment: dict) -> str:
    section, _, name = key.partition(".")
    value = environment.get(section)
    value = value.get(name) if name and isinstance(value, dict) else value
    if value is None or value == []:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key == "memory" and isinstance(value, int | float):
        return f"{value / 2**30:.1f} GiB"
    return re.sub(r"\s+", " ", str(value))
