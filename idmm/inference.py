"""A run's network on any images: their classes with probabilities, or their features.

Images are prepared as the run itself evaluates them, the same pixels to the bit, and go through the network in fp32.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from idmm import distributed
from idmm.config.usage import UseConfig
from idmm.data.depth import in_order, tidy
from idmm.data.images import FULL, BadImage, CentreCrop, Decoded, load, of_pillow
from idmm.data.readers.folder import images_at
from idmm.data.split import counted
from idmm.data.views import normalise
from idmm.errors import RunError, UserError
from idmm.features import pooled
from idmm.files import weights_label
from idmm.models.build import feature_width, pair
from idmm.models.weights import Checkpoint, build_saved, read_checkpoint
from idmm.progress import counting

log = logging.getLogger("idmm")
BATCH, PIXELS = UseConfig.batch_size, UseConfig.max_pixels
WANTED = "wanted a path, a PIL image, or a uint8 array [H, W, 3] or [H, W]"

Source = str | os.PathLike | Image.Image | np.ndarray
"""An image: the path of its file, an open one of Pillow's, or its pixels, uint8 [H, W, 3] or [H, W] (grey; uint16 as
16-bit files have it)."""


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
class _Network:
    """A network and how its images are prepared.

    Args:
        saved: The checkpoint that it comes from.
        num_classes: Of its classifier; 0: it has none.
        device: As the config names it.
        batch_size: Images that go through it at a time.
        max_pixels: Images with more pixels are refused (pixels).

    Raises:
        UserError: It cannot be built, or the device is not there.
    """

    def __init__(self, saved: Checkpoint, num_classes: int, device: str, batch_size: int, max_pixels: int):
        self.label, self.batch_size, self.max_pixels = saved.source, batch_size, max_pixels
        self.device = distributed.pick_device(device)
        self.model = build_saved(saved, num_classes=num_classes).to(self.device)
        height, width = pair(self.model.pretrained_cfg["input_size"][-2:])
        if height != width:
            where = weights_label(saved.source, saved.field)
            raise UserError(f"{where} was evaluated at {height}x{width} pixels; wanted is a network of square images")
        self.crop = CentreCrop(height, saved.crop_pct)
        self.mean, self.std = saved.mean, saved.std
        before = "ema" in saved.extra and saved.size is None  # as 0.1.0 wrote it, which knew no other range
        self.scale = tidy(saved.extra["range"]) if "range" in saved.extra else FULL if before else None

    def over(
        self, images: Sequence[Source], names: list[str], forward: Callable[[Tensor], Tensor], width: int,
        progress: bool, label: str,
    ) -> tuple[list[int], np.ndarray, dict[str, str]]:  # fmt: skip
        """Sends images through the network, decoding the next ones meanwhile.

        Args:
            images: Images.
            names: What messages call them.
            forward: From a batch [B, C, S, S] to its outcome [B, k].
            width: k.
            progress: Show how far it is.
            label: Of that.

        Returns:
            The numbers of the images that could be read, their outcomes (float32 [n, k]), and why the others could
            not, by name.

        Raises:
            RunError: The outcome is not finite, or there is too little memory.
        """
        numbers, found, unreadable = [], [np.zeros((0, width), np.float32)], {}
        batches = self._batches(images, names, unreadable)
        for batch in counting(batches, len(images), label) if progress else batches:
            try:
                with torch.inference_mode():
                    outcome = forward(batch["images"].to(self.device)).float().cpu().numpy()  # [B, k]
            except torch.OutOfMemoryError:
                why = f"out of memory with {self.batch_size} images at a time; try a smaller batch_size"
                raise RunError(f"{self.label}: {why}") from None
            if not np.isfinite(outcome).all():
                raise RunError(f"{self.label}: what it makes of images is not finite; the run that wrote it diverged")
            numbers += batch["index"]
            found.append(outcome)
        return numbers, np.concatenate(found), unreadable

    def read(self, image: Source) -> Decoded:
        """Decodes an image; BadImage where it cannot be read."""
        given = (self.max_pixels, self.scale or FULL)
        return of_pillow(image, *given) if isinstance(image, Image.Image) else load(image, *given)

    def _batches(self, images: Sequence[Source], names: list[str], unreadable: dict[str, str]) -> Iterator[dict]:
        """Yields ``index``, numbers of images, and ``images`` [B, C, S, S]; adds the others to ``unreadable``."""
        index, crops, deep = [], [], []

        def prepared(i: int) -> np.ndarray:
            decoded = self.read(images[i])
            if self.scale is None and not np.isnan(decoded.depth.low):
                deep.append(names[i])
            return self.crop(decoded.pixels)  # uint8 [S, S, 3]

        given = (len(images), names.__getitem__, "reading images", False, self.batch_size)
        with closing(in_order(prepared, *given)) as results:
            for i, result in enumerate(results):
                if isinstance(result, BadImage):
                    unreadable[names[i]] = result.reason.replace("data.max_pixels", "max_pixels")
                else:
                    index.append(i)
                    crops.append(result)
                if len(crops) == self.batch_size or (crops and i == len(images) - 1):
                    pixels = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2)  # uint8 [B, 3, S, S]
                    yield {"index": index, "images": normalise(pixels.float().div_(255), self.mean, self.std)}
                    index, crops = [], []
        if deep:
            what = f"{counted(len(deep), 'image')} of more than 8 bits grey ('{min(deep)}')"
            log.warning("%s: the run saw none, so their values are scaled by the full range of their type", what)


class Classifier:
    """A run's classifier; made by :func:`load_classifier`.

    Attributes:
        classes: Names of the K classes.
    """

    def __init__(self, network: _Network, classes: list[str]):
        self._network, self.classes = network, classes

    def predict(
        self, images: Source | Sequence[Source], top_k: int = 1, *, tta: bool = False, on_error: str = "fail",
        progress: bool = False,
    ) -> Prediction | PredictionList:  # fmt: skip
        """Says which classes images are of.

        Args:
            images: A list of paths (of a folder: all images in it, at any depth), PIL images and arrays, uint8
                [H, W, 3] or [H, W]; or a single one. Files are read as in training: upright, opaque, 8 bits.
            top_k: Likeliest classes that ``top`` of a prediction has; at most K.
            tta: Mean of the probabilities of each image and its mirror image, at twice the time.
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
        _check_on_error(on_error)
        sources, names, single = _listed(images)
        forward = functools.partial(_probabilities, self._network.model, tta=tta)
        given = (sources, names, forward, len(self.classes), progress, "predicting")
        numbers, found, unreadable = self._network.over(*given)
        _complain(unreadable, "fail" if single else on_error)
        made = PredictionList(_paths(sources, numbers), found, self.classes, top_k, unreadable)
        return made[0] if single else made


class Embedder:
    """The backbone of a run, or of a checkpoint with its JSON beside it.

    Args:
        run_or_file: A run folder or file.
        device: ``cpu``, ``cuda`` or ``mps``; ``auto``: cuda, else mps, else cpu.
        batch_size: Images that go through it at a time.
        max_pixels: Images with more pixels are refused (pixels).
        field: Config field that names the run, with which messages then begin.

    Raises:
        UserError: No such run, one that is not finished, or a model that cannot be built.
    """

    def __init__(
        self, run_or_file: str | os.PathLike, *, device: str = "auto", batch_size: int = BATCH,
        max_pixels: int = PIXELS, field: str = "",
    ):  # fmt: skip
        self._network = _Network(read_checkpoint(run_or_file, field), 0, device, batch_size, max_pixels)

    def read(self, image: Source) -> np.ndarray:
        """Returns the pixels of an image as the run sees them before it crops, uint8 [H, W, 3]."""
        return self._network.read(image).pixels

    def embed(
        self, images: Source | Sequence[Source], *, on_error: str = "fail", progress: bool = False
    ) -> Embedding:  # fmt: skip
        """Takes the features of images, pooled, as the run's own readouts see them.

        Args:
            images, on_error, progress: As for :meth:`Classifier.predict`.

        Raises:
            UserError: An image cannot be read, or is none of these; a line each.
            RunError: The network has diverged, or memory ran out.
        """
        _check_on_error(on_error)
        sources, names, _ = _listed(images)
        model = self._network.model
        given = (sources, names, functools.partial(pooled, model), feature_width(model), progress, "taking features")
        numbers, found, unreadable = self._network.over(*given)
        _complain(unreadable, on_error)
        return Embedding(_paths(sources, numbers), found, unreadable)


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
    if saved.kwargs.get("num_classes") != len(classes):
        count = saved.kwargs.get("num_classes")
        raise UserError(f"{label} has a classifier of {count} classes, but the JSON beside it lists {len(classes)}")
    return Classifier(_Network(saved, len(classes), device, batch_size, max_pixels), classes)


def embed(
    run_or_file: str | os.PathLike, images: Source | Sequence[Source], *, device: str = "auto",
    batch_size: int = BATCH, max_pixels: int = PIXELS,
) -> np.ndarray:  # fmt: skip
    """Returns the features of images by a run's backbone, float32 [N, d]; of a single image [1, d].

    Args:
        run_or_file: A run folder of any stage, or a checkpoint with its JSON beside it.
        images: A list of paths (of a folder: all images in it, sorted, at any depth), PIL images and arrays, uint8
            [H, W, 3] or [H, W]; or a single one.
        device, batch_size, max_pixels: As for :func:`load_classifier`.

    Raises:
        UserError: No such run, one that is not finished, or an image that cannot be read.
        RunError: The network has diverged, or memory ran out.
    """
    return Embedder(run_or_file, device=device, batch_size=batch_size, max_pixels=max_pixels).embed(images).features


def _probabilities(model: torch.nn.Module, images: Tensor, tta: bool) -> Tensor:
    """Returns the probability of each class, [B, K]; ``tta``: the mean with that of the mirror images."""
    shares = model(images).float().softmax(1)  # [B, K]
    return (shares + model(images.flip(3)).float().softmax(1)) / 2 if tta else shares


# ---------------------------------------------------------------------- images
def _listed(images: Source | Sequence[Source]) -> tuple[list[Source], list[str], bool]:
    """Returns all images, what messages call them, and whether a single one was meant."""
    one = isinstance(images, (str, os.PathLike, Image.Image)) or (isinstance(images, np.ndarray) and images.ndim < 4)
    sources, names = [], []
    for place, image in enumerate([images] if one else images):
        name = "the image" if one else f"image {place}"
        if isinstance(image, (str, os.PathLike)):
            path = os.fspath(image)
            files = [file.path for file in images_at([path], "images")[0]] if os.path.isdir(path) else [path]
            one = one and not os.path.isdir(path)
            sources += files
            names += files
            continue
        if not isinstance(image, (Image.Image, np.ndarray)):
            raise UserError(f"images: {name} is {type(image).__name__}; {WANTED}")
        if isinstance(image, np.ndarray):
            image = _of_array(image, name)
        sources.append(image)
        names.append(name)
    return sources, names, one


def _of_array(array: np.ndarray, name: str) -> Image.Image:
    grey = array.ndim == 3 and array.shape[2] == 1
    with contextlib.suppress(TypeError, ValueError):
        if array.dtype == np.uint8 or (array.dtype == np.uint16 and array.ndim == 2):
            return Image.fromarray(array[..., 0] if grey else array)
    raise UserError(f"images: {name} is an array of {array.dtype}, {list(array.shape)}; {WANTED}")


def _paths(sources: list[Source], numbers: list[int]) -> list[str | None]:
    return [None if isinstance(sources[i], Image.Image) else os.fspath(sources[i]) for i in numbers]


def _check_on_error(on_error: str) -> None:
    if on_error not in ("fail", "skip"):
        raise UserError(f"on_error: got '{on_error}'; wanted 'fail' or 'skip'")


def _complain(unreadable: dict[str, str], on_error: str) -> None:
    if unreadable and on_error == "fail":
        raise UserError(*(f"images: {name}: {why}" for name, why in unreadable.items()))
