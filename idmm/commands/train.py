"""``idmm train``: from a folder of images to a classifier in a given time, by what was measured to do best."""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from accelerate import PartialState

from idmm import clock, distributed, environment
from idmm.commands.train_plan import (
    AROUND,
    BACKBONE,
    FIRST,
    LEAST,
    Plan,
    check_comparison,
    choose,
    count,
    of_weights,
    tuned_on,
    way_of,
)
from idmm.commands.train_pseudolabels import ALIKE, pseudolabel
from idmm.config import FREE, Data, parsing
from idmm.config.commands import TrainCommand
from idmm.config.reading import recipe
from idmm.config.train import Train
from idmm.data import user_lists
from idmm.data.datasets import open_splits
from idmm.data.registry import resolve_name
from idmm.data.split import LabelsMissing, Splits
from idmm.errors import UserError
from idmm.files import begun, write_csv, write_json
from idmm.progress import KeptLog, duration, log, logging_by, said_once
from idmm.stages import STAGES, beginning
from idmm.stages.results import compared
from idmm.transfer.config import merged

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
BETTER = "try more --minutes, a smaller --size, or for photographs public weights (--init timm:NAME), in a new --out"
SAVED = 0.1  # of a stage's minutes, after which it writes a checkpoint, if not before (train.save_minutes)
SHORTEST = 0.01  # minutes for all stages, which divide them to a thousandth
FILE, LABELS, PSEUDOLABELS = "train.json", "labels.csv", "pseudolabels.csv"


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Where it is called from Python: has the stages show what was said before them, as they do of commands."""
    with contextlib.nullcontext() if log.handlers else logging_by(KeptLog()):
        yield


@_logged()
@said_once()
def train(given: TrainCommand | dict | str) -> dict:
    """Trains a classifier on a folder of images in ``given.minutes``; ``given.out`` is the run that fine-tunes it.

    ``given`` is a TrainCommand, a mapping of its keys (those of ``idmm train --help``), or the path of a YAML file.

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
    began, given = beginning(), parsing.build(TrainCommand, given)
    if given.data.folds:
        raise UserError(f"data.folds: got {given.data.folds}, but idmm train makes a single classifier; wanted null")
    if given.data.root is None and given.data.name is None:
        raise UserError("DIR: missing; wanted is the folder of your images, or the name of a dataset (--data.name)")
    way_of(given)  # before anything is read
    given = replace(given, data=resolve_name(given.data)[0])
    out = Path(given.out)
    kept, new = _kept(out, given), not out.exists()
    if "plan" in kept:
        check_comparison(given, kept["plan"]["way"], kept["plan"]["pseudolabel"])  # which may be asked for by now
    else:
        log.info("%s", _times(given, began))
    try:
        if "plan" not in kept:
            told = of_weights(given)
            data, splits = _splits(told.data, out)
            counts = count(splits, data)
            plan = choose(replace(told, data=data), counts)
            kept |= {"data": parsing.plain(data), "counts": asdict(counts), "plan": asdict(plan)}
        kept = _agreed(kept, given.device)
        for line in kept["plan"]["why"]:
            log.info("%s", line)
        if "result" in kept:
            print(f"{out}: finished already, nothing to do")
        else:
            kept["result"] = _run(given, kept, out, (clock.now() - began) / 60)
            write_json(out / FILE, kept)
    except UserError:
        _cleared(out, new)
        raise
    if given.compare and "scratch" not in kept:
        kept["scratch"] = _stage(given, kept, "scratch", None, out / "scratch", given.minutes)
        kept["gain"] = compared(out, out / "scratch")
        write_json(out / FILE, kept)
    _say(given, kept)
    print(f"{out / FILE}; the classifier is {out / 'model.safetensors'}")
    return kept


def _agreed(kept: dict, device: str) -> dict:
    """Returns what the first process found: another may have read the plan's file later."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=distributed.pick_device(device) == "cpu")
    return distributed.broadcast(kept)


def _times(given: TrainCommand, began: float) -> str:
    """Says how long it will take, and until when."""
    usual = " (the default; --minutes M)" if given.minutes == TrainCommand(out="x").minutes else ""
    ends = time.strftime("%H:%M", time.localtime(time.time() + began - clock.now() + 60 * given.minutes))
    more = ", and as long again for --compare" if given.compare else ""
    minutes = "1 minute" if given.minutes == 1 else f"{given.minutes:g} minutes"
    return f"{minutes}{usual}, until about {ends}{more}"


def _cleared(out: Path, new: bool) -> None:
    """Removes what a refused command wrote where nothing was trained; ``new``: there was no such folder before."""
    if (
        begun(out) or any((out / part).exists() for part in ("stage1", "teacher")) or any((out / "last").glob("*.lock"))
    ):  # locked by another run
        return
    for name in (FILE, LABELS, *(("config.yaml", "log.txt", environment.FILE) if new else ())):
        (out / name).unlink(missing_ok=True)
    if new:
        shutil.rmtree(out / "last", ignore_errors=True)


# ---------------------------------------------------------------------- what there is, what to do
def _kept(out: Path, given: TrainCommand) -> dict:
    """What an earlier call of the same command found and did; ``compare`` may be asked for later."""
    asked = {key: value for key, value in parsing.plain(given).items() if key not in ("out", "compare")}
    if out.is_file():
        raise UserError(f"out: '{out}' is a file; wanted a new folder")
    try:
        kept = json.loads((out / FILE).read_text())
        before = parsing.flatten(kept["asked"])
    except FileNotFoundError:
        return {"asked": asked}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"out: '{out / FILE}' cannot be read ({error}); name a new folder") from None
    faults = [
        f"{key}: {before.get(key)} in '{out}', asked for now is {new}"
        for key, new in parsing.flatten(asked).items()
        if before.get(key) != new and key not in FREE
    ]
    if faults:
        raise UserError(*faults, f"out: '{out}' belongs to another command; name a new folder or ask for the same")
    return kept


def _splits(data: Data, out: Path) -> tuple[Data, Splits]:
    """All images to learn from; a part of the labelled ones is held out where there are none to test on."""
    if data.subset is not None and data.labelled is not None:
        raise UserError("data.labelled: given beside data.subset, from which fine-tuning cannot draw; give one of them")
    try:
        open_splits(data, labelled=True, unlabelled=True)
    except LabelsMissing as error:
        if data.val_fraction:
            raise
        data = replace(data, val_fraction=HELD_OUT)
        try:
            open_splits(data, labelled=True, unlabelled=True)
        except LabelsMissing:
            raise error from None
        log.info("data.val_fraction: %g, as there are no images to test on", HELD_OUT)
    data = _written_out(data, out)
    return data, open_splits(data, labelled=True, unlabelled=True)


def _written_out(data: Data, out: Path) -> Data:
    """Returns the data with a list of classes and splits, OUT/labels.csv, where training without labels cannot tell
    classes (some images have none, say): without it that would not leave out the images that are held out."""
    whole = replace(data, subset=None, labelled=None)
    if data.name != "folder" or not data.val_fraction:
        return data
    plain = open_splits(replace(whole, val_fraction=0.0), labelled=False, unlabelled=False)
    if plain.train.labels is not None:
        return data
    write_csv(out / LABELS, user_lists.class_rows(open_splits(whole, labelled=True).parts))
    return replace(data, labels=str(out / LABELS), val_fraction=0.0)


# ---------------------------------------------------------------------- the runs
def _run(given: TrainCommand, kept: dict, out: Path, before: float) -> dict:
    """Runs the plan's stages in the time that there is, of which ``before`` (minutes) is gone; returns the classifier's
    result. How long each stage may take is written down when it begins, so that it can be taken up again."""
    plan, spent = Plan(**kept["plan"]), kept.setdefault("minutes", {"before": 0.0})
    spent["before"] += distributed.broadcast(before)  # of each start
    left = given.minutes - spent["before"]
    if left < SHORTEST and not spent.keys() & plan.shares.keys():
        gone = f"{duration(60 * before)} were gone before the first stage"
        wanted = max(2 * before, before + AROUND / 60)
        raise UserError(f"minutes: got {given.minutes:g}, but {gone}; wanted at least {wanted:.2g}")
    shares = list(plan.shares.items())
    for number, (part, share) in enumerate(shares):
        if part == "last" and plan.pseudolabel:
            if "pseudolabels" not in kept:
                began = clock.now()
                kept["pseudolabels"] = _pseudolabels(given, kept, out)
                spent["pseudolabels"] = distributed.broadcast((clock.now() - began) / 60)
            left -= spent.get("pseudolabels", 0.0)
        due = left * share / sum(of for _, of in shares[number:])
        spent.setdefault(part, distributed.broadcast(round(max(due, LEAST * given.minutes), 3)))
        write_json(out / FILE, kept)
        folder = out if part == "last" else out / part
        result = _stage(given, kept, *_begins(plan, part, out), folder, spent[part])
        left -= result["seconds"] / 60
    if _trusted(kept):  # the floor is what the given labels reach, not those that were found
        floor = kept["pseudolabels"]["pixel_knn"]
        result = {**result, "pixel_knn": floor}
        if floor is None:
            del result["pixel_knn"]
        write_json(out / "result.json", result)
    return result


def _begins(plan: Plan, part: str, out: Path) -> tuple[str, Path | str | None]:
    """Returns which stage a part of the plan is, and the weights that it starts from."""
    if part == "stage1":
        return plan.way, plan.init
    learned = out / "stage1" if plan.way in FIRST else plan.init
    if plan.init or (plan.way == "joint" and not plan.pseudolabel):
        return "finetune", learned
    if plan.pseudolabel and part == "last":  # fresh weights learn more from the labels than those that found them
        learned = None
    return "scratch", learned


def _pseudolabels(given: TrainCommand, kept: dict, out: Path) -> dict:
    """Labels the images that have no label by what the teacher learned; returns what is to be said of it."""
    learned = ["stage1", "teacher"] if kept["plan"]["way"] in FIRST else ["teacher"]  # the features of both count
    found = None
    if distributed.rank() == 0:
        with distributed.alone():
            runs = [str(out / part) for part in learned]
            found = pseudolabel(runs, _data(given, kept), given.device, out / PSEUDOLABELS)
    found = distributed.broadcast(found)
    if found["alike"] < ALIKE:
        log.info("so the classifier learns from the %d given labels alone", found["given"])
    return found | {"pixel_knn": json.loads((out / "teacher/result.json").read_text()).get("pixel_knn")}


def _trusted(kept: dict) -> bool:
    """Whether the last stage learns from pseudo-labels."""
    return kept.get("pseudolabels", {"alike": 0})["alike"] >= ALIKE


def _data(given: TrainCommand, kept: dict) -> Data:
    """The images, with what does not change results as it is asked for now."""
    free = [key.removeprefix("data.") for key in FREE if key.startswith("data.")]
    return replace(Data(**kept["data"]), **{name: getattr(given.data, name) for name in free})


def _config(given: TrainCommand, kept: dict, name: str, init: Path | str | None, folder: Path, minutes: float) -> dict:
    """Returns the config of a stage: its recipe, on the images and at the size of the plan."""
    stage, used = STAGES["pretrain" if name in FIRST else "finetune"], _recipe(name, init)
    plan, data, out = Plan(**kept["plan"]), _data(given, kept), Path(given.out)
    quick = not init and plan.model["name"] == BACKBONE["name"]  # the small ConvNet, from fresh weights
    labels = stage.name == "finetune"
    images = kept["counts"]["labelled" if labels else "images"]
    given_alone = labels and not (folder == out and _trusted(kept))  # no pseudo-labels
    if labels and not given_alone:
        images = kept["pseudolabels"]["given"] + kept["pseudolabels"]["found"]
        data = replace(data, labels=str(out / PSEUDOLABELS), subset=None, labelled=None, groups=None)
        data = replace(data, val_fraction=0.0)  # the file says who is held out, and of which group images are
    size = _size(kept, _part(folder, out))
    if labels:
        data, own = tuned_on(data), {"train.size": size, "augment.flip": given.flip}
    else:
        data = data if name == "joint" else replace(data, labelled=None)
        light = recipe(stage.config, RECIPES["pretrain"])["views"]  # for the other recipes, too
        own = {f"views.{key}": value for key, value in light.items()} | {"views.size": size, "views.flip": given.flip}
        own |= {"views.jitter": [given.jitter, given.jitter, 0.0, 0.0], "views.jitter_prob": JITTER_PROB}
        if name == "pretrain":
            own["method.cutmix_alpha"] = CUTMIX * (quick and plan.many_passes(images, size, minutes))
    shipped = recipe(stage.config, used)
    if name in FIRST and quick:
        shipped = merged(shipped, QUICK)
    eighth = 2 ** int(math.log2(max(1, images / 8)))  # few images: small batches, as networks learn by steps
    own["train.batch_size"] = min(shipped["train"]["batch_size"], max(8, eighth))
    own |= {"out": str(folder), "seed": given.seed, "train.minutes": minutes, "train.device": given.device}
    own["train.save_minutes"] = min(Train().save_minutes, SAVED * minutes)
    own |= {"init": str(init)} if init else {"model": plan.model}
    if name == "scratch":
        own["train.classifier_init"] = "random"  # its weights change more than a fitted one allows
        many = images >= MANY_LABELS * kept["counts"]["classes"]
        if given_alone and many and plan.many_passes(images, size, minutes):
            own |= MIXED
    if _part(folder, out) == "teacher":
        own["train.max_epochs"] = MOST_PASSES
    if init and str(init) == plan.init:
        own |= {f"model.{key}": getattr(given.model, key) for key in parsing.changed(given.model)}
    return merged(shipped, {**own, "data": parsing.plain(data)})


def _part(folder: Path, out: Path) -> str:
    """Returns the name of a stage in ``train.json``."""
    return "last" if folder == out else folder.name


def _recipe(name: str, init: Path | str | None) -> str:
    """Returns the name of a stage's recipe."""
    return ADAPT if name == "pretrain" and init else RECIPES[name]


def _stage(given: TrainCommand, kept: dict, name: str, init: Path | str | None, folder: Path, minutes: float) -> dict:
    """Runs a stage for so many minutes; returns its result."""
    stage = STAGES["pretrain" if name in FIRST else "finetune"]
    config = _config(given, kept, name, init, folder, minutes)
    size, mixed = _size(kept, _part(folder, Path(given.out))), ""
    if config.get("augment", {}).get("cutmix_alpha"):
        mixed = ", with Mixup and CutMix"
    elif config.get("method", {}).get("cutmix_alpha"):
        mixed = ", with CutMix"
    goes = f"{folder} goes on" if begun(folder) else f"{folder}"
    log.info("%s: --config %s%s, %s at %d px", goes, _recipe(name, init), mixed, duration(60 * minutes), size)
    return stage.run(config)


# ---------------------------------------------------------------------- what came of it
def _size(kept: dict, part: str) -> int:
    """Returns the side of the images in a part of the plan (pixels)."""
    plan = kept["plan"]
    if part == "scratch":
        return plan["scratch_size"]
    few = part == "teacher" or (part == "last" and plan["pseudolabel"] and not _trusted(kept))
    return (few and plan["few_size"]) or plan["size"]


def _say(given: TrainCommand, kept: dict) -> None:
    """Prints the accuracy beside what it has to be read with."""
    result, plan = kept["result"], kept["plan"]
    low, high = result["top1_interval"]
    tested = f"({low:.1f} to {high:.1f}) on {result['test_size']} test images"
    print(f"{plan['way']} at {_size(kept, 'last')} px: top-1 {result['top1']:.1f} % {tested}")
    pixels = kept["pseudolabels"]["pixel_knn"] if _trusted(kept) else result.get("pixel_knn")
    by = " by the given labels" * _trusted(kept)
    floors = {f"kNN of raw pixels{by}": pixels, "the largest class every time": result["largest_class"]}
    for label, value in floors.items():
        if value is not None:
            print(f"  {label}: {value:.1f} %")
    if result["top1"] <= max(value for value in floors.values() if value is not None):
        print(f"  which it does not beat: {BETTER}")
    if "gain" in kept:
        points, p = kept["gain"]["points"], kept["gain"]["p"]
        what = " and ".join(["pretraining"] * (plan["way"] != "scratch") + ["pseudo-labels"] * _trusted(kept))
        said = f"{what} helped" if points > 0 else f"{what} did harm"
        said = said if p < CHANCE else "too small to tell from chance"
        if plan["pseudolabel"] and not _trusted(kept) and not plan["init"]:
            said = "both learned from the given labels alone, the first in less time"
        seconds = kept["scratch"]["seconds"]
        print(f"  from scratch at {_size(kept, 'scratch')} px, in {seconds:.0f} s: {kept['scratch']['top1']:.1f} %")
        print(f"  the difference: {points:+.1f} points, {said} (McNemar's p = {p:.2g})")
