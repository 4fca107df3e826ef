"""``idmm export``: a run's model for other programs."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

from idmm.config.usage import ExportConfig
from idmm.errors import UserError, checked, install
from idmm.files import WEIGHTS_WANTED, free_folder, home, out_file, weights_file, write_bytes
from idmm.progress import log

NEEDED = ("onnx", "onnxruntime", "onnxscript")  # of the extra 'export'
ENDINGS = {"onnx": (".onnx",), "torchscript": (".pt", ".ts")}


def export(given: ExportConfig) -> str:
    """Writes the model of a finished run to ``given.out``, after comparing what is written with torch; returns what to
    print of both.

    Raises:
        UserError: No finished run, a library is missing, ``out`` cannot be written, or the images that ``int8`` needs
            are not there; nothing is written.
        RunError: The model cannot be written in that form, or what is written is not what torch computes.
    """
    run, endings = home(given.init), ENDINGS.get(given.format)
    out, *_ = checked(
        lambda: out_file(given.out, endings) if endings else free_folder(given.out),
        lambda: _check_run(run),
        lambda: _check_extra(given),
    )
    from idmm.export.source import Source  # torch takes seconds, a mistake is told at once

    source = Source(run, given.data.root)
    if given.int8:
        from idmm.export.quantize import check_measurable

        check_measurable(source)
    sample, why = source.sample()
    if why:
        line = "checked on noise, as the run's images cannot be read (%s); --data.root DIR names their folder"
        log.warning(line, why)
    return {"onnx": _onnx, "torchscript": _torchscript}.get(given.format, _folder)(given, out, source, sample)


def _check_run(run: Path) -> None:
    if run.is_file():
        raise UserError(f"init: '{run}' is a file; wanted a run folder")
    try:
        weights_file(run, "init")
    except UserError as error:  # which would take a file, too
        raise UserError(*(fault.replace(WEIGHTS_WANTED, "wanted a run folder") for fault in error.faults)) from None
    if not (run / "result.json").is_file():
        raise UserError(f"init: '{run}' is no finished run: it has no result.json; let it finish, or name another")


def _check_extra(given: ExportConfig) -> None:
    if given.format != "onnx":
        if given.int8:
            raise UserError(f"int8: true, but --format is {given.format}; wanted onnx, or leave it out")
        return
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UserError(f"format: onnx needs {', '.join(missing)}; install with: {install('export')}")


def _onnx(given: ExportConfig, out: Path, source, sample) -> str:
    import onnx

    from idmm.export.graph import OPSET, onnx_model
    from idmm.export.quantize import quantized

    proto, check = onnx_model(source, sample)
    about = {**source.about, "opset": OPSET, "checked": asdict(check)}
    told = {"preprocessing": source.preprocessing, "about": about}
    told |= {"classes": source.classes} if source.classes else {}
    said = [f"checked with onnxruntime against torch: {check}"]
    if given.int8:
        proto, compared = quantized(source, proto)
        told["int8"] = asdict(compared)
        said.append(str(compared))
    onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in told.items()})
    data = proto.SerializeToString()
    write_bytes(out, data)
    shape = f"[N, {source.saved.in_chans}, {source.size}, {source.size}]"
    what = f"ONNX, opset {OPSET}, {len(data) / 1e6:.2f} MB; images {shape} -> {source.output} [N, {source.width}]"
    return "\n".join([f"{out}: {what}", *said])


def _torchscript(given: ExportConfig, out: Path, source, sample) -> str:
    from idmm.export.graph import torchscript

    data, check = torchscript(source, sample)
    write_bytes(out, data)
    shape = f"[N, {source.saved.in_chans}, {source.size}, {source.size}]"
    what = f"TorchScript, {len(data) / 1e6:.2f} MB; {shape} -> [N, {source.width}]"
    return f"{out}: {what}\nchecked against torch: {check}"


def _folder(given: ExportConfig, out: Path, source, sample) -> str:
    from idmm.export.folder import write_folder

    check = write_folder(source, sample, out, hub=given.format == "hf")
    what = f"timm.create_model('local-dir:{out}', pretrained=True) loads it"
    return f"{out}: config.json, model.safetensors, README.md; {what}\nchecked against torch: {check}"
