"""The configs of detection and of semantic segmentation."""

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from idmm.config.base import FieldError, rising, section
from idmm.config.data import Data
from idmm.config.stages import Backbone, Common
from idmm.config.train import Train

STEP = 32  # pixels, which the sides of all images are multiples of
DENSE_LIBRARIES = {"detect": ("pycocotools",), "segment": ("segmentation_models_pytorch",)}  # of the extra 'dense'


_OF_CLASSES = ("labels", "labelled", "folds", "fold", "bands")
HIDDEN = tuple(f"data.{key}" for key in ("name", *_OF_CLASSES, "subset.per_class", "in_chans"))  # left out of --help


@section
class DenseData(Data):
    """The images."""

    name: Literal["folder"] = "folder"

    @model_validator(mode="after")
    def _check_keys(self):
        given = {key: getattr(self, key) for key in _OF_CLASSES}
        given["subset"] = self.subset and self.subset.per_class
        given["in_chans"] = None if self.in_chans in (1, 3) else self.in_chans
        faults = [FieldError(key, "boxes and masks have no use for it") for key in given if given[key] is not None]
        if faults:
            faults[0].each = faults
            raise faults[0]
        return self


@section
class DetectData(DenseData):
    """The images."""

    root: str | None = None
    """Folder in COCO's layout (required): ROOT/annotations/train.json and val.json (or test.json) over the images of
    ROOT/train and ROOT/val, or COCO's own names (instances_train2017.json, train2017)."""


@section
class SegmentData(DenseData):
    """The images."""

    root: str | None = None
    """Folder of images and masks (required): ROOT/images/{train,val}/* and ROOT/masks/{train,val}/*.png of the same
    names, whose pixels are numbers of classes, 255 ignored; ROOT/classes.txt names them; or ADE20K's layout."""


@section
class DenseModel(Backbone):
    """The backbone, and the feature pyramid on it."""

    pyramid_width: int = Field(128, ge=8)
    """Channels of each map of the feature pyramid (channels)."""


@section
class DetectModel(DenseModel):
    """The backbone, and the detector on it."""

    masks: bool | None = None
    """Predict a mask for each box, too (Mask R-CNN); null: where all training boxes have an outline or a mask."""


@section
class DenseTrain(Train):
    """The training loop."""

    epochs: int = Field(24, ge=1)
    size: int = Field(320, ge=32)
    """Side of the square that images are put on (pixels): their long side is scaled to it, the rest is padded."""
    batch_size: int = Field(4, ge=1)
    lr: float = Field(2e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.05, ge=0)
    warmup_epochs: float = Field(1.0, ge=0)
    """Linear warm-up (epochs)."""
    schedule: Literal["cosine", "linear", "steps"] = "cosine"
    """After the warm-up: a cosine or a straight line to zero, or a tenth after each of lr_steps."""
    lr_steps: list[Annotated[float, Field(gt=0)]] = field(default_factory=list)
    """With schedule steps: after how many epochs the lr falls to a tenth, e.g. '[8, 11]' (epochs)."""
    eval_every: int = Field(4, ge=1)
    """Evaluate every so many epochs, and always after the last (epochs)."""
    keep: Literal["last", "best"] = "last"
    """Weights to report and export: the last epoch's, or those of the evaluated epoch with the best AP (mIoU of
    segmentation) on 'val' (the earlier of equals). Best needs a val split beside the split that is reported."""

    @model_validator(mode="after")
    def _check_steps(self):
        steps = self.lr_steps
        if self.schedule != "steps":
            fault = "expected none without schedule steps" if steps else None
        elif self.minutes is not None:
            fault = "minutes decide on the epochs; expected schedule cosine or linear"
        else:
            right = steps and steps == sorted(steps) and steps[-1] < self.epochs
            fault = None if right else f"expected rising epochs before the last ({self.epochs}), e.g. [8, 11]"
        if fault:
            raise FieldError("lr_steps", f"got {steps}, {fault}")
        if self.compile:
            raise FieldError("compile", "got true, but boxes and masks are not compiled; expected false")
        return self


@section
class DenseAugment:
    """Augmentation of images with their boxes or masks."""

    scale: rising(4.0) = field(default_factory=lambda: [0.5, 2.0])
    """Smallest and largest factor by which images are scaled before they are cropped or padded to train.size."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    photometric: bool = True
    """Distort brightness, contrast, saturation and hue at random."""


@section
class DetectConfig(Common):
    """Stage 2 for boxes: train a detector, of masks too where there are any, from a pretrained backbone or from
    scratch."""

    STAGE: ClassVar[str] = "detect"
    HIDDEN: ClassVar = HIDDEN

    data: DetectData = field(default_factory=DetectData)
    model: DetectModel = field(default_factory=DetectModel)
    train: DenseTrain = field(default_factory=DenseTrain)
    augment: DenseAugment = field(default_factory=DenseAugment)


@section
class SegmentConfig(Common):
    """Stage 2 for masks: train a semantic segmentation, a class for each pixel, from a pretrained backbone or from
    scratch."""

    STAGE: ClassVar[str] = "segment"
    HIDDEN: ClassVar = HIDDEN

    data: SegmentData = field(default_factory=SegmentData)
    model: DenseModel = field(default_factory=DenseModel)
    train: DenseTrain = field(default_factory=DenseTrain)
    augment: DenseAugment = field(default_factory=DenseAugment)
    eval_scales: list[Annotated[float, Field(gt=0, le=4)]] = Field(default_factory=lambda: [1.0], min_length=1)
    """Factors of train.size at which the test images are predicted, the mean of which is the result, e.g.
    '[0.5, 0.75, 1.0, 1.25, 1.5, 1.75]'; between epochs 1 alone."""


DenseConfig = DetectConfig | SegmentConfig


def tested_sides(size: int, scales: Sequence[float]) -> list[int]:
    """Returns the sides (pixels) at which images of ``size`` are predicted for each of the ``scales``: multiples of 32,
    but ``size`` itself."""
    return [size if scale == 1 else max(STEP, round(size * scale / STEP) * STEP) for scale in scales]
