"""Predict boxes or masks on any images with a finished run, at the size of their files.

Images are prepared as in the run's own evaluation. The network runs in fp32.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from idmm import distributed
from idmm.data.images import fitted
from idmm.data.views import normalise
from idmm.dense.evaluate import Objects, classes_on_file, on_file, segmented
from idmm.dense.network import build_network
from idmm.dense.targets import rasterised
from idmm.dense.transforms import letterboxed, on_canvas, resized_to
from idmm.errors import UserError
from idmm.evaluation.network import Network
from idmm.evaluation.predictor import PIXELS, AnyImage, listed_images
from idmm.models.weights import read_checkpoint
from idmm.progress import counting

BATCH = 4
MIN_SCORE = 0.5  # of boxes


@dataclass(frozen=True)
class Found:
    """The prediction for one image."""

    path: str | None
    """Its file, or None if pixels were passed."""
    size: tuple[int, int]
    """Height and width of the upright image (pixels)."""
    objects: Objects | None
    """For idmm detect: ``boxes`` [n, 4] (x1, y1, x2, y2, pixels), ``labels`` (from 0, see ``Predictor.classes``),
    ``scores`` (descending), and ``segments`` (masks as COCO's RLE) if the run learned masks."""
    mask: np.ndarray | None
    """For idmm segment: the class of each pixel, from 0, uint8 [H, W]."""

    @property
    def masks(self) -> np.ndarray | None:
        """For idmm detect the mask of each object, bool [n, H, W], or None if the run learned only boxes."""
        if self.objects is None or self.objects.segments is None:
            return None
        masks = [rasterised(segment, self.size, self.size) for segment in self.objects.segments]
        return np.array(masks, dtype=bool).reshape(-1, *self.size)


@dataclass(frozen=True)
class Predictor:
    """A run's network for boxes or masks, from :func:`load_predictor`."""

    task: str
    """``detect`` or ``segment``."""
    classes: list[str]
    """Names of the K classes."""
    categories: list[int]
    """Number of each class in the run's annotations or masks."""
    network: Network
    max_pixels: int

    def predict(self, images: AnyImage | Sequence[AnyImage], min_score: float = MIN_SCORE) -> list[Found]:
        """Return one prediction per image.

        Args:
            images: As for :meth:`idmm.evaluation.predictor.Classifier.predict`.
            min_score: Boxes with a lower score are dropped.

        Raises:
            UserError: Images cannot be read, one line each.
            RunError: Memory ran out.
        """
        unreadable: dict[str, str] = {}
        predictions = list(self.each(images, unreadable, min_score))
        if unreadable:
            raise UserError(*(f"images: {name}: {why}" for name, why in unreadable.items()))
        return predictions

    @torch.no_grad()
    def each(
        self,
        images: AnyImage | Sequence[AnyImage],
        unreadable: dict[str, str],
        min_score: float = MIN_SCORE,
        label: str | None = None,
    ) -> Iterator[Found]:
        """Yield what :meth:`predict` returns, image by image.

        Unreadable images are added to ``unreadable`` with the reason. With a ``label`` progress is drawn.
        """
        net, sizes = self.network, {}

        def prepare(number: int, pixels: np.ndarray) -> Tensor:
            sizes[number] = pixels.shape[:2]
            stored = torch.from_numpy(fitted(pixels, net.size)).permute(2, 0, 1)  # as in the run's store
            image = resized_to(stored, letterboxed(sizes[number], net.size))
            return on_canvas(normalise(image[None], net.mean, net.std)[0], net.size)

        sources, names = listed_images(images, net.bands)
        batches = net.file_batches(sources, names, self.max_pixels, unreadable, prepare)
        with net.enough_memory():
            for batch in counting(batches, len(sources), label) if label else batches:
                inputs = batch["images"].to(net.device)
                outputs = net.model(inputs) if self.task == "detect" else segmented(net.model, inputs)
                for number, output in zip(batch["index"].tolist(), outputs, strict=True):
                    source, size, objects, mask = sources[number], sizes.pop(number), None, None
                    if self.task == "segment":
                        mask = classes_on_file(output, size, net.size).numpy().astype(np.uint8)
                    else:
                        confident = output["scores"] >= min_score
                        output = {name: value[confident] for name, value in output.items()}
                        objects = on_file(output, size, net.size)
                    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
                    yield Found(path, size, objects, mask)


def load_predictor(
    run_or_file: str | os.PathLike,
    *,
    device: str = "auto",
    batch_size: int = BATCH,
    max_pixels: int = PIXELS,
    field: str = "",
) -> Predictor:
    """Load the network of ``idmm detect`` or ``idmm segment`` for use on any images.

    Args:
        run_or_file: A run folder, or its ``model.safetensors`` with the JSON next to it.
        device, batch_size, max_pixels, field: As for :func:`idmm.load_classifier`.

    Returns:
        A :class:`Predictor`, used as ``predictor.predict(["a.jpg", image, array])``.

    Raises:
        UserError: No such run, an unfinished one, or one of another command.
    """
    saved, device = read_checkpoint(run_or_file, field, "model"), distributed.pick_device(device)
    network = Network.around(saved, build_network(saved).to(device), saved.size, device, batch_size)
    return Predictor(*(saved.extra[name] for name in ("task", "classes", "categories")), network, max_pixels)
