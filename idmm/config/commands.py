"""The keys of a probe, as a stage and as a command, and the flags of the other commands: fewlabel, demo, data."""

from dataclasses import field, fields
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from idmm.config import Data, FinetuneModel, Model, section
from idmm.config.base import FieldError, once, several
from idmm.config.stages import Backbone


@section
class FeatureConfig:
    """How frozen features are taken and measured."""

    seed: int = Field(0, ge=0)
    """Seed of the images held out to choose the probe's strength by, and of an untrained backbone's weights."""
    size: int | None = Field(None, ge=8)
    """Side of the images; null: the one that the model was trained at last, else timm's for its name (pixels)."""
    crop_pct: float = Field(0.875, gt=0, le=1)
    """The short side is resized to size / crop_pct, then the centre is cropped."""
    batch_size: int = Field(64, ge=1)
    """Images that go through the network at a time (images)."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the network runs, in fp32; 'auto': cuda, else mps, else cpu."""
    data: Data = field(default_factory=Data)
    model: Backbone = field(default_factory=Backbone)


@section
class ProbeConfig(FeatureConfig):
    """A probe as a stage: kNN and a linear probe on a frozen backbone, in a folder like any other run's."""

    out: str | None = None
    """Folder for all that the run writes (required)."""
    init: str | None = None
    """Backbone: a run folder, a file in timm's format, or public weights, timm:NAME or hf-hub:ORG/NAME; null: fresh
    weights of ``seed``."""
    model: FinetuneModel = field(default_factory=FinetuneModel)


def probe_config(given: FeatureConfig, init: str | None) -> ProbeConfig:
    """Returns the probe of a backbone as a command is asked for it."""
    values = {item.name: getattr(given, item.name) for item in fields(FeatureConfig)}
    return ProbeConfig(init=init, **values | {"model": FinetuneModel(name=given.model.name, kwargs=given.model.kwargs)})


@section
class ProbeCommand(FeatureConfig):
    """How good are frozen features? Accuracy of a weighted vote of the 20 nearest neighbours and of a linear probe on
    the test images, with 95 % intervals. Features are kept on the disk for the next time."""

    init: str | None = None
    """Backbone: a run folder, a .safetensors or .pth file in timm's format with its JSON beside it, or public weights,
    timm:NAME or hf-hub:ORG/NAME; null: model.name with fresh weights, or hog, which has none."""
    out: str | None = None
    """Folder for probe.json; null: the table on standard output only."""

    @model_validator(mode="after")
    def _check(self):
        if self.init is None and self.model.name is None:
            raise FieldError("init", "missing; name weights, or give --model.name")
        return self


@section
class FewLabelConfig(FeatureConfig):
    """Accuracy as a function of the labelled images a class: of frozen features, or of fine-tuning; a table, and a
    picture of the curves with the spread over draws."""

    init: Annotated[list[str], BeforeValidator(several), AfterValidator(once)] = field(default_factory=list)
    """Backbones, e.g. runs/a or '[runs/a, runs/b]': run folders, files in timm's format with their JSON, or public
    weights, timm:NAME or hf-hub:ORG/NAME; model.name adds one without weights, e.g. hog."""
    out: str
    """Folder for fewlabel.json, fewlabel.md, fewlabel.png, and the runs of fine-tuning."""
    per_class: Annotated[list[Annotated[int, Field(ge=1)]] | None, BeforeValidator(several), AfterValidator(once)] = (
        Field(None, min_length=1)
    )
    """Labelled images of each class (images); null: 1, 2, 5, 10 and 20, or as many as the smallest class has."""
    seeds: int = Field(5, ge=1)
    """Draws of them, by data.subset's seeds from 0; fine-tuning takes the same seed for everything else."""
    untrained: bool = False
    """Measure the same backbone with fresh weights, too; fine-tuning: train it from scratch."""
    finetune: str | None = None
    """Fine-tune by this YAML file of fine-tuning's keys or recipe of 'idmm configs'; images, out, init and seeds are
    given here. Null: kNN and a linear probe on frozen features."""

    @model_validator(mode="after")
    def _check(self):
        if not self.init and self.model.name is None:
            raise FieldError("init", "missing; name weights, or give --model.name")
        return self


@section
class TrainModel(Model):
    """The backbone."""

    start: Literal["timm", "structured", "auto"] = "auto"
    """Fresh weights, as model.start of other commands; auto: structured for timm's vision transformers alone."""


@section
class TrainCommand:
    """From a folder of images to a classifier, in a given time: looks at the images and their labels, takes the
    backbone, the image size and the stages that were measured to do best for so many, and says why."""

    out: str
    """Folder for the classifier and all else that is written; the same command goes on where it stopped."""
    minutes: float = Field(20.0, gt=0)
    """Time for everything, from the command's start to its result (minutes)."""
    compare: bool = False
    """Spend as long again on training from scratch, and say whether pretraining or pseudo-labels helped."""
    init: str | None = None
    """Weights to start from: a run, a file, timm:NAME or hf-hub:ORG/NAME; null: none."""
    way: Literal["auto", "scratch", "finetune", "pretrain", "joint"] = "auto"
    """'scratch' trains on the labelled images alone, 'finetune' does so from the weights of --init; 'pretrain' learns
    from all images without labels first, 'joint' with the labels that there are, and both fine-tune then; with
    pseudo-labels a fresh network learns from all images then, without --init. 'auto': finetune where there is an
    --init, else pretrain where pseudo-labels are made, else scratch."""
    pseudolabel: bool | None = None
    """Give the images without a label one by what was learned before, and train the classifier on
    all of them; null: where a folder has at least 3 times as many images as labels, and a label in each class."""
    size: int | None = Field(None, ge=8)
    """Image side; null: that of the images, or less where the time would not suffice for it, beside pseudo-labels
    another one for stages on the given labels alone (pixels)."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of mirroring an image in training; 0 where mirrored images are others (writing, spectrograms)."""
    jitter: float = Field(0.4, ge=0)
    """Strength of brightness and contrast in the views of the first of two stages; 0 where how bright an image is tells
    its class (spectrograms, measurements)."""
    seed: int = Field(0, ge=0)
    """Seed of every random choice."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; 'auto': cuda, else mps, else cpu."""
    data: Data = field(default_factory=Data)
    model: TrainModel = field(default_factory=TrainModel)


@section
class DemoConfig:
    """idmm train on scikit-learn's digits, 5 of each class labelled, against training from scratch for as long and
    the baseline on hand-made features; exits 1 if the mean gain over the better of both is under 2 points."""

    out: str = "runs/demo"
    """Folder for the images, the runs, demo.json and comparison.png."""
    minutes: float = Field(1.0, gt=0)
    """Time for each of the two trainings of a seed (minutes)."""
    seeds: int = Field(1, ge=1)
    """Seeds to average over, from 0; each drives the draw of the labelled images and all else (runs)."""


@section
class ConfigsConfig:
    """The recipes that ship, which --config takes by their names from any folder: NAME for those of the command's own
    stage, FOLDER/NAME for all."""


@section
class DataListConfig:
    """All datasets: their names, classes, training and test images."""


@section
class DataInfoConfig:
    """What is known of a dataset: figures of its protocol, files it needs, where they come from, what to cite."""

    name: str
    """Dataset, one of 'idmm data list'."""


@section
class DataDownloadConfig:
    """Fetch a dataset, check it and put it in place; goes on where it was interrupted."""

    name: str
    """Dataset, one of 'idmm data list'."""
    root: str
    """Folder to put it into; the same is data.root later."""


@section
class DataCheckConfig:
    """Look at every image of a dataset before training on it: unreadable files, classes, sizes, duplicates within and
    across splits, and what a network has to beat. Exits 1 if anything was found that should be mended."""

    name: str | None = None
    """Dataset, one of 'idmm data list'; null: 'folder', your own images under --root."""
    root: str | None = None
    """Folder of the dataset."""
    out: str | None = None
    """Folder for check.json, check.png (the sheet of the worst pairs) and exclude.txt (images that should be left out,
    for --data.exclude); null: text only."""
    exclude: str | None = None
    """As data.exclude: images that are left out already, a path under root a line; exclude.txt goes on from it."""
    labels: str | None = None
    """As data.labels: a CSV file of path,class for images that are not sorted into class folders."""
    max_pixels: int = Field(100_000_000, ge=1)
    """Images with more pixels than this count as unreadable (pixels)."""

    @model_validator(mode="after")
    def _check(self):
        if self.name is None and self.root is None:
            raise FieldError("name", "missing; give a dataset of 'idmm data list', or a folder")
        return self
