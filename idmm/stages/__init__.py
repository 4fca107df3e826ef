"""Whole runs, read from top to bottom, and the table of them. No torch before one starts, as planners ask here too."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from idmm.config import (
    Data,
    DenseConfig,
    DetectConfig,
    FinetuneConfig,
    PretrainConfig,
    SegmentConfig,
    parsing,
)
from idmm.config.commands import ProbeConfig
from idmm.config.dense import DENSE_LIBRARIES, tested_sides
from idmm.data.registry import check_folder, resolve_name
from idmm.errors import UserError, needed
from idmm.files import begun, names_same, weights_file
from idmm.training import clock


@dataclass(frozen=True)
class Phase:
    """A run's images at one size: what the loop is called once for."""

    number: int  # from 1
    field: str  # of the config, that names the size
    label: str  # for people
    size: int  # side of the images (pixels)
    epochs: int
    batch_size: int  # images of an optimizer step
    lr: float | None = None  # peak learning rate; None while the recipe's was not looked up
    others: tuple[tuple[str, int], ...] = ()  # crops of other sizes: the field that names each, and it (pixels)

    def steps(self, images: int) -> int:
        """Returns the optimizer steps on so many training images; an epoch's last, smaller batch is one."""
        return self.epochs * -(-images // self.batch_size)


@dataclass(frozen=True)
class StageSpec:
    """A stage as far as its config tells; functions take that."""

    name: str  # of the module here, and of the function in it that runs the stage
    config: type
    flags: str  # the grid's key that holds its options
    phases: Callable[[Any], list[Phase]]  # what it goes through; a probe sees training and test images, one at a time
    labelled: Callable[[Any], bool] = lambda config: True  # whether its training images need labels
    needs_test: Callable[[Any], bool] = lambda config: True  # whether there must be images to evaluate on
    unlabelled: Callable[[Any], bool] = lambda config: False  # whether it trains on images without labels, too
    evaluated: Callable[[Any], bool] = lambda config: True  # whether those are looked at
    needs_val: Callable[[Any], bool] = lambda config: False
    """Whether there must be images to choose by, beside those that are reported."""
    by_method: Callable[[Any], tuple[Any, list[str]]] = lambda config: (config, [])
    """Fills in what is left to the method, or to there being no init, with lines for the log on it; UserError where
    that cannot be."""
    faults: Callable[[Any, int], list[str]] = lambda config, images: []  # what is wrong with so many training images

    def build(self, given: Any) -> Any:
        """Returns the stage's config, see :func:`idmm.config.parsing.build`."""
        return parsing.build(self.config, given)

    def resolve(self, config: Any) -> tuple[Any, list[str]]:
        """Fills in what is left to the dataset's name and the method, with lines for the log on it.

        Raises:
            UserError: No such dataset, or a method that cannot be had so.
        """
        data, notes = resolve_name(config.data)
        if data.labelled is not None and self.config is not PretrainConfig:
            raise UserError(f"data.labelled: is for pretraining; data.subset draws the images of a {self.name}")
        config, more = self.by_method(replace(config, data=data))
        return config, notes + more

    def images(self, config: Any) -> tuple[Data, bool, bool, bool]:
        """Returns what :func:`idmm.data.listing.list_images` is asked for."""
        return config.data, self.labelled(config), self.needs_test(config), self.unlabelled(config)

    @property
    def module(self) -> str:
        """The module of the stage's function."""
        return f"idmm.{'dense' if issubclass(self.config, DenseConfig) else 'stages'}.{self.name}"

    def run(self, given: Any) -> dict:
        """Runs the stage; returns what ``result.json`` holds."""
        return getattr(importlib.import_module(self.module), self.name)(given)


def _sizes(config: FinetuneConfig) -> list[Phase]:
    given = config.stages is not None
    return [
        Phase(
            number, f"stages[{number - 1}].size" if given else "train.size", f"finetune {stage.size} px",
            stage.size, stage.epochs, stage.batch_size, stage.lr,
        )
        for number, stage in enumerate(config.resolved_stages(), start=1)
    ]  # fmt: skip


def _without_init(config: FinetuneConfig) -> tuple[FinetuneConfig, list[str]]:
    if config.init is not None or config.train.classifier_init is not None:
        return config, []
    return replace(config, train=replace(config.train, classifier_init="random")), []


def _one_size(config: PretrainConfig) -> list[Phase]:
    train, views = config.train, config.views
    sizes = enumerate(views.group_sizes() if views.crops else [])  # a method's own groups have the size of views
    others = tuple((f"views.crops[{n}].size", size) for n, size in sizes if size != views.size)
    return [Phase(1, "views.size", "pretrain", views.size, train.epochs, train.batch_size, train.lr, others)]


def knn_every(config: PretrainConfig) -> int:
    """Returns after how many epochs each kNN is measured, and before the first step: as asked, else at the end alone
    where a run starts from weights, to tell what became of them; 0 is never."""
    return config.train.knn_every or (sys.maxsize if config.init is not None else 0)


def _one_square(config: DenseConfig) -> list[Phase]:
    train = config.train
    sides = enumerate(tested_sides(train.size, getattr(config, "eval_scales", ())))
    others = tuple((f"eval_scales[{n}]", side) for n, side in sides if side != train.size)
    label = f"{config.STAGE} {train.size} px"
    return [Phase(1, "train.size", label, train.size, train.epochs, train.batch_size, train.lr, others)]


def _dense(config: DenseConfig) -> tuple[DenseConfig, list[str]]:
    """Finds what is missing to learn boxes or masks, as far as names go."""
    stage, faults = config.STAGE, []
    if config.data.root is None:
        kind = "boxes (COCO)" if stage == "detect" else "masks"
        faults.append(f"data.root: missing; {stage} expects a folder of images with their {kind}")
    try:
        needed(stage, DENSE_LIBRARIES[stage], "dense")
    except UserError as error:
        faults += error.faults
    if faults:
        raise UserError(*faults)
    return config, []


def _stage_of_dense(kind: type) -> StageSpec:
    return StageSpec(
        kind.STAGE,
        kind,
        flags=kind.STAGE,
        phases=_one_square,
        by_method=_dense,
        needs_val=lambda config: config.train.keep == "best",
    )


STAGES = {
    "pretrain": StageSpec(
        "pretrain",
        PretrainConfig,
        flags="pretrain",
        phases=_one_size,
        labelled=lambda config: config.needs_labels or config.learns_labels,
        needs_test=lambda config: config.learns_labels,
        unlabelled=lambda config: not config.needs_labels,
        evaluated=lambda config: knn_every(config) > 0 or config.learns_labels,
        by_method=PretrainConfig.resolve,
        faults=lambda config, images: config.batch_faults(min(config.train.batch_size, images)),
    ),
    "finetune": StageSpec(
        "finetune",
        FinetuneConfig,
        flags="finetune",
        phases=_sizes,
        by_method=_without_init,
        needs_val=lambda config: config.train.keep == "best",
    ),
    "detect": _stage_of_dense(DetectConfig),
    "segment": _stage_of_dense(SegmentConfig),
    "probe": StageSpec(
        "probe", ProbeConfig, flags="finetune", phases=lambda config: [Phase(1, "size", "probe", config.size, 2, 1)]
    ),
}


def stage_of(config: Any) -> StageSpec:
    """Returns the stage that a config is of."""
    return next(stage for stage in STAGES.values() if isinstance(config, stage.config))


_command: list[float] = []  # when the command began whose first run is still to come


@contextlib.contextmanager
def counted_from(began: float) -> Iterator[None]:
    """Makes the first run of the block one that began then (``clock.now()``): its time is all of the command's."""
    _command.append(began)
    try:
        yield
    finally:
        _command.clear()


def beginning() -> float:
    """Returns when the run that is called now began: with its command, or just now (``clock.now()``)."""
    return _command.pop() if _command else clock.now()


def prepare(config: Any) -> tuple[Any, list[str]]:
    """Fills in what needs no torch, and finds what is wrong as far as that goes: mistakes are told at once.

    Returns:
        The config, and lines for the log.

    Raises:
        UserError: A line a fault.
    """
    faults: list[str] = []
    notes: list[str] = []
    try:
        config, notes = stage_of(config).resolve(config)
        check_folder(config.data, config.out)
    except UserError as error:
        faults += error.faults
    if config.out is None:
        faults.append("out: missing; name a folder for all that the run writes (--out runs/a)")
    elif inside := inside_images(config):
        faults.append(f"out: '{config.out}' lies among the images of '{inside}' and would become one of their classes")
    if config.init is not None:
        faults += _init_faults(config)
    if faults:
        raise UserError(*faults)
    if begun(config.out):
        with contextlib.suppress(UserError):  # the run's folder says what is wrong with it
            before = stage_of(config).build(Path(config.out) / "config.yaml").init
            if names_same(config.init, before):  # public weights, by the commit that the run began with
                config = replace(config, init=before)
    return config, notes


def inside_images(config: Any) -> str | None:
    """Returns the folder of images that a new ``out`` lies in, if any: a later run would take its pictures for images.

    A run that began there before goes on.
    """
    begun = os.path.exists(os.path.join(config.out, "config.yaml"))
    listed = isinstance(config, DetectConfig)  # a file says which images there are
    if begun or listed or config.data.root is None or config.data.name not in (None, "folder"):
        return None
    root, out = (os.path.realpath(os.path.expanduser(path)) for path in (config.data.root, config.out))
    masked = isinstance(config, SegmentConfig)
    parts = ("images", "masks", "annotations") if masked else ("train", "unlabelled", "val", "test")
    images = [os.path.join(root, part) for part in parts] if os.path.isdir(os.path.join(root, parts[0])) else [root]
    return next((place for place in images if os.path.commonpath([place, out]) == place), None)


def _init_faults(config: Any) -> list[str]:
    """What can be said of ``init`` before it is read: that it is not there, or where the run is to write."""
    written = [os.path.join(config.out or ".", name) for name in ("", "backbone.safetensors", "model.safetensors")]
    if config.out and os.path.realpath(config.init) in map(os.path.realpath, written):
        return [f"out: '{config.out}' is where init is; name a new folder for all that this run writes"]
    try:
        weights_file(config.init, "init")
    except UserError as error:
        return error.faults
    return []
