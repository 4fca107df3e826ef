"""A model as an ONNX file, checked against torch."""

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

OPSET = 18  # of ONNX: the lowest that torch's exporter writes without converting, which most programs know
TOLERANCE = 1e-3  # largest difference from torch, as a share of the largest output
AGREEMENT = 0.99  # least share of images with torch's top class


@dataclass(frozen=True)
class Check:
    """How near an exported network comes to torch."""

    what: str  # the images, for people
    difference: float  # the largest, of all outputs
    reach: float  # the largest output
    agreement: float | None  # share of images with the same top class; None where there are no classes

    def __str__(self) -> str:
        same = "" if self.agreement is None else f", the same top class on {100 * self.agreement:.1f} %"
        return f"largest difference {self.difference:.2g} on {self.what}, where outputs reach {self.reach:.3g}{same}"


def check(source: Source, sample: Sample, run: Callable[[torch.Tensor], np.ndarray]) -> Check:
    """Compares a network with torch: on one image alone, then on the others.

    Args:
        source: What was exported.
        sample: The images.
        run: The exported network, [n, C, S, S] -> [n, width], n at most :data:`BATCH`.

    Raises:
        RunError: They differ by more than :data:`TOLERANCE`, or name other classes.
    """
    wanted = source.outputs(sample.images)  # [n, width]
    parts = [sample.images[:1], *sample.images[1:].split(BATCH)]
    found = np.concatenate([run(part) for part in parts if len(part)])
    if not np.isfinite(wanted).all():
        raise RunError(f"{source.saved.source}: its outputs are not finite; the run that wrote it has diverged")
    apart = float(np.abs(found - wanted).max()) if found.shape == wanted.shape else float("inf")
    same = float((found.argmax(1) == wanted.argmax(1)).mean()) if source.classes else None
    made = Check(sample.what, apart, float(np.abs(wanted).max()), same)
    if not apart <= TOLERANCE * made.reach or (same is not None and same < AGREEMENT):
        raise RunError(f"what was exported is not what torch computes ({made}); nothing is written")
    return made


def onnx_model(source: Source, sample: Sample):
    """Writes the model as ONNX: input ``images`` [N, C, S, S], N free, output ``logits`` or ``features`` [N, width].

    Returns:
        An onnx.ModelProto, and the check.

    Raises:
        RunError: It cannot be written, or what is written is not what torch computes.
    """
    example = torch.zeros(2, source.saved.in_chans, source.size, source.size)  # of one image, torch would fix the batch
    free = torch.export.Dim("batch")
    names = {"input_names": ["images"], "output_names": [source.output], "dynamic_shapes": ({0: free},), "dynamo": True}
    try:
        with quiet():
            exported = torch.onnx.export(source.model, (example,), **names, opset_version=OPSET, verbose=False)
        proto = exported.model_proto
        _tidy(source, proto)
        return proto, check(source, sample, runner(proto))
    except RunError:
        raise
    except Exception as error:  # the exporter and onnxruntime raise dozens of types
        why = f"cannot be written as ONNX by torch {torch.__version__}: {in_short(error)}"
        raise RunError(f"format: {source.saved.name} {why}") from None


def runner(proto) -> Callable[[torch.Tensor], np.ndarray]:
    """Opens a model in onnxruntime, [n, C, S, S] -> [n, width], on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    data = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images.numpy()})[0]


def _tidy(source: Source, proto) -> None:
    """Takes out what tells of this machine: a stack trace for each node."""
    for part in (*proto.graph.node, *proto.graph.initializer, *proto.graph.input, *proto.graph.output, proto.graph):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    del proto.graph.value_info[:]
    del proto.metadata_props[:]
    proto.graph.name = source.saved.name
    proto.producer_name, proto.producer_version = "idmm", version("idmm")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps warnings and notes of exporters to themselves: what they are about, the check finds."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        unseen = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(unseen), contextlib.redirect_stderr(unseen):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
