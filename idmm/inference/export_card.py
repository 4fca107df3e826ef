"""The model card: what a run's own files tell of the model, in one short page. No figure but measured ones."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from idmm.config import FinetuneConfig
from idmm.data.split import counted
from idmm.files import is_public, run_of
from idmm.inference.export_source import Source
from idmm.stages import stage_of

OURS = ("t2t_vit_", "cvt_")  # architectures that timm knows when idmm.models was imported

_PICTURES = """\
prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = prepare(Image.open("photo.jpg").convert("{channels}"))[None]  # [1, C, H, W]
"""
_CLASSES = """\
    shares = model(image)[0].softmax(0)  # [{width}]
names = model.pretrained_cfg["label_names"]
print(names[shares.argmax()], float(shares.max()))
"""
_LIMITS = """\
- Images of other cameras, places or years than the test images' were not measured.
- Calibration, fairness between groups of people, and resistance to misleading images were not measured.
- A licence is not named here: whoever publishes the model chooses it.
"""


def card(source: Source, hub: bool) -> str:
    """Returns ``README.md``; ``hub``: with the YAML that the Hugging Face Hub reads before it."""
    result = json.loads((source.run / "result.json").read_text(encoding="utf-8"))
    measured = source.classes and "top1" in result
    bands = "" if source.network.bands is None else f" of {source.saved.in_chans} channels"
    kind = f"classifier of images{bands} into {len(source.classes)} classes" if source.classes else f"backbone{bands}"
    weights = f"{_code(source.saved.name)}, {source.parameters / 1e6:.2f} million parameters"
    parts = [
        f"---\n{front_matter(source, result)}---" if hub else "",
        f"# {_code(source.run.resolve().name)}",
        f"A {kind}: {weights}. Trained and exported by the toolkit idmm, version {version('idmm')}.",
        _accuracy(result) if measured else "",
        f"## Data and training\n\n{_table(_facts(source, result))}",
        f"Classes, by number from 0: {', '.join(map(_code, source.classes))}." if source.classes else "",
        f"## Use\n\n```python\n{_lines(source)}```",
        f"Images are prepared so:\n\n{_table([(name, str(value)) for name, value in source.preprocessing.items()])}",
        f"## Limits\n\n{_LIMITS}",
    ]
    return "\n\n".join(part for part in parts if part)


def front_matter(source: Source, result: dict) -> str:
    """Returns what the Hub reads: library, task, tags and the measured accuracy."""
    task = "image-classification" if source.classes else "image-feature-extraction"
    front: dict[str, Any] = {"library_name": "timm", "pipeline_tag": task, "tags": [task, "timm", "idmm"]}
    if source.classes and "top1" in result:
        measured = [{"type": "accuracy", "name": "top-1", "value": round(result["top1"], 2)}]
        dataset = {"name": dataset_name(source.config.data), "type": dataset_name(source.config.data), "split": "test"}
        results = [{"task": {"type": task}, "dataset": dataset, "metrics": measured}]
        front |= {"metrics": ["accuracy"]}
        front["model-index"] = [{"name": source.run.resolve().name, "results": results}]
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True)


def dataset_name(data) -> str:
    """Returns what a dataset is called: folders of one's own by their last name alone."""
    return Path(data.root).resolve().name if data.name == "folder" and data.root else data.name or "digits"


def _accuracy(result: dict) -> str:
    low, high = result["top1_interval"]
    floor = f"{result['baseline_top1']:.2f}" if "baseline_top1" in result else "not measured"
    rows = [("**top-1**", f"**{result['top1']:.2f}** (95 % interval {low:.2f} to {high:.2f})")]
    rows += [("top-5", f"{result['top5']:.2f}"), ("mean over classes", f"{result['mean_per_class']:.2f}")]
    rows += [("without a network: logistic regression on hand-made features", floor)]
    rows += [("without a network: naming the largest class every time", f"{result['largest_class']:.2f}")]
    head = f"On {result['test_size']} test images that were not trained on, in percent, of one run with one seed:"
    return f"## Accuracy\n\n{head}\n\n{_table(rows)}"


def _facts(source: Source, result: dict) -> list[tuple[str, str]]:
    """Returns the dataset's name, the splits, and how the run trained; the rest is in its ``config.yaml``."""
    config, train = source.config, source.config.train
    facts = [("dataset", _code(dataset_name(config.data))), ("training images", f"{result['train_size']:,}")]
    facts += [("test images", f"{result['test_size']:,}")] if "test_size" in result else []
    facts += [] if isinstance(config, FinetuneConfig) else [("method", config.method.name)]
    for phase in stage_of(config).phases:
        lr = f", learning rate {phase.lr or train.lr:g}" if phase.lr or train.lr else ""
        epochs = "" if "minutes" in result else f"{counted(phase.epochs, 'epoch')}, "
        facts.append((f"{phase.size} px", f"{epochs}batches of {phase.batch_size}{lr}"))
    if "minutes" in result:  # the clock ended the stages, not the recipe's epochs
        facts.append(("length", f"{result['minutes']:g} minutes, {counted(result['epochs'], 'epoch')} in all"))
    facts += [("seed", str(result["seed"]))]
    if config.init:  # public weights by their name, others by their folder's last name
        facts.append(("started from", _code(config.init if is_public(config.init) else run_of(config.init).name)))
    return facts


def _lines(source: Source) -> str:
    """Python that uses the model; images of more than 8 bits and bands are prepared by hand, as timm cannot."""
    looks = source.preprocessing
    by_timm = isinstance(looks["channels"], str) and "grey_range" not in looks
    lines = "import timm, torch\n" + ("from PIL import Image\n" if by_timm else "")
    if source.saved.name.startswith(OURS):
        lines += "import idmm.models  # the toolkit that exported this: timm alone does not know the architecture\n"
    lines += '\nmodel = timm.create_model("local-dir:PATH", pretrained=True).eval()  # or "hf-hub:USER/NAME"\n'
    lines += _PICTURES.format(channels=looks["channels"]) if by_timm else "image = ...  # [1, C, H, W], by hand\n"
    lines += "with torch.inference_mode():\n"
    return lines + (_CLASSES if source.classes else "    features = model(image)[0]  # [{width}]\n").format(
        width=source.width
    )


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows)]
    )


def _code(text: object) -> str:
    """A word as code, whatever is in it."""
    plain = " ".join(str(text).split()).replace("`", "'") or " "
    return f"`{plain}`"
