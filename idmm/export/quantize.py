"""ONNX with weights in 8 bits, and what that costs and gains, measured."""

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from idmm.errors import RunError, UserError, in_short
from idmm.evaluate import score
from idmm.export.graph import quiet, runner
from idmm.export.source import Source

log = logging.getLogger("idmm")
CALIBRATION = 256  # training images that show the range of each layer's values
ROUNDS = 25  # of timing, both networks in each; the fastest counts: other programs only slow them
MATRICES = ["MatMul", "Gemm"]


@dataclass(frozen=True)
class Comparison:
    """8 bits beside 32, on the same images."""

    method: str
    images: int
    float32: dict  # top1 and its 95 % interval top1_interval (percent), and the bytes of the file
    int8: dict
    agreement: float  # percent of images with the same top class
    speed: float  # of int8, in images a second, as a multiple of float32's, on one core of this machine

    def __str__(self) -> str:
        lines = [f"int8 ({self.method}) on {self.images} test images", "         top-1    95 % interval     size"]
        for name, one in (("float32", self.float32), ("int8", self.int8)):
            low, high = one["top1_interval"]
            interval = f"{low:.2f} to {high:.2f}"
            lines.append(f"{name:<9}{one['top1']:<9.2f}{interval:<18}{one['bytes'] / 1e6:.2f} MB")
        same = f"the same top class on {self.agreement:.1f} % of the images"
        return "\n".join([*lines, f"{same}; {self.speed:.2f} times the speed of float32 on one core of this machine"])


def quantized(source: Source, proto, method: str | None = None):
    """Returns a model in 8 bits, an onnx.ModelProto, and how it compares; by ``dynamic``, ``static``, or None as suits.

    Networks with attention get 8-bit matrix products whose inputs are scaled as they come (dynamic): their features
    have outliers that one fixed range would spoil. Others get 8-bit convolutions too, with ranges from training images
    (static). Measured, see docs/export.md.

    Raises:
        UserError: Images of the run cannot be read.
        RunError: onnxruntime cannot quantize it.
    """
    with _images_wanted():
        test = source.batches("test")
        attention = any(node.op_type == "Softmax" for node in proto.graph.node)
        method = method or ("dynamic" if attention else "static")
        train = list(source.batches("train", CALIBRATION)) if method == "static" else None
    try:
        with quiet(), tempfile.TemporaryDirectory() as folder:
            made = _quantized(proto, train, Path(folder))
    except Exception as error:  # onnxruntime raises many kinds
        raise RunError(f"int8: onnxruntime cannot quantize {source.saved.name}: {in_short(error)}") from None
    method += f", calibrated on {sum(len(batch['images']) for batch in train)} training images" if train else ""
    return made, _compared(source, method, proto, made, test)


def check_measurable(source: Source) -> None:
    """Raises UserError where the accuracy in 8 bits could not be measured: without classifier or test images."""
    if not source.classes:
        raise UserError("int8: its accuracy is measured, and the run has no classifier; wanted a fine-tuned run")
    with _images_wanted():
        if source.splits.test is None:
            raise UserError("there are no test images")


@contextlib.contextmanager
def _images_wanted() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        why = "int8: its accuracy is measured on the run's images, which are not there"
        raise UserError(f"{why} ({error.faults[0]}); name their folder: --data.root DIR") from None


def _quantized(proto, train: list[dict] | None, folder: Path):
    import onnx
    from onnxruntime import quantization as q
    from onnxruntime.quantization.shape_inference import quant_pre_process

    whole, simple, small = (str(folder / f"{name}.onnx") for name in ("whole", "simple", "small"))
    onnx.save(proto, whole)
    quant_pre_process(whole, simple, skip_symbolic_shape=True)
    if train is None:
        plain = onnx.load(simple)
        del plain.graph.value_info[:]  # of products that quantization turns around
        onnx.save(plain, simple)
        given = {"op_types_to_quantize": MATRICES, "weight_type": q.QuantType.QInt8, "per_channel": True}
        q.quantize_dynamic(simple, small, **given)
    else:
        types = {"activation_type": q.QuantType.QUInt8, "weight_type": q.QuantType.QInt8, "per_channel": True}
        q.quantize_static(simple, small, _Reader(train), quant_format=q.QuantFormat.QDQ, **types)
    return onnx.load(small)


class _Reader:
    """What onnxruntime calls a CalibrationDataReader."""

    def __init__(self, batches: list[dict]):
        self._batches = iter(batches)

    def get_next(self) -> dict | None:
        batch = next(self._batches, None)
        return batch and {"images": batch["images"].numpy()}


def _compared(source: Source, method: str, proto, small, test: Iterable[dict]) -> Comparison:
    both, truth, named = [runner(one) for one in (proto, small)], [], ([], [])
    first = None  # a batch, to time them on
    for batch in test:
        first = batch["images"] if first is None else first
        truth.append(batch["label"].numpy())
        for labels, run in zip(named, both, strict=True):
            labels.append(run(batch["images"]).argmax(1))
    truth, named = np.concatenate(truth), [np.concatenate(labels) for labels in named]
    seconds, single = ([], []), [runner(one, threads=1) for one in (proto, small)]
    for _ in range(ROUNDS):  # side by side, on one core
        for times, run in zip(seconds, single, strict=True):
            began = time.perf_counter()
            run(first)
            times.append(time.perf_counter() - began)
    pairs = zip(named, (proto, small), strict=True)
    figures = [{**score(predicted, truth), "bytes": one.ByteSize()} for predicted, one in pairs]
    slow, fast = map(min, seconds)
    same = 100 * float((named[0] == named[1]).mean())
    found = Comparison(method, len(truth), *figures, same, float(slow / fast))
    if found.int8["top1"] < found.float32["top1_interval"][0]:
        log.warning("int8: its accuracy is below the 95 % interval of float32's; better take float32")
    return found
