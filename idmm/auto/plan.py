"""The plan of ``idmm train``: the steps that it runs on a folder of images, with the reasons."""

import json
import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from idmm import distributed
from idmm.config import parsing
from idmm.config.commands import TrainCommand
from idmm.errors import Fault, UserError
from idmm.files import Json, write_json
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
LABELS_OF_STEPS = {
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
TRIAL = "trial.csv"  # the labelled images of the trial
FEATURES = "features"  # folder of the joined features


class Classifier(StrEnum):
    """The classifiers to choose from."""

    BASELINE = "baseline"
    LINEAR = "linear classifier on hog_conv"
    TUNED = "hog_conv"
    JOINED_LINEAR = "linear classifier on joined features"
    JOINED = "joined features and ConvNet"
    JOINED_PSEUDO = "joined features and ConvNet on pseudo-labels"
    PRETRAINED = "pretrained network"  # with --init or --model.name
    PSEUDO = "network on pseudo-labels"  # the same


ALL_JOINED = (Classifier.JOINED_LINEAR, Classifier.JOINED, Classifier.JOINED_PSEUDO)
# by logistic regression only
FITTED = (Classifier.BASELINE, Classifier.LINEAR, Classifier.JOINED_LINEAR)


@dataclass(frozen=True)
class Counts:
    """The images and labels to learn from."""

    images: int  # to train on, with labels or without
    labelled: int
    classes: int
    side: int  # median of the short sides (pixels)
    # classes of which no training image has a label. They are left out
    untrained: list[str] = field(default_factory=list)
    # whether each class keeps labelled images to train on if a fold is held out
    divisible: bool = True
    foreign: bool = False  # whether the weights of --init are for images of other values


@dataclass(frozen=True)
class Plan:
    """What is to be run, and why."""

    way: str
    model: Json
    why: list[str]
    # whether pseudo-labels are tried. They are used if similar images agree
    pseudolabel: bool = False
    size: int = 0  # of the images (pixels)
    label_size: int = 0  # of the images in the last step, if it learns from the given labels
    hand_size: int = SIDE  # of the images that hand-made features are computed of, at least
    # of the comparison with training from scratch, which has as long as all steps
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
        """Of the time, for each step, in their order.

        OUT/stage1 learns from all images, the last step is the classifier in OUT.
        """
        if self.trial:
            return {"trial": 0.2, "last": 0.8}
        if self.way != "pretrain":
            return {"last": 1.0}
        if self.joined:
            return {"stage1": 0.5, "teacher": 0.15, "last": 0.35}
        if self.pseudolabel:
            return {"stage1": 0.6, "last": 0.4}
        return {"stage1": 0.4, "last": 0.6}


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

    command: Json  # its keys
    data: Json  # those of the images, with what is held out
    counts: Counts
    plan: Plan
    before: float = 0.0  # minutes of all starts before the first step
    choice: float | None = None  # minutes that choosing the classifier took
    minutes: dict[str, float] = field(default_factory=dict)  # of each step that began
    pseudolabels: PseudoLabels | None = None
    # accuracy on held-out training images of what was tried (percent)
    candidates: dict[Classifier, float] | None = None
    # the classifier of the last step, by a trial or by a rule. It need not be a candidate
    best: Classifier | None = None
    result: Json | None = None  # of the classifier
    scratch: Json | None = None  # of the comparison
    gain: Json | None = None

    @property
    def used_pseudolabels(self) -> PseudoLabels | None:
        """The pseudo-labels, if the last step learns from them."""
        if self.best in (Classifier.PSEUDO, Classifier.JOINED_PSEUDO):
            return self.pseudolabels
        return None

    def uses_hog_conv(self, step: str) -> bool:
        """Return whether a step's network has hand-made features."""
        if step == "last":
            return self.best not in (None, Classifier.PRETRAINED, Classifier.PSEUDO)
        return step == "trial"

    def is_fitted(self, step: str) -> bool:
        """Return whether a step is logistic regression only, which takes seconds."""
        return step == "last" and self.best in FITTED

    def label(self, step: str) -> str:
        """Return a few words on a step."""
        if step == "last":
            return f"the classifier ({self.best or self.plan.model['name']})"
        return LABELS_OF_STEPS[step]

    def size(self, step: str) -> int:
        """Return the side of the images in a step (pixels)."""
        if step == "scratch":
            return self.plan.scratch_size
        size = self.network_size(step)
        if self.uses_hog_conv(step):
            return max(self.plan.hand_size, size)
        return size

    def network_size(self, step: str) -> int:
        """Return the side of the images of a step's network on pixels (pixels)."""
        if step == "teacher" or (step == "last" and not self.used_pseudolabels):
            return self.plan.label_size
        return self.plan.size

    def choose_by_trial(self, trial: Json, seconds: float) -> None:
        """Choose with all labels, by the accuracy of a trial on held-out training images.

        The network trains longer in the end. So a simpler candidate is kept only if it leads by a
        standard error. If the trial was too short for one pass over the images, because linear fits
        took its time, the network is kept if there is time for enough passes after the fits to all
        images.

        Args:
            trial: Its result.
            seconds: Time that is left for the last step.
        """
        names = {
            Classifier.BASELINE: "baseline_top1",
            Classifier.LINEAR: "start_top1",
            Classifier.TUNED: "top1",
        }
        candidates = {label: trial[name] for label, name in names.items() if name in trial}
        self.candidates = candidates
        self.best = Classifier.TUNED
        if not trial["whole_epochs"]:
            del candidates[Classifier.TUNED]
            remaining = seconds - trial["seconds"] / (1 - HELD_OUT)
            if remaining >= PASSES * self.plan.pass_seconds(self.counts.labelled, self.plan.size):
                return
        leader = max(candidates, key=lambda label: candidates[label])
        share = candidates[leader] / 100
        count = trial.get("test_groups", trial["test_size"])  # images of one group say the same
        lead = candidates[leader] - candidates.get(Classifier.TUNED, -100.0)
        if lead > 100 * LEAD_ERRORS * math.sqrt(share * (1 - share) / count):
            self.best = leader

    @property
    def content(self) -> Json:
        """That of the file. Minutes are together there."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        values["minutes"] = {"before": values.pop("before"), **self.minutes}
        if self.choice is not None:
            values["minutes"]["choice"] = values.pop("choice")
        content: Json = parsing.to_dict(values)
        return content

    @classmethod
    def of_content(cls, content: Json) -> "TrainState":
        """Return the state whose :attr:`content` a file has."""
        minutes = content["minutes"]
        times = {"before": minutes.pop("before"), "choice": minutes.pop("choice", None)}
        return TypeAdapter(cls).validate_python(content | times)

    def save(self, out: Path) -> None:
        """Write the file."""
        if distributed.rank() == 0:
            write_json(out / FILE, self.content)


# ---------------------------------------------------------------------- what is chosen
def resolve_way(command: TrainCommand, pseudolabel: bool = False) -> str:
    """Return ``command.way``, or the strategy that 'auto' stands for.

    ``pseudolabel``: Whether there are pseudo-labels.

    Raises:
        UserError: It contradicts other flags.
    """
    way: str = command.way
    if way == "auto":
        if command.init:
            return "finetune"
        return "pretrain" if pseudolabel else "scratch"
    if way == "finetune" and not command.init:
        raise UserError(Fault("way", "finetune starts from weights", "Add --init WEIGHTS"))
    if way == "scratch" and command.init:
        raise UserError(
            Fault(
                "way",
                "scratch starts from no weights",
                "Leave --init out, or take finetune or pretrain",
            )
        )
    if way == "scratch" and command.pseudolabel:
        raise UserError(
            Fault(
                "pseudolabel",
                "got true, but --way scratch uses the labelled images only",
                "Leave --way out",
            )
        )
    return way


def check_comparison(command: TrainCommand, way: str) -> None:
    """Raise UserError if training from scratch would be compared with itself."""
    if command.compare and way == "scratch":
        raise UserError(
            Fault(
                "compare",
                "there is no pretraining to compare",
                "Add --init WEIGHTS, --way pretrain or --pseudolabel true",
            )
        )


def make_plan(command: TrainCommand, counts: Counts) -> Plan:
    """Return the plan for so many images and minutes (benchmarks/results has the figures)."""
    hindrance = _hindrance(command, counts)
    if command.pseudolabel and hindrance:
        raise UserError(Fault("pseudolabel", f"got true, but {hindrance}"))
    pseudolabel = command.pseudolabel
    if pseudolabel is None:
        has_few_labels = counts.images >= MANY_IMAGES * counts.labelled
        pseudolabel = has_few_labels and command.way != "scratch" and not hindrance
    way = resolve_way(command, pseudolabel)
    check_comparison(command, way)
    images_per_class = counts.labelled / counts.classes
    own_model = command.init or command.model.name
    model = parsing.to_dict(command.model)
    if not own_model:
        model |= CONVNET
    from_labels = way == "scratch" and command.data.name in (None, "folder")
    joined = not own_model and (pseudolabel or (from_labels and images_per_class >= TRIED))
    network = f"model: {model['name']} {json.dumps(model['kwargs'])}"
    if joined:
        network = f"{network}, joined with hand-made features"
    device = pick_device(command.device)
    speed = PIXELS_PER_SECOND[device]
    if model["name"] != CONVNET["name"]:
        speed *= OTHERS
    reason = _reason(command, pseudolabel, hindrance)
    labels = (
        f"{counts.images} images to train on, {counts.labelled} of them labelled "
        f"({images_per_class:.0f} per class). --way {way}, as {reason}"
    )
    plan = Plan(
        way,
        model,
        [labels, network],
        pseudolabel,
        pixels_per_second=speed,
        fixed_pixels=FIXED_PIXELS.get(device, 0),
        trial=joined and not pseudolabel and counts.divisible,
        joined=joined,
    )
    plan = _with_sizes(command, plan, counts)
    return replace(plan, why=[*plan.why, _size_line(plan, counts)])


def _hindrance(command: TrainCommand, counts: Counts) -> str | None:
    """Return why the images without a label cannot get pseudo-labels, whatever their number."""
    if command.data.name not in (None, "folder"):
        return f"pseudo-labels are for a folder of images, not for {command.data.name}"
    if counts.images == counts.labelled:
        return "every training image has a label"
    if counts.foreign and command.way in ("auto", "finetune"):  # else stage 1 adapts the weights
        return "the weights of --init are for images of other values. --way pretrain adapts them"
    return None


def _reason(command: TrainCommand, pseudolabel: bool, hindrance: str | None) -> str:
    """Return why a strategy is chosen."""
    if command.way != "auto":
        return "asked"
    if command.init:
        return "--init has weights. --way pretrain adapts them to the images first"
    if command.pseudolabel:
        return "--pseudolabel is true"
    if pseudolabel:
        return "its features help with few labels"
    if hindrance:
        return hindrance
    if command.pseudolabel is False:
        return "--pseudolabel is false"
    return f"there are under {MANY_IMAGES} images per label, and images without one are not used"


def _with_sizes(command: TrainCommand, plan: Plan, counts: Counts) -> Plan:
    """Return the plan with the sizes of the images.

    They are the largest at which there is time for :data:`PASSES`.
    """
    if command.size:
        size = command.size
        return replace(plan, size=size, label_size=size, hand_size=size, scratch_size=size)
    seconds = max(1.0, 60 * command.minutes - STARTUP)

    def size_for(share: float) -> int:
        """Return the size at which a view of a pass fits its share of the time, else the least."""
        size = SIZES[0]
        for side in SIZES:
            has_time = PASSES * plan.pass_seconds(1, side) <= seconds * share
            if has_time and side <= counts.side:  # that the images have pixels for
                size = side
        return size

    shares = plan.shares
    share = shares["last"] / counts.labelled
    label_size = size_for(share)
    if plan.pseudolabel:
        share = shares["last"] / counts.images
    if plan.way == "pretrain":
        share_of_crop = shares["stage1"] / (CROPS * counts.images)
        share = min(share, share_of_crop) if plan.pseudolabel else share_of_crop
    size = size_for(share)
    if not plan.pseudolabel:
        label_size = size
    scratch_size = size_for(1.0 / counts.labelled)
    return replace(plan, size=size, label_size=label_size, scratch_size=scratch_size)


def _size_line(plan: Plan, counts: Counts) -> str:
    """Return the sizes of the images in words."""
    by_labels = ""
    if plan.pseudolabel:
        by_labels = f" on all images, {plan.label_size} px on labelled ones"
    by_hand = ""
    if plan.joined and plan.size < plan.hand_size:
        by_hand = f", {plan.hand_size} px for hand-made features"
    enlarged = ""
    if counts.side < (plan.hand_size if plan.joined else plan.size):
        enlarged = ". Smaller images are enlarged"
    return (
        f"size: {plan.size} px{by_labels}{by_hand}. "
        f"The images' short side is {counts.side} px (median){enlarged}"
    )
