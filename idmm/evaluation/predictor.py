"""A finished run's network on any images: classes with probabilities, or features.

The images are prepared as in the run's own evaluation, the same pixels to the bit.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from idmm.config.commands import UseConfig
from idmm.data.folder import images_at
from idmm.data.images import Bands
from idmm.errors import Fault, UserError
from idmm.evaluation import Floats
from idmm.evaluation.network import Forward, Network, pooled
from idmm.files import AnyPath
from idmm.models.build import feature_width
from idmm.models.weights import read_checkpoint
from idmm.notebook import html_table
from idmm.progress import counting
from idmm.text import capped

BATCH = UseConfig.batch_size
PICTURES_EXPECTED = (
    "expected a path, a PIL image, or an array [H, W, 3] or [H, W] of uint8 or uint16"
)
BANDS_EXPECTED = "expected a path, or an array [H, W, C] of the files' numbers"

Pixels = NDArray[Any]
AnyImage = AnyPath | Image.Image | Pixels
"""An image: the path of its file, an open Pillow image, or its pixels. Pixels are [H, W, 3] or [H,
W] (grey), uint8, or uint16 as in 16-bit files. For a run on bands they are [H, W, C] with the
files' numbers, of any type."""
Images = AnyImage | Sequence[AnyImage]
"""A list of images, or a single one. The path of a folder means all images in it, at any depth."""


# ---------------------------------------------------------------------- results
@dataclass(frozen=True)
class Prediction:
    """A classifier's prediction for one image."""

    path: str | None  # its file. None if it was given as pixels
    label: str  # name of the likeliest class
    probability: float  # of that class, in [0, 1]
    top: list[tuple[str, float]]  # the top_k likeliest classes with theirs, best first

    def _repr_html_(self) -> str:
        return html_table([(self.path, *each) for each in self.top])


@dataclass(frozen=True)
class Embedding:
    """Features of images."""

    paths: list[str | None]  # their files. None for images given as pixels
    features: Floats  # float32 [N, d]
    unreadable: dict[str, str]  # skipped images, with the reason


class PredictionList(list[Prediction]):
    """A classifier's predictions for several images, a :class:`Prediction` each, in their order.

    Attributes:
        paths: Their files. None for images given as pixels.
        probabilities: Of every class, float32 [N, K], in the order of ``classes``.
        classes: Names of the K classes.
        unreadable: Skipped images, with the reason. They have no place in the list.
    """

    def __init__(self, outputs: Embedding, classes: list[str], top_k: int):
        self.paths = outputs.paths
        self.probabilities = outputs.features
        self.unreadable = outputs.unreadable
        self.classes = classes
        for path, row in zip(self.paths, self.probabilities, strict=True):
            likeliest = np.argsort(-row, kind="stable")[:top_k]
            top = [(classes[c], float(row[c])) for c in likeliest]
            self.append(Prediction(path, *top[0], top))

    def _repr_html_(self) -> str:
        return html_table([(one.path, one.label, one.probability) for one in self])

    @property
    def labels(self) -> list[str]:
        """Name of the likeliest class of each image."""
        return [prediction.label for prediction in self]


# ---------------------------------------------------------------------- predictors
class Classifier:
    """A run's classifier, made by :func:`load_classifier`.

    Attributes:
        classes: Names of the K classes.
    """

    def __init__(self, network: Network, classes: list[str]):
        self._network = network
        self.classes = classes

    def predict(
        self, images: Images, top_k: int = 1, *, on_error: str = "fail"
    ) -> Prediction | PredictionList:
        """Return the classes of images.

        Args:
            images: Paths of files or folders, PIL images, arrays (see :data:`AnyImage`), or one of
                them.
            top_k: Number of classes in ``top`` of a prediction, at most K.
            on_error: "fail", or "skip" to leave out the images that cannot be read and list them in
                ``unreadable``.

        Returns:
            A :class:`PredictionList`, or the :class:`Prediction` of a single image (not of a
            folder).

        Raises:
            UserError: An image cannot be read, or is none of these, with a line each.
            RunError: Memory ran out.
        """
        if top_k < 1:
            raise UserError.of("top_k", f"got {top_k}, expected 1 or more")
        outputs = _outputs(
            self._network, images, _probabilities, len(self.classes), on_error, "predicting"
        )
        predictions = PredictionList(outputs, self.classes, top_k)
        return predictions[0] if is_single(images) else predictions


def load_backbone_network(
    run_or_file: AnyPath,
    *,
    device: str = "auto",
    batch_size: int = BATCH,
    precision: str = "fp32",
    field: str = "",
) -> Network:
    """Build the backbone of a run, or of a checkpoint with its JSON.

    Arguments and errors are those of :func:`load_classifier`.
    """
    saved = read_checkpoint(run_or_file, field)
    return Network.from_checkpoint(saved, 0, device, batch_size).in_precision(precision)


def features_of(network: Network, images: Images, *, on_error: str = "fail") -> Embedding:
    """Return the pooled features of images.

    Arguments and errors are those of :meth:`Classifier.predict`.
    """
    width = feature_width(network.model)
    return _outputs(network, images, pooled, width, on_error, "taking features")


def _outputs(
    network: Network,
    images: Images,
    forward: Forward,
    width: int,
    on_error: str,
    label: str,
) -> Embedding:
    """Return the outputs of ``forward`` for images, ``width`` numbers each.

    ``label`` is that of the progress bar.
    """
    if on_error not in ("fail", "skip"):
        raise UserError.of("on_error", f"got '{on_error}', expected 'fail' or 'skip'")
    listed = listed_images(images, network.bands)
    unreadable: dict[str, str] = {}
    batches = network.file_batches(listed.sources, listed.names, unreadable)
    outputs = network.outputs(counting(batches, len(listed.sources), label), forward)
    rows = outputs.reshape(-1, width)  # also if no image can be read
    if unreadable and (is_single(images) or on_error == "fail"):
        reasons = [f"{name}: {reason}" for name, reason in unreadable.items()]
        raise UserError(*(Fault("images", reason) for reason in capped(reasons, begin="")))
    named = zip(listed.paths, listed.names, strict=True)
    readable = [path for path, name in named if name not in unreadable]
    return Embedding(readable, rows, unreadable)


def load_classifier(
    run_or_file: AnyPath,
    *,
    device: str = "auto",
    batch_size: int = BATCH,
    precision: str = "fp32",
    field: str = "",
) -> Classifier:
    """Build the classifier of a finished run, with the names of its classes.

    Args:
        run_or_file: A run folder of fine-tuning or joint training, or a checkpoint with its JSON.
        device: ``cpu``, ``cuda``, ``mps``, or ``auto`` for the first available of cuda, mps and
            cpu.
        batch_size: Images that it processes at a time.
        precision: ``fp32``, ``bf16``, or ``auto`` for the faster one, which takes a few seconds to
            find out on a CPU. ``fp32`` gives the run's own predictions.
        field: Config field that names the run. Messages begin with it.

    Returns:
        A :class:`Classifier`, used as ``clf.predict(["a.jpg", image, array])``.

    Raises:
        UserError: No such run, an unfinished one, one without a classifier, or a model that cannot
            be built.
    """
    saved = read_checkpoint(run_or_file, field, "model")
    classes = saved.extra.get("classes")
    if not classes:
        raise UserError(
            saved.fault("has no classifier: its JSON lists no classes, expected a fine-tuned run")
        )
    network = Network.from_checkpoint(saved, len(classes), device, batch_size)
    return Classifier(network.in_precision(precision), classes)


def embed(
    run_or_file: AnyPath,
    images: Images,
    *,
    device: str = "auto",
    batch_size: int = BATCH,
    precision: str = "fp32",
) -> Floats:
    """Return the features of images by a run's backbone, float32 [N, d]. N is 1 for a single image.

    Args:
        run_or_file: A run folder of any command, or a checkpoint with its JSON.
        images: As for :meth:`Classifier.predict`. The images of a folder are sorted.
        device, batch_size, precision: As for :func:`load_classifier`.

    Raises:
        UserError: No such run, an unfinished one, or an image that cannot be read.
        RunError: Memory ran out.
    """
    network = load_backbone_network(
        run_or_file, device=device, batch_size=batch_size, precision=precision
    )
    return features_of(network, images).features


def _probabilities(model: torch.nn.Module, images: Tensor) -> Tensor:
    """Return the probability of each class, [B, K]."""
    outputs: Tensor = model(images).float().softmax(1)
    return outputs


# ---------------------------------------------------------------------- images
def is_single(images: Images) -> bool:
    """Return whether ``images`` is one image: not a list, a folder or a batch of arrays."""
    if isinstance(images, str | os.PathLike):
        return not os.path.isdir(images)
    return isinstance(images, Image.Image) or (isinstance(images, np.ndarray) and images.ndim < 4)


class ListedImages(NamedTuple):
    """Images one by one."""

    sources: list[AnyImage]
    paths: list[str | None]  # their files
    names: list[str]  # in messages


def listed_images(images: Images, bands: Bands | None) -> ListedImages:
    """Return all images. ``bands``: the network's."""
    named: Iterable[tuple[str, Any]]
    if isinstance(images, str | os.PathLike | Image.Image) or is_single(images):
        named = [("the image", images)]
    else:
        named = [(f"image {number}", image) for number, image in enumerate(images)]
    listed = ListedImages([], [], [])
    for name, image in named:
        if isinstance(image, str | os.PathLike):
            files = [os.fspath(image)]
            if os.path.isdir(image):
                files = images_at(files, "images")
            for column in listed:
                column += files
        else:
            _check_pixels(image, name, bands)
            listed.sources.append(image)
            listed.paths.append(None)
            listed.names.append(name)
    return listed


def _check_pixels(image: Any, name: str, bands: Bands | None) -> None:
    """Raise UserError if an image that is no path is not one that the network can use."""
    expected = PICTURES_EXPECTED if bands is None else BANDS_EXPECTED
    if isinstance(image, Image.Image):
        return
    if not isinstance(image, np.ndarray):
        raise UserError.of("images", f"{name} is {type(image).__name__}, {expected}")
    channels = image.shape[2] if image.ndim == 3 else 1
    if bands is not None:
        is_image = image.dtype.kind in "buif"
    elif image.dtype == np.uint8:
        is_image = channels <= 4
    else:
        is_image = image.dtype == np.uint16 and channels in (1, 3)
    if not is_image or not image.size or image.ndim not in (2, 3):
        raise UserError.of(
            "images", f"{name} is an array of {image.dtype}, {list(image.shape)}, {expected}"
        )
