"""The pretraining methods: one class each with its options, default views, colours and needs.

To add a method to the package, write a class here, add it to ``AnyMethod``, and put its loss into
``idmm/methods/NAME.py`` and its recipe into ``configs/pretrain/NAME.yaml``. From outside, call
:func:`idmm.methods.register_method`. Widths and temperatures are from Table 10 of the IDMM paper.
Values that the table leaves out are from the methods' own papers and releases.
"""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat

from idmm.config.base import Count, Probability, section
from idmm.config.data import CropGroup
from idmm.errors import UserError, needed

BYOL_JITTER = [0.4, 0.4, 0.2, 0.1]  # of BYOL, also used by MoCo v3 and DINO


def byol_crops(low: float) -> tuple[CropGroup, CropGroup]:
    """Return BYOL's two global crops: the first is always blurred, the second rarely, but it may be
    solarized."""
    scale = [low, 1.0]
    return (
        CropGroup(count=1, scale=scale, blur_prob=1.0),
        CropGroup(count=1, scale=scale, blur_prob=0.1, solarize_prob=0.2),
    )


@section
class Method:
    """The pretraining method and its options. An option of another method is an error."""

    # if ``views.crops`` is null
    CROPS: ClassVar[tuple[CropGroup, ...]] = (CropGroup(count=2, scale=[0.2, 1.0]),)
    # if null in ``views`` and different from IDMM's
    COLOURS: ClassVar[dict[str, Any]] = {}
    # if ``train.warmup_epochs`` is null. None: the family's
    WARMUP_EPOCHS: ClassVar[float | None] = None
    NEEDS_LABELS: ClassVar[bool] = False
    CROPS_COMPARED: ClassVar[tuple[int, int | None]] = (1, None)  # fewest and most per image
    LIBRARIES: ClassVar[tuple[str, ...]] = ()  # of the extra 'baselines'

    name: str
    """Pretraining method. supcon and supervised need labels. All but idmm and supervised need the
    extra 'baselines'."""

    def libraries(self) -> set[str]:
        """Return the libraries that the method needs with its options."""
        return {*self.LIBRARIES}

    def check_libraries(self) -> None:
        """Raise UserError if a library is missing."""
        needed(f"method.name: {self.name}", sorted(self.libraries()), "baselines")

    def check_crops(self, crops: list[CropGroup]) -> None:
        """Raise UserError if the method cannot compare so many crops per image."""
        count = sum(group.count for group in crops)
        fewest, most = self.CROPS_COMPARED
        if fewest <= count <= (most or count):
            return
        expected = f"{fewest}" if most else f"at least {fewest}"
        raise UserError.of(
            "views.crops",
            f"got {count} crops per image, but {self.name} compares crops, expected {expected}",
        )


@section
class Mixed(Method):
    """Options of methods with smoothed labels and CutMix."""

    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """Share of the target that goes to the other instances (or classes): epsilon of Eq. 17."""
    cutmix_alpha: NonNegativeFloat = 0.5
    """CutMix draws its share of pixels from Beta(alpha, alpha). 0: no CutMix."""


@section
class Projected(Method):
    """Options of methods with an optional MLP between the features and the loss."""

    projection: bool = True
    """Put a projection head (a two-layer MLP) between the features and the loss."""
    hidden_dim: Count | None = None
    """Hidden width of the projection head. Default: the width of the features, for mocov3 4096, for
    dino 2048."""
    dim: Count | None = None
    """Output width of the projection head. Default: 256."""

    def libraries(self) -> set[str]:
        return {*self.LIBRARIES, "lightly"} if self.projection else {*self.LIBRARIES}


@section
class IDMM(Projected, Mixed):
    """Parametric instance discrimination with label smoothing, CutMix and small crops (ECCV
    2022)."""

    CROPS: ClassVar = (CropGroup(count=2, scale=[0.14, 1.0]), CropGroup(count=4, scale=[0.05, 0.4]))

    name: Literal["idmm"] = "idmm"
    projection: bool = False
    classifier: Literal["linear", "cosine"] = "linear"
    """N-way layer (a classifier over the N images): 'linear' as in the paper, or 'cosine' with a
    learned scale."""
    classifier_scale: PositiveFloat = 16.0
    """Initial value of the cosine layer's learned scale."""
    classifier_lr_scale: PositiveFloat = 1.0
    """Learning rate of the N-way layer, as a multiple of train.lr."""
    classifier_init: Literal["random", "features"] = "random"
    """Initial rows of the N-way layer: 'random', or each image's 'features' before training,
    centred and normalised."""
    label_weight: NonNegativeFloat = 0.0
    """Weight of a cross-entropy on the labelled images, next to the N-way loss on all images. 0: no
    labels."""
    instance_decay: Literal["none", "cosine"] = "none"
    """Weight of the N-way loss if label_weight is above 0: constant, or falling to zero along half
    a 'cosine'."""


@section
class SimCLR(Projected):
    """Contrast two crops of an image with the other images of the batch (ICML 2020)."""

    CROPS_COMPARED: ClassVar = (2, 2)
    LIBRARIES: ClassVar = ("lightly",)

    name: Literal["simclr"] = "simclr"
    temperature: PositiveFloat = 0.1
    """Temperature of the loss (for dino: of the student)."""


@section
class SupCon(Projected):
    """Contrast images of a class with those of other classes (NeurIPS 2020)."""

    NEEDS_LABELS: ClassVar = True

    name: Literal["supcon"] = "supcon"
    temperature: PositiveFloat = 0.1


@section
class MoCoV2(Projected):
    """Contrast two crops of an image with a queue of earlier images (arXiv:2003.04297)."""

    COLOURS: ClassVar = {"jitter": [0.4, 0.4, 0.4, 0.1]}
    WARMUP_EPOCHS: ClassVar = 0
    CROPS_COMPARED: ClassVar = (2, 2)
    LIBRARIES: ClassVar = ("lightly",)

    name: Literal["mocov2"] = "mocov2"
    temperature: PositiveFloat = 0.2
    momentum: Probability = 0.999
    """Momentum of the second encoder. It rises to 1 in mocov3 and dino."""
    queue: Count | None = None
    """Length of the queue (images). Default: 2048, or less for small datasets."""


@section
class MoCoV3(Method):
    """Contrast two crops of an image with the other images of the batch, by a momentum encoder
    (ICCV 2021)."""

    CROPS: ClassVar = byol_crops(0.08)
    COLOURS: ClassVar = {"jitter": BYOL_JITTER}
    WARMUP_EPOCHS: ClassVar = 40
    CROPS_COMPARED: ClassVar = (2, 2)
    LIBRARIES: ClassVar = ("lightly",)

    name: Literal["mocov3"] = "mocov3"
    hidden_dim: Count = 4096
    dim: Count = 256
    temperature: PositiveFloat = 0.2
    momentum: Probability = 0.99


@section
class DINO(Method):
    """Match the outputs of a student and a teacher with momentum weights (ICCV 2021)."""

    CROPS: ClassVar = (*byol_crops(0.25), CropGroup(count=4, scale=[0.05, 0.25]))
    COLOURS: ClassVar = {"jitter": BYOL_JITTER}
    WARMUP_EPOCHS: ClassVar = 10
    CROPS_COMPARED: ClassVar = (2, None)
    LIBRARIES: ClassVar = ("lightly",)

    name: Literal["dino"] = "dino"
    hidden_dim: Count = 2048
    dim: Count = 256
    temperature: PositiveFloat = 0.1
    momentum: Probability = 0.996
    outputs: int | None = Field(None, ge=2)
    """Width of the softmax. Default: 65536, or the number of images if that is smaller."""
    teacher_temperature: PositiveFloat = 0.07
    """Temperature of the teacher after its warm-up from 0.04."""
    center_momentum: Probability = 0.9
    """Momentum of the centre of the teacher's outputs. 1 keeps it at zero."""


@section
class Supervised(Mixed):
    """Cross-entropy on the labels, with IDMM's views."""

    CROPS: ClassVar = IDMM.CROPS
    NEEDS_LABELS: ClassVar = True

    name: Literal["supervised"] = "supervised"


AnyMethod = (
    IDMM | SimCLR | SupCon | MoCoV2 | MoCoV3 | DINO
    | Supervised
)  # fmt: skip
METHODS: dict[str, type[Method]] = {kind.name: kind for kind in get_args(AnyMethod)}


with_name = BeforeValidator(
    lambda options: {"name": "idmm", **options} if isinstance(options, dict) else options
)
MethodOptions = Annotated[AnyMethod, Field(discriminator="name"), with_name]
