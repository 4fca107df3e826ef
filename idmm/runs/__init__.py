"""The stages as classes. No torch at import, because planners use this too."""

import math
import sys
from typing import TYPE_CHECKING, Any

from idmm.config import DenseConfig, DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig
from idmm.config.commands import ProbeConfig
from idmm.config.dense import DENSE_LIBRARIES, STEP, tested_sides
from idmm.data.images import StoredSize, short_side_bound
from idmm.errors import UserError, needed
from idmm.training.stage import Needs, Phase, Stage

if TYPE_CHECKING:
    from torch import nn

    from idmm.dense.targets import DenseListing
    from idmm.models.spec import ModelSpec


class PretrainStage(Stage):
    """Stage 1: from images to a backbone."""

    NAME = "pretrain"
    CONFIG = PretrainConfig
    crop_pct = 0.875

    @property
    def phases(self) -> list[Phase]:
        train = self.config.train
        views = self.config.views
        return [
            Phase(1, "views.size", "pretrain", views.size, train.epochs, train.batch_size, train.lr)
        ]

    def stored_size(self, size: int) -> StoredSize:
        return max(short_side_bound(size, group.scale[0]) for group in self.config.views.crops)

    @property
    def needs(self) -> Needs:
        config = self.config
        return Needs(
            labels=config.method.NEEDS_LABELS or config.trains_classifier,
            test=config.trains_classifier,
            unlabelled=not config.method.NEEDS_LABELS,
            eval_pixels=self.knn_every > 0 or config.trains_classifier,
            several=True,
        )

    @property
    def knn_every(self) -> int:
        """The epochs from one kNN measurement to the next; 0: none.

        A run that starts from weights is measured before the first step and after the last one by
        default.
        """
        return self.config.train.knn_every or (sys.maxsize if self.config.init is not None else 0)

    def fill_names(self) -> tuple[PretrainConfig, list[str]]:
        config, notes = super().fill_names()
        config, method_notes = config.fill_from_method()
        return config, notes + method_notes

    def check_network(self, phase: Phase, backbone: "nn.Module", spec: "ModelSpec") -> None:
        if spec.name in ("hog", "hog_conv"):
            line = f"{spec.name} has hand-made features, which cannot be pretrained"
            raise UserError(f"model.name: {line}. Probe or fine-tune it instead")


class FinetuneStage(Stage):
    """Stage 2: from labels, and a backbone or none, to a classifier."""

    NAME = "finetune"
    CONFIG = FinetuneConfig

    @property
    def phases(self) -> list[Phase]:
        if self.config.stages is None:
            field = "train.size"
        else:
            field = "stages[{}].size"
        return [
            Phase(
                n + 1,
                field.format(n),
                f"finetune {part.size} px",
                part.size,
                part.epochs,
                part.batch_size,
                part.lr,
            )
            for n, part in enumerate(self.config.resolved_stages())
        ]

    @property
    def crop_pct(self) -> float:
        return self.config.augment.crop_pct

    def stored_size(self, size: int) -> StoredSize:
        return short_side_bound(size, self.config.augment.scale[0])


class DenseStage(Stage):
    """Stage 2 on boxes or masks. Images are put on a square and none of them is cut off."""

    crop_pct = 1.0

    def read_listing(self) -> "DenseListing":
        from idmm.dense.read import read_images

        return read_images(self.NAME, self.config.data)

    def check_network(self, phase: Phase, backbone: "nn.Module", spec: "ModelSpec") -> None:
        from idmm.dense.network import build_network

        build_network(backbone, phase.size, spec.in_chans, **self.config.layers(1, masks=False))

    def stored_size(self, size: int) -> StoredSize:
        return self.config.tested_short_side or math.ceil(
            size * max(1.0, *self.config.augment.scale)
        )

    def eval_stored_size(self, size: int) -> StoredSize:
        return self.config.tested_short_side or size

    @property
    def phases(self) -> list[Phase]:
        train = self.config.train
        size = train.size
        sides = enumerate(tested_sides(size, getattr(self.config, "eval_scales", ())))
        others = tuple((f"eval_scales[{n}]", side) for n, side in sides if side != size)
        if self.config.tested_short_side:  # canvases of all sides up to the longest
            size = STEP * math.ceil(size / STEP)
            others = (
                ("augment.short_side", STEP * math.ceil(self.config.tested_short_side / STEP)),
            )
        label = f"{self.NAME} {train.size} px"
        return [
            Phase(1, "train.size", label, size, train.epochs, train.batch_size, train.lr, others)
        ]

    def fill_names(self) -> tuple[DenseConfig, list[str]]:
        needed(self.NAME, DENSE_LIBRARIES[self.NAME], "dense")
        return super().fill_names()


class DetectStage(DenseStage):
    """Boxes, and their masks if there are any."""

    NAME = "detect"
    CONFIG = DetectConfig


class SegmentStage(DenseStage):
    """A class per pixel."""

    NAME = "segment"
    CONFIG = SegmentConfig


class ProbeStage(Stage):
    """Frozen features, measured. Each image is seen once, in its centre crop."""

    NAME = "probe"
    CONFIG = ProbeConfig

    @property
    def phases(self) -> list[Phase]:
        # training and test images, one at a time
        return [Phase(1, "size", "probe", self.config.size, 2, 1)]

    @property
    def crop_pct(self) -> float:
        return self.config.crop_pct

    @property
    def needs(self) -> Needs:
        return Needs()

    def stored_size(self, size: int) -> StoredSize:
        return self.eval_stored_size(size)


STAGES: dict[str, type[Stage]] = {
    stage.NAME: stage
    for stage in (PretrainStage, FinetuneStage, DetectStage, SegmentStage, ProbeStage)
}


def stage_of(config: Any) -> Stage:
    """Return the stage that a config belongs to, with the config."""
    return next(stage for stage in STAGES.values() if isinstance(config, stage.CONFIG))(config)
