"""``idmm train``: from a folder of images to a classifier in a given time, by what was measured to do best."""

import contextlib
import json
import logging
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from idmm import environment
from idmm.config import FREE, Augment, Data, parsing
from idmm.config.commands import TrainCommand
from idmm.config.reading import recipe
from idmm.data import datasets, user_lists
from idmm.data.datasets import open_splits
from idmm.data.images import BadImage, bands_of, probe
from idmm.data.registry import resolve_name
from idmm.data.split import LabelsMissing, Splits
from idmm.errors import UserError
from idmm.files import begun, write_csv, write_json
from idmm.progress import brief, duration, log
from idmm.stages import STAGES, beginning
from idmm.stages.advice import suited_batch
from idmm.stages.budget import TooShort
from idmm.stages.results import compared
from idmm.transfer.config import merged

RECIPES = {"pretrain": "idmm_fast", "joint": "joint", "finetune": "fast", "scratch": "fast_scratch"}
BACKBONE = {"name": "resnet10t", "kwargs": {"channels": [32, 64, 128, 256]}}
# Two crops without colours: kNN 83 on small photographs, where the recipe's six with colours have 74 (docs/minutes.md)
CROPS = 2
LIGHT = {"views.crops": [{"count": CROPS, "scale": [0.35, 1.0]}]}
LIGHT |= dict.fromkeys(("views.jitter_prob", "views.grey_prob", "views.blur_prob"), 0.0)
SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224)
TIMED = 16  # images of a step, to find out how long one takes
LOOKED_AT = 64  # images, for their sizes
PASSES = 30  # over the images, which a size must leave time for
SURE = 8.0  # times too slow for a single pass, by a few steps: larger batches and lower precision do not mend that
AROUND = 20.0  # seconds of imports, reading images, timing and the end
HELD_OUT = 0.2  # of the labelled images, where there are none to test on
SHARE = 0.7  # of the time, for the first of two stages ...
LEAST = 0.1  # ... and what the second one has at least, where the first took too long
CHANCE = 0.05
UNEQUAL = 1.2  # times its minutes, from which on a comparison is not over equal time
FILE, LABELS = "train.json", "labels.csv"
MANY_IMAGES = 3  # times the labelled ones, from which on it is worth saying what could be done with them


@dataclass(frozen=True)
class Counts:
    """What there is to learn from."""

    images: int  # to train on, with labels or without
    labelled: int
    classes: int
    side: int  # median of the short sides (pixels)


@dataclass(frozen=True)
class Plan:
    """What is to be run, and why."""

    way: str
    model: dict
    size: int
    why: list[str]


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """Has what is said of a folder or list of images said once, though each stage reads them again."""
    said: dict[tuple, logging.LogRecord] = {}

    def first(record: logging.LogRecord) -> bool:
        key = (record.msg, *(record.args or ())[:1])  # the words, and the folder or file
        return record.levelno > logging.INFO or said.setdefault(key, record) is record

    with contextlib.ExitStack() as stack:
        for reader in (datasets.log, user_lists.log):
            reader.addFilter(first)
            stack.callback(reader.removeFilter, first)
        yield


@_said_once()
def train(given: TrainCommand) -> dict:
    """Trains a classifier on a folder of images in ``given.minutes``; ``given.out`` is the run that fine-tunes it.

    Stage 1, where there is one, lies in OUT/stage1, the comparison in OUT/scratch. A command that was stopped goes on.

    Returns:
        What ``train.json`` holds: ``counts`` of the images, the ``plan`` with its reasons, ``result``, that of the
        classifier, and with ``compare`` ``scratch``, that of training from scratch, and ``gain`` over it: ``points``,
        and ``p``, the chance of a difference as large between equals.

    Raises:
        UserError: No labels, a mistake in the flags, or ``out`` holds something else.
        RunError: Training could not go on.
    """
    began = beginning()
    if given.data.folds:
        raise UserError(f"data.folds: got {given.data.folds}, but idmm train makes a single classifier; wanted null")
    if given.data.root is None and given.data.name is None:
        raise UserError("DIR: missing; wanted is the folder of your images, or the name of a dataset (--data.name)")
    if given.compare and given.way in ("auto", "scratch"):
        raise UserError("compare: there is no pretraining to compare; wanted beside it --way pretrain or --way joint")
    given = replace(given, data=resolve_name(given.data)[0])
    out = Path(given.out)
    kept, new = _kept(out, given), not out.exists()
    if "plan" not in kept:
        log.info("%s", _times(given, began))
    try:
        if "plan" not in kept:
            data, splits = _splits(given.data, out)
            counts = count(splits, data)
            kept |= {"data": parsing.plain(data), "counts": asdict(counts), "plan": asdict(choose(given, counts))}
        for line in kept["plan"]["why"]:
            log.info("%s", line)
        if "result" in kept:
            print(f"{out}: finished already, nothing to do")
        else:
            kept["result"] = _run(given, kept, out, (time.monotonic() - began) / 60)
            write_json(out / FILE, kept)
    except UserError:
        _cleared(out, new)
        raise
    if given.compare and "scratch" not in kept:
        kept["scratch"] = _stage(given, kept, "scratch", out / "scratch", given.minutes)
        kept["gain"] = compared(out, out / "scratch")
        write_json(out / FILE, kept)
    _say(given, kept)
    print(f"{out / FILE}; the classifier is {out / 'model.safetensors'}")
    return kept


def _times(given: TrainCommand, began: float) -> str:
    """Says how long it will take, and until when."""
    usual = " (the default; --minutes M)" if given.minutes == TrainCommand(out="x").minutes else ""
    ends = time.strftime("%H:%M", time.localtime(time.time() + began - time.monotonic() + 60 * given.minutes))
    more = ", and as long again for --compare" if given.compare else ""
    return f"{given.minutes:g} minutes{usual}, until about {ends}{more}"


def _cleared(out: Path, new: bool) -> None:
    """Removes what a refused command wrote where nothing was trained; ``new``: there was no such folder before."""
    if begun(out) or (out / "stage1").exists() or any((out / "last").glob("*.lock")):  # locked by another run
        return
    for name in (FILE, LABELS, *(("config.yaml", "log.txt", environment.FILE) if new else ())):
        (out / name).unlink(missing_ok=True)
    if new:
        shutil.rmtree(out / "last", ignore_errors=True)


# ---------------------------------------------------------------------- what there is, what to do
def _kept(out: Path, given: TrainCommand) -> dict:
    """What an earlier call of the same command found and did; ``compare`` may be asked for later."""
    asked = {key: value for key, value in parsing.plain(given).items() if key not in ("out", "compare")}
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
        raise UserError(*faults, f"out: '{out}' belongs to another command; name a new folder or mend the above")
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
    rows = [("path", "class", "split", "group")]
    for part, split in open_splits(whole, labelled=True).parts.items():
        groups = [""] * len(split) if split.groups is None else split.groups
        named = zip(split.names, split.labels, groups, strict=True)
        rows += [(name, split.classes[label], part, group) for name, label, group in named]
    write_csv(out / LABELS, (row if rows[1][3] else row[:3] for row in rows))
    return replace(data, labels=str(out / LABELS), val_fraction=0.0)


def count(splits: Splits, data: Data) -> Counts:
    """Counts what there is to learn from."""
    train = splits.train
    labelled = len(open_splits(tuned_on(data), labelled=True).train)
    some = np.linspace(0, len(train) - 1, min(LOOKED_AT, len(train))).astype(int)
    sides, channels = [0], bands_of(data.in_chans, data.bands)
    for i in some:
        with contextlib.suppress(BadImage):  # which the first stage names
            sides.append(min(probe(train.items[i], data.max_pixels, channels)[:2]))
    return Counts(len(train), labelled, len(train.classes), int(statistics.median(sides[1:] or sides)))


def tuned_on(data: Data) -> Data:
    """The images with labels, of which ``data.labelled`` may say that they are fewer."""
    return replace(data, subset=data.labelled or data.subset, labelled=None)


def choose(given: TrainCommand, counts: Counts) -> Plan:
    """Returns what to run on so many images, for so long (docs/minutes.md has the figures)."""
    each, way = counts.labelled / counts.classes, given.way
    what = f"{counts.images} images to train on, {counts.labelled} of them labelled ({each:.0f} a class)"
    if way != "auto":
        why = [f"{what}; --way {way}, as asked"]
    else:
        way, why = "scratch", [f"{what}; from scratch, which was never behind pretraining in runs of minutes"]
        if counts.images >= MANY_IMAGES * counts.labelled:
            why.append(
                "--way pretrain --compare, in another --out, measures whether learning from all images helps here"
            )
    given_model = parsing.plain(given.model)
    model = given_model if given.model.name else {**given_model, **BACKBONE}
    if not given.model.name:
        why.append(f"model: {model['name']} {json.dumps(model['kwargs'])}, a small ConvNet")
    size = _affordable(given, way, model, counts)
    if not given.size:
        own = f"the images' short side is {counts.side} px (median)"
        enough = f"; more would leave time for less than {PASSES} passes over them" if size < _sides(counts)[-1] else ""
        why.append(f"size: {size} px; {own}{enough}")
    return Plan(way, model, size, why)


def _sides(counts: Counts) -> list[int]:
    """The sizes that the images have pixels for; the smallest in any case."""
    return [side for side in SIZES if side <= counts.side] or [SIZES[0]]


def _affordable(given: TrainCommand, way: str, model: dict, counts: Counts) -> int:
    """The largest side, of the images' own at most, at which the first stage has time for :data:`PASSES` passes; where
    one is given, this. UserError where it is sure that there is no time for a single one."""
    seconds = max(1.0, 60 * given.minutes - AROUND)
    views, share = (counts.labelled, 1.0) if way == "scratch" else (counts.images * CROPS, SHARE)
    each = share * seconds / views  # for a single pass
    sides, took = [given.size] if given.size else _sides(counts), 0.0
    for side in reversed(sides):
        if PASSES * (took := _seconds(given, model, side)) <= each:
            return side
    if took > SURE * each:
        why = f"an epoch at {side} px takes about {brief(took * views)} s"
        wanted = (AROUND + seconds * took / each) / 60
        raise _refused(given, model, side, why, wanted, lambda *other: _seconds(given, *other) < each)
    return sides[0]


def _seconds(given: TrainCommand, model: dict, side: int) -> float:
    """Returns how long training on an image takes, forward and backward, by a few steps on black ones (seconds)."""
    import torch

    from idmm.calibrate import time_steps
    from idmm.distributed import pick_device
    from idmm.methods.finetune import Finetune
    from idmm.models.build import create_backbone

    chans = given.data.channels or 3
    more = {} if chans == 3 else {"in_chans": chans}
    backbone = create_backbone(model["name"], side, num_classes=2, **more, **model["kwargs"])
    batch = {"images": torch.zeros(TIMED, chans, side, side), "label": torch.zeros(TIMED, dtype=torch.int64)}
    method = Finetune(backbone, Augment())
    return time_steps(method, batch, pick_device(given.device), "fp32") / TIMED


# ---------------------------------------------------------------------- the runs
def _run(given: TrainCommand, kept: dict, out: Path, before: float) -> dict:
    """Runs the plan's stages in the time that there is, of which ``before`` (minutes) is gone; returns the classifier's
    result. How long each stage may take is written down when it begins, so that it can be taken up again."""
    way, spent = kept["plan"]["way"], kept.setdefault("minutes", {"before": before})
    left = given.minutes - spent["before"]
    if left <= 0:
        raise UserError(f"minutes: got {given.minutes:g}, but {duration(60 * before)} were gone before the first stage")
    spent.setdefault(way, left if way == "scratch" else SHARE * left)
    write_json(out / FILE, kept)
    if way == "scratch":
        return _stage(given, kept, way, out, left)
    first = out / "stage1"
    taken = _stage(given, kept, way, first, spent[way])["seconds"] / 60
    spent.setdefault("finetune", max(left - taken, LEAST * left))
    write_json(out / FILE, kept)
    return _stage(given, kept, "finetune", out, spent["finetune"], init=first)


def _stage(given: TrainCommand, kept: dict, name: str, folder: Path, minutes: float, init: Path | None = None) -> dict:
    """Runs a stage by its recipe, on the images and at the size of the plan."""
    stage = STAGES["pretrain" if name in ("pretrain", "joint") else "finetune"]
    data, size = Data(**kept["data"]), kept["plan"]["size"]
    free = [key.removeprefix("data.") for key in FREE if key.startswith("data.")]
    data = replace(data, **{name: getattr(given.data, name) for name in free})
    if stage.name == "finetune":
        data, own = tuned_on(data), {"train.size": size, "augment.flip": given.flip}
    else:
        data = data if name == "joint" else replace(data, labelled=None)
        own = {"views.size": size, "views.flip": given.flip, **LIGHT}
    images = kept["counts"]["labelled" if stage.name == "finetune" else "images"]
    shipped = recipe(stage.config, RECIPES[name])
    own["train.batch_size"] = suited_batch(shipped["train"]["batch_size"], images)
    own |= {"out": str(folder), "seed": given.seed, "train.minutes": minutes, "train.device": given.device}
    own |= {"init": str(init)} if init else {"model": kept["plan"]["model"]}
    config = merged(shipped, {**own, "data": parsing.plain(data)})
    log.info("%s: --config %s, %s at %d px", folder, RECIPES[name], duration(60 * minutes), size)
    began = time.monotonic()
    try:
        return stage.run(config)
    except TooShort as refused:  # said in the command's own minutes
        error = refused
    gone, model = (time.monotonic() - began) / 60, kept["plan"]["model"]
    own = not given.size and "result" not in kept  # else both sides of a comparison would differ in size, too

    def fits(other: dict, side: int) -> bool:
        less = 1 - _seconds(given, other, side) / _seconds(given, model, size)
        return less > 0 and error.wanted - less * error.seconds / 60 < minutes - own * gone

    if own and (smaller := _smaller(model, size, fits)):
        kept["plan"]["why"].append(f"size: {smaller} px, as at {size} px {error.why}")
        log.info("%s", kept["plan"]["why"][-1])
        kept["plan"]["size"], kept["minutes"][name] = smaller, minutes - gone
        kept["minutes"]["before"] += gone if name == "scratch" else 0.0
        write_json(Path(given.out) / FILE, kept)
        return _stage(given, kept, name, folder, minutes - gone, init)
    share = {"scratch": 1.0, "finetune": 1 - SHARE}.get(name, SHARE)
    whole = max(kept["minutes"]["before"] + error.wanted / share, given.minutes + 0.01)
    raise _refused(given, model, size, error.why, whole, fits)


def _smaller(model: dict, size: int, fits: Callable[[dict, int], bool]) -> int | None:
    return next((side for side in reversed(SIZES) if side < size and fits(model, side)), None)


def _refused(given: TrainCommand, model: dict, size: int, why: str, minutes: float, fits: Callable) -> UserError:
    """Returns what is said where there is no time for one epoch; ``fits``: whether a model would, at a size."""
    ways = [f"{math.ceil(100 * minutes) / 100:g}"]
    if smaller := _smaller(model, size, fits):
        ways.append(f"--size {smaller}")
    if given.model.name and fits(BACKBONE, size):
        ways.append("the small ConvNet that it takes without --model.name")
    return UserError(f"minutes: got {given.minutes:g}, but {why}; wanted at least {' or '.join(ways)}")


# ---------------------------------------------------------------------- what came of it
def _say(given: TrainCommand, kept: dict) -> None:
    """Prints the accuracy beside what it has to be read with."""
    result, plan = kept["result"], kept["plan"]
    low, high = result["top1_interval"]
    print(f"{plan['way']}: top-1 {result['top1']:.1f} % ({low:.1f} to {high:.1f}) on {result['test_size']} test images")
    floors = {"kNN of raw pixels": result.get("pixel_knn"), "the largest class every time": result["largest_class"]}
    for label, value in floors.items():
        if value is not None:
            print(f"  {label}: {value:.1f} %")
    if "gain" in kept:
        points, p = kept["gain"]["points"], kept["gain"]["p"]
        said = "pretraining helped" if points > 0 else "pretraining did harm"
        said = said if p < CHANCE else "no difference that could not be chance"
        seconds = kept["scratch"]["seconds"]
        print(f"  from scratch, in {seconds:.0f} s: {kept['scratch']['top1']:.1f} %")
        print(f"  the difference: {points:+.1f} points, {said} (McNemar's p = {p:.2g})")
        if seconds > UNEQUAL * 60 * given.minutes:
            print(f"  but that is more than its {given.minutes:g} minutes, on a busy machine: compare again later")
