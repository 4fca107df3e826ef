"""A model as an ONNX file, compared with torch."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch

from idmm.errors import RunError, in_short
from idmm.inference.export_source import BATCH, Sample, Source

OPSET = 18  # the lowest that torch's exporter writes without a conversion. Most programs support it
TOLERANCE = 1e-3  # largest difference from torch, as a share of the largest output
AGREEMENT = 0.99  # least share of images with torch's top class


@dataclass(frozen=True)
class Check:
    """The difference of an exported network's outputs from torch's."""

    what: str  # description of the images
    difference: float  # the largest of all outputs
    reach: float  # the largest output
    agreement: float | None  # share of images with the same top class. None: there are no classes

    def __str__(self) -> str:
        line = f"largest difference {self.difference:.2g} on {self.what}, largest output {self.reach:.3g}"
        return line if self.agreement is None else f"{line}, the same top class on {100 * self.agreement:.1f} %"


def check(source: Source, sample: Sample, run: Callable[[torch.Tensor], np.ndarray]) -> Check:
    """Compare a network with torch: on a single image, then on the others.

    Args:
        source: The exported model.
        sample: The images.
        run: The exported network, [n, C, S, S] -> [n, width], with n at most :data:`BATCH`.

    Raises:
        RunError: The outputs differ by more than :data:`TOLERANCE`, or predict other classes.
    """
    expected = source.outputs(sample.images)  # [n, width]
    batches = [sample.images[:1], *sample.images[1:].split(BATCH)]
    outputs = np.concatenate([run(batch) for batch in batches if len(batch)])
    if not np.isfinite(expected).all():
        raise RunError(f"{source.saved.source}: its outputs are not finite. The run that wrote it has diverged")
    same_shape = outputs.shape == expected.shape
    difference = float(np.abs(outputs - expected).max()) if same_shape else float("inf")
    agreement = float((outputs.argmax(1) == expected.argmax(1)).mean()) if source.classes else None
    result = Check(sample.what, difference, float(np.abs(expected).max()), agreement)
    if not difference <= TOLERANCE * result.reach or (agreement is not None and agreement < AGREEMENT):
        raise RunError(f"the exported model's outputs differ from torch's ({result}). Nothing is written")
    return result


def onnx_model(source: Source, sample: Sample):
    """Convert the model to ONNX: input ``images`` [N, C, S, S] with any N, output ``logits`` or ``features``
    [N, width].

    Returns:
        An onnx.ModelProto, and the check.

    Raises:
        RunError: It cannot be converted, or its outputs differ from torch's.
    """
    example = torch.zeros(2, source.saved.in_chans, source.size, source.size)  # with one image torch would fix N
    names = {"input_names": ["images"], "output_names": [source.output]}
    shapes = {"dynamic_shapes": ({0: torch.export.Dim("batch")},), "dynamo": True}
    try:
        with quiet():
            exported = torch.onnx.export(
                source.model, (example,), **names, **shapes, opset_version=OPSET, verbose=False
            )
        proto = exported.model_proto
        _tidy(source, proto)
        return proto, check(source, sample, runner(proto))
    except RunError:
        raise
    except Exception as error:  # the exporter and onnxruntime raise dozens of types
        reason = f"cannot be written as ONNX by torch {torch.__version__}: {in_short(error)}"
        raise RunError(f"format: {source.saved.name} {reason}") from None


def runner(proto) -> Callable[[torch.Tensor], np.ndarray]:
    """Open a model in onnxruntime on the CPU, [n, C, S, S] -> [n, width]."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # only errors
    data = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images.numpy()})[0]


def _tidy(source: Source, proto) -> None:
    """Remove the details of this machine: a stack trace for each node."""
    for part in (*proto.graph.node, *proto.graph.initializer, *proto.graph.input, *proto.graph.output, proto.graph):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    del proto.graph.value_info[:]
    del proto.metadata_props[:]
    proto.graph.name = source.saved.name
    proto.producer_name, proto.producer_version = "idmm", version("idmm")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and notes of exporters inside the block. The check finds the same problems."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        sink = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
