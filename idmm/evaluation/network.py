"""The predictor of finished runs: a network with its preprocessing, on files or a run's split."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idmm.batch import Batch
from idmm.data.formats import BadImage, NoPicture
from idmm.data.image_store import ImageStore
from idmm.data.images import (
    AUTO,
    Bands,
    CentreCrop,
    Decoded,
    Item,
    ValueRange,
    bands_of,
    read_image,
    unit,
)
from idmm.data.loaders import centre_crops
from idmm.data.parallel import parallel_map
from idmm.data.split import Split
from idmm.data.views import normalise
from idmm.errors import RunError, UserError
from idmm.evaluation import Floats
from idmm.evaluation.evaluate import outputs_in_order
from idmm.models.base import Backbone
from idmm.models.build import to_faster_format
from idmm.models.weights import Checkpoint, build_saved
from idmm.progress import counting, duration, log
from idmm.text import counted
from idmm.training.device import enough_memory, pick_device
from idmm.training.precision import TIMED, autocast, inference_precision

Forward = Callable[[Any, Tensor], Tensor]  # (model, images [B, C, S, S]) -> [B, k]


def pooled(backbone: Backbone, images: Tensor) -> Tensor:
    """Return the features that a classifier gets of images [B, C, H, W], [B, d]."""
    return backbone.forward_head(backbone.forward_features(images), pre_logits=True)


def extract_features(
    backbone: nn.Module,
    batches: Iterable[Batch],
    device: str,
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    forward: Forward = pooled,
    local: bool = False,
) -> Tensor:
    """Return the outputs of ``forward`` for all images in their order, float32 [N, d] on the CPU.

    The images are those of all processes, or with ``local`` only those of this process. Without any
    it is [0, 0].
    """

    def features(batch: Batch) -> list[Tensor]:
        with autocast():
            output = forward(backbone, batch["images"].to(device, non_blocking=True))  # [B, d]
        return [output.float()]

    columns = outputs_in_order(backbone, batches, features, local)
    if not columns:
        return torch.zeros(0, 0)
    return torch.from_numpy(columns[0])


@dataclass(frozen=True)
class Network:
    """A network and the preprocessing of its images."""

    model: Backbone  # in evaluation mode, on the device
    size: int  # side of its images (pixels)
    crop_pct: float  # share of the resized short side that they cover
    mean: Sequence[float]  # of each channel, on pixel values in [0, 1]
    std: Sequence[float]
    device: str
    batch_size: int  # images that it processes at a time
    label: str  # that messages begin with
    scale: ValueRange = AUTO  # of images deeper than 8 bits. AUTO: the run had none
    bands: Bands | None = None  # the channels of files that it uses. None: pictures
    crop_mode: str = "center"  # timm's
    precision: str = "fp32"  # or bf16

    @classmethod
    def from_checkpoint(
        cls,
        saved: Checkpoint,
        num_classes: int,
        device: str,
        batch_size: int,
    ) -> "Network":
        """Build the network of a finished run with a classifier of ``num_classes`` (0: none).

        Raises:
            UserError: It cannot be built, or the device does not exist.
            RunError: The device has no memory for it.
        """
        device = pick_device(device)
        model = build_saved(saved, None, num_classes)
        out_of_memory = RunError(
            f"{saved.source}: {device} is out of memory. Free some, or use another device"
        )
        with enough_memory(out_of_memory):
            model = model.to(device)
        return cls.around(saved, model, model.pretrained_cfg["input_size"][-1], device, batch_size)

    @classmethod
    def around(
        cls,
        saved: Checkpoint,
        model: nn.Module,
        size: int,
        device: str,
        batch_size: int,
    ) -> "Network":
        """Add the preprocessing of a checkpoint's JSON to its model.

        The model is built and on the device, for images of ``size`` (pixels). If it is no backbone,
        :meth:`outputs` cannot be used.
        """
        bands = bands_of(saved.in_chans, saved.extra.get("bands"), saved.extra.get("file_channels"))
        return cls(
            cast(Backbone, model),
            size,
            saved.crop_pct,
            saved.mean,
            saved.std,
            device,
            batch_size,
            saved.source,
            saved.range,
            bands,
            saved.crop_mode,
        )

    @property
    def crop(self) -> CentreCrop:
        """What it sees of an image."""
        return CentreCrop.of(self.size, self.crop_pct, self.crop_mode, self.mean)

    def in_precision(self, requested: str) -> "Network":
        """Return the network in fp32, bf16, or the faster one ('auto').

        Raises:
            UserError: ``requested`` is none of these.
            RunError: Memory ran out while both were timed.
        """
        to_faster_format(self.model)
        count = min(TIMED, self.batch_size)
        images = torch.zeros(count, len(self.mean), self.size, self.size, device=self.device)
        with self.enough_memory():
            precision = inference_precision(requested, self.model, images, self.device)
        return replace(self, precision=precision)

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass."""
        return autocast(self.device, self.precision)

    def outputs(self, batches: Iterable[Batch], forward: Forward = pooled) -> Floats:
        """Return the outputs of ``forward`` for all images in order, float32 [N, k].

        Raises:
            UserError: They are not finite.
            RunError: There is too little memory.
        """
        with self.enough_memory():
            outputs = extract_features(
                self.model, batches, self.device, self.autocast, forward, True
            ).numpy()
        if not np.isfinite(outputs).all():
            raise UserError.of(
                self.label, "its outputs are not finite", "Train again with a lower --train.lr"
            )
        return outputs

    def enough_memory(self) -> AbstractContextManager[None]:
        """Raise RunError if memory runs out inside the block."""
        return enough_memory(
            RunError(
                f"{self.label}: out of memory with {self.batch_size} images at a time. "
                "Try a smaller batch_size"
            )
        )

    def split_features(self, store: ImageStore, workers: int | None, part: str) -> Floats:
        """Return the pooled features of all images of a split, called ``part``, float32 [N, d].

        Errors as of :meth:`outputs`.
        """
        started_at = time.monotonic()
        batches = centre_crops(store, self.crop, self.mean, self.std, self.batch_size, workers)
        features = self.outputs(counting(batches, len(store), f"features of {part}"))
        log.info(
            f"{self.label}: features of {part} ({counted(len(store), 'image')}) in "
            f"{duration(time.monotonic() - started_at)}"
        )
        return features

    def readable(self, split: Split, forward: Forward, label: str) -> tuple[Split, Floats]:
        """Return the readable images of a split, and what ``forward`` returns for them, [N, k].

        ``label`` is that of the progress bar. Errors as of :meth:`outputs`.
        """
        unreadable: dict[str, str] = {}
        batches = self.file_batches(split.items, split.names, unreadable)
        rows = self.outputs(counting(batches, len(split), label), forward)
        return split.take([i for i, name in enumerate(split.names) if name not in unreadable]), rows

    def file_batches(
        self,
        images: Sequence[Item] | NDArray[Any],
        names: Sequence[str],
        unreadable: dict[str, str],
        prepare: Callable[[int, NDArray[Any]], Tensor] | None = None,
    ) -> Generator[Batch, None, None]:
        """Yield ``images`` [B, C, S, S] and ``index`` while the next ones are decoded.

        Args:
            images: As for :meth:`read`.
            names: Their names in messages.
            unreadable: Takes the images that cannot be read: name -> reason.
            prepare: Turns an image's number and pixels [H, W, C] into the network's input
                [C, S, S]. None: its centre.
        """
        prepare = prepare or self._centre
        index: list[int] = []
        crops: list[Tensor] = []

        def decoded(i: int) -> Tensor:
            return prepare(i, self.read(images[i]).pixels)

        results = parallel_map(decoded, names, None, self.batch_size)
        with contextlib.closing(results):
            for i, result in enumerate(results):
                if isinstance(result, NoPicture):  # the run fixes the channels, no flag does
                    unreadable[names[i]] = f"{result.problem}, as the run is of pictures"
                elif isinstance(result, BadImage):
                    unreadable[names[i]] = result.reason
                else:
                    index.append(i)
                    crops.append(result)
                if len(crops) == self.batch_size or (crops and i == len(images) - 1):
                    yield {"index": torch.tensor(index), "images": torch.stack(crops)}
                    index = []
                    crops = []

    def _centre(self, number: int, pixels: NDArray[Any]) -> Tensor:
        crop = torch.from_numpy(self.crop(pixels))
        return normalise(unit(crop.permute(2, 0, 1))[None], self.mean, self.std)[0]

    def read(self, image: Item) -> Decoded:
        """Decode a file, an open Pillow image or an array [H, W, C] as the run does.

        Raises:
            BadImage: It cannot be read.
        """
        scale = self.scale
        if scale == AUTO:
            scale = None
        return read_image(image, scale, self.bands)
