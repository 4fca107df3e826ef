"""What both stages do alike: open the images, build the backbone, end well."""

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from idmm import config, distributed, options
from idmm.checkpoint import RunFolder
from idmm.data.cache import ImageStore, compare, fingerprint, load_split
from idmm.data.datasets import open_splits
from idmm.data.loaders import BatchPlan
from idmm.engine import Session
from idmm.errors import Interrupted, SizeError, UserError
from idmm.features import centre_crops
from idmm.methods.drloc import Localization
from idmm.models import check_kwargs, check_name, create_backbone
from idmm.models.weights import Checkpoint, read_checkpoint
from idmm.optim import recipe
from idmm.progress import logging_to
from idmm.seeding import derive, seeded

log = logging.getLogger("idmm")
DEFAULT_MODEL = "deit_tiny_patch16_224"


@contextlib.contextmanager
def session(config) -> Iterator[Session]:
    """Opens the run's folder, log and interrupts, and closes them however the block ends."""
    opened = Session(config, options.plain(config))
    try:
        with logging_to(opened.run.path), opened.interrupts:
            try:
                yield opened
            except KeyboardInterrupt:
                raise Interrupted("interrupted before the end of a step; the last checkpoint is kept") from None
    finally:
        opened.close()


@dataclass(frozen=True)
class Backbone:
    """What is known of the backbone before it is built.

    Attributes:
        name: timm's.
        kwargs: For its constructor.
        mean: Of each channel.
        std: Likewise.
        drop_path: Stochastic depth rate.
        init: Weights to start from, or None.
    """

    name: str
    kwargs: dict
    mean: list[float]
    std: list[float]
    drop_path: float
    init: Checkpoint | None

    @property
    def in_chans(self) -> int:
        """Channels."""
        return len(self.mean)

    def build(self, size: int, seed: int, num_classes: int = 0) -> torch.nn.Module:
        """Builds the backbone at an image size, its fresh weights from the seed."""
        chans = {} if self.in_chans == 3 else {"in_chans": self.in_chans}
        kwargs = {**self.kwargs, **chans, "num_classes": num_classes}
        with seeded(derive(seed, "model")):
            return create_backbone(self.name, size, drop_path=self.drop_path, **kwargs)


def settle(config):
    """Fills in what the config leaves to the checkpoint, the dataset's usual statistics and the backbone's family.

    Returns:
        The config, whole, as it goes into config.yaml; the backbone; and lines for the log on what was filled in.

    Raises:
        UserError: ``out`` is missing, or the model contradicts the checkpoint.
    """
    if config.out is None:
        raise UserError("out: missing; name a folder for all that the run writes (--out runs/a)")
    described = describe_backbone(config)
    lr, warmup = recipe(described.name)
    train, notes = config.train, []
    for name, value in (("lr", lr), ("warmup_epochs", warmup)):
        if getattr(train, name) is None:
            train = replace(train, **{name: value})
            notes.append(f"train.{name}: {value:g}, the recipe's for {described.name}")
    idle = [] if config.drloc.weight else options.changed(config.drloc)
    if idle:
        notes.append(f"drloc: off, its weight is 0: {', '.join(f'drloc.{name}' for name in idle)} without effect")
    model = replace(config.model, name=described.name, kwargs=described.kwargs)
    data = replace(config.data, mean=described.mean, std=described.std, in_chans=described.in_chans)
    return replace(config, train=train, model=model, data=data), described, notes


def describe_backbone(config) -> Backbone:
    """Settles the model from ``model``, ``data`` and the checkpoint ``init``.

    Raises:
        UserError: ``model.name``, ``model.kwargs`` or ``data.in_chans`` contradict the checkpoint; all in one.
    """
    init = None if config.init is None else read_checkpoint(config.init)
    model, data = config.model, config.data
    if init is None or init.name is None:
        if init is not None and model.name is None:
            raise UserError(f"model.name: '{init.source}' does not say which model it is; wanted is its timm name")
        name, kwargs, chans = model.name or DEFAULT_MODEL, model.kwargs, data.in_chans or 3
    else:
        skip = ("num_classes", "img_size", "in_chans")
        kwargs = {key: value for key, value in init.kwargs.items() if key not in skip}
        faults = _contradictions(config, init, kwargs)
        if faults:
            raise UserError(*faults)
        name, chans = init.name, init.in_chans
    check_name(name)
    check_kwargs(name, model.kwargs)
    mean, std = _statistics(data, init, chans)
    return Backbone(name, kwargs, mean, std, model.drop_path, init)


def _contradictions(config, init: Checkpoint, kwargs: dict) -> list[str]:
    model, data = config.model, config.data
    faults = []
    if model.name not in (None, init.name):
        faults.append(f"model.name: '{model.name}', but '{init.source}' is {init.name}; leave it out or make it agree")
    for key, value in model.kwargs.items():
        if kwargs.get(key) != value:
            has = f"'{init.source}' has {kwargs.get(key)!r}"
            faults.append(f"model.kwargs: {key} is {value!r}, but {has}; leave it out or make it agree")
    if data.in_chans not in (None, init.in_chans):
        faults.append(f"data.in_chans: {data.in_chans}, but '{init.source}' has {init.in_chans}")
    return faults


def _statistics(data: config.Data, init: Checkpoint | None, chans: int) -> tuple[list[float], list[float]]:
    """Mean and std: the config's, else the checkpoint's, else ImageNet's (averaged for grey images)."""
    found = []
    for name, given in (("mean", data.mean), ("std", data.std)):
        values = given or list(getattr(init, name) if init else getattr(config, f"IMAGENET_{name.upper()}"))
        if given is None and chans == 1 and len(values) == 3:
            values = [round(sum(values) / 3, 6)]
        if len(values) != chans:
            raise UserError(f"data.{name}: {len(values)} values for a model of {chans} channels, wanted one a channel")
        found.append(values)
    return found[0], found[1]


def check_sizes(config, described: Backbone, sizes: dict[str, int]) -> None:
    """Builds the backbone, and drloc's head, at every size of a run, so that none is refused hours after its start.

    Args:
        config: The run's.
        described: Of the backbone.
        sizes: Sides of the images (pixels), by field.

    Raises:
        UserError: A line a fault, with the field.
    """
    faults = []
    for field, size in sizes.items():
        try:
            try_localization(config, described.build(size, config.seed), size, described)
        except SizeError as error:
            faults += [f"{field}: {fault}" for fault in error.faults]
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(*dict.fromkeys(faults))


def localization(config, backbone: torch.nn.Module, size: int, described: Backbone, epochs: int) -> Localization | None:
    """Makes the head of ``drloc``, its fresh weights from the run's seed; None where its weight is 0.

    Args:
        config: The run's.
        backbone: What it reads.
        size: Side of the images (pixels).
        described: Of the backbone.
        epochs: Length of the stage.
    """
    if not config.drloc.weight:
        return None
    with seeded(derive(config.seed, "drloc", size)):
        return Localization(backbone, config.drloc, size, described.in_chans, epochs)


def try_localization(config, backbone: torch.nn.Module, size: int, described: Backbone) -> None:
    """Raises UserError where :func:`localization` will, whatever the length of the stage."""
    localization(config, backbone, size, described, epochs=math.ceil(config.drloc.warmup_epochs) + 1)


@dataclass(frozen=True)
class LoadedSplits:
    """The images, decoded: to train on, to look at between epochs, to report at the end."""

    train: ImageStore
    val: ImageStore | None
    test: ImageStore | None
    size_mismatch: dict[str, list[int]]

    @property
    def remarks(self) -> dict:
        """What ``result.json`` says of the data beyond its sizes; nothing where all is as the protocol has it."""
        return {"size_mismatch": self.size_mismatch} if self.size_mismatch else {}


def load_images(
    config, run: RunFolder, bound: int, labelled: bool, evaluated: bool = True, needed: bool = True
) -> LoadedSplits:
    """Opens the dataset, reads every image once and holds a resumed run to the images it began with.

    Args:
        config: The run's.
        run: Its folder.
        bound: Longest short side kept (pixels).
        labelled: Whether labels are needed.
        evaluated: Whether val and test are; else they are not read.
        needed: Whether there must be one to evaluate on, where labels are needed.
    """
    splits = open_splits(config.data, labelled, needed)
    wanted = {"train": splits.train, "val": splits.val, "test": splits.test}
    if not evaluated:
        wanted |= {"val": None, "test": None}
    stores = {
        part: None
        if split is None
        else load_split(split, bound=bound, data=config.data, part=part, progress=run.leader)
        for part, split in wanted.items()
    }
    prints = {name: None if store is None else fingerprint(store) for name, store in stores.items()}

    run.check_images(prints, _differences)
    counts = ", ".join(f"{len(store)} {name}" for name, store in stores.items() if store is not None)
    log.info("images: %s of %s (%s)", counts, config.data.name, _KEPT[stores["train"].cache])
    return LoadedSplits(**stores, size_mismatch=splits.size_mismatch)


_KEPT = {"ram": "decoded in memory", "disk": "decoded on the disk", "off": "decoded at every use"}


def _differences(old: dict, new: dict) -> list[str]:
    lines = []
    for name in new:
        if (old[name] is None) != (new[name] is None):
            lines.append(f"{name}: the split {'is gone' if new[name] is None else 'is new'}")
        elif new[name] is not None:
            lines += [f"{name}: {line}" for line in compare(old[name], new[name])]
    return lines


def test_batches(
    opened: Session,
    store: ImageStore,
    size: int,
    crop_pct: float,
    backbone: Backbone,
    batch_size: int,
    images: np.ndarray | None = None,
):
    """Yields this process's share of a split, centre-cropped, until the run is interrupted; ``images``: only those."""
    crops = centre_crops(store, size, crop_pct, backbone.mean, backbone.std, batch_size, opened.workers, images)
    return opened.interrupts.watch(crops)


test_batches.__test__ = False  # not a test case, whatever pytest thinks of the name


def batch_plan(train: config.Train, count: int, epochs: int, batch_size: int, seed: int) -> BatchPlan:
    """Returns which images make which step, for this process."""
    world = distributed.world()
    return BatchPlan(count, batch_size, epochs, seed, distributed.rank(), world, train.accumulate)
