"""The configs of detection and of semantic segmentation."""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from idmm.config.base import PAIR, Count, FieldErrors, Probability, Side, rising, section
from idmm.config.data import Data
from idmm.config.phases import Needs, Phase
from idmm.config.stages import Backbone, Common, Train

STEP = 32  # pixels. The sides of all images are multiples of it
# of the extra 'dense'
DENSE_LIBRARIES = {"detect": ("pycocotools",), "segment": ("segmentation_models_pytorch",)}


@section
class DenseData(Data):
    """The images."""

    name: Literal["folder"] = "folder"
    """Dataset: only 'folder', your own images."""
    root: str | None = None
    """Folder with annotations/train.json (COCO) and train/*, or with images/train/* and
    masks/train/*.png (255: ignored), and val likewise. Required."""
    in_chans: Literal[1, 3] | None = None
    """Channels of the model: 3 (RGB) or 1 (grey). Default: that of --init, else 3."""
    labelled: ClassVar = None  # type: ignore[misc]  # a key that these commands lack
    labels: ClassVar = None  # type: ignore[misc]  # a key that these commands lack
    folds: ClassVar = None  # type: ignore[misc]  # a key that these commands lack
    fold: ClassVar = None  # type: ignore[misc]  # a key that these commands lack
    bands: ClassVar = None  # type: ignore[misc]  # a key that these commands lack


@section
class DenseModel(Backbone):
    """The backbone, and the feature pyramid on it."""

    pyramid_width: Side = 128
    """Channels of each map of the feature pyramid."""


@section
class DetectModel(DenseModel):
    """The backbone, and the detector on it."""

    cascade: bool = False
    """Three heads of rising overlap, each of which refines the boxes of the one before (Cascade
    R-CNN)."""


@section
class SegmentModel(DenseModel):
    """The backbone, and UPerNet on it."""

    auxiliary: NonNegativeFloat = 0.0
    """Weight of the loss of a second head, on the map of stride 16. Default: 0, no head."""


@section
class DenseTrain(Train):
    """The training loop."""

    compile: ClassVar[bool | None] = False  # type: ignore[misc]  # a key that these commands lack

    optimizer: Literal["adamw", "sgd"] = "adamw"  # Muon is not for their heads
    """AdamW, or SGD with momentum 0.9."""
    epochs: Count = 24
    size: int = Field(320, ge=32)
    """Side of the square that images are scaled to by their long side, and padded (pixels)."""
    batch_size: Count = 4
    lr: PositiveFloat = 2e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.05
    warmup_epochs: NonNegativeFloat = 1.0
    """Linear warm-up (epochs)."""
    schedule: Literal["cosine", "linear", "steps"] = "cosine"  # type: ignore[misc]  # others lack it
    """Learning rate after the warm-up: a cosine or a line to zero, or a tenth after each of
    lr_steps."""
    lr_steps: list[PositiveFloat] = field(default_factory=list)  # type: ignore[misc]  # likewise
    """With schedule steps: epochs after which the lr falls to a tenth, e.g. '[8, 11]'."""
    eval_every: Count = 4
    """Epochs between evaluations. The last epoch is always evaluated."""
    keep: Literal["last", "best"] = "last"
    """Weights to report and export: the last epoch's, or those with the best AP (mIoU) on 'val'."""

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        steps = self.lr_steps
        in_order = bool(steps) and steps == sorted(steps) and steps[-1] < self.epochs
        if self.schedule == "steps" and (self.minutes is not None or not in_order):
            raise FieldErrors(
                {
                    "lr_steps": f"got {steps}, expected rising epochs before the last "
                    f"({self.epochs}), e.g. [8, 11], and no minutes"
                }
            )
        return self


@section
class DenseAugment:
    """Augmentation of images with their boxes or masks."""

    scale: Annotated[list[float], PAIR, rising(4.0)] = field(default_factory=lambda: [0.5, 2.0])
    """Smallest and largest factor by which images are scaled before they are cropped or padded to
    train.size."""
    flip: Probability = 0.5
    """Probability of a horizontal flip."""
    photometric: bool = True
    """Distort brightness, contrast, saturation and hue at random."""


@section
class DetectAugment(DenseAugment):
    """Augmentation of images with their boxes."""

    short_side: Annotated[list[float], PAIR, rising(4096)] | None = None
    """Range of the short side (pixels), instead of scale and squares. train.size bounds the long
    side. Test images have the largest. Default: squares."""


@section
class DenseConfig(Common):
    """Keys of detection and of semantic segmentation."""

    crop_mode: ClassVar = "crop"
    crop_pct: ClassVar = 1.0  # images are put on a square, and none of them is cut off

    data: DenseData = field(default_factory=DenseData)
    model: DenseModel = field(default_factory=DenseModel)
    train: DenseTrain = field(default_factory=DenseTrain)
    augment: DenseAugment = field(default_factory=DenseAugment)

    @property
    def tested_short_side(self) -> int | None:
        """The short side of test images (pixels). None: they are on squares."""
        return None

    @property
    def tested_scales(self) -> list[float]:
        """Factors of train.size at which test images are predicted at the end."""
        return [1.0]

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The one part of the run."""
        train = self.train
        size = train.size
        others = []
        for number, side in enumerate(tested_sides(size, self.tested_scales)):
            if side != size:
                others.append((f"eval_scales[{number}]", side))
        if self.tested_short_side is not None:  # canvases of all sides up to the longest
            size = STEP * math.ceil(size / STEP)
            side = STEP * math.ceil(self.tested_short_side / STEP)
            others = [("augment.short_side", side)]
        label = f"{self.COMMAND} {train.size} px"
        return (
            Phase(
                number=1,
                field="train.size",
                label=label,
                size=size,
                epochs=train.epochs,
                batch_size=train.batch_size,
                lr=train.lr,
                other_sizes=tuple(others),
            ),
        )

    @property
    def needs(self) -> Needs:
        """The images that the run needs."""
        return Needs(val=self.train.keep == "best")

    def train_side(self, size: int) -> int:
        """Return the short side of training images to store for views of ``size`` (pixels)."""
        return self.tested_short_side or math.ceil(size * max(1.0, *self.augment.scale))

    def eval_side(self, size: int) -> int:
        """Return the short side of images to evaluate on at ``size`` (pixels) to store."""
        return self.tested_short_side or size

    def layers(self, classes: int, masks: bool) -> dict[str, Any]:
        """Return the arguments of :func:`idmm.dense.network.build_network`, without the backbone.

        ``masks``: whether boxes have outlines.
        """
        return {"task": self.COMMAND, "classes": classes, "width": self.model.pyramid_width}


@section
class DetectConfig(DenseConfig):
    """Train a detector of boxes (and masks if there are any), from a pretrained backbone or from
    scratch."""

    COMMAND: ClassVar = "detect"

    model: DetectModel = field(default_factory=DetectModel)
    augment: DetectAugment = field(default_factory=DetectAugment)

    @property
    def tested_short_side(self) -> int | None:
        """The largest of ``augment.short_side``."""
        if self.augment.short_side is None:
            return None
        return math.ceil(self.augment.short_side[1])

    def layers(self, classes: int, masks: bool) -> dict[str, Any]:
        return super().layers(classes, masks) | {"masks": masks, "cascade": self.model.cascade}


@section
class SegmentConfig(DenseConfig):
    """Train a semantic segmentation (a class per pixel), from a pretrained backbone or from
    scratch."""

    COMMAND: ClassVar = "segment"

    model: SegmentModel = field(default_factory=SegmentModel)
    eval_scales: list[Annotated[float, Field(gt=0, le=4)]] = Field(
        default_factory=lambda: [1.0], min_length=1
    )
    """Factors of train.size at which test images are predicted and averaged at the end, e.g. '[0.5,
    1.0, 1.5]'."""

    @property
    def tested_scales(self) -> list[float]:
        """``eval_scales``."""
        return self.eval_scales

    def layers(self, classes: int, masks: bool) -> dict[str, Any]:
        return super().layers(classes, masks) | {"auxiliary": self.model.auxiliary}


def tested_sides(size: int, scales: Sequence[float]) -> list[int]:
    """Return the side (pixels) at which images of ``size`` are predicted per scale: a multiple of
    32, or ``size``."""
    return [
        size if scale == 1 else max(STEP, round(size * scale / STEP) * STEP) for scale in scales
    ]
