"""A folder that ``timm.create_model('local-dir:PATH', pretrained=True)`` and the Hugging Face Hub load."""

import json
from pathlib import Path

import timm
import torch
from safetensors.torch import save

from idmm.files import filling
from idmm.inference.export_card import card
from idmm.inference.export_graph import Check, check, quiet
from idmm.inference.export_source import Sample, Source
from idmm.models.hub import OUR_KEYS

# of timm's description of the model, and of how its images are prepared
_KEPT = ("fixed_input_size", "first_conv", "classifier")
_KEPT += ("input_size", "crop_pct", "crop_mode", "interpolation", "mean", "std")


def config(source: Source) -> dict:
    """Returns ``config.json`` in the format of timm's folders, which transformers' timm wrapper reads, too."""
    saved, model = source.saved, source.model
    known = {name: model.pretrained_cfg[name] for name in _KEPT if model.pretrained_cfg.get(name) is not None}
    classes = source.classes or []
    found = {
        "architecture": saved.name,
        "num_classes": len(classes),
        "num_features": model.num_features,
        "pretrained_cfg": {**known, "num_classes": len(classes), "custom_load": False},
        "model_args": {name: value for name, value in saved.kwargs.items() if name != "num_classes"},
    }
    given = source.preprocessing
    found |= {name: given[name] for name in OUR_KEYS if name in given}
    return found | ({"label_names": classes} if classes else {})


def write_folder(source: Source, sample: Sample, out: Path, hub: bool) -> Check:
    """Writes ``config.json``, ``model.safetensors`` and ``README.md``; ``hub``: with the front matter that the Hugging
    Face Hub reads.

    Raises:
        RunError: What timm loads from it is not what torch computes, or it cannot be written; nothing is left.
    """
    state = {name: tensor.clone().contiguous() for name, tensor in source.model.state_dict().items()}
    with filling(out) as folder:
        (folder / "config.json").write_text(json.dumps(config(source), indent=2) + "\n", encoding="utf-8")
        (folder / "model.safetensors").write_bytes(save(state, metadata={"format": "pt"}))
        (folder / "README.md").write_text(card(source, hub), encoding="utf-8", errors="replace")
        with quiet():
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        with torch.inference_mode():
            return check(source, sample, lambda images: loaded(images).numpy())
