"""What ``idmm train`` finds in a folder of images, and what it therefore runs, with the reasons."""

import contextlib
import json
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from idmm.config import Data, parsing
from idmm.config.commands import TrainCommand
from idmm.data.formats import BadImage
from idmm.data.images import bands_of, header
from idmm.data.listing import list_images
from idmm.data.split import Listing
from idmm.distributed import pick_device
from idmm.errors import UserError
from idmm.files import write_json
from idmm.models.hog import SIDE

FIRST = ("pretrain", "joint")  # ways with two stages, of which this is the first
HAND_MADE = {"name": "hog_conv", "kwargs": {}}
CONVNET = {"name": "resnet10t", "kwargs": {"channels": [32, 64, 128, 256]}}
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
STARTUP = 20.0  # seconds of imports, reading images and the end
# Of the time, for each stage: in OUT/stage1 what learns from all images, in OUT/teacher the classifier that makes
# pseudo-labels, in OUT the one that is asked for.
SHARES = {
    "from labels": {"last": 1.0},
    "with a trial": {"trial": 0.15, "trial_convnet": 0.15, "last": 0.7},
    "two stages": {"stage1": 0.4, "last": 0.6},
    "pseudo-labels": {"teacher": 0.3, "last": 0.7},
    "all": {"stage1": 0.45, "teacher": 0.15, "last": 0.4},
}
TRIED = 5  # labels per class, from which on a trial holds some out
MANY_IMAGES = 3  # times the labelled ones, from which on the others are given pseudo-labels


# What may be kept
BASELINE, LINEAR, TUNED = "baseline", "linear classifier on hog_conv", "hog_conv"
FROM_SCRATCH, PRETRAINED, PSEUDO = "ConvNet", "pretrained network", "pseudo-labels"
FILE, LABELS, PSEUDOLABELS, COPIES = "train.json", "labels.csv", "pseudolabels.csv", "duplicates.txt"


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
    why: list[str]
    init: str | None = None  # weights to start from; public ones with their commit
    pseudolabel: bool = False  # whether a second stage learns from pseudo-labels, too
    size: int = 0  # of the images (pixels)
    few_size: int = 0  # the same of stages beside pseudo-labels that learn from the given labels alone
    hand_size: int = SIDE  # the same on hand-made features
    scratch_size: int = 0  # of the comparison with training from scratch, which has as long as all stages
    pixels: float = PIXELS["cpu"]  # that are trained on in a second
    trial: bool = False  # whether a trial on held-out training images chooses what is kept

    def many_passes(self, images: int, size: int, minutes: float) -> bool:
        """Return whether there is time for :data:`MANY_PASSES` over so many images."""
        return MANY_PASSES * images * size**2 <= 60 * minutes * self.pixels

    @property
    def shares(self) -> dict[str, float]:
        """Of the time, for each stage, in their order."""
        if self.way in FIRST:
            return SHARES["all" if self.pseudolabel else "two stages"]
        if self.trial:
            return SHARES["with a trial"]
        return SHARES["pseudo-labels" if self.pseudolabel else "from labels"]


@dataclass
class TrainState:
    """What ``train.json`` holds, so that a stopped command goes on."""

    command: dict  # its keys
    data: dict  # those of the images, with what is held out
    counts: Counts
    plan: Plan
    minutes: dict[str, float] = field(default_factory=lambda: {"before": 0.0})  # of each stage, and before the first
    pseudolabels: dict | None = None
    candidates: dict[str, float] | None = None  # accuracy on held-out training images of what was tried (percent)
    best: str | None = None  # of the candidates
    result: dict | None = None  # of the classifier
    scratch: dict | None = None  # of the comparison
    gain: dict | None = None

    @property
    def trusted(self) -> bool:
        """Whether the last stage learns from pseudo-labels."""
        return self.best == PSEUDO

    def hand_made(self, part: str) -> bool:
        """Return whether a stage's network learns on hand-made features."""
        return part == "trial" or (part == "last" and self.best in (BASELINE, LINEAR, TUNED))

    def size(self, part: str) -> int:
        """Return the side of the images in a stage (pixels)."""
        if part == "scratch":
            return self.plan.scratch_size
        if self.hand_made(part):
            return self.plan.hand_size
        few = part == "teacher" or (part == "last" and self.plan.pseudolabel and not self.trusted)
        return self.plan.few_size if few else self.plan.size

    def save(self, out: Path) -> dict:
        """Write the file and return its content."""
        content = {name: value for name, value in asdict(self).items() if value is not None}
        write_json(out / FILE, content)
        return content


def way_of(given: TrainCommand, pseudolabel: bool = False) -> str:
    """Return ``given.way``, or the strategy that 'auto' stands for, with pseudo-labels or without.

    Raises UserError if it contradicts other flags."""
    usual = "finetune" if given.init else "pretrain" if pseudolabel else "scratch"
    way = given.way if given.way != "auto" else usual
    if way == "finetune" and not given.init:
        raise UserError("way: finetune starts from weights. Add --init WEIGHTS")
    if way == "scratch" and given.init:
        raise UserError("way: scratch starts from no weights. Leave --init out, or take finetune, pretrain or joint")
    return way


def check_comparison(given: TrainCommand, way: str, pseudolabel: bool) -> None:
    """Raise UserError if training from scratch would be compared with itself."""
    if given.compare and way == "scratch" and not pseudolabel:
        remedy = "Add --init WEIGHTS, --way pretrain, --way joint or --pseudolabel true"
        raise UserError(f"compare: there is no pretraining to compare. {remedy}")


def count(splits: Listing, data: Data) -> Counts:
    """Count the images and labels to learn from."""
    train = splits.train
    given = list_images(tuned_on(data), labelled=True).train
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
    """Return the command with model and channels of its weights, and the commit of public ones."""
    if not given.init:
        return given
    from idmm.models.hub import pin_commit
    from idmm.models.spec import model_spec

    given = replace(given, init=pin_commit(given.init))
    spec = model_spec(given)
    channels = {name: getattr(spec, name) for name in ("in_chans", "bands")}
    model = replace(given.model, name=spec.name, kwargs=spec.kwargs)
    return replace(given, data=replace(given.data, **channels), model=model)


def tuned_on(data: Data) -> Data:
    """Return the images with labels, which ``data.labelled`` may limit."""
    return replace(data, subset=data.labelled or data.subset, labelled=None)


def choose(given: TrainCommand, counts: Counts) -> Plan:
    """Return the plan for so many images and minutes (benchmarks/results has the figures)."""
    hindrance = _hindrance(given, counts)
    if given.pseudolabel and hindrance:
        raise UserError(f"pseudolabel: got true, but {hindrance}")
    pseudolabel = given.pseudolabel
    if pseudolabel is None:
        pseudolabel = not hindrance and counts.images >= MANY_IMAGES * counts.labelled
    way = way_of(given, pseudolabel)
    check_comparison(given, way, pseudolabel)
    if given.way != "auto":
        reason = "as asked"
    elif given.init:
        reason = "as --init has weights. --way pretrain adapts them to the images first"
    elif pseudolabel:
        reason = "as its features help to guess the missing labels"
    else:
        few = f"there are under {MANY_IMAGES} images per label"
        if given.pseudolabel is False:
            few = "--pseudolabel is false"
        reason = f"as {hindrance or few}"
    each = counts.labelled / counts.classes
    what = f"{counts.images} images to train on, {counts.labelled} of them labelled ({each:.0f} a class)"
    model = parsing.to_dict(given.model)
    if not given.init and not given.model.name:
        model |= CONVNET
    why = [f"{what}. --way {way}, {reason}", f"model: {model['name']} {json.dumps(model['kwargs'])}"]
    if pseudolabel:
        why.append(
            "pseudo-labels: the first networks guess the missing labels, then the classifier learns from all images"
        )
    pixels = PIXELS[pick_device(given.device)] * (1.0 if model["name"] == CONVNET["name"] else OTHERS)
    own_model = given.init or given.model.name
    trial = not own_model and way == "scratch" and not pseudolabel and given.data.name in (None, "folder")
    trial = trial and counts.labelled >= TRIED * counts.classes
    plan = Plan(way, model, why, given.init, pseudolabel, pixels=pixels, trial=trial, hand_size=given.size or SIDE)
    plan = _sized(given, plan, counts)
    if trial:
        plan.why.append(
            f"{HAND_MADE['name']} at {plan.hand_size} px and the model are tried on held-out training images"
        )
    if given.way == "auto" and way == "pretrain" and plan.size < _sides(counts)[-1]:
        seconds = plan.shares["stage1"] * max(1.0, 60 * given.minutes - STARTUP)
        passes = seconds * plan.pixels / (CROPS * counts.images * plan.size**2)
        if passes < FEWEST:
            reason = f"as pretraining has time for about {passes:.0f} passes, at {plan.size} px of {counts.side}"
            why[0] = f"{what}. --way scratch, {reason} (--way pretrain asks for it)"
            return _sized(given, replace(plan, way="scratch", why=why), counts)
    return plan


def _hindrance(given: TrainCommand, counts: Counts) -> str | None:
    """Return why the images without a label cannot get pseudo-labels, whatever their number."""
    if given.data.name not in (None, "folder"):
        return f"pseudo-labels are for a folder of images, not for {given.data.name}"
    if counts.images == counts.labelled:
        return "every training image has a label"
    return f"{counts.without} of the classes have no label" if counts.without else None


def _sized(given: TrainCommand, plan: Plan, counts: Counts) -> Plan:
    """Return the plan with the sizes of the images: the largest at which there is time for :data:`PASSES`."""
    seconds, sides = max(1.0, 60 * given.minutes - STARTUP), _sides(counts)

    def size_for(each: float) -> int:
        """Return the size at which each view of a pass fits its share of the time, the smallest if there is none."""
        fits = [side for side in sides if PASSES * side**2 <= seconds * plan.pixels * each]
        return given.size or max(fits, default=sides[0])

    shares = plan.shares
    each = [shares["stage1"] / (CROPS * counts.images)] if plan.way in FIRST else []
    if plan.pseudolabel or not each:
        each.append(shares["last"] / (counts.images if plan.pseudolabel else counts.labelled))
    size, scratch_size = size_for(min(each)), size_for(1.0 / counts.labelled)
    few_size = size_for(shares["teacher"] / counts.labelled) if plan.pseudolabel else 0
    few = f", {few_size} px for the labelled ones alone" if few_size not in (0, size) else ""
    why = [*plan.why, f"size: {size} px. The images' short side is {counts.side} px (median){few}"]
    return replace(plan, size=size, few_size=few_size, scratch_size=scratch_size, why=why)


def _sides(counts: Counts) -> list[int]:
    """Return the sizes that the images have pixels for, at least the smallest."""
    return [side for side in SIZES if side <= counts.side] or [SIZES[0]]
