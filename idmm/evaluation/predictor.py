"""A finished run's network on any images: classes with probabilities, or features.

The images are prepared as in the run's own evaluation, the same pixels to the bit. The network runs
in fp32.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray
from PIL import Image
from torch import Tensor

from idmm.config.commands import UseConfig
from idmm.data.folder import images_at
from idmm.data.images import Bands
from idmm.errors import UserError
from idmm.evaluation.network import Forward, Network, pooled
from idmm.files import AnyPath, weights_label
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

AnyImage = AnyPath | Image.Image | ndarray
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
    # names and probabilities of the top_k likeliest classes, best first
    top: list[tuple[str, float]]

    def _repr_html_(self) -> str:
        return html_table([(self.path, *each) for each in self.top])


@dataclass(frozen=True)
class Embedding:
    """Features of images."""

    paths: list[str | None]  # their files. None for images given as pixels
    features: ndarray  # float32 [N, d]
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
            top = [(classes[c], float(row[c])) for c in np.argsort(-row, kind="stable")[:top_k]]
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
            raise UserError(f"top_k: got {top_k}, expected 1 or more")
        outputs = _outputs(
            self._network, images, _probabilities, len(self.classes), on_error, "predicting"
        )
        predictions = PredictionList(outputs, self.classes, top_k)
        if is_single(images):
            return predictions[0]
        return predictions


def load_backbone_network(
    run_or_file: AnyPath, *, device="auto", batch_size: int = BATCH, field=""
) -> Network:
    """Build the backbone of a run, or of a checkpoint with its JSON, as :func:`load_classifier`
    does."""
    return Network.from_checkpoint(read_checkpoint(run_or_file, field), 0, device, batch_size)


def features_of(network: Network, images: Images, *, on_error: str = "fail") -> Embedding:
    """Return the pooled features of images. Arguments and errors are those of
    :meth:`Classifier.predict`."""
    return _outputs(
        network, images, pooled, feature_width(network.model), on_error, "taking features"
    )


def _outputs(
    network: Network, images: Images, forward: Forward, width: int, on_error: str, label: str
) -> Embedding:
    """Return the outputs of ``forward`` for images, ``width`` numbers each. ``label``: of the
    bar."""
    if on_error not in ("fail", "skip"):
        raise UserError(f"on_error: got '{on_error}', expected 'fail' or 'skip'")
    sources, names = listed_images(images, network.bands)
    unreadable: dict[str, str] = {}
    batches = counting(network.file_batches(sources, names, unreadable), len(sources), label)
    rows = network.outputs(batches, forward).reshape(-1, width)  # also if no image can be read
    if unreadable and (is_single(images) or on_error == "fail"):
        raise UserError(
            *capped(
                [f"images: {name}: {why}" for name, why in unreadable.items()], begin="images: "
            )
        )
    readable = [
        source for source, name in zip(sources, names, strict=True) if name not in unreadable
    ]
    paths = [os.fspath(source) if isinstance(source, AnyPath) else None for source in readable]
    return Embedding(paths, rows, unreadable)


def load_classifier(
    run_or_file: AnyPath, *, device="auto", batch_size: int = BATCH, field=""
) -> Classifier:
    """Build the classifier of a finished run, with the names of its classes.

    Args:
        run_or_file: A run folder of fine-tuning or joint training, or a checkpoint with its JSON.
        device: ``cpu``, ``cuda``, ``mps``, or ``auto`` for the first available of cuda, mps and
            cpu.
        batch_size: Images that it processes at a time.
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
        name = weights_label(saved.source, saved.field)
        raise UserError(
            f"{name} has no classifier: its JSON lists no classes, expected a fine-tuned run"
        )
    return Classifier(Network.from_checkpoint(saved, len(classes), device, batch_size), classes)


def embed(
    run_or_file: AnyPath, images: Images, *, device="auto", batch_size: int = BATCH
) -> ndarray:
    """Return the features of images by a run's backbone, float32 [N, d], or [1, d] for a single
    image.

    Args:
        run_or_file: A run folder of any stage, or a checkpoint with its JSON.
        images: As for :meth:`Classifier.predict`. The images of a folder are sorted.
        device, batch_size: As for :func:`load_classifier`.

    Raises:
        UserError: No such run, an unfinished one, or an image that cannot be read.
        RunError: Memory ran out.
    """
    network = load_backbone_network(run_or_file, device=device, batch_size=batch_size)
    return features_of(network, images).features


def _probabilities(model: torch.nn.Module, images: Tensor) -> Tensor:
    """Return the probability of each class, [B, K]."""
    return model(images).float().softmax(1)


# ---------------------------------------------------------------------- images
def is_single(images: Images) -> bool:
    """Return whether ``images`` is one image: not a list, a folder or a batch of arrays."""
    if isinstance(images, AnyPath):
        return not os.path.isdir(images)
    return isinstance(images, Image.Image) or (isinstance(images, ndarray) and images.ndim < 4)


def listed_images(images: Images, bands: Bands | None) -> tuple[list[AnyImage], list[str]]:
    """Return all images and their names in messages. ``bands``: the network's."""
    single = is_single(images)
    sources = []
    names = []
    for number, image in enumerate([images] if single or isinstance(images, AnyPath) else images):
        name = "the image" if single else f"image {number}"
        if isinstance(image, AnyPath):
            path = os.fspath(image)
            if os.path.isdir(path):
                files = images_at([path], "images")
            else:
                files = [path]
            sources += files
            names += files
            continue
        expected = PICTURES_EXPECTED if bands is None else BANDS_EXPECTED
        if not isinstance(image, Image.Image | ndarray):
            raise UserError(f"images: {name} is {type(image).__name__}, {expected}")
        if isinstance(image, ndarray):
            channels = image.shape[2] if image.ndim == 3 else 1
            if bands is None:
                is_image = (image.dtype == np.uint8 and channels <= 4) or (
                    image.dtype == np.uint16 and channels in (1, 3)
                )
            else:
                is_image = image.dtype.kind in "buif"
            if not is_image or not image.size or image.ndim not in (2, 3):
                raise UserError(
                    f"images: {name} is an array of {image.dtype}, {list(image.shape)}, {expected}"
                )
        sources.append(image)
        names.append(name)
    return sources, names
