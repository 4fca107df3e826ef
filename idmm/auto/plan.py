"""The plan of ``idmm train``: the steps that it runs on a folder of images, with the reasons."""

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from idmm import distributed
from idmm.config import parsing
from idmm.config.commands import TrainCommand
from idmm.files import Json, write_json
from idmm.models.build import accepts
from idmm.models.hog import SIDE
from idmm.models.hog_conv import CONVNET
from idmm.training.device import pick_device

HOG_CONV = "hog_conv"  # features that do not learn, joined with a network that does
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
MOST = 0.7  # share of the passes without which no network is tried
MANY_PASSES = 60  # passes from which on mixed images help. In stage 1 each crop of an image counts
STARTUP = 20.0  # seconds for imports, for reading images and for the end
HELD_OUT = 0.2  # of the labelled images, for tests if there are none
ENOUGH = 100  # images that the trial holds out, in as many folds as it takes
STAGE1 = 0.4  # share of the time for stage 1, and of the rest for the trial
TRIAL_SHARE = 0.2
FILE = "train.json"
FEATURES = "features"  # folder of the features and of hog_conv without a network that learns
NETWORK = "network"  # folder of hog_conv with it
TRIAL = "trial"  # folder of the trial


class Classifier(StrEnum):
    """The classifiers to choose from."""

    LINEAR = "linear classifier"
    NETWORK = "linear classifier and network"


@dataclass(frozen=True)
class Counts:
    """The images and labels to learn from."""

    images: int  # to train on, with labels or without
    labelled: int
    classes: int
    side: int  # median of the short sides (pixels)
    # classes of which no training image has a label. They are left out
    untrained: list[str] = field(default_factory=list)
    crop_mode: str = "crop"  # that suits their shapes


@dataclass(frozen=True)
class Plan:
    """What is to be run, and why."""

    way: str
    model: Json  # the network that learns
    why: list[str]
    size: int  # of the images of that network (pixels)
    # of the images of weights, of --init or of stage 1, whose features are used. Empty: hand-made
    # features only
    frozen_sizes: list[int] = field(default_factory=list)
    scratch_size: int = 0  # of the comparison with training from scratch
    pixels_per_second: float = PIXELS_PER_SECOND["cpu"]  # that are trained on
    fixed_pixels: int = 0  # that each image costs as well

    @property
    def features_size(self) -> int:
        """Side of the images that features are computed of (pixels)."""
        return max([SIDE, *self.frozen_sizes])

    @property
    def size_together(self) -> int:
        """Side of the images of features and network (pixels)."""
        return max(self.features_size, self.size)

    def pass_seconds(self, images: int, size: int) -> float:
        """Return the expected time of a pass over so many images."""
        return images * (size**2 + self.fixed_pixels) / self.pixels_per_second

    def many_passes(self, images: int, size: int, minutes: float) -> bool:
        """Return whether there is time for :data:`MANY_PASSES` over so many images."""
        return MANY_PASSES * self.pass_seconds(images, size) <= 60 * minutes

    def network_fits(self, images: int, minutes: float) -> bool:
        """Return whether the network has time for most of its passes."""
        return MOST * PASSES * self.pass_seconds(images, self.size) <= 60 * minutes


@dataclass
class TrainState:
    """The content of ``train.json``, from which a stopped command resumes."""

    command: Json  # its keys
    data: Json  # those of the images, with what is held out
    counts: Counts
    plan: Plan
    before: float = 0.0  # minutes of all starts before the first step
    minutes: dict[str, float] = field(default_factory=dict)  # of each step that began
    # accuracy on the images that the trial held out (percent)
    candidates: dict[Classifier, float] | None = None
    best: Classifier | None = None  # the classifier of the last step
    result: Json | None = None  # of the classifier
    scratch: Json | None = None  # of the comparison
    gain: Json | None = None

    def label(self, step: str) -> str:
        """Return a few words on a step."""
        if step == "last":
            return f"the classifier ({self.best})"
        if step == "stage1":
            return "pretraining on all images"
        if step == "scratch":
            return "training from scratch, for comparison"
        return "a trial of a network on a part of the labelled images"

    @property
    def content(self) -> Json:
        """That of the file. Minutes are together there."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        values["minutes"] = {"before": values.pop("before"), **self.minutes}
        content: Json = parsing.to_dict(values)
        return content

    @classmethod
    def of_content(cls, content: Json) -> "TrainState":
        """Return the state whose :attr:`content` a file has."""
        times = {"before": content["minutes"].pop("before")}
        return TypeAdapter(cls).validate_python(content | times)

    def save(self, out: Path) -> None:
        """Write the file."""
        if distributed.rank() == 0:
            write_json(out / FILE, self.content)


# ---------------------------------------------------------------------- what is chosen
def make_plan(
    command: TrainCommand,
    counts: Counts,
    weights_size: int | None = None,
    is_foreign: bool = False,
) -> Plan:
    """Return the plan for so many images and minutes (benchmarks/results has the figures).

    Args:
        command, counts: What the plan is for.
        weights_size: Side of the images of the weights of ``init`` (pixels). None: there are none.
        is_foreign: Whether these weights are for images of other channels or values. Then their
            features are not used, unless stage 1 adapts them.
    """
    model = parsing.to_dict(command.model)
    if not (command.init or command.model.name):
        model |= CONVNET
    device = pick_device(command.device)
    speed = PIXELS_PER_SECOND[device]
    if model["name"] != CONVNET["name"]:
        speed *= OTHERS
    frozen_sizes: list[int] = []
    if weights_size is not None:
        frozen_sizes = [weights_size // 2, weights_size]
        if accepts(model["name"], "img_size"):  # built for one size, as vision transformers are
            own_size = command.size or weights_size
            command = replace(command, size=own_size)
            frozen_sizes = [own_size]
    labels = (
        f"{counts.images} images to train on, {counts.labelled} of them labelled "
        f"({counts.labelled / counts.classes:.0f} per class)"
    )
    network = f"network: {model['name']} {json.dumps(model['kwargs'])}, next to fixed features"
    plan = Plan(
        command.way,
        model,
        [labels, network],
        command.size or SIZES[0],
        pixels_per_second=speed,
        fixed_pixels=FIXED_PIXELS.get(device, 0),
    )
    if not is_foreign and frozen_sizes:
        plan = replace(plan, frozen_sizes=frozen_sizes)
    plan = _with_sizes(command, plan, counts)
    if plan.way == "pretrain" and not plan.frozen_sizes:  # the features of stage 1 are used, too
        plan = replace(plan, frozen_sizes=[plan.size])
    return replace(plan, why=[*plan.why, _size_line(plan, counts)])


def _with_sizes(command: TrainCommand, plan: Plan, counts: Counts) -> Plan:
    """Return the plan with the sizes of the images that networks learn from.

    They are the largest at which there is time for :data:`PASSES`. With weights they are not
    below half of the weights' size, and smaller images are enlarged.
    """
    if command.size:
        return replace(plan, scratch_size=command.size)
    seconds = max(1.0, 60 * command.minutes - STARTUP)

    def size_for(views: int, passes: int, share: float) -> int:
        """Return the largest size at which passes over so many views fit, else the least."""
        size = SIZES[0]
        for side in SIZES:
            has_time = passes * plan.pass_seconds(views, side) <= seconds * share
            if has_time and side <= counts.side:  # that the images have pixels for
                size = side
        return size

    scratch_size = size_for(counts.labelled, PASSES, 1.0)
    if plan.frozen_sizes:
        smallest = plan.frozen_sizes[0]
        size = smallest
        for side in SIZES:
            has_time = PASSES * plan.pass_seconds(counts.labelled, side) <= seconds / 2
            if smallest <= side <= plan.frozen_sizes[-1] and has_time:
                size = side
    elif plan.way == "pretrain":
        size = size_for(CROPS * counts.images, PASSES, STAGE1)
    else:
        size = size_for(counts.labelled, PASSES, 1 - TRIAL_SHARE)
    return replace(plan, size=size, scratch_size=scratch_size)


def _size_line(plan: Plan, counts: Counts) -> str:
    """Return the sizes of the images in words."""
    sizes = f"{SIDE} px for hand-made features"
    if plan.frozen_sizes:
        sides = " and ".join(map(str, plan.frozen_sizes))
        sizes = f"{sides} px for the features of its weights, {sizes}"
    enlarged = ""
    if counts.side < plan.size_together:
        enlarged = ". Smaller images are enlarged"
    return (
        f"size: {plan.size} px for the network, {sizes}. "
        f"The images' short side is {counts.side} px (median){enlarged}"
    )
