"""What ``idmm train`` finds in a folder of images, and what it therefore runs, with the reasons."""

import contextlib
import functools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from idmm.config import Augment, Data, parsing
from idmm.config.commands import TrainCommand
from idmm.data.datasets import open_splits
from idmm.data.formats import BadImage
from idmm.data.images import bands_of, header
from idmm.data.split import Splits
from idmm.errors import UserError
from idmm.progress import brief, not_logged

FIRST = ("pretrain", "joint")  # ways with two stages, of which this is the first
BACKBONE = {"name": "resnet10t", "kwargs": {"channels": [32, 64, 128, 256]}}
CROPS = 2  # of an image, in the first of two stages
SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224)
TIMED = 16  # images of a step, to find out how long one takes
FEW = 4  # images of a step, to find out which precision is faster
LOOKED_AT = 64  # images, for their sizes
PASSES = 30  # over the images, which a size must leave time for
FEWEST = 10  # of stage 1 at a size reduced for it, from which on it pays (benchmarks/results/few_labels.md)
SURE = 8.0  # times too slow for a single pass, by a few steps: larger batches and lower precision do not mend that
AROUND = 20.0  # seconds of imports, reading images, timing and the end
# Of the time, for each stage: in OUT/stage1 what learns from all images, in OUT/teacher the classifier that makes
# pseudo-labels, in OUT the one that is asked for.
SHARES = {
    "from labels": {"last": 1.0},
    "two stages": {"stage1": 0.4, "last": 0.6},
    "pseudo-labels": {"teacher": 0.3, "last": 0.7},
    "all": {"stage1": 0.45, "teacher": 0.15, "last": 0.4},
}
LEAST = 0.1  # for any but the first, where those before took too long
MANY_IMAGES = 3  # times the labelled ones, from which on the others are given pseudo-labels


@dataclass(frozen=True)
class Counts:
    """What there is to learn from."""

    images: int  # to train on, with labels or without
    labelled: int
    classes: int
    side: int  # median of the short sides (pixels)
    without: int = 0  # classes none of whose training images has a label


@dataclass(frozen=True)
class Plan:
    """What is to be run, and why."""

    way: str
    model: dict
    size: int
    why: list[str]
    init: str | None = None  # weights to start from; public ones with their commit
    pseudolabel: bool = False  # whether a second stage learns from pseudo-labels, too
    few_size: int = 0  # where it does, of those stages that learn from the given labels alone; 0: size
    image_seconds: float = 0.0  # that training takes for an image of this size, by a few timed steps; 0: not known

    @property
    def shares(self) -> dict[str, float]:
        """Of the time, for each stage, in their order."""
        if self.way in FIRST:
            return SHARES["all" if self.pseudolabel else "two stages"]
        return SHARES["pseudo-labels" if self.pseudolabel else "from labels"]


def way_of(given: TrainCommand, pseudolabel: bool = False) -> str:
    """Returns ``given.way``, or what 'auto' stands for, with pseudo-labels or without; UserError where it contradicts
    other flags."""
    usual = "finetune" if given.init else "pretrain" if pseudolabel else "scratch"
    way = given.way if given.way != "auto" else usual
    if way == "finetune" and not given.init:
        raise UserError("way: finetune starts from weights; wanted beside it --init WEIGHTS")
    if way == "scratch" and given.init:
        raise UserError("way: scratch starts from no weights; leave --init out, or take finetune, pretrain or joint")
    return way


def check_comparison(given: TrainCommand, way: str, pseudolabel: bool) -> None:
    """Raises UserError where training from scratch would be compared with itself."""
    if given.compare and way == "scratch" and not pseudolabel:
        wanted = "wanted beside it --init WEIGHTS, --way pretrain, --way joint or --pseudolabel true"
        raise UserError(f"compare: there is no pretraining to compare; {wanted}")


def scratch_size(given: TrainCommand, model: dict, counts: Counts) -> int:
    """Returns the size of the images in training from scratch alone, for as long as all stages have."""
    timed = functools.cache(lambda side: seconds_of(given, model, side))
    return _affordable(given, model, counts, timed, 1.0, counts.labelled)


def count(splits: Splits, data: Data) -> Counts:
    """Counts what there is to learn from."""
    train = splits.train
    given = open_splits(tuned_on(data), labelled=True).train
    without = len(train.classes) - len(np.unique(given.labels[given.labels >= 0]))
    some = np.linspace(0, len(train) - 1, min(LOOKED_AT, len(train))).astype(int)
    sides, channels = [0], bands_of(data.in_chans, data.bands)
    for i in some:
        with contextlib.suppress(BadImage):  # which the first stage names
            image = header(train.items[i], data.max_pixels, channels)
            sides.append(min(image.height, image.width))
    side = int(statistics.median(sides[1:] or sides))
    return Counts(len(train), len(given), len(train.classes), side, without)


def of_weights(given: TrainCommand) -> TrainCommand:
    """Returns the command with what its weights say: model, channels, and where they are public their commit."""
    if not given.init:
        return given
    from idmm.models.hub import pinned
    from idmm.models.spec import model_spec

    given = replace(given, init=pinned(given.init))
    spec = model_spec(given)
    channels = {name: getattr(spec, name) for name in ("in_chans", "bands")}
    model = replace(given.model, name=spec.name, kwargs=spec.kwargs)
    return replace(given, data=replace(given.data, **channels), model=model)


def tuned_on(data: Data) -> Data:
    """The images with labels, of which ``data.labelled`` may say that they are fewer."""
    return replace(data, subset=data.labelled or data.subset, labelled=None)


def choose(given: TrainCommand, counts: Counts) -> Plan:
    """Returns what to run on so many images, for so long (benchmarks/results has the figures)."""
    each = counts.labelled / counts.classes
    many, folder = counts.images >= MANY_IMAGES * counts.labelled, given.data.name in (None, "folder")
    pseudolabel = many and folder and not counts.without if given.pseudolabel is None else given.pseudolabel
    if pseudolabel and not folder:
        raise UserError(f"pseudolabel: got true, but it is for a folder of images, not for {given.data.name}")
    if pseudolabel and counts.images == counts.labelled:
        raise UserError("pseudolabel: every training image has a label; wanted images without, or leave it out")
    if pseudolabel and counts.without:
        raise UserError(f"pseudolabel: got true, but {counts.without} of the classes have no label; wanted one of each")
    way = way_of(given, pseudolabel)
    check_comparison(given, way, pseudolabel)
    what = f"{counts.images} images to train on, {counts.labelled} of them labelled ({each:.0f} a class)"
    if given.way != "auto":
        why = [f"{what}; --way {way}, as asked"]
    elif given.init:
        why = [f"{what}; fine-tuning the weights of --init"]
        why.append("--way pretrain, in another --out, adapts them to the images first: better where they are of others")
    elif pseudolabel:
        why = [f"{what}; --way pretrain, as most images have no label"]
    elif counts.images == counts.labelled:
        why = [f"{what}; from scratch; with all labels pretraining was not ahead of it in runs of minutes"]
    else:
        why = [f"{what}; from scratch on these, {_no_pseudolabels(given, counts, folder)}"]
    if pseudolabel:
        why.append("pseudolabel: what was learned by then labels the images without a label, then all are learned from")
    model = parsing.plain(given.model)
    if given.init:
        why.append(f"model: {given.model.name}, that of '{given.init}'")
    elif not given.model.name:
        model |= BACKBONE
        why.append(f"model: {model['name']} {json.dumps(model['kwargs'])}, a small ConvNet")
    plan = Plan(way, model, given.size or 0, why, given.init, pseudolabel)
    sized = _sized(given, plan, counts)
    if given.way == "auto" and way == "pretrain" and (passes := _passes(given, sized, counts)) < FEWEST:
        if sized.size < _sides(counts)[-1]:
            reason = f"as pretraining has time for about {passes:.0f} passes, at {sized.size} px of {counts.side}"
            why = [f"{what}; --way scratch, {reason} (--way pretrain asks for it)", *why[1:]]
            return _sized(given, replace(plan, way="scratch", why=why), counts)
    return sized


def _passes(given: TrainCommand, plan: Plan, counts: Counts) -> float:
    """About how many passes over the images stage 1 has time for, each over all crops."""
    seconds = plan.shares["stage1"] * max(1.0, 60 * given.minutes - AROUND)
    return seconds / (CROPS * counts.images * plan.image_seconds)


def _no_pseudolabels(given: TrainCommand, counts: Counts, folder: bool) -> str:
    """Says why images without labels get none."""
    if given.pseudolabel is False:
        return "as --pseudolabel false asks for"
    if not folder:
        return f"as pseudo-labels are for folders of images, not for {given.data.name}"
    if counts.without:
        return f"as {counts.without} of the classes have no label, so the others cannot be labelled"
    each = f"{counts.images / counts.labelled:.1f}".removesuffix(".0")
    wanted = f"as pseudo-labels want {MANY_IMAGES} images or more for a label, here are {each}"
    return f"{wanted} (--pseudolabel true asks for them)"


def _sized(given: TrainCommand, plan: Plan, counts: Counts) -> Plan:
    """Returns the plan with the sizes of the images that there is time for."""
    stages = [("stage1", CROPS * counts.images)] if plan.way in FIRST else []
    if plan.pseudolabel or not stages:
        stages.append(("last", counts.images if plan.pseudolabel else counts.labelled))
    slowest = min(((plan.shares[part], views) for part, views in stages), key=lambda stage: stage[0] / stage[1])
    timed = functools.cache(lambda side: seconds_of(given, plan.model, side))
    size = _affordable(given, plan.model, counts, timed, *slowest)
    plan = replace(plan, size=size, image_seconds=timed(size), why=[*plan.why])
    if plan.pseudolabel:
        few_size = _affordable(given, plan.model, counts, timed, plan.shares["teacher"], counts.labelled)
        plan = replace(plan, few_size=few_size)
    if not given.size:
        own = f"the images' short side is {counts.side} px (median)"
        less = size < _sides(counts)[-1]
        enough = f"; more would leave time for less than {PASSES} passes over them" if less else ""
        few = f"; {plan.few_size} px for the labelled ones alone" if plan.few_size not in (0, size) else ""
        plan.why.append(f"size: {size} px; {own}{enough}{few}")
    return plan


def _sides(counts: Counts) -> list[int]:
    """The sizes that the images have pixels for; the smallest in any case."""
    return [side for side in SIZES if side <= counts.side] or [SIZES[0]]


def _affordable(
    given: TrainCommand, model: dict, counts: Counts, timed: Callable[[int], float], share: float, views: int
) -> int:  # fmt: skip
    """The largest side, of the images' own at most, at which a stage with such a share of the time has enough of it for
    :data:`PASSES` passes over so many views; where one is given, this. UserError where it is sure that there is no time
    for a single one."""
    seconds = max(1.0, 60 * given.minutes - AROUND)
    each = share * seconds / views  # for a single pass
    sides, took = [given.size] if given.size else _sides(counts), 0.0
    for side in reversed(sides):
        if PASSES * (took := timed(side)) <= each:
            return side
    if took > SURE * each:
        why = f"an epoch at {side} px takes about {brief(took * views)} s"
        wanted = (AROUND + seconds * took / each) / 60
        raise too_short(given, model, side, why, wanted, lambda *other: seconds_of(given, *other) < each)
    return sides[0]


def seconds_of(given: TrainCommand, model: dict, side: int) -> float:
    """Returns how long training on an image takes, forward and backward, in the precision and the memory format that it
    will choose, by a few steps on black ones (seconds)."""
    import torch

    from idmm.calibrate import Sample, choose_precision, time_steps
    from idmm.distributed import pick_device
    from idmm.methods.finetune import Finetune
    from idmm.models.build import create_backbone, prefers_channels_last

    chans = given.data.channels or 3
    more = {} if chans == 3 else {"in_chans": chans}
    backbone = create_backbone(model["name"], side, num_classes=2, **more, **model["kwargs"])
    if prefers_channels_last(backbone):
        backbone = backbone.to(memory_format=torch.channels_last)
    method, device = Finetune(backbone, Augment()), pick_device(given.device)
    batch = {"images": torch.zeros(TIMED, chans, side, side), "label": torch.zeros(TIMED, dtype=torch.int64)}
    few = {name: part[:FEW] for name, part in batch.items()}
    with not_logged():
        precision = choose_precision("auto", method, Sample(few, few, FEW, FEW, 0.0), device)
    return time_steps(method, batch, device, precision) / TIMED


def smaller(model: dict, size: int, fits: Callable[[dict, int], bool]) -> int | None:
    return next((side for side in reversed(SIZES) if side < size and fits(model, side)), None)


def too_short(given: TrainCommand, model: dict, size: int, why: str, minutes: float, fits: Callable) -> UserError:
    """Returns what is said where there is no time for one epoch; ``fits``: whether a model would, at a size."""
    ways = [f"{math.ceil(100 * minutes) / 100:g}"]
    if side := smaller(model, size, fits):
        ways.append(f"--size {side}")
    if given.model.name and not given.init and fits(BACKBONE, size):
        ways.append("the small ConvNet that it takes without --model.name")
    return UserError(f"minutes: got {given.minutes:g}, but {why}; wanted at least {' or '.join(ways)}")
