"""What ``idmm train`` finds in a folder of images, and what it therefore runs, with the reasons."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from idmm import distributed
from idmm.config import parsing
from idmm.config.commands import TrainCommand
from idmm.errors import UserError
from idmm.files import write_json
from idmm.models.hog import SIDE
from idmm.models.hog_conv import CONVNET
from idmm.training.device import pick_device

HOG_CONV = "hog_conv"  # the network that joins hand-made features with a ConvNet
CROPS = 2  # crops of each image in stage 1
SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224)  # sides of images (pixels)
# Pixels per second that the small ConvNet trains on, by device. Sizes and mixing follow from it,
# and nothing is timed. Measured: a CPU core at 32 px, and the crops that 16 cores make for an H100
# at 112 px. Apple's is a guess
PIXELS_PER_SECOND = {"cpu": 1.1e6, "mps": 1e7, "cuda": 2e8}
# cost of an image of any size, in pixels: a guess of 4 ms per step of 32 images
FIXED_PIXELS = {"cuda": 24_000}
OTHERS = 0.25  # rate of other networks, relative to the ConvNet's
PASSES = 30  # passes over the images that there must be time for at a size
MANY_PASSES = 60  # passes from which on mixed images help. In stage 1 each crop of an image counts
STARTUP = 20.0  # seconds for imports, for reading images and for the end
# Shares of the time. OUT/stage1 learns from all images, the last stage is the classifier in OUT
SHARES = {
    "from labels": {"last": 1.0},
    "with a trial": {"trial": 0.2, "last": 0.8},
    "two stages": {"stage1": 0.4, "last": 0.6},
    "pseudo-labels": {"stage1": 0.6, "last": 0.4},
    "joined features": {"stage1": 0.5, "teacher": 0.15, "last": 0.35},
}
LABELS_OF_STAGES = {
    "stage1": "pretraining on all images",
    "teacher": "a network on the given labels only",
    "trial": "a trial on four fifths of the labelled images",
    "scratch": "training from scratch, for comparison",
}
HELD_OUT = 0.2  # of the labelled images, for tests if there are none, and for the trial
TRIED = 5  # labels per class that a trial needs, which holds some of them out
MANY_IMAGES = 3  # images per label from which on labels count as few
LEAD_ERRORS = 1  # standard errors that a simpler candidate must lead the network by
FILE = "train.json"
PSEUDOLABELS = "pseudolabels.csv"
FEATURES = "features"  # folder of the joined features


class Kept(StrEnum):
    """What may be kept as the classifier."""

    BASELINE = "baseline"
    LINEAR = "linear classifier on hog_conv"
    TUNED = "hog_conv"
    JOINED_LINEAR = "linear classifier on joined features"
    JOINED = "joined features and ConvNet"
    JOINED_PSEUDO = "joined features and ConvNet on pseudo-labels"
    PRETRAINED = "pretrained network"  # with --init or --model.name
    PSEUDO = "network on pseudo-labels"  # the same


ALL_JOINED = (Kept.JOINED_LINEAR, Kept.JOINED, Kept.JOINED_PSEUDO)
FITTED = (Kept.BASELINE, Kept.LINEAR, Kept.JOINED_LINEAR)  # by logistic regression only


@dataclass(frozen=True)
class Counts:
    """The images and labels to learn from."""

    images: int  # to train on, with labels or without
    labelled: int
    classes: int
    side: int  # median of the short sides (pixels)
    without: int = 0  # classes none of whose training images has a label
    # whether each class keeps labelled images to train on if a fold is held out
    divisible: bool = True
    foreign: bool = False  # whether the weights of --init are for images of other values


@dataclass(frozen=True)
class Plan:
    """What is to be run, and why."""

    way: str
    model: dict
    why: list[str]
    # whether pseudo-labels are tried. They are used if similar images agree
    pseudolabel: bool = False
    size: int = 0  # of the images (pixels)
    label_size: int = 0  # of the images in the last stage, if it learns from the given labels
    hand_size: int = SIDE  # of the images that hand-made features are computed of, at least
    # of the comparison with training from scratch, which has as long as all stages
    scratch_size: int = 0
    pixels_per_second: float = PIXELS_PER_SECOND["cpu"]  # that are trained on
    fixed_pixels: int = 0  # that each image costs as well
    trial: bool = False  # whether a trial on held-out training images chooses what is kept
    joined: bool = False  # whether the network is joined with hand-made features

    def pass_seconds(self, images: int, size: int) -> float:
        """Return the expected time of a pass over so many images."""
        return images * (size**2 + self.fixed_pixels) / self.pixels_per_second

    def many_passes(self, images: int, size: int, minutes: float) -> bool:
        """Return whether there is time for :data:`MANY_PASSES` over so many images."""
        return MANY_PASSES * self.pass_seconds(images, size) <= 60 * minutes

    @property
    def shares(self) -> dict[str, float]:
        """Of the time, for each stage, in their order."""
        if self.way == "pretrain" and self.joined:
            return SHARES["joined features"]
        if self.way == "pretrain":
            return SHARES["pseudo-labels" if self.pseudolabel else "two stages"]
        return SHARES["with a trial" if self.trial else "from labels"]


@dataclass(frozen=True)
class PseudoLabels:
    """What is known of the labels in ``pseudolabels.csv``."""

    given: int  # images that had a label
    added: int  # images that got one. A label may not reach all
    agreement: float  # of similar images on the class, in percent, with chance at 0
    # of the baseline on the given labels, if the pseudo-labels are used (percent)
    baseline_top1: float | None
    # the same as ``agreement``, of the classes that OUT/teacher predicts
    teacher_agreement: float | None = None


@dataclass
class TrainState:
    """The content of ``train.json``, from which a stopped command resumes."""

    command: dict  # its keys
    data: dict  # those of the images, with what is held out
    counts: Counts
    plan: Plan
    # of each stage, and before the first
    minutes: dict[str, float] = field(default_factory=lambda: {"before": 0.0})
    pseudolabels: PseudoLabels | None = None
    # accuracy on held-out training images of what was tried (percent)
    candidates: dict[Kept, float] | None = None
    # what the last stage trains, by a trial or by a rule. It need not be a candidate
    best: Kept | None = None
    result: dict | None = None  # of the classifier
    scratch: dict | None = None  # of the comparison
    gain: dict | None = None

    @property
    def learns_pseudolabels(self) -> bool:
        """Whether the last stage learns from pseudo-labels."""
        return self.best in (Kept.PSEUDO, Kept.JOINED_PSEUDO)

    def uses_hog_conv(self, part: str) -> bool:
        """Return whether a stage's network has hand-made features."""
        return part == "trial" or (
            part == "last" and self.best not in (None, Kept.PRETRAINED, Kept.PSEUDO)
        )

    def is_fitted(self, part: str) -> bool:
        """Return whether a stage is logistic regression only, which takes seconds."""
        return part == "last" and self.best in FITTED

    def label(self, part: str) -> str:
        """Return a few words on a stage."""
        if part == "last":
            return f"the classifier ({self.best or self.plan.model['name']})"
        return LABELS_OF_STAGES[part]

    def size(self, part: str) -> int:
        """Return the side of the images in a stage (pixels)."""
        if part == "scratch":
            return self.plan.scratch_size
        size = self.network_size(part)
        if self.uses_hog_conv(part):
            return max(self.plan.hand_size, size)
        return size

    def network_size(self, part: str) -> int:
        """Return the side of the images of a stage's network on pixels (pixels)."""
        learns_given_labels = part == "teacher" or (part == "last" and not self.learns_pseudolabels)
        if learns_given_labels:
            return self.plan.label_size
        return self.plan.size

    def choose_by_trial(self, trial: dict, seconds: float) -> None:
        """Choose with all labels, by the accuracy of a trial on held-out training images.

        The network trains longer in the end. So a simpler candidate is kept only if it leads by a
        standard error. If the trial was too short for one pass over the images, because linear fits
        took its time, the network is kept if there is time for enough passes after the fits to all
        images.

        Args:
            trial: Its result.
            seconds: Time that is left for the last stage.
        """
        names = {Kept.BASELINE: "baseline_top1", Kept.LINEAR: "start_top1", Kept.TUNED: "top1"}
        self.candidates = {label: trial[name] for label, name in names.items() if name in trial}
        if not trial["whole_epochs"]:
            del self.candidates[Kept.TUNED]
            remaining = seconds - trial["seconds"] / (1 - HELD_OUT)
            if remaining >= PASSES * self.plan.pass_seconds(self.counts.labelled, self.plan.size):
                self.best = Kept.TUNED
                return
        leader = max(self.candidates, key=self.candidates.get)
        share = self.candidates[leader] / 100
        count = trial.get("test_groups", trial["test_size"])  # images of one group say the same
        lead = self.candidates[leader] - self.candidates.get(Kept.TUNED, -100.0)
        leads = lead > 100 * LEAD_ERRORS * math.sqrt(share * (1 - share) / count)
        self.best = leader if leads else Kept.TUNED

    @property
    def content(self) -> dict:
        """That of the file."""
        return parsing.to_dict(
            {name: value for name, value in asdict(self).items() if value is not None}
        )

    def save(self, out: Path) -> None:
        """Write the file."""
        if distributed.rank() == 0:
            write_json(out / FILE, self.content)


def way_of(command: TrainCommand, pseudolabel: bool = False) -> str:
    """Return ``command.way``, or the strategy that 'auto' stands for, with pseudo-labels or
    without.

    Raises UserError if it contradicts other flags."""
    if command.init:
        usual = "finetune"
    else:
        usual = "pretrain" if pseudolabel else "scratch"
    way = command.way if command.way != "auto" else usual
    if way == "finetune" and not command.init:
        raise UserError("way: finetune starts from weights. Add --init WEIGHTS")
    if way == "scratch" and command.init:
        raise UserError(
            "way: scratch starts from no weights. Leave --init out, or take finetune or pretrain"
        )
    if way == "scratch" and command.pseudolabel:
        raise UserError(
            "pseudolabel: got true, but --way scratch uses the labelled images only. Leave --way out"
        )
    return way


def check_comparison(command: TrainCommand, way: str) -> None:
    """Raise UserError if training from scratch would be compared with itself."""
    if command.compare and way == "scratch":
        remedy = "Add --init WEIGHTS, --way pretrain or --pseudolabel true"
        raise UserError(f"compare: there is no pretraining to compare. {remedy}")


def make_plan(command: TrainCommand, counts: Counts) -> Plan:
    """Return the plan for so many images and minutes (benchmarks/results has the figures)."""
    hindrance = _hindrance(command, counts)
    if command.pseudolabel and hindrance:
        raise UserError(f"pseudolabel: got true, but {hindrance}")
    pseudolabel = command.pseudolabel
    if pseudolabel is None:
        pseudolabel = (
            not hindrance
            and command.way != "scratch"
            and counts.images >= MANY_IMAGES * counts.labelled
        )
    way = way_of(command, pseudolabel)
    check_comparison(command, way)
    if command.way != "auto":
        reason = "as asked"
    elif command.init:
        reason = "as --init has weights. --way pretrain adapts them to the images first"
    elif command.pseudolabel:
        reason = "as --pseudolabel is true"
    elif pseudolabel:
        reason = "as its features help with few labels"
    else:
        cause = (
            f"there are under {MANY_IMAGES} images per label, and images without one are not used"
        )
        if command.pseudolabel is False:
            cause = "--pseudolabel is false"
        reason = f"as {hindrance or cause}"
    each = counts.labelled / counts.classes
    what = f"{counts.images} images to train on, {counts.labelled} of them labelled ({each:.0f} per class)"
    own_model = command.init or command.model.name
    model = parsing.to_dict(command.model) | ({} if own_model else CONVNET)
    from_labels = way == "scratch" and command.data.name in (None, "folder")
    joined = not own_model and (
        pseudolabel or (from_labels and counts.labelled >= TRIED * counts.classes)
    )
    trial = joined and not pseudolabel and counts.divisible
    network = f"model: {model['name']} {json.dumps(model['kwargs'])}"
    why = [
        f"{what}. --way {way}, {reason}",
        f"{network}, joined with hand-made features" if joined else network,
    ]
    device = pick_device(command.device)
    speed = PIXELS_PER_SECOND[device] * (1.0 if model["name"] == CONVNET["name"] else OTHERS)
    cost = {"pixels_per_second": speed, "fixed_pixels": FIXED_PIXELS.get(device, 0)}
    return _sized(
        command, Plan(way, model, why, pseudolabel, trial=trial, joined=joined, **cost), counts
    )


def _hindrance(command: TrainCommand, counts: Counts) -> str | None:
    """Return why the images without a label cannot get pseudo-labels, whatever their number."""
    if command.data.name not in (None, "folder"):
        return f"pseudo-labels are for a folder of images, not for {command.data.name}"
    if counts.images == counts.labelled:
        return "every training image has a label"
    if counts.without:
        return f"{counts.without} of the classes have no label"
    if counts.foreign and command.way in ("auto", "finetune"):  # else stage 1 adapts the weights
        return "the weights of --init are for images of other values. --way pretrain adapts them"
    return None


def _sized(command: TrainCommand, plan: Plan, counts: Counts) -> Plan:
    """Return the plan with the sizes of the images: the largest at which there is time for
    :data:`PASSES`."""
    seconds = max(1.0, 60 * command.minutes - STARTUP)
    # that the images have pixels for
    sides = [side for side in SIZES if side <= counts.side] or SIZES[:1]

    def size_for(each: float) -> int:
        """Return the size at which each view of a pass fits its share of the time, the smallest if
        there is none."""
        fits = [side for side in sides if PASSES * plan.pass_seconds(1, side) <= seconds * each]
        return command.size or max(fits, default=sides[0])

    shares = plan.shares
    if plan.way == "pretrain":
        each = [shares["stage1"] / (CROPS * counts.images)]
    else:
        each = []
    if plan.pseudolabel or not each:
        each.append(shares["last"] / (counts.images if plan.pseudolabel else counts.labelled))
    size = size_for(min(each))
    scratch_size = size_for(1.0 / counts.labelled)
    if plan.pseudolabel:
        label_size = size_for(shares["last"] / counts.labelled)
    else:
        label_size = size
    hand_size = command.size or SIDE
    line = f"size: {size} px" + (
        f" on all images, {label_size} px on labelled ones" if plan.pseudolabel else ""
    )
    if plan.joined and size < hand_size:
        line += f", {hand_size} px for hand-made features"
    if counts.side < (hand_size if plan.joined else size):
        enlarged = ". Smaller images are enlarged"
    else:
        enlarged = ""
    why = [*plan.why, f"{line}. The images' short side is {counts.side} px (median){enlarged}"]
    sizes = {
        "size": size,
        "label_size": label_size,
        "hand_size": hand_size,
        "scratch_size": scratch_size,
    }
    return replace(plan, **sizes, why=why)
