"""``idmm train``: from a folder of images to a classifier in a given time, by what was measured to do best."""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from accelerate import PartialState

from idmm import distributed
from idmm.config import PATHS, RESUME_IGNORED, Data, FinetuneConfig, PretrainConfig, parsing
from idmm.config.commands import TrainCommand
from idmm.config.reading import recipe
from idmm.config.schema import merged
from idmm.config.train import Train
from idmm.data import user_lists
from idmm.data.listing import list_images
from idmm.data.registry import resolve_name
from idmm.data.split import LabelsMissing, Listing
from idmm.errors import UserError
from idmm.files import begun, write_csv, write_json
from idmm.progress import BufferedLog, duration, log, logging_by
from idmm.stages import STAGES
from idmm.stages.results import compared
from idmm.stages.run import run_stage
from idmm.stages.train_plan import (
    AROUND,
    BACKBONE,
    FIRST,
    Counts,
    Plan,
    check_comparison,
    choose,
    count,
    of_weights,
    tuned_on,
    way_of,
)
from idmm.stages.train_pseudolabels import ALIKE, pseudolabel
from idmm.training import clock
from idmm.training.run_folder import check_config

RECIPES = {"pretrain": "idmm_fast", "joint": "joint", "finetune": "fast", "scratch": "fast_scratch"}
ADAPT = "adapt"  # pretraining's recipe where there are weights to start from
JITTER_PROB = 0.8
# Small steps at a high rate suit the small ConvNet, in which few-label accuracy was measured so
QUICK = {"train.lr": 2e-3, "train.batch_size": 32, "method.classifier_scale": 10.0}
# What many passes over all labels gain from; with few labels it did harm, and made no difference to pseudo-labels
MIXED = {"augment.mixup_alpha": 0.2, "augment.cutmix_alpha": 1.0}
# With it many passes of IDMM by light crops go on learning what classes have in common; few have no use for it
# (benchmarks/results/pretraining.md)
CUTMIX = 1.0
MANY_LABELS = 20  # a class
MOST_PASSES = 600  # of the teacher over its few images: the time is of more use to the last stage
HELD_OUT = 0.2  # of the labelled images, where there are none to test on
CHANCE = 0.05
LEAST = 0.1  # of the time, for any stage but the first, where those before took too long
SAVED = 0.1  # of a stage's minutes, after which it writes a checkpoint, if not before (train.save_minutes)
SHORTEST = 0.01  # minutes for all stages, which divide them to a thousandth
FILE, LABELS, PSEUDOLABELS = "train.json", "labels.csv", "pseudolabels.csv"


@dataclass
class State:
    """What ``train.json`` holds, so that a stopped command goes on."""

    asked: dict  # the command's keys
    data: dict  # those of the images, with what is held out
    counts: Counts
    plan: Plan
    minutes: dict[str, float] = field(default_factory=lambda: {"before": 0.0})  # of each stage, and before the first
    pseudolabels: dict | None = None
    result: dict | None = None  # of the classifier
    scratch: dict | None = None  # of the comparison
    gain: dict | None = None

    @property
    def trusted(self) -> bool:
        """Whether the last stage learns from pseudo-labels."""
        return self.pseudolabels is not None and self.pseudolabels["alike"] >= ALIKE

    def size(self, part: str) -> int:
        """The side of the images in a stage (pixels)."""
        if part == "scratch":
            return self.plan.scratch_size
        few = part == "teacher" or (part == "last" and self.plan.pseudolabel and not self.trusted)
        return self.plan.few_size if few else self.plan.size

    def told(self) -> dict:
        """Returns what the file holds."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Where it is called from Python: has the stages show what was said before them, as they do of commands."""
    with contextlib.nullcontext() if log.handlers else logging_by(BufferedLog()):
        yield


@_logged()
def train(given: TrainCommand | dict | str, started_at: float | None = None) -> dict:
    """Trains a classifier on a folder of images in ``given.minutes``; ``given.out`` is the run that fine-tunes it.

    ``given`` is a TrainCommand, a mapping of its keys (those of ``idmm train --help``), or the path of a YAML file.
    The minutes count from ``started_at`` (``clock.now()``; None: from this call).

    Stage 1, where there is one, lies in OUT/stage1, what made pseudo-labels in OUT/teacher, the comparison in
    OUT/scratch. A command that was stopped goes on.

    Returns:
        What ``train.json`` holds: ``counts`` of the images, the ``plan`` with its reasons, ``result``, that of the
        classifier, and with ``compare`` ``scratch``, that of training from scratch, and ``gain`` over it: ``points``,
        and ``p``, the chance of a difference as large between equals.

    Raises:
        UserError: No labels, a mistake in the flags, or ``out`` holds something else.
        RunError: Training could not go on.
    """
    began, given = clock.now() if started_at is None else started_at, parsing.build(TrainCommand, given)
    if given.data.folds:
        raise UserError(f"data.folds: got {given.data.folds}, but idmm train makes a single classifier; wanted null")
    way_of(given)  # before anything is read
    given = replace(given, data=resolve_name(given.data)[0])
    out = Path(given.out)
    state = _load(given, out)
    new = not out.exists() or not any(out.iterdir())
    if state is None:
        ends = time.strftime("%H:%M", time.localtime(time.time() + began - clock.now() + 60 * given.minutes))
        more = ", and as long again for --compare" if given.compare else ""
        log.info("%g minute%s, until about %s%s", given.minutes, "s" * (given.minutes != 1), ends, more)
    else:
        check_comparison(given, state.plan.way, state.plan.pseudolabel)  # which may be asked for by now
    try:
        state = _agreed(state or _planned(given, out), given.device)
        for line in state.plan.why:
            log.info("%s", line)
        if state.result:
            print(f"{out}: finished already, nothing to do")
        else:
            _run(given, state, (clock.now() - began) / 60)
            write_json(out / FILE, state.told())
    except UserError:  # of a stage, too: another command may take the folder
        busy = any(begun(out / part) for part in ("", "stage1", "teacher")) or any(out.rglob("*.lock"))
        if not busy:
            shutil.rmtree(out, ignore_errors=True) if new else (out / FILE).unlink(missing_ok=True)
        raise
    if given.compare and not state.scratch:
        state.scratch = _stage(given, state, "scratch", given.minutes)
        state.gain = compared(out, out / "scratch")
        write_json(out / FILE, state.told())
    _say(state)
    print(f"{out / FILE}; the classifier is {out / 'model.safetensors'}")
    return state.told()


def _agreed(state: State, device: str) -> State:
    """Returns what the first process found: another may have read the plan's file later."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=distributed.pick_device(device) == "cpu")
    return distributed.broadcast(state)


# ---------------------------------------------------------------------- what there is, what to do
def _asked(given: TrainCommand) -> dict:
    """The keys that another call of the same command has; ``compare`` may be asked for later."""
    return {key: value for key, value in parsing.to_dict(given).items() if key not in ("out", "compare")}


def _load(given: TrainCommand, out: Path) -> State | None:
    """What an earlier call of the same command found and did."""
    if out.is_file():
        raise UserError(f"out: '{out}' is a file; wanted a new folder")
    try:
        told = json.loads((out / FILE).read_text())
        state = State(**{**told, "counts": Counts(**told["counts"]), "plan": Plan(**told["plan"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"out: '{out / FILE}' cannot be read ({error}); name a new folder") from None
    check_config(out, parsing.flatten(state.asked), parsing.flatten(_asked(given)))
    return state


def _planned(given: TrainCommand, out: Path) -> State:
    """Looks at the images, and chooses what to do."""
    told = of_weights(given)
    data, splits = _splits(told.data, out)
    counts = count(splits, data)
    return State(_asked(given), parsing.to_dict(data), counts, choose(replace(told, data=data), counts))


def _splits(data: Data, out: Path) -> tuple[Data, Listing]:
    """All images to learn from; a part of the labelled ones is held out where there are none to test on."""
    if data.subset is not None and data.labelled is not None:
        raise UserError("data.labelled: given beside data.subset, from which fine-tuning cannot draw; give one of them")
    try:
        list_images(data, labelled=True, unlabelled=True)
    except LabelsMissing:
        if data.val_fraction:
            raise
        data = replace(data, val_fraction=HELD_OUT)
        list_images(data, labelled=True, unlabelled=True)
        log.info("data.val_fraction: %g, as there are no images to test on", HELD_OUT)
    data = _written_out(data, out)
    return data, list_images(data, labelled=True, unlabelled=True)


def _written_out(data: Data, out: Path) -> Data:
    """Returns the data with a list of classes and splits, OUT/labels.csv, where training without labels cannot tell
    classes (some images have none, say): without it that would not leave out the images that are held out."""
    whole = replace(data, subset=None, labelled=None)
    if data.name != "folder" or not data.val_fraction:
        return data
    plain = list_images(replace(whole, val_fraction=0.0), labelled=False, unlabelled=False)
    if plain.train.labels is not None:
        return data
    write_csv(out / LABELS, user_lists.class_rows(list_images(whole, labelled=True).parts))
    return replace(data, labels=str(out / LABELS), val_fraction=0.0)


# ---------------------------------------------------------------------- the runs
def _run(given: TrainCommand, state: State, before: float) -> None:
    """Runs the plan's stages in the time that there is, of which ``before`` (minutes) is gone. How long each stage may
    take is written down when it begins, so that it can be taken up again."""
    out, spent, results = Path(given.out), state.minutes, {}
    spent["before"] += distributed.broadcast(before)  # of each start
    left = given.minutes - spent["before"]
    if left < SHORTEST and not spent.keys() & state.plan.shares.keys():
        gone = f"{duration(60 * before)} were gone before the first stage"
        wanted = max(2 * before, before + AROUND / 60)
        raise UserError(f"minutes: got {given.minutes:g}, but {gone}; wanted at least {wanted:.2g}")
    shares = list(state.plan.shares.items())
    for number, (part, share) in enumerate(shares):
        if part == "last" and state.plan.pseudolabel:
            if state.pseudolabels is None:
                began = clock.now()
                state.pseudolabels = _pseudolabels(given, state)
                spent["pseudolabels"] = distributed.broadcast((clock.now() - began) / 60)
            left -= spent["pseudolabels"]
        due = left * share / sum(of for _, of in shares[number:])
        spent.setdefault(part, distributed.broadcast(round(max(due, LEAST * given.minutes), 3)))
        write_json(out / FILE, state.told())
        results[part] = _stage(given, state, part, spent[part])
        left -= results[part]["seconds"] / 60
    state.result = results["last"]
    if state.trusted:  # the floor is what the given labels reach, not those that were found
        floor = {name: value for name, value in results["teacher"].items() if name == "baseline_top1"}
        state.result = results["last"] | floor
        write_json(out / "result.json", state.result)


def _pseudolabels(given: TrainCommand, state: State) -> dict:
    """Labels the images that have no label by what was learned; returns what is to be said of it."""
    found, out = None, Path(given.out)
    if distributed.rank() == 0:
        runs = [str(out / part) for part in state.plan.shares if part != "last"]  # the features of each count
        found = pseudolabel(runs, _data(given, state), given.device, out / PSEUDOLABELS)
    return distributed.broadcast(found)


def _stage(given: TrainCommand, state: State, part: str, minutes: float) -> dict:
    """Runs a stage for so many minutes; returns its result."""
    name, config = _config(given, state, part, minutes)
    folder, size = config["out"], state.size(part)
    mixed = any(config.get(section, {}).get("cutmix_alpha") for section in ("augment", "method"))
    goes = f"{folder} goes on" if begun(folder) else folder
    log.info("%s: %s at %d px%s, %s", goes, name, size, ", CutMix" * mixed, duration(60 * minutes))
    return run_stage(STAGES["pretrain" if part == "stage1" else "finetune"].build(config))


def _begins(plan: Plan, part: str, out: Path) -> tuple[str, str | None]:
    """Returns which of the ways a stage is, and the weights that it starts from."""
    if part == "stage1":
        return plan.way, plan.init
    if part == "scratch":
        return "scratch", None
    learned = str(out / "stage1") if plan.way in FIRST else plan.init
    if plan.init or (plan.way == "joint" and not plan.pseudolabel):
        return "finetune", learned
    # with pseudo-labels fresh weights learn more from the labels than those that found them
    return "scratch", None if plan.pseudolabel and part == "last" else learned


def _data(given: TrainCommand, state: State) -> Data:
    """The images, with paths and all that does not change results as this command has them."""
    names = [key.removeprefix("data.") for key in (*RESUME_IGNORED, *PATHS) if key.startswith("data.")]
    data = replace(Data(**state.data), **{name: getattr(given.data, name) for name in names})
    written = state.data["labels"] != state.asked["data"]["labels"]  # by _written_out
    return replace(data, labels=str(Path(given.out) / LABELS)) if written else data


def _config(given: TrainCommand, state: State, part: str, minutes: float) -> tuple[str, dict]:
    """Returns a stage's recipe and its config: the recipe, on the images and at the size of the plan."""
    plan, data, out, size = state.plan, _data(given, state), Path(given.out), state.size(part)
    way, init = _begins(plan, part, out)
    name = ADAPT if way == "pretrain" and init else RECIPES[way]
    own = {"seed": given.seed, "out": str(out if part == "last" else out / part)}
    own |= {"train.minutes": minutes, "train.save_minutes": min(Train().save_minutes, SAVED * minutes)}
    own |= {"train.device": given.device} | ({"init": init} if init else {"model": plan.model})
    if part == "stage1":
        images = state.counts.images
        shipped = recipe(PretrainConfig, name)
        light = recipe(PretrainConfig, RECIPES["pretrain"])["views"]  # for the other recipes, too
        own |= {f"views.{key}": value for key, value in light.items()} | {"views.size": size, "views.flip": given.flip}
        own |= {"views.jitter": [given.jitter, given.jitter, 0.0, 0.0], "views.jitter_prob": JITTER_PROB}
        quick = not init and plan.model["name"] == BACKBONE["name"]  # the small ConvNet, from fresh weights
        if quick:
            shipped = merged(shipped, QUICK)
        if way == "pretrain":
            data = replace(data, labelled=None)
            own["method.cutmix_alpha"] = CUTMIX * (quick and plan.many_passes(images, size, minutes))
    else:
        images = state.counts.labelled
        shipped = recipe(FinetuneConfig, name)
        found = part == "last" and state.trusted  # learns from pseudo-labels
        if found:
            images = state.pseudolabels["given"] + state.pseudolabels["found"]
            # the file says who is held out, and of which group images are
            data = replace(data, labels=str(out / PSEUDOLABELS), subset=None, labelled=None, groups=None)
            data = replace(data, val_fraction=0.0)
        data = tuned_on(data)
        own |= {"train.size": size, "augment.flip": given.flip}
        if way == "scratch":
            own["train.classifier_init"] = "random"  # its weights change more than a fitted one allows
            many = images >= MANY_LABELS * state.counts.classes
            if not found and many and plan.many_passes(images, size, minutes):
                own |= MIXED
        if part == "teacher":
            own["train.max_epochs"] = MOST_PASSES
    eighth = 2 ** int(math.log2(max(1, images / 8)))  # few images: small batches, as networks learn by steps
    own["train.batch_size"] = min(shipped["train"]["batch_size"], max(8, eighth))
    if init and init == plan.init:
        own |= {f"model.{key}": getattr(given.model, key) for key in parsing.changed(given.model)}
    return name, merged(shipped, {**own, "data": parsing.to_dict(data)})


# ---------------------------------------------------------------------- what came of it
def _say(state: State) -> None:
    """Prints the accuracy beside what it has to be read with."""
    result = state.result
    low, high = result["top1_interval"]
    tested = f"({low:.1f} to {high:.1f}) on {result['test_size']} test images"
    print(f"{state.plan.way} at {state.size('last')} px: top-1 {result['top1']:.1f} % {tested}")
    floors = {"the baseline, by the given labels": result.get("baseline_top1")}
    floors["the largest class every time"] = result["largest_class"]
    for label, value in floors.items():
        if value is not None:
            print(f"  {label}: {value:.1f} %")
    if state.gain:
        points, p, scratch = state.gain["points"], state.gain["p"], state.scratch
        verdict = "a gain" if points > 0 else "a loss"
        verdict = verdict if p < CHANCE else "too small to tell from chance"
        print(f"  from scratch at {state.size('scratch')} px, in {scratch['seconds']:.0f} s: {scratch['top1']:.1f} %")
        print(f"  the difference: {points:+.1f} points, {verdict} (p = {p:.2g})")
