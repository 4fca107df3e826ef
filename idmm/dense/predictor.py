"""A run's network for boxes or masks on any images: what it finds, at the size of their files.

Images are prepared as the run itself evaluates them, and go through the network in fp32.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from idmm import distributed
from idmm.data.composite import composite
from idmm.data.images import fitted
from idmm.data.views import normalise
from idmm.dense import letterboxed, on_canvas, resized_to
from idmm.dense.evaluate import Objects, classes_on_file, on_file, segmented
from idmm.dense.network import build_network
from idmm.dense.targets import rasterised
from idmm.errors import UserError
from idmm.evaluation.network import Network
from idmm.evaluation.predictor import PIXELS, AnyImage, listed_images
from idmm.models.weights import read_checkpoint
from idmm.progress import counting

BATCH = 4
MIN_SCORE = 0.5  # of boxes


@dataclass(frozen=True)
class Found:
    """What a network finds in one image."""

    path: str | None
    """Its file; None where it was given as pixels."""
    size: tuple[int, int]
    """Height and width of the image, upright (pixels)."""
    objects: Objects | None
    """Of idmm detect: ``boxes`` [n, 4] (x1, y1, x2, y2; pixels), ``labels`` (from 0, see ``Predictor.classes``),
    ``scores``, and ``segments`` (masks as COCO's RLE) where the run learned masks; the likeliest first."""
    mask: np.ndarray | None
    """Of idmm segment: the number of each pixel's class, from 0, uint8 [H, W]."""

    @property
    def masks(self) -> np.ndarray | None:
        """Of idmm detect the mask of each object, bool [n, H, W]; None: the run learned boxes alone."""
        if self.objects is None or self.objects.segments is None:
            return None
        drawn = [rasterised(segment, self.size, self.size) for segment in self.objects.segments]
        return np.array(drawn, dtype=bool).reshape(-1, *self.size)


@dataclass(frozen=True)
class Predictor:
    """A run's network for boxes or masks; made by :func:`load_predictor`."""

    task: str
    """``detect`` or ``segment``."""
    classes: list[str]
    """Names of the K classes."""
    categories: list[int]
    """Number of each class in the run's annotations or masks."""
    network: Network
    max_pixels: int

    def predict(self, images: AnyImage | Sequence[AnyImage], min_score: float = MIN_SCORE) -> list[Found]:
        """Returns what is in images.

        Args:
            images: As :meth:`idmm.evaluation.predictor.Classifier.predict` takes them.
            min_score: Boxes of a lower score are left out.

        Raises:
            UserError: An image cannot be read, or is none; a line each.
            RunError: Memory ran out.
        """
        unreadable: dict[str, str] = {}
        found = list(self.each(images, unreadable, min_score))
        if unreadable:
            raise UserError(*(f"images: {name}: {why}" for name, why in unreadable.items()))
        return found

    @torch.no_grad()
    def each(
        self,
        images: AnyImage | Sequence[AnyImage],
        unreadable: dict[str, str],
        min_score: float = MIN_SCORE,
        label: str | None = None,
    ) -> Iterator[Found]:
        """Yields what :meth:`predict` returns, image after image; those that cannot be read go into ``unreadable``,
        with the reason. With a ``label`` there is a bar on standard error."""
        net, sizes = self.network, {}

        def prepared(number: int, pixels: np.ndarray) -> Tensor:
            sizes[number] = pixels.shape[:2]
            kept = torch.from_numpy(fitted(pixels, net.size)).permute(2, 0, 1)  # as the run's cache does
            made = resized_to(kept, letterboxed(sizes[number], net.size))
            return on_canvas(normalise(made[None], net.mean, net.std)[0], net.size)

        sources, names, _ = listed_images(images, net.bands)
        batches = net.file_batches(sources, names, self.max_pixels, unreadable, prepared)
        with net.enough_memory():
            for batch in counting(batches, len(sources), label) if label else batches:
                seen = batch["images"].to(net.device)
                outputs = net.model(seen) if self.task == "detect" else segmented(net.model, seen)
                for number, output in zip(batch["index"].tolist(), outputs, strict=True):
                    source, size = sources[number], sizes.pop(number)
                    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
                    if self.task == "segment":
                        mask = classes_on_file(output, size, net.size).numpy().astype(np.uint8)
                        yield Found(path, size, None, mask)
                    else:
                        sure = output["scores"] >= min_score
                        output = {name: value[sure] for name, value in output.items()}
                        yield Found(path, size, on_file(output, size, net.size), None)

    def picture(self, image: AnyImage, side: int) -> np.ndarray:
        """Returns an image as people see it, its long side of ``side`` pixels at most, uint8 [H, W, 3]."""
        pixels = self.network.read(image, self.max_pixels).pixels
        h, w = pixels.shape[:2]
        return composite(fitted(pixels, max(1, round(side * min(h, w) / max(h, w)))))


def load_predictor(
    run_or_file: str | os.PathLike,
    *,
    device: str = "auto",
    batch_size: int = BATCH,
    max_pixels: int = PIXELS,
    field: str = "",
) -> Predictor:
    """Builds the network that ``idmm detect`` or ``idmm segment`` wrote, to be used on any images.

    Args:
        run_or_file: A run folder of either, or its ``model.safetensors`` with the JSON beside it.
        device, batch_size, max_pixels, field: As for :func:`idmm.load_classifier`.

    Returns:
        A :class:`Predictor`, used as ``predictor.predict(["a.jpg", image, array])``.

    Raises:
        UserError: No such run, one that is not finished, or that is of neither.
    """
    saved, device = read_checkpoint(run_or_file, field, "model"), distributed.pick_device(device)
    network = Network.around(saved, build_network(saved).to(device), saved.size, device, batch_size)
    return Predictor(*(saved.extra[name] for name in ("task", "classes", "categories")), network, max_pixels)
