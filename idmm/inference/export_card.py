"""The model card: one short page from the run's own files. It has only measured figures."""

import yaml

from idmm.config import FinetuneConfig
from idmm.files import REWRITE, WEIGHTS, expand_home, idmm_version, is_public, read_json, reading
from idmm.inference.export_model import Source
from idmm.inference.runs import dataset_name
from idmm.report.page import environment


def card(source: Source, hub: bool) -> str:
    """Return ``README.md``. With ``hub`` it begins with the front matter of the Hugging Face
    Hub."""
    file = source.run / "result.json"
    if source.network.bands is None:
        bands = ""
    else:
        bands = f" of {source.saved.in_chans} channels"
    if source.classes:
        kind = f"classifier of images{bands} into {len(source.classes)} classes"
    else:
        kind = f"backbone{bands}"
    with reading(file, REWRITE):
        facts = _facts(source, read_json(file, REWRITE))
    package = source.module and source.module.partition(".")[0]
    front = ""
    if hub:
        if source.classes:
            task = "image-classification"
        else:
            task = "image-feature-extraction"
        library = package or "timm"
        keys = {
            "library_name": library,
            "pipeline_tag": task,
            "tags": sorted({task, library, "idmm"}),
        }
        front = yaml.safe_dump(keys, sort_keys=False)
    # timm cannot prepare bands and images of more than 8 bits
    by_timm = (
        isinstance(source.preprocessing["channels"], str)
        and "grey_range" not in source.preprocessing
    )
    texts = {
        "source": source,
        "kind": kind,
        "package": package,
        "front": front,
        "facts": facts,
        "by_timm": by_timm,
    }
    templates = environment(str)
    templates.filters["code"] = _code
    return templates.get_template("card.md.j2").render(texts, version=idmm_version())


def _facts(source: Source, result: dict) -> list[tuple[str, str]]:
    """Return the accuracy next to its baselines, the dataset and the start. The rest is in
    ``config.yaml``."""
    config = source.config
    facts = []
    if source.classes and "top1" in result:
        low, high = result["top1_interval"]
        images = f"{result['test_size']:,} test images"
        facts.append(
            (
                "top-1",
                f"**{result['top1']:.2f} %** (95 % interval {low:.2f} to {high:.2f}) of {images}",
            )
        )
        if "baseline_top1" in result:
            facts.append(
                ("logistic regression on hand-made features", f"{result['baseline_top1']:.2f} %")
            )
        facts.append(("the largest class", f"{result['largest_class']:.2f} %"))
    facts.append(
        ("dataset", f"{_code(dataset_name(config.data))}, {result['train_size']:,} training images")
    )
    if not isinstance(config, FinetuneConfig):
        facts.append(("method", config.method.name))
    if config.init:  # public weights by their name, others by their folder
        path = expand_home(config.init)
        is_file = path.suffix.lower() in WEIGHTS and not path.is_dir()
        if is_public(config.init):
            name = config.init
        else:
            name = (path.parent if is_file else path).name
        facts.append(("started from", _code(name)))
    return facts


def _code(text: object) -> str:
    """Return any text as Markdown code."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39)) or ' '}`"
