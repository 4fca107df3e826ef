"""The flags of the commands that are no training stage."""

from dataclasses import field, fields
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from idmm.config.base import (
    REQUIRED,
    Count,
    CropMode,
    Device,
    Fraction,
    Probability,
    Side,
    Texts,
    as_list,
    section,
)
from idmm.config.data import Data
from idmm.config.phases import Needs, Phase
from idmm.config.stages import Backbone, Common, Model


@section
class Inference:
    """How a network runs on images."""

    batch_size: Count = 64
    """Images that go through the network at a time."""
    device: Device = "auto"
    """Device of the network. 'auto': cuda, else mps, else cpu."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """Precision of the network. 'auto': the faster one. bf16 changes a few classes."""


@section
class FeatureConfig(Inference):
    """How frozen features are computed and measured."""

    ONE_OF: ClassVar = ("init", "model.name")  # of which one must be given

    seed: NonNegativeInt = 0
    """Seed of the images held out to choose the probe's strength, and of an untrained backbone's
    weights."""
    size: Side | None = None
    """Image side (pixels). Default: the size that the model was last trained at, else timm's."""
    crop_mode: CropMode = "crop"
    """Images: 'crop' their centre, 'pad' them with a border, or 'squash' them to a square. 'auto':
    by the shapes of the training images."""
    crop_pct: Fraction = 0.875
    """Share of an image's side that its centre crop keeps. The short side is first resized to size
    / crop_pct."""
    data: Data = field(default_factory=Data)
    model: Backbone = field(default_factory=Backbone)


@section
class ProbeConfig(FeatureConfig):
    """Measure frozen features: accuracy of kNN and of a linear probe on the test images, with 95 %
    intervals."""

    COMMAND: ClassVar = "probe"
    resume: ClassVar = "auto"

    init: str | None = None
    """A run folder, a weights file with its JSON, timm:NAME or imagenet. Default: model.name,
    untrained."""
    out: str | None = None
    """Folder for result.json. Default: only print the table."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The one part of the run. Each image is seen once, in its centre crop."""
        assert self.size is not None  # of a resolved config
        return (Phase(1, "size", "probe", self.size, epochs=1, batch_size=1),)

    @property
    def needs(self) -> Needs:
        """The images that the run needs."""
        return Needs()

    def train_side(self, size: int) -> None:
        """Return None: images are stored as centre crops of ``size`` (pixels)."""

    def eval_side(self, size: int) -> None:
        """Return None, as for training images."""


@section
class FewLabelConfig(FeatureConfig):
    """Measure the accuracy of frozen features against labelled images per class: a table and a
    figure."""

    init: Texts = field(default_factory=list)
    """Backbones, e.g. runs/a or '[runs/a, timm:resnet18.a1_in1k]'. model.name adds an untrained
    one, e.g. hog."""
    out: str = REQUIRED
    """Folder for fewlabel.json, fewlabel.md, fewlabel.png."""
    per_class: Annotated[list[Count] | None, BeforeValidator(as_list)] = Field(None, min_length=1)
    """Labelled images per class, e.g. '[1, 5]'. Default: 1, 2, 5, 10 and 20, up to the size of the
    smallest class."""
    seeds: Count = 5
    """Draws of labelled images. Draw n has data.subset.seed n, from 0."""
    untrained: bool = False
    """Also measure each backbone with untrained weights."""

    def probe(self, init: str | None) -> ProbeConfig:
        """Return the probe of one backbone."""
        same = {item.name: getattr(self, item.name) for item in fields(FeatureConfig)}
        return ProbeConfig(init=init, out=self.out, **same)


@section
class TrainModel(Model):
    """The backbone."""

    name: str | None = None
    """The network that learns, any timm model. Default: that of --init, else a small ConvNet."""
    start: Literal["timm", "structured", "auto"] = "auto"


@section
class TrainData(Data):
    """The images."""

    folds: ClassVar = None  # type: ignore[misc]  # a key that this command lacks
    fold: ClassVar = None  # type: ignore[misc]  # likewise


@section
class TrainCommand(Common):
    """Train a classifier on a folder of images in a given time: a linear one on fixed features,
    with a network next to them if that is better on held-out images. The choices are printed."""

    COMMAND: ClassVar = "train"
    ONE_OF: ClassVar = ("data.root", "data.name")

    out: str = REQUIRED
    """Folder for the classifier and all other files. Repeat the command to resume."""
    minutes: PositiveFloat = 20.0
    """Time for everything, from the start of the command to its result (minutes)."""
    compare: bool = False
    """Also train from scratch, without hand-made features, in as much time again. The result is
    compared with it."""
    resume: ClassVar = "auto"  # type: ignore[misc]  # a key that this command lacks
    way: Literal["auto", "pretrain"] = "auto"
    """pretrain: learn from all images by IDMM first. auto: do not."""
    size: Side | None = None
    """Image side of the network (pixels). Default: that of the images, at most 224, or by the
    weights. Less if time is short."""
    flip: Probability = 0.5
    """Probability of a horizontal flip. Set to 0 if mirroring changes the meaning (text,
    spectrograms)."""
    jitter: NonNegativeFloat = 0.4
    """Strength of brightness and contrast changes in pretraining. Set to 0 if brightness identifies
    the class."""
    device: Device = "auto"
    """Device to train on. 'auto': cuda, else mps, else cpu."""
    data: TrainData = field(default_factory=TrainData)
    model: TrainModel = field(default_factory=TrainModel)


@section
class SuggestConfig(Inference):
    """Choose the images to label next: lists for --data.labels to fill in, with sheets of the
    pictures."""

    ONE_OF: ClassVar = ("data.root",)

    out: str = REQUIRED
    """New folder for to_label.csv, test.csv, labels.csv (the labels so far) and sheets. Pass it to
    --data.labels."""
    count: Count = 50
    """Images to label next."""
    test: NonNegativeInt = 0
    """Random images to set aside first, to label and to test on."""
    init: str | None = None
    """A run folder, a weights file with its JSON, or timm:NAME, whose features are compared.
    Default: hand-made ones."""
    seed: NonNegativeInt = 0
    """Seed of the features, of the clusters and of the images to test on."""
    data: TrainData = field(default_factory=TrainData)


@section
class DemoConfig:
    """Run idmm train on scikit-learn's digits with 5 labels per class, and compare with baselines.
    These are training from scratch and hand-made features. Exits with 1 if the mean gain over the
    better is under 2 points."""

    out: str = "runs/demo"
    """Folder for the images, the runs, demo.json and comparison.png."""
    minutes: PositiveFloat = 1.0
    """Time for each of the two trainings of a seed (minutes)."""
    seeds: Count = 1
    """Seeds to average over, from 0. Each drives the draw of the labelled images and the
    training."""


@section
class CompletionConfig:
    """Print the script with which a shell completes commands and flags. Add it to the shell's own
    start file."""

    shell: Literal["bash", "zsh", "fish"] = REQUIRED
    """The shell."""


@section
class ConfigsConfig:
    """List the recipes that --config takes by name."""


@section
class DataListConfig:
    """List all datasets with their classes, training and test images."""


@section
class DataInfoConfig:
    """Show a dataset's sizes, files, source, licence and citation."""

    name: str = REQUIRED
    """Dataset, one of 'idmm data list'."""


@section
class DataDownloadConfig(DataInfoConfig):
    """Download a dataset, check it and unpack it. Repeat the command to resume."""

    root: str = REQUIRED
    """Folder to put it into. Pass the same as data.root later."""


@section
class DataCheckConfig:
    """Check every image of a dataset: unreadable files, class sizes, duplicates, leaks, and a
    baseline to beat. Exits with 1 if something should be fixed."""

    ONE_OF: ClassVar = ("name", "root")

    name: str | None = None
    """Folder of your own images, or a dataset of 'idmm data list'. Default: 'folder', your images
    under --root."""
    root: str | None = None
    """Folder of the dataset. Default: none."""
    out: str | None = None
    """Folder for check.json, check.png (worst pairs) and exclude.txt (for --data.exclude). Default:
    only print."""
    exclude: str | None = None
    """File of images to skip, one path under root per line. New ones are added to it in
    exclude.txt. Default: none."""
    labels: str | None = None
    """CSV file of path,class for images that are not in class folders. Default: folders are the
    classes."""


# ---------------------------------------------------------------------- commands on finished runs
@section
class ReportConfig:
    """Write one page on one or several finished runs: results, curves, confusions and settings. It
    opens offline."""

    runs: Texts = Field(REQUIRED, min_length=1)
    """Run folders, e.g. runs/a or '[runs/a, runs/b]', or a folder that contains runs."""
    out: str | None = None
    """Folder for report.html. Default: RUN/report of the first run."""


@section
class ExploreConfig(Inference):
    """Find likely duplicates, wrong labels and nearest images among a run's images, with thumbnails
    and a map."""

    runs: Texts = Field(REQUIRED, min_length=1)
    """A finished run folder of pretraining or fine-tuning, whose features are compared. Further
    ones join the map."""
    classes: Texts = field(default_factory=list)
    """Classes on the map, e.g. '[cat, dog]'. Default: all, the ten largest in colour."""
    out: str | None = None
    """Folder for tables and sheets of thumbnails. Default: RUN/explore, or RUN/stage1/explore if
    there is a stage 1."""


@section
class UseConfig(Inference):
    """How a run's model is used on files."""

    init: str = REQUIRED
    """Run folder, or weights file with its JSON. embed and similar also take timm:NAME or
    imagenet."""
    paths: Texts = Field(REQUIRED, min_length=1)
    """Images, and folders of images at any depth."""


@section
class PredictConfig(UseConfig):
    """Predict the classes of images with their probabilities (or boxes or masks)."""

    out: str | None = None
    """CSV file for classes, or new folder for boxes and masks. Default: standard output, for
    classes only."""
    top_k: Count = 1
    """Most probable classes per image, one row each."""
    min_score: Probability | None = None
    """Lowest score of boxes, from 0 to 1. Networks give none below 0.05. Default: 0.5."""
    batch_size: Count | None = None  # type: ignore[assignment]  # null depends on the task
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
    top_k: Count = 8
    """Images to show."""
    out: str = "similar.png"
    """Figure of the query and its neighbours (.png)."""


@section
class ExportConfig:
    """Export the model to ONNX, or to a folder for timm or Hugging Face. The result is compared
    with torch."""

    init: str = REQUIRED
    """A run folder. A fine-tuned run is exported with its classifier, a pretrained one as a
    backbone."""
    format: Literal["onnx", "timm", "hf"] = REQUIRED
    """'onnx': a file (needs the extra 'export'). 'timm': a folder with a model card. 'hf': the same
    for the Hub."""
    out: str = REQUIRED
    """File ending in .onnx, or a new or empty folder."""
