"""The model to export: as an ONNX file, its comparison with torch, and its card."""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from idmm.config import FinetuneConfig
from idmm.data.split import spread
from idmm.errors import RunError, UserError, in_short
from idmm.evaluation import Floats
from idmm.evaluation.network import Network
from idmm.files import REWRITE, WEIGHTS, expand_home, idmm_version, is_public, read_json, reading
from idmm.inference.runs import config_of, dataset_name, exported_weights
from idmm.models.build import feature_width
from idmm.progress import log
from idmm.report.page import environment
from idmm.runs.images import list_run_images

if TYPE_CHECKING:
    import onnx

BATCH = 32  # images that a network processes at a time
CHECKED = 16  # images that an exported network is compared with torch on
OPSET = 18  # the lowest that torch's exporter writes without a conversion. Most programs support it
# median of the images' largest differences from torch, as a share of the largest output
TOLERANCE = 1e-3


class Source:
    """A run's model, with its classifier if it has one.

    Args:
        run: The run's folder.

    Attributes:
        classes: Names of its K classes. None: it has no classifier.
        module: That registers the architecture with timm, e.g. ``idmm.models.hog``. None: timm's
            own.

    Raises:
        UserError: The run is not finished, or the model cannot be built.
    """

    def __init__(self, run: Path):
        self.run = run
        self.config = config_of(run)
        self.saved = exported_weights(run, "init")
        self.classes: list[str] | None = self.saved.extra.get("classes")
        self.network = Network.from_checkpoint(self.saved, len(self.classes or ()), "cpu", BATCH)
        self.model = self.network.model
        self.size = self.network.size
        assert self.saved.name is not None  # a run's weights name their model
        self.name = self.saved.name
        module: str = timm.models.model_entrypoint(self.name).__module__
        self.module = None if module.startswith("timm.") else module

    @property
    def output(self) -> str:
        """Name of the model's output: logits [N, K], or features [N, d]."""
        return "logits" if self.classes else "features"

    @property
    def width(self) -> int:
        """Length of the output per image."""
        if self.classes:
            return len(self.classes)
        return feature_width(self.model)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How an image file becomes the model's input, for programs that do not know idmm."""
        saved = self.saved
        bands = self.network.bands
        channels: str | int = saved.in_chans
        if bands is None:
            channels = "RGB" if saved.in_chans == 3 else "L"
            optional = {"grey_range": saved.extra.get("range")}
        else:
            optional = {
                "range": saved.extra.get("range"),
                "bands": list(bands.chosen or ()) or None,
                "file_channels": saved.extra.get("file_channels"),
            }
        required = {
            "channels": channels,
            "resize": math.floor(self.size / saved.crop_pct),
            "size": [self.size, self.size],
            "crop": saved.crop_mode,
            "crop_pct": saved.crop_pct,
            "interpolation": saved.interpolation,
            "mean": list(saved.mean),
            "std": list(saved.std),
            "layout": "NCHW",
        }
        return required | {name: value for name, value in optional.items() if value is not None}


def check(source: Source, run: Callable[[Tensor], Floats]) -> str:
    """Compare an exported network with torch, first on a single image, and return a line.

    Hand-made features have steps, at which a difference in the last digit may change a value much.
    So each image must keep its class, and only the median of the images' differences is bounded.

    Args:
        source: The exported model.
        run: The exported network, [n, C, S, S] -> [n, width].

    Raises:
        RunError: The outputs differ. The line names the image that differs most.
    """
    images, names, images_text = checked_images(source)
    with torch.inference_mode():
        expected = source.model(images).numpy()  # [n, width]
    outputs = np.concatenate([run(images[:1]), run(images[1:])])
    differences = np.abs(outputs - expected).max(1)  # [n]
    largest = float(np.abs(expected).max())
    result = f"largest difference {differences.max():.2g}, largest output {largest:.3g}"
    losses = differences
    agrees = np.median(differences) <= TOLERANCE * largest
    if source.classes:
        chosen = expected[np.arange(len(names)), outputs.argmax(1)]
        losses = expected.max(1) - chosen  # [n], by which torch prefers its own class
        agrees &= losses.max() <= TOLERANCE * largest
        images_text = f"{images_text}, the same classes"
    if not agrees:
        raise RunError(
            "the exported model's outputs differ from torch's, "
            f"most for {names[int(losses.argmax())]} ({result}). Nothing is written"
        )
    return f"{images_text}, {result}"


class CheckedImages(NamedTuple):
    """The images that an exported network is compared with torch on."""

    images: Tensor  # [n, C, S, S]
    names: list[str]
    text: str  # on all of them


def checked_images(source: Source) -> CheckedImages:
    """Return some training images of the run, prepared.

    Random images without sharp edges replace those that are gone.
    """
    try:
        train = list_run_images(source.config).train
        train = train.take(spread(len(train), CHECKED))
        batches = list(source.network.file_batches(list(train.items), train.names, {}))
        images = torch.cat([batch["images"] for batch in batches])
        readable = torch.cat([batch["index"] for batch in batches])
        names = [train.names[i] for i in readable]
        return CheckedImages(images, names, f"{len(images)} training images")
    except (UserError, OSError, RuntimeError) as error:  # RuntimeError: none of them can be read
        log.info(f"the training images cannot be read: {in_short(error)}")
    draw = torch.Generator().manual_seed(0)
    coarse = torch.randn(CHECKED, source.saved.in_chans, 8, 8, generator=draw)
    return CheckedImages(
        F.interpolate(coarse, (source.size, source.size), mode="bicubic"),
        [f"image {number}" for number in range(CHECKED)],
        f"{CHECKED} random images, as the training images cannot be read",
    )


class OnnxModel(NamedTuple):
    """A model for ONNX, and the result of :func:`check`."""

    proto: "onnx.ModelProto"
    check: str


def onnx_model(source: Source) -> OnnxModel:
    """Convert the model to ONNX.

    Its input is ``images`` [N, C, S, S] with any N, its output ``logits`` or ``features`` [N,
    width].

    Raises:
        RunError: It cannot be converted, or its outputs differ from torch's.
    """
    import onnxruntime

    # with one image torch would fix N
    example = torch.zeros(2, source.saved.in_chans, source.size, source.size)
    with converting(source, f"written as ONNX by torch {torch.__version__}"):
        with quiet():
            program = torch.onnx.export(
                source.model,
                (example,),
                input_names=["images"],
                output_names=[source.output],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
            )
        assert program is not None  # as only the old exporter returns
        proto = program.model_proto
        _tidy(source, proto)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # only errors
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

        def run(images: Tensor) -> Floats:
            outputs: list[Floats] = session.run(None, {"images": images.numpy()})
            return outputs[0]

        return OnnxModel(proto, check(source, run))


@contextlib.contextmanager
def converting(source: Source, done: str) -> Iterator[None]:
    """Raise RunError that names the model if a library fails inside the block.

    ``done`` is what the block does to the model.
    """
    try:
        yield
    except (UserError, RunError, OSError):
        raise
    except Exception as error:  # exporters, timm and onnxruntime raise dozens of types
        raise RunError(f"format: {source.saved.name} cannot be {done}: {in_short(error)}") from None


def _tidy(source: Source, proto: "onnx.ModelProto") -> None:
    """Remove the details of this machine: a stack trace for each node."""
    for part in (
        *proto.graph.node,
        *proto.graph.initializer,
        *proto.graph.input,
        *proto.graph.output,
        proto.graph,
    ):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    del proto.graph.value_info[:]
    del proto.metadata_props[:]
    proto.graph.name = source.name
    proto.producer_name = "idmm"
    proto.producer_version = idmm_version()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters inside the block. The check finds the problems that they warn of."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        sink = io.StringIO()
        ignored = warnings.catch_warnings(action="ignore")
        with ignored, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    finally:
        logging.disable(before)


# ---------------------------------------------------------------------- the model card
def card(source: Source, hub: bool) -> str:
    """Return ``README.md``, one short page from the run's own files. It has only measured figures.

    With ``hub`` it begins with the Hugging Face Hub's front matter.
    """
    file = source.run / "result.json"
    has_bands = source.network.bands is not None
    bands = f" of {source.saved.in_chans} channels" if has_bands else ""
    kind = f"backbone{bands}"
    if source.classes:
        kind = f"classifier of images{bands} into {len(source.classes)} classes"
    with reading(file, REWRITE):
        facts = _facts(source, read_json(file, REWRITE))
    package = source.module and source.module.partition(".")[0]
    front = _front_matter(source, package or "timm") if hub else ""
    templates = environment(str)
    templates.filters["code"] = _code
    return templates.get_template("card.md.j2").render(
        source=source,
        kind=kind,
        package=package,
        front=front,
        facts=facts,
        # timm cannot prepare bands and images of more than 8 bits
        by_timm=not has_bands and "grey_range" not in source.preprocessing,
        version=idmm_version(),
    )


def _front_matter(source: Source, library: str) -> str:
    task = "image-classification" if source.classes else "image-feature-extraction"
    keys = {"library_name": library, "pipeline_tag": task, "tags": sorted({task, library, "idmm"})}
    return yaml.safe_dump(keys, sort_keys=False)


def _facts(source: Source, result: dict[str, Any]) -> dict[str, str]:
    """Return the accuracy next to its baselines, the dataset and the start, by their names.

    The rest is in ``config.yaml``.
    """
    config = source.config
    facts = {}
    if source.classes and "top1" in result:
        low, high = result["top1_interval"]
        facts["top-1"] = (
            f"**{result['top1']:.2f} %** (95 % interval {low:.2f} to {high:.2f}) "
            f"of {result['test_size']:,} test images"
        )
        if "baseline_top1" in result:
            baseline = f"{result['baseline_top1']:.2f} %"
            facts["logistic regression on hand-made features"] = baseline
        facts["the largest class"] = f"{result['largest_class']:.2f} %"
    name = _code(dataset_name(config.data))
    facts["dataset"] = f"{name}, {result['train_size']:,} training images"
    if not isinstance(config, FinetuneConfig):
        facts["method"] = config.method.name
    if config.init:
        facts["started from"] = _code(_start_name(config.init))
    return facts


def _start_name(init: str) -> str:
    """Return the name of public weights, or of the folder of others."""
    if is_public(init):
        return init
    path = expand_home(init)
    is_file = path.suffix.lower() in WEIGHTS and not path.is_dir()
    return path.parent.name if is_file else path.name


def _code(text: object) -> str:
    """Return any text as Markdown code."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39)) or ' '}`"
