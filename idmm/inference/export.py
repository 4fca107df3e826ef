"""``idmm export``: a run's model for other programs."""

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from idmm.config.usage import ExportConfig
from idmm.errors import UserError, checked, needed
from idmm.files import free_folder, home, out_file, weights_file, write_bytes
from idmm.progress import log

NEEDED = ("onnx", "onnxruntime", "onnxscript")  # of the extra 'export'


def export(given: ExportConfig) -> str:
    """Writes the model of a finished run to ``given.out``, after comparing what is written with torch; returns what to
    print of both.

    Raises:
        UserError: No finished run, a library is missing, or ``out`` cannot be written; nothing is written.
        RunError: The model cannot be written in that form, or what is written is not what torch computes.
    """
    run, one_file = home(given.init), given.format == "onnx"
    out, *_ = checked(
        lambda: out_file(given.out, (".onnx",)) if one_file else free_folder(given.out),
        lambda: _check_run(run),
        lambda: one_file and needed("format: onnx", NEEDED, "export"),
    )
    from idmm.inference.export_source import Source  # torch takes seconds, a mistake is told at once

    source = Source(run)
    sample, why = source.sample(given.data.root)
    if why:
        line = "checked on noise, as the run's images cannot be read (%s); --data.root DIR names their folder"
        log.warning(line, why)
    return _onnx(out, source, sample) if one_file else _folder(given.format, out, source, sample)


def _check_run(run: Path) -> None:
    weights_file(run, "init")
    if not (run / "result.json").is_file():
        raise UserError(f"init: '{run}' is no finished run: it has no result.json; let it finish, or name another")


def _onnx(out: Path, source, sample) -> str:
    import onnx

    from idmm.inference.export_graph import OPSET, onnx_model

    proto, check = onnx_model(source, sample)
    about = {"idmm": version("idmm"), "run": source.run.resolve().name, "model": source.saved.name}
    about |= {"parameters": source.parameters, "output": source.output, "opset": OPSET, "checked": asdict(check)}
    told = {"preprocessing": source.preprocessing, "about": about}
    told |= {"classes": source.classes} if source.classes else {}
    onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in told.items()})
    data = proto.SerializeToString()
    write_bytes(out, data)
    shape = f"[N, {source.saved.in_chans}, {source.size}, {source.size}]"
    what = f"ONNX, opset {OPSET}, {len(data) / 1e6:.2f} MB; images {shape} -> {source.output} [N, {source.width}]"
    return f"{out}: {what}\nchecked with onnxruntime against torch: {check}"


def _folder(kind: str, out: Path, source, sample) -> str:
    from idmm.inference.export_folder import write_folder

    check = write_folder(source, sample, out, hub=kind == "hf")
    what = f"timm.create_model('local-dir:{out}', pretrained=True) loads it"
    return f"{out}: config.json, model.safetensors, README.md; {what}\nchecked against torch: {check}"
