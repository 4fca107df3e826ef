"""The stages as classes: what a config alone says about its run. No torch at import, because planners use this too."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from idmm.config import DenseConfig, DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig, parsing
from idmm.config.commands import ProbeConfig
from idmm.config.dense import DENSE_LIBRARIES, tested_sides
from idmm.data.registry import resolve_name
from idmm.errors import UserError, needed

if TYPE_CHECKING:
    from torch import nn

    from idmm.data.images import StoredSize
    from idmm.data.split import Listing
    from idmm.dense.targets import DenseSplits
    from idmm.models.spec import ModelSpec

PRETRAIN_CROP = 0.875  # share of the short side that the centre crops cover on which features are measured


@dataclass(frozen=True)
class Phase:
    """The part of a run at one image size. The loop is called once per phase."""

    number: int  # from 1
    field: str  # of the config, that holds the size
    label: str  # for log lines
    size: int  # side of the images (pixels)
    epochs: int
    batch_size: int  # images per optimizer step
    lr: float | None = None  # peak learning rate; None before the config is resolved
    other_sizes: tuple[
        tuple[str, int], ...
    ] = ()  # of evaluation: the field that holds each size, and the size (pixels)

    def steps(self, images: int) -> int:
        """Return the optimizer steps on that many training images. The last, smaller batch of an epoch is one."""
        return self.epochs * -(-images // self.batch_size)


@dataclass(frozen=True)
class Needs:
    """The images that a run needs."""

    labels: bool = True  # of the training images
    test: bool = True  # images to evaluate on
    val: bool = False  # images to choose the best epoch on, besides those that are reported
    unlabelled: bool = False  # training images without labels, too
    eval_pixels: bool = True  # the pixels of val and test images


@dataclass(frozen=True)
class Stage:
    """One stage with its config. Subclasses answer what depends on the stage.

    Attributes:
        phases: In their order.
        crop_pct: Share of the resized short side that the centre crop of evaluation covers.
        stored_size: How much of the training images is stored for views of so many pixels, an
            :class:`idmm.data.images.StoredSize`.
    """

    config: Any

    NAME: ClassVar[str]  # of the command
    CONFIG: ClassVar[type]
    phases: ClassVar[Any]
    crop_pct: ClassVar[Any]
    stored_size: ClassVar[Callable[[Any, int], "StoredSize"]]

    @property
    def needs(self) -> Needs:
        """The images that the run needs."""
        return Needs(val=self.config.train.keep == "best")

    def list_images(self, progress: bool = False) -> "Listing":
        """List the images of the run and decode nothing. With ``progress``, slow checks show how far they are."""
        from idmm.data.listing import list_images

        needs = self.needs
        return list_images(self.config.data, needs.labels, needs.test, needs.unlabelled)

    def count_faults(self, images: int) -> list[str]:
        """Return what is wrong with this number of training images, one line per fault."""
        return []

    @classmethod
    def build(cls, values: Any) -> Any:
        """Return the config of the stage, see :func:`idmm.config.parsing.build`."""
        return parsing.build(cls.CONFIG, values)

    def fill_names(self) -> tuple[Any, list[str]]:
        """Fill in the values that the config leaves to the dataset's name and to the method.

        Returns:
            The config, and lines for the log.

        Raises:
            UserError: No such dataset, or a method that does not work with these options.
        """
        data, notes = resolve_name(self.config.data)
        if data.labelled is not None and self.CONFIG is not PretrainConfig:
            raise UserError(f"data.labelled: is for pretraining, data.subset draws the images of a {self.NAME}")
        return replace(self.config, data=data), notes

    def check_network(self, phase: Phase, backbone: "nn.Module", spec: "ModelSpec") -> None:
        """Raise UserError if the stage cannot use this backbone."""


class PretrainStage(Stage):
    """Stage 1: from images to a backbone."""

    NAME, CONFIG = "pretrain", PretrainConfig
    crop_pct = PRETRAIN_CROP

    @property
    def phases(self) -> list[Phase]:
        train, views = self.config.train, self.config.views
        return [Phase(1, "views.size", "pretrain", views.size, train.epochs, train.batch_size, train.lr)]

    def stored_size(self, size: int) -> "StoredSize":
        from idmm.data.views import short_side_bound

        return max(short_side_bound(size, group.scale[0]) for group in self.config.views.crops)

    @property
    def needs(self) -> Needs:
        config = self.config
        return Needs(
            labels=config.needs_labels or config.learns_labels,
            test=config.learns_labels,
            unlabelled=not config.needs_labels,
            eval_pixels=self.knn_every > 0 or config.learns_labels,
        )

    @property
    def knn_every(self) -> int:
        """The epochs from one kNN measurement to the next; 0: none.

        A run that starts from weights is measured before the first step and after the last one by default.
        """
        return self.config.train.knn_every or (sys.maxsize if self.config.init is not None else 0)

    def count_faults(self, images: int) -> list[str]:
        if images < 2:
            return ["data.root: 1 image to train on. Telling images apart needs at least 2"]
        return self.config.batch_faults(min(self.config.train.batch_size, images))

    def fill_names(self) -> tuple[PretrainConfig, list[str]]:
        config, notes = super().fill_names()
        config, method_notes = config.resolve()
        return config, notes + method_notes

    def check_network(self, phase: Phase, backbone: "nn.Module", spec: "ModelSpec") -> None:
        if not list(backbone.parameters()):
            raise UserError(f"model.name: {spec.name} has no weights to pretrain. Probe or fine-tune it instead")


class FinetuneStage(Stage):
    """Stage 2: from labels, and a backbone or none, to a classifier."""

    NAME, CONFIG = "finetune", FinetuneConfig

    @property
    def phases(self) -> list[Phase]:
        field = "train.size" if self.config.stages is None else "stages[{}].size"
        return [
            Phase(n + 1, field.format(n), f"finetune {part.size} px", part.size, part.epochs, part.batch_size, part.lr)
            for n, part in enumerate(self.config.resolved_stages())
        ]

    @property
    def crop_pct(self) -> float:
        return self.config.augment.crop_pct

    def stored_size(self, size: int) -> "StoredSize":
        from idmm.data.views import short_side_bound

        return short_side_bound(size, self.config.augment.scale[0])


class DenseStage(Stage):
    """Stage 2 on boxes or masks. Images are put on a square and none of them is cut off.

    ``read`` lists the images with their boxes or masks, all checked. ``build_network`` puts the layers that predict
    them for K classes on a backbone, with fresh weights of torch's generators. ``masks``: predict one per box.
    """

    crop_pct = 1.0
    LABELS: ClassVar[str]  # what is known about each training image
    FOLDER: ClassVar[str]  # what data.root has to hold

    def check_network(self, phase: Phase, backbone: "nn.Module", spec: "ModelSpec") -> None:
        self.build_network(backbone, spec, 1, False)

    def list_images(self, progress: bool = False) -> "Listing":
        return self.read(progress).splits

    def stored_size(self, size: int) -> "StoredSize":
        return math.ceil(size * max(1.0, *self.config.augment.scale))

    @property
    def phases(self) -> list[Phase]:
        train = self.config.train
        sides = enumerate(tested_sides(train.size, getattr(self.config, "eval_scales", ())))
        others = tuple((f"eval_scales[{n}]", side) for n, side in sides if side != train.size)
        label = f"{self.NAME} {train.size} px"
        return [Phase(1, "train.size", label, train.size, train.epochs, train.batch_size, train.lr, others)]

    def fill_names(self) -> tuple[DenseConfig, list[str]]:
        config, notes = super().fill_names()
        if config.data.root is None:
            raise UserError(f"data.root: missing, {self.NAME} expects a folder of images with their {self.FOLDER}")
        needed(self.NAME, DENSE_LIBRARIES[self.NAME], "dense")
        return config, notes


class DetectStage(DenseStage):
    """Boxes, and their masks if there are any."""

    NAME, CONFIG = "detect", DetectConfig
    LABELS, FOLDER = "boxes", "boxes (COCO)"

    def read(self, progress: bool) -> "DenseSplits":
        from idmm.dense.read import read_detection

        return read_detection(self.config.data, self.config.model.masks, progress)

    def build_network(self, backbone: "nn.Module", spec: "ModelSpec", classes: int, masks: bool) -> "nn.Module":
        from idmm.dense.network import Detector

        width = self.config.model.pyramid_width
        return Detector(backbone, self.config.train.size, classes, width, masks, spec.in_chans)


class SegmentStage(DenseStage):
    """A class per pixel."""

    NAME, CONFIG = "segment", SegmentConfig
    LABELS, FOLDER = "masks", "masks"

    def read(self, progress: bool) -> "DenseSplits":
        from idmm.dense.read import read_segmentation

        return read_segmentation(self.config.data, progress)

    def build_network(self, backbone: "nn.Module", spec: "ModelSpec", classes: int, masks: bool) -> "nn.Module":
        from torch.nn import SyncBatchNorm

        from idmm import distributed
        from idmm.dense.network import Segmenter

        width = self.config.model.pyramid_width
        network = Segmenter(backbone, self.config.train.size, classes, width, spec.in_chans)
        if distributed.several_gpus():  # each process sees only a few images of a batch
            network.decoder = SyncBatchNorm.convert_sync_batchnorm(network.decoder)
        return network


class ProbeStage(Stage):
    """Frozen features, measured. Each image is seen once, in its centre crop."""

    NAME, CONFIG = "probe", ProbeConfig

    @property
    def phases(self) -> list[Phase]:
        return [Phase(1, "size", "probe", self.config.size, 2, 1)]  # training and test images, one at a time

    @property
    def crop_pct(self) -> float:
        return self.config.crop_pct

    @property
    def needs(self) -> Needs:
        return Needs()

    def stored_size(self, size: int) -> "StoredSize":
        from idmm.data.images import CentreCrop

        return CentreCrop(size, self.crop_pct)


STAGES: dict[str, type[Stage]] = {
    stage.NAME: stage for stage in (PretrainStage, FinetuneStage, DetectStage, SegmentStage, ProbeStage)
}


def stage_of(config: Any) -> Stage:
    """Return the stage that a config belongs to, with the config."""
    return next(stage for stage in STAGES.values() if isinstance(config, stage.CONFIG))(config)
