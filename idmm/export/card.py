"""The model card: what a run's own files say of the model, for those who are handed it. No figure but measured ones."""

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from idmm.config import FinetuneConfig, PretrainConfig, parsing
from idmm.config.base import FREE
from idmm.config.recipes import resolve_method
from idmm.data.split import counted
from idmm.errors import UserError
from idmm.evaluate import FEW, of_few
from idmm.export.source import Source
from idmm.files import is_public, run_of
from idmm.intervals import too_narrow, wilson
from idmm.progress import duration
from idmm.report.render import ENVIRONMENTS
from idmm.stages import stage_of
from idmm.stages.artifacts import config_of, environment

OURS = ("t2t_vit_", "cvt_")  # architectures that timm knows when idmm.models was imported
MOST = 200  # classes that a card lists
STAGES = 4  # runs that are followed back through init
# keys that change no result, or say what the model, the images and the run are: told elsewhere
_TOLD = {*FREE, "seed", "init", "stages", "minutes", "epochs", "trials", "measure", "engine"}
_TOLD |= {f"train.{name}" for name in ("compile", "precision", "eval_every", "knn_every", "minutes", "accumulate")}
_TOLD |= {f"model.{name}" for name in ("name", "kwargs", "strict")}


@dataclass(frozen=True)
class Trained:
    """A run that led to the model."""

    title: str
    facts: list[tuple[str, str]]
    recipe: str  # the shipped one that stands for the paper
    deviations: list[tuple[str, str, str]]  # key, value here, value there
    machine: list[tuple[str, str]]  # empty for runs that are older than environment.json


def card(source: Source, hub: bool) -> str:
    """Returns ``README.md``; ``hub``: with the YAML that the Hugging Face Hub reads before it."""
    result, (chain, missing) = _result(source.run), history(source)
    return ENVIRONMENTS["md"].get_template("model_card.md.j2").render(
        front=Markup(front_matter(source, result)) if hub else None,
        code=_code, cell=_cell, percent="{:.2f}".format, interval="{0[0]:.2f} to {0[1]:.2f}".format,
        name=source.run.resolve().name, model=source.saved.name, millions=f"{source.parameters / 1e6:.2f}",
        classes=source.classes or [], most=MOST, width=source.width, output=source.output,
        preprocessing=source.preprocessing, prepare=_prepare(source.preprocessing), version=version("idmm"),
        ours=source.saved.name.startswith(OURS), kind=_kind(source),
        result=result if source.classes and "top1" in result else None, remarks=remarks(result),
        data=data_facts(source, result), chain=chain, missing_init=missing,
    )  # fmt: skip


def _kind(source: Source) -> str:
    """Says what images it takes where these are no pictures."""
    return "" if source.network.bands is None else f"of {source.saved.in_chans} channels"


def _prepare(given: dict[str, Any]) -> Markup | None:
    """What the lines of code on deep images and on bands need of the preprocessing, as Python; None: 8-bit pictures,
    which timm prepares."""
    scale = given.get("range", given.get("grey_range"))
    if isinstance(given["channels"], str) and scale is None:
        return None
    given = given | {"range": [0, 65535] if scale == "full" else scale}
    named = ("channels", "bands", "range", "resize", "size", "mean", "std")
    lines = [f'    "{name}": {given[name]!r},' for name in named if given.get(name) is not None]
    return Markup("\n".join(["{", *lines, "}"]))


def front_matter(source: Source, result: dict) -> str:
    """Returns what the Hub reads: library, task, tags and the measured accuracy."""
    task = "image-classification" if source.classes else "image-feature-extraction"
    found: dict[str, Any] = {"library_name": "timm", "pipeline_tag": task, "tags": [task, "timm", "idmm"]}
    if source.classes and "top1" in result:
        measured = [{"type": "accuracy", "name": "top-1", "value": round(result["top1"], 2)}]
        dataset = {"name": dataset_name(source.config.data), "type": dataset_name(source.config.data), "split": "test"}
        results = [{"task": {"type": task}, "dataset": dataset, "metrics": measured}]
        found |= {"metrics": ["accuracy"]}
        found["model-index"] = [{"name": source.run.resolve().name, "results": results}]
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)


def remarks(result: dict) -> list[str]:
    """Returns what the accuracy must not be read without."""
    if "top1" not in result or "test_size" not in result:
        return []
    lines, top1 = [], result["top1"]
    if result["top1_interval"][0] <= result.get("largest_class", -1):
        lines.append("Top-1 is no better, within its interval, than naming the largest class every time.")
    if result.get("pixel_knn", -1) >= top1:
        lines.append("Top-1 is no better than comparing raw pixels with those of the training images.")
    if result["test_size"] < FEW:
        lines += [f"{line}." for line in of_few(top1, result["test_size"])]
    if "test_groups" in result:
        lines.append(f"{too_narrow(result['test_size'], result['test_groups'])}.".capitalize())
    return lines


def _result(run: Path) -> dict:
    """A finished run's ``result.json``; those of 0.1.0 lack the interval."""
    found = json.loads((run / "result.json").read_text(encoding="utf-8"))
    if "top1" in found and "top1_interval" not in found:
        count = found["test_size"]
        low, high = wilson(round(found["top1"] * count / 100), count)
        found["top1_interval"] = [100 * float(low), 100 * float(high)]
    return found


# ---------------------------------------------------------------------- the runs behind it
def history(source: Source) -> tuple[list[Trained], str | None]:
    """Returns the runs that led to the model, the last one first, as far as their folders are there, and the name of
    what the first of them started from, where that cannot be told of."""
    run, config, found = source.run, source.config, []
    for _ in range(STAGES):
        found.append(_trained(run, config))
        if config.init is None:
            break
        run = run_of(config.init)
        try:
            config = config_of(run)
        except UserError:
            return found, config.init if is_public(config.init) else run.name
    return found, None


def _trained(run: Path, config: PretrainConfig | FinetuneConfig) -> Trained:
    result = _result(run)
    pretrained, phases, train = isinstance(config, PretrainConfig), stage_of(config).phases(config), config.train
    facts = [("training images", f"{result['train_size']:,}")]
    facts += [("method", config.method.name)] if pretrained else []
    facts += [(f"{phase.size} px", _phase(phase, train)) for phase in phases]
    facts += [("optimizer", f"{train.optimizer}, weight decay {train.weight_decay:g}, {train.schedule} schedule")]
    facts += [("seed", str(result["seed"])), ("time", duration(result["seconds"]))]
    facts += [("precision", result["precision"])] if "precision" in result else []
    facts += [("weights", "averaged over steps (EMA)")] if train.ema else []
    facts += [("kept", f"epoch {result['kept_epoch']}, the best on val")] if "kept_epoch" in result else []
    recipe = config.method.name if pretrained else "paper"
    title = "Pretraining" if pretrained else "Fine-tuning" if config.init else "Training from scratch"
    return Trained(title, facts, recipe, deviations(config, recipe), _machine(run))


def _phase(phase, train) -> str:
    lr = phase.lr or train.lr
    return f"{counted(phase.epochs, 'epoch')}, batches of {phase.batch_size}" + (
        f", learning rate {lr:g}" if lr else ""
    )


def _machine(run: Path) -> list[tuple[str, str]]:
    """What a run ran on, without the command line, which may name folders of whoever ran it."""
    found = environment(run)
    if not found:
        return []
    gpus = ", ".join(found["gpus"]) or "none"
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if number)
    lines = [("processor", f"{found['cpu']}, {counted(found['cores'], 'core')}"), ("GPUs", gpus)]
    lines += [("processes", str(found["processes"])), ("Python", f"{found['python']}; {versions}")]
    return lines + [("finished", found["finished"])] if found.get("finished") else lines


def deviations(config: PretrainConfig | FinetuneConfig, recipe: str) -> list[tuple[str, str, str]]:
    """Returns where a run's settings are not those of a shipped recipe: key, value here, value there.

    What the recipe leaves to the backbone's family, such as the learning rate, is no deviation.
    """
    given = parsing.build(type(config), recipe)
    if isinstance(config, PretrainConfig):
        given = resolve_method(given)[0]
    here, there = (parsing.flatten(parsing.plain(one)) for one in (config, given))
    found = []
    for key, value in there.items():
        told = key in _TOLD or key.startswith(("data.", "drloc.", "train.monitor")) or value is None
        if not told and here.get(key) != value:
            found.append((key, _value(here.get(key)), _value(value)))
    if config.drloc.weight != given.drloc.weight:
        found.append(("drloc.weight", _value(config.drloc.weight), _value(given.drloc.weight)))
    return found


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---------------------------------------------------------------------- the data
def dataset_name(data) -> str:
    """Returns what a dataset is called: folders of one's own by their last name alone."""
    return Path(data.root).resolve().name if data.name == "folder" and data.root else data.name or "digits"


def data_facts(source: Source, result: dict) -> list[tuple[str, str]]:
    """Returns the dataset's name, the splits and how they came to be."""
    data = source.config.data
    facts = [("dataset", dataset_name(data)), ("training images", f"{result['train_size']:,}")]
    facts += [("test images", f"{result['test_size']:,}")] if "test_size" in result else []
    if data.subset is not None:
        chosen = {name: value for name, value in parsing.plain(data.subset).items() if value is not None}
        facts.append(("drawn", ", ".join(f"{name} {value}" for name, value in chosen.items())))
    facts += [("held out of training", f"{100 * data.val_fraction:g} %")] if data.val_fraction else []
    facts += [("fold", f"{data.fold or 1} of {data.folds}")] if data.folds else []
    facts += [("left out", f"{result['excluded']} images by hand")] if "excluded" in result else []
    return facts


def _cell(text: object) -> Markup:
    """A word as code in a table."""
    return Markup(str(_code(text)).replace("|", "\\|"))


def _code(text: object) -> Markup:
    """A word as code, whatever is in it."""
    plain = " ".join(str(text).split()).replace("`", "'") or " "
    return Markup(f"`{plain}`")
