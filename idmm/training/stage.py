"""A stage with its config and what the config alone says about its run. No torch, because planners
use this too."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from idmm.config import PretrainConfig, parsing
from idmm.data.images import CentreCrop, StoredSize
from idmm.data.listing import list_images
from idmm.data.registry import resolve_name
from idmm.data.split import Listing
from idmm.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from idmm.models.spec import ModelSpec


@dataclass(frozen=True)
class Phase:
    """The part of a run at one image size. The loop is called once per phase.

    The config's ``stages`` and ``stage`` in metrics.jsonl count phases.
    """

    number: int  # from 1
    field: str  # of the config, that holds the size
    label: str  # for log lines
    size: int  # side of the images (pixels)
    epochs: int
    batch_size: int  # images per optimizer step
    lr: float | None = None  # peak learning rate; None before the config is resolved
    # of evaluation: the field of each size, and the size (pixels)
    other_sizes: tuple[tuple[str, int], ...] = ()

    def steps(self, images: int) -> int:
        """Return the optimizer steps on that many training images. The last, smaller batch of an
        epoch is one."""
        return self.epochs * -(-images // self.batch_size)


@dataclass(frozen=True)
class Needs:
    """The images that a run needs."""

    labels: bool = True  # of the training images
    test: bool = True  # images to evaluate on
    val: bool = False  # images to choose the best epoch on, besides those that are reported
    unlabelled: bool = False  # training images without labels, too
    eval_pixels: bool = True  # the pixels of val and test images
    several: bool = False  # at least two training images


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
    stored_size: ClassVar[Callable[[Any, int], StoredSize]]

    @property
    def needs(self) -> Needs:
        """The images that the run needs."""
        return Needs(val=self.config.train.keep == "best")

    def eval_stored_size(self, size: int) -> StoredSize:
        """Return what is stored of the images to evaluate on at a size (pixels)."""
        return CentreCrop(size, self.crop_pct)

    def list_images(self) -> Listing:
        """List the images of the run and decode nothing. UserError: these are not the images that
        it needs."""
        needs = self.needs
        listing = self.read_listing()
        if needs.several and len(listing.train) < 2:
            raise UserError("data.root: 1 image to train on. Telling images apart needs at least 2")
        if (
            needs.labels
            and listing.train.labels is not None
            and len({*listing.train.labels} - {-1}) < 2
        ):
            raise UserError(
                "data: the training images are all of one class, expected two classes or more"
            )
        # the best epoch would be chosen on the images that are reported
        if needs.val and listing.val is None:
            how = "expected both val and test images (add a folder, or --data.val_fraction 0.2), or --train.keep last"
            raise UserError(
                f"train.keep: best chooses by val, and there is no split but the one that is reported, {how}"
            )
        return listing

    def read_listing(self) -> Listing:
        """List the images, whether they are enough for the run or not."""
        needs = self.needs
        return list_images(self.config.data, needs.labels, needs.test, needs.unlabelled)

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
            raise UserError(
                f"data.labelled: is for pretraining, data.subset draws the images of a {self.NAME}"
            )
        return replace(self.config, data=data), notes

    def check_network(self, phase: Phase, backbone: "nn.Module", spec: "ModelSpec") -> None:
        """Raise UserError if the stage cannot use this backbone."""


@dataclass(frozen=True)
class RunSetup:
    """All that is decided about a run before its images are read."""

    stage: Stage  # with the resolved config, which is what config.yaml holds
    spec: "ModelSpec"  # of the backbone, with the weights that it starts from
    phases: tuple[Phase, ...]
    notes: tuple[str, ...] = ()  # lines for the log on everything that was filled in
    started_at: float = 0.0  # when the run began (clock.now()), for its time limit

    @property
    def config(self) -> Any:
        """The resolved config."""
        return self.stage.config
