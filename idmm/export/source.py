"""What is exported: a run's model, how its images are prepared, and some of those images to check by."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idmm.data.cache import load_split
from idmm.data.datasets import open_splits
from idmm.data.images import CentreCrop
from idmm.data.split import Split, Splits
from idmm.errors import RunError, UserError
from idmm.models.build import feature_width
from idmm.network import Network
from idmm.stages import stage_of
from idmm.stages.artifacts import config_of, exported_weights

BATCH = 32  # images that go through a network at a time
CHECKED = 64  # real images that an exported file is compared with torch on


@dataclass(frozen=True)
class Sample:
    """Prepared images to compare two networks on."""

    images: torch.Tensor  # float32 [n, C, S, S]
    what: str  # for people, e.g. 64 test images


class Source:
    """A run's model, with its classifier where it has one.

    Args:
        run: The run's folder.
        root: Folder of the run's images now; None: where its config says.

    Raises:
        UserError: The run is not finished, or the model cannot be built.
    """

    def __init__(self, run: Path, root: str | None = None):
        self.run, self._root, self.config = run, root, config_of(run)
        self.saved = exported_weights(run, "init")
        self.classes: list[str] | None = self.saved.extra.get("classes")
        self.network = Network.from_checkpoint(self.saved, len(self.classes or ()), "cpu", BATCH)
        self.model, self.size = self.network.model, self.network.size

    @property
    def output(self) -> str:
        """Name of what the model gives: logits [N, K], or features [N, d]."""
        return "logits" if self.classes else "features"

    @property
    def width(self) -> int:
        """Numbers that it gives for an image."""
        return len(self.classes) if self.classes else feature_width(self.model)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How an image file becomes the model's input, for programs that know nothing of idmm."""
        saved, size = self.saved, self.size
        short, bands, scale = math.floor(size / saved.crop_pct), self.network.bands, saved.extra.get("range")
        resize = f"resize the short side to {short} px ({saved.interpolation}, antialiased)"
        crop = f"cut out the centre {size} x {size}"
        if bands is None:
            channels = "RGB" if saved.in_chans == 3 else "L"
            steps, known = [f"convert to {channels}", resize, crop, "divide by 255"], {"grey_range": scale}
            if scale is not None:
                steps = [steps[0], "divide 8 bits by 255", _scaling(scale), resize, crop]
        else:
            channels = saved.in_chans
            taken = f"channels {list(bands.chosen)}, in that order, counted from 0" if bands.chosen else "channels"
            steps = [f"take the file's {taken} as they are, [H, W, {channels}]", "divide 8 bits by 255"]
            steps += [] if scale is None else [_scaling(scale)]
            steps += [resize, crop]
            known = {"range": scale, "bands": list(bands.chosen) if bands.chosen else None}
            known["file_channels"] = saved.extra.get("file_channels")
        steps += ["subtract mean", "divide by std"]
        found = {
            "steps": f"{', '.join(steps)}; float32 [N, {saved.in_chans}, {size}, {size}]",
            "channels": channels, "resize": short, "size": [size, size], "crop": "center", "crop_pct": saved.crop_pct,
            "interpolation": saved.interpolation, "mean": list(saved.mean), "std": list(saved.std), "layout": "NCHW",
        }  # fmt: skip
        return found | {name: value for name, value in known.items() if value is not None}

    @property
    def about(self) -> dict[str, Any]:
        """What model this is."""
        return {
            "idmm": version("idmm"), "run": self.run.resolve().name, "model": self.saved.name,
            "parameters": self.parameters, "output": self.output,
        }  # fmt: skip

    @torch.inference_mode()
    def outputs(self, images: torch.Tensor) -> np.ndarray:
        """Returns what torch makes of prepared images, [n, C, S, S] -> float32 [n, width]."""
        return np.concatenate([self.model(part).numpy() for part in images.split(BATCH)])

    # ------------------------------------------------------------------ images
    @cached_property
    def splits(self) -> Splits:
        """The run's images, as they lie there now; UserError where they are gone."""
        data = self.config.data
        data = replace(data, root=self._root or data.root, download=False)
        config = replace(self.config, data=data)
        return open_splits(*stage_of(config).images(config))

    def _prepared(self, split: Split, part: str) -> torch.Tensor:
        """Returns at most :data:`CHECKED` images of a split, prepared as the run evaluates, [n, C, S, S].

        Raises:
            UserError: The images are gone or cannot be read.
        """
        data = replace(self.config.data, on_error="skip", cache="off")  # nobody asks for these again
        if len(split) > CHECKED:
            split = split.take(np.linspace(0, len(split) - 1, CHECKED).round().astype(int))
        crop, scale = CentreCrop(self.size, self.saved.crop_pct), self.saved.range
        store = load_split(split, bound=crop, data=data, part=part, progress=True, scale=scale)
        wanted = self.network.bands and self.network.bands.count
        if wanted and store.bands.count != wanted:
            raise UserError(f"data.root: the {part} images have {store.bands.count} channels; wanted {wanted}")
        return torch.cat([batch["images"] for batch in self.network.split_batches(store, data.workers)])

    def sample(self) -> tuple[Sample, str | None]:
        """Returns images to check by: of the run's test images, else of its training images, else noise, and then why
        there are no others."""
        why = ""
        for part in ("test", "train"):
            try:
                split: Split | None = getattr(self.splits, part)
                if split is None:
                    continue
                images = self._prepared(split, part)
                return Sample(images, f"{len(images)} {'test' if part == 'test' else 'training'} images"), None
            except (UserError, RunError) as error:
                why = why or str(error).splitlines()[0]
        shape = (CHECKED // 4, self.saved.in_chans, self.size, self.size)
        return Sample(torch.randn(shape, generator=torch.Generator().manual_seed(0)), "noise"), why


def _scaling(scale: list) -> str:
    """Says how images of more than 8 bits come to be in [0, 1]."""
    each = "each channel's " if isinstance(scale[0], list) else ""
    return f"of deeper values subtract {each}low and divide by high - low, by range {scale}, and cut off at 0 and 1"
