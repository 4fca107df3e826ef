"""The model to export, as an ONNX file, and its comparison with torch."""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idmm.errors import RunError, in_short
from idmm.evaluation.network import Network
from idmm.files import idmm_version
from idmm.inference.runs import config_of, exported_weights
from idmm.models.build import feature_width

BATCH = 32  # images that a network processes at a time
CHECKED = 16  # images of noise that an exported network is compared with torch on
OPSET = 18  # the lowest that torch's exporter writes without a conversion. Most programs support it
TOLERANCE = 1e-3  # largest difference from torch, as a share of the largest output


class Source:
    """A run's model, with its classifier if it has one.

    Args:
        run: The run's folder.

    Raises:
        UserError: The run is not finished, or the model cannot be built.
    """

    def __init__(self, run: Path):
        self.run, self.config = run, config_of(run)
        self.saved = exported_weights(run, "init")
        self.classes: list[str] | None = self.saved.extra.get("classes")
        self.network = Network.from_checkpoint(self.saved, len(self.classes or ()), "cpu", BATCH)
        self.model, self.size = self.network.model, self.network.size

    @property
    def output(self) -> str:
        """Name of the model's output: logits [N, K], or features [N, d]."""
        return "logits" if self.classes else "features"

    @property
    def width(self) -> int:
        """Length of the output per image."""
        return len(self.classes) if self.classes else feature_width(self.model)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How an image file becomes the model's input, for programs that do not know idmm."""
        saved, bands = self.saved, self.network.bands
        values: dict[str, Any] = {
            "channels": "RGB" if saved.in_chans == 3 else "L",
            "resize": math.floor(self.size / saved.crop_pct),
            "size": [self.size, self.size],
            "crop": "center",
            "crop_pct": saved.crop_pct,
            "interpolation": saved.interpolation,
            "mean": list(saved.mean),
            "std": list(saved.std),
            "layout": "NCHW",
        }
        if bands is None:
            optional = {"grey_range": saved.extra.get("range")}
        else:
            values["channels"] = saved.in_chans
            optional = {"range": saved.extra.get("range"), "bands": list(bands.chosen) if bands.chosen else None}
            optional["file_channels"] = saved.extra.get("file_channels")
        return values | {name: value for name, value in optional.items() if value is not None}


def check(source: Source, run: Callable[[torch.Tensor], np.ndarray]) -> str:
    """Compare an exported network with torch on noise, first on a single image, and return the largest difference.

    Args:
        source: The exported model.
        run: The exported network, [n, C, S, S] -> [n, width].

    Raises:
        RunError: The outputs differ by more than :data:`TOLERANCE`.
    """
    shape = (CHECKED, source.saved.in_chans, source.size, source.size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = source.model(images).numpy()  # [n, width]
    outputs = np.concatenate([run(images[:1]), run(images[1:])])
    difference = float(np.abs(outputs - expected).max()) if outputs.shape == expected.shape else float("inf")
    largest = float(np.abs(expected).max())
    line = f"largest difference {difference:.2g}, largest output {largest:.3g}"
    if not difference <= TOLERANCE * largest:
        raise RunError(f"the exported model's outputs differ from torch's ({line}). Nothing is written")
    return line


def onnx_model(source: Source):
    """Convert the model to ONNX: input ``images`` [N, C, S, S] with any N, output ``logits`` or ``features``
    [N, width].

    Returns:
        An onnx.ModelProto, and the line of :func:`check`.

    Raises:
        RunError: It cannot be converted, or its outputs differ from torch's.
    """
    import onnxruntime

    example = torch.zeros(2, source.saved.in_chans, source.size, source.size)  # with one image torch would fix N
    names = {"input_names": ["images"], "output_names": [source.output]}
    shapes = {"dynamic_shapes": ({0: torch.export.Dim("batch")},), "dynamo": True}
    try:
        with quiet():
            proto = torch.onnx.export(
                source.model, (example,), **names, **shapes, opset_version=OPSET, verbose=False
            ).model_proto
        _tidy(source, proto)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # only errors
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return proto, check(source, lambda images: session.run(None, {"images": images.numpy()})[0])
    except RunError:
        raise
    except Exception as error:  # the exporter and onnxruntime raise dozens of types
        reason = f"cannot be written as ONNX by torch {torch.__version__}: {in_short(error)}"
        raise RunError(f"format: {source.saved.name} {reason}") from None


def _tidy(source: Source, proto) -> None:
    """Remove the details of this machine: a stack trace for each node."""
    for part in (*proto.graph.node, *proto.graph.initializer, *proto.graph.input, *proto.graph.output, proto.graph):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    del proto.graph.value_info[:]
    del proto.metadata_props[:]
    proto.graph.name = source.saved.name
    proto.producer_name, proto.producer_version = "idmm", idmm_version()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and notes of exporters inside the block. The check finds the same problems."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        sink = io.StringIO()
        ignored = warnings.catch_warnings(action="ignore")
        with ignored, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    finally:
        logging.disable(before)
