"""The model to export: a run's network, its preprocessing, and some of its images for the comparison."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idmm.data.image_store import store_split
from idmm.data.images import CentreCrop
from idmm.errors import RunError, UserError
from idmm.evaluation.network import Network
from idmm.models.build import feature_width
from idmm.stages import stage_of
from idmm.stages.read_outputs import config_of, exported_weights

BATCH = 32  # images that a network processes at a time
CHECKED = 64  # real images to compare an exported file with torch on


@dataclass(frozen=True)
class Sample:
    """Prepared images to compare two networks on."""

    images: torch.Tensor  # float32 [n, C, S, S]
    what: str  # description, e.g. 64 test images


class Source:
    """A run's model, with its classifier if it has one.

    Args:
        run: The run's folder.

    Raises:
        UserError: The run is not finished, or the model cannot be built.
    """

    def __init__(self, run: Path):
        self.run, self.config = run, config_of(run)
        self.saved = exported_weights(run, "init")
        self.classes: list[str] | None = self.saved.extra.get("classes")
        self.network = Network.from_checkpoint(self.saved, len(self.classes or ()), "cpu", BATCH)
        self.model, self.size = self.network.model, self.network.size

    @property
    def output(self) -> str:
        """Name of the model's output: logits [N, K], or features [N, d]."""
        return "logits" if self.classes else "features"

    @property
    def width(self) -> int:
        """Length of the output per image."""
        return len(self.classes) if self.classes else feature_width(self.model)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How an image file becomes the model's input, for programs that do not know idmm."""
        saved, bands = self.saved, self.network.bands
        values: dict[str, Any] = {
            "channels": "RGB" if saved.in_chans == 3 else "L",
            "resize": math.floor(self.size / saved.crop_pct),
            "size": [self.size, self.size],
            "crop": "center",
            "crop_pct": saved.crop_pct,
            "interpolation": saved.interpolation,
            "mean": list(saved.mean),
            "std": list(saved.std),
            "layout": "NCHW",
        }
        if bands is None:
            optional = {"grey_range": saved.extra.get("range")}
        else:
            values["channels"] = saved.in_chans
            optional = {"range": saved.extra.get("range"), "bands": list(bands.chosen) if bands.chosen else None}
            optional["file_channels"] = saved.extra.get("file_channels")
        return values | {name: value for name, value in optional.items() if value is not None}

    @torch.inference_mode()
    def outputs(self, images: torch.Tensor) -> np.ndarray:
        """Return torch's outputs for prepared images, [n, C, S, S] -> float32 [n, width]."""
        return np.concatenate([self.model(batch).numpy() for batch in images.split(BATCH)])

    # ------------------------------------------------------------------ images
    def sample(self, root: str | None) -> tuple[Sample, str | None]:
        """Return images for the comparison: at most :data:`CHECKED` test images of the run (training images if it has
        no others), prepared as in its evaluation. If they cannot be read, it is noise and the reason.

        Args:
            root: Folder of the run's images now. None: the one in its config.
        """
        data = self.config.data
        data = replace(data, root=root or data.root, on_error="skip", cache="off")
        config = replace(self.config, data=data)
        try:
            splits = stage_of(config).list_images()
            part = "train" if splits.test is None else "test"
            images = self._prepared(getattr(splits, part), part, data)
        except (UserError, RunError) as error:
            shape = (CHECKED // 4, self.saved.in_chans, self.size, self.size)
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            return Sample(noise, "noise"), str(error).splitlines()[0]
        return Sample(images, f"{len(images)} {'test' if part == 'test' else 'training'} images"), None

    def _prepared(self, split, part: str, data) -> torch.Tensor:
        if len(split) > CHECKED:
            split = split.take(np.linspace(0, len(split) - 1, CHECKED).round().astype(int))
        crop = CentreCrop(self.size, self.saved.crop_pct)
        store = store_split(split, stored_size=crop, data=data, part=part, progress=True, value_range=self.saved.range)
        expected = self.network.bands and self.network.bands.count
        if expected and store.bands.count != expected:
            raise UserError(f"data.root: the {part} images have {store.bands.count} channels, expected {expected}")
        return torch.cat([batch["images"] for batch in self.network.split_batches(store, data.workers)])
