"""The flags of the commands that look at finished runs and use them: report, explore, predict, embed and the like."""

from dataclasses import field
from typing import Literal

from pydantic import Field

from idmm.config.base import section


@section
class ReportConfig:
    """A page on one or several finished runs: results, curves, confusions, settings; opens offline and prints."""

    runs: list[str] = Field(min_length=1)
    """Run folders, e.g. runs/a or '[runs/a, runs/b]'; a folder that holds some (of idmm train, a demo) means these."""
    out: str | None = None
    """Folder for report.html and its pictures; null: RUN/report of the first run."""


@section
class ExploreConfig:
    """Which training images are alike, as the run's N-way layer has learned it: nearest images, clusters, likely
    duplicates and wrong labels; as tables and sheets of thumbnails."""

    run: str
    """A finished run folder, best of pretraining by idmm: other runs have no rows of images and go by features."""
    out: str | None = None
    """Folder for the tables and sheets; null: RUN/explore."""
    batch_size: int = Field(64, ge=1)
    """Images that go through the network at a time (images)."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the network runs, in fp32; 'auto': cuda, else mps, else cpu."""


@section
class UseConfig:
    """How a run's model is used on files."""

    init: str
    """A run folder, or a .safetensors or .pth file in timm's format with its JSON beside it; for features also public
    weights, timm:NAME or hf-hub:ORG/NAME."""
    batch_size: int = Field(64, ge=1)
    """Images that go through the network at a time (images)."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the network runs, in fp32; 'auto': cuda, else mps, else cpu."""
    max_pixels: int = Field(100_000_000, ge=1)
    """Images with more pixels than this are refused as bombs (pixels)."""


@section
class PredictConfig(UseConfig):
    """The classes of images, by a run that has a classifier: a row for each image and rank, with its probability. By a
    run of idmm detect or segment the boxes or masks on images, and pictures of them."""

    paths: list[str] = Field(min_length=1)
    """Images, and folders of images at any depth."""
    out: str | None = None
    """Classes: file to write, .csv; null: CSV on standard output. Boxes and masks: a folder that is new or empty."""
    top_k: int = Field(1, ge=1)
    """Likeliest classes of each image, a row each (ranks)."""
    min_score: float | None = Field(None, ge=0, le=1)
    """Boxes of a lower score are left out (from 0 to 1); null: 0.5. The networks give none below 0.05."""
    batch_size: int | None = Field(None, ge=1)
    """Images that go through the network at a time (images); null: 64, of boxes and masks 4."""


@section
class EmbedConfig(UseConfig):
    """The features of images, a vector each."""

    paths: list[str] = Field(min_length=1)
    """Images, and folders of images at any depth."""
    out: str
    """File to write, .npz: arrays paths [N] and features [N, d]."""


@section
class SimilarConfig(UseConfig):
    """The images that are most like one: by the cosine of their features."""

    query: str
    """The image to compare with."""
    paths: list[str] = Field(min_length=1)
    """Images, and folders of images at any depth, to look in."""
    top_k: int = Field(8, ge=1)
    """Images to show (images)."""
    out: str = "similar.png"
    """Picture of the query and what is nearest to it, .png."""


@section
class RunImages:
    """The images of the run."""

    root: str | None = None
    """Folder of the run's images, where they lie elsewhere now; null: as in the run's config.yaml."""


@section
class ExportConfig:
    """The model in a form that other programs run: ONNX, or a folder for timm or Hugging Face. What is
    written is compared with torch on the run's own images first."""

    init: str
    """A run folder: with its classifier where it has one, else the backbone."""
    format: Literal["onnx", "timm", "hf"]
    """'onnx', a file (needs the extra 'export'), 'timm', a folder with config.json, model.safetensors and README.md,
    the model card, or 'hf', the same with what the Hugging Face Hub reads from a card."""
    out: str
    """What to write: a file ending in .onnx, or a folder that is new or empty."""
    data: RunImages = field(default_factory=RunImages)
