"""The sections of a report on how runs were made: their settings, what they ran on, their seeds."""

import re
from collections.abc import Iterator

from idmm.config.parsing import flatten
from idmm.errors import listed
from idmm.report.facts import RunFacts
from idmm.report.page import as_text
from idmm.report.parts import Folded, Section, TableOf, Text

KINDS = {
    "pretrain": "Pretraining",
    "finetune": "Fine-tuning",
    "detect": "Detection",
    "segment": "Segmentation",
    "probe": "Probe",
}
ENVIRONMENT = ("started", "finished", "command", "python", "platform", "cpu", "cores", "memory", "gpus", "processes")


def settings(runs: list[RunFacts]) -> Section:
    """What the runs were asked for: where they differ, how far each is from its nearest recipe, the whole configs."""
    section = Section("settings", "Settings")
    if len(runs) > 1:
        section.parts += _own_settings(runs)
    for run in runs if len(runs) == 1 else [run for run in runs if run.detailed]:
        if run.recipe is not None:
            caption = f"{run.label}: the shipped recipe that it is nearest to is {run.recipe.name}"
            rows = [[key, as_text(old), as_text(new)] for key, old, new in run.recipe.differences]
            table = TableOf(["key", "recipe", "run"], rows, f"{caption}; it differs in")
            section.parts.append(table if rows else Text(f"{caption}, of which it changes nothing."))
        pairs = [(key, as_text(value)) for key, value in run.config.items()]
        if pairs:
            section.parts.append(Folded(f"The whole config of {run.label}", pairs))
    if any(run.recipe for run in runs):
        line = "config.yaml does not name its recipe: the nearest is the one with the fewest differences, images, "
        line += "model, seed and folders left out, as is what a recipe leaves open."
        section.parts.append(Text(line, "quiet"))
    return section


def _own_settings(runs: list[RunFacts]) -> Iterator[TableOf]:
    """Where runs of one kind differ."""
    for kind, name in KINDS.items():
        some = [run for run in runs if run.kind == kind and run.detailed and run.config]
        keys = list(dict.fromkeys(key for run in some for key in run.config if key not in ("out", "resume")))
        rows = [[key, *(as_text(run.config.get(key)) for run in some)] for key in keys]
        rows = [row for row in rows if len(set(row[1:])) > 1]
        if len(some) > 1 and rows:
            yield TableOf(["key", *(run.label for run in some)], rows, f"{name}: where the runs' configs differ")


def environments(runs: list[RunFacts]) -> Section:
    """Seeds and precisions, and the machine, versions and commands as far as the runs kept them."""
    section = Section("environment", "Environment and seeds")
    seeds = [
        [run.label, as_text(run.config.get("seed", run.result.get("seed"))), run.result.get("precision", "")]
        for run in runs
    ]
    section.parts.append(TableOf(["run", "seed", "precision"], seeds, "Seeds"))
    known = [run for run in runs if run.environment]
    if known:
        found = [flatten(run.environment) for run in known]
        versions = [key for one in found for key in one if key.startswith("versions.")]
        rows = [[key, *(_told(key, one.get(key)) for one in found)] for key in dict.fromkeys([*ENVIRONMENT, *versions])]
        rows = [row for row in rows if any(row[1:])]
        heads = ["", *(run.label for run in known)]
        if len(known) > 1 and rows and all(len(set(row[1:])) == 1 for row in rows):
            heads, rows = ["", "all runs"], [row[:2] for row in rows]
        section.parts.append(TableOf(heads, rows, "What they ran on"))
    without = [run.label for run in runs if not run.environment]
    if without:
        line = f"No environment.json, which older versions did not write: {listed(without)}."
        section.parts.append(Text(line, "quiet"))
    return section


def _told(key: str, value) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key == "memory" and isinstance(value, int | float):
        return f"{value / 2**30:.1f} GiB"
    return re.sub(r"\s+", " ", str(value))
