"""``idmm export``: a run's model for other programs, as an ONNX file or a folder for timm."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idmm.config.commands import ExportConfig
from idmm.errors import checked, needed
from idmm.files import expand_home, filling, output_path, weights_file, write_bytes

if TYPE_CHECKING:
    from idmm.inference.export_model import Source

NEEDED = ("onnx", "onnxruntime", "onnxscript")  # of the extra 'export'
# of config.json, for those who read other images
OUR_KEYS = ("grey_range", "range", "bands", "file_channels")


def export(config: ExportConfig) -> str:
    """Write the model of a run to ``config.out``, compared with torch, and return a summary.

    Raises:
        UserError: No finished run, a library is missing, or ``out`` cannot be written. Nothing is
            written.
        RunError: The model cannot be written in that form, or its outputs differ from torch's.
    """
    run = expand_home(config.init)
    is_onnx = config.format == "onnx"
    endings = (".onnx",) if is_onnx else None
    libraries = NEEDED if is_onnx else ()
    checked(
        lambda: output_path(config.out, endings),
        lambda: weights_file(config.init, "init"),
        lambda: needed("format: onnx", libraries, "export"),
    )
    out = Path(config.out)
    # torch takes seconds, a mistake is reported at once
    from idmm.inference.export_model import Source

    source = Source(run)
    if is_onnx:
        return _write_onnx(out, source)
    check = write_folder(source, out, hub=config.format == "hf")
    registers = f"import {source.module} and " if source.module else ""
    return (
        f"{out}: config.json, model.safetensors, README.md. "
        f"Load it with {registers}timm.create_model('local-dir:{out}', pretrained=True)\n"
        f"checked against torch: {check}"
    )


def _write_onnx(out: Path, source: "Source") -> str:
    import onnx

    from idmm.inference.export_model import OPSET, onnx_model

    model = onnx_model(source)
    properties = {"preprocessing": json.dumps(source.preprocessing)}
    if source.classes:
        properties["classes"] = json.dumps(source.classes)
    onnx.helper.set_model_props(model.proto, properties)
    data = model.proto.SerializeToString()
    write_bytes(out, data)
    shape = f"[N, {source.saved.in_chans}, {source.size}, {source.size}]"
    return (
        f"{out}: ONNX, opset {OPSET}, {len(data) / 1e6:.2f} MB. "
        f"Images {shape} -> {source.output} [N, {source.width}]\n"
        f"checked with onnxruntime against torch: {model.check}"
    )


def write_folder(source: "Source", out: Path, hub: bool) -> str:
    """Write the folder that ``timm.create_model('local-dir:PATH', pretrained=True)`` loads.

    It has ``config.json``, ``model.safetensors`` and ``README.md``. With ``hub`` the README has the
    Hub's front matter.

    Returns:
        The result of the check.

    Raises:
        RunError: The outputs differ from torch's, timm cannot build the model, or it cannot be
            written. Nothing is left.
    """
    import timm
    import torch

    from idmm.inference.export_model import card, check, converting, quiet

    ours = {key: value for key, value in source.preprocessing.items() if key in OUR_KEYS}
    config: dict[str, Any] = {**ours, "label_names": source.classes}
    kwargs = {name: value for name, value in source.saved.kwargs.items() if name != "num_classes"}
    cfg = source.model.pretrained_cfg
    source.model.pretrained_cfg = {key: value for key, value in cfg.items() if key not in OUR_KEYS}
    with filling(out) as folder, converting(source, f"rebuilt by timm {timm.__version__}"):
        timm.models.save_for_hf(source.model, str(folder), config, kwargs, safe_serialization=True)
        (folder / "README.md").write_text(card(source, hub), encoding="utf-8", errors="replace")
        with quiet():
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        with torch.inference_mode():
            return check(source, lambda images: loaded(images).numpy())
