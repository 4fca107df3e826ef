"""The flags of the commands that use finished runs: predict, embed, similar, explore, report and export."""

from typing import Literal

from pydantic import Field

from idmm.config.base import REQUIRED, section


@section
class Inference:
    """How a network runs on images."""

    batch_size: int = Field(64, ge=1)
    """Images that go through the network at a time."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of the network, in fp32. 'auto': cuda, else mps, else cpu."""


@section
class ReportConfig:
    """Write one page on one or several finished runs: results, curves, confusions and settings. It opens offline."""

    runs: list[str] = Field(REQUIRED, min_length=1)
    """Run folders, e.g. runs/a or '[runs/a, runs/b]', or a folder that contains runs."""
    out: str | None = None
    """Folder for report.html. Default: RUN/report of the first run."""


@section
class ExploreConfig(Inference):
    """Find likely duplicates, wrong labels and nearest images among training images, with thumbnails and a map."""

    run: str = REQUIRED
    """A finished run folder of pretraining or fine-tuning. Its features are compared."""
    out: str | None = None
    """Folder for the tables and sheets of thumbnails. Default: RUN/explore."""


@section
class UseConfig(Inference):
    """How a run's model is used on files."""

    init: str = REQUIRED
    """Run folder, or weights file with its JSON. embed and similar also take timm:NAME and hf-hub:ORG/NAME."""
    paths: list[str] = Field(REQUIRED, min_length=1)
    """Images, and folders of images at any depth."""
    max_pixels: int = Field(100_000_000, ge=1)
    """Largest image that is read (pixels). It protects against decompression bombs."""


@section
class PredictConfig(UseConfig):
    """Predict the classes of images with their probabilities (or boxes or masks)."""

    out: str | None = None
    """CSV file for classes, or new folder for boxes and masks. Default: standard output, for classes only."""
    top_k: int = Field(1, ge=1)
    """Most probable classes per image, one row each."""
    min_score: float | None = Field(None, ge=0, le=1)
    """Lowest score of boxes, from 0 to 1. Networks give none below 0.05. Default: 0.5."""
    batch_size: int | None = Field(None, ge=1)
    """Images that go through the network at a time. Default: 64, for boxes and masks 4."""


@section
class EmbedConfig(UseConfig):
    """Write the features of images, one vector per image."""

    out: str = REQUIRED
    """File to write (.npz), with the arrays paths [N] and features [N, d]."""


@section
class SimilarConfig(UseConfig):
    """Find the images that are most similar to one image, by the cosine of their features."""

    query: str = REQUIRED
    """The image to compare with."""
    top_k: int = Field(8, ge=1)
    """Images to show."""
    out: str = "similar.png"
    """Figure of the query and its neighbours (.png)."""


@section
class ExportConfig:
    """Export the model to ONNX, or to a folder for timm or Hugging Face. The result is compared with torch."""

    init: str = REQUIRED
    """A run folder. A fine-tuned run is exported with its classifier, a pretrained one as a backbone."""
    format: Literal["onnx", "timm", "hf"] = REQUIRED
    """'onnx': a file (needs the extra 'export'). 'timm': a folder with a model card. 'hf': the same for the Hub."""
    out: str = REQUIRED
    """File ending in .onnx, or a new or empty folder."""
