"""A run's network on any images: their classes with probabilities, or their features.

Images are prepared as the run itself evaluates them, the same pixels to the bit, and go through the network in fp32.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from idmm.config.usage import UseConfig
from idmm.data.folder import images_at
from idmm.data.images import Bands, composite, fitted
from idmm.errors import UserError, capped
from idmm.evaluation.network import Forward, Network, pooled
from idmm.files import weights_label
from idmm.models.build import feature_width
from idmm.models.weights import Checkpoint, read_checkpoint
from idmm.progress import counting

BATCH, PIXELS = UseConfig.batch_size, UseConfig.max_pixels
WANTED = "wanted a path, a PIL image, or an array [H, W, 3] or [H, W] of uint8 or uint16"
BANDS_WANTED = "wanted a path, or an array [H, W, C] of numbers as files have them"

AnyImage = str | os.PathLike | Image.Image | np.ndarray
"""An image: the path of its file, an open one of Pillow's, or its pixels, [H, W, 3] or [H, W] (grey), uint8, or
uint16 as 16-bit files have it; of a run on bands [H, W, C], in numbers of any type, as files have them."""


# ---------------------------------------------------------------------- what is found
@dataclass(frozen=True)
class Prediction:
    """What a classifier says of one image."""

    path: str | None
    """Its file; None where it was given as pixels."""
    label: str
    """Name of the likeliest class."""
    probability: float
    """Of that class, in [0, 1]."""
    top: list[tuple[str, float]]
    """Names and probabilities of the ``top_k`` likeliest classes, best first."""


@dataclass(frozen=True)
class PredictionList(Sequence):
    """What a classifier says of images, a :class:`Prediction` each, in their order."""

    paths: list[str | None]
    """Their files; None for those given as pixels."""
    probabilities: np.ndarray
    """Of every class, float32 [N, K], by the order of ``classes``."""
    classes: list[str]
    top_k: int
    unreadable: dict[str, str]
    """Images that were skipped, with the reason; they have no place in the list."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int | slice) -> "Prediction | list[Prediction]":
        if isinstance(i, slice):
            return [self[n] for n in range(len(self))[i]]
        shares = self.probabilities[i]  # [K]
        top = [(self.classes[c], float(shares[c])) for c in np.argsort(-shares, kind="stable")[: self.top_k]]
        return Prediction(self.paths[i], *top[0], top)

    @property
    def labels(self) -> list[str]:
        """Names of the likeliest classes, one an image."""
        return [self.classes[c] for c in self.probabilities.argmax(axis=1)]


@dataclass(frozen=True)
class Embedding:
    """Features of images."""

    paths: list[str | None]
    """Their files; None for those given as pixels."""
    features: np.ndarray
    """float32 [N, d]."""
    unreadable: dict[str, str]
    """Images that were skipped, with the reason."""


# ---------------------------------------------------------------------- networks
class _Predictor:
    """What classifiers and embedders share: a network on images of any kind."""

    def __init__(self, saved: Checkpoint, num_classes: int, device: str, batch_size: int, max_pixels: int):
        self._network, self._max_pixels = Network.from_checkpoint(saved, num_classes, device, batch_size), max_pixels

    def _predict(
        self, images: AnyImage | Sequence[AnyImage], forward: Forward, width: int, on_error: str, label: str | None
    ) -> tuple[list[str | None], np.ndarray, dict[str, str], bool]:  # fmt: skip
        """Returns the paths of the images that could be read (None of open ones), what ``forward`` makes of them,
        float32 [n, width], why the others could not be read, by name, and whether a single image was given.

        Progress is shown under ``label``, if there is one.
        """
        if on_error not in ("fail", "skip"):
            raise UserError(f"on_error: got '{on_error}'; wanted 'fail' or 'skip'")
        sources, names, single = listed_images(images, self._network.bands)
        unreadable: dict[str, str] = {}
        batches = self._network.file_batches(sources, names, self._max_pixels, unreadable)
        shown = counting(batches, len(sources), label) if label else batches
        first = next(shown, None)
        found = np.zeros((0, width), np.float32)
        if first is not None:
            found = self._network.outputs(itertools.chain([first], shown), forward)
        if unreadable and (single or on_error == "fail"):
            raise UserError(*capped([f"images: {name}: {why}" for name, why in unreadable.items()], begin="images: "))
        read = [source for source, name in zip(sources, names, strict=True) if name not in unreadable]
        paths = [os.fspath(one) if isinstance(one, (str, os.PathLike)) else None for one in read]
        return paths, found, unreadable, single


class Classifier(_Predictor):
    """A run's classifier; made by :func:`load_classifier`.

    Attributes:
        classes: Names of the K classes.
    """

    def __init__(self, saved: Checkpoint, classes: list[str], *given):
        super().__init__(saved, len(classes), *given)
        self.classes = classes

    def predict(
        self, images: AnyImage | Sequence[AnyImage], top_k: int = 1, *, on_error: str = "fail", progress: bool = False
    ) -> Prediction | PredictionList:  # fmt: skip
        """Says which classes images are of.

        Args:
            images: A list of paths (of a folder: all images in it, at any depth), PIL images and arrays, uint8 or
                uint16 [H, W, 3] or [H, W], of bands [H, W, C] of any numbers; or a single one. All are read as in
                training.
            top_k: Likeliest classes that ``top`` of a prediction has; at most K.
            on_error: "fail", or "skip" the images that cannot be read, which ``unreadable`` then lists.
            progress: Show a bar on standard error, where this takes longer than a second.

        Returns:
            A list of :class:`Prediction`, whose ``probabilities`` are of all classes; of a single image (not a folder)
            its prediction itself.

        Raises:
            UserError: An image cannot be read, or is none of these; a line each.
            RunError: The network has diverged, or memory ran out.
        """
        if top_k < 1:
            raise UserError(f"top_k: got {top_k}; wanted 1 or more")
        label = "predicting" if progress else None
        paths, found, unreadable, single = self._predict(images, _probabilities, len(self.classes), on_error, label)
        made = PredictionList(paths, found, self.classes, top_k, unreadable)
        return made[0] if single else made


class Embedder(_Predictor):
    """The backbone of a run, or of a checkpoint with its JSON beside it; arguments as of :func:`load_classifier`."""

    def __init__(
        self, run_or_file: str | os.PathLike, *, device: str = "auto", batch_size: int = BATCH,
        max_pixels: int = PIXELS, field: str = "",
    ):  # fmt: skip
        saved = read_checkpoint(run_or_file, field)
        super().__init__(saved, 0, device, batch_size, max_pixels)

    def picture(self, image: AnyImage, side: int) -> np.ndarray:
        """Returns a picture of an image as the run sees it before it crops, its short side of ``side`` pixels at most,
        uint8 [H, W, 3]."""
        return composite(fitted(self._network.read(image, self._max_pixels).pixels, side))

    def embed(
        self, images: AnyImage | Sequence[AnyImage], *, on_error: str = "fail", progress: bool = False
    ) -> Embedding:  # fmt: skip
        """Takes the features of images, pooled, as the run's own readouts see them.

        Args:
            images, on_error, progress: As for :meth:`Classifier.predict`.

        Raises:
            UserError: An image cannot be read, or is none of these; a line each.
            RunError: The network has diverged, or memory ran out.
        """
        width, label = feature_width(self._network.model), "taking features" if progress else None
        return Embedding(*self._predict(images, pooled, width, on_error, label)[:3])


def load_classifier(
    run_or_file: str | os.PathLike, *, device: str = "auto", batch_size: int = BATCH, max_pixels: int = PIXELS,
    field: str = "",
) -> Classifier:  # fmt: skip
    """Builds the classifier that a run wrote, with the names of its classes.

    Args:
        run_or_file: A run folder of fine-tuning or joint training, or a checkpoint with its JSON beside it.
        device: ``cpu``, ``cuda`` or ``mps``; ``auto``: cuda, else mps, else cpu.
        batch_size: Images that go through it at a time.
        max_pixels: Images with more pixels are refused (pixels).
        field: Config field that names the run, with which messages then begin.

    Returns:
        A :class:`Classifier`, used as ``clf.predict(["a.jpg", image, array])``.

    Raises:
        UserError: No such run, one that is not finished or has no classifier, or a model that cannot be built.
    """
    saved = read_checkpoint(run_or_file, field, "model")
    classes, label = saved.extra.get("classes"), weights_label(saved.source, saved.field)
    if not classes:
        raise UserError(f"{label} has no classifier: the JSON beside it lists no classes; wanted a fine-tuned run")
    return Classifier(saved, classes, device, batch_size, max_pixels)


def embed(
    run_or_file: str | os.PathLike, images: AnyImage | Sequence[AnyImage], *, device: str = "auto",
    batch_size: int = BATCH, max_pixels: int = PIXELS,
) -> np.ndarray:  # fmt: skip
    """Returns the features of images by a run's backbone, float32 [N, d]; of a single image [1, d].

    Args:
        run_or_file: A run folder of any stage, or a checkpoint with its JSON beside it.
        images: A list of paths (of a folder: all images in it, sorted, at any depth), PIL images and arrays, uint8 or
            uint16 [H, W, 3] or [H, W], of bands [H, W, C] of any numbers; or a single one.
        device, batch_size, max_pixels: As for :func:`load_classifier`.

    Raises:
        UserError: No such run, one that is not finished, or an image that cannot be read.
        RunError: The network has diverged, or memory ran out.
    """
    return Embedder(run_or_file, device=device, batch_size=batch_size, max_pixels=max_pixels).embed(images).features


def _probabilities(model: torch.nn.Module, images: Tensor) -> Tensor:
    """Returns the probability of each class, [B, K]."""
    return model(images).float().softmax(1)


# ---------------------------------------------------------------------- images
def listed_images(images: AnyImage | Sequence[AnyImage], bands: Bands | None) -> tuple[list[AnyImage], list[str], bool]:
    """Returns all images, what messages call them, and whether a single one was meant; ``bands``: the network's."""
    one = isinstance(images, (str, os.PathLike, Image.Image)) or (isinstance(images, np.ndarray) and images.ndim < 4)
    sources, names = [], []
    for place, image in enumerate([images] if one else images):
        name = "the image" if one else f"image {place}"
        if isinstance(image, (str, os.PathLike)):
            path = os.fspath(image)
            files = [file.path for file in images_at([path], "images")] if os.path.isdir(path) else [path]
            one = one and not os.path.isdir(path)
            sources += files
            names += files
            continue
        if not isinstance(image, (Image.Image, np.ndarray)):
            raise UserError(f"images: {name} is {type(image).__name__}; {WANTED if bands is None else BANDS_WANTED}")
        if isinstance(image, np.ndarray):
            _check_array(image, name, bands)
        sources.append(image)
        names.append(name)
    return sources, names, one


def _check_array(array: np.ndarray, name: str, bands: Bands | None) -> None:
    """Raises UserError unless an array is an image, [H, W] or [H, W, C]."""
    known = array.ndim in (2, 3) and array.size and array.dtype.kind in "buif"
    channels = array.shape[2] if array.ndim == 3 else 1
    if bands is None and known:
        known = (array.dtype == np.uint8 and channels <= 4) or (array.dtype == np.uint16 and channels in (1, 3))
    if not known:
        wanted = WANTED if bands is None else BANDS_WANTED
        raise UserError(f"images: {name} is an array of {array.dtype}, {list(array.shape)}; {wanted}")
