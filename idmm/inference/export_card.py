"""The model card: one short page from the run's own files. It has only measured figures."""

import yaml

from idmm.config import FinetuneConfig
from idmm.files import REWRITE, WEIGHTS, expand_home, idmm_version, is_public, read_json, reading
from idmm.inference.export_model import Source
from idmm.inference.runs import dataset_name

_PICTURES = """\
prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
photo = ImageOps.exif_transpose(Image.open("photo.jpg"))  # upright
image = prepare(photo.convert("{channels}"))[None]  # [1, C, H, W]
"""
_CLASSES = """\
    shares = model(image)[0].softmax(0)  # [{width}]
names = model.pretrained_cfg["label_names"]
print(names[shares.argmax()], float(shares.max()))
"""

_NEEDS = """\
The code below loads it only if the Python package {package} is installed, because timm does \
not know its architecture. Other programs need an export to ONNX."""


def card(source: Source, hub: bool) -> str:
    """Return ``README.md``. With ``hub`` it begins with the front matter of the Hugging Face Hub."""
    file = source.run / "result.json"
    bands = "" if source.network.bands is None else f" of {source.saved.in_chans} channels"
    kind = f"classifier of images{bands} into {len(source.classes)} classes" if source.classes else f"backbone{bands}"
    with reading(file, REWRITE):
        facts = "\n".join(f"- {name}: {text}" for name, text in _facts(source, read_json(file, REWRITE)))
    package = source.module and source.module.partition(".")[0]
    blocks = []
    if hub:
        task = "image-classification" if source.classes else "image-feature-extraction"
        library = package or "timm"
        front = {"library_name": library, "pipeline_tag": task, "tags": sorted({task, library, "idmm"})}
        blocks.append(f"---\n{yaml.safe_dump(front, sort_keys=False)}---")
    blocks.append(f"# {_code(source.run.resolve().name)}")
    blocks.append(f"A {kind}, {_code(source.saved.name)}, trained by the toolkit idmm, version {idmm_version()}.")
    if package:
        blocks.append(_NEEDS.format(package=package))
    blocks.append(f"{facts}\n- licence: none is named, whoever publishes the model chooses it")
    if source.classes:
        blocks.append(f"Classes, by number from 0: {', '.join(map(_code, source.classes))}.")
    blocks.append(f"```python\n{_code_lines(source)}```\n")
    return "\n\n".join(blocks)


def _facts(source: Source, result: dict) -> list[tuple[str, str]]:
    """Return the accuracy next to its baselines, the dataset and the start. The rest is in ``config.yaml``."""
    config, facts = source.config, []
    if source.classes and "top1" in result:
        low, high = result["top1_interval"]
        images = f"{result['test_size']:,} test images"
        facts.append(("top-1", f"**{result['top1']:.2f} %** (95 % interval {low:.2f} to {high:.2f}) of {images}"))
        if "baseline_top1" in result:
            facts.append(("logistic regression on hand-made features", f"{result['baseline_top1']:.2f} %"))
        facts.append(("the largest class", f"{result['largest_class']:.2f} %"))
    facts.append(("dataset", f"{_code(dataset_name(config.data))}, {result['train_size']:,} training images"))
    if not isinstance(config, FinetuneConfig):
        facts.append(("method", config.method.name))
    if config.init:  # public weights by their name, others by their folder
        path = expand_home(config.init)
        is_file = path.suffix.lower() in WEIGHTS and not path.is_dir()
        name = config.init if is_public(config.init) else (path.parent if is_file else path).name
        facts.append(("started from", _code(name)))
    return facts


def _code_lines(source: Source) -> str:
    """Return Python that uses the model. timm cannot prepare bands and images of more than 8 bits."""
    channels = source.preprocessing["channels"]
    by_timm = isinstance(channels, str) and "grey_range" not in source.preprocessing
    lines = "import timm, torch\n"
    if by_timm:
        lines += "from PIL import Image, ImageOps\n"
    if source.module:
        lines += f"import {source.module}  # registers the architecture with timm\n"
    lines += '\nmodel = timm.create_model("local-dir:PATH", pretrained=True).eval()  # or "hf-hub:USER/NAME"\n'
    lines += _PICTURES.format(channels=channels) if by_timm else "image = ...  # [1, C, H, W], by hand\n"
    lines += "with torch.inference_mode():\n"
    outputs = _CLASSES if source.classes else "    features = model(image)[0]  # [{width}]\n"
    return lines + outputs.format(width=source.width)


def _code(text: object) -> str:
    """Return any text as Markdown code."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39)) or ' '}`"
