"""``idmm export``: a run's model for other programs, as an ONNX file or a folder for timm and the
Hugging Face Hub."""

import json
from pathlib import Path

from idmm.config.commands import ExportConfig
from idmm.errors import checked, needed
from idmm.files import expand_home, filling, output_path, weights_file, write_bytes

NEEDED = ("onnx", "onnxruntime", "onnxscript")  # of the extra 'export'
# of config.json, for those who read other images
OUR_KEYS = ("grey_range", "range", "bands", "file_channels")


def export(config: ExportConfig) -> str:
    """Write the model of a finished run to ``config.out``, compare it with torch first, and return
    a summary.

    Raises:
        UserError: No finished run, a library is missing, or ``out`` cannot be written. Nothing is
            written.
        RunError: The model cannot be written in that form, or its outputs differ from torch's.
    """
    run = expand_home(config.init)
    is_onnx = config.format == "onnx"
    out, *_ = checked(
        lambda: output_path(config.out, (".onnx",) if is_onnx else None),
        lambda: weights_file(run, "init"),
        lambda: is_onnx and needed("format: onnx", NEEDED, "export"),
    )
    # torch takes seconds, a mistake is reported at once
    from idmm.inference.export_model import Source

    source = Source(run)
    if is_onnx:
        return _write_onnx(out, source)
    check = write_folder(source, out, hub=config.format == "hf")
    line = f"{out}: config.json, model.safetensors, README.md. Load it with "
    if source.module:
        line += f"import {source.module} and "
    return f"{line}timm.create_model('local-dir:{out}', pretrained=True)\nchecked against torch: {check}"


def _write_onnx(out: Path, source) -> str:
    import onnx

    from idmm.inference.export_model import OPSET, onnx_model

    proto, check = onnx_model(source)
    properties = {
        "preprocessing": source.preprocessing,
        **({"classes": source.classes} if source.classes else {}),
    }
    onnx.helper.set_model_props(
        proto, {name: json.dumps(value) for name, value in properties.items()}
    )
    data = proto.SerializeToString()
    write_bytes(out, data)
    shape = f"[N, {source.saved.in_chans}, {source.size}, {source.size}]"
    line = f"ONNX, opset {OPSET}, {len(data) / 1e6:.2f} MB. Images {shape} -> {source.output} [N, {source.width}]"
    return f"{out}: {line}\nchecked with onnxruntime against torch: {check}"


def write_folder(source, out: Path, hub: bool) -> str:
    """Write ``config.json``, ``model.safetensors`` and ``README.md`` for
    ``timm.create_model('local-dir:PATH', pretrained=True)``. With ``hub`` the README has the Hub's
    front matter. Return the check.

    Raises:
        RunError: The outputs differ from torch's, timm cannot build the model, or it cannot be
            written. Nothing is left.
    """
    import timm
    import torch

    from idmm.inference.export_card import card
    from idmm.inference.export_model import check, converting, quiet

    config = {name: source.preprocessing[name] for name in OUR_KEYS if name in source.preprocessing}
    config["label_names"] = source.classes
    kwargs = {name: value for name, value in source.saved.kwargs.items() if name != "num_classes"}
    cfg = source.model.pretrained_cfg
    source.model.pretrained_cfg = {
        name: value for name, value in cfg.items() if name not in OUR_KEYS
    }
    with filling(out) as folder, converting(source, f"rebuilt by timm {timm.__version__}"):
        timm.models.save_for_hf(source.model, folder, config, kwargs, safe_serialization=True)
        (folder / "README.md").write_text(card(source, hub), encoding="utf-8", errors="replace")
        with quiet():
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        with torch.inference_mode():
            return check(source, lambda images: loaded(images).numpy())
