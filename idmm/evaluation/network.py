"""A finished network with its preprocessing, and images through it: files, open images, or a split of a run."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from idmm import distributed
from idmm.data.formats import BadImage
from idmm.data.image_store import ImageStore
from idmm.data.images import Bands, CentreCrop, Decoded, bands_of, read_image
from idmm.data.loaders import centre_crops
from idmm.data.parallel import parallel_map
from idmm.data.split import counted
from idmm.data.values import AUTO, ValueRange, as_range, unit
from idmm.data.views import normalise
from idmm.errors import RunError, UserError
from idmm.evaluation.evaluate import evaluating
from idmm.files import weights_label
from idmm.models.build import pair
from idmm.models.weights import Checkpoint, build_saved

log = logging.getLogger("idmm")
Forward = Callable[[nn.Module, Tensor], Tensor]  # (model, images [B, C, S, S]) -> [B, k]


def pooled(backbone: nn.Module, images: Tensor) -> Tensor:
    """Returns what a classifier is given of images [B, C, H, W], [B, d]."""
    return backbone.forward_head(backbone.forward_features(images), pre_logits=True)


@torch.no_grad()
def extract_features(
    backbone: nn.Module, batches: Iterable[dict], device, autocast, forward: Forward = pooled, alone: bool = False
) -> Tensor:
    """Returns the pooled features of all processes' images (``alone``: of this one's), or what else ``forward`` makes
    of them, in the images' order, float32 [N, d] on the CPU."""
    features, indices = [], []
    with evaluating(backbone):
        for batch in batches:
            with autocast():
                found = forward(backbone, batch["images"].to(device, non_blocking=True))  # [B, d]
            features.append(found.float().cpu().numpy())
            indices.append(batch["index"].numpy())
    # lists of batches: a process may have no image
    parts = [(features, indices)] if alone else distributed.gather((features, indices))
    features, indices = (np.concatenate([batch for part in parts for batch in part[k]]) for k in (0, 1))
    return torch.from_numpy(features[np.argsort(indices)])


@dataclass(frozen=True)
class Network:
    """A network and how its images are prepared."""

    model: nn.Module  # in evaluation mode, on the device
    size: int  # side of its images (pixels)
    crop_pct: float  # share of the resized short side that they cover
    mean: Sequence[float]  # of each channel, on pixel values in [0, 1]
    std: Sequence[float]
    device: str
    batch_size: int  # images that go through it at a time
    label: str  # that messages begin with
    scale: ValueRange = AUTO  # of images deeper than 8 bits; AUTO: the run saw none
    bands: Bands | None = None  # which channels of files are used; None: pictures

    @classmethod
    def from_checkpoint(cls, saved: Checkpoint, num_classes: int, device: str, batch_size: int) -> "Network":
        """Builds what a run wrote, with a classifier of ``num_classes``, or none (0).

        Raises:
            UserError: It cannot be built, or the device is not there.
        """
        device = distributed.pick_device(device)
        model = build_saved(saved, None, num_classes).to(device)
        height, width = pair(model.pretrained_cfg["input_size"][-2:])
        if height != width:
            where = weights_label(saved.source, saved.field)
            raise UserError(f"{where} was evaluated at {height}x{width} pixels; wanted is a network of square images")
        return cls.around(saved, model, height, device, batch_size)

    @classmethod
    def around(cls, saved: Checkpoint, model: nn.Module, size: int, device: str, batch_size: int) -> "Network":
        """Puts what a checkpoint's JSON says of images of ``size`` (pixels) to its model, built and on the device."""
        looks, more = (saved.crop_pct, saved.mean, saved.std), saved.extra
        channels = bands_of(saved.in_chans, more.get("bands"), more.get("file_channels"))
        return cls(model, size, *looks, device, batch_size, saved.source, as_range(saved.range), channels)

    def outputs(self, batches: Iterable[dict], forward: Forward = pooled) -> np.ndarray:
        """Returns the pooled features of images, or what else ``forward`` makes of them, in order, float32 [N, k].

        Raises:
            RunError: They are not finite, or there is too little memory.
        """
        with self.enough_memory():
            found = extract_features(self.model, batches, self.device, contextlib.nullcontext, forward, True).numpy()
        if not np.isfinite(found).all():
            raise RunError(f"{self.label}: its outputs are not finite; the run that wrote it has diverged")
        return found

    def enough_memory(self) -> contextlib.AbstractContextManager:
        """Raises RunError where memory runs out inside the block."""
        why = f"out of memory with {self.batch_size} images at a time; try a smaller batch_size"
        return distributed.enough_memory(RunError(f"{self.label}: {why}"))

    # ------------------------------------------------------------------ images
    def split_batches(self, store: ImageStore, workers: int | None) -> Iterator[dict]:
        """Yields ``images`` [B, C, S, S], ``index`` and ``label`` of a split."""
        return centre_crops(store, self.size, self.crop_pct, self.mean, self.std, self.batch_size, workers)

    def file_batches(
        self,
        images: list,
        names: list[str],
        max_pixels: int,
        unreadable: dict[str, str],
        make: Callable[[int, np.ndarray], Tensor] | None = None,
    ) -> Iterator[dict]:
        """Yields ``images`` [B, C, S, S] and ``index`` of files and open images, while the next ones are decoded.

        Args:
            images: As :meth:`read` takes them.
            names: What messages call them.
            max_pixels: Images with more pixels are refused (pixels).
            unreadable: Takes up those that cannot be read, with the reason, by name.
            make: Makes of an image's number and pixels [H, W, C] what the network sees, [C, S, S]; None: its centre.
        """
        make, index, crops, deep = make or self._centre, [], [], []

        def prepared(i: int) -> Tensor:
            decoded = self.read(images[i], max_pixels)
            if self.scale == AUTO and decoded.min_max:
                deep.append(names[i])
            return make(i, decoded.pixels)

        given = (len(images), names.__getitem__, "reading images", False, self.batch_size)
        with closing(parallel_map(prepared, *given)) as results:
            for i, result in enumerate(results):
                if isinstance(result, BadImage):
                    why = result.reason.replace("data.max_pixels", "max_pixels")
                    # which channels are used is the run's to say, no longer a flag's
                    unreadable[names[i]] = re.sub(r", or --data\..*", ", as the run is of pictures", why)
                else:
                    index.append(i)
                    crops.append(result)
                if len(crops) == self.batch_size or (crops and i == len(images) - 1):
                    yield {"index": torch.tensor(index), "images": torch.stack(crops)}
                    index, crops = [], []
        if deep:
            what = f"{counted(len(deep), 'image')} of more than 8 bits ('{min(deep)}')"
            log.warning("%s: the run saw none, so their values are scaled by the full range of their type", what)

    def _centre(self, number: int, pixels: np.ndarray) -> Tensor:
        crop = CentreCrop(self.size, self.crop_pct)(pixels)
        return normalise(unit(torch.from_numpy(crop).permute(2, 0, 1))[None], self.mean, self.std)[0]

    def read(self, image: str | os.PathLike | Image.Image | np.ndarray, max_pixels: int) -> Decoded:
        """Decodes a file, an open image of Pillow's or an array [H, W, C] as the run does; BadImage where it cannot be
        read."""
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and self.bands is None:
            grey = image.ndim == 3 and image.shape[2] == 1
            image = Image.fromarray(image[:, :, 0] if grey else image)  # two or four channels have opacity
        return read_image(image, max_pixels, None if self.scale == AUTO else self.scale, self.bands)
