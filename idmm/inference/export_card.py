"""The model card: one short page from the run's own files. It has only measured figures."""

from typing import Any

import yaml

from idmm.config import FinetuneConfig
from idmm.files import REWRITE, WEIGHTS, expand_home, idmm_version, is_public, read_json, reading
from idmm.inference.export_model import Source
from idmm.inference.runs import dataset_name
from idmm.report.page import environment


def card(source: Source, hub: bool) -> str:
    """Return ``README.md``. With ``hub`` it begins with the Hugging Face Hub's front matter."""
    file = source.run / "result.json"
    has_bands = source.network.bands is not None
    bands = f" of {source.saved.in_chans} channels" if has_bands else ""
    kind = f"backbone{bands}"
    if source.classes:
        kind = f"classifier of images{bands} into {len(source.classes)} classes"
    with reading(file, REWRITE):
        facts = _facts(source, read_json(file, REWRITE))
    package = source.module and source.module.partition(".")[0]
    front = _front_matter(source, package or "timm") if hub else ""
    templates = environment(str)
    templates.filters["code"] = _code
    return templates.get_template("card.md.j2").render(
        source=source,
        kind=kind,
        package=package,
        front=front,
        facts=facts,
        # timm cannot prepare bands and images of more than 8 bits
        by_timm=not has_bands and "grey_range" not in source.preprocessing,
        version=idmm_version(),
    )


def _front_matter(source: Source, library: str) -> str:
    task = "image-classification" if source.classes else "image-feature-extraction"
    keys = {"library_name": library, "pipeline_tag": task, "tags": sorted({task, library, "idmm"})}
    return yaml.safe_dump(keys, sort_keys=False)


def _facts(source: Source, result: dict[str, Any]) -> dict[str, str]:
    """Return the accuracy next to its baselines, the dataset and the start, by their names.

    The rest is in ``config.yaml``.
    """
    config = source.config
    facts = {}
    if source.classes and "top1" in result:
        low, high = result["top1_interval"]
        facts["top-1"] = (
            f"**{result['top1']:.2f} %** (95 % interval {low:.2f} to {high:.2f}) "
            f"of {result['test_size']:,} test images"
        )
        if "baseline_top1" in result:
            baseline = f"{result['baseline_top1']:.2f} %"
            facts["logistic regression on hand-made features"] = baseline
        facts["the largest class"] = f"{result['largest_class']:.2f} %"
    name = _code(dataset_name(config.data))
    facts["dataset"] = f"{name}, {result['train_size']:,} training images"
    if not isinstance(config, FinetuneConfig):
        facts["method"] = config.method.name
    if config.init:
        facts["started from"] = _code(_start_name(config.init))
    return facts


def _start_name(init: str) -> str:
    """Return the name of public weights, or of the folder of others."""
    if is_public(init):
        return init
    path = expand_home(init)
    is_file = path.suffix.lower() in WEIGHTS and not path.is_dir()
    return path.parent.name if is_file else path.name


def _code(text: object) -> str:
    """Return any text as Markdown code."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39)) or ' '}`"
