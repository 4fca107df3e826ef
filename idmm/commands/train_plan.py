"""What ``idmm train`` finds in a folder of images, and what it therefore runs, with the reasons."""

import contextlib
import json
import statistics
from dataclasses import dataclass, replace

import numpy as np

from idmm.config import Data, parsing
from idmm.config.commands import TrainCommand
from idmm.data.datasets import open_splits
from idmm.data.formats import BadImage
from idmm.data.images import bands_of, header
from idmm.data.split import Splits
from idmm.distributed import pick_device
from idmm.errors import UserError

FIRST = ("pretrain", "joint")  # ways with two stages, of which this is the first
BACKBONE = {"name": "resnet10t", "kwargs": {"channels": [32, 64, 128, 256]}}
CROPS = 2  # of an image, in the first of two stages
SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224)
LOOKED_AT = 64  # images, for their sizes
# The table that sizes, ways and mixing go by; nothing is timed. The small ConvNet trains on 1.1 million pixels a second
# on a core of a server, at 32 px.
PIXELS = {"cpu": 1.1e6, "mps": 1e7, "cuda": 5e7}  # by device; only the CPU rate was measured
OTHERS = 0.25  # of it, for other networks
PASSES = 30  # over the images, which a size must leave time for
FEWEST = 10  # of stage 1 at a size reduced for it, from which on it pays
MANY_PASSES = 60  # from which on mixed images pay; stage 1 counts each of its crops
AROUND = 20.0  # seconds of imports, reading images and the end
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
    scratch_size: int = 0  # of the comparison with training from scratch, which has as long as all stages
    pixels: float = PIXELS["cpu"]  # that are trained on in a second

    def many_passes(self, images: int, size: int, minutes: float) -> bool:
        """Whether there is time for :data:`MANY_PASSES` over so many images."""
        return MANY_PASSES * images * size**2 <= 60 * minutes * self.pixels

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
    pixels = PIXELS[pick_device(given.device)] * (1.0 if model["name"] == BACKBONE["name"] else OTHERS)
    plan = Plan(way, model, given.size or 0, why, given.init, pseudolabel, pixels=pixels)
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
    return seconds * plan.pixels / (CROPS * counts.images * plan.size**2)


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

    def size_for(share: float, views: int) -> int:
        return given.size or _affordable(60 * given.minutes - AROUND, plan.pixels, counts, share / views)

    size = size_for(*slowest)
    few_size = size_for(plan.shares["teacher"], counts.labelled) if plan.pseudolabel else 0
    scratch_size = size_for(1.0, counts.labelled)
    plan = replace(plan, size=size, few_size=few_size, scratch_size=scratch_size, why=[*plan.why])
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


def _affordable(seconds: float, pixels: float, counts: Counts, each: float) -> int:
    """Returns the largest side, of the images' own at most, at which there is time for :data:`PASSES`, where ``each``
    image of a pass has such a share of the time; the smallest side if there is none."""
    sides = _sides(counts)
    fits = [side for side in sides if PASSES * side**2 <= max(1.0, seconds) * pixels * each]
    return fits[-1] if fits else sides[0]
